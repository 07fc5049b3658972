"""MLA decode over paged compressed latents: the only door to the backends.

Shapes: B rows (sequences), Sq query tokens a row in this step, H heads, R = kv_lora_rank, P = qk_rope_head_dim,
N blocks of S = block_size tokens, M block-table columns.

- pages [N, S, >= R+P]: last dimension contiguous, any block and entry stride; an entry is
  [ckv (R) | k_pe (P) | padding], or, where pages are float8_e4m3fn, what `fp8` says.
- block_table [B, M] int32 or int64: columns beyond a row's length may hold anything and are never followed.
- kv_lens [B, Sq] int32: stored tokens that a query sees, non-decreasing along Sq; causality is expressed by it alone.
- What unused slots hold (NaN included) never reaches an output.

Backends know tensors only and are imported when first used: importing this package imports neither triton nor
flashinfer.
"""

from __future__ import annotations

import importlib
import logging
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from . import fp8, reference
from .problem import Problem, Step

__all__ = [
    "BACKENDS",
    "DecodePlan",
    "available_backends",
    "copy_blocks",
    "decode",
    "gather_latents",
    "plan",
    "put_blocks",
    "resolve_backend",
    "take_blocks",
    "triton_serves",
    "write_latents",
]

logger = logging.getLogger(__name__)

BACKENDS = ("reference", "triton", "flashinfer")
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class DecodePlan:
    """One step's decode for every layer of one geometry; made by `plan`, used by `decode`.

    It keeps the very block_table and kv_lens it was given: refresh those in place to replay a captured graph.
    `state` belongs to the backend.
    """

    backend: str
    problem: Problem
    step: Step
    state: Any = field(default=None, repr=False)


@lru_cache
def _import_error(backend: str) -> str | None:
    """Why `backend`'s package can't be imported, or None; a broken install counts as absent."""
    package = {"triton": "triton", "flashinfer": "flashinfer.mla"}.get(backend)
    try:
        if package:
            importlib.import_module(package)
    except Exception as error:  # broken binary packages raise anything
        return f"{backend} is not usable: {type(error).__name__}: {error}"
    return None


def available_backends() -> dict[str, str | None]:
    """Each backend with None, or why it can't be used on this machine. Imports the optional packages."""
    reasons = {name: _import_error(name) for name in BACKENDS}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if reasons["triton"] is None:
        from . import triton_decode

        reasons["triton"] = triton_decode.check(device, torch.float16)
    if reasons["flashinfer"] is None and device.type != "cuda":
        reasons["flashinfer"] = "flashinfer needs a CUDA device"
    return reasons


