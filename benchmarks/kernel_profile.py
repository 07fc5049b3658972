"""Which kernels a few decode steps launch: how many, and where their time goes.

Kernels are told apart by their names alone, for a CUDA graph keeps no module names. Plain matrix products are "rest",
wherever they come from: so are the projections around attention, stock's up-projection of the whole history, and the
products of stock's experts in decoding (their gathers, of selected experts' weights, are not).
"""

import re
from collections import Counter
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import LogitsProcessor

SKIPPED_STEPS = 3  # the first decode step may capture a graph, the next ones may still compile

CLASSES = {
    "attention": re.compile(
        r"flash|fmha|sdpa|attn|attention|mla|split_?kv|decode\w*_kernel|_merge_kernel|merge_state|_write_kernel",
        re.IGNORECASE,
    ),
    "MoE": re.compile(
        r"group|moe|expert|sort|top_?k|histogram|index_add|scan|vectorized_gather"
        r"|_(align|up|down|sum|spread|collect|route)_kernel",
        re.IGNORECASE,
    ),
}


def classify(kernel: str) -> str:
    """The class of a kernel or operator, by its name."""
    return next((name for name, pattern in CLASSES.items() if pattern.search(kernel)), "rest")


@dataclass
class KernelProfile:
    """Of one decode step, on average: launches, microseconds of each class, and the costliest kernels."""

    kernels: float
    copies: float
    busy_us: float
    share: dict[str, float]
    top: list[tuple[str, float, float]]

    def lines(self) -> list[str]:
        shares = ", ".join(f"{name} {share:.0%}" for name, share in self.share.items())
        head = f"{self.kernels:.0f} kernels and {self.copies:.0f} copies a step, busy {self.busy_us / 1000:.2f} ms"
        return [f"{head}: {shares}", *(f"  {us:9.1f} us {count:7.1f}x  {name[:100]}" for name, us, count in self.top)]


class ProfiledSteps(LogitsProcessor):
    """Profiles `steps` decode steps of the generate call that it is given to."""

    def __init__(self, device: torch.device, steps: int = 4):
        self.device, self.steps, self.calls = device, steps, 0
        activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
        self.profiler = profile(activities=[activity])

    @property
    def new_tokens(self) -> int:
        """Tokens that generate must make for the profile to be whole."""
        return SKIPPED_STEPS + self.steps + 1

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if self.calls == SKIPPED_STEPS:
            self._synchronize()
            self.profiler.start()
        elif self.calls == SKIPPED_STEPS + self.steps:
            self._synchronize()
            self.profiler.stop()
        self.calls += 1
        return scores

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def result(self) -> KernelProfile:
        device_type = DeviceType.CUDA if self.device.type == "cuda" else DeviceType.CPU
        counts: Counter[str] = Counter()
        times: Counter[str] = Counter()
        for event in self.profiler.events():
            if event.device_type == device_type and not event.is_user_annotation:
                counts[event.name] += 1
                times[event.name] += (
                    event.time_range.elapsed_us() if self.device.type == "cuda" else event.self_cpu_time_total
                )
        copies = sum(count for name, count in counts.items() if name.startswith(("Memcpy", "Memset")))
        total = sum(times.values()) or 1
        classes = dict.fromkeys([*CLASSES, "rest"], 0.0)
        for name, time_us in times.items():
            classes[classify(name)] += time_us / total
        return KernelProfile(
            kernels=(counts.total() - copies) / self.steps,
            copies=copies / self.steps,
            busy_us=total / self.steps,
            share=classes,
            top=[(name, us / self.steps, counts[name] / self.steps) for name, us in times.most_common(12)],
        )
