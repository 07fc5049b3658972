"""Steps over a paged cache in few kernels: what stands in for the forwards of a decoder's modules.

A decode step of transformers' modules issues some 75 kernels a layer, most of them of 2 microseconds, and a prompt's
pass spends more time on reading and writing all that lies between the products than on these. In a step over a paged
cache on a GPU, in bf16 or fp16 and without gradients, these stand-ins compute the same with a third of them; in any
other call the class's own forward runs, as it does for attention in all but absorbed steps of one new column. They lie
on instances whose forward is known (see `known`), go through the projections' own modules, so that adapters, quantised
weights and hooks on them work as ever, and look at weights and hooks at every call.

    B rows, S new columns each, D hidden values, H heads, N = qk_nope_head_dim, R = kv_lora_rank, P = qk_rope_head_dim,
    V = v_head_dim, E routed experts
"""

from typing import Any

import torch
from torch import nn

from . import kernels
from .absorb import absorbed_weights
from .attention import ActiveStep, PatchKey
from .cache.layer import PagedMLALayer
from .known import is_silu, kind_of
from .standin import StandIn, is_bare, is_plain, triton_kernels

# torch.mm's out_dtype, of CUDA devices and torch 2.8.
MULTIPLIES_INTO_FLOAT32 = "dtype" in torch.ops.aten.mm.overloads()

# Rows from which on a product in float32 costs more than taking its weight apart.
MANY_ROWS = 2048


class FusedNorm(StandIn):
    """Of an RMSNorm: one kernel where torch takes six."""

    def fused(self, module: Any, step: ActiveStep, hidden_states: torch.Tensor) -> Any:
        """[..., D] -> [..., D]"""
        if not is_plain(hidden_states, module.weight) or hidden_states.stride(-1) != 1:
            return NotImplemented
        return triton_kernels().fused.rms_norm(hidden_states, module.weight, module.variance_epsilon)


class FusedMLP(StandIn):
    """Of a gated MLP: the gate and the product in one kernel."""

    def fused(self, module: Any, step: ActiveStep, x: torch.Tensor) -> Any:
        """[..., D] -> [..., D]"""
        if not is_plain(x) or not is_silu(module.act_fn) or not is_bare(module.act_fn):
            return NotImplemented
        gate, up = module.gate_proj(x), module.up_proj(x)
        if not is_plain(gate) or up.dtype != gate.dtype or up.shape != gate.shape:
            return module.down_proj(module.act_fn(gate) * up)
        return module.down_proj(triton_kernels().fused.silu_mul(gate, up))


class FusedSoftmaxRouter(StandIn):
    """Of DeepSeek-V2's router: softmax, groups, top-k and scale in one kernel."""

    def fused(self, module: Any, step: ActiveStep, hidden_states: torch.Tensor) -> Any:
        """[..., D] -> logits [B * S, E], weights [B * S, k], experts [B * S, k]"""
        groups = {"greedy": (1, 1), "group_limited_greedy": (module.num_group, module.topk_group)}
        if not is_plain(hidden_states) or module.topk_method not in groups:
            return NotImplemented
        logits = _router_logits(module, hidden_states)
        scale = module.routed_scaling_factor
        return logits, *triton_kernels().route.route(logits, None, module.top_k, scale, *groups[module.topk_method])


class FusedSigmoidRouter(StandIn):
    """Of DeepSeek-V3's router: groups, top-k, weights and scale in one kernel.

    The sigmoid stays torch's: experts are chosen by its very values and the bias, so a last bit could change a choice.
    """

    def fused(self, module: Any, step: ActiveStep, hidden_states: torch.Tensor) -> Any:
        """[..., D] -> logits [B * S, E], weights [B * S, k], experts [B * S, k]"""
        bias = module.e_score_correction_bias
        if not is_plain(hidden_states) or type(bias) not in (nn.Parameter, torch.Tensor) or not bias.is_contiguous():
            return NotImplemented
        logits = _router_logits(module, hidden_states)
        groups = module.num_group, module.topk_group
        weights, chosen = triton_kernels().route.route(
            logits.sigmoid(), bias, module.top_k, module.routed_scaling_factor, *groups, module.norm_topk_prob
        )
        return logits, weights, chosen


