"""Long prompts and prompts that come back, on full-size shapes with random weights, stock against hf_mla.

    python benchmarks/prefix.py                    # one GPU with 80 GB, a few minutes
    python benchmarks/prefix.py --parts reuse crossover
    python benchmarks/prefix.py --tiny             # the same code on a CPU in seconds; its numbers mean nothing

Parts:

    cold        seconds to the first token and peak memory of prompts that nobody knows, stock and paged
    reuse       seconds to the first token of `known` + `new` tokens with a PrefixPool that knows the first, against
                paged and cold
    crossover   a continuation of so many new tokens over `known` ones, absorbed and read in pieces:
                `decoder.MAX_ABSORBED_COLUMNS` should lie where the two meet
    depth       errors of bfloat16 against float32 stock by the place in the longest prompt, two dense layers of sharp
                attention; stock's own beside them

Seconds are medians of calls of generate (one new token, the device waited for) after a first one. Peak memory is what
was allocated beyond weights and the cache's pages.
"""

import argparse
import copy
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# In place of this folder, whose kernels.py would hide the kernels package that transformers looks for.
sys.path.pop(0)
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import PreTrainedModel

import hf_mla
from benchmarks import shapes
from benchmarks.records import Recorder, describe_cache
from hf_mla import chunks, compat, decoder

PARTS = ("cold", "reuse", "crossover", "depth")
CROSSOVER = (16, 32, 64, 96, 128, 192, 256, 512)
PLACES = 8  # parts of the prompt whose errors are told apart
SHARPNESS = 8.0  # of the query projections: one key in 131072 gets about half of a query's weight


def clear(device: torch.device) -> None:
    """Free what nobody holds, and begin to watch the peak."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def allocated(device: torch.device, peak: bool = False) -> int:
    if device.type != "cuda":
        return 0
    return torch.cuda.max_memory_allocated(device) if peak else torch.cuda.memory_allocated(device)


def seconds_of(device: torch.device, call: Callable[[], object]) -> float:
    shapes.synchronize(device)
    start = time.perf_counter()
    call()
    shapes.synchronize(device)
    return time.perf_counter() - start


def random_ids(model: PreTrainedModel, columns: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, model.config.vocab_size, (1, columns), generator=generator).to(model.device)


def first_token(model: PreTrainedModel, ids: torch.Tensor, **options: Any) -> Any:
    """generate's output object of one new token after `ids` [1, L]."""
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=1,
        do_sample=False,
        return_dict_in_generate=True,
        **options,
    )


def cold(model: PreTrainedModel, columns: int, mode: str, calls: int) -> dict[str, Any]:
    """A prompt of `columns` tokens in a mode: "stock" or "paged"."""
    device = model.device
    options = {"cache_implementation": "paged_mla"} if mode == "paged" else {}
    first_token(model, random_ids(model, columns, 0), **options)
    clear(device)
    before = allocated(device)
    output = first_token(model, random_ids(model, columns, 1), **options)
    held = describe_cache(output)["cache_bytes_held"]
    beyond = allocated(device, peak=True) - before - held if device.type == "cuda" else None
    del output
    times = [
        seconds_of(device, lambda seed=seed: first_token(model, random_ids(model, columns, seed), **options))
        for seed in range(calls)
    ]
    return {"seconds": statistics.median(times), "peak_beyond_bytes": beyond, "cache_bytes_held": held}


def reuse(model: PreTrainedModel, known: int, new: int, calls: int) -> dict[str, Any]:
    """`new` tokens after `known` ones: with a pool that knows these, and without."""
    device, beginning = model.device, random_ids(model, known, 0)
    pool = hf_mla.PrefixPool()
    first_token(model, beginning, past_key_values=pool)
    first_token(model, torch.cat([beginning, random_ids(model, new, 1)], 1), past_key_values=pool)
    warm, cold_times = [], []
    for seed in range(2, 2 + calls):
        ids = torch.cat([beginning, random_ids(model, new, seed)], 1)
        warm.append(seconds_of(device, lambda ids=ids: first_token(model, ids, past_key_values=pool)))
        if pool.reused[0] < known // 64 * 64:
            raise RuntimeError(f"only {pool.reused} of {known} tokens were found")
        cold_times.append(
            seconds_of(device, lambda ids=ids: first_token(model, ids, cache_implementation="paged_mla"))
        )
    decoder_module = next(m for m in model.modules() if "_hf_mla" in m.__dict__)
    root = seconds_of(device, lambda: hf_mla.identity.fingerprint(decoder_module))
    times = {"warm_s": statistics.median(warm), "cold_s": statistics.median(cold_times)}
    return {**times, "share": times["warm_s"] / times["cold_s"], "fingerprint_s": root}


@torch.no_grad()
def crossover(model: PreTrainedModel, known: int, calls: int) -> list[dict[str, Any]]:
    """Seconds of a pass of new columns over `known` ones, absorbed and read in pieces."""
    device, name = model.device, compat.CACHE_NAME
    cache = hf_mla.PagedMLACache(model.config)
    cache.reserve_tokens([known + max(CROSSOVER)])
    model(random_ids(model, known, 0), logits_to_keep=1, **{name: cache})
    measured = []
    limit = decoder.MAX_ABSORBED_COLUMNS
    try:
        for new in CROSSOVER:
            record: dict[str, Any] = {"new": new}
            for way, decoder.MAX_ABSORBED_COLUMNS in (("absorbed", new), ("pieces", 0)):
                times = []
                for seed in range(calls + 1):
                    ids = random_ids(model, new, seed)
                    times.append(seconds_of(device, lambda ids=ids: model(ids, logits_to_keep=1, **{name: cache})))
                    cache.crop(-new)
                record[f"{way}_s"] = statistics.median(times[1:])
            measured.append(record)
    finally:
        decoder.MAX_ABSORBED_COLUMNS = limit
    return measured


