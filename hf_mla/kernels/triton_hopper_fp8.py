"""triton_hopper's kernel for 8-bit pages: tiles are copied as bytes, then widened to float16 in shared memory.

Shapes as there; entries as in `fp8`; where scales go, and why float16, as in `triton_decode_fp8`. Queries are
bfloat16, as rope parts are. Bytes of the next tiles arrive while this one is widened and worked on.
"""

from __future__ import annotations

import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .triton_hopper import _barrier, _copy, _stage_queries


@gluon.jit
def _copy_tile(
    base, k_buffer, kpe_buffer, scale_buffer, tile, stop,
    ENTRY: gl.constexpr, R: gl.constexpr, P: gl.constexpr, ROPE_AT: gl.constexpr, SCALE_AT: gl.constexpr,
    BLOCK_N: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Start copying the entries from `base` on to shared memory; tokens from `stop` on are filled with zeros."""
    wide: gl.constexpr = gl.BlockedLayout([1, 16], [512 // R, R // 16], [WARPS, 1], [1, 0])
    row = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, wide))
    col = gl.arange(0, R, layout=gl.SliceLayout(0, wide))
    _copy(k_buffer, base + (row[:, None] * ENTRY + col[None, :]), mask=(tile + row < stop)[:, None])
    narrow: gl.constexpr = gl.BlockedLayout([1, 8], [256 // P, P // 8], [WARPS, 1], [1, 0])
    row = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, narrow))
    col = gl.arange(0, P, layout=gl.SliceLayout(0, narrow))
    rope = (base + ROPE_AT).to(gl.pointer_type(gl.bfloat16))
    _copy(kpe_buffer, rope + (row[:, None] * (ENTRY // 2) + col[None, :]), mask=(tile + row < stop)[:, None])
    single: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    row = gl.arange(0, BLOCK_N, layout=single)
    scales = (base + SCALE_AT).to(gl.pointer_type(gl.float32))
    _copy(scale_buffer, scales + row * (ENTRY // 4), mask=tile + row < stop)
    async_copy.commit_group()


@gluon.jit
def _stage_latent_queries(
    ptr, batch_offset, stride_s, stride_h, first, num_heads, query_rows,
    R: gl.constexpr, BLOCK_H: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Query rows [BLOCK_H, R] in shared memory, each over its largest magnitude, in float16; these magnitudes."""
    threads: gl.constexpr = [256 // R, R // 8] if R < 256 else [1, 32]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], threads, [WARPS, 1], [1, 0])
    row = first + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, layout))
    col = gl.arange(0, R, layout=gl.SliceLayout(0, layout))
    offset = (row // num_heads).to(gl.int64) * stride_s + (row % num_heads).to(gl.int64) * stride_h
    values = gl.load(ptr + batch_offset + offset[:, None] + col[None, :], mask=(row < query_rows)[:, None], other=0.0)
    values = values.to(gl.float32)
    largest = gl.max(gl.maximum(values, -values), axis=1)
    largest = gl.where(largest > 0.0, largest, 1.0)
    shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_H, R], gl.float16)
    scaled = (values / largest[:, None]).to(gl.float16)
    return gl.allocate_shared_memory(gl.float16, [BLOCK_H, R], shared, scaled), largest


