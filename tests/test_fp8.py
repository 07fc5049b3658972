"""Latents in 8 bits: what is stored, and that every reader and writer of such pages agrees with `kernels/fp8.py`."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch
from mla_cases import Inputs, dense, make
from tiny import relative_error

from hf_mla import kernels
from hf_mla.cache.layout import EntryLayout
from hf_mla.kernels import fp8, reference, reference_fused

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
S = 16
LENGTHS = [0, 1, S - 1, S, S + 1, 2 * S, 117]


def quantised(x: Inputs) -> tuple[Inputs, Inputs]:
    """x over 8-bit pages, all bytes of unused slots and of the padding NaN's, and x over what these pages mean."""
    rank, rope = x.q_latent.shape[-1], x.q_pe.shape[-1]
    layout = EntryLayout(rank, rope, x.pages.shape[1], 16, fp8.FP8)
    pages = layout.allocate(x.pages.shape[0], x.pages.device)
    pages.view(torch.uint8).fill_(0xFF)
    slots = (~x.pages[..., :rank].isnan().all(-1)).flatten().nonzero().squeeze(1)
    taken = x.pages.flatten(0, 1)[slots].float()
    spread = torch.logspace(-2, 1, len(slots), device=slots.device)[:, None]  # scales that differ
    taken[:, :rank] *= spread
    reference.write_latents(pages, taken[:, :rank], taken[:, rank : rank + rope], slots)
    meant = torch.full((*pages.shape[:2], rank + rope), float("nan"), dtype=torch.float64, device=x.pages.device)
    ckv, k_pe = reference.gather_latents(pages, slots, rank, rope)
    meant.flatten(0, 1)[slots] = torch.cat([ckv, k_pe], -1).double()
    return dataclasses.replace(x, pages=pages), dataclasses.replace(x, pages=meant)


def test_entries_of_deepseeks_size_take_656_bytes() -> None:
    layout = EntryLayout(512, 64, 64, 16, fp8.FP8)
    assert layout.entry_values == 656 and layout.block_bytes == 64 * 656
    assert layout.allocate(2, torch.device("cpu")).shape == (2, 64, 656)
    assert fp8.rope_offset(40) == 48 and fp8.scale_offset(40, 3) == 56 and fp8.entry_bytes(40, 0) == 52


@pytest.mark.parametrize("rank, rope", [(512, 64), (40, 16), (33, 0), (96, 3)])
def test_what_is_stored_is_near_and_an_outlier_in_k_pe_costs_nothing(rank: int, rope: int) -> None:
    torch.manual_seed(0)
    ckv, k_pe = torch.randn(50, rank) * torch.logspace(-6, 6, 50)[:, None], torch.randn(50, rope)
    ckv[7] = 0
    k_pe[:, :1] = 3000.0
    got_ckv, got_pe = fp8.unpack(fp8.pack(ckv, k_pe), rank, rope)
    kept = torch.arange(50) != 7
    errors = (got_ckv - ckv)[kept].norm(dim=1) / ckv[kept].norm(dim=1)
    assert errors.max() < 0.035 and (got_ckv[7] == 0).all()
    assert torch.equal(got_pe, k_pe.bfloat16().float())


