"""The cache that transformers' continuous batching books, with latents in it in place of keys and values.

transformers keeps the book: which request has which blocks, which are shared, what is evicted. A block holds
`page_size` tokens of all layers, so copying and offloading one is a single read; each layer sees its pages as one
tensor with the block's stride.

    T tokens of all requests, M table columns, R = kv_lora_rank, P = qk_rope_head_dim
"""

import logging
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation.continuous_batching.cache import (
    FULL_ATTENTION,
    CachePool,
    FullAttentionCacheAllocator,
    PagedAttentionCache,
    get_device_and_memory_breakdown,
)
from transformers.utils import logging as transformers_logging

from ..chunks import pass_bytes_per_token
from ..config import MLAConfig
from .layer import PagedMLALayer
from .layout import EntryLayout
from .mixed import Chunk, MixedCache, plan_decode, plan_mixed
from .step import StepPlan

logger: logging.Logger = transformers_logging.get_logger(__name__)

DEFAULT_BATCH_TOKENS = 8192
# Bytes of index buffers a token of the pool, in both of the buffers that asynchronous batching keeps.
INDEX_BYTES = 16


class LatentAllocator(FullAttentionCacheAllocator):
    """Books blocks of latents; slots are block * page_size + offset, as our kernels count them.

    Args:
        layers: The layers that hold latents.
        layout: How a token lies in a page, the same in all of them.
        allow_block_sharing: Whether requests may share blocks.
    """

    rows_per_token = 1

    def __init__(self, layers: list[PagedMLALayer], layout: EntryLayout, allow_block_sharing: bool):
        self.layers = layers
        self.layout = layout
        self.cache_dtype = layout.dtype
        self._before_cache_tensor_init(
            index=0,
            layer_indices=[layer.layer_idx for layer in layers],
            tokens_per_page=layout.block_size,
            bytes_per_page=layout.block_bytes,
            allow_block_sharing=allow_block_sharing,
        )

    def register_cache_tensor(
        self, bytes_per_sector: int, non_trash_bytes: int, cache_tensor: torch.Tensor, pool: CachePool
    ) -> None:
        """Let the layers see their pages in `cache_tensor`, bytes of all blocks."""
        self.bytes_per_sector = bytes_per_sector
        self._copy_view = cache_tensor.view(-1, self.bytes_per_block)
        self._after_cache_tensor_init(non_trash_bytes, bytes_per_sector, cache_tensor, pool)
        self.block_physical_stride = self.tokens_per_page
        self.write_trash_index = -1  # what our kernels don't store
        blocks = cache_tensor.view(self.layout.dtype).view(
            -1, len(self.layers), self.layout.block_size, self.layout.entry_values
        )
        for i, layer in enumerate(self.layers):
            layer.store.layout, layer.store.pages = self.layout, blocks[:, i]
            layer.is_initialized = True

    def get_read_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        """None: attention finds what it reads by the block table."""
        return []


@dataclass(frozen=True)
class Capacity:
    """What the pool of continuous batching holds.

    Args:
        tokens: Tokens that fit.
        page_size: Tokens a block.
        bytes_per_token: Of all layers.
    """

    tokens: int
    page_size: int
    bytes_per_token: int

    def requests(self, length: int) -> int:
        """How many requests of `length` tokens, prompt and answer, fit at once."""
        return self.tokens // (-(-length // self.page_size) * self.page_size)

    def __str__(self) -> str:
        fits = ", ".join(f"{self.requests(length)} of {length}" for length in (1024, 8192))
        size = self.tokens * self.bytes_per_token / 2**30
        return f"{self.tokens} tokens fit the pool ({size:.2f} GiB): requests of tokens: {fits}"


