# mypy: disable-error-code="no-untyped-def"
"""A mixture's experts for few tokens in Triton: every weight of the experts that are hit is read once.

Shapes: T tokens, K experts a token, P = T * K pairs, E experts, D hidden values, I an expert's inner values;
gate_up_proj [E, 2I, D] (gate above up), down_proj [E, D, I]. Pair p is the p % K-th expert of token p // K.

Four launches, whose grids depend on T alone, so that a captured CUDA graph serves any routing:

    align   pairs sorted by expert into tiles of BLOCK_M pairs of one expert
    up      act[p] = silu(gate) * up, [P, I]; a program owns some rows of gate, the same of up, and one tile
    down    part[p] = down_proj @ act[p], [P, D]; likewise
    sum     out[t] = sum of weight * part over a token's K pairs, [T, D], in fp32

With hardly any expert hit twice, each pair is a tile and nothing is aligned. Weights are the rows of the products and
tokens the columns: the tensor cores want 64 rows, which a few tokens can't fill, and weights can.

Values are rounded where separate operations would round them: after each product, and after silu.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl

from .triton_experts_plan import MAX_TOKENS, Config, pick_config


@triton.jit(do_not_specialize=["pairs", "tiles"])
def _align_kernel(
    index_ptr, expert_ptr, pair_ptr, pairs, tiles,
    EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, PAIRS_PAD: tl.constexpr, TILES_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Program e lists expert e's pairs in its tiles; a last one marks the tiles left over.

    expert_ptr [tiles]: a tile's expert, -1 where it is left over. pair_ptr [tiles, BLOCK_M]: its pairs, in order, then
    `pairs`. Pairs of experts outside 0..E-1 are in no tile.
    """
    expert = tl.program_id(0)
    pair = tl.arange(0, PAIRS_PAD)
    of_pair = tl.load(index_ptr + pair, mask=pair < pairs, other=EXPERTS)
    of_pair = tl.where((of_pair >= 0) & (of_pair < EXPERTS), of_pair, EXPERTS).to(tl.int32)
    bins = tl.arange(0, EXPERTS_PAD)
    needed = (tl.histogram(of_pair, EXPERTS_PAD) + BLOCK_M - 1) // BLOCK_M
    start = tl.sum(tl.where(bins < expert, needed, 0), axis=0)
    tile = tl.arange(0, TILES_PAD)
    if expert == EXPERTS:
        tl.store(expert_ptr + tile, tl.full([TILES_PAD], -1, tl.int32), mask=(tile >= start) & (tile < tiles))
    else:
        mine = of_pair == expert
        count = tl.sum(mine.to(tl.int32), axis=0)
        stop = start + (count + BLOCK_M - 1) // BLOCK_M
        expert_of_tile = tl.zeros([TILES_PAD], tl.int32) + expert
        tl.store(expert_ptr + tile, expert_of_tile, mask=(tile >= start) & (tile < stop))
        rank = tl.cumsum(mine.to(tl.int32), axis=0) - 1
        tl.store(pair_ptr + start * BLOCK_M + rank, pair, mask=mine)
        slot = (stop - 1) * BLOCK_M + tl.arange(0, BLOCK_M)
        none = tl.zeros([BLOCK_M], tl.int32) + pairs
        tl.store(pair_ptr + slot, none, mask=slot >= start * BLOCK_M + count)


@triton.jit
def _tile(expert_ptr, pair_ptr, tile, pairs, ALIGN: tl.constexpr, BLOCK_M: tl.constexpr):
    """A tile's expert, and BLOCK_M pairs (`pairs` where there is none)."""
    expert = tl.load(expert_ptr + tile).to(tl.int64)
    column = tl.arange(0, BLOCK_M)
    if ALIGN:
        pair = tl.load(pair_ptr + tile * BLOCK_M + column, mask=column < BLOCK_M * (expert >= 0), other=0)
    else:
        pair = tl.where(column == 0, tile, pairs)
    return expert, pair


