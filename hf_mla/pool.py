"""`PrefixPool`: latents that outlive a call of generate, so that a prompt's known beginning isn't prefilled again.

    B rows, L padded columns of a prompt

Every call gets a PagedMLACache of its own whose blocks are the pool's. Before the prefill each row's longest known
prefix is found and attached; rows that know less than others are completed first, without them; then the model goes on
from the first column that some row doesn't know. When the call ends, all that was said in it is known.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .cache import PagedMLACache
from .cache.layer import PageStore
from .cache.ledger import Ledger
from .cache.persist import read_blocks, write_blocks
from .cache.prefixes import PrefixBlocks
from .cache.report import human_bytes
from .cache.sequences import HOST, SequenceTable
from .config import MLAConfig
from .identity import fingerprint
from .patch import find_bindings
from .pool_prefill import KnownPart

# What else a prompt's pass may bring; anything else (images, say) may change what a token's latents are.
KNOWN_ARGUMENTS = ("attention_mask", "position_ids", "cache", "past_key_values", "use_cache", "logits_to_keep")


class PrefixPool:
    """Blocks of latents shared by calls of generate, and found again by what they hold.

    Give the same pool to call after call, with the whole prompt each time. The model must be patched, and all of its
    cache must be latents (see docs/families.md: nothing beside them). Another model of the same geometry, another
    adapter, weights or dtypes that have changed find nothing of what was stored before. Reuse begins in the prefill of
    greedy, sampling and beam search; assisted decoding and calls with `inputs_embeds` run as without a pool. For one
    thread at a time.

    Args:
        max_tokens: Tokens that the pool may hold, rounded up to blocks: when room is needed, what was used least
            recently goes, but for what is in use. None grows as needed.

    Raises:
        ValueError: A number that isn't allowed.

    Example:
        >>> pool = hf_mla.PrefixPool(max_tokens=200_000)
        >>> model.generate(**inputs, past_key_values=pool)
    """

    def __init__(self, max_tokens: int | None = None):
        MLAConfig(max_tokens=max_tokens)  # checks it
        self.max_tokens = max_tokens
        self.reused: list[int] = []  # tokens of each row that the last prefill found
        self._options: MLAConfig | None = None  # of the first model's patch; with it there are blocks and stores
        self._blocks = PrefixBlocks(1)
        self._stores: list[PageStore] = []

    @property
    def known_tokens(self) -> int:
        """Tokens whose latents can be found."""
        return len(self._blocks.key_of) * self._blocks.block_size

    @property
    def nbytes(self) -> int:
        """Bytes of the pool's pages."""
        return sum(store.pages.nbytes for store in self._stores if store.pages is not None)

    def clear(self) -> None:
        """Forget all that isn't in use. The pool keeps its memory."""
        self._blocks.forget_idle()

    def __repr__(self) -> str:
        limit = "no limit" if self.max_tokens is None else f"at most {self.max_tokens}"
        return f"PrefixPool({self.known_tokens} tokens known, {limit}, {human_bytes(self.nbytes)})"

    def save(self, path: str | Path, model: nn.Module) -> None:
        """Write all that is known of `model` to a safetensors file, whole or not at all.

        Raises:
            ValueError: A model that isn't patched or can't use a pool, or of which nothing is known.
        """
        root = self._root(model)
        known = self._blocks.known(root)
        if not known:
            raise ValueError(
                f"model: the pool knows no prefix of this {type(model).__name__}, so there is none to save"
            )
        write_blocks(Path(path), root, known, self._stores)

    def load(self, path: str | Path, model: nn.Module) -> None:
        """Take in what `save` wrote, in this process or another.

        Raises:
            ValueError: A file that is no such file or isn't whole; one of another model, adapter or dtype, or of
                another block size or alignment; PoolExhausted where there is no room. The pool knows what it knew.
        """
        root = self._root(model)
        decoder, binding = find_bindings(model)[0]
        attentions: list[Any] = [module for _, module in binding.attentions]
        devices = {module.layer_idx: next(module.parameters()).device for module in attentions}
        layers = self._new_cache(decoder).mla_layers
        with read_blocks(Path(path), root, layers[0].block_size, layers[0].entry_alignment, len(layers)) as saved:
            for layer, layout in zip(layers, saved.layouts, strict=True):
                if layer.layout not in (None, layout):
                    raise ValueError(f"path: {path} holds pages of {layout}, and the pool has {layer.layout}")
            new = [index for index, key in enumerate(saved.keys) if key not in self._blocks.block_of]
            blocks = self._blocks.allocate(len(new))
            try:
                for layer, layout in zip(layers, saved.layouts, strict=True):
                    if layer.layout is None:
                        sizes = layout.kv_lora_rank, layout.qk_rope_head_dim
                        layer.lay_out(*sizes, layout.dtype, devices[layer.layer_idx])
                    layer.grow(self._blocks.num_blocks)
                    assert layer.pages is not None
                    layer.pages.view(torch.uint8)[blocks] = saved.pages(layer.layer_idx)[new].to(layer.device)
                for index, block in zip(new, blocks, strict=True):
                    self._blocks.learn(block, saved.keys[index], root)
            finally:
                self._blocks.release(blocks)

    @contextmanager
    def session(self, model: nn.Module) -> Iterator[PagedMLACache | None]:
        """A cache for one call of `model.generate`; what was said with it is known when the call has ended.

        Yields None where the patch is switched off (`enabled=False`).

        Raises:
            ValueError: A model that isn't patched, whose cache isn't latents alone, or whose patch has other options
                than the pool's first model's.
        """
        if _options_of(model).enabled:
            cache = self._open(find_bindings(model)[0][0], self._root(model))
            try:
                yield cache
                assert cache.ledger is not None
                cache.ledger.flush()
            finally:
                cache.ledger = None
        else:
            yield None

    def prepare(self, model: nn.Module, cache: PagedMLACache, input_ids: torch.Tensor, others: dict) -> None:
        """Attach what is known of a prompt to the empty cache of a session, so that a prefill goes on from there.

        Args:
            model: The session's model.
            cache: The session's cache.
            input_ids: [B, L].
            others: What the prefill is given besides; attention_mask [B, L] and position_ids [B or 1, L] are read.
        """
        self.reused = [0] * input_ids.shape[0]
        if any(value is not None and name not in KNOWN_ARGUMENTS for name, value in others.items() if _is_data(value)):
            return
        mask, positions = others.get("attention_mask"), others.get("position_ids")
        kept = torch.ones(input_ids.shape, dtype=torch.bool, device=HOST)
        if mask is not None:
            if mask.shape != input_ids.shape:
                return
            kept = mask.to(HOST, torch.bool)
        counted = kept.cumsum(1) - 1
        if positions is not None:
            if positions.ndim != 2 or positions.shape[1] != kept.shape[1]:
                return
            given = positions.to(HOST).expand_as(counted)
            if not torch.equal(given[kept], counted[kept]):
                return
        elif not bool(kept.all()):
            return
        KnownPart(self, find_bindings(model)[0][0], cache, input_ids, kept, counted).attach()

    def _root(self, model: nn.Module) -> bytes:
        options, decoder = _options_of(model), find_bindings(model)[0][0]
        device = next(decoder.parameters()).device.type
        cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        parts = fingerprint(decoder), options.cache_dtype, options.block_size, options.entry_alignment, cast
        return hashlib.sha256(repr(parts).encode()).digest()

    def _new_cache(self, decoder: Any) -> PagedMLACache:
        """An empty cache over the pool's blocks and pages."""
        options = decoder.__dict__["_hf_mla"].config
        cache = PagedMLACache(
            decoder.config,
            block_size=options.block_size,
            entry_alignment=options.entry_alignment,
            dtype=options.cache_dtype,
            max_tokens=self.max_tokens,
        )
        if not cache.is_all_mla:
            raise ValueError(
                f"model: a {type(decoder).__name__} keeps more than latents between steps, which a pool of prefixes "
                "can't hold; use a PagedMLACache"
            )
        if self._options is None:
            self._options = options
            self._blocks = PrefixBlocks(options.block_size, cache.table.allocator.max_blocks)
            self._stores = [layer.store for layer in cache.layers]
            for store in self._stores:
                store.shared = True
        ours = self._options
        got = options.block_size, options.entry_alignment, options.cache_dtype, len(cache.layers)
        held = ours.block_size, ours.entry_alignment, ours.cache_dtype, len(self._stores)
        if got != held:
            raise ValueError(
                f"model: its block_size, entry_alignment, cache_dtype and layers are {got}, and the pool's are "
                f"{held}; give each such model a pool of its own"
            )
        cache.table = SequenceTable(options.block_size, allocator=self._blocks)
        for layer, store in zip(cache.layers, self._stores, strict=True):
            layer.store = store
        return cache

    def _open(self, decoder: nn.Module, root: bytes) -> PagedMLACache:
        cache = self._new_cache(decoder)
        cache.ledger = Ledger(root, self._blocks, cache.table)
        cache.free_when_gone()
        return cache


def _is_data(value: object) -> bool:
    return value is not None and value is not False and not isinstance(value, (bool, int, str))


def _options_of(model: nn.Module) -> MLAConfig:
    bindings = find_bindings(model)
    if not bindings:
        raise ValueError(f"model: {type(model).__name__} isn't patched; call hf_mla.patch(model) first")
    return bindings[0][1].config
