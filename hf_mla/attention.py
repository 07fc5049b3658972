"""What a patched model does differently in a forward pass.

A few small objects sit on the model, and stock code runs everything else:

    LatentsOrKV      in place of an attention's expand_kv: hands latents on while attention reads the pages
    AttentionConfig  in place of an attention's config: names our attention function likewise
    ExpertsConfig    in place of an expert module's config: names the products to use in steps over a paged cache
    DecoderForward   (decoder.py) in place of the decoder's forward: plans the step that these look at

so that without a PagedMLACache, or in a step whose attention reads no pages, the very code of transformers runs.

    B rows, S new columns, H heads, R = kv_lora_rank, P = qk_rope_head_dim
"""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from . import experts, kernels
from .absorb import absorb_query, absorbed_weights, project_back
from .cache import PagedMLACache
from .cache.gradient import refuse_gradient
from .cache.layer import PagedMLALayer
from .cache.mixed import MixedPlan
from .cache.step import StepPlan
from .history import attend_in_pieces
from .packed import attend_rows
from .sparse import sparse_decode

# A name for transformers' attention registry. "flash" in it would switch on code meant for flash attention (a
# substring test), and a name with "paged" is continuous batching's.
ATTENTION_NAME = "hf_mla_absorbed"


class PatchKey:
    """Identity of one patched decoder: copied and pickled along with it, but no reference to it, so no cycle."""


@dataclass
class ActiveStep:
    """A forward pass that this thread is in; `device` is its inputs'. Of a mixed pass the cache is a MixedCache."""

    cache: PagedMLACache
    plan: StepPlan
    device: torch.device


class _Active(threading.local):
    def __init__(self) -> None:
        self.steps: dict[PatchKey, ActiveStep] = {}  # the innermost pass of each decoder


_active = _Active()


@contextmanager
def entered(key: PatchKey, step: ActiveStep) -> Iterator[None]:
    """While the decoder that `key` stands for runs `step` in this thread; the step is undone where that fails."""
    around = _active.steps.get(key)  # a hook may run the decoder inside its own pass, over another cache
    _active.steps[key] = step
    finished = False
    try:
        yield
        step.plan.check_read()
        finished = True
    finally:
        if around is None:
            del _active.steps[key]
        else:
            _active.steps[key] = around
        step.cache.end_step(failed=not finished)


def is_in_use(cache: PagedMLACache) -> bool:
    """Whether this thread is in a forward pass over `cache`."""
    return any(step.cache is cache for step in _active.steps.values())


def paged_step(key: PatchKey) -> ActiveStep | None:
    """This thread's step over a paged cache of the decoder that `key` stands for, absorbed or not."""
    return _active.steps.get(key)


def reading_step(key: PatchKey) -> ActiveStep | None:
    """This thread's step of the decoder that `key` stands for, if its attention is ours and reads the pages."""
    step = paged_step(key)
    return step if step is not None and step.plan.reads_pages else None


class LatentsOrKV:
    """Stands in for an attention module's `expand_kv`.

    Args:
        key: The decoder's key.
        module: The attention module, held weakly.
        replaced: What lay on the instance before (a hook of accelerate's, say), or None for the class's own method.
        expands_first: The module's forward expands before it updates the cache, as the sparse families' do before
            transformers 5.20; the cache is then given latents all the same, and expands what it returns.
    """

    def __init__(self, key: PatchKey, module: nn.Module, replaced: Callable | None, expands_first: bool = False):
        self.key = key
        self.module = weakref.ref(module)
        self.replaced = replaced
        self.expands_first = expands_first

    def __reduce__(self) -> tuple:  # a weak reference can't be copied or pickled
        return LatentsOrKV, (self.key, self.module(), self.replaced, self.expands_first)

    def __call__(self, kv_nope: torch.Tensor, k_rot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, 1, S, R] and [B, 1, S, P] -> keys and values, or the same latents where attention reads the pages."""
        step = paged_step(self.key)
        if step is None or not (step.plan.reads_pages or self.expands_first):
            return self.expand(kv_nope, k_rot)
        if not step.plan.reads_pages:
            step.plan.expand = self.expand
        return kv_nope, k_rot

    def expand(self, kv_nope: torch.Tensor, k_rot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, as the module itself makes them."""
        if self.replaced is not None:
            return self.replaced(kv_nope, k_rot)
        module: Any = self.module()
        return type(module).expand_kv(module, kv_nope, k_rot)


class ConfigView:
    """Stands in for a module's config: the model's own one, live, but for the name that a subclass decides.

    The model's config object is shared by all its modules and by any other model built from it, so our names can't be
    put there: masks, `set_attn_implementation` and `save_pretrained` go on working on the original.

    Args:
        key: The decoder's key.
        original: The config that was there.
    """

    def __init__(self, key: PatchKey, original: Any):
        self.__dict__.update(key=key, original=original)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("key", "original"):  # while being copied or unpickled
            raise AttributeError(name)
        return getattr(self.original, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.original, name, value)


class AttentionConfig(ConfigView):
    """Of an attention module: our attention function while it reads the pages, else the model's own."""

    @property
    def _attn_implementation(self) -> str:
        step = paged_step(self.key)
        ours = step is not None and (step.plan.reads_pages or step.plan.packed is not None)
        return ATTENTION_NAME if ours else self.original._attn_implementation


