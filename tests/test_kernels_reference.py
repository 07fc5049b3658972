"""The torch oracle against an independent float64 computation, and the plain-torch page operations."""

from __future__ import annotations

import pytest
import torch
from mla_cases import check, dense, make, rms

from hf_mla import kernels
from hf_mla.kernels import reference

S = 16
LENGTHS = [0, 1, S - 1, S, S + 1, 2 * S, 117]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize(("heads", "rank", "rope"), [(1, 128, 64), (5, 96, 32), (17, 48, 0), (16, 528, 64)])
def test_against_float64(heads, rank, rope, q_len, dtype):
    x = make(LENGTHS, heads=heads, rank=rank, rope=rope, q_len=q_len, dtype=dtype)
    check(x, *x.decode("reference"))


@pytest.mark.parametrize("scale", [10.0, 100.0])
def test_large_queries_and_keys(scale):
    x = make(LENGTHS, scale=scale)
    check(x, *x.decode("reference"), factor=4)


def test_float64_is_computed_in_float64():
    x = make(LENGTHS, dtype=torch.float64)
    out, _ = x.decode("reference")
    assert rms(out - dense(x, torch.float64)[0]) < 1e-14


@pytest.mark.parametrize("lens", [[0], [0, 0]])
def test_nothing_stored(lens):
    x = make(lens, q_len=2)
    out, lse = x.decode("reference")
    assert (out == 0).all() and (lse == float("-inf")).all()


def test_no_rows():
    x = make([3])
    x.q_latent, x.q_pe = x.q_latent[:0], x.q_pe[:0]
    x.block_table, x.kv_lens = x.block_table[:0], x.kv_lens[:0]
    out, lse = x.decode("reference")
    assert out.shape == x.q_latent.shape and lse.shape == out.shape[:-1]


@pytest.mark.parametrize("rank", [96, 384, 528])
@pytest.mark.parametrize("rope", [32, 64])
def test_write_gather_round_trip(rank, rope):
    storage = torch.full((6, S, rank + rope + 7), float("nan"))
    pages = storage[1:, :, : rank + rope + 3]
    rows = torch.randn(5, 2 * (rank + rope))
    ckv, k_pe = rows[:, :rank], rows[:, rank + 3 : rank + 3 + rope]
    slots = torch.tensor([7, -1, 0, 5 * S - 1, 2 * S])
    reference.write_latents(pages, ckv, k_pe, slots)
    got_ckv, got_pe = kernels.gather_latents(pages, slots.view(5, 1), rank, rope)
    kept = (slots >= 0)[:, None]
    assert torch.equal(got_ckv[:, 0], ckv * kept) and torch.equal(got_pe[:, 0], k_pe * kept)
    assert int((~storage.isnan()).sum()) == 4 * (rank + rope)  # nothing beside the four entries was touched


def test_copy_blocks():
    storage = torch.randn(8, S, 24)
    pages = storage[:, :, :20]
    before = storage.clone()
    kernels.copy_blocks(pages, torch.tensor([1, 5]), torch.tensor([7, 0]))
    assert torch.equal(pages[[7, 0]], before[[1, 5], :, :20])
    assert torch.equal(storage[1:7], before[1:7]) and torch.equal(storage[..., 20:], before[..., 20:])
