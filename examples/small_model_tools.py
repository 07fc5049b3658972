"""What training the small model needs beside its data: load balance, guided attention, dropout, mixed precision.

Shape legend: N rows, T tokens of a row, H heads, M attention weights of a lesson.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from small_model_data import Rows
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, dropout
from transformers import AttentionInterface, AttentionMaskInterface, DeepseekV2ForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask


@dataclass
class Routing:
    """What the routers did in the last forward: the loss that evens the load out, and the load of each expert."""

    losses: list[torch.Tensor] = field(default_factory=list)
    loads: list[torch.Tensor] = field(default_factory=list)

    def watch(self, model: DeepseekV2ForCausalLM) -> None:
        """Hooks the routers (those layers' `mlp.gate`)."""
        for layer in model.model.layers:
            if hasattr(layer.mlp, "gate"):
                layer.mlp.gate.register_forward_hook(self._seen)

    def _seen(self, gate: torch.nn.Module, args: Any, output: tuple[torch.Tensor, ...]) -> None:
        if not gate.training:
            return
        logits, _, indices = output
        chosen = torch.zeros_like(logits).scatter_(1, indices, 1.0).mean(0)
        # the product of Switch Transformers' load loss: least when every expert is chosen and wanted alike
        self.losses.append((chosen * logits.float().softmax(-1).mean(0)).sum() * len(chosen) / indices.shape[1])
        self.loads.append(chosen.detach() / indices.shape[1])

    def take(self) -> torch.Tensor:
        """Mean loss since the last call; forgets it."""
        loss = torch.stack(self.losses).mean()
        self.losses.clear()
        return loss

    def lowest_load(self) -> float:
        """Least share of the tokens that any expert got, in the last forward (even: 1 / experts)."""
        return torch.stack(self.loads).min().item() if self.loads else 0.0


@dataclass
class Guidance:
    """Teaches the first head of some layers where to look, by the lessons that rows bring along.

    A lesson's loss is the cross entropy of the head's attention against the token it should look at; the other heads
    stay free. Supervised attention (Liu et al., 2016), here to break the tie that keeps two heads that depend on
    each other from being learnt.
    """

    NAME = "sdpa_seen"
    seen: dict[int, tuple[torch.Tensor, torch.Tensor, float]] = field(default_factory=dict)

    def watch(self, model: DeepseekV2ForCausalLM) -> None:
        """Has `model` attend by sdpa through this object, which keeps the first head's queries and keys [N, T, D]."""

        def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> tuple[Any, None]:
            if module.training:
                self.seen[module.layer_idx] = query[:, 0], key[:, 0], options["scaling"]
            return sdpa_attention_forward(module, query, key, value, mask, **options)

        AttentionInterface.register(self.NAME, attend)
        AttentionMaskInterface.register(self.NAME, sdpa_mask)
        model.set_attn_implementation(self.NAME)

    def take(self, parts: Iterable[Rows]) -> torch.Tensor:
        """Mean loss of each lesson, summed; `parts` are the rows of the last forward, in order. Forgets it."""
        losses, start = [], 0
        for rows in parts:
            stop = start + len(rows.ids)
            for lesson in rows.lessons:
                query, key, scale = self.seen[lesson.layer]
                chosen = query[start:stop].gather(1, lesson.queries[..., None].expand(-1, -1, query.shape[-1]))
                scores = chosen.float() @ key[start:stop].float().mT * scale  # [N, M, T]
                later = torch.arange(scores.shape[-1], device=scores.device) > lesson.queries[..., None]
                scores = scores.masked_fill(later, -torch.inf)
                losses.append(cross_entropy(scores.flatten(0, 1), lesson.keys.flatten()))
            start = stop
        self.seen.clear()
        return torch.stack(losses).sum()


def add_dropout(model: DeepseekV2ForCausalLM, rate: float) -> None:
    """Drops from the embeddings and from what every sublayer adds to the stream; the class itself offers none."""
    if not rate:
        return
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(lambda module, args, out: dropout(out, rate, module.training))
        layer.mlp.register_forward_hook(lambda module, args, out: dropout(out, rate, module.training))
    model.model.embed_tokens.register_forward_hook(lambda module, args, out: dropout(out, rate, module.training))


class MixedOptimizer:
    """Muon for the matrices, AdamW for embeddings, routers and norms; on float32 copies of the weights.

    The weights themselves stay in the dtype they are shipped in (bf16 on a GPU): autocast would leave the experts'
    grouped products in float32, which has no CUDA kernel. Muon (Jordan et al., 2024) finds recall in far fewer steps
    than AdamW alone.
    """

    MUON_LR = 0.02
    MUON_DECAY = 0.01
    MOMENTUM = 0.95

    def __init__(self, model: torch.nn.Module, lr: float, device: str) -> None:
        self.lr = lr
        self.weights: list[torch.Tensor] = []
        self.masters: list[torch.Tensor] = []
        adam: dict[float, list[torch.Tensor]] = {0.0: [], 0.1: []}
        by_shape: dict[torch.Size, list[torch.Tensor]] = {}
        for name, weight in model.named_parameters():
            master = weight.detach().float().clone()
            self.weights.append(weight)
            self.masters.append(master)
            if weight.ndim == 1:
                adam[0.0].append(master)
            elif "embed" in name or "lm_head" in name or name.endswith("mlp.gate.weight"):
                adam[0.1].append(master)
            else:
                by_shape.setdefault(weight.shape, []).append(master)
        self.matrices = [(group, torch.zeros_like(torch.stack(group))) for group in by_shape.values()]
        groups = [{"params": params, "weight_decay": decay} for decay, params in adam.items()]
        self.adamw = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=device.startswith("cuda"))

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """One clipped step with `scale` (0..1) times the peak learning rates; clears the gradients."""
        for master, weight in zip(self.masters, self.weights, strict=True):
            master.grad = weight.grad.float()
            weight.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        for group in self.adamw.param_groups:
            group["lr"] = self.lr * scale
        self.adamw.step()
        for masters, momentum in self.matrices:
            grads = torch.stack([master.grad for master in masters])
            momentum.lerp_(grads, 1 - self.MOMENTUM)
            update = orthogonalise(grads.lerp(momentum, self.MOMENTUM))
            rate = self.MUON_LR * scale
            size = max(1.0, update.shape[-2] / update.shape[-1]) ** 0.5
            torch._foreach_mul_(masters, 1 - rate * self.MUON_DECAY)
            torch._foreach_add_(masters, list(update.float().unbind()), alpha=-rate * size)
        torch._foreach_copy_(self.weights, self.masters)


