"""The small steps of a decode layer in Triton, one launch each where torch takes many.

Shapes: T tokens, D values of a row, H heads, N = qk_nope_head_dim, R = kv_lora_rank, P = qk_rope_head_dim;
pages [blocks, S, >= R+P]; slot = block * S + offset, -1 for a token that is not stored.

Roundings are those of transformers' own modules: computed in float32 and rounded to the tensors' dtype where theirs
are, but for rope, which rounds once where theirs rounds each product. `reference_fused` says the same in torch.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl

from . import fp8
from .triton_write import store_quantised

# Flavours of rope: whether a pair is (i, i + P/2) or (2i, 2i + 1), in the input and in the output.
ROPES = {"complex": (False, False), "interleave": (False, True), "half": (True, True)}

HEADS_A_PROGRAM = 16


def _on(tensor: torch.Tensor) -> AbstractContextManager:
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def _warps(values: int) -> int:
    """Warps for `values` values in one program, 8 a thread where that is no more than 16 warps."""
    return max(1, min(16, values // 256))


@triton.jit
def _normed(x, weight, eps, size: tl.constexpr, dtype: tl.constexpr):
    """RMSNorm of one row x (float32, zeros beyond `size`): rounded to dtype, times the weight, rounded again."""
    scaled = (x * tl.rsqrt(tl.sum(x * x, axis=0) / size + eps)).to(dtype)
    return (weight.to(tl.float32) * scaled.to(tl.float32)).to(dtype)


@triton.jit
def _rms_norm_kernel(x_ptr, weight_ptr, out_ptr, x_st, eps, SIZE: tl.constexpr, PAD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, PAD)
    live = cols < SIZE
    x = tl.load(x_ptr + row * x_st + cols, mask=live, other=0.0)
    weight = tl.load(weight_ptr + cols, mask=live, other=0.0)
    tl.store(out_ptr + row * SIZE + cols, _normed(x.to(tl.float32), weight, eps, SIZE, x.dtype), mask=live)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of x [..., D] with weight [D], contiguous and of the same dtype; x's rows may lie any stride apart.

    Returns [..., D], contiguous: weight * (x / sqrt(mean(x^2) + eps)), the quotient rounded to x's dtype first.
    """
    size = x.shape[-1]
    rows = x.reshape(-1, size)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    pad = triton.next_power_of_2(size)
    with _on(x):
        _rms_norm_kernel[(rows.shape[0],)](
            rows, weight, out, rows.stride(0), eps, SIZE=size, PAD=pad, num_warps=_warps(pad)
        )
    return out


@triton.jit
def _add_rms_norm_kernel(
    x_ptr, y_ptr, weight_ptr, sum_ptr, out_ptr, x_st, y_st, eps, SIZE: tl.constexpr, PAD: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, PAD)
    live = cols < SIZE
    x = tl.load(x_ptr + row * x_st + cols, mask=live, other=0.0)
    y = tl.load(y_ptr + row * y_st + cols, mask=live, other=0.0)
    weight = tl.load(weight_ptr + cols, mask=live, other=0.0)
    total = (x.to(tl.float32) + y.to(tl.float32)).to(x.dtype)
    tl.store(sum_ptr + row * SIZE + cols, total, mask=live)
    tl.store(out_ptr + row * SIZE + cols, _normed(total.to(tl.float32), weight, eps, SIZE, x.dtype), mask=live)


