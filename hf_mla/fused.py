"""Decode steps in few kernels: stand-ins for the forwards of a decoder's small modules.

A decode step of transformers' modules issues some 75 kernels a layer, most of them of 2 microseconds. In an absorbed
step of one new column on a GPU, in bf16 or fp16 and without gradients, these stand-ins compute the same with a third of
them; in any other call the class's own forward runs. They lie on instances whose forward is known (see `known`), go
through the projections' own modules, so that adapters, quantised weights and hooks on them work as ever, and look at
weights and hooks at every call.

    B rows of one column each, D hidden values, H heads, N = qk_nope_head_dim, R = kv_lora_rank, P = qk_rope_head_dim,
    V = v_head_dim, E routed experts
"""

import inspect
import weakref
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from . import kernels
from .absorb import absorbed_weights
from .attention import ActiveStep, PatchKey, absorbed_step
from .cache.layer import PagedMLALayer
from .known import is_silu, kind_of


@lru_cache
def _kernels() -> Any:
    """triton_fused, or None where Triton can't be imported."""
    try:
        from .kernels import triton_fused
    except Exception:  # broken binary packages raise anything
        return None
    return triton_fused


def runs_on(x: torch.Tensor) -> bool:
    """Whether the kernels are for tensors like `x`; tests put another rule here."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)


def _is_plain(x: torch.Tensor, *weights: Any) -> bool:
    """Whether `x` and all weights are ordinary tensors of one dtype and device that the kernels are for."""
    return (
        type(x) is torch.Tensor
        and runs_on(x)
        and all(
            type(w) in (nn.Parameter, torch.Tensor)
            and w.dtype == x.dtype
            and w.device == x.device
            and w.is_contiguous()
            for w in weights
        )
    )


def _is_bare(module: Any) -> bool:
    """Whether calling `module` would run its forward and nothing else, so that its work may be done without it."""
    forward = module.__dict__.get("forward")
    hooks = module._forward_hooks or module._forward_pre_hooks
    return not hooks and (forward is None or isinstance(forward, StandIn))


class StandIn:
    """Stands in for the forward of a module that has none of its own on the instance.

    Args:
        key: The decoder's key.
        module: The module, held weakly.
    """

    def __init__(self, key: PatchKey, module: nn.Module):
        self.key = key
        self.module = weakref.ref(module)

    def __reduce__(self) -> tuple:  # a weak reference can't be copied or pickled
        return type(self), (self.key, self.module())

    @property
    def __signature__(self) -> inspect.Signature:
        module: Any = self.module()
        return inspect.signature(type(module).forward.__get__(module))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The fused computation where the step allows it, else the class's forward."""
        module: Any = self.module()
        step = absorbed_step(self.key)
        if step is not None and _may_fuse(step):
            result = self.fused(module, step, *args, **kwargs)
            if result is not NotImplemented:
                return result
        return type(module).forward(module, *args, **kwargs)

    def fused(self, module: Any, step: ActiveStep, *args: Any, **kwargs: Any) -> Any:
        """What `forward` returns, or NotImplemented where the class's own has to run."""
        raise NotImplementedError


def _may_fuse(step: ActiveStep) -> bool:
    return (
        step.plan.extension.kv_lens.shape[1] == 1
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cuda")
        and not torch.compiler.is_compiling()
        and _kernels() is not None
    )


class FusedNorm(StandIn):
    """Of an RMSNorm: one kernel where torch takes six."""

    def fused(self, module: Any, step: ActiveStep, hidden_states: torch.Tensor) -> Any:
        """[..., D] -> [..., D]"""
        if not _is_plain(hidden_states, module.weight) or hidden_states.stride(-1) != 1:
            return NotImplemented
        return _kernels().rms_norm(hidden_states, module.weight, module.variance_epsilon)


