"""A prompt of rows of different lengths without its padding: the decoder sees one row that has all stored tokens.

Norms, projections and experts don't ask which row a token is of; attention does, and is given the rows one by one,
causal and without a mask, by the model's own implementation.

    B rows, L padded columns, T stored tokens of all rows, H heads, D hidden values
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from . import compat
from .cache.sequences import SequenceTable
from .cache.step import StepPlan
from .chunks import may_be_cut

# The share of masked columns from which packing pays for handing attention the rows one by one.
LEAST_PADDING = 0.125

# Those that need no mask to be causal.
CAUSAL_WITHOUT_MASK = ("sdpa", "flash_attention_2", "flash_attention_3")

# Where rows are lengthened to one of few lengths: cuDNN plans its attention anew for every shape, in some 70 ms.
ROUNDS_ON = ("cuda",)


def rounded(length: int) -> int:
    """A row's length rounded up: to a multiple of 128 and, from 1024 on, of an eighth of the power of two below it."""
    step = max(128, 1 << max(length.bit_length() - 4, 0))
    return -(-length // step) * step


def pack(plan: StepPlan, table: SequenceTable, decoder: Any, call: dict) -> bool:
    """Turn the plan of a first pass into one of its stored tokens alone, if that is worth it and nobody looks inside.

    Args:
        plan: The step, just planned.
        table: The cache's book, the step included.
        decoder: The module that the pass is of.
        call: Its arguments by name.
    """
    kept = table.kept
    if kept is None or kept.shape[1] != table.length or table.length != plan.columns or plan.reads_pages:
        return False
    if not bool(kept[:, -1].all()):  # generate goes on from the last column, masked or not
        return False
    if kept.float().mean().item() > 1 - LEAST_PADDING or not may_be_cut(decoder.config, call):
        return False
    if decoder.config._attn_implementation not in CAUSAL_WITHOUT_MASK:
        return False
    if call.get("position_ids") is not None and call["position_ids"].shape != kept.shape:
        return False
    if not all(compat.only_output_collectors(module) for module in decoder.modules() if module is not decoder):
        return False
    plan.packed = kept.flatten().nonzero().flatten(), kept.sum(1).tolist()
    slots = plan.extension.slot_mapping
    plan.extension = dataclasses.replace(plan.extension, slot_mapping=slots[plan.packed[0]])
    return True


def run(forward: Callable[..., Any], call: dict, plan: StepPlan) -> Any:
    """The output of `forward(**call)` by a packed pass; `last_hidden_state` [B, L, D] is 0 at masked columns."""
    assert plan.packed is not None
    inputs = call["input_ids"] if call.get("inputs_embeds") is None else call["inputs_embeds"]
    rows, columns = inputs.shape[:2]
    index = plan.packed[0].to(inputs.device)
    positions = call.get("position_ids")
    if positions is None:
        positions = torch.arange(columns, device=inputs.device).expand(rows, -1)
    packed = {name: value for name, value in call.items() if name not in ("cache", "past_key_values")}
    packed[compat.CACHE_NAME] = call["cache"]
    packed["position_ids"] = positions.flatten().to(inputs.device)[index][None]
    for name in ("input_ids", "inputs_embeds"):
        if call.get(name) is not None:
            packed[name] = call[name].flatten(0, 1)[index][None]
    # A prepared (4D) mask is passed on as it is, so none is built.
    packed["attention_mask"] = torch.empty((1, 1, 1, 1), dtype=torch.bool, device=inputs.device)
    output = forward(**packed)
    state = output.last_hidden_state[0]
    hidden = state.new_zeros(rows * columns, state.shape[-1])
    output.last_hidden_state = hidden.index_copy_(0, index.to(state.device), state).view(rows, columns, -1)
    return output


def attend_rows(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: StepPlan,
    scaling: float,
    **kwargs: Any,
) -> torch.Tensor:
    """Attention of a packed pass.

    Args:
        module: A patched attention module.
        query: [1, H, T, nope + P]; key the same and value [1, H, T, v], expanded.
        plan: The step.
        scaling: sm_scale.
        **kwargs: For the model's own attention function.

    Returns:
        [1, T, H, v]
    """
    assert plan.packed is not None
    attend = ALL_ATTENTION_FUNCTIONS[module.config.original._attn_implementation]
    kwargs.pop("position_ids", None)  # flash attention would look for rows in it
    lengths = [length for length in plan.packed[1] if length]
    outs = []
    for row in zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True):
        length = row[0].shape[2]
        extra = rounded(length) - length if query.device.type in ROUNDS_ON else 0
        if extra:  # zeros after the last token, which no token sees
            row = tuple(nn.functional.pad(tensor, (0, 0, 0, extra)) for tensor in row)
        outs.append(attend(module, *row, None, scaling=scaling, **kwargs)[0][:, :length])
    return torch.cat(outs, dim=1)