@torch.no_grad()
def depth(options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Errors of the second layer's attention against float32 stock, by its place in the prompt."""
    config = shapes.make_config(options.model, num_layers=2)
    config.first_k_dense_replace = 2  # no router, whose choices rounding may turn
    model = shapes.build(config, device, torch.bfloat16)
    for key, parameter in model.named_parameters():
        if key.endswith(("q_proj.weight", "q_b_proj.weight")):
            parameter.mul_(SHARPNESS)
    ids = random_ids(model, max(options.cold), 3)

    def attended(of: PreTrainedModel, **more: Any) -> torch.Tensor:
        passes: list[torch.Tensor] = []
        hook = of.model.layers[1].self_attn.register_forward_hook(lambda _, __, output: passes.append(output[0][0]))
        of.model(ids, **more)
        hook.remove()
        return torch.cat(passes).float()

    exact = attended(copy.deepcopy(model).float(), use_cache=False)
    errors = {"stock": attended(model, use_cache=False)}
    hf_mla.patch(model, backend=options.backend)
    errors["paged"] = attended(model, **{compat.CACHE_NAME: hf_mla.PagedMLACache(model.config)})
    norms = exact.norm(dim=-1)
    relative = {mode: ((got - exact).norm(dim=-1) / norms).chunk(PLACES) for mode, got in errors.items()}
    return [
        {
            "place": place / PLACES,
            **{f"{mode}_{name}": fn(parts[place]).item() for mode, parts in relative.items() for name, fn in WORST},
        }
        for place in range(PLACES)
    ]


WORST = (("mean", torch.mean), ("max", torch.amax))


def report(recorder: Recorder, kind: str, model: str, **fields: Any) -> None:
    recorder.add(kind, model=model, **fields)
    shown = (f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in fields.items())
    print(f"{kind}: {', '.join(shown)}", flush=True)


def run(options: argparse.Namespace) -> int:
    device = torch.device("cpu" if options.tiny else "cuda")
    if options.tiny:
        chunks.MOST_TOKENS = chunks.LEAST_TOKENS = 1024  # so that tiny prompts take several passes, too
    recorder = Recorder(options.out, device, options.backend, options.commit)
    print(recorder.describe(), flush=True)
    if "depth" in options.parts:
        for record in recorder.guarded("depth", lambda: depth(options, device)) or []:
            report(recorder, "depth", options.model, columns=max(options.cold), **record)
        clear(device)
    if set(options.parts) - {"depth"}:
        model = shapes.build(shapes.make_config(options.model), device, torch.bfloat16)
        for mode in ("stock", "paged"):
            if mode == "paged":
                hf_mla.patch(model, backend=options.backend)
            for columns in options.cold if "cold" in options.parts else ():
                measured = recorder.guarded(
                    f"{mode} {columns}", lambda m=mode, c=columns: cold(model, c, m, options.calls)
                )
                clear(device)
                if measured is not None:
                    report(recorder, "cold", options.model, mode=mode, columns=columns, **measured)
        if "reuse" in options.parts:
            found = recorder.guarded("reuse", lambda: reuse(model, options.known, options.new, options.calls))
            clear(device)
            if found is not None:
                report(recorder, "reuse", options.model, known=options.known, new=options.new, **found)
        if "crossover" in options.parts:
            for record in recorder.guarded("crossover", lambda: crossover(model, options.known, options.calls)) or []:
                report(recorder, "crossover", options.model, known=options.known, **record)
    print("\n".join(f"FAILED: {failure}" for failure in recorder.failures))
    return 1 if recorder.failures else 0


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="v2-lite", choices=shapes.SHAPES, help="shape; default: v2-lite")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    parser.add_argument("--cold", nargs="+", type=int, help="tokens of unknown prompts; default: 32768 131072")
    parser.add_argument("--known", type=int, help="tokens that are known; default: 32768")
    parser.add_argument("--new", type=int, default=100, help="tokens after those; default: 100")
    parser.add_argument("--calls", type=int, default=3, help="timed calls; default: 3")
    parser.add_argument("--backend", default="auto", help="backend given to hf_mla.patch; default: auto")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU; records nothing without --out")
    parser.add_argument("--out", type=Path, help="jsonl file to append to; default: benchmarks/results/prefix.jsonl")
    parser.add_argument("--commit", help="commit to record where the sources are no git checkout")
    options = parser.parse_args(arguments)
    options.model = "tiny" if options.tiny else options.model
    options.cold = options.cold or ([512, 2500] if options.tiny else [32768, 131072])
    options.known = options.known or (512 if options.tiny else 32768)
    if options.out is None and not options.tiny:
        options.out = Path(__file__).parent / "results" / "prefix.jsonl"
    if not options.tiny and not torch.cuda.is_available():
        parser.error("no CUDA device; --tiny runs on a CPU")
    return options


if __name__ == "__main__":
    start = time.perf_counter()
    status = run(parse_options())
    print(f"{time.perf_counter() - start:.0f} s in all")
    sys.exit(status)