@triton.jit
def _product(
    w_ptr, w_row, x_ptr, x_row, live, start, stop,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """[ROWS, BLOCK_M] of weight rows times columns of x over values start to stop; dead columns are zero.

    MASKED: start or stop may cut a step of DEPTH values short.
    """
    acc = tl.zeros([ROWS, BLOCK_M], tl.float32)
    offset = tl.arange(0, DEPTH)
    for at in tl.range(start, stop, DEPTH, num_stages=STAGES):
        value = at + offset
        w_at = w_ptr + w_row[:, None] * WIDTH + value[None, :]
        x_at = x_ptr + x_row[:, None] + value[None, :]
        if MASKED:
            inside = (value < stop)[None, :]
            w = tl.load(w_at, mask=inside, other=0.0)
            x = tl.load(x_at, mask=inside & live[:, None], other=0.0)
        else:
            w = tl.load(w_at)
            x = tl.load(x_at, mask=live[:, None], other=0.0)
        acc = tl.dot(w, tl.trans(x), acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["pairs"])
def _up_kernel(
    x_ptr, w_ptr, act_ptr, expert_ptr, pair_ptr, x_st, pairs,
    TOP_K: tl.constexpr, EXPERTS: tl.constexpr, HIDDEN: tl.constexpr, INNER: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """x_ptr [T, D] of row stride x_st -> act_ptr [P, I]. One product for gate's rows and up's, taken apart after."""
    expert, pair = _tile(expert_ptr, pair_ptr, tl.program_id(1), pairs, ALIGN, BLOCK_M)
    if (expert < 0) | (expert >= EXPERTS):
        return
    half: tl.constexpr = ROWS // 2
    live = pair < pairs
    first = tl.program_id(0) * half
    row = tl.arange(0, ROWS)
    # Rows past the end read the last one, and are not stored.
    w_row = tl.minimum(first + row % half, INNER - 1) + row // half * INNER
    token = tl.where(live, pair // TOP_K, 0).to(tl.int64)
    acc = _product(
        w_ptr + expert * (2 * INNER * HIDDEN), w_row, x_ptr, token * x_st, live, 0, HIDDEN,
        HIDDEN, ROWS, BLOCK_M, DEPTH, STAGES, HIDDEN % DEPTH != 0, PRECISION,
    )  # fmt: skip
    gate, up = tl.split(tl.permute(tl.reshape(acc, [2, half, BLOCK_M]), (1, 2, 0)))
    dtype = act_ptr.dtype.element_ty
    gate = gate.to(dtype).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    act = silu * up.to(dtype).to(tl.float32)
    column = first + tl.arange(0, half)
    at = act_ptr + pair.to(tl.int64)[None, :] * INNER + column[:, None]
    tl.store(at, act.to(dtype), mask=live[None, :] & (column < INNER)[:, None])


@triton.jit(do_not_specialize=["pairs"])
def _down_kernel(
    act_ptr, w_ptr, part_ptr, expert_ptr, pair_ptr, pairs,
    EXPERTS: tl.constexpr, HIDDEN: tl.constexpr, INNER: tl.constexpr, ALIGN: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """act_ptr [P, I] -> part_ptr [SPLITS, P, D]."""
    expert, pair = _tile(expert_ptr, pair_ptr, tl.program_id(1), pairs, ALIGN, BLOCK_M)
    if (expert < 0) | (expert >= EXPERTS):
        return
    live = pair < pairs
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    act_row = tl.where(live, pair, 0).to(tl.int64) * INNER
    share: tl.constexpr = (INNER + DEPTH * SPLITS - 1) // (DEPTH * SPLITS) * DEPTH
    split = tl.program_id(2)
    acc = _product(
        w_ptr + expert * (HIDDEN * INNER), tl.minimum(row, HIDDEN - 1), act_ptr, act_row, live,
        split * share, tl.minimum(split * share + share, INNER),
        INNER, ROWS, BLOCK_M, DEPTH, STAGES, INNER % DEPTH != 0, PRECISION,
    )  # fmt: skip
    at = part_ptr + (split * pairs + pair).to(tl.int64)[None, :] * HIDDEN + row[:, None]
    tl.store(at, acc.to(part_ptr.dtype.element_ty), mask=live[None, :] & (row < HIDDEN)[:, None])


@triton.jit(do_not_specialize=["pairs"])
def _sum_kernel(
    part_ptr, index_ptr, weight_ptr, out_ptr, pairs,
    TOP_K: tl.constexpr, TOP_K_PAD: tl.constexpr, EXPERTS: tl.constexpr, HIDDEN: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program sums BLOCK values of one token. Pairs of experts outside 0..E-1 count as zero."""
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, TOP_K_PAD)
    pair = token * TOP_K + k
    expert = tl.load(index_ptr + pair, mask=k < TOP_K, other=-1)
    live = (expert >= 0) & (expert < EXPERTS)
    mask = live[:, None] & (column < HIDDEN)[None, :]
    value = tl.zeros([TOP_K_PAD, BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        row = (split * pairs + pair).to(tl.int64) * HIDDEN
        value += tl.load(part_ptr + row[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + pair, mask=live, other=0.0)
    value = value.to(out_ptr.dtype.element_ty).to(tl.float32) * weight.to(tl.float32)[:, None]
    if weight_ptr.dtype.element_ty == out_ptr.dtype.element_ty:
        value = value.to(out_ptr.dtype.element_ty).to(tl.float32)
    at = out_ptr + token.to(tl.int64) * HIDDEN + column
    tl.store(at, tl.sum(value, axis=0).to(out_ptr.dtype.element_ty), mask=column < HIDDEN)


def _check(
    hidden: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> None:
    if hidden.dim() != 2 or not 1 <= hidden.shape[0] <= MAX_TOKENS:
        raise ValueError(f"hidden must be [T, D] with T from 1 to {MAX_TOKENS}, got {list(hidden.shape)}")
    if down.dim() != 3 or down.shape[1] != hidden.shape[1]:
        raise ValueError(f"down_proj must be [E, {hidden.shape[1]}, I], got {list(down.shape)}")
    wanted = [down.shape[0], 2 * down.shape[2], hidden.shape[1]]
    if list(gate_up.shape) != wanted:
        raise ValueError(f"gate_up_proj must be {wanted} as down_proj and hidden say, got {list(gate_up.shape)}")
    if not (gate_up.is_contiguous() and down.is_contiguous()):
        raise ValueError("gate_up_proj and down_proj must be contiguous")
    if index.dim() != 2 or index.shape != weights.shape or index.shape[0] != hidden.shape[0]:
        raise ValueError(
            f"top_k_index and top_k_weights must be [{hidden.shape[0]}, K], got {list(index.shape)} and "
            f"{list(weights.shape)}"
        )
    if index.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"top_k_index must be int32 or int64, got {index.dtype}")
    if not hidden.dtype == gate_up.dtype == down.dtype:
        raise ValueError(f"hidden and the weights must agree, got {hidden.dtype}, {gate_up.dtype}, {down.dtype}")
    if hidden.is_cuda and hidden.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"hidden must be float16 or bfloat16 on a GPU, got {hidden.dtype}")
    if {t.device for t in (gate_up, down, index, weights)} != {hidden.device}:
        raise ValueError(f"all must be on {hidden.device} as hidden is")


def fused_experts(
    hidden: torch.Tensor,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    config: Config | None = None,
) -> torch.Tensor:
    """Sum over each token's experts of weight * down(silu(gate(x)) * up(x)), without waiting for the device.

    Args:
        hidden: [T, D], fp16 or bf16 (fp32 in Triton's interpreter), T up to MAX_TOKENS; any row stride.
        gate_up_proj: [E, 2I, D] in the same dtype, contiguous; gate's rows first.
        down_proj: [E, D, I], likewise.
        top_k_index: [T, K] int32 or int64; experts outside 0..E-1 contribute nothing.
        top_k_weights: [T, K], any floating dtype.
        config: For benchmarks.

    Returns:
        [T, D] in hidden's dtype; the same bits whatever ran before. No gradients.

    Raises:
        ValueError: An argument of another shape, dtype or device.
    """
    _check(hidden, gate_up_proj, down_proj, top_k_index, top_k_weights)
    (tokens, width), (experts, _, inner), top_k = hidden.shape, down_proj.shape, top_k_index.shape[1]
    pairs = tokens * top_k
    out = hidden.new_empty(tokens, width)
    if not out.numel() or not pairs or not inner:
        return out.zero_()
    config = config or pick_config(pairs, experts, hidden.device)
    hidden = hidden if hidden.stride(1) == 1 or width == 1 else hidden.contiguous()
    index, weights = top_k_index.contiguous(), top_k_weights.contiguous()
    row_stride = hidden.stride(0) if tokens > 1 else width  # a single row's stride may be anything
    act = hidden.new_empty(pairs, inner)
    part_dtype = hidden.dtype if config.down.splits == 1 else torch.float32
    part = hidden.new_empty(config.down.splits, pairs, width, dtype=part_dtype)
    with torch.cuda.device(hidden.device) if hidden.is_cuda else nullcontext():
        tile_expert, tile_pair, tiles = _align(index, experts, config)
        shared = {
            "EXPERTS": experts, "HIDDEN": width, "INNER": inner, "ALIGN": config.align, "BLOCK_M": config.block_m,
            "PRECISION": "ieee" if hidden.dtype == torch.float32 else "tf32",
        }  # fmt: skip
        up, down = config.up, config.down
        _up_kernel[(triton.cdiv(2 * inner, up.rows), tiles)](
            hidden, gate_up_proj, act, tile_expert, tile_pair, row_stride, pairs, TOP_K=top_k,
            ROWS=up.rows, DEPTH=up.depth, STAGES=up.stages, num_warps=up.warps, **shared,
        )  # fmt: skip
        _down_kernel[(triton.cdiv(width, down.rows), tiles, down.splits)](
            act, down_proj, part, tile_expert, tile_pair, pairs, SPLITS=down.splits,
            ROWS=down.rows, DEPTH=down.depth, STAGES=down.stages, num_warps=down.warps, **shared,
        )  # fmt: skip
        _sum_kernel[(tokens, triton.cdiv(width, 256))](
            part, index, weights, out, pairs, TOP_K=top_k, TOP_K_PAD=triton.next_power_of_2(top_k), EXPERTS=experts,
            HIDDEN=width, SPLITS=down.splits, BLOCK=256, num_warps=4,
        )  # fmt: skip
    return out


def _align(index: torch.Tensor, experts: int, config: Config) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Expert of each tile, pairs of each tile, and how many tiles there may be."""
    pairs = index.numel()
    if not config.align:
        return index, index, pairs
    tiles = min(pairs, experts + pairs // config.block_m)
    tile_expert = index.new_empty(tiles, dtype=torch.int32)
    tile_pair = index.new_empty(tiles, config.block_m, dtype=torch.int32)
    _align_kernel[(experts + 1,)](
        index, tile_expert, tile_pair, pairs, tiles, EXPERTS=experts, EXPERTS_PAD=triton.next_power_of_2(experts + 1),
        PAIRS_PAD=triton.next_power_of_2(pairs), TILES_PAD=triton.next_power_of_2(tiles), BLOCK_M=config.block_m,
        num_warps=4,
    )  # fmt: skip
    return tile_expert, tile_pair, tiles
