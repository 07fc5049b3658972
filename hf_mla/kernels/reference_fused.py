"""What the kernels of `triton_fused` and `triton_route` compute, in plain torch and in any dtype; the tests' oracle.

Shapes as there: T tokens, D values, H heads, R = kv_lora_rank, P = qk_rope_head_dim, E experts, k of them a token.
"""

import torch

from .reference import write_latents


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of x [..., D] with weight [D]; float32 inside, float64 for float64."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rope: str) -> torch.Tensor:
    """Rotate x [T, ..., P] by cos and sin [T or 1, P / 2 or P] in the flavour `rope` of `triton_fused.ROPES`."""
    pairs = x.shape[-1] // 2
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    shape = (-1, *(1 for _ in x.shape[1:-1]), pairs)
    first, second = (wide[..., :pairs], wide[..., pairs:]) if rope == "half" else (wide[..., 0::2], wide[..., 1::2])
    cos1, sin1 = cos[:, :pairs].to(wide).reshape(shape), sin[:, :pairs].to(wide).reshape(shape)
    cos2, sin2 = cos1, sin1
    if rope == "half":
        cos2, sin2 = cos[:, pairs:].to(wide).reshape(shape), sin[:, pairs:].to(wide).reshape(shape)
    rotated = first * cos1 - second * sin1, second * cos2 + first * sin2
    joined = torch.stack(rotated, -1).flatten(-2) if rope == "complex" else torch.cat(rotated, -1)
    return joined.to(x.dtype)


def rope_norm_write(
    q: torch.Tensor,
    compressed_kv: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rope: str,
    pages: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """As `triton_fused.rope_norm_write`; returns q_pe [T, H, P]."""
    rank = weight.shape[0]
    ckv, k_pe = compressed_kv[:, :rank], compressed_kv[:, rank:]
    write_latents(pages, rms_norm(ckv, weight, eps), rotate(k_pe, cos, sin, rope), slot_mapping)
    return rotate(q[..., q.shape[-1] - k_pe.shape[-1] :], cos, sin, rope)


def route(
    scores: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    scale: float,
    groups: int = 1,
    groups_kept: int = 1,
    renormalise: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `triton_route.route`, for scores [T, E]: weights [T, k] and experts [T, k]."""
    rank = scores if bias is None else scores + bias
    weighing = scores.softmax(-1) if bias is None else scores
    in_groups = rank.unflatten(1, (groups, -1))
    group_rank = in_groups.amax(-1) if bias is None else in_groups.topk(2, -1).values.sum(-1)
    kept = torch.zeros_like(group_rank, dtype=torch.bool).scatter(1, group_rank.topk(groups_kept, -1).indices, True)
    rank = in_groups.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(1)
    experts = rank.topk(top_k, -1).indices
    weights = weighing.gather(1, experts)
    if renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scale, experts
