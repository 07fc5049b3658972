"""`PagedMLACache`: the transformers Cache that keeps latents in blocks.

    B rows, q new columns, L padded columns, R = kv_lora_rank, P = qk_rope_head_dim

Lengths have two meanings. `get_seq_length`, `get_mask_sizes`, `crop` and position ids speak padded columns, as every
transformers cache does. Blocks, slots and kernel lengths speak stored tokens: masked columns take no memory.
"""

import copy
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin

from .. import compat
from ..config import CACHE_DTYPES, MLAConfig
from . import tickets
from .build import layers_of, new_layer
from .gradient import refuse_gradient
from .indexed import PagedIndexedLayer
from .layer import PagedMLALayer
from .ledger import Ledger
from .mask_check import MaskCheck
from .report import MemoryReport, report_html, report_line
from .sequences import SequenceTable
from .step import StepPlan


def _kinds(layers: Sequence[Any]) -> str:
    """How many layers of which kinds, for messages."""
    latent = sum(isinstance(layer, PagedMLALayer) for layer in layers)
    others = f", {len(layers) - latent} of them without latents" if latent < len(layers) else ""
    return f"{len(layers)} layers{others}"


class PagedMLACache(Cache):
    """Paged cache of compressed latents for models with multi-head latent attention.

    On a patched model, attention reads the pages directly. On an unpatched model of transformers >= 5.15 it is a plain
    cache: `update` returns the whole history.

    Args:
        config: The model's config. Needed for models that mix latent attention with other layers, which keep the layer
            classes of transformers' own DynamicCache; otherwise layers are added as they come.
        block_size: Tokens a block: 16, 32, 64, 128 or 256.
        entry_alignment: Bytes an entry is padded to a multiple of, a power of two from 16 (packed) to 4096.
        dtype: Type of the stored values (float32, float16, bfloat16, or float8_e4m3fn, which quantises), or None for
            that of the latents.
        max_tokens: Tokens the pool may hold over all rows, rounded up to blocks; None grows as needed.

    Raises:
        ValueError: A value that isn't allowed, or a config without latent attention.

    Example:
        >>> cache = hf_mla.PagedMLACache(max_tokens=8192)
        >>> model.generate(**inputs, past_key_values=cache)
    """

    layers: list[Any]

    def __init__(
        self,
        config: PreTrainedConfig | None = None,
        *,
        block_size: int = 64,
        entry_alignment: int = 16,
        dtype: torch.dtype | None = None,
        max_tokens: int | None = None,
    ):
        if config is not None and not isinstance(config, PreTrainedConfig):
            raise ValueError(f"config is a {type(config).__name__}; allowed: None or a model's config, model.config")
        if dtype not in (None, *CACHE_DTYPES):
            raise ValueError(f"dtype is {dtype!r}; allowed: None, {', '.join(map(str, CACHE_DTYPES))}")
        options = MLAConfig(
            block_size=block_size, entry_alignment=entry_alignment, cache_dtype=dtype, max_tokens=max_tokens
        )
        self.options = options
        self.model_config = config.get_text_config(decoder=True) if config is not None else None
        max_blocks = None if max_tokens is None else -(-max_tokens // block_size)
        self.table = SequenceTable(block_size, max_blocks)
        self._step: StepPlan | None = None  # between begin_step and end_step
        self._plain_step: StepPlan | None = None  # the last one of an unpatched model
        self.ledger: Ledger | None = None  # what the rows say, while blocks of a pool become known by it
        self._spoiled = False  # a pass failed that can't be undone
        self.runs_ahead = False  # decode steps are planned before their masks are read: see begin_step
        self._kept_there: tuple[torch.Tensor, torch.Tensor] | None = None  # table.kept and its copy on the device
        # _thread, the one that is in a pass, is there from begin_step to end_step only
        self.expected_columns = 0  # blocks that the longest row will have, as far as told by reserve_tokens
        self._draw_ticket()
        super().__init__(layers=[] if self.model_config is None else layers_of(self.model_config, options))

    def _draw_ticket(self) -> None:
        """A number of its own as a tensor: a compiled graph would be compiled anew for another number."""
        with torch.inference_mode(False):
            self.ticket = torch.tensor(tickets.draw(self), device="cpu")

    def __setstate__(self, state: dict) -> None:  # of a copy
        self.__dict__.update(state)
        self._draw_ticket()

    def adopt(self, config: PreTrainedConfig) -> None:
        """Lay out the layers as a model's config says, where the cache was made without one and is still empty.

        Raises:
            ValueError: A config of other layers than the cache has, as another model's would be.
        """
        config = config.get_text_config(decoder=True)
        if config is self.model_config:
            return
        layers = layers_of(config, self.options)
        if self.model_config is None and not self.layers:
            self.layers = layers
        elif list(map(type, layers)) != list(map(type, self.layers)):
            raise ValueError(
                f"cache: it has {_kinds(self.layers)}, and the model has {_kinds(layers)}; use one cache per model"
            )
        self.model_config = config

    @property
    def mla_layers(self) -> list[PagedMLALayer]:
        """The layers that hold latents."""
        return [layer for layer in self.layers if isinstance(layer, PagedMLALayer)]

    @property
    def is_all_mla(self) -> bool:
        """Whether stored lengths say all that a mask says: no layer reads one, as indexers and linear layers do."""
        return all(type(layer) is PagedMLALayer for layer in self.layers)

    @property
    def _stock_layers(self) -> list[Any]:
        """The layers that are transformers' own, those beside a PagedIndexedLayer's pages included."""
        layers = [layer.indexer if isinstance(layer, PagedIndexedLayer) else layer for layer in self.layers]
        return [layer for layer in layers if not isinstance(layer, PagedMLALayer)]

    @property
    def is_initialized(self) -> bool:
        """Whether it holds something: models that read it take a cache without as one to be filled by a prompt."""
        return any(layer.length for layer in self.mla_layers)

    @property
    def batch_size(self) -> int:
        """Rows held, or -1 before the first step."""
        return self.table.batch_size

    def begin_step(
        self,
        attention_mask: torch.Tensor | None,
        batch_size: int,
        num_new: int,
        *,
        config: PreTrainedConfig | None = None,
        max_absorbed: int = 0,
        in_pieces: bool = False,
        backend: str = "auto",
        ahead: bool = False,
    ) -> StepPlan:
        """Plan one forward pass: book the new columns and decide how attention will read them.

        Args:
            attention_mask: What the model was given: None, [B, L] with 0 for masked columns, or a prepared mask of
                another shape, which the stock path uses as it is.
            batch_size: Rows of this pass.
            num_new: New columns a row.
            config: The model's, for `adopt`.
            max_absorbed: Most new columns for which absorbed attention may be used; 0 forbids it.
            in_pieces: Attention over more new columns than that may expand the history in pieces, from the pages.
            backend: Kernels for absorbed attention.
            ahead: Take a mask that could be the earlier one with ones appended for it, without waiting to read it; the
                caller asks the plan's `mask_check` afterwards and, where it doesn't hold, undoes the step.

        Raises:
            ValueError: A batch or a mask that doesn't fit what the cache holds, or another thread is in a pass over
                it. The cache is unchanged.
            PoolExhausted: (a ValueError) `max_tokens` is reached. The cache is unchanged.
        """
        thread = threading.get_ident()
        if self.__dict__.setdefault("_thread", thread) != thread:  # atomic, unlike a look and a write
            raise ValueError("cache: another thread is in a forward pass over it; use one cache for each thread")
        self._close_step(failed=True)  # of a pass that was begun and never ended
        try:
            if config is not None:
                self.adopt(config)
            return self._open_step(attention_mask, batch_size, num_new, max_absorbed, in_pieces, backend, ahead)
        except BaseException:
            self.end_step(failed=True)
            raise

    def _open_step(
        self,
        attention_mask: torch.Tensor | None,
        batch_size: int,
        num_new: int,
        max_absorbed: int,
        in_pieces: bool,
        backend: str,
        ahead: bool,
    ) -> StepPlan:
        if self._spoiled:
            raise ValueError(
                "cache: an earlier pass failed halfway, and layers that aren't latent attention can't be put back; "
                "reset() the cache or use a new one"
            )
        self._check_whole()
        self._check_batch(batch_size)
        self.runs_ahead = ahead
        decoding = self.table.length > 0 and num_new <= max_absorbed
        plain = attention_mask is None or (isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2)
        check = self._check_later(attention_mask, batch_size, num_new) if ahead and decoding and plain else None
        if check is not None:
            new_kept, as_stored = None, True
        else:
            new_kept, as_stored = self.table.read_mask(attention_mask, batch_size, num_new) if plain else (None, False)
        readable = as_stored and self.table.length > 0  # lengths say all that the mask says
        self._step = self._book(
            new_kept, batch_size, num_new, as_stored and decoding, readable and in_pieces and not decoding, backend
        )
        self._step.mask_check = check
        return self._step

    def _check_later(self, mask: torch.Tensor | None, batch_size: int, num_new: int) -> MaskCheck | None:
        """A check of a mask that may be the earlier one with ones appended; None where it has to be read at once."""
        if mask is None or not self.is_all_mla or tuple(mask.shape) != (batch_size, self.table.length + num_new):
            return None
        kept = self.table.kept
        if kept is None:
            return MaskCheck(mask, None)
        if kept.shape[1] == self.table.length:  # the last columns had masked ones among them, so these may have too
            return None
        if self._kept_there is None or self._kept_there[0] is not kept or self._kept_there[1].device != mask.device:
            self._kept_there = kept, kept.to(mask.device)
        return MaskCheck(mask, self._kept_there[1])

    def _check_whole(self) -> None:
        for layer in self.mla_layers:
            if layer.layout is not None:
                self._check_level(layer, self.table.length)

    @staticmethod
    def _check_level(layer: PagedMLALayer, length: int) -> None:
        if layer.length != length:
            raise ValueError(
                f"cache: layer {layer.layer_idx} holds {layer.length} of {length} columns, so an earlier pass, of a "
                "model that isn't patched, failed halfway; crop its columns, reset() the cache or use a new one"
            )

    def _check_batch(self, batch_size: int) -> None:
        if self.table.batch_size not in (-1, batch_size):
            raise ValueError(
                f"batch: the cache holds {self.table.batch_size} rows and was given {batch_size}; use a new cache, "
                "reset() it, or change its rows with batch_select_indices or batch_repeat_interleave"
            )

    def _book(
        self,
        new_kept: torch.Tensor | None,
        batch_size: int,
        num_new: int,
        absorbed: bool = False,
        in_pieces: bool = False,
        backend: str = "auto",
    ) -> StepPlan:
        """Take blocks for the new columns, all or none of them."""
        past = self.table.length
        picks = any(isinstance(layer, PagedIndexedLayer) for layer in self.layers)
        gathered = past > 0 and (picks or not (absorbed or in_pieces))
        extension = self.table.extend(new_kept, batch_size, num_new)
        try:
            for layer in self.mla_layers:
                layer.copy_blocks(extension.copies, self.table.allocator.num_blocks)
        except BaseException:  # out of device memory, say
            self.table.undo(extension)
            raise
        return StepPlan(
            extension=extension,
            block_table=self.table.table,
            history_slots=self.table.slots_of_columns() if gathered else None,
            absorbed=absorbed,
            in_pieces=in_pieces,
            num_blocks=self.table.allocator.num_blocks,
            backend=backend,
        )

    def end_step(self, failed: bool) -> None:
        """Close the pass that `begin_step` opened; a failed one is undone, so that it can be tried again."""
        self._close_step(failed)
        self.__dict__.pop("_thread", None)

    def _close_step(self, failed: bool) -> None:
        step, self._step = self._step, None
        if step is None or not failed:
            return
        self.table.undo(step.extension)
        self._trim()
        if any(
            isinstance(layer, LinearAttentionCacheLayerMixin) or getattr(layer, "is_sliding", False)
            for layer in self._stock_layers
        ):
            self._spoiled = self.table.length > 0  # their states have no past to go back to
            if not self._spoiled:
                self.reset()

    def _trim(self) -> None:
        """Bring the layers with pages back to the table's length."""
        for layer in self.mla_layers:
            layer.length = min(layer.length, self.table.length)
            if isinstance(layer, PagedIndexedLayer):
                layer.crop_indexer(self.table.length)

    def free_when_gone(self) -> None:
        """Let the blocks, which are a pool's, go with this cache."""
        weakref.finalize(self, self.table.reset).atexit = False

    def __deepcopy__(self, memo: dict) -> "PagedMLACache":
        new = memo[id(self)] = type(self).__new__(type(self))
        new.__setstate__(copy.deepcopy(self.__dict__, memo))
        if not new.table.alone:
            new.free_when_gone()
        return new

    def note(self, call: dict) -> None:
        """A step has run, of these arguments by name: let the ledger, which there is, know what the rows say."""
        assert self.ledger is not None
        embeds = call.get("inputs_embeds")
        self.ledger.note(call["input_ids"] if embeds is None else embeds, call.get("position_ids"))

    def attach(self, rows: list[list[int]], kept: torch.Tensor) -> None:
        """Begin with tokens that the pool holds already; see `SequenceTable.attach`."""
        self.table.attach(rows, kept)
        for layer in self.mla_layers:
            layer.length = self.table.length

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new latents; return what attention should go on with.

        Args:
            key_states: kv_nope, the normed latents, [B, 1, q, R].
            value_states: k_rot, the shared rope key, [B, 1, q, P].
            layer_idx: The layer.

        Returns:
            The latents given (attention reads the pages, or nothing was cached before), else the whole padded history,
            [B, 1, L, R] and [B, 1, L, P].
        """
        if self.model_config is None:
            while len(self.layers) <= layer_idx:
                self.layers.append(new_layer(len(self.layers), self.options))
        if layer_idx >= len(self.layers):
            raise ValueError(
                f"cache: it has {_kinds(self.layers)}, and was given latents of layer {layer_idx}; use one cache per "
                "model"
            )
        layer = self.layers[layer_idx]
        if not isinstance(layer, PagedMLALayer):
            return layer.update(key_states, value_states, *args, **kwargs)
        layer.prepare(key_states, value_states)
        step = self._unplanned_step(layer, key_states) if self._step is None else self._step
        self._check_level(layer, self.table.length - step.columns)
        layer.write(key_states, value_states, step)
        step.holders[id(key_states)] = layer_idx
        if step.reads_pages:
            step.hand_on(layer_idx)
        latents = key_states, value_states
        if not step.reads_pages and step.history_slots is not None:
            ckv, k_pe = layer.history(step)
            ckv, k_pe = ckv.to(key_states.dtype), k_pe.to(value_states.dtype)
            latents = refuse_gradient(ckv, key_states), refuse_gradient(k_pe, value_states)
        expand, step.expand = step.expand, None
        return latents if expand is None else expand(*latents)

    def _unplanned_step(self, layer: PagedMLALayer, key_states: torch.Tensor) -> StepPlan:
        """The step of a model that isn't patched: its first layer opens it, and every column is stored."""
        if self._plain_step is None or layer.length == self.table.length:
            self._check_whole()
            self._check_batch(key_states.shape[0])
            self._plain_step = self._book(None, key_states.shape[0], key_states.shape[2])
        return self._plain_step

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` columns of every row; 0 removes none.

        Raises:
            ValueError: A positive number, where the installed transformers no longer takes a final length.
        """
        count = compat.columns_to_crop(tokens_to_remove, self.table.length)
        if count:
            if self.ledger is not None:
                self.ledger.flush()
            self.table.crop(count)
            self._trim()
            if self.ledger is not None:
                self.ledger.crop()
        for layer in self.layers:
            if not isinstance(layer, PagedMLALayer):
                layer.crop(-count)

    def _change_rows(self, indices: Sequence[int], change: Callable[[Any], None]) -> None:
        """Make row i the former row `indices[i]`, with `change` on the layers that are transformers' own."""
        if not indices:  # no row is left, or none was there
            self.reset()
            return
        if self.table.length:
            if self.ledger is not None:
                self.ledger.flush()
                self.ledger.select(list(indices))
            self.table.select(indices)
        for layer in self._stock_layers:
            change(layer)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Make row i the former row `beam_idx[i]`, [B]; rows share blocks until one writes."""
        self._change_rows(beam_idx.tolist(), lambda layer: layer.reorder_cache(beam_idx))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Make `repeats` rows of each, next to each other, sharing blocks until one writes."""
        rows = [row for row in range(max(self.batch_size, 0)) for _ in range(repeats)]
        self._change_rows(rows, lambda layer: layer.batch_repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices` ([n] int64, or [B] bool); blocks that nobody uses any more become free."""
        kept = indices
        if indices.dtype == torch.bool:
            if self.batch_size not in (-1, len(indices)):
                raise ValueError(f"indices: {len(indices)} bool for {self.batch_size} rows; allowed: one for each row")
            kept = indices.nonzero().flatten()
        rows = [row + self.batch_size if row < 0 else row for row in kept.tolist()]
        self._change_rows(rows, lambda layer: layer.batch_select_indices(indices))

    def reset(self) -> None:
        """Forget all tokens. The pool keeps its memory, all blocks free."""
        self._step = self._plain_step = None
        self.__dict__.pop("_thread", None)
        self._spoiled = False
        self.table.reset()
        if self.ledger is not None:
            self.ledger.reset()
        for layer in self.layers:
            if not isinstance(layer, PagedMLALayer):
                layer.reset()
                continue
            layer.length = 0
            if isinstance(layer, PagedIndexedLayer):
                layer.reset_indexer()

    def reserve_tokens(self, tokens_per_row: Sequence[int]) -> None:
        """Have blocks ready for rows of these many stored tokens, so that the pages are made once and never copied.

        Takes no more than `max_tokens` allows; whether that is enough is decided when tokens come.
        """
        allocator = self.table.allocator
        blocks = [-(-tokens // self.options.block_size) for tokens in tokens_per_row]
        self.expected_columns = max(blocks, default=0)
        needed = sum(blocks)
        if allocator.max_blocks is not None:
            needed = min(needed, allocator.max_blocks - len(allocator.users))
        allocator.reserve(needed)

    def memory_report(self) -> MemoryReport:
        """Blocks, tokens and bytes, against what expanded keys and values would take."""
        return MemoryReport.of(self.table, self.mla_layers, self.model_config)

    def __repr__(self) -> str:
        return f"PagedMLACache({report_line(self.memory_report())})"

    def _repr_html_(self) -> str:
        return report_html(self.memory_report())