class BatchCache(MixedCache, PagedAttentionCache):
    """transformers' PagedAttentionCache over pages of latents.

    Args:
        attentions: The patched attention modules.
        options: The patch's settings.
        config: The decoder's config.
        cb_config: transformers' settings, resolved.
        device: Where the pages lie.
        dtype: The model's.

    Raises:
        ValueError: Too little memory for one block; attentions of different sizes.
    """

    def __init__(
        self,
        attentions: list[Any],
        options: MLAConfig,
        config: Any,
        cb_config: Any,
        device: torch.device,
        dtype: torch.dtype,
    ):
        self.config, self.dtype, self.device = config, dtype, device
        self.max_blocks_per_request = cb_config.max_blocks_per_request or 0
        by_index = {module.layer_idx: module for module in attentions}
        sizes = {(module.kv_lora_rank, module.qk_rope_head_dim) for module in attentions}
        if len(sizes) > 1:
            raise ValueError(f"model: its layers' latents have different sizes, {sorted(sizes)}; allowed: one size")
        rank, rope = sizes.pop()
        page_size, store_dtype = cb_config.page_size, options.cache_dtype or dtype
        layout = EntryLayout(rank, rope, page_size, options.entry_alignment, store_dtype)
        self.layers = [
            PagedMLALayer(index, page_size, options.entry_alignment, options.cache_dtype)
            if index in by_index
            else None
            for index in range(max(by_index) + 1)
        ]
        held = [layer for layer in self.layers if layer is not None]
        allocator = LatentAllocator(held, layout, cb_config.allow_block_sharing)
        self.cache_allocators = {FULL_ATTENTION: allocator}
        self.layer_to_allocator = dict.fromkeys(by_index, allocator)
        self.bytes_per_sector = allocator.bytes_per_block  # a multiple of 256
        self.tokens_per_sector = page_size

        self.max_batch_tokens = cb_config.max_batch_tokens or DEFAULT_BATCH_TOKENS
        self.num_sectors = self._num_blocks(cb_config, options)
        with torch.inference_mode(False):  # the pages outlive the mode that the first call is made in
            self.cache_tensor = torch.empty(
                (self.num_sectors + 2) * self.bytes_per_sector, dtype=torch.uint8, device=device
            )
        self.pool = CachePool(self.num_sectors, 1)
        allocator.register_cache_tensor(
            self.bytes_per_sector, self.num_sectors * self.bytes_per_sector, self.cache_tensor, self.pool
        )
        self.allow_block_sharing = cb_config.allow_block_sharing
        self.use_prefix_sharing = allocator.use_block_sharing
        self.num_blocks = self.num_sectors
        self.read_cache_limit = 0  # nothing is read by index, so no batch is limited by the index's size
        self.max_decode_fast_path_length = self._infer_max_decode_fast_path_length()
        self.max_tokens_read = page_size * self.num_blocks
        self._chunks: list[Chunk] = []
        self.capacity = Capacity(self.max_tokens_read, page_size, self.bytes_per_sector // page_size)
        logger.info(f"hf_mla: {self.capacity}")

    def _num_blocks(self, cb_config: Any, options: MLAConfig) -> int:
        """Blocks of the pool: as asked, else what free memory leaves beside a pass's own tensors."""
        page_size = cb_config.page_size
        most = None if options.max_tokens is None else options.max_tokens // page_size
        if cb_config.num_blocks is not None:
            blocks = cb_config.num_blocks
        else:
            _, total, reserved, allocated = get_device_and_memory_breakdown()
            available = int((total - max(reserved, allocated)) * cb_config.max_memory_percent)
            working = self.max_batch_tokens * pass_bytes_per_token(self.config, self.dtype.itemsize)
            rows = cb_config.max_requests_per_batch
            logits = rows * self.config.vocab_size * (3 * 4 + self.dtype.itemsize)
            tables = 2 * rows * self.max_blocks_per_request * 4
            per_block = self.bytes_per_sector + INDEX_BYTES * page_size
            blocks = (available - working - logits - tables) // per_block - 2
            if torch.device(self.device).type == "cpu":  # not all of a computer's memory for a few requests
                blocks = min(blocks, max(2 * rows * self.max_blocks_per_request, 64))
        blocks = blocks if most is None else min(blocks, most)
        if blocks < 1:
            raise ValueError(
                f"continuous_batching_config: no block of {page_size} tokens ({self.bytes_per_sector} bytes) fits; "
                "allowed: a num_blocks, hf_mla's max_tokens and a max_memory_percent that leave room for one, or a "
                "smaller max_batch_tokens"
            )
        return blocks

    def extend_read_and_write_indices(
        self, request_id: str, past_length: int, query_length: int, read_index: Any, write_index: Any
    ) -> None:
        """As transformers'; and remember, on the host, what the coming pass is made of."""
        super().extend_read_and_write_indices(request_id, past_length, query_length, read_index, write_index)
        blocks = self.cache_allocators[FULL_ATTENTION].block_table[request_id]
        used = -(-(past_length + query_length) // self.tokens_per_sector)
        self._chunks.append(Chunk(past_length, query_length, blocks[:used]))

    def plan_pass(self, call: dict, max_absorbed: int, backend: str) -> StepPlan:
        """The plan of the pass that transformers prepared last.

        Args:
            call: The decoder's arguments by name: `block_table` [1, T, M] where each request has one new token, else
                None and `write_index` [[T]]; `position_ids` [1, T].
            max_absorbed: See `plan_mixed`.
            backend: Kernels asked for.
        """
        page_size, blocks = self.tokens_per_sector, self.num_blocks + 2
        if call.get("block_table") is not None:
            return plan_decode(call["block_table"][0], call["position_ids"][0], page_size, blocks, backend)
        chunks, self._chunks = self._chunks, []
        return plan_mixed(chunks, call["write_index"][0], page_size, blocks, backend, max_absorbed)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new latents, [B, 1, q, R] and [B, 1, q, P], and hand them on: attention reads the pages."""
        layer, step = self.layers[layer_idx], self.step
        assert layer is not None
        layer.write(key_states, value_states, step)
        step.hand_on(layer_idx)
        return key_states, value_states

    def free_all_requests(self, clear_ledgers: bool = False) -> None:
        """As transformers'; a pass that was prepared and never ran is forgotten."""
        self._chunks = []
        super().free_all_requests(clear_ledgers)