@gluon.jit
def decode_fp8_kernel(
    q_ptr, qpe_ptr, pages_ptr, table_ptr, lens_ptr, out_ptr, lse_ptr,
    qk_scale, num_heads, query_rows, splits, least,
    q_sb, q_ss, q_sh, qpe_sb, qpe_ss, qpe_sh, pages_sb, table_sb, lens_sb, lens_ss,
    ENTRY: gl.constexpr, R: gl.constexpr, P: gl.constexpr, ROPE_AT: gl.constexpr, SCALE_AT: gl.constexpr,
    S: gl.constexpr, BLOCK_H: gl.constexpr, BLOCK_N: gl.constexpr, BUFFERS: gl.constexpr, INDIRECT: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """As triton_hopper's kernel. ENTRY, ROPE_AT, SCALE_AT: bytes from an entry to the next, to k_pe, to the scale."""
    groups: gl.constexpr = WARPS // 4
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, groups], [16, BLOCK_H // groups, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_H, 16])
    row_layout: gl.constexpr = gl.SliceLayout(0, score_layout)
    token_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    out_row_layout: gl.constexpr = gl.SliceLayout(0, out_layout)
    wide: gl.constexpr = gl.BlockedLayout([1, 16], [512 // R, R // 16], [WARPS, 1], [1, 0])
    if INDIRECT:
        pages_ptr = gl.multiple_of(gl.load(pages_ptr).to(gl.pointer_type(gl.float8e4nv)), 16)
    split = gl.program_id(1)
    batch = gl.program_id(2).to(gl.int64)
    first = gl.program_id(0) * BLOCK_H

    row = first + gl.arange(0, BLOCK_H, layout=row_layout)
    live_row = row < query_rows
    seen = gl.load(lens_ptr + batch * lens_sb + (row // num_heads) * lens_ss, mask=live_row, other=0).to(gl.int32)
    longest = gl.max(seen, axis=0)
    share = gl.maximum(gl.cdiv(gl.cdiv(longest, BLOCK_N), splits), least) * BLOCK_N
    start = split * share
    stop = gl.minimum(start + share, longest)

    raw_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, R], gl.float8e4nv)
    k_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, R], gl.float16)
    kpe_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, P], gl.bfloat16)
    p_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_H], gl.float16)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    raw_buffers = gl.allocate_shared_memory(gl.float8e4nv, [BUFFERS, BLOCK_N, R], raw_shared)
    kpe_buffers = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, BLOCK_N, P], kpe_shared)
    scale_buffers = gl.allocate_shared_memory(gl.float32, [BUFFERS, BLOCK_N], flat)
    k = gl.allocate_shared_memory(gl.float16, [BLOCK_N, R], k_shared)
    p_buffer = gl.allocate_shared_memory(gl.float16, [BLOCK_N, BLOCK_H], p_shared)

    table_row = table_ptr + batch * table_sb
    page = gl.load(table_row + start // S, mask=start < stop, other=0).to(gl.int64)
    for i in gl.static_range(BUFFERS):
        tile = start + i * BLOCK_N
        _copy_tile(
            pages_ptr + page * pages_sb + tile % S * ENTRY, raw_buffers.index(i), kpe_buffers.index(i),
            scale_buffers.index(i), tile, stop, ENTRY, R, P, ROPE_AT, SCALE_AT, BLOCK_N, WARPS,
        )  # fmt: skip
        following = start + (i + 1) * BLOCK_N
        page = gl.load(table_row + following // S, mask=following < stop, other=0).to(gl.int64)
    q, largest = _stage_latent_queries(
        q_ptr, batch * q_sb, q_ss, q_sh, first, num_heads, query_rows, R, BLOCK_H, WARPS
    )
    q_pe = _stage_queries(qpe_ptr, batch * qpe_sb, qpe_ss, qpe_sh, first, num_heads, query_rows, P, BLOCK_H, WARPS)
    row_scale = gl.convert_layout(largest, row_layout) * qk_scale

    acc = gl.zeros([R, BLOCK_H], gl.float32, out_layout)
    biggest = gl.full([BLOCK_H], float("-inf"), gl.float32, row_layout)
    none = gl.zeros([BLOCK_N, BLOCK_H], gl.float32, score_layout)
    totals = none  # summed over tokens after the loop: a sum across warps costs barriers
    token = gl.arange(0, BLOCK_N, layout=token_layout)
    buffer = 0
    for tile in range(start, stop, BLOCK_N):
        # Each thread waits for its own copies; after the barrier all are there.
        async_copy.wait_group(BUFFERS - 1)
        _barrier()
        raw, k_pe, scales = raw_buffers.index(buffer), kpe_buffers.index(buffer), scale_buffers.index(buffer)
        k.store(raw.load(wide).to(gl.float16))
        scale = gl.where(tile + token < stop, scales.load(token_layout), 1.0)
        fence_async_shared()  # shows what was stored and copied to the tensor cores
        _barrier()
        s = warpgroup_mma(k, q.permute((1, 0)), none, use_acc=False, is_async=True)
        s_pe = warpgroup_mma(k_pe, q_pe.permute((1, 0)), none, use_acc=False, is_async=True)
        s, s_pe = warpgroup_mma_wait(0, deps=[s, s_pe])

        s = s * scale[:, None] * row_scale[None, :] + (s_pe * qk_scale + gl.log2(scale)[:, None])
        s = gl.where((tile + token)[:, None] < seen[None, :], s, float("-inf"))
        new_biggest = gl.maximum(biggest, gl.max(s, axis=0))
        # A row that has seen nothing yet keeps -inf; shifting by 0 instead turns its -inf - -inf into exp2(-inf) = 0.
        shift = gl.where(new_biggest == float("-inf"), 0.0, new_biggest)
        p = gl.exp2(s - shift[None, :])
        fade = gl.exp2(biggest - shift)
        biggest = new_biggest
        totals = totals * fade[None, :] + p * (1.0 / scale)[:, None]
        p_buffer.store(p.to(gl.float16))
        acc = acc * gl.convert_layout(fade, out_row_layout)[None, :]
        fence_async_shared()
        _barrier()
        acc = warpgroup_mma(k.permute((1, 0)), p_buffer, acc, is_async=True)

        # Every warp has read this buffer and its scores: it may be filled anew while the product runs.
        following = tile + BUFFERS * BLOCK_N
        _copy_tile(
            pages_ptr + page * pages_sb + following % S * ENTRY, raw, k_pe, scales, following, stop,
            ENTRY, R, P, ROPE_AT, SCALE_AT, BLOCK_N, WARPS,
        )  # fmt: skip
        following += BLOCK_N
        page = gl.load(table_row + following // S, mask=following < stop, other=0).to(gl.int64)
        acc = warpgroup_mma_wait(0, deps=[acc])
        buffer = gl.where(buffer == BUFFERS - 1, 0, buffer + 1)
    async_copy.wait_group(0)
    total = gl.sum(totals, axis=0)

    some = total > 0.0
    safe = gl.where(some, total, 1.0)
    out_row = (batch * splits + split) * query_rows + row
    lse = gl.where(some, (biggest + gl.log2(safe)) * 0.6931471805599453, float("-inf"))
    gl.store(lse_ptr + out_row, lse, mask=live_row)
    # An empty slice of several leaves its partial unwritten: the merge reads only slices with a finite lse.
    if (splits == 1) | (start < stop):
        inverse = gl.convert_layout(gl.where(some, 1.0 / safe, 0.0), out_row_layout)
        head = first + gl.arange(0, BLOCK_H, layout=out_row_layout)
        column = gl.arange(0, R, layout=gl.SliceLayout(1, out_layout))
        offset = ((batch * splits + split) * query_rows + head) * R
        gl.store(
            out_ptr + offset[None, :] + column[:, None],
            (acc * inverse[None, :]).to(out_ptr.dtype.element_ty),
            mask=(head < query_rows)[None, :],
        )
