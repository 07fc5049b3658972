"""What a paged cache holds, in numbers, a line and a table."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from .. import compat
from .layer import PagedMLALayer
from .layout import EntryLayout
from .sequences import SequenceTable


def _expanded_bytes(config: PreTrainedConfig, layer_idx: int, layout: EntryLayout) -> int:
    """Bytes of one token's expanded key and value in a layer, in the latents' dtype, or bf16 where that is 8-bit."""
    layer = compat.layer_config(config, layer_idx)
    head_values = layer.qk_nope_head_dim + layer.qk_rope_head_dim + layer.v_head_dim
    return layer.num_attention_heads * head_values * layout.compute_dtype(torch.bfloat16).itemsize


@dataclass(frozen=True)
class MemoryReport:
    """Memory of a cache, all layers together; bytes are of the pages alone.

    Args:
        rows: Sequences held.
        tokens: Stored tokens over all rows, shared ones counted once a row.
        blocks_used: Blocks with at least one user.
        blocks_total: Blocks of the pool, the reserved one not counted.
        block_size: Tokens a block.
        layers: Layers that hold latents.
        bytes_per_token: Bytes of one token over all layers.
        bytes_used: Bytes of the used blocks.
        bytes_pool: Bytes of the pool.
        bytes_expanded: Bytes that the same tokens would take as expanded keys and values, or None without a config.
    """

    rows: int
    tokens: int
    blocks_used: int
    blocks_total: int
    block_size: int
    layers: int
    bytes_per_token: int
    bytes_used: int
    bytes_pool: int
    bytes_expanded: int | None

    @classmethod
    def of(
        cls, table: SequenceTable, layers: Sequence[PagedMLALayer], config: PreTrainedConfig | None
    ) -> "MemoryReport":
        """Read off a cache's book and layers."""
        layouts = {layer.layer_idx: layer.layout for layer in layers if layer.layout is not None}
        block_bytes = sum(layout.block_bytes for layout in layouts.values())
        tokens = sum(table.stored)
        expanded = None
        if config is not None:
            expanded = sum(tokens * _expanded_bytes(config, i, layout) for i, layout in layouts.items())
        return cls(
            rows=max(table.batch_size, 0),
            tokens=tokens,
            blocks_used=len(table.allocator.users),
            blocks_total=table.allocator.num_blocks - 1,
            block_size=table.block_size,
            layers=len(layouts),
            bytes_per_token=block_bytes // table.block_size,
            bytes_used=len(table.allocator.users) * block_bytes,
            bytes_pool=sum(layer.pages.nbytes for layer in layers if layer.pages is not None),
            bytes_expanded=expanded,
        )


def human_bytes(count: int) -> str:
    """1536 -> '1.5 KiB'."""
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"


def _comparison(report: MemoryReport) -> str:
    if not report.bytes_expanded or not report.bytes_used:
        return ""
    ratio = report.bytes_expanded / report.bytes_used
    return f"{human_bytes(report.bytes_expanded)} as expanded keys and values ({ratio:.1f} times)"


def report_line(report: MemoryReport) -> str:
    """One line for `repr`."""
    parts = [
        f"{report.rows} rows",
        f"{report.tokens} tokens",
        f"{report.blocks_used} of {report.blocks_total} blocks of {report.block_size} tokens",
        f"{report.layers} layers",
        f"{human_bytes(report.bytes_used)} used, pool {human_bytes(report.bytes_pool)}",
        _comparison(report),
    ]
    return ", ".join(part for part in parts if part)


def report_html(report: MemoryReport) -> str:
    """A small table for notebooks."""
    rows = [
        ("rows", report.rows),
        ("tokens", report.tokens),
        ("blocks", f"{report.blocks_used} used of {report.blocks_total}, {report.block_size} tokens each"),
        ("layers", report.layers),
        ("a token", human_bytes(report.bytes_per_token)),
        ("used", human_bytes(report.bytes_used)),
        ("pool", human_bytes(report.bytes_pool)),
        ("expanded K/V", _comparison(report) or "unknown: the cache was made without a config"),
    ]
    cells = "".join(f"<tr><th style='text-align:left'>{name}</th><td>{value}</td></tr>" for name, value in rows)
    return f"<table><caption>PagedMLACache</caption>{cells}</table>"
