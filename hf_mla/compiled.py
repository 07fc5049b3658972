"""torch.compile of a patched model, also with fullgraph: a decoder's pass over a paged cache is one operator in it.

    B rows, S new columns, L padded columns, D = hidden_size

What the pass does on the host (blocks, lengths, the choice of a captured graph) can't be traced and needn't be: the
decode step is a CUDA graph already, and the compiler gets what is around it. generate compiles only when it is given a
`compile_config`, since there is little left to win.
"""

import copy
import functools
from typing import Any

import torch
import torch._inductor.config
from transformers import GenerationMixin
from transformers.modeling_outputs import MoeModelOutputWithPast

from . import compat
from .cache import PagedMLACache, tickets

KNOWN_ARGUMENTS = ("input_ids", "attention_mask", "position_ids")
# Modes that capture what they compile in CUDA graphs, and what there is in their place: beside the decoder's own
# graphs, theirs ended in illegal memory accesses (torch 2.11).
WITHOUT_GRAPHS = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}


@torch.library.custom_op(
    "hf_mla::decoder_pass",
    mutates_args=(),
    schema="(Tensor input_ids, Tensor? attention_mask, Tensor? position_ids, Tensor cache, int decoder, "
    "int hidden_size, ScalarType dtype) -> Tensor",
)
def decoder_pass(
    input_ids: Any, attention_mask: Any, position_ids: Any, cache: Any, decoder: Any, hidden_size: Any, dtype: Any
) -> Any:
    """[B, S] ids, [B, L] mask, [B, S] positions, tickets of the cache and the decoder -> hidden states [B, S, D]."""
    call = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
    call[compat.CACHE_NAME] = tickets.holder_of(int(cache))
    return tickets.holder_of(decoder)(**call).last_hidden_state


@decoder_pass.register_fake
def _(input_ids: Any, attention_mask: Any, position_ids: Any, cache: Any, decoder: Any, hidden_size: Any, dtype: Any):  # type: ignore[no-untyped-def]
    if torch._inductor.config.triton.cudagraphs:  # while inductor compiles
        allowed = ", ".join(WITHOUT_GRAPHS.values())
        raise ValueError(f"mode: one with CUDA graphs of its own, beside the decoder's; allowed: {allowed}")
    return input_ids.new_empty((*input_ids.shape, hidden_size), dtype=dtype)


def traced_pass(decoder: int, module: Any, call: dict) -> Any:
    """What the compiler sees of a decoder's call over a paged cache.

    Args:
        decoder: Ticket of the DecoderForward.
        module: The decoder.
        call: Its arguments by name, the cache as "cache".

    Raises:
        ValueError: Arguments that the operator doesn't take.
    """
    others = {"cache", "past_key_values", "use_cache", "return_dict", *KNOWN_ARGUMENTS}
    unknown = [name for name, value in call.items() if name not in others and value is not None and value is not False]
    if unknown:
        raise ValueError(
            f"{', '.join(unknown)}: not supported by a compiled pass over a PagedMLACache; allowed: "
            f"{', '.join(KNOWN_ARGUMENTS)}"
        )
    cache, size = call["cache"], module.config.hidden_size
    ids, mask, positions = (call.get(name) for name in KNOWN_ARGUMENTS)
    dtype = module.embed_tokens.weight.dtype
    hidden = torch.ops.hf_mla.decoder_pass(ids, mask, positions, cache.ticket, decoder, size, dtype)
    return MoeModelOutputWithPast(last_hidden_state=hidden, **{compat.CACHE_NAME: cache})


def _wrap(original: Any) -> Any:
    @functools.wraps(original)
    def criteria(self: Any, model_kwargs: dict, generation_config: Any) -> bool:
        config = generation_config.compile_config
        if config is None or not isinstance(model_kwargs.get(compat.CACHE_NAME), PagedMLACache):
            return original(self, model_kwargs, generation_config)
        if config.mode in WITHOUT_GRAPHS:  # reduce-overhead is what a config has that names none
            generation_config.compile_config = copy.copy(config)
            generation_config.compile_config.mode = WITHOUT_GRAPHS[config.mode]
        return not generation_config.disable_compile and (
            self.device.type == "cuda" or bool(config._compile_all_devices)
        )

    return criteria


def install() -> None:
    """Let generate compile over a paged cache where it is given a compile_config; done once, at import."""
    if not hasattr(GenerationMixin._valid_auto_compile_criteria, "__wrapped__"):
        GenerationMixin._valid_auto_compile_criteria = _wrap(GenerationMixin._valid_auto_compile_criteria)
