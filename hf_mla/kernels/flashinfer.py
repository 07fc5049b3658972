"""MLA decode by FlashInfer 0.7 (optional): fa3 on Hopper where its shapes allow, else fa2.

Shapes: B rows, Sq query tokens a row, H heads, R = kv_lora_rank, P = qk_rope_head_dim, S = block_size.
FlashInfer knows a row's length and a causal flag, not a length per query: a row's queries must be its last Sq
stored tokens. Its plan takes half a millisecond and waits for the device, so it is made once a step and cannot be in a
CUDA graph.
"""

from __future__ import annotations

from typing import Any

import torch

from .problem import Problem, Step

WORKSPACE_BYTES = 128 << 20  # what FlashInfer's documentation advises

_workspaces: dict[tuple[torch.device, int], torch.Tensor] = {}
_scales: dict[Problem, float] = {}


def reason(problem: Problem) -> str | None:
    """Why FlashInfer can't serve `problem`, or None."""
    if problem.device.type != "cuda":
        return f"flashinfer needs a CUDA device, got {problem.device}"
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"flashinfer serves float16 and bfloat16, got {problem.dtype}"
    # Its fa2 also compiles for 384, but there its lse is off by 6e-4, seven times what rounding explains.
    if problem.kv_lora_rank not in (128, 256, 512) or problem.qk_rope_head_dim != 64:
        return (
            "flashinfer serves kv_lora_rank in (128, 256, 512) with qk_rope_head_dim 64, "
            f"got {problem.kv_lora_rank} and {problem.qk_rope_head_dim}"
        )
    if torch.cuda.get_device_capability(problem.device)[0] < 8:
        return "flashinfer needs compute capability 8.0 or newer"
    return None


def step_reason(step: Step) -> str | None:
    """Why FlashInfer can't serve this step's lengths, or None. Rows without any token are fine."""
    lens = step.kv_lens_host
    filled = lens[lens[:, -1] > 0]
    tail = filled[:, -1:] - torch.arange(step.q_len - 1, -1, -1, dtype=lens.dtype)
    if not torch.equal(filled, tail) or bool((filled[:, 0] < 1).any()):
        return (
            "flashinfer needs the queries of a row to be its last stored tokens: kv_lens[b] must be "
            "len-Sq+1, ..., len with len >= Sq, or all 0"
        )
    return None


def _algorithm(problem: Problem) -> str:
    hopper = torch.cuda.get_device_capability(problem.device)[0] == 9
    return "fa3" if hopper else "fa2"


class FlashInferPlan:
    """FlashInfer's wrapper, planned for one step."""

    def __init__(self, problem: Problem, step: Step) -> None:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        key = problem.device, torch.cuda.current_stream(problem.device).cuda_stream
        if key not in _workspaces:
            _workspaces[key] = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=problem.device)
        self.wrapper = BatchMLAPagedAttentionWrapper(_workspaces[key], backend=_algorithm(problem))
        self.problem = problem
        self.causal = step.q_len > 1
        self.metadata = _metadata(problem, step)
        empty = step.kv_lens_host[:, -1] == 0
        self.empty = empty.nonzero().squeeze(1).to(problem.device) if bool(empty.any()) else None
        # The scale is an argument of FlashInfer's plan and of this package's decode. A model has one, so the last one
        # is nearly always right, and planning now finds a step that FlashInfer can't serve while others still can.
        self.sm_scale = _scales.get(problem, 1.0)
        self._plan()

    def _plan(self) -> None:
        geometry = self.problem
        self.wrapper.plan(
            metadata=self.metadata,
            num_heads=geometry.num_heads,
            head_dim_ckv=geometry.kv_lora_rank,
            head_dim_kpe=geometry.qk_rope_head_dim,
            page_size=geometry.block_size,
            causal=self.causal,
            sm_scale=self.sm_scale,
            q_data_type=geometry.dtype,
            kv_data_type=geometry.dtype,
            query_layout="split",
            kv_cache_layout="split",
            lse_mode="basee",
        )

    def run(
        self, q_latent: torch.Tensor, q_pe: torch.Tensor, pages: torch.Tensor, sm_scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """out [B, Sq, H, R] and natural-log lse [B, Sq, H]; plans again if `sm_scale` is not the planned one."""
        if sm_scale != self.sm_scale:
            self.sm_scale = _scales[self.problem] = sm_scale
            self._plan()
        if any(stride % 8 for stride in pages.stride()[:2]) or pages.data_ptr() % 16:
            raise ValueError(
                f"backend 'flashinfer' needs entries that start at 16 bytes, got strides {pages.stride()}"
            )
        batch, q_len, heads, rank = q_latent.shape
        out = q_latent.new_empty(batch * q_len, heads, rank)
        lse = q_latent.new_empty(batch * q_len, heads, dtype=torch.float32)
        self.wrapper.run(
            query=(_aligned(q_latent.reshape(out.shape)), _aligned(q_pe.reshape(*lse.shape, -1))),
            kv_cache=(pages[..., :rank], pages[..., rank : rank + q_pe.shape[-1]]),
            out=out,
            lse=lse,
            return_lse=True,
            return_lse_base_on_e=True,
        )
        out, lse = out.view(q_latent.shape), lse.view(batch, q_len, heads)
        if self.empty is not None:
            out.index_fill_(0, self.empty, 0)
            lse.index_fill_(0, self.empty, float("-inf"))
        return out, lse


def plan(problem: Problem, step: Step) -> FlashInferPlan:
    """Plan one step of at least one query; ValueError if FlashInfer can't serve it."""
    if why := step_reason(step):
        raise ValueError(why)
    return FlashInferPlan(problem, step)


def _aligned(query: torch.Tensor) -> torch.Tensor:
    """FlashInfer reads 16 bytes at a time without checking."""
    misplaced = any(stride % 8 for stride in query.stride()[:2]) or query.data_ptr() % 16
    return query.contiguous() if misplaced else query


def _metadata(problem: Problem, step: Step) -> Any:
    """CSR metadata. A row without tokens is given the first Sq entries of block 0; its result is overwritten after."""
    from flashinfer.mla import MLAPlanMetadata

    real = step.kv_lens_host[:, -1]
    lens = torch.where(real > 0, real, step.q_len)
    blocks = (lens + problem.block_size - 1) // problem.block_size
    starts = torch.zeros(step.batch + 1, dtype=torch.int32)
    torch.cumsum(blocks, 0, dtype=torch.int32, out=starts[1:])
    row = torch.repeat_interleave(torch.arange(step.batch), blocks)
    column = torch.arange(len(row)) - starts[:-1].long()[row]
    where = torch.stack([row, column, (real[row] > 0).long()]).to(problem.device, non_blocking=True)
    # An empty row may have more entries than the table has columns (Sq > S * M): its column is then clamped.
    ids = step.block_table[where[0], where[1].clamp(max=step.block_table.shape[1] - 1)].to(torch.int32)
    return MLAPlanMetadata.csr(
        qo_indptr=torch.arange(step.batch + 1, dtype=torch.int32) * step.q_len,
        kv_indptr=starts,
        kv_indices=torch.where(where[2] > 0, ids, 0),
        kv_len_arr=lens.to(torch.int32),
    )
