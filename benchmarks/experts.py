"""One layer's experts of DeepSeek-V2-Lite (64, 6 a token, 2048 x 1408, bf16): checked against fp64, then timed.

    python benchmarks/experts.py                     # hf_mla's kernels and transformers' grouped_mm, a minute
    python benchmarks/experts.py --tokens 1024 4096 32768 200000    # a prompt's; the last needs 80 GB
    python benchmarks/experts.py --sweep             # tiles of the two products; prints the best for each token count
    python benchmarks/experts.py --tokens 8 200 --sweep --seconds 120

Times are microseconds of one call within a CUDA graph of many, which goes around several layers' weights and routings,
so that no call finds its weights in the L2. The floor is the bytes of the weights of the experts that are hit at 4.2
TB/s, as measured on an H200, or the products' flops at 989 TFLOPS, its data sheet's, where those take longer. Results
are appended to benchmarks/results/experts.jsonl.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

# In place of this folder, whose kernels.py would hide the kernels package that transformers looks for.
sys.path.pop(0)
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers.integrations import moe

from benchmarks.records import Recorder
from benchmarks.timing import replay_us
from hf_mla.kernels import triton_experts, triton_grouped
from hf_mla.kernels.triton_experts_plan import MAX_TOKENS, Config, Tile, pick_config

EXPERTS, TOP_K, HIDDEN, INNER = 64, 6, 2048, 1408
TOKENS = (1, 8, 32, 64, 200, 512, 4096, 32768)
SWEPT = TOKENS[:6]  # more tokens are left to torch's grouped products
BYTES_PER_S, FLOPS = 4.2e12, 989e12
LAYERS, CALLS = 4, 8

Weights = tuple[torch.Tensor, torch.Tensor]
Call = Callable[[torch.Tensor, Weights, torch.Tensor, torch.Tensor], torch.Tensor]


def layer_weights(count: int, random: bool = True) -> list[Weights]:
    """gate_up_proj [E, 2I, D] and down_proj [E, D, I] of `count` layers."""
    layers = []
    for _ in range(count):
        up = torch.empty(EXPERTS, 2 * INNER, HIDDEN, dtype=torch.bfloat16, device="cuda")
        down = torch.empty(EXPERTS, HIDDEN, INNER, dtype=torch.bfloat16, device="cuda")
        if random:
            up.normal_(std=2 * HIDDEN**-0.5)
            down.normal_(std=INNER**-0.5)
        layers.append((up, down))
    return layers


@dataclass
class Cell:
    """Hidden states of `tokens` tokens and the routings of CALLS calls."""

    tokens: int
    layers: list[Weights]

    def __post_init__(self) -> None:
        self.hidden = torch.randn(self.tokens, HIDDEN, device="cuda").bfloat16()
        scores = torch.rand(CALLS, self.tokens, EXPERTS, device="cuda")
        chosen = scores.softmax(-1).topk(TOP_K, dim=-1)
        self.index, self.weights = chosen.indices.contiguous(), chosen.values * 16

    @property
    def floor_us(self) -> float:
        hit = statistics.mean(len(index.unique()) for index in self.index)
        size = 3 * HIDDEN * INNER * 2  # of an expert in bytes; the flops of a pair, too
        return max(hit * size / BYTES_PER_S, self.tokens * TOP_K * size / FLOPS) * 1e6

    def call(self, function: Call, number: int) -> torch.Tensor:
        layer = self.layers[number % len(self.layers)]
        return function(self.hidden, layer, self.index[number], self.weights[number])

    def expected(self) -> torch.Tensor:
        """The first call's result in fp64."""
        (up_proj, down_proj), index = self.layers[0], self.index[0]
        out = torch.zeros_like(self.hidden, dtype=torch.float64)
        for expert in index.unique().tolist():
            token, k = torch.where(index == expert)
            gate, up = (self.hidden[token].double() @ up_proj[expert].double().T).chunk(2, -1)
            part = torch.nn.functional.silu(gate) * up @ down_proj[expert].double().T
            del gate, up
            out.index_add_(0, token, part * self.weights[0][token, k, None].double())
        return out

    def error(self, function: Call, expected: torch.Tensor) -> float:
        """Relative error of the first call; raises where it is more than bf16's roundings make."""
        out = self.call(function, 0)
        error = ((out - expected).norm() / expected.norm()).item()
        if not error < 2**-7:
            raise AssertionError(f"wrong result: relative error {error:.3g}")
        return error


