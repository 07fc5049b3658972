"""How attention of many new columns over cached history is cut up, so that little of the history is expanded at once.

    B rows, q new columns, M table columns
    unit    rows that are attended together: of equally long histories, with every new column stored; or one row alone
    piece   stored tokens of a unit's rows that are expanded at once

Within a unit there are no pads, so its attention needs no mask: it is causal among the new tokens, and every query
sees all of the history.
"""

from dataclasses import dataclass

import torch

from .sequences import Extension


@dataclass(frozen=True)
class Unit:
    """Rows that are attended together.

    Args:
        rows: [b] int64, or None for all rows in their order.
        columns: [c] int64, the new columns that are stored, or None for all.
        pieces: Slots [b, T] int64 of the stored tokens before this step, T of them at a time.
    """

    rows: torch.Tensor | None
    columns: torch.Tensor | None
    pieces: list[torch.Tensor]

    def to(self, device: torch.device) -> "Unit":
        """The same on another device."""
        return Unit(
            None if self.rows is None else self.rows.to(device, non_blocking=True),
            None if self.columns is None else self.columns.to(device, non_blocking=True),
            [piece.to(device, non_blocking=True) for piece in self.pieces],
        )


def units_of(extension: Extension, block_table: torch.Tensor, block_size: int, limit: int) -> list[Unit]:
    """Cut a step up (host tensors); a piece has at most `limit` tokens over all its rows, but a block of each row.

    Rows that store nothing in this step are left out.
    """
    batch, columns = extension.kv_lens.shape
    kept = extension.slot_mapping.view(batch, columns) >= 0
    counts = kept.sum(1).tolist()
    past = [int(seen) - count for seen, count in zip(extension.kv_lens[:, -1].tolist(), counts, strict=True)]
    alike: dict[tuple[int, int], list[int]] = {}
    for row, count in enumerate(counts):
        if count:
            alike.setdefault((past[row], -1 if count == columns else row), []).append(row)
    units = []
    for (length, alone), rows in alike.items():
        most = max(1, limit // block_size)
        for part in (rows[start : start + most] for start in range(0, len(rows), most)):
            whole = len(part) == batch
            units.append(
                Unit(
                    rows=None if whole else torch.tensor(part, dtype=torch.int64, device="cpu"),
                    columns=None if alone < 0 else kept[alone].nonzero().squeeze(1),
                    pieces=_pieces(block_table[part], length, block_size, limit // len(part)),
                )
            )
    return units


def _pieces(table: torch.Tensor, length: int, block_size: int, limit: int) -> list[torch.Tensor]:
    """Slots [b, T] of the first `length` tokens of rows; T a power of two, so that kernels see few different sizes."""
    size = max(block_size, 1 << max(limit, 1).bit_length() - 1)
    pieces = []
    for start in range(0, length, size):
        position = torch.arange(start, min(start + size, length), device="cpu")
        blocks = table[:, position // block_size].to(torch.int64)
        pieces.append(blocks * block_size + position % block_size)
    return pieces
