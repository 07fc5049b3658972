# mypy: disable-error-code="no-untyped-def"
"""A mixture's experts for many tokens: grouped products of pairs sorted by expert, and Triton for what lies between.

Shapes: T tokens, K experts a token, P = T * K pairs, E experts, D hidden values, I an expert's inner values. Pair p is
the p % K-th expert of token p // K, and lies at place[p] of the order by experts.

    rows[place[p]] = hidden[p // K]                    [P, D], each token read once
    act = silu(gate) * up, of a product's two halves    [P, I]
    out[t] = sum of weight[p] * part[place[p]]          [T, D], in fp32, over a token's pairs

so that nothing but these is ever written. Nothing waits for the device. Values are rounded where separate operations
would round them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
import triton
import triton.language as tl

from .triton_fused import silu_mul

# Pairs that are worked on at once: of DeepSeek-V2-Lite's they take some 3 GB, and 3072 an expert fill any GPU.
MAX_PAIRS = 196_608
BLOCK = 1024


@triton.jit
def _spread_kernel(
    x_ptr, place_ptr, rows_ptr, x_st, TOP_K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Program (t, i) copies block i of token t to the rows of its pairs."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    x = tl.load(x_ptr + token * x_st + column, mask=inside)
    for k in tl.static_range(TOP_K):
        place = tl.load(place_ptr + token * TOP_K + k).to(tl.int64)
        tl.store(rows_ptr + place * WIDTH + column, x, mask=inside)


@triton.jit
def _collect_kernel(
    part_ptr, place_ptr, index_ptr, weight_ptr, out_ptr,
    TOP_K: tl.constexpr, EXPERTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (t, i) sums block i of token t. Pairs of experts outside 0..E-1 have no part and count as zero."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    dtype = out_ptr.dtype.element_ty
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        pair = token * TOP_K + k
        expert = tl.load(index_ptr + pair)
        place = tl.load(place_ptr + pair).to(tl.int64)
        value = tl.load(part_ptr + place * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        value = value * tl.load(weight_ptr + pair).to(tl.float32)
        if weight_ptr.dtype.element_ty == dtype:
            value = value.to(dtype).to(tl.float32)
        total += tl.where((expert >= 0) & (expert < EXPERTS), value, 0.0)
    tl.store(out_ptr + token * WIDTH + column, total.to(dtype), mask=inside)


def _order(index: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(place of each pair [P] int32, where each expert's pairs end [E] int32); pairs of no expert come last."""
    flat = index.reshape(-1).clamp(-1, experts).remainder_(experts + 1)  # -1 becomes E as well
    ordered, pair = flat.to(torch.int16 if experts < 2**15 else torch.int32).sort(stable=True)
    ends = torch.searchsorted(
        ordered, torch.arange(experts, dtype=ordered.dtype, device=index.device), right=True, out_int32=True
    )
    place = torch.empty_like(pair, dtype=torch.int32)
    place.scatter_(0, pair, torch.arange(len(pair), dtype=torch.int32, device=index.device))
    return place, ends


def _chunk(
    hidden: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, index: torch.Tensor, weights: torch.Tensor,
    out: torch.Tensor, product: Callable[..., torch.Tensor],
) -> None:  # fmt: skip
    (tokens, width), top_k, experts = hidden.shape, index.shape[1], len(down)
    place, ends = _order(index, experts)
    rows = hidden.new_empty(tokens * top_k, width)
    grid = tokens, triton.cdiv(width, BLOCK)
    _spread_kernel[grid](hidden, place, rows, hidden.stride(0), TOP_K=top_k, WIDTH=width, BLOCK=BLOCK, num_warps=4)
    halves = product(rows, gate_up, ends)
    del rows
    part = product(silu_mul(*halves.chunk(2, -1)), down, ends)
    del halves
    _collect_kernel[grid](
        part, place, index, weights, out, TOP_K=top_k, EXPERTS=experts, WIDTH=width, BLOCK=BLOCK, num_warps=4
    )


def grouped_experts(
    hidden: torch.Tensor,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    product: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    max_pairs: int = MAX_PAIRS,
) -> torch.Tensor:
    """Sum over each token's experts of weight * down(silu(gate(x)) * up(x)).

    Args:
        hidden: [T, D], any row stride.
        gate_up_proj: [E, 2I, D] in the same dtype; gate's rows first.
        down_proj: [E, D, I], likewise.
        top_k_index: [T, K] int32 or int64; experts outside 0..E-1 contribute nothing.
        top_k_weights: [T, K], any floating dtype.
        product: Of rows [P, X] in order of experts, weights [E, Y, X] and where each expert's rows end [E] int32 ->
            [P, Y] in rows' dtype; rows after the last end may be anything.
        max_pairs: Pairs worked on at once, one token's at least.

    Returns:
        [T, D] in hidden's dtype. No gradients. Arguments are taken as validated.
    """
    (tokens, width), top_k = hidden.shape, top_k_index.shape[1]
    out = hidden.new_empty(tokens, width)
    if not out.numel() or not top_k:
        return out.zero_()
    hidden = hidden if hidden.stride(1) == 1 or width == 1 else hidden.contiguous()
    index, weights = top_k_index.contiguous(), top_k_weights.contiguous()
    chunks = triton.cdiv(tokens, max(1, max_pairs // top_k))
    size = triton.cdiv(tokens, chunks)
    with torch.cuda.device(hidden.device) if hidden.is_cuda else nullcontext():
        for start in range(0, tokens, size):
            x, i, w, o = (t[start : start + size] for t in (hidden, index, weights, out))
            _chunk(x, gate_up_proj, down_proj, i, w, o, product)
    return out