def add_rms_norm(
    x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x + y, its RMSNorm) of x and y [..., D], both rounded to their dtype; strides and weight as for `rms_norm`."""
    size = x.shape[-1]
    x_rows, y_rows = x.reshape(-1, size), y.reshape(-1, size)
    total, out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    if not out.numel():
        return total, out
    pad = triton.next_power_of_2(size)
    with _on(x):
        _add_rms_norm_kernel[(x_rows.shape[0],)](
            x_rows, y_rows, weight, total, out, x_rows.stride(0), y_rows.stride(0), eps,
            SIZE=size, PAD=pad, num_warps=_warps(pad),
        )  # fmt: skip
    return total, out


@triton.jit
def _add_kernel(x_ptr, y_ptr, z_ptr, out_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < count, other=0.0)
    y = tl.load(y_ptr + at, mask=at < count, other=0.0)
    z = tl.load(z_ptr + at, mask=at < count, other=0.0)
    inner = (y.to(tl.float32) + z.to(tl.float32)).to(x.dtype)
    tl.store(out_ptr + at, (x.to(tl.float32) + inner.to(tl.float32)).to(x.dtype), mask=at < count)


def add(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """x + (y + z), of one shape and dtype, the inner sum rounded to that dtype; contiguous."""
    x, y, z = x.contiguous(), y.contiguous(), z.contiguous()
    out = torch.empty_like(x)
    count, block = out.numel(), 1024
    if count:
        with _on(x):
            _add_kernel[(triton.cdiv(count, block),)](x, y, z, out, count, BLOCK=block, num_warps=4)
    return out


@triton.jit
def _load_pair(ptr, pair, live, PAIRS: tl.constexpr, HALVES: tl.constexpr):
    """Both values of each pair, in float32."""
    first = pair if HALVES else 2 * pair
    second = pair + PAIRS if HALVES else 2 * pair + 1
    a = tl.load(ptr + first, mask=live, other=0.0).to(tl.float32)
    b = tl.load(ptr + second, mask=live, other=0.0).to(tl.float32)
    return a, b


@triton.jit
def _store_pair(ptr, pair, live, a, b, PAIRS: tl.constexpr, HALVES: tl.constexpr):
    first = pair if HALVES else 2 * pair
    second = pair + PAIRS if HALVES else 2 * pair + 1
    tl.store(ptr + first, a.to(ptr.dtype.element_ty), mask=live)
    tl.store(ptr + second, b.to(ptr.dtype.element_ty), mask=live)


@triton.jit
def _rope_norm_write_kernel(
    q_ptr, kv_ptr, weight_ptr, cos_ptr, sin_ptr, pages_ptr, slot_ptr, out_ptr,
    eps, num_heads, q_st, q_sh, kv_st, cos_st, cos_sp, sin_st, sin_sp, pages_sb, pages_se, slot_st,
    NOPE: tl.constexpr, RANK: tl.constexpr, RANK_PAD: tl.constexpr, PAIRS: tl.constexpr, PAIRS_PAD: tl.constexpr,
    SECOND: tl.constexpr, HALVES_IN: tl.constexpr, HALVES_OUT: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr, FP8: tl.constexpr, ROPE_AT: tl.constexpr, SCALE_AT: tl.constexpr, INDIRECT: tl.constexpr,
):  # fmt: skip
    """Programs (t, 0) norm, rotate and store token t's latents; programs (t, 1 + i) rotate BLOCK_H heads' queries.

    SECOND: where the cosine of a pair's second value is, counted from that of the first. INDIRECT: pages_ptr points
    to the address of the pages. FP8, ROPE_AT, SCALE_AT: as for triton_write's kernel.
    """
    if INDIRECT:
        element: tl.constexpr = tl.float8e4nv if FP8 else kv_ptr.dtype.element_ty
        pages_ptr = tl.multiple_of(tl.load(pages_ptr).to(tl.pointer_type(element)), 16)
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    pair = tl.arange(0, PAIRS_PAD)
    cos_at, sin_at = cos_ptr + token * cos_st + pair * cos_sp, sin_ptr + token * sin_st + pair * sin_sp
    cos = tl.load(cos_at, mask=pair < PAIRS, other=0.0).to(tl.float32)
    sin = tl.load(sin_at, mask=pair < PAIRS, other=0.0).to(tl.float32)
    if SECOND > 0:
        cos2 = tl.load(cos_at + SECOND * cos_sp, mask=pair < PAIRS, other=0.0).to(tl.float32)
        sin2 = tl.load(sin_at + SECOND * sin_sp, mask=pair < PAIRS, other=0.0).to(tl.float32)
    else:
        cos2 = cos
        sin2 = sin
    if part == 0:
        slot = tl.load(slot_ptr + token * slot_st)
        if slot >= 0:
            entry = pages_ptr + slot // BLOCK_SIZE * pages_sb + slot % BLOCK_SIZE * pages_se
            kv = kv_ptr + token * kv_st
            cols = tl.arange(0, RANK_PAD)
            x = tl.load(kv + cols, mask=cols < RANK, other=0.0)
            weight = tl.load(weight_ptr + cols, mask=cols < RANK, other=0.0)
            normed = _normed(x.to(tl.float32), weight, eps, RANK, x.dtype)
            a, b = _load_pair(kv + RANK, pair, pair < PAIRS, PAIRS, HALVES_IN)
            rotated_a, rotated_b = a * cos - b * sin, b * cos2 + a * sin2
            if FP8:
                store_quantised(entry, normed, RANK, RANK_PAD, SCALE_AT)
                k_pe = (entry + ROPE_AT).to(tl.pointer_type(tl.bfloat16))
                _store_pair(k_pe, pair, pair < PAIRS, rotated_a, rotated_b, PAIRS, HALVES_OUT)
            else:
                tl.store(entry + cols, normed, mask=cols < RANK)
                _store_pair(entry + RANK, pair, pair < PAIRS, rotated_a, rotated_b, PAIRS, HALVES_OUT)
    else:
        head = (part - 1) * BLOCK_H + tl.arange(0, BLOCK_H)
        live = (head < num_heads)[:, None] & (pair < PAIRS)[None, :]
        q = q_ptr + token * q_st + head.to(tl.int64)[:, None] * q_sh + NOPE
        a, b = _load_pair(q, pair[None, :], live, PAIRS, HALVES_IN)
        rotated_a = a * cos[None, :] - b * sin[None, :]
        rotated_b = b * cos2[None, :] + a * sin2[None, :]
        out = out_ptr + (token * num_heads + head)[:, None] * (2 * PAIRS)
        _store_pair(out, pair[None, :], live, rotated_a, rotated_b, PAIRS, HALVES_OUT)


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
    base: torch.Tensor | None = None,
) -> torch.Tensor:
    """Norm the latents, rotate keys and queries, and store the keys' part in pages, all in one launch.

    Args:
        q: [T, H, N + P], last dimension contiguous; only the last P values of a head are read.
        compressed_kv: [T, R + P], any row stride, of the dtype of q and, unless they are 8-bit, pages.
        weight: [R], kv_a_layernorm's, of that dtype; `eps` is its epsilon.
        cos: [T or 1, P / 2 or P], any strides and float dtype; `sin` likewise. "half" reads all P values.
        rope: A key of `ROPES`.
        pages: [blocks, S, >= R + P].
        slot_mapping: [T] int64; -1 stores nothing.
        base: [1] int64 on the device: where the address of the pages is read from instead.

    Returns:
        q_pe, rotated, [T, H, P] contiguous. Arguments are taken as validated.
    """
    tokens, heads, width = q.shape
    rank = weight.shape[0]
    rope_dim = compressed_kv.shape[1] - rank
    pairs = rope_dim // 2
    halves_in, halves_out = ROPES[rope]
    out = torch.empty(tokens, heads, rope_dim, dtype=q.dtype, device=q.device)
    if not tokens:
        return out
    grid = tokens, 1 + triton.cdiv(heads, HEADS_A_PROGRAM)
    with _on(pages):
        _rope_norm_write_kernel[grid](
            q, compressed_kv, weight, cos, sin, pages if base is None else base, slot_mapping, out,
            eps, heads, q.stride(0), q.stride(1), compressed_kv.stride(0),
            cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1),
            sin.stride(0) if sin.shape[0] > 1 else 0, sin.stride(1),
            *pages.stride()[:2], slot_mapping.stride(0),
            NOPE=width - rope_dim, RANK=rank, RANK_PAD=triton.next_power_of_2(rank), PAIRS=pairs,
            PAIRS_PAD=triton.next_power_of_2(pairs), SECOND=pairs if rope == "half" else 0, HALVES_IN=halves_in,
            HALVES_OUT=halves_out, BLOCK_SIZE=pages.shape[1], BLOCK_H=HEADS_A_PROGRAM, FP8=pages.dtype == fp8.FP8,
            ROPE_AT=fp8.rope_offset(rank), SCALE_AT=fp8.scale_offset(rank, rope_dim), INDIRECT=base is not None,
            num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def _silu_mul_kernel(gate_ptr, up_ptr, out_ptr, gate_st, up_st, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = cols < SIZE
    gate = tl.load(gate_ptr + row * gate_st + cols, mask=live, other=0.0)
    up = tl.load(up_ptr + row * up_st + cols, mask=live, other=0.0)
    x = gate.to(tl.float32)
    silu = (x / (1.0 + tl.exp(-x))).to(gate.dtype)
    tl.store(out_ptr + row * SIZE + cols, (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype), mask=live)


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [..., I], of one shape and dtype, the first factor rounded to that dtype; contiguous.

    Rows may lie any stride apart, as the halves of one product's do.
    """
    size = gate.shape[-1]
    gates, ups = (x.reshape(-1, size) if x.stride(-1) == 1 else x.contiguous().view(-1, size) for x in (gate, up))
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    block = 512  # inner sizes are seldom powers of two, and a smaller block wastes less of its last one
    if out.numel():
        with _on(gate):
            _silu_mul_kernel[(gates.shape[0], triton.cdiv(size, block))](
                gates, ups, out, gates.stride(0), ups.stride(0), SIZE=size, BLOCK=block, num_warps=2
            )
    return out