def orthogonalise(matrices: torch.Tensor) -> torch.Tensor:
    """Nearest semi-orthogonal matrices, roughly, to [..., rows, columns]: five Newton-Schulz steps as in Muon."""
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.mT if tall else x


def choose_experts(model: DeepseekV2ForCausalLM, ids: torch.Tensor) -> str:
    """grouped_mm if it gives the gradients of the plain loop over experts here (ids [N, T]), else the loop."""
    model.eval()
    gradients: dict[str, torch.Tensor] = {}
    for name in ("eager", "grouped_mm"):
        try:
            model.set_experts_implementation(name)
            model.zero_grad()
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
            cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
            gradients[name] = torch.cat([weight.grad.float().flatten() for weight in model.parameters()])
        except (RuntimeError, NotImplementedError, ValueError) as error:
            print(f"experts {name}: {str(error).splitlines()[0]}", flush=True)
    model.zero_grad()
    model.train()
    best = "eager"
    if len(gradients) == 2:
        error = (gradients["grouped_mm"] - gradients["eager"]).norm() / gradients["eager"].norm()
        print(f"experts: gradients of grouped_mm differ from the loop's by {error:.4f} of their norm", flush=True)
        best = "grouped_mm" if error < 0.2 else "eager"  # rounding moves a few tokens to other experts
    model.set_experts_implementation(best)
    return best


@contextmanager
def safe_attention() -> Iterator[None]:
    """Leaves cuDNN out: not every version has the backward for keys of 192 and values of 128."""
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        yield
