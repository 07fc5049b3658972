"""MLA decode over 8-bit pages in Triton: triton_decode's kernel for latents of a byte a value and a scale a token.

Shapes as there; entries as in `fp8`. A tile of latents is widened in registers after its load, which is exact, and
never multiplied by its scales; those go where only one value a token is left:

    score of a token   (q_latent . ckv8) * scale + q_pe . k_pe
    output             sum (weight * scale) * ckv8

Latents are widened to float16, not to bfloat16: the device has an instruction for it, and weights in float16 are more
exact. So that nothing leaves float16's range, a query row is divided by its largest magnitude, and a token's scale
goes into the exponent of its weight: the running maximum is that of weight * scale.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_decode_tile import load_tile, scores, store, values


@triton.jit
def decode_fp8_kernel(
    q_ptr, qpe_ptr, pages_ptr, table_ptr, lens_ptr, out_ptr, lse_ptr,
    qk_scale, num_heads, query_rows, splits, least,
    q_sb, q_ss, q_sh, qpe_sb, qpe_ss, qpe_sh, pages_sb, table_sb, lens_sb, lens_ss,
    ENTRY: tl.constexpr, RANK: tl.constexpr, R0: tl.constexpr, R1: tl.constexpr, ROPE: tl.constexpr,
    ROPE_PAD: tl.constexpr, ROPE_AT: tl.constexpr, SCALE_AT: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr, HEADS_AS_COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr, INDIRECT: tl.constexpr,
):  # fmt: skip
    """As triton_decode's kernel. ENTRY, ROPE_AT, SCALE_AT: bytes from an entry to the next, to k_pe, to the scale."""
    if INDIRECT:
        pages_ptr = tl.multiple_of(tl.load(pages_ptr).to(tl.pointer_type(tl.float8e4nv)), 16)
    head_axis: tl.constexpr = 1 if HEADS_AS_COLUMNS else 0
    token_axis: tl.constexpr = 1 - head_axis
    one_page: tl.constexpr = BLOCK_SIZE % BLOCK_N == 0
    pe_dtype: tl.constexpr = qpe_ptr.dtype.element_ty
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
    wide0 = load_tile(q_ptr, q_rows, live_row, 0, R0, RANK).to(tl.float32)
    largest = tl.max(tl.abs(wide0), axis=1)
    acc_shape_h: tl.constexpr = R0 if HEADS_AS_COLUMNS else BLOCK_H
    acc_shape_n: tl.constexpr = BLOCK_H if HEADS_AS_COLUMNS else R0
    acc0 = tl.zeros([acc_shape_h, acc_shape_n], dtype=tl.float32)
    if R1 > 0:
        wide1 = load_tile(q_ptr, q_rows, live_row, R0, R1, RANK - R0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(wide1), axis=1))
        acc1 = tl.zeros([R1 if HEADS_AS_COLUMNS else BLOCK_H, BLOCK_H if HEADS_AS_COLUMNS else R1], dtype=tl.float32)
    largest = tl.where(largest > 0.0, largest, 1.0)
    q0 = (wide0 / largest[:, None]).to(tl.float16)
    if R1 > 0:
        q1 = (wide1 / largest[:, None]).to(tl.float16)
    if ROPE > 0:
        qpe_rows = batch * qpe_sb + token_of_row * qpe_ss + head * qpe_sh
        q_pe = load_tile(qpe_ptr, qpe_rows, live_row, 0, ROPE_PAD, ROPE)
    row_scale = tl.expand_dims(largest * qk_scale, token_axis)
    biggest = tl.full([BLOCK_H], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_H], dtype=tl.float32)

    offs_n = tl.arange(0, BLOCK_N)
    table_row = table_ptr + batch * table_sb
    page = tl.load(table_row + start // BLOCK_SIZE, mask=start < stop, other=0).to(tl.int64)
    for tile in tl.range(start, stop, BLOCK_N, num_stages=NUM_STAGES):
        tokens = tile + offs_n
        live = tokens < stop
        if one_page:  # as in triton_decode's kernel
            base = pages_ptr + page * pages_sb + tile % BLOCK_SIZE * ENTRY
            entries = offs_n * ENTRY
            following = tile + BLOCK_N
            page = tl.load(table_row + following // BLOCK_SIZE, mask=following < stop, other=0).to(tl.int64)
        else:
            ids = tl.load(table_row + tokens // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
            base = pages_ptr
            entries = ids * pages_sb + tokens % BLOCK_SIZE * ENTRY
        scale = tl.load((base + SCALE_AT).to(tl.pointer_type(tl.float32)) + entries // 4, mask=live, other=1.0)
        k0 = load_tile(base, entries, live, 0, R0, RANK).to(tl.float16)
        s = tl.zeros([BLOCK_N if HEADS_AS_COLUMNS else BLOCK_H, BLOCK_H if HEADS_AS_COLUMNS else BLOCK_N], tl.float32)
        s = scores(q0, k0, s, HEADS_AS_COLUMNS, PRECISION)
        if R1 > 0:
            k1 = load_tile(base, entries, live, R0, R1, RANK - R0).to(tl.float16)
            s = scores(q1, k1, s, HEADS_AS_COLUMNS, PRECISION)
        s = s * tl.expand_dims(scale, head_axis) * row_scale
        if ROPE > 0:
            rope_base = (base + ROPE_AT).to(tl.pointer_type(tl.bfloat16))
            k_pe = load_tile(rope_base, entries // 2, live, 0, ROPE_PAD, ROPE).to(pe_dtype)
            none = tl.zeros(s.shape, tl.float32)
            s += scores(q_pe, k_pe, none, HEADS_AS_COLUMNS, PRECISION) * qk_scale

        visible = tl.expand_dims(tokens, head_axis) < tl.expand_dims(seen, token_axis)
        s = tl.where(visible, s + tl.expand_dims(tl.log2(scale), head_axis), float("-inf"))
        new_biggest = tl.maximum(biggest, tl.max(s, axis=token_axis))
        # A row that has seen nothing yet keeps -inf; shifting by 0 instead turns its -inf - -inf into exp2(-inf) = 0.
        shift = tl.where(new_biggest == float("-inf"), 0.0, new_biggest)
        p = tl.exp2(s - tl.expand_dims(shift, token_axis))
        fade = tl.exp2(biggest - shift)
        biggest = new_biggest
        total = total * fade + tl.sum(p / tl.expand_dims(scale, head_axis), axis=token_axis)
        p = p.to(tl.float16)
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