class ExpertsConfig(ConfigView):
    """Of an expert module: our experts' function (see experts.py) in a step over a paged cache.

    Args:
        key: The decoder's key.
        original: The config that was there.
        registered: Whether the module can find our function.
    """

    def __init__(self, key: PatchKey, original: Any, registered: bool):
        super().__init__(key, original)
        self.__dict__["registered"] = registered

    @property
    def _experts_implementation(self) -> str | None:
        name = self.original._experts_implementation
        step = paged_step(self.key) if self.registered else reading_step(self.key)
        return name if step is None else experts.decode_name(name, self.registered)


def absorbed_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of a step that reads the pages, absorbed or expanding a piece of the history at a time.

    Registered with transformers as `ATTENTION_NAME`.

    Args:
        module: A patched attention module.
        query: [B, H, S, nope + P].
        key: This step's ckv [B, 1, S, R], already in the pages; `value` its k_pe [B, 1, S, P].
        attention_mask: Read only with `indices`, [B or 1, 1, S, L]; else the plan's lengths say what a query sees.
        scaling: sm_scale, the module's own (with yarn's mscale).
        **kwargs: `indices` [B, S, K], padded columns that a sparse model's indexer picked; `s_aux` [H], the scores of
            attention sinks, which take part in the softmax and have no value. Others are for other implementations.

    Returns:
        ([B, S, H, v], None)

    Raises:
        ValueError: Called outside such a step, as when the name is given to `set_attn_implementation`.
    """
    step = paged_step(module.config.key) if isinstance(module.config, AttentionConfig) else None
    if step is not None and step.plan.packed is not None:
        return attend_rows(module, query, key, value, step.plan, scaling, **kwargs), None
    step = None if step is None or not step.plan.reads_pages else step
    if step is None:
        raise ValueError(
            f'attn_implementation is "{ATTENTION_NAME}", which only hf_mla.patch may choose; allowed: eager, sdpa and '
            "the model's other implementations"
        )
    step.plan.unread = None
    with torch.no_grad():
        holder = _holder(step, module, key)
        if isinstance(step.plan, MixedPlan):
            out = _attend_parts(module, query.detach(), key.detach(), value.detach(), step, scaling, holder)
        elif step.plan.in_pieces:
            layer, expand = step.cache.layers[holder], module.expand_kv.expand
            latents = key.detach(), value.detach()
            out = attend_in_pieces(module, query.detach(), *latents, layer, step.plan, scaling, expand)
        else:
            out = _attend(module, query.detach(), step, scaling, holder, attention_mask, **kwargs)
    return refuse_gradient(out, query), None


def _attend_parts(
    module: Any,
    query: torch.Tensor,
    ckv: torch.Tensor,
    k_pe: torch.Tensor,
    step: ActiveStep,
    scaling: float,
    holder: int,
) -> torch.Tensor:
    """Attention of a mixed pass, [1, H, T, nope + P] and its own latents -> [1, T, H, v]; 0 for pads."""
    plan, layer = step.plan, step.cache.layers[holder]
    assert isinstance(plan, MixedPlan)
    result = query.new_zeros(1, query.shape[2], query.shape[1], module.v_head_dim)
    for part in plan.parts:
        own = part.take(query)
        if part.plan.absorbed:
            out = _attend(module, own, ActiveStep(step.cache, part.plan, step.device), scaling, holder, None)
        else:
            latents, expand = (part.take(ckv), part.take(k_pe)), module.expand_kv.expand
            out = attend_in_pieces(module, own, *latents, layer, part.plan, scaling, expand)
        result[0, part.columns] = out.flatten(0, 1)
    return result


def _holder(step: ActiveStep, module: Any, key: torch.Tensor) -> int:
    """The layer in whose pages this module's latents lie: its own, but where it shares another's."""
    own = step.cache.layers[module.layer_idx]
    if isinstance(own, PagedMLALayer) and own.layout is not None:
        return module.layer_idx
    return step.plan.holders[id(key)]


def _attend(
    module: Any,
    query: torch.Tensor,
    step: ActiveStep,
    scaling: float,
    holder: int,
    mask: torch.Tensor | None,
    indices: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> torch.Tensor:
    layer: Any = step.cache.layers[holder]
    nope, rope = module.qk_nope_head_dim, layer.layout.qk_rope_head_dim
    q_nope, q_pe = query.split([nope, rope], dim=-1)
    weights = absorbed_weights(module.kv_b_proj, nope, module.v_head_dim, layer.layout.kv_lora_rank, query)
    dtype = layer.layout.compute_dtype(query.dtype)
    q_latent, q_pe = absorb_query(q_nope, weights).to(dtype), q_pe.transpose(1, 2).to(dtype)
    if indices is None:
        plan = step.plan.decode_plan(layer.layout, query.shape[1], layer.device)
        o_latent, lse = kernels.decode(plan, q_latent, q_pe, layer.pages, scaling, step.plan.base_of(holder))
    else:
        slots = step.plan.history_on(layer.device)
        o_latent, lse = sparse_decode(q_latent, q_pe, layer.pages, slots, indices, mask, scaling)
    if s_aux is not None:  # a sink adds exp(s_aux) to the softmax's sum, exp(lse), and nothing to the output
        o_latent = o_latent * torch.sigmoid(lse - s_aux).unsqueeze(-1)
    return project_back(o_latent.to(query.dtype), weights)


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, absorbed_attention)
