"""MLA decode over paged latents in Triton: split-KV, one read of a latent tile serves every head of a row tile.

Shapes: B rows, Sq query tokens a row, H heads, R = kv_lora_rank, P = qk_rope_head_dim, S = block_size, K splits.
A program owns one tile of the Sq*H flattened query rows of one sequence and one slice of its tokens. The latent tile
[BLOCK_N, R] is loaded to shared memory once: as it is for one product, transposed for the other. Slices are taken from
the lengths on the device, so a captured CUDA graph stays right when they grow; only the number of slices is fixed.

Two orientations, chosen by the config:
- heads as rows: scores [BLOCK_H, BLOCK_N] = q @ latents^T, out [BLOCK_H, R] = p @ latents;
- heads as columns: scores [BLOCK_N, BLOCK_H] = latents @ q^T, out [R, BLOCK_H] = latents^T @ p. The tensor cores
  want 64 rows; tokens and rank give them that, so 16 heads are not padded to 64.

Method: split-KV with log-sum-exp merging (Flash-Decoding, 2023) on the absorbed form of MLA (DeepSeek-V2, 2024).
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from functools import lru_cache

import torch
import triton
import triton.language as tl

from . import fp8
from .problem import Problem, Step
from .triton_decode_fp8 import decode_fp8_kernel
from .triton_decode_tile import load_tile, scores, store, values
from .triton_plan import (
    DecodeConfig,
    Slices,
    choose_slices,
    hopper_buffers,
    hopper_serves,
    multiprocessors,
    pick_config,
    rank_pieces,
)

LOG2E = 1.4426950408889634


@triton.jit
def _decode_kernel(
    q_ptr, qpe_ptr, pages_ptr, table_ptr, lens_ptr, out_ptr, lse_ptr,
    qk_scale, num_heads, query_rows, splits, least,
    q_sb, q_ss, q_sh, qpe_sb, qpe_ss, qpe_sh, pages_sb, table_sb, lens_sb, lens_ss,
    ENTRY: tl.constexpr, RANK: tl.constexpr, R0: tl.constexpr, R1: tl.constexpr, ROPE: tl.constexpr,
    ROPE_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr, HEADS_AS_COLUMNS: tl.constexpr, PRECISION: tl.constexpr, INDIRECT: tl.constexpr,
):  # fmt: skip
    """out_ptr [B, K, Sq*H, R] and lse_ptr [B, K, Sq*H], packed; each program writes its rows of its split.

    INDIRECT: pages_ptr points to the address of the pages, so that a captured graph can be replayed on others.
    """
    if INDIRECT:
        pages_ptr = tl.multiple_of(tl.load(pages_ptr).to(tl.pointer_type(q_ptr.dtype.element_ty)), 16)
    head_axis: tl.constexpr = 1 if HEADS_AS_COLUMNS else 0
    token_axis: tl.constexpr = 1 - head_axis
    one_page: tl.constexpr = BLOCK_SIZE % BLOCK_N == 0
    split = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    live_row = row < query_rows
    token_of_row = (row // num_heads).to(tl.int64)
    head = (row % num_heads).to(tl.int64)
    seen = tl.load(lens_ptr + batch * lens_sb + token_of_row * lens_ss, mask=live_row, other=0).to(tl.int32)
    longest = tl.max(seen, axis=0)
    share = tl.maximum(tl.cdiv(tl.cdiv(longest, BLOCK_N), splits), least) * BLOCK_N
    start = split * share
    stop = tl.minimum(start + share, longest)

    q_rows = batch * q_sb + token_of_row * q_ss + head * q_sh
    q0 = load_tile(q_ptr, q_rows, live_row, 0, R0, RANK)
    acc_shape_h: tl.constexpr = R0 if HEADS_AS_COLUMNS else BLOCK_H
    acc_shape_n: tl.constexpr = BLOCK_H if HEADS_AS_COLUMNS else R0
    acc0 = tl.zeros([acc_shape_h, acc_shape_n], dtype=tl.float32)
    if R1 > 0:
        q1 = load_tile(q_ptr, q_rows, live_row, R0, R1, RANK - R0)
        acc1 = tl.zeros([R1 if HEADS_AS_COLUMNS else BLOCK_H, BLOCK_H if HEADS_AS_COLUMNS else R1], dtype=tl.float32)
    if ROPE > 0:
        qpe_rows = batch * qpe_sb + token_of_row * qpe_ss + head * qpe_sh
        q_pe = load_tile(qpe_ptr, qpe_rows, live_row, 0, ROPE_PAD, ROPE)
    biggest = tl.full([BLOCK_H], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_H], dtype=tl.float32)

    offs_n = tl.arange(0, BLOCK_N)
    table_row = table_ptr + batch * table_sb
    page = tl.load(table_row + start // BLOCK_SIZE, mask=start < stop, other=0).to(tl.int64)
    for tile in tl.range(start, stop, BLOCK_N, num_stages=NUM_STAGES):
        tokens = tile + offs_n
        live = tokens < stop
        if one_page:
            # The tile lies inside one page: a scalar id, fetched one tile ahead so that its latency is hidden, and
            # 32-bit offsets from it that the compiler folds into the addresses.
            base = pages_ptr + page * pages_sb + tile % BLOCK_SIZE * ENTRY
            entries = offs_n * ENTRY
            following = tile + BLOCK_N
            page = tl.load(table_row + following // BLOCK_SIZE, mask=following < stop, other=0).to(tl.int64)
        else:
            ids = tl.load(table_row + tokens // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
            base = pages_ptr
            entries = ids * pages_sb + tokens % BLOCK_SIZE * ENTRY
        k0 = load_tile(base, entries, live, 0, R0, RANK)
        s = tl.zeros([BLOCK_N if HEADS_AS_COLUMNS else BLOCK_H, BLOCK_H if HEADS_AS_COLUMNS else BLOCK_N], tl.float32)
        s = scores(q0, k0, s, HEADS_AS_COLUMNS, PRECISION)
        if R1 > 0:
            k1 = load_tile(base, entries, live, R0, R1, RANK - R0)
            s = scores(q1, k1, s, HEADS_AS_COLUMNS, PRECISION)
        if ROPE > 0:
            k_pe = load_tile(base, entries, live, RANK, ROPE_PAD, ROPE)
            s = scores(q_pe, k_pe, s, HEADS_AS_COLUMNS, PRECISION)

        visible = tl.expand_dims(tokens, head_axis) < tl.expand_dims(seen, token_axis)
        s = tl.where(visible, s * qk_scale, float("-inf"))
        new_biggest = tl.maximum(biggest, tl.max(s, axis=token_axis))
        # A row that has seen nothing yet keeps -inf; shifting by 0 instead turns its -inf - -inf into exp2(-inf) = 0.
        shift = tl.where(new_biggest == float("-inf"), 0.0, new_biggest)
        p = tl.exp2(s - tl.expand_dims(shift, token_axis))
        fade = tl.exp2(biggest - shift)
        biggest = new_biggest
        total = total * fade + tl.sum(p, axis=token_axis)
        p = p.to(k0.dtype)
        acc0 = values(p, k0, acc0 * tl.expand_dims(fade, token_axis), HEADS_AS_COLUMNS, PRECISION)
        if R1 > 0:
            acc1 = values(p, k1, acc1 * tl.expand_dims(fade, token_axis), HEADS_AS_COLUMNS, PRECISION)

    some = total > 0.0
    inverse = tl.where(some, 1.0 / tl.where(some, total, 1.0), 0.0)
    lse = tl.where(some, (biggest + tl.log2(tl.where(some, total, 1.0))) * 0.6931471805599453, float("-inf"))
    out_rows = (batch * splits + split) * query_rows + row
    tl.store(lse_ptr + out_rows, lse, mask=live_row)
    # An empty slice of several leaves its partial unwritten: the merge reads only slices with a finite lse.
    if (splits == 1) | (start < stop):
        acc0 = acc0 * tl.expand_dims(inverse, token_axis)
        store(out_ptr, out_rows * RANK, live_row, acc0, 0, R0, RANK, HEADS_AS_COLUMNS)
        if R1 > 0:
            acc1 = acc1 * tl.expand_dims(inverse, token_axis)
            store(out_ptr, out_rows * RANK, live_row, acc1, R0, R1, RANK - R0, HEADS_AS_COLUMNS)


@triton.jit
def _merge_kernel(
    part_ptr, part_lse_ptr, out_ptr, lse_ptr, query_rows, splits,
    RANK: tl.constexpr, SPLITS_PAD: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Weighs the K partial results of one query row by exp(lse - lse of all); writes BLOCK_R columns of it."""
    row = tl.program_id(0)
    batch = tl.program_id(2).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    k = tl.arange(0, SPLITS_PAD)
    rows = (batch * splits + k) * query_rows + row
    lse = tl.load(part_lse_ptr + rows, mask=k < splits, other=float("-inf"))
    filled = lse > float("-inf")
    biggest = tl.max(lse, axis=0)
    shift = tl.where(biggest == float("-inf"), 0.0, biggest)
    weight = tl.where(filled, tl.exp2((lse - shift) * 1.4426950408889634), 0.0)
    total = tl.sum(weight, axis=0)
    some = total > 0.0
    part = tl.load(
        part_ptr + rows[:, None] * RANK + cols[None, :], mask=filled[:, None] & (cols < RANK)[None, :], other=0.0
    )
    out = tl.sum(part * weight[:, None], axis=0) * tl.where(some, 1.0 / tl.where(some, total, 1.0), 0.0)
    at = batch * query_rows + row
    tl.store(out_ptr + at * RANK + cols, out.to(out_ptr.dtype.element_ty), mask=cols < RANK)
    if tl.program_id(1) == 0:
        tl.store(lse_ptr + at, tl.where(some, biggest + tl.log(tl.where(some, total, 1.0)), float("-inf")))


