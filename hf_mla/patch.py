"""Put the seam on a loaded model, and take it off again.

`patch` touches instances only: one attribute (`expand_kv`) and the config reference of each attention module, and the
`forward` of the decoder and of small modules in it. Weights, state_dict, the model's config and its class stay as they
are.
"""

import functools
import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from . import compat, fused, kernels
from .attention import AttentionConfig, ConfigView, ExpertsConfig, LatentsOrKV, PatchKey
from .config import MLAConfig
from .decoder import DecoderForward
from .experts import is_registered
from .families import REFUSED, SERVED, Family

logger: logging.Logger = transformers_logging.get_logger(__name__)
Model = TypeVar("Model", bound=nn.Module)

ATTRIBUTES = ("kv_b_proj", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "layer_idx", "config")
# What a forward must call for the seam to hold: the cache, the expansion, and the attention registry.
CALLS = ("update", "expand_kv", "get_interface")


Attentions = list[tuple[str, nn.Module]]


@dataclass
class Binding:
    """What a patch put on one decoder; lies there as `_hf_mla`.

    Args:
        attentions: Name (from the decoder) and module of each patched attention.
        experts: Modules that hold a mixture's experts and choose their products by name.
        config: The settings.
    """

    attentions: Attentions
    experts: list[nn.Module]
    config: MLAConfig


def find_bindings(model: nn.Module) -> list[tuple[nn.Module, Binding]]:
    """The patched decoders in `model`, each with its binding."""
    return [(module, module.__dict__["_hf_mla"]) for module in model.modules() if "_hf_mla" in module.__dict__]


def binding_of(model: nn.Module) -> tuple[nn.Module, Binding] | None:
    """The patched decoder of `model` and its binding; None where it isn't patched, or patched to run stock code."""
    found = find_bindings(model)
    return found[0] if found and found[0][1].config.enabled else None


def find_attentions(model: nn.Module) -> Attentions:
    """(name, module) of all in `model` that projects keys and values from a latent, whatever its class is called.

    A projection alone isn't enough to be served: see `_unfit`.
    """
    return [(name, module) for name, module in model.named_modules() if hasattr(module, "kv_b_proj")]


def _unfit(name: str, module: nn.Module) -> str | None:
    """Why an attention module can't be patched, or None."""
    kind = f"{name} ({type(module).__module__}.{type(module).__name__})"
    missing = [attribute for attribute in ATTRIBUTES if not hasattr(module, attribute)]
    if missing:
        return f"{kind} has no {', '.join(missing)}"
    if not callable(getattr(module, "expand_kv", None)):
        return f"{kind} has no expand_kv method, as transformers >= {compat.OLDEST} has for its own MLA classes"
    called = inspect.unwrap(type(module).forward).__code__.co_names
    absent = [call for call in CALLS if call not in called]
    if absent:
        return f"the forward of {kind} doesn't call {', '.join(absent)}, so it isn't the one this package knows"
    return None


def _expands_first(module: nn.Module) -> bool:
    names = inspect.unwrap(type(module).forward).__code__.co_names  # in the order of their first use
    return names.index("expand_kv") < names.index("update")


def _decoder_of(model: nn.Module, name: str) -> tuple[str, nn.Module]:
    """The nearest transformers model around the module `name`: it takes the 2D mask, the positions and the cache."""
    parts = name.split(".")
    for depth in range(len(parts) - 1, -1, -1):
        prefix = ".".join(parts[:depth])
        module = model.get_submodule(prefix)
        if isinstance(module, PreTrainedModel):
            return prefix, module
    raise ValueError(f"model: {name} isn't inside a transformers PreTrainedModel, so there is no decoder to hook")