def time_graph(cell: Cell, function: Call, seconds: float) -> float:
    """Median microseconds of one call in a graph of CALLS of them."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        cell.call(function, 0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for number in range(CALLS):
            cell.call(function, number)
    return replay_us(graph, CALLS, seconds)


class PlainExperts:
    """What transformers' functions read of an expert module."""

    has_gate, has_bias, has_post_expert_norm, is_transposed, is_concatenated = True, False, False, False, True
    _is_expert_parallel, num_experts = False, EXPERTS

    def __init__(self, weights: Weights):
        self.gate_up_proj, self.down_proj = weights

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up


def grouped_mm(hidden: torch.Tensor, layer: Weights, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return moe.ALL_EXPERTS_FUNCTIONS["grouped_mm"](PlainExperts(layer), hidden, index, weights)


def fused(
    hidden: torch.Tensor, layer: Weights, index: torch.Tensor, weights: torch.Tensor, config: Config | None = None
) -> torch.Tensor:
    if len(hidden) > MAX_TOKENS:
        return triton_grouped.grouped_experts(hidden, *layer, index, weights, moe._grouped_linear)
    return triton_experts.fused_experts(hidden, *layer, index, weights, config=config)


def measure(args: argparse.Namespace, recorder: Recorder) -> None:
    layers = layer_weights(LAYERS)
    print(f"{'tokens':>6} {'floor':>8} {'hf_mla':>8} {'x floor':>8} {'grouped_mm':>10}   errors", flush=True)
    for tokens in args.tokens:
        cell = Cell(tokens, layers)
        expected, floor = cell.expected(), cell.floor_us
        found: dict[str, tuple[float, float]] = {}
        for name, function in (("hf_mla", fused), ("grouped_mm", grouped_mm)):
            one = recorder.guarded(f"{name} {tokens}", partial(measure_one, cell, function, expected))
            if one is not None:
                found[name] = one
                recorder.add("experts", name=name, tokens=tokens, floor_us=floor, graph_us=one[0], error=one[1])
        us = {name: f"{found[name][0]:.1f}" if name in found else "failed" for name in ("hf_mla", "grouped_mm")}
        times = f"{found['hf_mla'][0] / floor:.3f}" if "hf_mla" in found else "-"
        errors = ", ".join(f"{name} {error:.2e}" for name, (_, error) in found.items())
        print(f"{tokens:6} {floor:8.1f} {us['hf_mla']:>8} {times:>8} {us['grouped_mm']:>10}   {errors}", flush=True)


def measure_one(cell: Cell, function: Call, expected: torch.Tensor) -> tuple[float, float]:
    error = cell.error(function, expected)
    return time_graph(cell, function, seconds=0.3), error


# (rows, depth, warps, stages): the likely first, so that a short sweep has seen them.
TILES = (
    (128, 64, 4, 4), (128, 64, 4, 3), (128, 128, 4, 3), (128, 64, 4, 5), (64, 128, 4, 4), (64, 128, 4, 3),
    (128, 128, 8, 3), (128, 128, 4, 2), (64, 64, 4, 6), (128, 64, 8, 4), (256, 64, 8, 3), (64, 256, 4, 3),
    (128, 128, 4, 4), (256, 64, 8, 4), (256, 128, 8, 2), (64, 64, 4, 4),
)  # fmt: skip


def blocks_of(tokens: int) -> list[tuple[int, bool]]:
    """(block_m, align) worth trying for so many tokens."""
    load = tokens * TOP_K / EXPERTS
    if load <= 0.2:
        return [(16, False), (8, False)]
    sizes = [16, 8] if load <= 4 else [16, 32, 8] if load <= 12 else [32, 16, 64] if load <= 32 else [64, 32, 128]
    return [(size, True) for size in sizes] + ([(16, False)] if load <= 1 else [])


def candidates(tokens: int) -> Iterator[Config]:
    """Each tile for one product, the other one's as it is: the two don't depend on each other."""
    base = pick_config(tokens * TOP_K, EXPERTS, torch.device("cuda"))
    tiles = [Tile(*tile) for tile in TILES]
    splits = [replace(tile, splits=n) for n in ((2, 3, 4) if tokens <= 8 else (2,)) for tile in tiles[:8]]
    for block_m, align in blocks_of(tokens):
        for up in dict.fromkeys([base.up, *tiles]):
            yield Config(block_m, align, up, base.down)
        for down in dict.fromkeys([*tiles, *splits]):
            yield Config(block_m, align, base.up, down)


_worker_layer: list[Weights] = []


def compile_config(job: tuple[int, Config]) -> str | None:
    """Compile one config in a process of its own (into Triton's disk cache) by running it; the error or None."""
    tokens, config = job
    try:
        if not _worker_layer:
            _worker_layer.extend(layer_weights(1, random=False))
        cell = Cell(tokens, _worker_layer)
        cell.call(partial(fused, config=config), 0)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:100] if str(error) else ''}"
    return None


