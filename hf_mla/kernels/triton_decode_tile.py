"""What the Triton decode kernels do with one tile, heads as rows or as columns (see triton_decode).

BLOCK_H query rows, BLOCK_N tokens; q [BLOCK_H, width], k [BLOCK_N, width], scores [BLOCK_H, BLOCK_N] or transposed.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_tile(base, rows, live, col0, width: tl.constexpr, size: tl.constexpr):
    """[rows, width] values from base + rows + col0; dead rows and columns beyond `size` read as zero, never NaN."""
    cols = tl.arange(0, width)
    mask = live[:, None]
    if size < width:
        mask = mask & (cols < size)[None, :]
    return tl.load(base + rows[:, None] + (col0 + cols)[None, :], mask=mask, other=0.0)


@triton.jit
def scores(q, k, acc, HEADS_AS_COLUMNS: tl.constexpr, PRECISION: tl.constexpr):
    if HEADS_AS_COLUMNS:
        acc = tl.dot(k, tl.trans(q), acc, input_precision=PRECISION)
    else:
        acc = tl.dot(q, tl.trans(k), acc, input_precision=PRECISION)
    return acc


@triton.jit
def values(p, k, acc, HEADS_AS_COLUMNS: tl.constexpr, PRECISION: tl.constexpr):
    if HEADS_AS_COLUMNS:
        acc = tl.dot(tl.trans(k), p, acc, input_precision=PRECISION)
    else:
        acc = tl.dot(p, k, acc, input_precision=PRECISION)
    return acc


@triton.jit
def store(ptr, rows, live, acc, col0, width: tl.constexpr, size: tl.constexpr, HEADS_AS_COLUMNS: tl.constexpr):
    cols = tl.arange(0, width)
    if HEADS_AS_COLUMNS:
        acc = tl.trans(acc)
    mask = live[:, None]
    if size < width:
        mask = mask & (cols < size)[None, :]
    tl.store(ptr + rows[:, None] + (col0 + cols)[None, :], acc.to(ptr.dtype.element_ty), mask=mask)