def _router_logits(module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """[B * S, E] float32. Products of bf16 are exact in float32, so where the weight is no wider nothing is cast."""
    rows, weight = hidden_states.view(-1, module.hidden_dim), module.weight
    if rows.is_cuda and MULTIPLIES_INTO_FLOAT32:
        if is_plain(rows, weight):
            return torch.mm(rows, weight.t(), out_dtype=torch.float32)
        wide = is_plain(rows) and type(weight) in (nn.Parameter, torch.Tensor) and weight.device == rows.device
        if wide and len(rows) >= MANY_ROWS and (rows.dtype, weight.dtype) == (torch.bfloat16, torch.float32):
            parts = torch.cat(in_bfloat16(weight))
            return torch.mm(rows, parts.t(), out_dtype=torch.float32).unflatten(-1, (3, -1)).sum(1)
    return nn.functional.linear(rows.type(torch.float32), weight.type(torch.float32))


def in_bfloat16(x: torch.Tensor) -> list[torch.Tensor]:
    """The three terms in bf16 that float32 x is the sum of: tensor cores multiply those, and not float32."""
    parts = []
    for _ in range(3):
        parts.append(x.bfloat16())
        x = x - parts[-1]
    return parts


class FusedAttention(StandIn):
    """Of an MLA module: norm of the latents, rope and the write to the pages in one kernel, and no copies."""

    decodes_only = True

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
        if args or layer is None or not is_plain(hidden_states, norm.weight) or not is_bare(norm):
            return NotImplemented
        dtype = layer.layout.compute_dtype(hidden_states.dtype)
        if kind_of(norm) != "norm" or hidden_states.dtype != dtype or position_embeddings is None:
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
        if not is_plain(q) or not is_plain(compressed) or not q.dtype == compressed.dtype == dtype:
            return NotImplemented
        q = q.reshape(rows, -1, module.qk_head_dim)
        layer.grow(step.plan.num_blocks)
        base = step.plan.base_of(module.layer_idx)
        q_pe = triton_kernels().fused.rope_norm_write(
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
        if not kernels.triton_serves(layer.device, layer.layout.dtype):
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
        o_latent, _ = kernels.decode(plan, q_latent.unsqueeze(1), q_pe.unsqueeze(1), layer.pages, module.scaling, base)
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


class FusedLayer(StandIn):
    """Of a decoder layer: residuals are added in the kernel of the norm that follows, or of the experts' sum."""

    def fused(self, module: Any, step: ActiveStep, *args: Any, **kwargs: Any) -> Any:
        """[B, S, D] -> [B, S, D]"""
        norm = module.post_attention_layernorm
        if len(args) != 1 or kind_of(norm) != "norm" or not is_bare(norm) or not is_plain(args[0], norm.weight):
            return NotImplemented
        residual = args[0]
        attended, _ = module.self_attn(hidden_states=module.input_layernorm(residual), **kwargs)
        if not is_plain(attended) or attended.dtype != residual.dtype:
            residual = residual + attended
            return residual + module.mlp(module.post_attention_layernorm(residual))
        residual, normed = triton_kernels().fused.add_rms_norm(residual, attended, norm.weight, norm.variance_epsilon)
        if kind_of(module.mlp) != "mixture" or not is_bare(module.mlp):
            return residual + module.mlp(normed)
        return self._add_mixture(module.mlp, residual, normed)

    @staticmethod
    def _add_mixture(mixture: Any, residual: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        """residual + (routed + shared experts of normed), all [B, S, D]."""
        _, weights, experts = mixture.gate(normed)
        routed = mixture.experts(normed.view(-1, normed.shape[-1]), experts, weights).view(normed.shape)
        shared = mixture.shared_experts(normed)
        if not routed.dtype == shared.dtype == residual.dtype:
            return residual + (routed + shared)
        return triton_kernels().fused.add(residual, routed, shared)


STAND_INS: dict[str, type[StandIn]] = {
    "norm": FusedNorm,
    "mlp": FusedMLP,
    "router, softmax": FusedSoftmaxRouter,
    "router, sigmoid": FusedSigmoidRouter,
    "attention, complex rope": FusedComplexAttention,
    "attention, real rope": FusedRealAttention,
    "layer": FusedLayer,
}


def bind(decoder: nn.Module, key: PatchKey) -> None:
    """Put stand-ins on the decoder's modules that are known and have no forward on the instance (a hook's, say)."""
    for module in decoder.modules():
        stand_in = STAND_INS.get(kind_of(module) or "")
        if stand_in is not None and "forward" not in module.__dict__:
            module.__dict__["forward"] = stand_in(key, module)


def unbind(decoder: nn.Module) -> None:
    """Take them off again, also from below hooks that accelerate put over them."""
    for module in decoder.modules():
        if isinstance(module.__dict__.get("forward"), StandIn):
            del module.__dict__["forward"]
        if isinstance(module.__dict__.get("_old_forward"), StandIn):  # accelerate, hooked in after the patch, has it
            module.__dict__["_old_forward"] = type(module).forward.__get__(module)
