"""One layer's MLA decode over paged latents: checked against the reference, then timed (microseconds, bf16, 512 + 64).

    python benchmarks/kernels.py                     # the key cells, packed and padded entries, every backend there is
    python benchmarks/kernels.py --full              # batch 1 to 256, 1k to 128k tokens
    python benchmarks/kernels.py --sweep             # Triton's configs and split counts at the key cells
    python benchmarks/kernels.py --cells 32x4096 --heads 16 --backends triton
    python benchmarks/kernels.py --fp8               # latents in 8 bits, 656 bytes a token; with --sweep likewise

A cell is BATCHxCONTEXT. Two times, both with cold latents: `us` is one call as a user makes it, between events after a
flush of the L2 (launches from Python included where they are not hidden); `graph` is one call within a CUDA graph of
many over different pools, as a captured decode step runs it. Medians. The floor is the larger of bytes / 4.2 TB/s and
flops / 710 TFLOP/s, both measured on an H200. Results are appended to benchmarks/results/kernels.jsonl.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.records import Recorder
from benchmarks.timing import replay_us
from hf_mla import kernels
from hf_mla.kernels import fp8, reference

RANK, ROPE, BLOCK = 512, 64, 64
BYTES_PER_S, FLOPS = 4.2e12, 710e12
COLD_BYTES = 192 << 20  # several times the L2
KEY_CELLS = ("32x4096", "200x1024", "8x8192", "1x32768", "1x1024")
FULL_CELLS = tuple(f"{b}x{n}" for b in (1, 8, 32, 64, 200, 256) for n in (1024, 4096, 8192, 32768, 131072))
SCALE = (RANK + ROPE) ** -0.5

Call = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass
class Cell:
    """Queries, a permuted block table, and copies of the pool enough that a cycle through them finds none in L2."""

    batch: int
    context: int
    heads: int
    entry: int
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        columns = -(-self.context // BLOCK)
        blocks = self.batch * columns
        copies = max(1, min(160, -(-COLD_BYTES // (blocks * BLOCK * self.entry * self.dtype.itemsize))))
        storage = torch.empty(copies, blocks, BLOCK, self.entry, dtype=self.dtype, device="cuda")
        self.pools = list(storage if self.dtype == fp8.FP8 else storage[..., : RANK + ROPE])
        slots = torch.arange(blocks * BLOCK, device="cuda")
        for pool in self.pools:
            ckv, k_pe = (torch.randn(len(slots), n, dtype=torch.bfloat16, device="cuda") for n in (RANK, ROPE))
            kernels.write_latents(pool, ckv, k_pe, slots)
        self.table = torch.randperm(blocks, device="cuda").view(self.batch, columns).int()
        self.host = torch.full((self.batch, 1), self.context, dtype=torch.int32)
        self.lens = self.host.cuda()
        q = torch.randn(self.batch, 1, self.heads, RANK + ROPE, device="cuda", dtype=torch.bfloat16) * 2
        self.query, self.q_latent, self.q_pe = q, q[..., :RANK], q[..., RANK:]

    @property
    def floor_us(self) -> float:
        tokens = self.batch * self.context
        token = fp8.entry_bytes(RANK, ROPE) if self.dtype == fp8.FP8 else 2 * (RANK + ROPE)
        read = tokens * token + 2 * self.batch * self.heads * (2 * RANK + ROPE)
        return max(read / BYTES_PER_S, 2 * tokens * self.heads * (2 * RANK + ROPE) / FLOPS) * 1e6

    def expected(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows checked, and the reference's out and lse for them over the first pool."""
        rows = torch.tensor(sorted({0, self.batch // 2, self.batch - 1}), device="cuda")
        out, lse = reference.decode(
            self.q_latent[rows].float(),
            self.q_pe[rows].float(),
            self.pools[0],
            self.table[rows],
            self.lens[rows],
            SCALE,
        )
        return rows, out, lse

    def check(self, call: Call, expected: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        """Raise unless out agrees to bf16's rounding and lse to 1e-3."""
        rows, out, lse = expected
        got, got_lse = call(self.pools[0])
        error = ((got[rows] - out).square().mean() / out.square().mean()).sqrt().item()
        lse_error = (got_lse[rows] - lse).abs().max().item()
        if not (error < 2**-7 and lse_error < 1e-3):
            raise AssertionError(f"wrong result: relative error {error:.2g}, lse error {lse_error:.2g}")


def time_calls(cell: Cell, call: Call, seconds: float = 0.15) -> float:
    """Median time of one call between events after a flush of the L2."""
    flush = torch.empty(COLD_BYTES, dtype=torch.int8, device="cuda")
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 5:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        flush.zero_()
        events[0].record()
        call(cell.pools[len(times) % len(cell.pools)])
        events[1].record()
        torch.cuda.synchronize()
        times.append(events[0].elapsed_time(events[1]) * 1e3)
    return statistics.median(times)


def time_graph(cell: Cell, call: Call, seconds: float = 0.1) -> float:
    """Median time of one call among many in a CUDA graph that cycles through the pools."""
    pools = cell.pools * max(1, 4 // len(cell.pools))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(pools[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for pool in pools:
            call(pool)
    return replay_us(graph, len(pools), seconds)


def backend_call(cell: Cell, name: str) -> Call:
    """The call of one of hf_mla's backends, planned through the door, or of FlashMLA for comparison."""
    if name == "flashmla":
        return flashmla_call(cell)
    plan = kernels.plan(
        cell.table, cell.lens, kv_lens_host=cell.host, num_heads=cell.heads, kv_lora_rank=RANK,
        qk_rope_head_dim=ROPE, block_size=BLOCK, dtype=cell.dtype, backend=name,
    )  # fmt: skip
    return lambda pages: kernels.decode(plan, cell.q_latent, cell.q_pe, pages, SCALE)


def flashmla_call(cell: Cell) -> Call:
    import flash_mla

    meta = flash_mla.get_mla_metadata()
    meta = meta[0] if isinstance(meta, tuple) else meta

    def call(pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = flash_mla.flash_mla_with_kvcache(
            cell.query, pages.unsqueeze(2), cell.table, cell.lens[:, 0], RANK, meta, softmax_scale=SCALE, causal=True,
            use_legacy=True,
        )  # fmt: skip
        return out, lse.transpose(1, 2)

    return call


def backends() -> list[str]:
    names = [name for name, why in kernels.available_backends().items() if why is None and name != "reference"]
    try:
        import flash_mla  # noqa: F401
    except Exception:
        return names
    return [*names, "flashmla"]


def parse_cells(texts: list[str], memory_gib: float, entry: int) -> Iterator[tuple[int, int]]:
    for text in texts:
        batch, context = (int(part) for part in text.split("x"))
        if batch * context * entry * 2 <= memory_gib * 2**30:
            yield batch, context


def measure(args: argparse.Namespace, recorder: Recorder) -> str:
    names = args.backends or backends()
    for entry in args.entries:
        for heads in args.heads:
            for batch, context in parse_cells(args.cells, args.memory_gib, entry):
                measure_cell(Cell(batch, context, heads, entry, args.dtype), names, recorder)
                torch.cuda.empty_cache()
    return report(recorder.records, names)


def measure_cell(cell: Cell, names: list[str], recorder: Recorder) -> None:
    expected = cell.expected()
    for name in names:
        label = f"{name} {cell.heads} heads {cell.batch}x{cell.context} entry {cell.entry}"
        recorder.guarded(label, partial(measure_one, cell, name, expected, recorder))


def measure_one(cell: Cell, name: str, expected: tuple[torch.Tensor, ...], recorder: Recorder) -> None:
    call = backend_call(cell, name)
    cell.check(call, expected)  # type: ignore[arg-type]
    us = time_calls(cell, call)
    try:
        graph = time_graph(cell, call)
    except Exception as error:
        torch.cuda.synchronize()
        print(f"{name}: not captured: {error}", file=sys.stderr)
        graph = None
    recorder.add(
        "kernel", name=name, heads=cell.heads, batch=cell.batch, context=cell.context, entry=cell.entry, us=us,
        graph_us=graph, floor_us=cell.floor_us, dtype=str(cell.dtype),
    )  # fmt: skip
    shown = f"{graph:8.1f}" if graph else "       -"
    where = f"{cell.heads:4} heads {cell.batch:4}x{cell.context:<6} entry {cell.entry}"
    print(f"{name:10} {where} us {us:8.1f} graph {shown}", flush=True)


def report(records: list[dict], names: list[str]) -> str:
    """One line a cell: the floor, then each backend's call / graph."""
    lines = [f"{'heads cell entry':24} {'floor':>8} " + " ".join(f"{name + ' us/graph':>21}" for name in names)]
    cells = dict.fromkeys((r["heads"], r["batch"], r["context"], r["entry"]) for r in records)
    for key in cells:
        found = {r["name"]: r for r in records if (r["heads"], r["batch"], r["context"], r["entry"]) == key}
        columns = []
        for name in names:
            r = found.get(name)
            graph = f"{r['graph_us']:.1f}" if r and r["graph_us"] else "-"
            columns.append(f"{r['us']:.1f} / {graph}" if r else "failed")
        floor = next(iter(found.values()))["floor_us"]
        title = f"{key[0]:4} {key[1]}x{key[2]} {key[3]}"
        lines.append(f"{title:24} {floor:8.1f} " + " ".join(f"{c:>21}" for c in columns))
    return "\n".join(lines)


def sweep_configs(heads: int, dtype: torch.dtype) -> list:
    """Candidates for 16 and for 128 heads: tile, warps, stages, heads as rows or as columns."""
    from hf_mla.kernels.triton_plan import DecodeConfig as C

    few = [
        C(16, 64, 8, 2, True, True), C(16, 64, 4, 2, True, True), C(64, 64, 8, 2, True, True),
        C(16, 64, 4, 2, True), C(16, 64, 8, 2, True), C(16, 32, 4, 2, programs_per_sm=3),
        C(16, 32, 4, 3, programs_per_sm=2), C(16, 32, 8, 3, programs_per_sm=2), C(16, 32, 4, 4),
        C(16, 64, 4, 2, programs_per_sm=2), C(16, 64, 8, 2, programs_per_sm=2), C(16, 64, 4, 3), C(16, 64, 8, 3),
        C(16, 16, 4, 4, programs_per_sm=3), C(64, 32, 8, 3),
    ]  # fmt: skip
    many = [
        C(64, 64, 8, 2, True, True), C(32, 64, 8, 2, True, True), C(32, 64, 4, 2, True, True),
        C(16, 64, 8, 2, True, True), C(64, 64, 8, 2), C(64, 64, 8, 2, True), C(64, 32, 8, 2), C(64, 32, 8, 3),
        C(64, 32, 4, 3), C(32, 64, 8, 2, True), C(128, 32, 8, 2),
    ]  # fmt: skip
    if dtype == fp8.FP8:
        few = [
            C(16, 32, 4, 2, programs_per_sm=2), C(16, 32, 4, 3, programs_per_sm=2), C(16, 32, 8, 2, programs_per_sm=2),
            C(16, 64, 8, 2), C(16, 64, 8, 3, True, True), C(16, 64, 8, 2, True, True), C(16, 64, 4, 3, True, True),
            C(32, 64, 8, 3, True, True),
        ]  # fmt: skip
        many = [C(64, 64, 8, 2, True, True), C(32, 64, 8, 3, True, True), C(32, 32, 8, 2), C(64, 32, 8, 2)]
    return few if heads <= 16 else many


def compile_config(job: tuple[int, object], entry: int, dtype: torch.dtype) -> str | None:
    """Compile one config in a process of its own (into Triton's disk cache) by a tiny step; the error or None."""
    heads, config = job
    cell = Cell(2, 256, heads, entry, dtype)
    try:
        for splits in (1, 2):
            sweep_call(cell, splits, config)(cell.pools[0])
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:100] if str(error) else ''}"
    return None


def sweep(args: argparse.Namespace, recorder: Recorder) -> str:
    end = time.perf_counter() + args.seconds
    jobs = [(heads, config) for heads in args.heads for config in sweep_configs(heads, args.dtype)]
    with ProcessPoolExecutor(args.workers, mp_context=get_context("spawn")) as pool:
        errors = list(pool.map(partial(compile_config, entry=args.entries[0], dtype=args.dtype), jobs))
    for job, error in zip(jobs, errors, strict=True):
        if error:
            print(f"skipped {job}: {error}", flush=True)
    usable = [job for job, error in zip(jobs, errors, strict=True) if not error]
    entry = args.entries[0]
    cells = [(h, b, n) for h in args.heads for b, n in parse_cells(args.cells, args.memory_gib, entry)]
    lines = []
    for left, (heads, batch, context) in zip(range(len(cells), 0, -1), cells, strict=True):
        now = time.perf_counter()
        configs = [config for h, config in usable if h == heads]
        cell = Cell(batch, context, heads, entry, args.dtype)
        lines += sweep_cell(cell, configs, now + (end - now) / left, recorder)
        del cell
        torch.cuda.empty_cache()
    return "\n".join(lines)


def sweep_cell(cell: Cell, configs: list, end: float, recorder: Recorder) -> list[str]:
    """Time every config at the split counts around the chosen one until `end`; the best, and the best as chosen."""
    from hf_mla.kernels import triton_plan

    slots = torch.cuda.get_device_properties(0).multi_processor_count
    expected, found = cell.expected(), []
    for config in configs:
        auto = triton_plan.choose_slices(cell.host[:, 0], cell.heads, config, slots).count
        most = min(triton_plan.MAX_SPLITS, -(-cell.context // config.block_n))
        for splits in dict.fromkeys((auto, max(1, auto // 2), min(auto * 2, most), min(auto + 1, most))):
            if time.perf_counter() > end:
                break
            call = sweep_call(cell, splits, config)
            try:
                cell.check(call, expected)
                us = time_graph(cell, call, seconds=0.02)
            except Exception as error:
                print(f"failed {cell.heads} heads {cell.batch}x{cell.context} {config} {splits}: {str(error)[:200]}")
                torch.cuda.synchronize()
                continue
            found.append((us, splits, splits == auto, config))
            recorder.add(
                "sweep", heads=cell.heads, batch=cell.batch, context=cell.context, splits=splits, auto_splits=auto,
                config=str(config), graph_us=us, floor_us=cell.floor_us, dtype=str(cell.dtype),
            )  # fmt: skip
    found.sort(key=lambda item: item[0])
    shown = dict.fromkeys(found[:6] + [item for item in found if item[2]][:4])
    title = f"{cell.heads} heads {cell.batch}x{cell.context}, floor {cell.floor_us:.1f} us (* the chosen split count):"
    return [title, *(f"  {us:8.1f} splits {k:3}{'*' if auto else ' '} {config}" for us, k, auto, config in shown)]


def sweep_call(cell: Cell, splits: int, config: object) -> Call:
    from hf_mla.kernels import triton_decode, triton_plan

    slices = triton_plan.Slices(splits)
    return lambda pages: triton_decode.decode(
        cell.q_latent, cell.q_pe, pages, cell.table, cell.lens, SCALE, slices, config
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", help="BATCHxCONTEXT ...")
    parser.add_argument("--full", action="store_true", help="batch 1 to 256 by 1k to 128k tokens")
    parser.add_argument("--heads", nargs="+", type=int, default=[16, 128])
    parser.add_argument("--entries", nargs="+", type=int, help="values between entries (default 576 and 640)")
    parser.add_argument("--backends", nargs="+", help="triton, flashinfer, flashmla, reference")
    parser.add_argument("--memory-gib", type=float, default=24.0, help="skip cells whose pool is larger")
    parser.add_argument("--fp8", action="store_true", help="latents in 8 bits")
    parser.add_argument("--sweep", action="store_true", help="time Triton's configs")
    parser.add_argument("--seconds", type=float, default=150.0, help="time for the sweep")
    parser.add_argument("--workers", type=int, default=8, help="processes that compile for the sweep")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "kernels.jsonl")
    parser.add_argument("--commit", help="recorded as the commit (default: ask git)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/kernels.py needs a CUDA device")
    args.cells = args.cells or list(FULL_CELLS if args.full else KEY_CELLS)
    args.dtype = fp8.FP8 if args.fp8 else torch.bfloat16
    args.entries = args.entries or ([656] if args.fp8 else [576] if args.full or args.sweep else [576, 640])
    torch.manual_seed(0)
    recorder = Recorder(args.out, torch.device("cuda"), "triton" if args.sweep else "each", args.commit)
    text = sweep(args, recorder) if args.sweep else measure(args, recorder)
    print("\n".join([recorder.describe(), *recorder.failures, text]))


if __name__ == "__main__":
    main()