def test_pages_keep_to_their_slots() -> None:
    pages = EntryLayout(40, 16, S, 32, fp8.FP8).allocate(4, torch.device("cpu"))
    pages.view(torch.uint8).fill_(0xFF)
    slots = torch.tensor([7, -1, 0, 3 * S])
    ckv, k_pe = torch.randn(4, 40), torch.randn(4, 16)
    kernels.write_latents(pages, ckv, k_pe, slots)
    got, got_pe = kernels.gather_latents(pages, slots.view(2, 2), 40, 16)
    kept = (slots >= 0)[:, None]
    assert relative_error(got.view(4, 40), ckv * kept) < 0.04
    assert torch.equal(got_pe.view(4, 16), k_pe.bfloat16().float() * kept)
    assert int((pages.view(torch.uint8) != 0xFF).any(-1).sum()) == 3
    kernels.copy_blocks(pages, torch.tensor([0, 3]), torch.tensor([2, 1]))
    assert torch.equal(pages[2].view(torch.uint8), pages[0].view(torch.uint8))
    assert torch.equal(pages[1].view(torch.uint8), pages[3].view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_reference_reads_what_the_pages_mean(dtype: torch.dtype) -> None:
    x, meant = quantised(make(LENGTHS, heads=5, q_len=2, rank=96, rope=32, dtype=torch.float32))
    x.q_latent, x.q_pe = x.q_latent.to(dtype), x.q_pe.to(dtype)
    out, lse = x.decode("reference")
    meant.q_latent, meant.q_pe = x.q_latent, x.q_pe
    expected, expected_lse = dense(meant, torch.float64)
    assert out.dtype == dtype and out.shape == x.q_latent.shape
    assert relative_error(out, expected) < 1e-6 + torch.finfo(dtype).eps
    assert torch.equal(lse.isinf(), expected_lse.isinf())
    full = expected_lse.isfinite()
    assert torch.allclose(lse[full].double(), expected_lse[full], atol=1e-4)


@pytest.mark.parametrize("outliers", [False, True])
def test_attention_of_full_size_is_near(outliers: bool) -> None:
    """DeepSeek's 512 + 64 over 4096 tokens, weights far from uniform: within 5% of attention over exact latents."""
    x = make([4096], heads=16, rank=512, rope=64, block=64)
    x.pages[..., 512:514] *= 30 if outliers else 1
    exact, _ = x.decode("reference")
    slots = (x.block_table[0, :64, None].long() * 64 + torch.arange(64)).flatten()
    ckv, k_pe = kernels.gather_latents(x.pages, slots, 512, 64)
    pages = EntryLayout(512, 64, 64, 16, fp8.FP8).allocate(len(x.pages), torch.device("cpu"))
    kernels.write_latents(pages, ckv, k_pe, slots)
    coarse, _ = dataclasses.replace(x, pages=pages).decode("reference")
    assert 1e-3 < relative_error(coarse, exact) < 0.05


def test_the_door_refuses_by_name() -> None:
    x, _ = quantised(make([5], rank=96, rope=32))
    with pytest.raises(ValueError, match="flashinfer"):
        x.decode("flashinfer")
    with pytest.raises(ValueError, match="q_pe must be torch.float32"):
        kernels.decode(x.plan("reference"), x.q_latent, x.q_pe.half(), x.pages, 1.0)
    with pytest.raises(ValueError, match="q_latent must be"):
        kernels.decode(x.plan("reference"), x.q_latent.to(fp8.FP8), x.q_pe.to(fp8.FP8), x.pages, 1.0)
    with pytest.raises(ValueError, match="16 bytes"):
        kernels.decode(x.plan("reference"), x.q_latent, x.q_pe, x.pages[..., 1:], 1.0)
    with pytest.raises(ValueError, match="k_pe must be"):
        kernels.write_latents(x.pages, x.q_latent[0, 0], x.q_pe[0, 0].half(), torch.zeros(4, dtype=torch.int64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("heads", "q_len", "rank", "rope"), [(1, 1, 128, 64), (5, 2, 96, 32), (17, 1, 48, 0)])
def test_triton_reads_what_the_pages_mean(heads: int, q_len: int, rank: int, rope: int, dtype: torch.dtype) -> None:
    x, meant = quantised(
        make([0, 1, S, 41], heads=heads, q_len=q_len, rank=rank, rope=rope, dtype=dtype, device=DEVICE)
    )
    check_triton(x, meant)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("block_n", [16, 64])
def test_triton_in_slices(splits: int, columns: bool, block_n: int) -> None:
    x, meant = quantised(make([0, 5, 64], heads=5, dtype=torch.float16, scale=3.0, device=DEVICE))
    check_triton(x, meant, splits, (16, block_n, 4, 2, columns))


def check_triton(x: Inputs, meant: Inputs, splits: int | None = None, config: tuple | None = None) -> None:
    triton_decode = pytest.importorskip("hf_mla.kernels.triton_decode")
    from hf_mla.kernels.triton_plan import DecodeConfig, Slices

    slices = x.plan("triton").state if splits is None else Slices(splits)
    out, lse = triton_decode.decode(
        x.q_latent, x.q_pe, x.pages, x.block_table, x.kv_lens, x.sm_scale, slices, config and DecodeConfig(*config)
    )
    expected, expected_lse = dense(meant, torch.float64)
    assert out.dtype == x.q_latent.dtype and torch.isfinite(out).all()
    assert relative_error(out, expected) < (2e-3 if out.dtype != torch.bfloat16 else 5e-3)
    assert torch.equal(lse.isinf(), expected_lse.isinf())
    full = expected_lse.isfinite()
    assert relative_error(lse[full], expected_lse[full]) < 2e-3


def written(rank: int, rope: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ckv, k_pe and slots of 5 tokens; in the interpreter, which rounds wrongly, of values that need no rounding."""
    torch.manual_seed(0)
    ckv = torch.randn(5, rank, device=DEVICE)
    if INTERPRETED:
        ckv[:, 0] = 3.5
        values, scale = fp8.quantise(ckv)
        ckv = values.float() * scale
        assert torch.equal(fp8.quantise(ckv)[0].float(), values.float())
    slots = torch.tensor([7, -1, 0, 5 * S - 1, 2 * S], device=DEVICE)
    return ckv, torch.randn(5, rope, device=DEVICE).bfloat16().float(), slots


@pytest.mark.parametrize("rank, rope", [(512, 64), (40, 16), (96, 0)])
def test_triton_writes_what_the_reference_writes(rank: int, rope: int) -> None:
    triton_write = pytest.importorskip("hf_mla.kernels.triton_write")
    ckv, k_pe, slots = written(rank, rope)
    pages = EntryLayout(rank, rope, S, 16, fp8.FP8).allocate(6, torch.device(DEVICE))
    pages.view(torch.uint8).fill_(0)
    expected = pages.clone()
    triton_write.write_latents(pages, ckv, k_pe, slots)
    reference.write_latents(expected, ckv, k_pe, slots)
    assert torch.equal(pages.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("rope", ["complex", "interleave", "half"])
def test_the_fused_write_is_the_references(rope: str) -> None:
    triton_fused = pytest.importorskip("hf_mla.kernels.triton_fused")
    torch.manual_seed(0)
    rank, width, heads = 96, 32, 3
    q, compressed = torch.randn(5, heads, 20 + width, device=DEVICE), torch.randn(5, rank + width, device=DEVICE)
    angles = torch.randn(5, width if rope == "half" else width // 2, device=DEVICE)
    arguments = q, compressed, torch.rand(rank, device=DEVICE) + 0.5, 1e-6, angles.cos(), angles.sin(), rope
    pages = EntryLayout(rank, width, S, 16, fp8.FP8).allocate(6, torch.device(DEVICE))
    pages.view(torch.uint8).fill_(0)
    expected = pages.clone()
    slots = torch.tensor([7, -1, 0, 5 * S - 1, 2 * S], device=DEVICE)
    got = triton_fused.rope_norm_write(*arguments, pages, slots)
    assert relative_error(got, reference_fused.rope_norm_write(*arguments, expected, slots)) < 1e-6
    (ckv, k_pe), (expected_ckv, expected_pe) = (
        reference.gather_latents(p, slots, rank, width) for p in (pages, expected)
    )
    # The interpreter cuts off what bf16 can't hold, and its rounding to 8 bits may lose a power of two.
    assert relative_error(ckv, expected_ckv) < (0.2 if INTERPRETED else 0.01)
    assert relative_error(k_pe, expected_pe) < 2**-7


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "rank, rope, block", [(512, 64, 64), (512, 64, 16), (256, 64, 64), (64, 32, 128), (384, 64, 64)]
)
@pytest.mark.parametrize("heads, q_len", [(1, 1), (16, 1), (20, 2), (128, 1)])
def test_full_sizes(heads: int, q_len: int, rank: int, rope: int, block: int, dtype: torch.dtype) -> None:
    lens = [0, 1, block - 1, block, block + 1, 700, 64 * 40]
    x, meant = quantised(
        make(lens, heads=heads, q_len=q_len, rank=rank, rope=rope, block=block, dtype=dtype, device="cuda")
    )
    check_triton(x, meant)
    for splits in (1, 7):
        check_triton(x, meant, splits)


@pytest.mark.gpu
def test_a_graph_reads_pages_at_another_address() -> None:
    x, meant = quantised(make([5, 700], heads=16, rank=512, rope=64, block=64, dtype=torch.bfloat16, device="cuda"))
    plan, base = x.plan("triton"), torch.tensor([x.pages.data_ptr()], device="cuda")

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        return kernels.decode(plan, x.q_latent, x.q_pe, x.pages, x.sm_scale, base)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = call()
    moved = x.pages.clone()
    x.pages.view(torch.uint8).fill_(0xFF)
    base.fill_(moved.data_ptr())
    graph.replay()
    assert relative_error(out, dense(meant, torch.float64)[0]) < 5e-3
