"""Triton kernels: small shapes through the interpreter on a CPU, real ones on a GPU (with every backend there is)."""

from __future__ import annotations

import pytest
import torch
from mla_cases import check, make

from hf_mla import kernels

triton_decode = pytest.importorskip("hf_mla.kernels.triton_decode")
triton_write = pytest.importorskip("hf_mla.kernels.triton_write")

triton_plan = pytest.importorskip("hf_mla.kernels.triton_plan")

Config = triton_plan.DecodeConfig
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
S = 16
LENGTHS = [0, 1, S - 1, S, S + 1, 2 * S, 117]


def run(x, splits=None, config=None):
    slices = x.plan("triton").state if splits is None else triton_plan.Slices(splits)
    return triton_decode.decode(x.q_latent, x.q_pe, x.pages, x.block_table, x.kv_lens, x.sm_scale, slices, config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("heads", "q_len", "rank", "rope"),
    [
        (1, 1, 128, 64),
        (4, 3, 96, 32),
        (5, 1, 384, 64),
        (16, 1, 48, 0),
        (17, 1, 128, 64),
        (20, 4, 64, 32),
        (3, 1, 528, 64),
    ],
)
def test_shapes(heads, q_len, rank, rope, dtype):
    x = make(LENGTHS, heads=heads, q_len=q_len, rank=rank, rope=rope, dtype=dtype, device=DEVICE)
    check(x, *run(x))


@pytest.mark.parametrize("splits", [1, 2, 8, triton_plan.MAX_SPLITS])
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("block_n", [16, 64])
@pytest.mark.slow
def test_splits_and_configs(splits, columns, block_n):
    x = make([0, 5, 64, 117], heads=5, q_len=2, dtype=torch.float16, device=DEVICE)
    check(x, *run(x, splits, Config(16, block_n, 4, 2, heads_as_columns=columns)))


@pytest.mark.parametrize("scale", [10.0, 100.0])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.slow
def test_large_queries_and_keys(scale, splits):
    x = make(LENGTHS, scale=scale, device=DEVICE)
    check(x, *run(x, splits), factor=4)


@pytest.mark.parametrize("block", [16, 32, 128])
def test_block_sizes(block):
    x = make([0, 1, block - 1, block, block + 1], block=block, dtype=torch.float16, device=DEVICE)
    check(x, *run(x))


def test_strides_and_tables_do_not_change_a_bit():
    """Sliced queries, padded entries and blocks, int64 tables and lengths: the packed, int32 result to the bit."""
    x = make(LENGTHS, heads=5, dtype=torch.float16, device=DEVICE)
    expected = run(x, 2)
    blocks, size, width = x.pages.shape
    storage = torch.full((blocks, 2 * size, width + 64), float("nan"), dtype=x.pages.dtype, device=DEVICE)
    x_pages, x.pages = x.pages, storage[:, 1 : size + 1, 32 : width + 32]
    x.pages.copy_(x_pages)
    wide = torch.full((len(LENGTHS), 3, 7, 3 * 128), float("nan"), dtype=x.pages.dtype, device=DEVICE)
    wide[:, 1:2, 1:6, 16:144] = x.q_latent
    x.q_latent = wide[:, 1:2, 1:6, 16:144]
    x.block_table, x.kv_lens = x.block_table.long(), x.kv_lens.long()
    for a, b in zip(run(x, 2), expected, strict=True):
        assert torch.equal(a, b)


def test_size_one_dimensions_with_odd_strides():
    x = make([37], heads=1, device=DEVICE)
    expected = run(x)
    x.q_latent = x.q_latent.as_strided(x.q_latent.shape, (7, 3, 5, 1))
    x.q_pe = x.q_pe.as_strided(x.q_pe.shape, (11, 1, 3, 1))
    assert torch.equal(run(x)[0], expected[0])


def test_shared_blocks_and_a_row_alone():
    """Two rows over the same blocks, and a row of a batch alone, give the same answer."""
    x = make([40, 40, 3], device=DEVICE)
    x.block_table[1] = x.block_table[0]
    x.q_latent[1], x.q_pe[1] = x.q_latent[0], x.q_pe[0]
    out, _ = run(x, 2)
    assert torch.equal(out[0], out[1])
    alone = make([40, 40, 3], device=DEVICE)
    alone.q_latent, alone.q_pe = x.q_latent[2:], x.q_pe[2:]
    alone.block_table, alone.kv_lens = x.block_table[2:], x.kv_lens[2:]
    assert torch.equal(run(alone, 2)[0][0], out[2])


def test_no_rows():
    x = make([3], device=DEVICE)
    out, lse = triton_decode.decode(
        x.q_latent[:0], x.q_pe[:0], x.pages, x.block_table[:0], x.kv_lens[:0], 1.0, triton_plan.Slices()
    )
    assert out.shape == (0, 1, 4, 128) and lse.shape == (0, 1, 4)


@pytest.mark.parametrize("rank", [96, 384, 528])
@pytest.mark.parametrize("rope", [0, 32, 64])
def test_write_is_exact_and_touches_nothing_else(rank, rope):
    storage = torch.full((6, S, rank + rope + 7), float("nan"), device=DEVICE)
    pages = storage[1:, :, : rank + rope + 3]
    rows = torch.randn(5, 2 * (rank + rope), device=DEVICE)
    ckv, k_pe = rows[:, :rank], rows[:, rank + 3 : rank + 3 + rope]
    slots = torch.tensor([7, -1, 0, 5 * S - 1, 2 * S], device=DEVICE)
    triton_write.write_latents(pages, ckv, k_pe, slots)
    got_ckv, got_pe = kernels.gather_latents(pages, slots, rank, rope)
    kept = (slots >= 0)[:, None]
    assert torch.equal(got_ckv, ckv * kept) and torch.equal(got_pe, k_pe * kept)
    assert int((~storage.isnan()).sum()) == 4 * (rank + rope)


def test_least_tiles_a_slice():
    """Short rows use fewer slices; the unused ones leave nothing behind."""
    x = make([0, 3, 40, 117], dtype=torch.float16, device=DEVICE)
    config = Config(16, 16, 4, 2)
    for least in (1, 2, 5, 100):
        slices = triton_plan.Slices(6, least)
        arguments = x.q_latent, x.q_pe, x.pages, x.block_table, x.kv_lens, x.sm_scale, slices, config
        check(x, *triton_decode.decode(*arguments))


def test_choice_of_slices():
    """One slice when the rows fill the machine; many for one long row, among short ones too; never more than tiles."""
    config = Config(16, 64, 4, 2)

    def count(lens):
        return triton_plan.choose_slices(torch.tensor(lens, dtype=torch.int32), 16, config, 132).count

    assert count([1024] * 256) == 1
    assert 48 <= count([32768]) <= triton_plan.MAX_SPLITS
    assert count([100]) <= 2
    assert count([4096] * 32) == 4
    assert count([32768] + [1000] * 199) >= 8
    assert count([32768] * 200) >= 8
    assert count([]) == count([0]) == 1
