"""Every backend on a CUDA device, real shapes: dtypes, heads, ranks, lengths, NaN tails, offsets, graphs, races."""

from __future__ import annotations

import pytest
import torch
from mla_cases import check, make

from hf_mla import kernels

pytestmark = pytest.mark.gpu

S = 64
LENGTHS = [0, 1, S - 1, S, S + 1, 2 * S, 9000]
HALF = [torch.bfloat16, torch.float16]


def decode_or_skip(x, backend: str):
    """The result, or a skip if the backend says that it can't: it must say so by a ValueError."""
    why = kernels.available_backends()[backend]
    if why:
        pytest.skip(why)
    try:
        plan = x.plan(backend)
    except ValueError as error:
        pytest.skip(str(error))
    return kernels.decode(plan, x.q_latent, x.q_pe, x.pages, x.sm_scale)


@pytest.mark.parametrize("backend", kernels.BACKENDS)
@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize("heads", [1, 4, 5, 16, 17, 20, 40, 64, 128])
def test_heads(heads, dtype, backend):
    x = make(LENGTHS, heads=heads, rank=512, block=S, dtype=dtype, device="cuda")
    check(x, *decode_or_skip(x, backend))


@pytest.mark.parametrize("backend", kernels.BACKENDS)
@pytest.mark.parametrize("q_len", [2, 5])
@pytest.mark.parametrize("heads", [4, 16, 20, 128])
def test_several_queries_a_row(heads, q_len, backend):
    lens = LENGTHS if backend != "flashinfer" else [0, 5, S - 1, S, S + 1, 2 * S, 9000]
    x = make(lens, heads=heads, q_len=q_len, rank=512, block=S, dtype=torch.bfloat16, device="cuda")
    check(x, *decode_or_skip(x, backend))


@pytest.mark.parametrize("backend", kernels.BACKENDS)
@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("rope", [32, 64])
@pytest.mark.parametrize("rank", [96, 128, 256, 384, 448, 512, 528])
def test_ranks(rank, rope, heads, backend):
    x = make(LENGTHS[:-1] + [700], heads=heads, rank=rank, rope=rope, block=S, dtype=torch.bfloat16, device="cuda")
    check(x, *decode_or_skip(x, backend))


@pytest.mark.parametrize("backend", kernels.BACKENDS)
@pytest.mark.parametrize("block", [16, 32, 128, 256])
def test_block_sizes(block, backend):
    lens = [0, 1, block - 1, block, block + 1, 1000]
    x = make(lens, heads=16, rank=512, block=block, dtype=torch.bfloat16, device="cuda")
    check(x, *decode_or_skip(x, backend))


