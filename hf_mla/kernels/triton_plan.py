"""Host side of the Triton decode: which tile a program takes, and into how many slices a row is split.

Terms: query rows = Sq * H of one sequence; a tile is BLOCK_H query rows x BLOCK_N tokens.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton

from . import fp8

MAX_SPLITS = 128
MAX_TILES = 64
SHARED_BYTES = 227 << 10  # what one program may have on Hopper


@dataclass(frozen=True)
class DecodeConfig:
    """How one program works.

    block_h x block_n is its tile, num_stages the tiles in flight (for Gluon the most; as many as fit).
    heads_as_columns is the orientation (see triton_decode), `gluon` takes triton_hopper's kernel, programs_per_sm is
    how many run at once.
    """

    block_h: int
    block_n: int
    num_warps: int
    num_stages: int
    heads_as_columns: bool = False
    gluon: bool = False
    programs_per_sm: int = 1


# (most query rows, bytes a latent value) -> config. The first entry with enough rows wins; the last serves any number
# of rows in tiles. The first ones fit 99 KiB of shared memory, the second one of 16-bit values wants Hopper's or
# Blackwell's 227.
CONFIGS: dict[tuple[int, int], DecodeConfig] = {
    (16, 2): DecodeConfig(16, 32, 4, 3, programs_per_sm=2),
    (1 << 30, 2): DecodeConfig(64, 32, 8, 3),
    (1 << 30, 4): DecodeConfig(16, 16, 4, 2),
    (16, 1): DecodeConfig(16, 32, 4, 2, programs_per_sm=2),
    (1 << 30, 1): DecodeConfig(32, 32, 8, 2),
}
# The same where `hopper_serves` the geometry.
HOPPER_CONFIGS: dict[tuple[int, int], DecodeConfig] = {
    (16, 2): DecodeConfig(16, 64, 4, 2, heads_as_columns=True, gluon=True),
    (32, 2): DecodeConfig(32, 64, 8, 2, heads_as_columns=True, gluon=True),
    (1 << 30, 2): DecodeConfig(64, 64, 8, 2, heads_as_columns=True, gluon=True),
    (16, 1): DecodeConfig(16, 64, 8, 3, heads_as_columns=True, gluon=True),
    (32, 1): DecodeConfig(32, 64, 8, 3, heads_as_columns=True, gluon=True),
    (1 << 30, 1): DecodeConfig(64, 64, 8, 2, heads_as_columns=True, gluon=True),
}


@lru_cache
def _on_hopper(device: torch.device) -> bool:
    """Gluon's interface moves with Triton's version: only versions that the kernel was compiled with are trusted."""
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    known = (3, 6) <= version <= (3, 9) and os.environ.get("TRITON_INTERPRET", "0") != "1"
    return known and device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def hopper_serves(
    device: torch.device, dtype: torch.dtype, kv_lora_rank: int, qk_rope_head_dim: int, block_size: int
) -> bool:
    """Whether triton_hopper's kernels take this geometry: power-of-two sides and tiles inside one block."""
    return (
        dtype.itemsize in (1, 2)
        and kv_lora_rank in (64, 128, 256, 512)
        and qk_rope_head_dim in (32, 64)
        and block_size % 64 == 0
        and _on_hopper(device)
    )


@lru_cache
def _shared_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return SHARED_BYTES
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)


def pick_config(query_rows: int, device: torch.device, dtype: torch.dtype, hopper: bool = False) -> DecodeConfig:
    """The tuned config for `query_rows` rows of `dtype`, for triton_hopper's kernel if `hopper`."""
    configs = HOPPER_CONFIGS if hopper else CONFIGS
    if _shared_bytes(device) < SHARED_BYTES:
        query_rows = 1
    return next(c for (rows, size), c in configs.items() if size == dtype.itemsize and query_rows <= rows)


@lru_cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@dataclass(frozen=True)
class Slices:
    """How rows are cut: into at most `count` slices, each of at least `least` tiles, so that short rows get fewer."""

    count: int = 1
    least: int = 1


def choose_slices(lens: torch.Tensor, query_rows: int, config: DecodeConfig, sms: int) -> Slices:
    """Slices of rows of `lens` [B] tokens (CPU) for `sms` multiprocessors: enough to fill them, few to merge."""
    if not len(lens) or not query_rows:
        return Slices()
    tiles = (lens.long() + config.block_n - 1) // config.block_n
    longest = max(1, int(tiles.max()))
    # Rows of unequal length are as much work as fewer rows of the longest one's.
    batch = max(1, triton.cdiv(int(tiles.sum()), longest))
    row_tiles = triton.cdiv(query_rows, config.block_h)
    count = _best_count(batch, row_tiles, longest, config.block_h, sms * config.programs_per_sm)
    return Slices(count, max(1, triton.cdiv(longest, count) // 2))


@lru_cache(maxsize=4096)
def _best_count(batch: int, row_tiles: int, tiles: int, block_h: int, slots: int) -> int:
    """The slice count that minimises a small model of the time, its unit one tile's read at full load.

    A wave of programs takes its tiles' read time (shared by the programs that run) or their arithmetic, whichever is
    longer, plus a fixed start; more than one slice costs a merge that slowly grows with their number. A slice has at
    most MAX_TILES: in a captured graph one row may turn out much longer than the others.
    """
    compute = 0.6 if block_h <= 16 else 0.9

    def cost(count: int) -> float:
        programs = batch * row_tiles * count
        full, rest = divmod(programs, slots)
        share = triton.cdiv(tiles, count)
        waves = full * max(compute, 1.0 / row_tiles) + (max(compute, rest / slots / row_tiles) if rest else 0.0)
        starts = (full + (rest > 0)) * 1.0
        return waves * share + starts + (2.0 + count / 128 if count > 1 else 0.0)

    fewest = min(MAX_SPLITS, triton.cdiv(tiles, MAX_TILES))
    return min(range(fewest, min(tiles, MAX_SPLITS) + 1), key=cost)


def hopper_buffers(config: DecodeConfig, kv_lora_rank: int, qk_rope_head_dim: int, dtype: torch.dtype) -> int:
    """Tiles of [block_n, R + P] that fit beside the queries, the weights and 2 KiB of scratch.

    8-bit ones also need room for a tile's latents in 16 bits.
    """
    width = 2 * (kv_lora_rank + qk_rope_head_dim)
    left = SHARED_BYTES - config.block_h * width - config.block_n * config.block_h * 2 - 2048
    if dtype == fp8.FP8:
        left -= config.block_n * kv_lora_rank * 2
        width = kv_lora_rank + 2 * qk_rope_head_dim + 4
    return max(2, min(config.num_stages, left // (config.block_n * width)))


def rank_pieces(rank: int) -> tuple[int, int]:
    """`rank` as one or two power-of-two pieces (the second masked if need be): tiles have power-of-two sides.

    The second has 32 values at least: a product with 16 columns is laid out so badly over the warps that it spills.
    """
    first = 1 << (rank.bit_length() - 1)
    if first < 16:
        return 16, 0
    return first, 0 if first == rank else max(32, triton.next_power_of_2(rank - first))