def check(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why this backend can't serve `dtype` on `device`, or None."""
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET", "0") != "1":
        return f"triton needs a CUDA device (or TRITON_INTERPRET=1), got {device}"
    if dtype not in (torch.float32, torch.float16, torch.bfloat16, fp8.FP8):
        return f"triton serves float32, float16, bfloat16 and float8_e4m3fn, got {dtype}"
    if dtype == fp8.FP8 and device.type == "cuda" and _capability(device) < (8, 9):
        return f"triton serves {dtype} from compute capability 8.9 on"
    return None


@lru_cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def plan_slices(problem: Problem, step: Step) -> Slices:
    """How one step's rows are cut; see `choose_slices`."""
    rows = step.q_len * problem.num_heads
    hopper = hopper_serves(
        problem.device, problem.dtype, problem.kv_lora_rank, problem.qk_rope_head_dim, problem.block_size
    )
    config = pick_config(rows, problem.device, problem.dtype, hopper)
    lens = step.kv_lens_host[:, -1] if step.q_len else step.kv_lens_host.new_zeros(0)
    return choose_slices(lens, rows, config, multiprocessors(problem.device))


def _default_config(q_latent: torch.Tensor, pages: torch.Tensor, rows: int, rope: int) -> DecodeConfig:
    """triton_hopper's kernels copy 16 bytes at a time, so entries must start on such boundaries.

    The one for 8-bit pages multiplies rope parts as they are stored, so it wants queries in bfloat16, too.
    """
    size = pages.dtype.itemsize
    aligned = not any(step * size % 16 for step in pages.stride()[:2]) and pages.data_ptr() % 16 == 0
    suited = pages.dtype != fp8.FP8 or q_latent.dtype == fp8.ROPE_DTYPE
    hopper = hopper_serves(pages.device, pages.dtype, q_latent.shape[-1], rope, pages.shape[1])
    return pick_config(rows, pages.device, pages.dtype, aligned and suited and hopper)


def decode(
    q_latent: torch.Tensor,
    q_pe: torch.Tensor,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    kv_lens: torch.Tensor,
    sm_scale: float,
    slices: Slices,
    config: DecodeConfig | None = None,
    base: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend q_latent [B, Sq, H, R], q_pe [B, Sq, H, P] over pages [N, S, >= R+P] through block_table [B, M].

    Pages may be 8-bit (see `fp8`) under queries of any dtype that Triton serves.

    kv_lens [B, Sq] int32/int64 on the device; `slices` cuts the rows; `config` is for benchmarks. Returns out
    [B, Sq, H, R] in the queries' dtype and lse [B, Sq, H] float32 (natural log; -inf where a length is 0). Arguments
    are taken as validated. `base` [1] int64, on the device: where the address of the pages is read from instead.
    """
    batch, q_len, heads, rank = q_latent.shape
    rope, rows = q_pe.shape[-1], q_len * heads
    out = q_latent.new_empty(batch, q_len, heads, rank)
    lse = q_latent.new_empty(batch, q_len, heads, dtype=torch.float32)
    if out.numel() == 0:
        return out, lse
    config = config or _default_config(q_latent, pages, rows, rope)
    splits = slices.count
    part, part_lse = out, lse
    if splits > 1:
        part = q_latent.new_empty(batch, splits, rows, rank, dtype=torch.float32)
        part_lse = q_latent.new_empty(batch, splits, rows, dtype=torch.float32)
    grid = triton.cdiv(rows, config.block_h), splits, batch
    arguments = (
        q_latent, q_pe, pages if base is None else base, block_table, kv_lens, part, part_lse,
        sm_scale * LOG2E, heads, rows, splits, slices.least,
        *q_latent.stride()[:3], *q_pe.stride()[:3], pages.stride(0), block_table.stride(0), *kv_lens.stride(),
    )  # fmt: skip
    with torch.cuda.device(pages.device) if pages.is_cuda else nullcontext():
        offsets = {}
        if pages.dtype == fp8.FP8:
            offsets = {"ROPE_AT": fp8.rope_offset(rank), "SCALE_AT": fp8.scale_offset(rank, rope)}
        if config.gluon:
            from . import triton_hopper, triton_hopper_fp8

            kernel = triton_hopper_fp8.decode_fp8_kernel if offsets else triton_hopper.decode_kernel
            kernel[grid](
                *arguments, ENTRY=pages.stride(1), R=rank, P=rope, S=pages.shape[1], BLOCK_H=config.block_h,
                BLOCK_N=config.block_n, BUFFERS=hopper_buffers(config, rank, rope, pages.dtype),
                INDIRECT=base is not None, WARPS=config.num_warps, **offsets, num_warps=config.num_warps,
            )  # fmt: skip
        else:
            first, second = rank_pieces(rank)
            kernel = decode_fp8_kernel if offsets else _decode_kernel
            kernel[grid](
                *arguments, ENTRY=pages.stride(1), RANK=rank, R0=first, R1=second, ROPE=rope,
                ROPE_PAD=max(16, triton.next_power_of_2(rope)), BLOCK_SIZE=pages.shape[1],
                BLOCK_H=config.block_h, BLOCK_N=config.block_n, NUM_STAGES=config.num_stages,
                HEADS_AS_COLUMNS=config.heads_as_columns, INDIRECT=base is not None,
                PRECISION="ieee" if q_latent.dtype == torch.float32 else "tf32", **offsets, num_warps=config.num_warps,
            )  # fmt: skip
        if splits > 1:
            _merge_kernel[(rows, triton.cdiv(rank, 64), batch)](
                part, part_lse, out, lse, rows, splits,
                RANK=rank, SPLITS_PAD=triton.next_power_of_2(splits), BLOCK_R=64, num_warps=4,
            )  # fmt: skip
    return out, lse
