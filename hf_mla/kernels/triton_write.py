"""Writes new latents to their slots in Triton.

Shapes: T tokens, R = kv_lora_rank, P = qk_rope_head_dim; pages [N, S, >= R+P] of any block and entry stride;
slot = block * S + offset, -1 for a token that is not stored. 8-bit pages: see `fp8`, whose roundings these are.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl

from . import fp8


@triton.jit
def store_quantised(entry, x, RANK: tl.constexpr, PAD: tl.constexpr, SCALE_AT: tl.constexpr):
    """Store a token's x [PAD] (zeros beyond RANK) in an 8-bit entry, and its scale, as `fp8.quantise` makes them."""
    x = x.to(tl.float32)
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(x), axis=0), 1e-12), 448.0)
    cols = tl.arange(0, PAD)
    tl.store(entry + cols, tl.div_rn(x, scale).to(tl.float8e4nv), mask=cols < RANK)
    tl.store((entry + SCALE_AT).to(tl.pointer_type(tl.float32)), scale)


@triton.jit
def _write_kernel(
    ckv_ptr, pe_ptr, pages_ptr, slot_ptr, ckv_st, pe_st, pages_sb, pages_se, slot_st,
    RANK: tl.constexpr, RANK_PAD: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    FP8: tl.constexpr, ROPE_AT: tl.constexpr, SCALE_AT: tl.constexpr, INDIRECT: tl.constexpr,
):  # fmt: skip
    """One program copies one token's entry. INDIRECT: pages_ptr points to the address of the pages.

    FP8: pages are 8-bit; their rope part begins ROPE_AT bytes into an entry, the scale lies SCALE_AT bytes into it.
    """
    if INDIRECT:
        element: tl.constexpr = tl.float8e4nv if FP8 else ckv_ptr.dtype.element_ty
        pages_ptr = tl.multiple_of(tl.load(pages_ptr).to(tl.pointer_type(element)), 16)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token * slot_st).to(tl.int64)
    if slot >= 0:
        entry = pages_ptr + slot // BLOCK_SIZE * pages_sb + slot % BLOCK_SIZE * pages_se
        cols = tl.arange(0, RANK_PAD)
        ckv = tl.load(ckv_ptr + token * ckv_st + cols, mask=cols < RANK, other=0.0)
        if FP8:
            store_quantised(entry, ckv, RANK, RANK_PAD, SCALE_AT)
        else:
            tl.store(entry + cols, ckv, mask=cols < RANK)
        if ROPE > 0:
            pe_cols = tl.arange(0, ROPE_PAD)
            k_pe = tl.load(pe_ptr + token * pe_st + pe_cols, mask=pe_cols < ROPE)
            if FP8:
                rope = (entry + ROPE_AT).to(tl.pointer_type(tl.bfloat16))
                tl.store(rope + pe_cols, k_pe.to(tl.bfloat16), mask=pe_cols < ROPE)
            else:
                tl.store(entry + RANK + pe_cols, k_pe, mask=pe_cols < ROPE)


def write_latents(
    pages: torch.Tensor,
    ckv: torch.Tensor,
    k_pe: torch.Tensor,
    slot_mapping: torch.Tensor,
    base: torch.Tensor | None = None,
) -> None:
    """Store ckv [T, R] and k_pe [T, P] at int64 slots [T], exactly unless pages are 8-bit; all taken as validated.

    `base` [1] int64, on the device: where the address of the pages is read from instead.
    """
    tokens, rank = ckv.shape
    rope = k_pe.shape[1]
    if not tokens:
        return
    with torch.cuda.device(pages.device) if pages.is_cuda else nullcontext():
        _write_kernel[(tokens,)](
            ckv, k_pe, pages if base is None else base, slot_mapping,
            ckv.stride(0), k_pe.stride(0), *pages.stride()[:2], slot_mapping.stride(0),
            RANK=rank, RANK_PAD=triton.next_power_of_2(rank), ROPE=rope, ROPE_PAD=triton.next_power_of_2(max(rope, 1)),
            BLOCK_SIZE=pages.shape[1], FP8=pages.dtype == fp8.FP8, ROPE_AT=fp8.rope_offset(rank),
            SCALE_AT=fp8.scale_offset(rank, rope), INDIRECT=base is not None, num_warps=2,
        )  # fmt: skip
