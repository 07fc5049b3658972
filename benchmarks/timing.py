"""How the kernel benchmarks time a captured CUDA graph."""

import statistics
import time

import torch


def replay_us(graph: torch.cuda.CUDAGraph, calls: int, seconds: float) -> float:
    """Median microseconds of one of the `calls` in a graph, over `seconds` of replays and five of them at least."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 5:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        graph.replay()
        events[1].record()
        torch.cuda.synchronize()
        times.append(events[0].elapsed_time(events[1]) * 1e3 / calls)
    return statistics.median(times[1:])