class FusedMLP(StandIn):
    """Of a gated MLP: the gate and the product in one kernel."""

    def fused(self, module: Any, step: ActiveStep, x: torch.Tensor) -> Any:
        """[..., D] -> [..., D]"""
        if not _is_plain(x) or not is_silu(module.act_fn) or not _is_bare(module.act_fn):
            return NotImplemented
        gate, up = module.gate_proj(x), module.up_proj(x)
        if not _is_plain(gate) or up.dtype != gate.dtype or up.shape != gate.shape:
            return module.down_proj(module.act_fn(gate) * up)
        return module.down_proj(_kernels().silu_mul(gate, up))


class FusedSoftmaxRouter(StandIn):
    """Of DeepSeek-V2's router: softmax, groups, top-k and scale in one kernel."""

    def fused(self, module: Any, step: ActiveStep, hidden_states: torch.Tensor) -> Any:
        """[..., D] -> logits [B, E], weights [B, k], experts [B, k]"""
        groups = {"greedy": (1, 1), "group_limited_greedy": (module.num_group, module.topk_group)}
        if not _is_plain(hidden_states) or module.topk_method not in groups:
            return NotImplemented
        logits = _router_logits(module, hidden_states)
        scale = module.routed_scaling_factor
        return logits, *_kernels().route(logits, None, module.top_k, scale, *groups[module.topk_method])


class FusedSigmoidRouter(StandIn):
    """Of DeepSeek-V3's router: groups, top-k, weights and scale in one kernel.

    The sigmoid stays torch's: experts are chosen by its very values and the bias, so a last bit could change a choice.
    """

    def fused(self, module: Any, step: ActiveStep, hidden_states: torch.Tensor) -> Any:
        """[..., D] -> logits [B, E], weights [B, k], experts [B, k]"""
        bias = module.e_score_correction_bias
        if not _is_plain(hidden_states) or type(bias) not in (nn.Parameter, torch.Tensor) or not bias.is_contiguous():
            return NotImplemented
        logits = _router_logits(module, hidden_states)
        groups = module.num_group, module.topk_group
        weights, chosen = _kernels().route(
            logits.sigmoid(), bias, module.top_k, module.routed_scaling_factor, *groups, module.norm_topk_prob
        )
        return logits, weights, chosen


