"""Which tokens of a batch are stored, and in which blocks: the host's book of a paged cache.

    B rows, L padded columns seen so far (what masks and position ids speak), q new columns of a step
    stored[b] <= L   tokens of row b that are stored: masked columns (pads) are not
    kept  [B, K]     True where one of the first K <= L columns is stored; None while every column of every row is.
                     Columns from K on are stored in every row, so that decoding leaves it as it is.
    table [B, M]     block ids of each row, row-major, int32, on the host

Rows may share blocks (beams, several sequences of one prompt). A shared block is only read; who wants to write into it
gets a copy first (copy-on-write). Full blocks are never written again.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .blocks import BlockAllocator, PoolExhausted

# What table columns beyond a row's blocks hold: the reserved block, so that even a faulty read stays in bounds.
WILD = 0

HOST = "cpu"  # said each time: torch.set_default_device means the model's tensors


@dataclass(frozen=True)
class Extension:
    """What one step adds, on the host.

    Args:
        copies: (source, target) blocks to copy on every layer before anything is written.
        kv_lens: [B, q] int32, stored tokens that each query sees, itself included if it is stored.
        slot_mapping: [B * q] int64, block * block_size + offset for each new column, -1 where it is not stored.
    """

    copies: list[tuple[int, int]]
    kv_lens: torch.Tensor
    slot_mapping: torch.Tensor


def _all_kept(rows: int, columns: int) -> torch.Tensor:
    return torch.ones(rows, columns, dtype=torch.bool, device=HOST)


class SequenceTable:
    """Rows of a batch and their blocks.

    Args:
        block_size: Tokens a block.
        max_blocks: Blocks the pool may grow to, or None.
        allocator: Blocks shared with other tables, in place of a pool of one's own.
    """

    _table: torch.Tensor

    def __init__(self, block_size: int, max_blocks: int | None = None, allocator: BlockAllocator | None = None):
        self.block_size = block_size
        self.allocator = allocator or BlockAllocator(block_size, max_blocks)
        self.alone = allocator is None
        self.reset(release=False)

    def reset(self, release: bool = True) -> None:
        """Forget every row and free its blocks."""
        if release and self.away is None:
            for row in self.rows:
                self.allocator.release(row)
        self.away: object | None = None  # what holds the blocks while they are swapped out; see `leave`
        self.rows: list[list[int]] = []
        self.stored: list[int] = []
        self.length = 0
        self.kept: torch.Tensor | None = None
        self._invalidate()

    def __deepcopy__(self, memo: dict) -> "SequenceTable":
        new = memo[id(self)] = SequenceTable.__new__(SequenceTable)
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        if not self.alone:  # the same blocks have one user more
            for row in new.rows:
                new.allocator.retain(row)
        return new

    @property
    def batch_size(self) -> int:
        """Rows held, or -1 before the first step."""
        return len(self.rows) if self.rows else -1

    @property
    def table(self) -> torch.Tensor:
        """[B, M] int32 on the host, M the most blocks of a row (at least 1). Made anew only after a change."""
        width = max([1, *map(len, self.rows)])
        if self._table.shape != (len(self.rows), width):
            rows = [row + [WILD] * (width - len(row)) for row in self.rows]
            with torch.inference_mode(False):  # else it could only be updated in inference mode
                self._table = torch.tensor(rows, dtype=torch.int32, device=HOST).view(len(self.rows), width)
        return self._table

    def read_mask(
        self, attention_mask: torch.Tensor | None, batch_size: int, num_new: int
    ) -> tuple[torch.Tensor | None, bool]:
        """What a mask says about a step.

        Args:
            attention_mask: [B, L] with 0 for masked columns, or None where none is.
            batch_size: B.
            num_new: New columns, the last of L.

        Returns:
            New columns to keep, [B, q] bool on the host or None for all; whether the past is masked as it was stored.

        Raises:
            ValueError: A mask of another shape, or one that unmasks what wasn't stored.
        """
        self.check_here()
        past, kept = self.length, self.kept
        if attention_mask is None:
            if kept is not None:
                raise ValueError(
                    "attention_mask is None, but the cache left out tokens that an earlier mask had masked; "
                    f"allowed: a mask of shape {(batch_size, past + num_new)}"
                )
            return None, True
        if tuple(attention_mask.shape) != (batch_size, past + num_new):
            raise ValueError(
                f"attention_mask has shape {tuple(attention_mask.shape)}; the cache holds {past} columns and "
                f"{num_new} are new, so allowed: {(batch_size, past + num_new)}"
            )
        if kept is None and bool(attention_mask.all()):
            return None, True
        mask = attention_mask.to(torch.bool).cpu()
        seen = self.kept_columns(batch_size)
        if bool((mask[:, :past] & ~seen).any()):
            raise ValueError(
                "attention_mask unmasks earlier tokens that were masked when the cache saw them, so they were not "
                "stored; allowed: a mask whose past stays masked, or a new cache"
            )
        return mask[:, past:], not bool((seen & ~mask[:, :past]).any())

    def attach(self, rows: list[list[int]], kept: torch.Tensor) -> None:
        """Begin with tokens that are stored already: blocks of each row, which this table is now a user of.

        Args:
            rows: Just the blocks that each row's stored tokens need; a last one may hold more than is used.
            kept: [B, L] bool on the host, the columns that are stored.
        """
        assert not self.rows
        self.rows, self.stored, self.length = rows, kept.sum(1).tolist(), kept.shape[1]
        self.kept = None if bool(kept.all()) else kept
        self._invalidate()

    def extend(self, new_kept: torch.Tensor | None, batch_size: int, num_new: int) -> Extension:
        """Append `num_new` columns to every row, of which those marked in `new_kept` [B, q] (host, bool) are stored.

        Either everything is appended or, where the pool is exhausted, nothing is changed.

        Raises:
            PoolExhausted: The blocks that are needed can't be had.
        """
        self.check_here()
        fresh = not self.rows
        if fresh:
            self.rows, self.stored = [[] for _ in range(batch_size)], [0] * batch_size
        if new_kept is None or bool(new_kept.all()):
            new_kept = None
            counts = [num_new] * batch_size
        else:
            counts = new_kept.sum(1).tolist()
        writers = self._shared_writers(counts)
        needed = [-(-(self.stored[b] + counts[b]) // self.block_size) - len(self.rows[b]) for b in range(batch_size)]
        try:
            self.allocator.reserve(sum(needed) + len(writers))
        except PoolExhausted:
            if fresh:
                self.reset()
            raise

        copies = [(self.rows[b][-1], self._replace_last(b)) for b in writers]
        for b, count in enumerate(needed):
            if count:
                self._append(b, self.allocator.allocate(count))
        extension = self._locate(new_kept, counts, num_new, copies)
        self.stored = [before + count for before, count in zip(self.stored, counts, strict=True)]
        self._remember(new_kept, num_new)
        return extension

    def _shared_writers(self, counts: Sequence[int]) -> list[int]:
        """Rows that are about to write into a partly filled block which another row keeps using."""
        users: dict[int, int] = {}
        writers = []
        for b, count in enumerate(counts):
            if not count or self.stored[b] % self.block_size == 0:
                continue
            last = self.rows[b][-1]
            left = users.setdefault(last, self.allocator.holders(last))
            if left > 1:
                users[last] = left - 1
                writers.append(b)
        return writers

    def _replace_last(self, b: int) -> int:
        old, (new,) = self.rows[b][-1], self.allocator.allocate(1)
        self.allocator.release([old])
        self.rows[b][-1] = new
        if len(self.rows[b]) <= self._table.shape[1]:
            self._table[b, len(self.rows[b]) - 1] = new
        return new

    def _append(self, b: int, blocks: list[int]) -> None:
        start = len(self.rows[b])
        self.rows[b].extend(blocks)
        if self._table.shape[0] == len(self.rows) and start + len(blocks) <= self._table.shape[1]:
            self._table[b, start : start + len(blocks)] = torch.tensor(blocks, dtype=torch.int32, device=HOST)

    def _locate(
        self, new_kept: torch.Tensor | None, counts: Sequence[int], num_new: int, copies: list[tuple[int, int]]
    ) -> Extension:
        before = torch.tensor(self.stored, dtype=torch.int64, device=HOST)[:, None]
        if new_kept is None:
            ordinal = torch.arange(1, num_new + 1, device=HOST).expand(len(counts), -1)
        else:
            ordinal = new_kept.cumsum(1)
        kv_lens = before + ordinal
        slots = self._slots(kv_lens - 1)
        if new_kept is not None:
            slots = slots.masked_fill(~new_kept, -1)
        return Extension(copies, kv_lens.to(torch.int32), slots.reshape(-1))

    def _remember(self, new_kept: torch.Tensor | None, num_new: int) -> None:
        if new_kept is not None:
            self.kept = torch.cat([self.kept_columns(len(self.rows)), new_kept], dim=1)
        self.length += num_new

    def kept_columns(self, rows: int) -> torch.Tensor:
        """[B, L] bool on the host, B = `rows`: whether a column is stored."""
        if self.kept is None:
            return _all_kept(rows, self.length)
        return torch.cat([self.kept, _all_kept(rows, self.length - self.kept.shape[1])], dim=1)

    def slots_of_columns(self) -> torch.Tensor:
        """[B, L] int64 on the host: the slot of each padded column, -1 where it isn't stored."""
        kept = self.kept_columns(len(self.rows))
        return self._slots(kept.cumsum(1) - 1).masked_fill(~kept, -1)

    def _slots(self, position: torch.Tensor) -> torch.Tensor:
        """Slots of stored tokens, [B, n] int64, by their positions in their rows; of no meaning at -1."""
        block = self.table.gather(1, (position // self.block_size).clamp_(min=0)).to(torch.int64)
        return block * self.block_size + position % self.block_size

    def crop(self, num_columns: int) -> None:
        """Remove the last `num_columns` padded columns (0 to L) and free the blocks that become empty."""
        self.check_here()
        self.length -= num_columns
        if self.kept is None:
            self.stored = [self.length] * len(self.rows)
        else:
            self.kept = self.kept[:, : self.length]
            beyond = self.length - self.kept.shape[1]
            self.stored = [stored + beyond for stored in self.kept.sum(1).tolist()]
            self.kept = None if bool(self.kept.all()) else self.kept
        for row, stored in zip(self.rows, self.stored, strict=True):
            blocks = -(-stored // self.block_size)
            self.allocator.release(row[blocks:])
            del row[blocks:]
        self._invalidate()
        if not self.length:
            self.reset()

    def undo(self, extension: Extension) -> None:
        """Take back the last extension; rows that were to get a copy of a block share the block again."""
        self.crop(extension.kv_lens.shape[1])
        sources = {target: source for source, target in extension.copies}
        for row in self.rows:
            if row and row[-1] in sources:
                source = sources[row[-1]]
                self.allocator.retain([source])
                self.allocator.release([row[-1]])
                row[-1] = source

    def select(self, indices: Sequence[int]) -> None:
        """Make row i the former row `indices[i]`; rows may be repeated (they then share blocks) or left out.

        Without any row left, the length goes back to 0 too: see `reset`.

        Raises:
            ValueError: An index that isn't a row.
        """
        self.check_here()
        for index in indices:
            if not 0 <= index < len(self.rows):
                raise ValueError(f"indices: {index} is not a row of the cache; allowed: 0 to {len(self.rows) - 1}")
        if not indices:
            self.reset()
            return
        old = self.rows
        self.rows = [list(old[i]) for i in indices]
        for row in self.rows:
            self.allocator.retain(row)
        for row in old:
            self.allocator.release(row)
        self.stored = [self.stored[i] for i in indices]
        if self.kept is not None:
            self.kept = self.kept[torch.tensor(list(indices), dtype=torch.int64, device=HOST)]
        self._invalidate()

    def blocks(self) -> list[int]:
        """The blocks in use, each once."""
        return list(dict.fromkeys(block for row in self.rows for block in row))

    def leave(self, away: object) -> None:
        """Free all blocks, whose copies `away` holds in the order of `blocks`; rows tell places in it meanwhile."""
        place = {block: i for i, block in enumerate(self.blocks())}
        for row in self.rows:
            self.allocator.release(row)
        self.allocator.shrink()
        self.rows = [[place[block] for block in row] for row in self.rows]
        self.away = away
        self._invalidate()

    def come_back(self, blocks: list[int]) -> None:
        """Go on with newly allocated `blocks` that hold what had left, in the same order."""
        self.rows = [[blocks[place] for place in row] for row in self.rows]
        for row in self.rows:
            self.allocator.retain(row)
        self.allocator.release(blocks)
        self.away = None
        self._invalidate()

    def check_here(self) -> None:
        """Raise where the blocks are swapped out.

        Raises:
            ValueError: They are.
        """
        if self.away is not None:
            raise ValueError(
                "cache: it is swapped out to host memory; swap it in (HostTier.swap_in) before it is used"
            )

    def _invalidate(self) -> None:
        self._table = torch.full((0, 0), WILD, dtype=torch.int32, device=HOST)

    def check(self) -> None:
        """Raise AssertionError if blocks, users, lengths and the remembered mask disagree."""
        self.allocator.check()
        self.check_here()
        users: dict[int, int] = {}
        for row, stored in zip(self.rows, self.stored, strict=True):
            assert len(row) == -(-stored // self.block_size), "a row has more or fewer blocks than its tokens need"
            for block in row:
                users[block] = users.get(block, 0) + 1
        if self.alone:
            assert users == self.allocator.users, "the reference counts aren't the rows' uses"
        assert all(self.allocator.users[block] >= count for block, count in users.items()), "a row's block may go"
        if self.kept is not None:
            assert self.kept.shape[0] == len(self.rows) and self.kept.shape[1] <= self.length
            assert self.kept_columns(len(self.rows)).sum(1).tolist() == self.stored
        for b, row in enumerate(self.rows):
            assert self.table[b, : len(row)].tolist() == row, "the table isn't the rows"
