"""`cache_implementation="paged_mla"` in transformers' generate.

generate checks the name against a tuple and makes the cache in `_prepare_cache_for_generation`, where a name that it
doesn't know silently becomes a DynamicCache. So importing this package adds the name to the tuple and wraps that one
method for it: every other name goes straight through, and a model that isn't patched is refused. Where this package
isn't imported a generation config with the name can't be loaded, so saving one warns.
"""

import functools
import logging
import weakref
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, GenerationMixin
from transformers.generation import configuration_utils
from transformers.utils import logging as transformers_logging

from . import compat
from .cache import PagedMLACache
from .patch import find_bindings
from .pool import PrefixPool

logger: logging.Logger = transformers_logging.get_logger(__name__)

CACHE_IMPLEMENTATION = "paged_mla"

# New tokens a row for which memory is taken ahead; longer generations grow from there.
MAX_RESERVED_NEW_TOKENS = 4096

_pools: "weakref.WeakKeyDictionary[PagedMLACache, PrefixPool]" = weakref.WeakKeyDictionary()  # of calls going on


def _rows_of(generation_config: Any, model_kwargs: dict, batch_size: int, max_length: int) -> list[int]:
    """Stored tokens that each row will have in the end, as far as memory is taken ahead for them."""
    mask = model_kwargs.get("attention_mask")  # already repeated for beams and several sequences; None where all ones
    if isinstance(mask, torch.Tensor) and mask.ndim == 2:
        new = min(max(max_length - mask.shape[1], 0), MAX_RESERVED_NEW_TOKENS)
        return [tokens + new for tokens in mask.bool().sum(1).tolist()]
    rows = batch_size * max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
    beyond = max((generation_config.max_new_tokens or max_length) - MAX_RESERVED_NEW_TOKENS, 0)
    return [max(max_length - beyond, 0)] * rows


def _make_cache(model: Any, generation_config: Any, model_kwargs: dict, batch_size: int, max_length: int) -> Any:
    bindings = find_bindings(model)
    if not bindings:
        raise ValueError(
            f'cache_implementation="{CACHE_IMPLEMENTATION}" needs a patched model, and {type(model).__name__} is not; '
            "call hf_mla.patch(model) first"
        )
    options = bindings[0][1].config
    config = model.config.get_text_config(decoder=True)
    if not options.enabled:
        return DynamicCache(config=config)
    cache = PagedMLACache(
        config,
        block_size=options.block_size,
        entry_alignment=options.entry_alignment,
        dtype=options.cache_dtype,
        max_tokens=options.max_tokens,
    )
    cache.reserve_tokens(_rows_of(generation_config, model_kwargs, batch_size, max_length))
    return cache


def _wrap(original: Any) -> Any:
    @functools.wraps(original)
    def prepare(
        self: Any, generation_config: Any, model_kwargs: dict, generation_mode: Any, batch_size: int, max_length: int
    ) -> Any:
        ours = generation_config.cache_implementation == CACHE_IMPLEMENTATION
        kept = generation_config.use_cache and model_kwargs.get(compat.CACHE_NAME) is not None
        if ours and kept and model_kwargs[compat.CACHE_NAME] in _pools:
            generation_config.cache_implementation = None  # a config's name, which a pool's cache is
        if not ours or kept:  # a name together with another cache is for stock to refuse
            return original(self, generation_config, model_kwargs, generation_mode, batch_size, max_length)
        if not generation_config.use_cache:
            generation_config.cache_implementation = None
            return original(self, generation_config, model_kwargs, generation_mode, batch_size, max_length)
        cache = _make_cache(self, generation_config, model_kwargs, batch_size, max_length)
        if getattr(generation_config, "is_assistant", False):
            cache.activate_past_recording()
        model_kwargs[compat.CACHE_NAME] = cache
        # An assistant model is given this very config, and must not be asked for a paged cache it can't have.
        generation_config.cache_implementation = None
        return None

    return prepare


def _warn_when_saved(original: Any) -> Any:
    @functools.wraps(original)
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.cache_implementation == CACHE_IMPLEMENTATION:
            logger.warning(
                f'the generation config being saved says cache_implementation="{CACHE_IMPLEMENTATION}", with which '
                "transformers can load neither it nor a model beside it where hf_mla isn't imported; to share them, "
                "set generation_config.cache_implementation = None first"
            )
        return original(self, *args, **kwargs)

    return save_pretrained


def _with_pools(original: Any) -> Any:
    @functools.wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = next((name for name in ("past_key_values", "cache") if isinstance(kwargs.get(name), PrefixPool)), None)
        if name is None:
            return original(self, *args, **kwargs)
        pool = kwargs.pop(name)
        with pool.session(self) as cache:
            if cache is None:
                return original(self, *args, **kwargs)
            _pools[cache] = pool
            try:
                return original(self, *args, **kwargs, **{compat.CACHE_NAME: cache})
            finally:
                del _pools[cache]

    return generate


def _from_pools(original: Any) -> Any:
    @functools.wraps(original)
    def prefill(
        self: Any, input_ids: Any, generation_config: Any, model_kwargs: dict, *args: Any, **kwargs: Any
    ) -> Any:
        cache = model_kwargs.get(compat.CACHE_NAME)
        if isinstance(cache, PagedMLACache) and cache in _pools and not cache.get_seq_length():
            _pools[cache].prepare(self, cache, input_ids, model_kwargs)
            if cache.get_seq_length() and not compat.CHUNKS_GO_ON:
                generation_config.prefill_chunk_size = None  # of this call's copy; the decoder cuts long passes itself
        return original(self, input_ids, generation_config, model_kwargs, *args, **kwargs)

    return prefill


def install() -> None:
    """Teach generate the name, and what to do with a PrefixPool; done once, at import."""
    names = configuration_utils.ALL_CACHE_IMPLEMENTATIONS
    if CACHE_IMPLEMENTATION in names:
        return
    configuration_utils.ALL_CACHE_IMPLEMENTATIONS = (*names, CACHE_IMPLEMENTATION)
    GenerationMixin._prepare_cache_for_generation = _wrap(GenerationMixin._prepare_cache_for_generation)
    GenerationConfig.save_pretrained = _warn_when_saved(GenerationConfig.save_pretrained)
    GenerationMixin.generate = _with_pools(GenerationMixin.generate)
    GenerationMixin._prefill = _from_pools(GenerationMixin._prefill)