def _router_logits(module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    rows = hidden_states.view(-1, module.hidden_dim)
    return nn.functional.linear(rows.type(torch.float32), module.weight.type(torch.float32))


class FusedAttention(StandIn):
    """Of an MLA module: norm of the latents, rope and the write to the pages in one kernel, and no copies."""

    @staticmethod
    def angles(module: Any, position_embeddings: Any) -> tuple[str, torch.Tensor, torch.Tensor]:
        """The flavour of rope, cosines and sines [B or 1, 1, P / 2 or P]."""
        raise NotImplementedError

    def fused(
        self, module: Any, step: ActiveStep, *args: Any, hidden_states: Any = None, position_embeddings: Any = None,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        """[B, 1, D] -> ([B, 1, D], None)"""
        layer = self._layer(module, step, kwargs)
        norm = module.kv_a_layernorm
        if args or layer is None or not _is_plain(hidden_states, norm.weight) or not _is_bare(norm):
            return NotImplemented
        if kind_of(norm) != "norm" or hidden_states.dtype != layer.layout.dtype:
            return NotImplemented
        rope, cos, sin = self.angles(module, position_embeddings)
        rows, rope_dim = hidden_states.shape[0], module.qk_rope_head_dim
        wanted = rope_dim if rope == "half" else rope_dim // 2
        if rope_dim % 2 or cos.shape[-1] < wanted or cos.shape[0] not in (1, rows) or cos.device != layer.device:
            return NotImplemented
        if module.q_lora_rank is None:
            q = module.q_proj(hidden_states)
        else:
            q = module.q_b_proj(module.q_a_layernorm(module.q_a_proj(hidden_states)))
        compressed = module.kv_a_proj_with_mqa(hidden_states)
        if not _is_plain(q) or not _is_plain(compressed) or not q.dtype == compressed.dtype == layer.layout.dtype:
            return NotImplemented
        q = q.reshape(rows, -1, module.qk_head_dim)
        layer.grow(step.plan.num_blocks)
        base = step.plan.base_of(module.layer_idx)
        q_pe = _kernels().rope_norm_write(
            q, compressed.reshape(rows, -1), norm.weight, norm.variance_epsilon, cos[:, 0], sin[:, 0], rope,
            layer.pages, step.plan.on(layer.device).slot_mapping, base,
        )  # fmt: skip
        layer.length += 1
        out = self._attend(module, step, layer, q, q_pe, base)
        return module.o_proj(out.view(rows, 1, -1)), None

    @staticmethod
    def _layer(module: Any, step: ActiveStep, kwargs: dict) -> Any:
        """The cache's layer where this call is about the step's cache and the layer is as the module's, or None."""
        if not any(kwargs.get(name) is step.cache for name in ("cache", "past_key_values")):
            return None
        layer = step.cache.layers[module.layer_idx]
        if not isinstance(layer, PagedMLALayer) or layer.layout is None:
            return None
        sizes = layer.layout.kv_lora_rank, layer.layout.qk_rope_head_dim
        return layer if sizes == (module.kv_lora_rank, module.qk_rope_head_dim) else None

    @staticmethod
    def _attend(
        module: Any, step: ActiveStep, layer: Any, q: torch.Tensor, q_pe: torch.Tensor, base: torch.Tensor | None
    ) -> torch.Tensor:
        """q [B, H, N + P] and its rotated part [B, H, P] -> [B, H, V]; the products read and write in place."""
        rows, heads, _ = q.shape
        nope, rank = module.qk_nope_head_dim, module.kv_lora_rank
        weights = absorbed_weights(module.kv_b_proj, nope, module.v_head_dim, rank, q)
        q_latent = torch.bmm(q[..., :nope].transpose(0, 1), weights.w_uk).transpose(0, 1)
        plan = step.plan.decode_plan(layer.layout, heads, layer.device)
        o_latent, _ = kernels.decode(
            plan, q_latent.unsqueeze(1), q_pe.unsqueeze(1), layer.pages, module.scaling, base
        )
        out = q.new_empty(rows, heads, module.v_head_dim)
        torch.bmm(o_latent[:, 0].transpose(0, 1), weights.w_uv.transpose(1, 2), out=out.transpose(0, 1))
        return out if weights.bias_v is None else out + weights.bias_v


class FusedComplexAttention(FusedAttention):
    """Of DeepSeek-V2, which rotates by complex factors."""

    @staticmethod
    def angles(module: Any, position_embeddings: Any) -> tuple[str, torch.Tensor, torch.Tensor]:
        """From complex factors [B or 1, 1, P / 2]."""
        return "complex", position_embeddings.real, position_embeddings.imag


class FusedRealAttention(FusedAttention):
    """Of DeepSeek-V3 and those built on it, which rotate by cosines and sines."""

    @staticmethod
    def angles(module: Any, position_embeddings: Any) -> tuple[str, torch.Tensor, torch.Tensor]:
        """From (cosines, sines), each [B or 1, 1, P]."""
        return "interleave" if module.config.rope_interleave else "half", *position_embeddings


STAND_INS: dict[str, type[StandIn]] = {
    "norm": FusedNorm,
    "mlp": FusedMLP,
    "router, softmax": FusedSoftmaxRouter,
    "router, sigmoid": FusedSigmoidRouter,
    "attention, complex rope": FusedComplexAttention,
    "attention, real rope": FusedRealAttention,
}


def bind(decoder: nn.Module, key: PatchKey) -> None:
    """Put stand-ins on the decoder's modules that are known and have no forward on the instance (a hook's, say)."""
    for module in decoder.modules():
        stand_in = STAND_INS.get(kind_of(module) or "")
        if stand_in is not None and "forward" not in module.__dict__:
            module.__dict__["forward"] = stand_in(key, module)


def unbind(decoder: nn.Module) -> None:
    """Take them off again."""
    for module in decoder.modules():
        if isinstance(module.__dict__.get("forward"), StandIn):
            del module.__dict__["forward"]