@pytest.mark.parametrize("backend", kernels.BACKENDS)
@pytest.mark.parametrize("scale", [10.0, 100.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_large_queries_and_keys(scale, dtype, backend):
    x = make(LENGTHS, heads=16, rank=512, block=S, dtype=dtype, scale=scale, device="cuda")
    check(x, *decode_or_skip(x, backend), factor=4, orders=6)


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("splits", [1, 2, 7, 8, 64, 128])
def test_split_counts(splits, heads):
    from hf_mla.kernels import triton_decode, triton_plan

    x = make(LENGTHS, heads=heads, rank=512, block=S, dtype=torch.bfloat16, device="cuda")
    slices = triton_plan.Slices(splits)
    check(x, *triton_decode.decode(x.q_latent, x.q_pe, x.pages, x.block_table, x.kv_lens, x.sm_scale, slices))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("heads", [5, 20, 128])
@pytest.mark.parametrize("table", ["CONFIGS", "HOPPER_CONFIGS"])
def test_every_config(table, heads, dtype):
    """Each tuned config on more and on fewer query rows than it was tuned for; splits that lengths don't divide."""
    from hf_mla.kernels import triton_decode, triton_plan

    if table == "HOPPER_CONFIGS" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper device")
    for rank, rope in ((512, 64), (128, 32)):
        x = make(LENGTHS, heads=heads, rank=rank, rope=rope, q_len=2, block=S, dtype=dtype, device="cuda")
        for (_, size), config in getattr(triton_plan, table).items():
            for splits in (1, 3) if size == dtype.itemsize else ():
                slices = triton_plan.Slices(splits)
                arguments = x.q_latent, x.q_pe, x.pages, x.block_table, x.kv_lens, x.sm_scale, slices, config
                check(x, *triton_decode.decode(*arguments))


@pytest.mark.parametrize("backend", kernels.BACKENDS)
@pytest.mark.parametrize("heads", [16, 128])
def test_padded_entries_and_int64_tables_are_bit_equal(heads, backend):
    packed = make(LENGTHS, heads=heads, rank=512, block=S, dtype=torch.bfloat16, device="cuda")
    padded = make(
        LENGTHS, heads=heads, rank=512, block=S, dtype=torch.bfloat16, device="cuda", table_dtype=torch.int64
    )
    blocks = packed.pages.shape[0]
    storage = packed.pages.new_full((blocks, S + 16, 640), float("nan"))
    padded.pages = storage[:, :S]
    padded.pages[..., :576] = packed.pages
    for a, b in zip(decode_or_skip(padded, backend), decode_or_skip(packed, backend), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("backend", ["triton", "flashinfer"])
@pytest.mark.parametrize("heads", [16, 128])
def test_a_thousand_runs_are_bit_equal(heads, backend):
    x = make([0, 1, 300, 9000], heads=heads, rank=512, block=S, dtype=torch.bfloat16, device="cuda")
    first = decode_or_skip(x, backend)
    plan = x.plan(backend)
    same = torch.ones((), dtype=torch.bool, device="cuda")
    for _ in range(1000):
        out, lse = kernels.decode(plan, x.q_latent, x.q_pe, x.pages, x.sm_scale)
        same &= (out == first[0]).all() & (lse == first[1]).all()
    assert bool(same)


@pytest.mark.slow
@pytest.mark.parametrize("backend", kernels.BACKENDS)
def test_offsets_beyond_32_bits(backend):
    """Slots beyond 3.8 million and pages beyond 4 GiB: written there, read from there."""
    blocks = 70_000  # 4.5 M slots, 5.2 GB
    if torch.cuda.mem_get_info()[0] < 7 << 30:
        pytest.skip("needs 7 GiB of GPU memory")
    x = make([100, 64], heads=16, rank=512, block=S, dtype=torch.bfloat16, device="cuda", table_dtype=torch.int64)
    near = x.block_table.clone()
    far = torch.empty(blocks, S, 576, dtype=torch.bfloat16, device="cuda")
    used = [(0, 0), (0, 1), (1, 0)]
    for i, (b, c) in enumerate(used):
        far[blocks - 1 - i] = float("nan")
        x.block_table[b, c] = blocks - 1 - i
    slots, rows = [], []
    for b, length in enumerate((100, 64)):
        for t in range(length):
            slots.append(int(x.block_table[b, t // S]) * S + t % S)
            rows.append(x.pages[near[b, t // S], t % S])
    rows, slots = torch.stack(rows), torch.tensor(slots, device="cuda")
    assert slots.min() > 3_800_000 and far.numel() * 2 > 4 << 30
    kernels.write_latents(far, rows[:, :512], rows[:, 512:], slots)
    x.pages = far
    check(x, *decode_or_skip(x, backend))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("heads", [16, 128])
def test_graph_captured_short_replayed_long(heads, dtype):
    """Fixed buffers, lengths that grow from 5 to 4000 between capture and replay, and rows that become empty."""
    x = make(
        [4000, 3000, 65, 0], heads=heads, rank=512, block=S, dtype=torch.bfloat16, device="cuda", table_dtype=dtype
    )
    grown = x.kv_lens.clone()
    x.kv_lens.copy_(torch.tensor([[5], [0], [64], [0]]))
    plan = x.plan("triton", kv_lens_host=torch.full((4, 1), 4000, dtype=torch.int32))
    kernels.decode(plan, x.q_latent, x.q_pe, x.pages, x.sm_scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = kernels.decode(plan, x.q_latent, x.q_pe, x.pages, x.sm_scale)
    for lens in (x.kv_lens.clone(), grown):
        x.kv_lens.copy_(lens)
        graph.replay()
        check(x, out, lse)


@pytest.mark.parametrize("rank", [96, 384, 512, 528])
@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
def test_writes(rank, dtype):
    storage = torch.full((40, S, rank + 64 + 7), float("nan"), dtype=dtype, device="cuda")
    pages = storage[1:, :, : rank + 64 + 3]
    slots = torch.randperm(39 * S, device="cuda")[:1000]
    slots[::7] = -1
    ckv, k_pe = torch.randn(1000, rank, device="cuda").to(dtype), torch.randn(1000, 64, device="cuda").to(dtype)
    kernels.write_latents(pages, ckv, k_pe, slots)
    got_ckv, got_pe = kernels.gather_latents(pages, slots, rank, 64)
    kept = (slots >= 0)[:, None]
    assert torch.equal(got_ckv, torch.where(kept, ckv, 0)) and torch.equal(got_pe, torch.where(kept, k_pe, 0))
    assert int((~storage.isnan()).sum()) == int(kept.sum()) * (rank + 64)


@pytest.mark.parametrize(("q_len", "lens"), [(2, [1, 5]), (1, [])])
def test_flashinfer_refuses_or_serves(q_len, lens):
    if why := kernels.available_backends()["flashinfer"]:
        pytest.skip(why)
    x = make(lens or [3], q_len=q_len, rank=512, block=S, dtype=torch.bfloat16, device="cuda")
    if lens:
        with pytest.raises(ValueError, match="kv_lens"):
            x.plan("flashinfer")
        return
    x.q_latent, x.q_pe = x.q_latent[:0], x.q_pe[:0]
    x.block_table, x.kv_lens = x.block_table[:0], x.kv_lens[:0]
    assert x.decode("flashinfer")[0].shape == x.q_latent.shape
