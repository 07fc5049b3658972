"""Pages of a layer whose attention is sparse: latents in pages, and the keys that its indexer scores.

B rows, q new columns, L padded columns, D = index_head_dim
"""

from typing import Any

import torch
from transformers.cache_utils import DynamicIndexedLayer

from .layer import PagedMLALayer
from .step import StepPlan


class PagedIndexedLayer(PagedMLALayer):
    """A PagedMLALayer with transformers' own layer beside it for the indexer's keys, [B, L, D] in padded columns.

    The indexer scores every column against the model's mask, so its keys stay padded; the columns that it picks are
    mapped to slots when attention reads the pages.
    """

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.indexer = DynamicIndexedLayer()

    def write(self, ckv: torch.Tensor, k_pe: torch.Tensor, step: StepPlan) -> None:
        """Store a step's latents; `keys` tells their padded shape [B, 1, L, R] to indexers that read it there."""
        super().write(ckv, k_pe, step)
        self.keys = torch.empty(ckv.shape[0], 1, self.length, ckv.shape[3], dtype=ckv.dtype, device="meta")

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Append the indexer's keys [B, q, D]; all of them, [B, L, D]."""
        return self.indexer.update_indexer(indexer_key_states)

    def crop_indexer(self, length: int) -> None:
        """Leave `length` columns, as a failed step or a crop of the cache asks for."""
        keys = self.indexer.indexer_keys
        if keys is not None:  # by hand: the crop of 5.15 looks for main keys, which are in pages
            self.indexer.indexer_keys = keys[:, :length]

    def reset_indexer(self) -> None:
        """Forget the keys; made anew, for 5.15 only zeroes them."""
        self.indexer = DynamicIndexedLayer()
