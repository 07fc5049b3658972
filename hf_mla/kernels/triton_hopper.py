"""MLA decode for Hopper in Gluon, Triton's lower level: the next tiles are copied while this one is worked on.

Shapes: B rows, Sq query tokens a row, H heads, R = kv_lora_rank, P = qk_rope_head_dim, S = block_size, K splits.
The same split of the work, and the same results, as triton_decode's kernel with heads as columns: scores
[BLOCK_N, BLOCK_H] = latents @ q^T, out [R, BLOCK_H] = latents^T @ p. There, with two buffers, the compiler waits for a
tile and starts to copy the next one only after it; to overlap them it wants a third buffer, for which 64 tokens of
512 + 64 values leave no room. Here a tile is requested as soon as the buffer that it goes to was read.
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

# Renamed between Triton 3.6 and 3.9.
_copy = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.jit
def _copy_tile(
    pages_ptr, page, k0_buffer, kpe_buffer, tile, stop,
    ENTRY: gl.constexpr, R: gl.constexpr, P: gl.constexpr, S: gl.constexpr, BLOCK_N: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Start copying one tile of one page to shared memory; tokens from `stop` on are filled with zeros, never read."""
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32] if R >= 256 else [256 // R, R // 8], [WARPS, 1], [1, 0])
    base = pages_ptr + tile % S * ENTRY + page
    row = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, wide))
    col = gl.arange(0, R, layout=gl.SliceLayout(0, wide))
    _copy(k0_buffer, base + (row[:, None] * ENTRY + col[None, :]), mask=(tile + row < stop)[:, None])
    narrow: gl.constexpr = gl.BlockedLayout([1, 8], [256 // P, P // 8], [WARPS, 1], [1, 0])
    row = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, narrow))
    col = gl.arange(0, P, layout=gl.SliceLayout(0, narrow))
    _copy(kpe_buffer, base + R + (row[:, None] * ENTRY + col[None, :]), mask=(tile + row < stop)[:, None])
    async_copy.commit_group()


