"""`python -m hf_mla`: what this machine has, what hf_mla would use on it, and which environment variables it reads.

Made to be pasted into a bug report. Needs neither a GPU nor the optional packages (triton, flashinfer).
"""

import importlib.metadata
import os
import platform

import torch

import hf_mla
from hf_mla import compat
from hf_mla.config import ENVIRONMENT
from hf_mla.kernels import available_backends, resolve_backend

PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "triton", "flashinfer-python")

# DeepSeek-V2-Lite's attention.
TYPICAL_SHAPE = {"num_heads": 16, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "block_size": 64}

Rows = list[tuple[str, str]]


def _version(distribution: str) -> str:
    """The installed version, read from the metadata: a package that fails to import is still named."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _versions() -> Rows:
    rows = [("hf_mla", hf_mla.__version__), ("python", platform.python_version()), ("platform", platform.platform())]
    rows += [(name, _version(name)) for name in PACKAGES]
    rows.append(("transformers tested", f"{compat.OLDEST} (the oldest allowed) to {compat.NEWEST}"))
    return rows


def _devices() -> Rows:
    rows = [("cpu", f"{os.cpu_count()} cores, {torch.get_num_threads()} torch threads")]
    if not torch.cuda.is_available():
        built_for = torch.version.cuda or torch.version.hip
        return [*rows, ("cuda", "not available" if built_for else "not available: this torch is a CPU build")]
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        memory = device.total_memory / 2**30
        rows.append((f"cuda:{index}", f"{device.name}, {memory:.0f} GiB, capability {device.major}.{device.minor}"))
    return rows


def _auto_choice(device: torch.device, dtype: torch.dtype, graph: bool) -> str:
    try:
        return resolve_backend("auto", device=device, dtype=dtype, graph=graph, **TYPICAL_SHAPE)
    except ValueError as error:
        return f"none: {error}"


def _backends() -> Rows:
    rows = [
        (name, "available" if reason is None else f"no: {reason}") for name, reason in available_backends().items()
    ]
    on_gpu = torch.cuda.is_available()
    device, dtype = (torch.device("cuda"), torch.bfloat16) if on_gpu else (torch.device("cpu"), torch.float32)
    shape = f"{TYPICAL_SHAPE['num_heads']} heads, rank {TYPICAL_SHAPE['kv_lora_rank']}, {dtype}, {device.type}"
    rows.append(("auto", f"{_auto_choice(device, dtype, graph=False)} ({shape})"))
    if on_gpu:
        rows.append(("auto in a CUDA graph", f"{_auto_choice(device, dtype, graph=True)} ({shape})"))
    return rows


def _environment() -> Rows:
    return [(f"{name}={os.environ.get(name, '(unset)')}", meaning) for name, meaning in ENVIRONMENT.items()]


def report() -> str:
    """The whole text, one section a heading, one fact a line."""
    sections = {
        "versions": _versions(),
        "devices": _devices(),
        "backends": _backends(),
        "environment variables": _environment(),
    }
    lines: list[str] = []
    for title, rows in sections.items():
        width = max((len(name) for name, _ in rows), default=0)
        lines.append(title)
        lines += [f"  {name:{width}}  {value}" for name, value in rows]
    return "\n".join(lines)


if __name__ == "__main__":
    print(report())