def compile_jobs(token_counts: list[int]) -> list[tuple[int, Config]]:
    """(tokens, config), so that each product's kernel and each token count's alignment is compiled once."""
    jobs: list[tuple[int, Config]] = []
    seen: set[object] = set()
    for tokens in token_counts:
        for config in candidates(tokens):
            block = config.block_m, config.align
            needs = {(*block, "up", config.up), (*block, "down", config.down), (*block, tokens)}
            if needs - seen:
                jobs.append((tokens, config))
                seen |= needs
    return jobs


def sweep(args: argparse.Namespace, recorder: Recorder) -> None:
    """Compile all, then time what is left within the budget, which the token counts share."""
    start = time.perf_counter()
    jobs = compile_jobs(args.tokens)
    with ProcessPoolExecutor(args.workers, mp_context=get_context("spawn")) as pool:
        failed = {
            config: error for (_, config), error in zip(jobs, pool.map(compile_config, jobs), strict=True) if error
        }
    for config, error in failed.items():
        print(f"skipped {config}: {error}", flush=True)
    print(f"compiled {len(jobs)} configs in {time.perf_counter() - start:.0f} s", flush=True)
    end = max(start + args.seconds, time.perf_counter() + args.seconds / 2)
    layers = layer_weights(LAYERS)
    for left, tokens in zip(range(len(args.tokens), 0, -1), args.tokens, strict=True):
        now = time.perf_counter()
        configs = [config for config in candidates(tokens) if config not in failed]
        if not sweep_tokens(Cell(tokens, layers), configs, now + (end - now) / left, recorder):
            print("the device is lost; what was found is above and in the results", flush=True)
            return


def combined(found: dict[Config, float]) -> Iterator[Config]:
    """The best tiles of one product with the best of the other, for each block_m, where they weren't tried."""
    for block in dict.fromkeys((config.block_m, config.align) for config in found):
        order = sorted((c for c in found if (c.block_m, c.align) == block), key=found.__getitem__)
        ups, downs = (list(dict.fromkeys(getattr(c, part) for c in order))[:2] for part in ("up", "down"))
        configs = [Config(*block, up, down) for up in ups for down in downs]
        yield from [config for config in configs if config not in found]


def sweep_tokens(cell: Cell, configs: list[Config], end: float, recorder: Recorder) -> bool:
    """Time configs until `end`, then the best combined. False where the device is lost."""
    expected, floor = cell.expected(), cell.floor_us
    found: dict[Config, float] = {}

    def try_config(config: Config) -> bool:
        function = partial(fused, config=config)
        try:
            cell.error(function, expected)
            found[config] = us = time_graph(cell, function, seconds=0.02)
        except Exception as error:
            print(f"failed {cell.tokens} tokens {config}: {str(error)[:200]}", flush=True)
            return "CUDA error" not in str(error)
        recorder.add("sweep", tokens=cell.tokens, config=str(config), graph_us=us, floor_us=floor)
        return True

    for number, config in enumerate(configs):
        if time.perf_counter() > end:
            print(f"{cell.tokens} tokens: out of time after {number} of {len(configs)} configs", flush=True)
            break
        if not try_config(config):
            return False
    for config in list(combined(found)):
        if not try_config(config):
            return False
    base = pick_config(cell.tokens * TOP_K, EXPERTS, torch.device("cuda"))
    print(f"{cell.tokens} tokens, floor {floor:.1f} us, default {found.get(base, float('nan')):.1f}:")
    for config in sorted(found, key=found.__getitem__)[:6]:
        print(f"  {found[config]:8.1f} {config}", flush=True)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", type=int, help="default: all that are of interest")
    parser.add_argument("--sweep", action="store_true", help="time tiles instead")
    parser.add_argument("--seconds", type=float, default=60.0, help="time for the sweep (half of it at least to time)")
    parser.add_argument("--workers", type=int, default=14, help="processes that compile for the sweep")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "experts.jsonl")
    parser.add_argument("--commit", help="recorded as the commit (default: ask git)")
    args = parser.parse_args()
    args.tokens = args.tokens or list(SWEPT if args.sweep else TOKENS)
    if args.sweep and max(args.tokens) > MAX_TOKENS:
        parser.error(f"--tokens: a sweep is for up to {MAX_TOKENS}")
    if not torch.cuda.is_available():
        sys.exit("benchmarks/experts.py needs a CUDA device")
    torch.manual_seed(0)
    recorder = Recorder(args.out, torch.device("cuda"), "triton", args.commit)
    print(recorder.describe(), flush=True)
    with torch.no_grad():
        (sweep if args.sweep else measure)(args, recorder)
    print("\n".join(recorder.failures))


if __name__ == "__main__":
    main()