def triton_serves(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether Triton's kernels can read and write pages of `dtype` on `device`."""
    if dtype == torch.float64 or _import_error("triton") is not None:
        return False
    from . import triton_decode

    return triton_decode.check(device, dtype) is None


def _reason(name: str, problem: Problem) -> str | None:
    """Why backend `name` can't serve `problem`, or None."""
    if name == "reference":
        return None
    if problem.dtype == torch.float64:
        return f"{name} does not serve float64"
    if problem.device.type == "cpu" and name == "flashinfer":
        return f"flashinfer needs a CUDA device, got {problem.device}"
    if broken := _import_error(name):
        return broken
    if name == "triton":
        from . import triton_decode

        return triton_decode.check(problem.device, problem.dtype)
    from . import flashinfer

    return flashinfer.reason(problem)


def _preferred(problem: Problem) -> tuple[str, ...]:
    """Backends for "auto", best first. The CPU never interprets Triton unless asked by name: that is for tests."""
    return ("triton", "reference") if problem.device.type == "cuda" else ("reference",)


@lru_cache
def _choose(problem: Problem, graph: bool) -> str:
    refused: list[str] = []
    for name in ("triton",) if graph else _preferred(problem):
        why = _reason(name, problem)
        if why is None:
            logger.info("attention backend for %s: %s%s", problem, name, f" ({'; '.join(refused)})" if refused else "")
            return name
        refused.append(why)
    raise ValueError(f"backend 'auto' found none that can run in a CUDA graph: {'; '.join(refused)}")


def resolve_backend(
    name: str,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    num_heads: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_size: int,
    graph: bool = False,
) -> str:
    """The backend that `name` means for this geometry: "auto" is decided, an explicit name is checked.

    graph=True admits only what can run in a CUDA graph (triton). Raises ValueError if `name` can't serve this.
    """
    problem = Problem(torch.device(device), dtype, num_heads, kv_lora_rank, qk_rope_head_dim, block_size)
    _check_problem(problem)
    return _resolve(name, problem, graph)


def _resolve(name: str, problem: Problem, graph: bool = False) -> str:
    if graph and problem.device.type != "cuda":
        raise ValueError(f"a CUDA graph needs a CUDA device, got {problem.device}")
    if name == "auto":
        return _choose(problem, graph)
    if name not in BACKENDS:
        raise ValueError(f"backend {name!r} is unknown; choose 'auto' or one of {', '.join(map(repr, BACKENDS))}")
    if graph and name != "triton":
        raise ValueError(f"backend {name!r} cannot run in a CUDA graph; only 'triton' can")
    if why := _reason(name, problem):
        raise ValueError(f"backend {name!r} cannot serve this: {why}")
    return name


def _check_problem(problem: Problem) -> None:
    if problem.dtype not in (*FLOATS, fp8.FP8):
        raise ValueError(f"dtype must be float64, float32, float16, bfloat16 or float8_e4m3fn, got {problem.dtype}")
    if problem.num_heads < 1 or problem.kv_lora_rank < 1 or problem.qk_rope_head_dim < 0:
        raise ValueError(
            "num_heads and kv_lora_rank must be positive and qk_rope_head_dim not negative, got "
            f"{problem.num_heads}, {problem.kv_lora_rank}, {problem.qk_rope_head_dim}"
        )
    size = problem.block_size
    if size < 1 or size & (size - 1):
        raise ValueError(f"block_size must be a power of two, got {size}")


def _check_step(step: Step, block_size: int) -> None:
    table, lens, host = step.block_table, step.kv_lens, step.kv_lens_host
    if table.dim() != 2 or table.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"block_table must be [B, M] int32 or int64, got {list(table.shape)} {table.dtype}")
    if table.shape[1] > 1 and table.stride(1) != 1:
        raise ValueError("block_table must be contiguous in its last dimension")
    if lens.dim() != 2 or lens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"kv_lens must be [B, Sq] int32 or int64, got {list(lens.shape)} {lens.dtype}")
    if lens.device != table.device:
        raise ValueError(f"kv_lens is on {lens.device}, block_table on {table.device}: they must be on pages' device")
    if host.device.type != "cpu" or host.shape != lens.shape:
        raise ValueError(
            f"kv_lens_host must be a CPU copy of kv_lens {list(lens.shape)}, got {list(host.shape)} on {host.device}"
        )
    if table.shape[0] != lens.shape[0]:
        raise ValueError(f"block_table has {table.shape[0]} rows and kv_lens {lens.shape[0]}: they must agree")
    if not host.numel():
        return
    least, most = (int(x) for x in torch.aminmax(host))
    if least < 0:
        raise ValueError(f"kv_lens must not be negative, got {least}")
    if most > table.shape[1] * block_size:
        raise ValueError(
            f"kv_lens reaches {most}, but block_table's {table.shape[1]} columns of {block_size} tokens hold "
            f"{table.shape[1] * block_size}"
        )
    if host.shape[1] > 1 and bool((host[:, 1:] < host[:, :-1]).any()):
        raise ValueError("kv_lens must not decrease along a row's queries")


def plan(
    block_table: torch.Tensor,
    kv_lens: torch.Tensor,
    *,
    kv_lens_host: torch.Tensor,
    num_heads: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    backend: str = "auto",
) -> DecodePlan:
    """Prepare one step, once for all layers of a device and geometry, without waiting for the device (but FlashInfer).

    block_table [B, M] and kv_lens [B, Sq] are on pages' device; kv_lens_host [B, Sq] is kv_lens' CPU copy, or, for a
    graph to be replayed with longer rows, the longest lengths. `dtype` is the pages'. Raises ValueError naming the
    argument.
    """
    problem = Problem(block_table.device, dtype, num_heads, kv_lora_rank, qk_rope_head_dim, block_size)
    step = Step(block_table, kv_lens, kv_lens_host)
    _check_problem(problem)
    _check_step(step, block_size)
    name = _resolve(backend, problem)
    if name == "flashinfer" and step.batch and step.q_len:
        from . import flashinfer

        try:
            return DecodePlan(name, problem, step, state=flashinfer.plan(problem, step))
        except ValueError as error:
            if backend != "auto":
                raise ValueError(f"backend 'flashinfer' cannot serve this step: {error}") from error
            name = "triton" if _reason("triton", problem) is None else "reference"
    if name == "triton":
        from . import triton_decode

        return DecodePlan(name, problem, step, state=triton_decode.plan_slices(problem, step))
    return DecodePlan(name, problem, step)


def _check_decode(plan: DecodePlan, q_latent: torch.Tensor, q_pe: torch.Tensor, pages: torch.Tensor) -> None:
    problem, step = plan.problem, plan.step
    lead = (step.batch, step.q_len, problem.num_heads)
    for name, tensor, width in (
        ("q_latent", q_latent, problem.kv_lora_rank),
        ("q_pe", q_pe, problem.qk_rope_head_dim),
    ):
        if tensor.shape != (*lead, width):
            raise ValueError(f"{name} must be {[*lead, width]} as planned, got {list(tensor.shape)}")
        wanted = problem.dtype if problem.dtype != fp8.FP8 else q_latent.dtype
        if tensor.dtype != wanted or wanted not in FLOATS or tensor.device != problem.device:
            raise ValueError(
                f"{name} must be {wanted if wanted in FLOATS else FLOATS} on {problem.device} as planned, got "
                f"{tensor.dtype} on {tensor.device}"
            )
        if width > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{name} must be contiguous in its last dimension, its stride is {tensor.stride(-1)}")
    _check_pages(pages, problem.kv_lora_rank, problem.qk_rope_head_dim)
    if pages.dtype != problem.dtype or pages.device != problem.device or pages.shape[1] != problem.block_size:
        raise ValueError(
            f"pages must be {problem.dtype} on {problem.device} with blocks of {problem.block_size} as planned, got "
            f"{pages.dtype} on {pages.device} with blocks of {pages.shape[1]}"
        )


