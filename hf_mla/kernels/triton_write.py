"""Writes new latents to their slots in Triton.

Shapes: T tokens, R = kv_lora_rank, P = qk_rope_head_dim; pages [N, S, >= R+P] of any block and entry stride;
slot = block * S + offset, -1 for a token that is not stored.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl


@triton.jit
def _write_kernel(
    ckv_ptr, pe_ptr, pages_ptr, slot_ptr, ckv_st, pe_st, pages_sb, pages_se, slot_st,
    RANK: tl.constexpr, RANK_PAD: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    INDIRECT: tl.constexpr,
):  # fmt: skip
    """One program copies one token's entry. INDIRECT: pages_ptr points to the address of the pages."""
    if INDIRECT:
        pages_ptr = tl.multiple_of(tl.load(pages_ptr).to(tl.pointer_type(ckv_ptr.dtype.element_ty)), 16)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token * slot_st).to(tl.int64)
    if slot >= 0:
        entry = pages_ptr + slot // BLOCK_SIZE * pages_sb + slot % BLOCK_SIZE * pages_se
        cols = tl.arange(0, RANK_PAD)
        tl.store(entry + cols, tl.load(ckv_ptr + token * ckv_st + cols, mask=cols < RANK), mask=cols < RANK)
        if ROPE > 0:
            cols = tl.arange(0, ROPE_PAD)
            tl.store(entry + RANK + cols, tl.load(pe_ptr + token * pe_st + cols, mask=cols < ROPE), mask=cols < ROPE)


def write_latents(
    pages: torch.Tensor,
    ckv: torch.Tensor,
    k_pe: torch.Tensor,
    slot_mapping: torch.Tensor,
    base: torch.Tensor | None = None,
) -> None:
    """Store ckv [T, R] and k_pe [T, P] at int64 slots [T], bit for bit; arguments are taken as validated.

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
            BLOCK_SIZE=pages.shape[1], INDIRECT=base is not None, num_warps=2,
        )  # fmt: skip