def _survey(model: nn.Module) -> list[tuple[nn.Module, Attentions]]:
    """Each decoder and its attentions; raises where the model can't be served."""
    found = find_attentions(model)
    if not found:
        raise ValueError(
            f"model: {type(model).__name__} has no module with a kv_b_proj, so no multi-head latent attention to "
            f"patch; served families: {', '.join(SERVED)}"
        )
    decoders: dict[str, tuple[nn.Module, Attentions]] = {}
    for name, module in found:
        reason = _unfit(name, module)
        if reason:
            raise ValueError(f"model: {type(model).__name__} can't be patched: {reason}")
        prefix, decoder = _decoder_of(model, name)
        decoders.setdefault(prefix, (decoder, []))[1].append((name[len(prefix) :].lstrip("."), module))
    for decoder, _ in decoders.values():
        name = cast(Any, decoder.config).model_type
        if name not in SERVED:
            reason = f": {REFUSED[name]}" if name in REFUSED else f"; served: {', '.join(SERVED)}"
            raise ValueError(f"model: family {name!r} ({type(decoder).__name__}) isn't served{reason}")
    return list(decoders.values())


def _family(decoder: nn.Module) -> Family:
    return SERVED[cast(Any, decoder.config).model_type]


def _bind(decoder: nn.Module, attentions: Attentions, config: MLAConfig) -> None:
    # What transformers' `use_experts_implementation` decorator leaves on a module that it dispatches.
    experts = [
        module for module in decoder.modules() if hasattr(module, "_apply_gate") and hasattr(module, "has_gate")
    ]
    decoder.__dict__["_hf_mla"] = Binding(attentions, experts, config)
    if not config.enabled:
        return
    key, family = PatchKey(), _family(decoder)
    for _, module in attentions:
        if getattr(module, "sliding_window", None) is not None:
            continue  # transformers' own layer keeps the window's latents, and its own attention reads them
        module.__dict__["expand_kv"] = LatentsOrKV(
            key, module, module.__dict__.get("expand_kv"), _expands_first(module)
        )
        cast(Any, module).config = AttentionConfig(key, module.config)
    for experts_module in experts:
        registered = is_registered(experts_module)
        cast(Any, experts_module).config = ExpertsConfig(key, experts_module.config, registered)
    if config.fused and config.backend != "reference":
        fused.bind(decoder, key)
    replaced = decoder.__dict__.get("forward")
    decoder.__dict__["forward"] = DecoderForward(key, decoder, replaced, config, family)


def _is_bound(decoder: nn.Module, attentions: Attentions, config: MLAConfig) -> bool:
    """Whether these very attentions, none of them exchanged or copied since, were patched with these settings."""
    binding = decoder.__dict__.get("_hf_mla")
    if binding is None or binding.config != config:
        return False
    return [id(module) for _, module in binding.attentions] == [id(module) for _, module in attentions]


def _unbind(decoder: nn.Module, binding: Binding) -> None:
    # What was patched and, where layers were exchanged or copied since, what is there now.
    then = [*(module for _, module in binding.attentions), *binding.experts]
    for module in {id(module): module for module in [*then, *decoder.modules()]}.values():
        ours = module.__dict__.get("expand_kv")
        if isinstance(ours, LatentsOrKV):
            del module.__dict__["expand_kv"]
            if ours.replaced is not None:
                module.__dict__["expand_kv"] = ours.replaced
        if isinstance(module.__dict__.get("config"), ConfigView):
            module.config = module.__dict__["config"].original
    fused.unbind(decoder)
    for name in ("forward", "_old_forward"):  # accelerate, hooked in after the patch, keeps ours under the second
        forward = decoder.__dict__.get(name)
        if isinstance(forward, DecoderForward):
            decoder.__dict__[name] = forward.replaced or type(decoder).forward.__get__(decoder)
            if name == "forward" and forward.replaced is None:
                del decoder.__dict__[name]
    decoder.__dict__.pop("_hf_mla", None)


