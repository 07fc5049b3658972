"""A chat's latents to pinned host memory and back, against plain copies of as many bytes. One GPU.

    python benchmarks/swap.py                    # 100,000 tokens of DeepSeek-V2-Lite's geometry: 27 layers of 512 + 64
    python benchmarks/swap.py --tokens 8000 --dtype fp8

Blocks lie permuted in the pool. The plain copy is of one pinned buffer, and its GB/s are what the link gives. `first`
is the first swap of a tier, which pins its memory; the others are medians. Results are appended to
benchmarks/results/swap.jsonl.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import hf_mla
from benchmarks.records import Recorder

LAYERS, RANK, ROPE = 27, 512, 64
DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


def seconds(call: Callable[[], object]) -> float:
    """Of one call, and of all that it left to the device."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def filled_cache(tokens: int, dtype: torch.dtype) -> hf_mla.PagedMLACache:
    """One row of random latents in permuted blocks."""
    cache = hf_mla.PagedMLACache(dtype=dtype)
    cache.reserve_tokens([tokens])
    random.Random(0).shuffle(cache.table.allocator._free)
    for layer in range(LAYERS):
        ckv, k_pe = (torch.randn(1, 1, tokens, n, device="cuda", dtype=torch.bfloat16) for n in (RANK, ROPE))
        cache.update(ckv, k_pe, layer)
    return cache


def bits_of(cache: hf_mla.PagedMLACache) -> list[torch.Tensor]:
    blocks = torch.tensor(cache.table.blocks(), device="cuda")
    return [layer.pages.view(torch.uint8)[blocks] for layer in cache.mla_layers]


def plain_copies(nbytes: int, repeats: int) -> dict[str, float]:
    """Seconds of one copy of a contiguous buffer to pinned memory, and back."""
    there = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    here = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    ways = {"out": lambda: here.copy_(there, non_blocking=True), "in": lambda: there.copy_(here, non_blocking=True)}
    return {name: statistics.median(seconds(way) for _ in range(repeats)) for name, way in ways.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "swap.jsonl")
    parser.add_argument("--commit", help="recorded as the commit (default: ask git)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/swap.py needs a CUDA device")
    cache, tier = filled_cache(args.tokens, DTYPES[args.dtype]), hf_mla.HostTier()
    before, nbytes = bits_of(cache), cache.memory_report().bytes_used
    times: dict[str, list[float]] = {"out": [], "in": []}
    for _ in range(args.repeats):
        times["out"].append(seconds(lambda: tier.swap_out(cache)))
        times["in"].append(seconds(lambda: tier.swap_in(cache)))
    if not all(map(torch.equal, before, bits_of(cache))):
        raise AssertionError("what came back isn't what left")
    del before
    plain = plain_copies(nbytes, args.repeats)
    recorder = Recorder(args.out, torch.device("cuda"), "none", args.commit)
    print(recorder.describe(), f"\n{nbytes / 1e9:.2f} GB of {args.tokens} tokens, {args.dtype}")
    for way, taken in times.items():
        first, later, link = (nbytes / s / 1e9 for s in (taken[0], statistics.median(taken[1:]), plain[way]))
        recorder.add(
            "swap", way=way, tokens=args.tokens, dtype=args.dtype, nbytes=nbytes, gb_s=later, first_gb_s=first,
            plain_gb_s=link,
        )  # fmt: skip
        print(f"{way:4} {later:6.1f} GB/s, first {first:6.1f}, plain copy {link:6.1f}: {later / link:.0%}")


if __name__ == "__main__":
    main()
