"""The known part of a prompt: found in a pool, completed for rows that know less than others, attached to a cache.

B rows, L padded columns
"""

from typing import Any

import torch

from . import compat
from .cache import PagedMLACache
from .cache.prefixes import keys_of
from .cache.sequences import HOST


class KnownPart:
    """What a pool knows of a prompt's rows.

    Args:
        pool: The pool.
        decoder: The model's decoder, for rows that know less than others.
        cache: The empty cache of a session.
        input_ids: [B, L].
        kept: [B, L] bool on the host, the columns that aren't masked.
        positions: [B, L] int64 on the host, how many such columns come before.
    """

    def __init__(
        self,
        pool: Any,
        decoder: Any,
        cache: PagedMLACache,
        input_ids: torch.Tensor,
        kept: torch.Tensor,
        positions: torch.Tensor,
    ):
        assert cache.ledger is not None
        self.pool, self.decoder, self.cache, self.root = pool, decoder, cache, cache.ledger.root
        self.input_ids, self.kept, self.positions = input_ids, kept, positions
        self.size = cache.options.block_size
        ids = input_ids.to(HOST)
        self.tokens: list[list[int]] = [ids[row, kept[row]].tolist() for row in range(len(ids))]
        self.keys: list[list[bytes]] = []
        self.rows: list[list[int]] = []  # blocks of each row, each with a user that we have to let go

    def attach(self) -> None:
        """Attach it to the cache; nothing where no row knows anything."""
        blocks = self.pool._blocks
        if not all(self.tokens):
            return
        try:
            for tokens in self.tokens:
                # The last token's logits are wanted, so it is run, and with it its block.
                keys = keys_of(self.root, tokens[: (len(tokens) - 1) // self.size * self.size], self.size)
                self.keys.append(keys)
                self.rows.append(blocks.find(keys))
            self.pool.reused = [len(row) * self.size for row in self.rows]
            if any(self.rows):
                self._attach(self.cache, list(range(len(self.rows))), self._complete())
        finally:
            for row in self.rows:
                blocks.release(row)

    def _first_unknown(self, row: int) -> int:
        """The column of a row's first token that isn't known."""
        return int((self.positions[row] == len(self.rows[row]) * self.size).nonzero()[0])

    def _complete(self) -> int:
        """Run what some rows don't know up to the column at which the one that knows most goes on: that column."""
        starts = {row: self._first_unknown(row) for row in range(len(self.rows))}
        end = max(starts.values())
        while behind := sorted((start, row) for row, start in starts.items() if start < end):
            first = behind[0][0]
            together = [row for start, row in behind if start - first <= self._slack(row, end - first)]
            self._run_rows(together, first, end)
            for row in together:
                starts[row] = end
        return end

    def _slack(self, row: int, width: int) -> int:
        """Columns that a row may start later than others and still be run with them in a pass of `width`.

        A row that knows nothing starts later because of its pads, which cost little and are forgotten.
        """
        return self.size if self.rows[row] else max(self.size, width // 4)

    def _run_rows(self, rows: list[int], start: int, end: int) -> None:
        device = self.input_ids.device
        side = self.pool._open(self.decoder, self.root)
        if start:
            self._attach(side, rows, start)
        arguments = {
            "input_ids": self.input_ids[rows, start:end],
            "attention_mask": self.kept[rows, :end].to(device, torch.int64),
            "position_ids": self.positions[rows, start:end].clamp(min=0).to(device),
            "use_cache": True,
            compat.CACHE_NAME: side,
        }
        self.decoder(**arguments)
        assert side.ledger is not None
        side.ledger.flush()
        for row, blocks in zip(rows, side.table.rows, strict=True):
            self.pool._blocks.retain(blocks)
            self.pool._blocks.release(self.rows[row])
            self.rows[row] = list(blocks)
        side.reset()

    def _attach(self, cache: PagedMLACache, rows: list[int], columns: int) -> None:
        """Give a cache the first columns of rows, all of them stored in their blocks."""
        kept = self.kept[rows, :columns]
        stored = kept.sum(1).tolist()
        blocks = [self.rows[row][: -(-count // self.size)] for row, count in zip(rows, stored, strict=True)]
        for row in blocks:
            self.pool._blocks.retain(row)
        cache.attach(blocks, kept)
        assert cache.ledger is not None
        cache.ledger.begin(
            [self.tokens[row][:count] for row, count in zip(rows, stored, strict=True)],
            [self.keys[row][: count // self.size] for row, count in zip(rows, stored, strict=True)],
            columns,
        )