def patch(model: Model, config: MLAConfig | None = None, **options: Any) -> Model:
    """Let `model` decode from a paged cache of latents.

    Afterwards `model.generate(..., cache_implementation="paged_mla")` makes a PagedMLACache, and one can be passed as
    `past_key_values`. Without one, the model runs stock code. Patching again with the same options does nothing, with
    others changes them.

    Args:
        model: A loaded transformers model (or a wrapper around one, such as PEFT's) of a served family.
        config: Settings to start from; without, the defaults.
        **options: Fields of `MLAConfig`: backend, block_size, entry_alignment, cache_dtype, max_tokens, graphs, fused,
            enabled.

    Returns:
        The same object.

    Raises:
        ValueError: A model that can't be served, with the module and the reason; an unknown option or a value that
            isn't allowed; a backend that can't run here. The model is as it was.
    """
    settings = MLAConfig.from_options(config, **options)
    _check_model(model)
    decoders = _survey(model)
    before = find_bindings(model)
    if len(before) == len(decoders) and all(_is_bound(*found, settings) for found in decoders):
        return model
    _check_backend(settings)
    unpatch(model)
    try:
        for decoder, attentions in decoders:
            _bind(decoder, attentions, settings)
    except BaseException:
        _restore(model, before)
        raise
    for decoder, attentions in decoders:
        logger.info(
            f"hf_mla: {len(attentions)} {type(attentions[0][1]).__name__} of {type(decoder).__name__} "
            f"{'patched' if settings.enabled else 'left on stock code'} ({settings})"
        )
    return model


def _restore(model: nn.Module, before: list[tuple[nn.Module, Binding]]) -> None:
    unpatch(model)
    for decoder, binding in before:
        _bind(decoder, binding.attentions, binding.config)


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}; allowed: a loaded transformers model")


def _check_backend(config: MLAConfig) -> None:
    """Raise now, not at the first token, where a backend asked for by name is missing."""
    if config.backend == "auto" or not config.enabled:
        return
    reason = kernels.available_backends().get(config.backend)
    if reason is not None:
        raise ValueError(f"backend {config.backend!r} can't run here: {reason}")


def unpatch(model: Model) -> Model:
    """Take the patch off; a model without one is left alone. Returns the same object.

    Raises:
        ValueError: Something that is no model.
    """
    _check_model(model)
    for decoder, binding in find_bindings(model):
        _unbind(decoder, binding)
    return model


@contextmanager
def patched(model: Model, config: MLAConfig | None = None, **options: Any) -> Iterator[Model]:
    """Patch within a `with` block, then restore what was there: stock code, or an earlier patch's options."""
    _check_model(model)
    before = find_bindings(model)
    patch(model, config, **options)
    try:
        yield model
    finally:
        _restore(model, before)


_from_pretrained: Any = None  # the classmethod object that enable() replaced


def enable(config: MLAConfig | None = None, **options: Any) -> None:
    """Patch every MLA model that `from_pretrained` loads from now on, until `disable()`.

    Other models load as ever. An MLA model that can't be served loads unpatched, with a warning that gives the reason.

    Raises:
        ValueError: An unknown option, a value that isn't allowed, or a backend that can't run here.
    """
    global _from_pretrained
    _check_backend(MLAConfig.from_options(config, **options))
    disable()
    original = PreTrainedModel.__dict__["from_pretrained"]

    @functools.wraps(original.__func__)
    def from_pretrained(cls: type, *args: Any, **kwargs: Any) -> Any:
        loaded = original.__func__(cls, *args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded  # output_loading_info=True returns a pair
        if find_attentions(model):
            try:
                patch(model, config, **options)
            except ValueError as error:
                logger.warning(f"hf_mla: loaded without the patch: {error}")
        return loaded

    PreTrainedModel.from_pretrained = classmethod(from_pretrained)
    _from_pretrained = original


def disable() -> None:
    """Undo `enable()`; models already loaded keep their patch."""
    global _from_pretrained
    if _from_pretrained is not None:
        PreTrainedModel.from_pretrained = _from_pretrained
        _from_pretrained = None
