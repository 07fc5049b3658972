"""Absorbed projections (DeepSeek-V2, arXiv 2405.04434): attention on latents, without expanding keys and values.

    q_nope [B, S, H, nope] -> q_latent [B, S, H, R]      with W_UK [H, nope, R]
    o_latent [B, S, H, R]  -> out [B, S, H, v]           with W_UV [H, v, R]

kv_b_proj maps a latent to H x (nope + v) values, so its weight [H * (nope + v), R] holds W_UK and W_UV interleaved by
head. Since k_nope = W_UK c, the score q_nope . k_nope is (W_UK^T q_nope) . c; since v = W_UV c, the output
sum_t p_t v_t is W_UV sum_t p_t c_t.
"""

from typing import Any, NamedTuple

import torch
from torch import nn


class AbsorbedWeights(NamedTuple):
    """W_UK [H, nope, R], W_UV [H, v, R] and the value part of kv_b_proj's bias [H, v], or None."""

    w_uk: torch.Tensor
    w_uv: torch.Tensor
    bias_v: torch.Tensor | None


def has_one_weight(kv_b_proj: nn.Module) -> bool:
    """Whether the projection is one linear map for all rows of a batch, as far as its hooks tell.

    PEFT gives each row an adapter of its own (`adapter_names`) by hooks that add keywords to the call; then there is
    no weight to absorb.
    """
    return not kv_b_proj._forward_pre_hooks_with_kwargs


def _spoken_weight(linear: Any, weight: torch.Tensor) -> torch.Tensor | None:
    """[out, rank] that a quantised layer says its weight stands for, or None where it doesn't say.

    Better than what it makes of the identity: layers that quantise their inputs, too, round or clip that.
    """
    if type(linear) is nn.Linear:  # with a weight of another class, torchao's say
        return weight.dequantize() if type(weight).dequantize is not torch.Tensor.dequantize else None
    kind = f"{type(linear).__module__}.{type(linear).__name__}"
    if kind == "transformers.integrations.finegrained_fp8.FP8Linear" and weight.dtype == torch.float8_e4m3fn:
        scale = linear.weight_scale_inv.float()
        if scale.ndim == 2:  # of blocks of the weight, the last ones of which may be smaller
            (rows, columns), block = weight.shape, linear.block_size
            scale = scale.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
        return weight.float() * scale
    return None


def _dense_weight(linear: Any, rank: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(weight [out, rank], bias [out] or None) of any linear map: a view where it is a plain Linear.

    A Linear that is quantised, adapted, offloaded or hooked is asked for its weight, or else what it does to the
    identity, at every call: that can't go stale, whatever is loaded, merged or switched in the meantime.
    """
    weight = getattr(linear, "weight", None)
    hooked = linear._forward_hooks or linear._forward_pre_hooks or "forward" in linear.__dict__
    if weight is not None and not hooked and weight.device == like.device:
        plain = type(linear) is nn.Linear and type(weight) in (nn.Parameter, torch.Tensor)
        if plain and weight.dtype == like.dtype:
            return weight, linear.bias
        spoken = _spoken_weight(linear, weight)
        if spoken is not None:
            return spoken.to(like.dtype), linear.bias if linear.bias is None else linear.bias.to(like.dtype)
    # A row of zeros tells the bias, whoever adds it: an adapter may where the layer below has none.
    rows = torch.cat([like.new_zeros(1, rank), torch.eye(rank, dtype=like.dtype, device=like.device)])
    bias, columns = linear(rows).split([1, rank])
    return (columns - bias).t(), bias[0]


def absorbed_weights(kv_b_proj: nn.Module, nope: int, v: int, rank: int, like: torch.Tensor) -> AbsorbedWeights:
    """Split kv_b_proj into its key and value halves.

    Args:
        kv_b_proj: The up-projection, rank -> H * (nope + v).
        nope: qk_nope_head_dim.
        v: v_head_dim.
        rank: kv_lora_rank.
        like: A tensor of the dtype and device to compute in.

    Returns:
        Views of the weight where kv_b_proj is a plain Linear. The key half of a bias adds the same to every score of
        a query, which softmax ignores, so it isn't returned.
    """
    weight, bias = _dense_weight(kv_b_proj, rank, like)
    per_head = weight.unflatten(0, (-1, nope + v))
    bias_v = None if bias is None else bias.unflatten(0, (-1, nope + v))[:, nope:]
    return AbsorbedWeights(per_head[:, :nope], per_head[:, nope:], bias_v)


def absorb_query(q_nope: torch.Tensor, weights: AbsorbedWeights) -> torch.Tensor:
    """q_nope [B, H, S, nope] -> q_latent [B, S, H, R] (a view of [H, B * S, R])."""
    batch, heads, length, nope = q_nope.shape
    rows = q_nope.permute(1, 0, 2, 3).reshape(heads, batch * length, nope)
    return torch.bmm(rows, weights.w_uk).view(heads, batch, length, -1).permute(1, 2, 0, 3)


def project_back(o_latent: torch.Tensor, weights: AbsorbedWeights) -> torch.Tensor:
    """o_latent [B, S, H, R] -> out [B, S, H, v]."""
    batch, length, heads, rank = o_latent.shape
    rows = o_latent.permute(2, 0, 1, 3).reshape(heads, batch * length, rank)
    out = torch.bmm(rows, weights.w_uv.transpose(1, 2)).view(heads, batch, length, -1).permute(1, 2, 0, 3)
    return out if weights.bias_v is None else out + weights.bias_v