def _check_pages(pages: torch.Tensor, rank: int, rope: int) -> None:
    width = rank + rope if pages.dtype != fp8.FP8 else fp8.entry_bytes(rank, rope)
    if pages.dim() != 3 or pages.shape[2] < width or pages.stride(2) != 1:
        raise ValueError(
            f"pages must be [N, S, at least {width}] and contiguous in the last dimension, got {list(pages.shape)} "
            f"with strides {list(pages.stride())}"
        )
    if pages.dtype == fp8.FP8 and (pages.data_ptr() % 16 or pages.stride(0) % 16 or pages.stride(1) % 16):
        raise ValueError(f"pages of 8 bits must begin each entry at a multiple of 16 bytes, strides: {pages.stride()}")


def decode(
    plan: DecodePlan,
    q_latent: torch.Tensor,
    q_pe: torch.Tensor,
    pages: torch.Tensor,
    sm_scale: float,
    base: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One layer's attention of the planned step, in the absorbed form (scores over [ckv | k_pe], values are ckv).

    q_latent [B, Sq, H, R] and q_pe [B, Sq, H, P] in pages' dtype (any other of one dtype where pages are 8-bit), last
    dimension contiguous. Returns out [B, Sq, H, R]
    in that dtype, contiguous, and lse [B, Sq, H] float32 (natural log). Length 0: out 0, lse -inf.

    `base` [1] int64 on the device holds the address of the pages, for graphs that outlive them (triton only); `pages`
    then tells shape and strides alone.
    """
    _check_decode(plan, q_latent, q_pe, pages)
    if base is not None and plan.backend != "triton":
        raise ValueError(f"base is for triton; the plan's backend is {plan.backend}")
    step = plan.step
    if plan.backend == "reference":
        return reference.decode(q_latent, q_pe, pages, step.block_table, step.kv_lens, sm_scale)
    if plan.backend == "triton":
        from . import triton_decode

        return triton_decode.decode(
            q_latent, q_pe, pages, step.block_table, step.kv_lens, sm_scale, plan.state, base=base
        )
    if plan.state is None:  # no rows
        return torch.empty_like(q_latent), q_latent.new_empty(q_latent.shape[:-1], dtype=torch.float32)
    return plan.state.run(q_latent, q_pe, pages, sm_scale)


def write_latents(
    pages: torch.Tensor,
    ckv: torch.Tensor,
    k_pe: torch.Tensor,
    slot_mapping: torch.Tensor,
    base: torch.Tensor | None = None,
) -> None:
    """Store new latents ckv [T, R] and k_pe [T, P] (pages' dtype, or any for 8-bit pages; any row stride) in pages.

    slot_mapping [T] int64 on pages' device is block * S + offset, or -1 for a token that is not stored. Exactly R+P
    values of a slot change. No two tokens may share a slot. `base` as for `decode`.
    """
    if ckv.dim() != 2 or k_pe.dim() != 2 or slot_mapping.shape != ckv.shape[:1] or k_pe.shape[0] != ckv.shape[0]:
        raise ValueError(
            "ckv, k_pe and slot_mapping must be [T, R], [T, P] and [T], got "
            f"{list(ckv.shape)}, {list(k_pe.shape)} and {list(slot_mapping.shape)}"
        )
    if slot_mapping.dtype != torch.int64:
        raise ValueError(f"slot_mapping must be int64, got {slot_mapping.dtype}")
    wanted = pages.dtype if pages.dtype != fp8.FP8 else ckv.dtype
    if ckv.dtype != wanted or k_pe.dtype != wanted or wanted not in FLOATS:
        raise ValueError(
            f"ckv and k_pe must be of one dtype, for {pages.dtype} pages, got {ckv.dtype} and {k_pe.dtype}"
        )
    _check_pages(pages, ckv.shape[1], k_pe.shape[1])
    if {ckv.device, k_pe.device, slot_mapping.device} != {pages.device}:
        raise ValueError(f"ckv, k_pe and slot_mapping must be on {pages.device} as pages are")
    if pages.device.type == "cuda" and ckv.dtype != torch.float64 and triton_serves(pages.device, pages.dtype):
        from . import triton_write

        # A row of one value may have any last stride; the kernel steps by 1.
        ckv, k_pe = (x if x.stride(1) == 1 or x.shape[1] <= 1 else x.contiguous() for x in (ckv, k_pe))
        triton_write.write_latents(pages, ckv, k_pe, slot_mapping, base)
    else:
        reference.write_latents(pages, ckv, k_pe, slot_mapping)


copy_blocks = reference.copy_blocks
take_blocks = reference.take_blocks
put_blocks = reference.put_blocks
gather_latents = reference.gather_latents
