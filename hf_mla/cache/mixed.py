"""A pass over the requests of continuous batching: one row of tokens, of which some decode and some prefill.

The requests are sorted into parts that attend alike, each with a plan of its own, so that attention runs as it does
for a batch of rows.

    T tokens of all requests, B requests of a part, q new tokens of each, M table columns
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .layer import PagedMLALayer
from .sequences import Extension
from .step import DeviceStep, StepPlan


@dataclass(frozen=True)
class Chunk:
    """What a pass computes of one request.

    Args:
        past: Tokens stored before.
        new: Tokens of this pass.
        blocks: The request's blocks, in order.
    """

    past: int
    new: int
    blocks: Sequence[int]


@dataclass
class Part:
    """Requests with the same number of new tokens that attend in the same way.

    Args:
        columns: Where among the pass's tokens theirs are: a slice, or [B * q] int64 on the pages' device.
        rows: B.
        plan: Their step: absorbed, or in pieces.
    """

    columns: Any
    rows: int
    plan: StepPlan

    def take(self, tokens: torch.Tensor) -> torch.Tensor:
        """[1, h, T, D] -> [B, h, q, D]."""
        taken = tokens[0, :, self.columns]
        return taken.unflatten(1, (self.rows, -1)).transpose(0, 1)


@dataclass
class MixedPlan(StepPlan):
    """The plan of a whole pass; layers write by it, and attend part by part.

    Args:
        parts: All requests.
    """

    parts: list[Part] = field(default_factory=list)


class MixedCache:
    """A cache of latents for passes over many requests, each of which it plans itself.

    Args:
        layers: By layer index, None for an index that holds no latents.
    """

    ledger = None
    layers: list[PagedMLALayer | None]

    def plan_pass(self, call: dict, max_absorbed: int, backend: str) -> StepPlan:
        """The plan of a decoder's pass, whose arguments by name are `call`: one new token a request, or mixed."""
        raise NotImplementedError

    def end_step(self, failed: bool) -> None:
        """Nothing to undo: which request has what is the scheduler's book."""


def plan_decode(table: torch.Tensor, positions: torch.Tensor, block_size: int, blocks: int, backend: str) -> StepPlan:
    """The plan of one new token a request, made on the device alone, so that a graph can hold it.

    Args:
        table: [B, M] int32; a row that begins with a negative number is a pad, which sees and stores nothing.
        positions: [B], of the new tokens.
        block_size: Tokens a block.
        blocks: Blocks that there are.
        backend: Kernels asked for.
    """
    rows, columns = table.shape
    position = positions.to(torch.int64)
    is_pad = table[:, 0] < 0
    block = table.gather(1, (position // block_size)[:, None])[:, 0].to(torch.int64)
    slots = (block * block_size + position % block_size).masked_fill(is_pad, -1)
    lengths = (position + 1).masked_fill(is_pad, 0).to(torch.int32)[:, None]
    # The host doesn't know the lengths, so kernels are planned for the longest that the table can hold.
    longest = torch.full((rows, 1), columns * block_size, dtype=torch.int32, device="cpu")
    unused = torch.empty(0, dtype=torch.int64, device="cpu")
    plan = StepPlan(Extension([], longest, unused), unused, None, absorbed=True, num_blocks=blocks, backend=backend)
    plan._devices[table.device] = DeviceStep(table, lengths, slots)
    return plan


def plan_mixed(
    chunks: Sequence[Chunk], slots: torch.Tensor, block_size: int, blocks: int, backend: str, max_absorbed: int
) -> MixedPlan:
    """The plan of a pass over `chunks`.

    Args:
        chunks: Each request's, in the order of their tokens; pads may follow them.
        slots: [T] int64 on the pages' device, where each token is stored, -1 for pads.
        block_size: Tokens a block.
        blocks: Blocks that there are.
        backend: Kernels asked for.
        max_absorbed: New tokens up to which a request with history attends with absorbed weights.

    Raises:
        ValueError: Requests with more tokens than the pass has.
    """
    alike: dict[tuple[bool, int], list[tuple[int, Chunk]]] = {}
    start = 0
    for chunk in chunks:
        absorbed = chunk.new <= (max_absorbed if chunk.past else 1)
        alike.setdefault((absorbed, chunk.new), []).append((start, chunk))
        start += chunk.new
    if start > slots.shape[0]:
        raise ValueError(f"chunks have {start} tokens and slots {slots.shape[0]}; allowed: no more than slots")
    parts = [
        _part(members, new, absorbed, blocks, backend, slots.device) for (absorbed, new), members in alike.items()
    ]
    host = torch.empty(1, slots.shape[0], dtype=torch.int32, device="cpu")
    unused = torch.empty(0, dtype=torch.int64, device="cpu")
    plan = MixedPlan(
        Extension([], host, unused), unused, None, absorbed=False, num_blocks=blocks, backend=backend, in_pieces=True
    )
    plan.parts = parts
    plan._devices[slots.device] = DeviceStep(unused, unused, slots)
    return plan


def _part(
    members: list[tuple[int, Chunk]], new: int, absorbed: bool, blocks: int, backend: str, device: torch.device
) -> Part:
    width = max(len(chunk.blocks) for _, chunk in members)
    table = torch.tensor(
        [[*chunk.blocks, *[0] * (width - len(chunk.blocks))] for _, chunk in members], dtype=torch.int32, device="cpu"
    )
    past = torch.tensor([chunk.past for _, chunk in members], dtype=torch.int32, device="cpu")
    lengths = past[:, None] + torch.arange(1, new + 1, dtype=torch.int32, device="cpu")
    stored = torch.zeros(len(members) * new, dtype=torch.int64, device="cpu")  # all are, wherever
    plan = StepPlan(
        Extension([], lengths, stored),
        table,
        None,
        absorbed=absorbed,
        in_pieces=not absorbed,
        num_blocks=blocks,
        backend=backend,
    )
    starts = [start for start, _ in members]
    if starts == list(range(starts[0], starts[0] + new * len(members), new)):
        return Part(slice(starts[0], starts[0] + new * len(members)), len(members), plan)
    columns = torch.tensor(starts, device="cpu")[:, None] + torch.arange(new, device="cpu")
    return Part(columns.flatten().to(device, non_blocking=True), len(members), plan)
