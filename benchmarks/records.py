"""What a benchmark writes down: one json line a measurement, and the table of its cells."""

import datetime
import importlib.metadata
import json
import platform
import subprocess
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

T = TypeVar("T")


def git_commit() -> str:
    """The commit that is checked out, with "+" if sources differ from it, or "unknown" outside a repository."""
    root = Path(__file__).resolve().parents[1]
    try:
        commit = subprocess.check_output(
            ["git", "rev-parse", "--short=12", "HEAD"], cwd=root, text=True, stderr=subprocess.DEVNULL
        )
        changed = subprocess.check_output(
            ["git", "status", "--porcelain", "-uno"], cwd=root, text=True, stderr=subprocess.DEVNULL
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit.strip() + ("+" if changed else "")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


class Recorder:
    """Collects records, appends each to a jsonl file at once, and keeps going when one measurement fails.

    Args:
        out: The file to append to, or None to keep the records in memory only.
        device: Where the benchmark runs.
        backend: The backend that was asked for.
        commit: The commit to record, or None to ask git.
    """

    def __init__(self, out: Path | None, device: torch.device, backend: str, commit: str | None = None):
        self.out = out
        self.records: list[dict] = []
        self.failures: list[str] = []
        packages = ("torch", "transformers", "triton", "flashinfer-python")
        self.common = {
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU {platform.machine()}",
            "python": platform.python_version(),
            **{name: _version(name) for name in packages},
            "commit": commit or git_commit(),
            "backend": backend,
        }

    def describe(self) -> str:
        """The common fields on one line."""
        return ", ".join(f"{name} {value}" for name, value in self.common.items())

    def add(self, kind: str, **fields: object) -> None:
        """Keep one measurement."""
        record = {"kind": kind, **self.common, **fields}
        self.records.append(record)
        if self.out is not None:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            with self.out.open("a") as file:
                file.write(json.dumps(record) + "\n")

    def guarded(self, name: str, measure: Callable[[], T]) -> T | None:
        """The measurement's result, or None and a note of its failure: the other cells are still worth having."""
        try:
            return measure()
        except Exception as error:
            traceback.print_exc()
            self.failures.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
            return None


def describe_cache(output: object) -> dict[str, object]:
    """Class of the cache in generate's output, bytes that its tokens take, and bytes it holds, over all layers."""
    # transformers 5.24 renamed the field.
    cache = output.cache if hasattr(output, "cache") else output.past_key_values
    if hasattr(cache, "memory_report"):
        report = cache.memory_report()
        used, held = report.bytes_used, report.bytes_pool
    else:
        used = held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    return {"cache": type(cache).__name__, "cache_bytes_used": used, "cache_bytes_held": held}


def table(cells: list[dict]) -> str:
    """One line a cell and mode; the last column is how many times longer stock's step takes."""
    stock = {record["cell"]: record["step_ms"] for record in cells if record["mode"] == "stock"}
    order = {name: index for index, name in enumerate(dict.fromkeys(record["cell"] for record in cells))}
    head = "cell            mode             prefill s   ktok/s  ms/step   replay  by wall  floor ms  x floor    tok/s"
    lines = [head + "  peak GiB  cache MiB  stock/this"]
    for record in sorted(cells, key=lambda record: order[record["cell"]]):
        step, floor, peak = record["step_ms"], record["floor_ms"], (record["peak_bytes"] or 0) / 2**30
        replay = f"{record['replay_ms']:.2f}" if record.get("replay_ms") else "-"
        ratio = f"{stock[record['cell']] / step:.2f}" if record["cell"] in stock else "-"
        lines.append(
            f"{record['cell']:15} {record['mode']:15} {record['prefill_s']:10.3f} "
            f"{record['prefill_tokens_per_s'] / 1000:8.1f} {step:8.2f} {replay:>8} "
            f"{record['step_ms_by_wall']:8.2f} {floor:9.2f} {step / floor:8.2f} "
            f"{record['decode_tokens_per_s']:8.0f} {peak:9.1f} {record['cache_bytes_used'] / 2**20:10.1f} {ratio:>11}"
        )
    return "\n".join(lines)
