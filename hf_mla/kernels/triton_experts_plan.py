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
    """

    block_m: int
    align: bool
    up: Tile
    down: Tile


# Up to how many pairs an expert, on average -> config, as a sweep on an H200 found them for DeepSeek-V2-Lite. Of a
# call, bytes of weights count, and how many of them are on their way at once.
CONFIGS = {
    0.2: Config(16, False, Tile(64, 128, 4, 3), Tile(64, 128, 4, 3, splits=2)),
    8.0: Config(16, True, Tile(64, 128, 4, 3), Tile(64, 128, 4, 3)),
    24.0: Config(32, True, Tile(64, 128, 4, 4), Tile(64, 128, 4, 3, splits=2)),
    float("inf"): Config(64, True, Tile(128, 64, 4, 3), Tile(128, 64, 4, 4, splits=2)),
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

    return replace(config, up=fitted(config.up), down=fitted(config.down))
