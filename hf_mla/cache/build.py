"""Which layers a PagedMLACache has: latents in pages, and for all else what transformers' own cache would have."""

from typing import Any

from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicCache, DynamicIndexedLayer, DynamicLayer

from .. import compat
from ..config import MLAConfig
from .indexed import PagedIndexedLayer
from .layer import PagedMLALayer

PAGED: dict[type, type[PagedMLALayer]] = {DynamicLayer: PagedMLALayer, DynamicIndexedLayer: PagedIndexedLayer}


def new_layer(layer_idx: int, options: MLAConfig, kind: type[PagedMLALayer] = PagedMLALayer) -> PagedMLALayer:
    """An empty layer with pages."""
    return kind(layer_idx, options.block_size, options.entry_alignment, options.cache_dtype)


def layers_of(config: PreTrainedConfig, options: MLAConfig) -> list[Any]:
    """The layers for a decoder's config.

    Raises:
        ValueError: A config without latent attention.
    """
    if getattr(compat.layer_config(config, 0), "kv_lora_rank", None) is None:
        raise ValueError(
            f"config: {type(config).__name__} has no kv_lora_rank, so its model has no multi-head latent attention; "
            "use transformers' DynamicCache"
        )
    return [
        new_layer(i, options, PAGED[type(layer)]) if type(layer) in PAGED else layer
        for i, layer in enumerate(DynamicCache(config=config).layers)
    ]
