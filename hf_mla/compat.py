"""All that differs between the supported transformers versions, in one place."""

import inspect
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import nn

OLDEST, NEWEST = "5.15.0", "5.24"  # oldest and newest (minor) version the tests run on
VERSION = Version(transformers.__version__)

# 5.24 renamed the forward's argument and the output's attribute `past_key_values` to `cache`.
CACHE_NAME = "cache" if VERSION >= Version("5.24") else "past_key_values"

# generate's `prefill_chunk_size` begins at column 0 before this, whatever the cache holds.
CHUNKS_GO_ON = VERSION >= Version("5.23")

# Since when continuous batching has a class that books blocks, and of which a cache of latents can be made.
BATCHING_SINCE = "5.20"
BATCHING = VERSION >= Version(BATCHING_SINCE)


def check_version() -> None:
    """Refuse a transformers that keeps expanded keys in its caches (before 5.15).

    Raises:
        ImportError: naming the installed version and what is supported.
    """
    if VERSION < Version(OLDEST):
        raise ImportError(f"hf_mla needs transformers >= {OLDEST}; {transformers.__version__} is installed")


def columns_to_crop(tokens_to_remove: int | torch.Tensor, length: int) -> int:
    """How many of `length` columns `Cache.crop(tokens_to_remove)` removes; assisted decoding of 5.15 gives a tensor.

    Up to 5.19 a positive number was the final length; later versions raise.
    """
    tokens_to_remove = int(tokens_to_remove)
    if tokens_to_remove <= 0:
        return min(-tokens_to_remove, length)
    if VERSION >= Version("5.20"):
        raise ValueError(
            f"tokens_to_remove is {tokens_to_remove}; allowed: 0 or a negative number, of columns to remove from "
            "the end"
        )
    return max(length - tokens_to_remove, 0)


def bind_forward(module: nn.Module, args: tuple, kwargs: dict) -> dict:
    """The arguments of a call of `module` by name, its cache under "cache" whatever its version calls it."""
    named = kwargs
    if args:
        names = [name for name in inspect.signature(inspect.unwrap(type(module).forward)).parameters if name != "self"]
        named = {**dict(zip(names, args, strict=False)), **kwargs}
    cache = named.get("cache")
    return {**named, "cache": named.get("past_key_values") if cache is None else cache}


def layer_config(config: Any, layer_idx: int) -> Any:
    """The config that holds for one layer; newer versions refuse to read a value that differs between layers."""
    layers = getattr(config, "per_layer_config", None)
    return config if layers is None else layers[layer_idx]


def length_sets_rope(config: Any) -> bool:
    """Whether the same token at the same position is rotated otherwise in a longer text, so its pieces differ."""
    parameters = getattr(config, "rope_parameters", None)
    kind = parameters.get("rope_type") if isinstance(parameters, dict) else None
    return kind in ("dynamic", "longrope")


def only_output_collectors(module: nn.Module) -> bool:
    """transformers leaves hooks behind that collect attentions or hidden states when asked; they're idle otherwise."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return all(getattr(hook, "__module__", "").startswith("transformers.utils.output_capturing") for hook in hooks)
