"""What the rows of a cache in a pool say, so that their full blocks become known.

    B rows, q new columns

Tokens are still on the device when a step begins, and a decode step mustn't wait for them: they are noted as they are
and read when they are needed.
"""

import torch

from .prefixes import PrefixBlocks, next_key
from .sequences import HOST, SequenceTable


class Ledger:
    """Tokens of each row of a cache, from its first column on.

    A row whose tokens aren't known (embeddings were given), or whose positions don't count its stored tokens from 0,
    is written down no further: what its blocks hold is no function of its tokens.

    Args:
        root: What the first keys are derived from.
        blocks: The pool's blocks.
        table: The cache's rows.
    """

    def __init__(self, root: bytes, blocks: PrefixBlocks, table: SequenceTable):
        self.root = root
        self.blocks = blocks
        self.table = table
        self._pending: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.reset()

    def __deepcopy__(self, memo: dict) -> None:  # what is done with a copy becomes known to nobody
        return None

    def reset(self) -> None:
        """Begin with no rows."""
        self._pending.clear()
        self._columns = 0
        self._tokens: list[list[int]] | None = None  # stored ones, of each row; None before the first
        self._keys: list[list[bytes]] = []
        self._known: list[bool] = []

    def begin(self, tokens: list[list[int]], keys: list[list[bytes]], columns: int) -> None:
        """Rows that were attached: their stored tokens, the keys of their full blocks, and the padded columns."""
        self._tokens, self._keys, self._columns = tokens, keys, columns
        self._known = [True] * len(tokens)

    def note(self, inputs: torch.Tensor, positions: torch.Tensor | None) -> None:
        """A step of new columns has run, and the table has them.

        Args:
            inputs: Tokens [B, q], or embeddings [B, q, D].
            positions: [B or 1, q], or None for columns counted from the first; others make tokens unknown.
        """
        rows, columns = inputs.shape[:2]
        if positions is None:
            positions = torch.arange(self.table.length - columns, self.table.length, device=inputs.device)[None]
        if inputs.ndim != 2 or positions.ndim != 2:
            inputs = positions = torch.full((rows, columns), -1, device=inputs.device)
        # Copies: a view would keep all that generate has said so far.
        self._pending.append((inputs.clone(), positions.to(inputs.device).expand(rows, -1).clone()))

    def flush(self) -> None:
        """Read what was noted, and let the blocks that it filled be known."""
        if self._pending:
            ids, positions = (torch.cat(parts, 1).to(HOST) for parts in zip(*self._pending, strict=True))
            self._pending.clear()
            self._write(ids, positions)
        if self._tokens is None or self._columns != self.table.length:
            return  # columns were stored that nobody noted, by a model that isn't patched
        size = self.table.block_size
        for row, tokens, keys in zip(self.table.rows, self._tokens, self._keys, strict=True):
            for index in range(len(keys), len(tokens) // size):
                key = next_key(keys[-1] if keys else self.root, tokens[index * size : (index + 1) * size])
                keys.append(key)
                self.blocks.learn(row[index], key, self.root)

    def _write(self, ids: torch.Tensor, positions: torch.Tensor) -> None:
        batch_size, count = ids.shape
        if self._tokens is None:
            self.begin([[] for _ in range(batch_size)], [[] for _ in range(batch_size)], 0)
        assert self._tokens is not None
        columns = slice(self._columns, self._columns + count)
        self._columns = columns.stop
        stored = self.table.kept_columns(batch_size)[:, columns]
        for b, tokens in enumerate(self._tokens):
            mine = stored[b]
            new = ids[b, mine].tolist()
            wanted = list(range(len(tokens), len(tokens) + len(new)))
            right = positions[b, mine].tolist() == wanted and min(new, default=0) >= 0
            self._known[b] = self._known[b] and right
            if self._known[b]:
                tokens.extend(new)

    def crop(self) -> None:
        """Follow the table, some of whose last columns were removed; `flush` came before."""
        if self._tokens is None:
            return
        if not self.table.rows:
            self.reset()
            return
        self._columns = self.table.length
        for tokens, keys, stored in zip(self._tokens, self._keys, self.table.stored, strict=True):
            del tokens[stored:]
            del keys[stored // self.table.block_size :]

    def select(self, indices: list[int]) -> None:
        """Make row i the former row `indices[i]`; `flush` came before."""
        if self._tokens is not None:
            self._tokens = [list(self._tokens[i]) for i in indices]
            self._keys = [list(self._keys[i]) for i in indices]
            self._known = [self._known[i] for i in indices]
