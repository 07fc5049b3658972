"""A patched decoder's forward: plans each pass over a PagedMLACache, then replays a graph or runs stock code."""

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from . import compat, packed
from .absorb import has_one_weight
from .attention import ActiveStep, PatchKey, entered, is_in_use
from .cache import PagedMLACache, tickets
from .cache.mixed import MixedCache
from .chunks import columns_at_once, may_be_cut, run_in_chunks
from .compiled import traced_pass
from .config import MLAConfig
from .families import Family
from .graphs import DecodeGraphs
from .sparse import MAX_SPARSE_COLUMNS

# New columns up to which attention is absorbed. A query costs 2 * (2R + P) flops a head and cached token absorbed and
# 2 * (nope + P + v) expanded, but expanding a cached token costs 2 * R * (nope + v) a head first: for DeepSeek's sizes
# the two meet at 170 columns.
MAX_ABSORBED_COLUMNS = 128


class _OtherMask(Exception):
    """A step was planned before its mask was read, and the mask says something else."""


class DecoderForward:
    """Stands in for the forward of a decoder: the module that takes the 2D mask, the positions and the cache.

    Args:
        key: The decoder's key.
        module: The decoder, held weakly.
        replaced: What lay on the instance before (a hook of accelerate's, say), or None for the class's own method.
        config: How steps are planned.
        family: How the decoder's attention may read the pages.
    """

    def __init__(self, key: PatchKey, module: nn.Module, replaced: Callable | None, config: MLAConfig, family: Family):
        self.key = key
        self.module = weakref.ref(module)
        self.replaced = replaced
        self.config = config
        self.family = family
        # What lay there before may move weights or do anything else that a replay would leave out.
        usable = config.graphs and family.graphs and replaced is None
        self.graphs = DecodeGraphs(config.backend) if usable else None
        self.ticket = tickets.draw(self)

    def __reduce__(self) -> tuple:  # a weak reference can't be copied or pickled
        return DecoderForward, (self.key, self.module(), self.replaced, self.config, self.family)

    @property
    def __signature__(self) -> inspect.Signature:
        module: Any = self.module()
        return inspect.signature(self.replaced or type(module).forward.__get__(module))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The decoder's output. A pass over our cache that fails or is interrupted leaves the cache as it was."""
        module: Any = self.module()
        call = compat.bind_forward(module, args, kwargs)
        if torch.compiler.is_compiling():
            paged = isinstance(call["cache"], PagedMLACache)
            return traced_pass(self.ticket, module, call) if paged else self._run(module, args, kwargs)
        if isinstance(call["cache"], MixedCache):
            return self._mixed(module, call)
        size = self._columns_at_once(module, call)
        if size is not None:
            return run_in_chunks(lambda **part: self._planned(module, (), part), call, call["cache"], size)
        return self._planned(module, args, kwargs)

    def _planned(self, module: Any, args: tuple, kwargs: dict) -> Any:
        try:
            return self._pass(module, args, kwargs, ahead=self.graphs is not None)
        except _OtherMask:  # undone by now
            return self._pass(module, args, kwargs, ahead=False)

    def _mixed(self, module: Any, call: dict) -> Any:
        """The decoder's output for one row of tokens of many requests, [1, T, D]."""
        cache, inputs = call["cache"], call.get("inputs_embeds")
        name = "input_ids" if inputs is None else "inputs_embeds"
        inputs = call[name]
        plan = cache.step = cache.plan_pass(call, self._max_absorbed(), self.config.backend)
        # Where each request has one new token they are a batch's rows, and run as a decode step does.
        shape = (1, inputs.shape[1]) if not plan.absorbed else (inputs.shape[1], 1)
        part = {
            name: inputs.view(*shape, *inputs.shape[2:]),
            "position_ids": call["position_ids"].view(shape),
            # A prepared (4D) mask is passed on as it is, so none is built.
            "attention_mask": torch.empty((1, 1, 1, 1), dtype=torch.bool, device=inputs.device),
            "use_cache": False,
            compat.CACHE_NAME: cache,
        }
        with entered(self.key, ActiveStep(cache, plan, inputs.device)):
            output = self._run(module, (), part)
        output.last_hidden_state = output.last_hidden_state.view(1, inputs.shape[1], -1)
        return output

    def _pass(self, module: Any, args: tuple, kwargs: dict, ahead: bool) -> Any:
        step = self._begin(module, args, kwargs, ahead)
        if step is None:
            return self._run(module, args, kwargs)
        with entered(self.key, step):
            output = self._forward(module, step, args, kwargs)
            if step.plan.mask_check is not None and not step.plan.mask_check.holds():
                raise _OtherMask
        if step.cache.ledger is not None:
            step.cache.note(compat.bind_forward(module, args, kwargs))
        return output

    def _forward(self, module: Any, step: ActiveStep, args: tuple, kwargs: dict) -> Any:
        if step.plan.packed is not None:
            call = compat.bind_forward(module, args, kwargs)
            return packed.run(lambda **part: self._run(module, (), part), call, step.plan)
        if not step.plan.reads_pages or args:
            return self._run(module, args, kwargs)
        if step.cache.is_all_mla:
            # Lengths say all that the mask said. A prepared (4D) mask is passed on as it is, so none is built.
            kwargs = {**kwargs, "attention_mask": torch.empty((1, 1, 1, 1), dtype=torch.bool, device=step.device)}
        output = None
        if self.graphs is not None and step.plan.absorbed:
            output = self.graphs.run(module, step, kwargs)
        return self._run(module, args, kwargs) if output is None else output

    def _run(self, module: Any, args: tuple, kwargs: dict) -> Any:
        if self.replaced is not None:
            return self.replaced(*args, **kwargs)
        return type(module).forward(module, *args, **kwargs)

    def _begin(self, module: Any, args: tuple, kwargs: dict, ahead: bool) -> ActiveStep | None:
        """Plan the step where the call brings a PagedMLACache."""
        call = compat.bind_forward(module, args, kwargs)
        cache = call["cache"]
        if not isinstance(cache, PagedMLACache):
            return None
        if module.training:
            raise ValueError(
                "cache: a PagedMLACache is for inference and the model is in training mode; call model.eval(), or "
                "train with use_cache=False"
            )
        if is_in_use(cache):
            raise ValueError(
                "cache: a forward pass over it is going on, and this call, of a hook say, comes from inside it; use "
                "another cache"
            )
        inputs = call.get("input_ids") if call.get("inputs_embeds") is None else call["inputs_embeds"]
        if inputs is None:
            return None  # the model's own error tells it best
        wants_weights = call.get("output_attentions")
        if wants_weights is None:
            wants_weights = getattr(module.config, "output_attentions", False)
        dense = wants_weights or not self._has_weights(module)
        plan = cache.begin_step(
            call.get("attention_mask"),
            inputs.shape[0],
            inputs.shape[1],
            config=module.config,
            max_absorbed=0 if dense else self._max_absorbed(),
            in_pieces=self.family.way == "absorbed" and not dense,
            backend=self.config.backend,
            ahead=ahead,
        )
        if self.family.way == "absorbed" and not self.family.others:
            packed.pack(plan, cache.table, module, call)
        return ActiveStep(cache, plan, inputs.device)

    def _columns_at_once(self, module: Any, call: dict) -> int | None:
        """New columns of one pass, or None where all are run at once."""
        inputs = call.get("input_ids") if call.get("inputs_embeds") is None else call["inputs_embeds"]
        if not isinstance(call["cache"], PagedMLACache) or inputs is None or module.training:
            return None
        size = columns_at_once(module, inputs)
        if size >= inputs.shape[1] or not self.family.may_be_cut or compat.length_sets_rope(module.config):
            return None
        return size if may_be_cut(module.config, call) else None

    def _max_absorbed(self) -> int:
        limits = {"absorbed": MAX_ABSORBED_COLUMNS, "sparse": MAX_SPARSE_COLUMNS, "dense": 0}
        return min(limits[self.family.way], MAX_ABSORBED_COLUMNS)

    @staticmethod
    def _has_weights(module: Any) -> bool:
        attentions: list[Any] = [attention for _, attention in module.__dict__["_hf_mla"].attentions]
        return all(has_one_weight(attention.kv_b_proj) for attention in attentions)
