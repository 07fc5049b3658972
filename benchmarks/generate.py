"""The whole-model benchmark: `model.generate` on full-size shapes with random weights, stock against paged.

    python benchmarks/generate.py                    # one GPU with 80 GB, a few minutes
    python benchmarks/generate.py --cells 32x1000 200x200-1800 --modes stock paged static --profile
    python benchmarks/generate.py --tiny             # the same code on a CPU in seconds; its numbers mean nothing

A cell is BATCHxCONTEXT; BATCHxMIN-MAX has left-padded prompts of MIN to MAX tokens, evenly spread. Modes:

    stock            transformers' own dynamic cache, on the model before hf_mla touched it
    paged            hf_mla.patch and cache_implementation="paged_mla"
    static           transformers' static cache without torch.compile
    static_compiled  the same as generate runs it by default, compiled

Decoding is greedy with a fixed number of new tokens (no token ends a sequence). Each call of a logits processor marks
the device's clock, and nothing waits for the device beyond what generate does itself: the first mark ends the prefill,
the distance of two marks is a decode step. The same steps are checked by the wall clock of a long run less that of a
short one. The floor is what a step must read at the bandwidth measured in the same run; see `shapes.Floor`.
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

# In place of this folder, whose kernels.py would hide the kernels package that transformers looks for.
sys.path.pop(0)
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from benchmarks import accuracy, shapes
from benchmarks.kernel_profile import ProfiledSteps
from benchmarks.records import Recorder, describe_cache, table

CELLS = ("1x1000", "32x1000", "64x1000", "200x1000", "8x8192", "1x32768", "200x200-1800")
TINY_CELLS = ("1x40", "4x40", "4x10-60")
MODES: dict[str, dict[str, object]] = {
    "stock": {},
    "static": {"cache_implementation": "static", "disable_compile": True},
    "static_compiled": {"cache_implementation": "static"},
    "paged": {"cache_implementation": "paged_mla"},
}
SHORT_STEPS = 2


@dataclass(frozen=True)
class Cell:
    """A batch of prompts of `shortest` to `longest` tokens, left-padded to the longest."""

    batch: int
    shortest: int
    longest: int

    @classmethod
    def parse(cls, text: str) -> "Cell":
        batch, _, context = text.partition("x")
        shortest, _, longest = context.partition("-")
        return cls(int(batch), int(shortest), int(longest or shortest))

    def __str__(self) -> str:
        context = f"{self.shortest}-{self.longest}" if self.shortest != self.longest else str(self.longest)
        return f"{self.batch}x{context}"

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row's prompt."""
        step = (self.longest - self.shortest) / max(self.batch - 1, 1)
        return [round(self.longest - row * step) for row in range(self.batch)]

    def prompts(self, vocab_size: int, device: torch.device) -> dict[str, torch.Tensor]:
        """input_ids and attention_mask, [batch, longest]."""
        generator = torch.Generator().manual_seed(self.batch * 131071 + self.longest)
        ids = torch.randint(1, vocab_size, (self.batch, self.longest), generator=generator)
        mask = torch.arange(self.longest) >= self.longest - torch.tensor(self.lengths)[:, None]
        return {"input_ids": ids.masked_fill(~mask, 0).to(device), "attention_mask": mask.long().to(device)}

    def steps(self, mode: str) -> int:
        """Decode steps to time: fewer where a step of a mode that expands the history is slow."""
        return 64 if mode == "paged" else max(6, min(32, 2_400_000 // (self.batch * self.longest)))


class StepClock(LogitsProcessor):
    """Marks the device's time when it is made and at each step's logits, without waiting for the device."""

    def __init__(self, device: torch.device):
        self.device = device
        shapes.synchronize(device)
        self.wall_start = time.perf_counter()
        self.marks = [self._mark()]

    def _mark(self) -> torch.cuda.Event | float:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self.marks.append(self._mark())
        return scores

    def stop(self) -> float:
        """Seconds since it was made, the device's work included."""
        shapes.synchronize(self.device)
        return time.perf_counter() - self.wall_start

    def milliseconds(self) -> list[float]:
        """The prefill, then each decode step."""
        pairs = list(zip(self.marks, self.marks[1:], strict=False))
        if self.device.type != "cuda":
            return [(end - start) * 1000 for start, end in pairs]
        return [start.elapsed_time(end) for start, end in pairs]


def generate(model: PreTrainedModel, prompts: dict, mode: str, new_tokens: int, *processors: LogitsProcessor):
    """One greedy call of model.generate; returns its output object, which holds the cache."""
    output = model.generate(
        **prompts,
        max_new_tokens=new_tokens,
        do_sample=False,
        logits_processor=LogitsProcessorList(processors),
        return_dict_in_generate=True,
        **MODES[mode],
    )
    columns = prompts["input_ids"].shape[1] + new_tokens
    if output.sequences.shape[1] != columns:
        raise RuntimeError(f"generate returned {output.sequences.shape[1]} columns instead of {columns}")
    return output


def timed(model: PreTrainedModel, prompts: dict, mode: str, steps: int) -> tuple[StepClock, float, object]:
    """(clock, wall seconds, output) of one call with that many decode steps."""
    clock = StepClock(model.device)
    output = generate(model, prompts, mode, steps + 1, clock)
    return clock, clock.stop(), output


def paged_backend(model: PreTrainedModel, requested: str) -> str:
    """The backend that the paged cache's eager steps use for this model."""
    from hf_mla.kernels import resolve_backend

    config = model.config
    return resolve_backend(
        requested,
        device=model.device,
        dtype=model.dtype,
        num_heads=config.num_attention_heads,
        kv_lora_rank=config.kv_lora_rank,
        qk_rope_head_dim=config.qk_rope_head_dim,
        block_size=64,
    )


def clear(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def measure(model: PreTrainedModel, cell: Cell, mode: str, steps: int, floor: shapes.Floor) -> dict[str, object]:
    """Every number of one cell in one mode. Runs generate three times: to warm up, long, and short."""
    device, prompts = model.device, cell.prompts(model.config.vocab_size, model.device)
    clear(device)
    # The hooks wait for the device: harmless in a warm-up, but not while a graph is captured.
    start = time.perf_counter()
    with shapes.counted_experts(model, cell.batch) if mode == "stock" else nullcontext([]) as hits:
        generate(model, prompts, mode, SHORT_STEPS + 1)
    shapes.synchronize(device)
    first_call = time.perf_counter() - start
    if mode == "paged":  # the long call's graph has a larger table, and is captured at its first step
        generate(model, prompts, mode, steps + 1)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    clock, wall, output = timed(model, prompts, mode, steps)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    cache = describe_cache(output)
    replay = replay_ms(model) if mode == "paged" else None  # while the cache that it writes to is there
    del output
    _, short_wall, _ = timed(model, prompts, mode, SHORT_STEPS)

    prefill_ms, *step_ms = clock.milliseconds()
    median, tokens = statistics.median(step_ms), sum(cell.lengths)
    floor_tokens = tokens + cell.batch * (steps + 1) / 2
    return {
        "prompt_tokens": tokens,
        "steps": steps,
        "prefill_s": prefill_ms / 1000,
        "prefill_tokens_per_s": tokens / prefill_ms * 1000,
        "step_ms": median,
        "step_ms_first": step_ms[0],
        "step_ms_mean": statistics.fmean(step_ms),
        "step_ms_max": max(step_ms),
        "replay_ms": replay,
        "step_ms_by_wall": (wall - short_wall) / (steps - SHORT_STEPS) * 1000,
        "decode_tokens_per_s": cell.batch / median * 1000,
        "total_s": wall,
        "first_call_s": first_call,
        "peak_bytes": peak,
        **cache,
        "floor_ms": floor.step_ms(cell.batch, floor_tokens),
        "floor_bytes": floor.step_bytes(cell.batch, floor_tokens),
        "experts_expected": floor.expected_experts(cell.batch),
        "experts_hit": statistics.fmean(hits) if hits else None,
    }


def replay_ms(model: PreTrainedModel, times: int = 20) -> float | None:
    """Milliseconds of the decoder's graph that ran last, replayed alone: generate adds the head, the choice of tokens
    and what of the host's work isn't hidden. None where steps run eagerly."""
    forward = model.model.__dict__["forward"]
    captured = list(forward.graphs._graphs.values()) if forward.graphs else []
    if not captured or captured[-1] is None:
        return None
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    captured[-1].graph.replay()
    start.record()
    for _ in range(times):
        captured[-1].graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / times


def profile_cell(model: PreTrainedModel, cell: Cell, mode: str, recorder: Recorder) -> None:
    profiled = ProfiledSteps(model.device)
    generate(model, cell.prompts(model.config.vocab_size, model.device), mode, profiled.new_tokens, profiled)
    result = profiled.result()
    recorder.add("profile", cell=str(cell), mode=mode, **vars(result))
    print("\n".join(["", f"profile of {cell}, {mode}: {result.lines()[0]}", *result.lines()[1:], ""]), flush=True)


def check_accuracy(device: torch.device, options: argparse.Namespace, recorder: Recorder) -> None:
    """Errors of a truncated model's bfloat16 logits against float32; see `accuracy`."""
    model = shapes.build(
        shapes.make_config(options.model, num_layers=min(4, shapes.make_config(options.model).num_hidden_layers)),
        device,
        torch.bfloat16,
    )
    errors = accuracy.compare(model, 48 if options.tiny else 600, options.backend, paged="paged" in options.modes)
    print("\nrelative error of logits against transformers in float32, same weights, first layers only")
    for name, numbers in errors.items():
        recorder.add("accuracy", mode=name, layers=model.config.num_hidden_layers, **numbers)
        print(f"  {name:15}", "  ".join(f"{key} {value:.2e}" for key, value in numbers.items()), flush=True)


def run(options: argparse.Namespace) -> int:
    device = torch.device("cpu" if options.tiny else "cuda")
    recorder = Recorder(options.out, device, options.backend, options.commit)
    bandwidth = shapes.measure_bandwidth(device, 2**26 if options.tiny else 2**32)
    print(f"{recorder.describe()}\ncopy bandwidth {bandwidth / 1e12:.2f} TB/s (read and written)", flush=True)
    if not options.no_accuracy:
        recorder.guarded("accuracy", lambda: check_accuracy(device, options, recorder))
        clear(device)

    start = time.perf_counter()
    model = shapes.build(shapes.make_config(options.model), device, torch.bfloat16)
    shapes.synchronize(device)
    parameters, floor = sum(p.numel() for p in model.parameters()), shapes.Floor.of(model, bandwidth)
    print(f"\n{parameters / 1e9:.2f} B parameters built in {time.perf_counter() - start:.1f} s", flush=True)

    for mode in [mode for mode in MODES if mode in options.modes]:
        kernels = None
        if mode == "paged":
            import hf_mla

            hf_mla.patch(model, backend=options.backend)
            kernels = paged_backend(model, options.backend)
        for cell in map(Cell.parse, options.cells):
            steps = max(options.steps or cell.steps(mode), SHORT_STEPS + 1)
            numbers = recorder.guarded(
                f"{cell} {mode}", lambda c=cell, m=mode, s=steps: measure(model, c, m, s, floor)
            )
            if numbers is not None:
                recorder.add(
                    "cell",
                    model=options.model,
                    cell=str(cell),
                    mode=mode,
                    kernels=kernels,
                    bandwidth=bandwidth,
                    **numbers,
                )
                print(f"{cell} {mode}: {numbers['step_ms']:.2f} ms a step", flush=True)
            clear(device)
            if options.profile and numbers is not None:
                recorder.guarded(f"{cell} {mode}, profile", lambda c=cell, m=mode: profile_cell(model, c, m, recorder))
                clear(device)
    print("\n" + table([record for record in recorder.records if record["kind"] == "cell"]))
    print("\n".join(f"FAILED: {failure}" for failure in recorder.failures))
    return 1 if recorder.failures else 0


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="v2-lite", choices=shapes.SHAPES, help="shape; default: v2-lite")
    parser.add_argument("--cells", nargs="+", help=f"default: {' '.join(CELLS)}")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["stock", "paged"], help="default: stock paged")
    parser.add_argument("--steps", type=int, help="decode steps to time; default: 64 paged, 6 to 32 otherwise")
    parser.add_argument("--backend", default="auto", help="backend given to hf_mla.patch; default: auto")
    parser.add_argument("--profile", action="store_true", help="also profile a few decode steps of every cell")
    parser.add_argument("--no-accuracy", action="store_true", help="leave out the comparison with float32")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU; records nothing without --out")
    parser.add_argument("--out", type=Path, help="jsonl file to append to; default: benchmarks/results/generate.jsonl")
    parser.add_argument("--commit", help="commit to record where the sources are no git checkout")
    options = parser.parse_args(arguments)
    options.model = "tiny" if options.tiny else options.model
    options.cells = options.cells or (TINY_CELLS if options.tiny else CELLS)
    if options.out is None and not options.tiny:
        options.out = Path(__file__).parent / "results" / "generate.jsonl"
    if not options.tiny and not torch.cuda.is_available():
        parser.error("no CUDA device; --tiny runs on a CPU")
    return options


if __name__ == "__main__":
    start = time.perf_counter()
    status = run(parse_options())
    print(f"{time.perf_counter() - start:.0f} s in all")
    sys.exit(status)
