# mypy: disable-error-code="no-untyped-def"
"""Queries and keys of a prompt in Triton: each is written once, where torch casts, rotates and copies them in turn.

Shapes: B rows of S new columns, T = B * S tokens, H heads, N = qk_nope_head_dim, P = qk_rope_head_dim, V = v_head_dim.

Rope is computed in float32 and rounded once, as in `triton_fused`.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl

from .triton_fused import HEADS_A_PROGRAM, ROPES, _load_pair, _store_pair


@triton.jit
def _rotate_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr,
    num_heads, columns, q_st, q_sh, k_st, cos_sb, cos_ss, cos_sp, sin_sb, sin_ss, sin_sp,
    NOPE: tl.constexpr, NOPE_PAD: tl.constexpr, PAIRS: tl.constexpr, PAIRS_PAD: tl.constexpr, SECOND: tl.constexpr,
    HALVES_IN: tl.constexpr, HALVES_OUT: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Programs (t, 0) rotate token t's key; programs (t, 1 + i) copy and rotate BLOCK_H heads' queries.

    SECOND: where the cosine of a pair's second value is, counted from that of the first.
    """
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    row, column = token // columns, token % columns
    pair = tl.arange(0, PAIRS_PAD)
    real = pair < PAIRS
    cos_at = cos_ptr + row * cos_sb + column * cos_ss + pair * cos_sp
    sin_at = sin_ptr + row * sin_sb + column * sin_ss + pair * sin_sp
    cos = tl.load(cos_at, mask=real, other=0.0).to(tl.float32)
    sin = tl.load(sin_at, mask=real, other=0.0).to(tl.float32)
    cos2 = tl.load(cos_at + SECOND * cos_sp, mask=real, other=0.0).to(tl.float32)
    sin2 = tl.load(sin_at + SECOND * sin_sp, mask=real, other=0.0).to(tl.float32)
    if part == 0:
        a, b = _load_pair(k_ptr + token * k_st, pair, real, PAIRS, HALVES_IN)
        k_out = k_out_ptr + token * (2 * PAIRS)
        _store_pair(k_out, pair, real, a * cos - b * sin, b * cos2 + a * sin2, PAIRS, HALVES_OUT)
    else:
        head = (part - 1) * BLOCK_H + tl.arange(0, BLOCK_H)
        q = q_ptr + token * q_st + head.to(tl.int64)[:, None] * q_sh
        out = q_out_ptr + (token * num_heads + head)[:, None] * (NOPE + 2 * PAIRS)
        nope = tl.arange(0, NOPE_PAD)[None, :]
        copied = (head < num_heads)[:, None] & (nope < NOPE)
        tl.store(out + nope, tl.load(q + nope, mask=copied, other=0.0), mask=copied)
        live = (head < num_heads)[:, None] & real[None, :]
        a, b = _load_pair(q + NOPE, pair[None, :], live, PAIRS, HALVES_IN)
        rotated_a = a * cos[None, :] - b * sin[None, :]
        rotated_b = b * cos2[None, :] + a * sin2[None, :]
        _store_pair(out + NOPE, pair[None, :], live, rotated_a, rotated_b, PAIRS, HALVES_OUT)


def rotate(
    q: torch.Tensor, k_pe: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rope: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the last P values of queries and all of keys.

    Args:
        q: [B, S, H, N + P], rows and columns evenly spaced, last dimension contiguous.
        k_pe: [B, S, P], likewise.
        cos: [B or 1, S, P / 2 or P], any strides and float dtype; `sin` likewise. "half" reads all P values.
        rope: A key of `triton_fused.ROPES`.

    Returns:
        Queries [B, S, H, N + P] and keys [B, S, P], both contiguous. Arguments are taken as validated.
    """
    rows, columns, heads, width = q.shape
    rope_dim = k_pe.shape[-1]
    nope, pairs = width - rope_dim, rope_dim // 2
    halves_in, halves_out = ROPES[rope]
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(k_pe.shape, dtype=k_pe.dtype, device=q.device)
    if not k_out.numel():
        return q_out, k_out
    strides = [(x.stride(0) if x.shape[0] > 1 else 0, x.stride(1), x.stride(2)) for x in (cos, sin)]
    with torch.cuda.device(q.device) if q.is_cuda else nullcontext():
        _rotate_kernel[(rows * columns, 1 + triton.cdiv(heads, HEADS_A_PROGRAM))](
            q, k_pe, cos, sin, q_out, k_out, heads, columns, q.stride(1), q.stride(2), k_pe.stride(1),
            *strides[0], *strides[1], NOPE=nope, NOPE_PAD=triton.next_power_of_2(nope), PAIRS=pairs,
            PAIRS_PAD=triton.next_power_of_2(pairs), SECOND=pairs if rope == "half" else 0, HALVES_IN=halves_in,
            HALVES_OUT=halves_out, BLOCK_H=HEADS_A_PROGRAM, num_warps=4,
        )  # fmt: skip
    return q_out, k_out


@triton.jit
def _join_kernel(
    kv_ptr, k_ptr, out_ptr, num_heads, kv_st, k_st,
    NOPE: tl.constexpr, NOPE_PAD: tl.constexpr, VALUE: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Program (t, i) writes the keys of BLOCK_H heads of token t."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    real = (head < num_heads)[:, None]
    out = out_ptr + (token * num_heads + head)[:, None] * (NOPE + ROPE)
    nope = tl.arange(0, NOPE_PAD)[None, :]
    copied = real & (nope < NOPE)
    kv = kv_ptr + token * kv_st + head[:, None] * (NOPE + VALUE)
    tl.store(out + nope, tl.load(kv + nope, mask=copied, other=0.0), mask=copied)
    rope = tl.arange(0, ROPE_PAD)
    k = tl.load(k_ptr + token * k_st + rope, mask=rope < ROPE, other=0.0)
    k = tl.broadcast_to(k[None, :], [BLOCK_H, ROPE_PAD])
    tl.store(out + NOPE + rope[None, :], k, mask=real & (rope < ROPE)[None, :])


def join_keys(kv: torch.Tensor, k_rot: torch.Tensor, heads: int, nope: int) -> torch.Tensor:
    """Keys of all heads from kv [T, H * (N + V)] and the rotated part that they share [T, P]; any row strides.

    Returns [T, H, N + P] contiguous, in kv's dtype, which is k_rot's.
    """
    tokens, rope = k_rot.shape
    out = torch.empty(tokens, heads, nope + rope, dtype=kv.dtype, device=kv.device)
    if out.numel():
        with torch.cuda.device(kv.device) if kv.is_cuda else nullcontext():
            _join_kernel[(tokens, triton.cdiv(heads, HEADS_A_PROGRAM))](
                kv, k_rot, out, heads, kv.stride(0), k_rot.stride(0),
                NOPE=nope, NOPE_PAD=triton.next_power_of_2(nope), VALUE=kv.shape[1] // heads - nope, ROPE=rope,
                ROPE_PAD=triton.next_power_of_2(rope), BLOCK_H=HEADS_A_PROGRAM, num_warps=4,
            )  # fmt: skip
    return out