@gluon.jit
def _stage_queries(
    ptr, batch_offset, stride_s, stride_h, first, num_heads, query_rows,
    WIDTH: gl.constexpr, BLOCK_H: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Query rows [BLOCK_H, WIDTH] in shared memory; rows beyond the last are zero."""
    threads: gl.constexpr = [256 // WIDTH, WIDTH // 8] if WIDTH < 256 else [1, 32]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], threads, [WARPS, 1], [1, 0])
    row = first + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, layout))
    col = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    offset = (row // num_heads).to(gl.int64) * stride_s + (row % num_heads).to(gl.int64) * stride_h
    values = gl.load(ptr + batch_offset + offset[:, None] + col[None, :], mask=(row < query_rows)[:, None], other=0.0)
    shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_H, WIDTH], ptr.dtype.element_ty)
    return gl.allocate_shared_memory(ptr.dtype.element_ty, [BLOCK_H, WIDTH], shared, values)


@gluon.jit
def decode_kernel(
    q_ptr, qpe_ptr, pages_ptr, table_ptr, lens_ptr, out_ptr, lse_ptr,
    qk_scale, num_heads, query_rows, splits, least,
    q_sb, q_ss, q_sh, qpe_sb, qpe_ss, qpe_sh, pages_sb, table_sb, lens_sb, lens_ss,
    ENTRY: gl.constexpr, R: gl.constexpr, P: gl.constexpr, S: gl.constexpr, BLOCK_H: gl.constexpr,
    BLOCK_N: gl.constexpr, BUFFERS: gl.constexpr, INDIRECT: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """As triton_decode's kernel: out_ptr [B, K, Sq*H, R], lse_ptr [B, K, Sq*H]. S is a multiple of BLOCK_N."""
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    groups: gl.constexpr = WARPS // 4
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, groups], [16, BLOCK_H // groups, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_H, 16])
    row_layout: gl.constexpr = gl.SliceLayout(0, score_layout)
    token_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    out_row_layout: gl.constexpr = gl.SliceLayout(0, out_layout)
    if INDIRECT:
        pages_ptr = gl.multiple_of(gl.load(pages_ptr).to(gl.pointer_type(dtype)), 16)
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

    k_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, R], dtype)
    kpe_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, P], dtype)
    p_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_H], dtype)
    k_buffers = gl.allocate_shared_memory(dtype, [BUFFERS, BLOCK_N, R], k_shared)
    kpe_buffers = gl.allocate_shared_memory(dtype, [BUFFERS, BLOCK_N, P], kpe_shared)
    p_buffer = gl.allocate_shared_memory(dtype, [BLOCK_N, BLOCK_H], p_shared)

    table_row = table_ptr + batch * table_sb
    page = gl.load(table_row + start // S, mask=start < stop, other=0).to(gl.int64)
    for i in gl.static_range(BUFFERS):
        _copy_tile(
            pages_ptr, page * pages_sb, k_buffers.index(i), kpe_buffers.index(i), start + i * BLOCK_N, stop,
            ENTRY, R, P, S, BLOCK_N, WARPS,
        )  # fmt: skip
        following = start + (i + 1) * BLOCK_N
        page = gl.load(table_row + following // S, mask=following < stop, other=0).to(gl.int64)
    q = _stage_queries(q_ptr, batch * q_sb, q_ss, q_sh, first, num_heads, query_rows, R, BLOCK_H, WARPS)
    q_pe = _stage_queries(qpe_ptr, batch * qpe_sb, qpe_ss, qpe_sh, first, num_heads, query_rows, P, BLOCK_H, WARPS)

    acc = gl.zeros([R, BLOCK_H], gl.float32, out_layout)
    biggest = gl.full([BLOCK_H], float("-inf"), gl.float32, row_layout)
    none = gl.zeros([BLOCK_N, BLOCK_H], gl.float32, score_layout)
    totals = none  # summed over tokens after the loop: a sum across warps costs barriers
    token = gl.arange(0, BLOCK_N, layout=token_layout)
    buffer = 0
    for tile in range(start, stop, BLOCK_N):
        # Each thread waits for its own copies and shows them to the tensor cores; after the barrier all are there.
        async_copy.wait_group(BUFFERS - 1)
        fence_async_shared()
        _barrier()
        k, k_pe = k_buffers.index(buffer), kpe_buffers.index(buffer)
        s = warpgroup_mma(k, q.permute((1, 0)), none, use_acc=False, is_async=True)
        s = warpgroup_mma(k_pe, q_pe.permute((1, 0)), s, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])

        s = gl.where((tile + token)[:, None] < seen[None, :], s * qk_scale, float("-inf"))
        new_biggest = gl.maximum(biggest, gl.max(s, axis=0))
        # A row that has seen nothing yet keeps -inf; shifting by 0 instead turns its -inf - -inf into exp2(-inf) = 0.
        shift = gl.where(new_biggest == float("-inf"), 0.0, new_biggest)
        p = gl.exp2(s - shift[None, :])
        fade = gl.exp2(biggest - shift)
        biggest = new_biggest
        totals = totals * fade[None, :] + p
        p_buffer.store(p.to(dtype))
        acc = acc * gl.convert_layout(fade, out_row_layout)[None, :]
        fence_async_shared()
        _barrier()
        acc = warpgroup_mma(k.permute((1, 0)), p_buffer, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        _barrier()  # every warp has read this buffer: it may be filled anew

        following = tile + BUFFERS * BLOCK_N
        _copy_tile(pages_ptr, page * pages_sb, k, k_pe, following, stop, ENTRY, R, P, S, BLOCK_N, WARPS)
        following += BLOCK_N
        page = gl.load(table_row + following // S, mask=following < stop, other=0).to(gl.int64)
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
