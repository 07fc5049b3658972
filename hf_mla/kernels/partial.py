"""Attention over a part of the keys, with the log-sum-exp that parts are merged by.

    B rows, H heads, Sq queries, Sk keys, D = qk_nope_head_dim + qk_rope_head_dim, V = v_head_dim

The kernels are those that torch's own scaled_dot_product_attention runs; called by name, they also return the
log-sum-exp.
"""

from __future__ import annotations

import torch
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention, can_use_efficient_attention

# What the scores of one piece of queries may take where they are written out, in plain torch.
SCORE_BYTES = 64 << 20


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sm_scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend query [B, H, Sq, D] to key [B, H, Sk, D] and value [B, H, Sk, V], of one dtype and device.

    With `causal`, Sq is Sk and a query sees the keys up to its own. Returns out [B, H, Sq, V], float32 where the
    dtype is no wider, and lse [B, H, Sq] float32, natural log.

    Raises:
        ValueError: `causal` with Sq != Sk, or no keys.
    """
    if causal and query.shape[2] != key.shape[2]:
        raise ValueError(f"causal needs as many keys as queries, got {key.shape[2]} and {query.shape[2]}")
    if not key.shape[2]:
        raise ValueError("key has no tokens; allowed: at least one")
    params = SDPAParams(query, key, value, None, 0.0, causal, False)
    if query.is_cuda and can_use_cudnn_attention(params):
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, causal, False, scale=sm_scale
        )
    elif query.is_cuda and can_use_efficient_attention(params):
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True, 0.0, causal, scale=sm_scale
        )
    else:
        return _plain(query, key, value, sm_scale, causal)
    rows, heads, queries, _ = query.shape
    # One kernel pads its lse to a multiple of 32 queries, the other adds a dimension of one.
    return out.float(), lse.reshape(rows, heads, -1)[..., :queries].float()


def _plain(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sm_scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    work = torch.float64 if query.dtype == torch.float64 else torch.float32
    key, value = key.to(work), value.to(work)
    rows, heads, queries, _ = query.shape
    out = query.new_empty(rows, heads, queries, value.shape[-1], dtype=work)
    lse = query.new_empty(rows, heads, queries, dtype=torch.float32)
    size = max(1, SCORE_BYTES // (rows * heads * key.shape[2] * work.itemsize))
    for start in range(0, queries, size):
        part = slice(start, min(start + size, queries))
        seen = part.stop if causal else key.shape[2]
        scores = torch.matmul(query[:, :, part].to(work) * sm_scale, key[:, :, :seen].transpose(2, 3))
        if causal:
            later = torch.arange(seen, device=key.device) > torch.arange(part.start, seen, device=key.device)[:, None]
            scores.masked_fill_(later, float("-inf"))
        lse[:, :, part] = scores.logsumexp(-1)
        out[:, :, part] = torch.matmul(scores.softmax(-1), value[:, :, :seen])
    return out, lse


def merge(
    out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over two disjoint parts of the keys from that over each.

    `out` [..., V] is overwritten; lse [...] is natural. A part without keys has lse -inf, and what its output holds,
    NaN included, is left out; where both have none, the result is 0 and -inf.
    """
    total = torch.logaddexp(lse, other_lse)
    safe = total.masked_fill(total == float("-inf"), 0)
    out.mul_((lse - safe).exp_().unsqueeze(-1)).masked_fill_((lse == float("-inf")).unsqueeze(-1), 0)
    added = other * (other_lse - safe).exp_().unsqueeze(-1)
    out.add_(added.masked_fill_((other_lse == float("-inf")).unsqueeze(-1), 0))
    return out, total
