"""Host side of the experts' kernels: how the two products are cut for so many tokens.

Terms: a tile is BLOCK_M pairs (token, expert) of one expert; P pairs, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

MAX_TOKENS = 512


@dataclass(frozen=True)
class Tile:
    """How a program walks its weights.

    Args:
        rows: Rows of the weight matrix a program owns (for up: half of gate, half of up).
        depth: Values of each row it holds a step.
        warps, stages: Triton's num_warps and num_stages.
        splits: Programs that share a row's values (down only; their results are summed by the last launch).
    """

    rows: int
    depth: int
    warps: int
    stages: int
    splits: int = 1


@dataclass(frozen=True)
class Config:
    """One way to run the four launches.

    Args:
        block_m: Pairs a tile.
        align: Whether pairs of the same expert share tiles; else each pair is a tile.
        up, down: The two products.
        overlap: Whether a launch's programs may take their places while the last of the launch before still run
            (programmatic dependent launch, from Hopper on).
    """

    block_m: int
    align: bool
    up: Tile
    down: Tile
    overlap: bool = False


# Up to how many pairs an expert, on average -> config. Of a call, bytes of weights count, and how many of them are on
# their way at once: tiles are as large as shared memory allows with two or three programs on a multiprocessor.
CONFIGS = {
    0.2: Config(16, False, Tile(128, 128, 4, 4), Tile(64, 128, 4, 4)),
    8.0: Config(16, True, Tile(128, 64, 4, 4), Tile(128, 64, 4, 4)),
    24.0: Config(32, True, Tile(128, 64, 4, 4), Tile(128, 64, 4, 4)),
    float("inf"): Config(64, True, Tile(128, 64, 4, 4), Tile(128, 64, 4, 4)),
}


@lru_cache
def _shared_bytes(device: torch.device) -> int:
    """Shared memory that one program may have."""
    if device.type != "cuda":
        return 227 << 10
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 64 << 10)


@lru_cache
def pick_config(pairs: int, experts: int, device: torch.device) -> Config:
    """The config for P pairs over E experts, with fewer stages where they don't fit."""
    config = next(config for most, config in CONFIGS.items() if pairs <= most * experts)

    def fitted(tile: Tile) -> Tile:
        stage = 2 * (tile.rows + config.block_m) * tile.depth
        return replace(tile, stages=max(1, min(tile.stages, _shared_bytes(device) // stage)))

    overlap = config.overlap and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return replace(config, up=fitted(config.up), down=fitted(config.down), overlap=overlap)
