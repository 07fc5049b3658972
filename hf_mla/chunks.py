"""A long prompt's pass in several: what a pass takes beside weights and cache grows with its tokens.

B rows, q new columns, L padded columns, D hidden values
"""

from collections.abc import Callable
from typing import Any

import torch

from . import compat
from .cache import PagedMLACache

# New tokens of one pass, all rows together; where little memory is free, fewer, down to the second number. Every
# further pass reads and expands the history anew: on an H200, 8 rows of 8,192 tokens ran at 91k tokens/s in one pass
# of DeepSeek-V2-Lite's shape, at 82k in two and at 76k in four. Its 65,536 tokens took 4 GiB beyond weights and cache.
MOST_TOKENS = 65536
LEAST_TOKENS = 2048
# A prompt of no more columns than this isn't cut up however many rows it has: rows of different lengths are then run
# without their padding (packed.py), and their history needn't be read piece by piece.
LEAST_COLUMNS = 2048
# The share of the free memory that a pass may take.
MEMORY_SHARE = 0.5

# What a call may bring to be cut up. Anything else that is set runs in one piece, since it may go by columns too.
CUT = ("input_ids", "inputs_embeds", "position_ids")
PASSED = ("attention_mask", "use_cache", "cache", "past_key_values", "return_dict")


def pass_bytes_per_token(config: Any, itemsize: int) -> int:
    """About what one new token takes while a layer runs: queries, keys, values, and its copies for its experts."""
    config = compat.layer_config(config, 0)
    heads = config.num_attention_heads
    attention = heads * (3 * (config.qk_nope_head_dim + config.qk_rope_head_dim) + 3 * config.v_head_dim)
    experts = (getattr(config, "num_experts_per_tok", None) or 1) + (getattr(config, "n_shared_experts", None) or 0)
    inner = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    mixture = experts * (2 * config.hidden_size + 3 * inner)
    return itemsize * (8 * config.hidden_size + max(attention, mixture))


def _free_bytes(device: torch.device) -> int | None:
    """Memory that may still be had on a GPU, torch's own reserve included; None where that can't be told."""
    if device.type != "cuda":
        return None
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def columns_at_once(module: Any, inputs: torch.Tensor) -> int:
    """New columns of one pass of a decoder over `inputs` [B, q, ...]."""
    rows, columns = inputs.shape[:2]
    if columns <= LEAST_COLUMNS or rows * columns <= LEAST_TOKENS:
        return columns
    tokens, free = MOST_TOKENS, _free_bytes(inputs.device)
    if free is not None:
        wanted = int(free * MEMORY_SHARE) // pass_bytes_per_token(module.config, module.dtype.itemsize)
        while tokens > max(wanted, LEAST_TOKENS):  # powers of two, so that kernels see few different sizes
            tokens //= 2
    return max(LEAST_COLUMNS, tokens // rows)


def may_be_cut(config: Any, call: dict) -> bool:
    """Whether the call wants nothing but the last hidden states, of arguments that are known."""
    others = (value for name, value in call.items() if name not in (*CUT, *PASSED))
    if any(value is not None and value is not False for value in others) or call.get("return_dict") is False:
        return False
    mask, positions = call.get("attention_mask"), call.get("position_ids")
    if mask is not None and not (isinstance(mask, torch.Tensor) and mask.ndim == 2):
        return False
    if positions is not None and not isinstance(positions, torch.Tensor):
        return False
    return not any(
        getattr(config, f"output_{name}", False) for name in ("attentions", "hidden_states", "router_logits")
    )


def run_in_chunks(run: Callable[..., Any], call: dict, cache: PagedMLACache, size: int) -> Any:
    """The output of `run(**call)`, `size` columns at a time.

    Args:
        run: The decoder's pass.
        call: Its arguments by name, the cache under "cache".
        cache: The cache, which gets all the columns or, where a pass fails, none.
        size: Columns of a pass.

    Returns:
        The last pass's output with `last_hidden_state` [B, q, D] of all.
    """
    past, done = cache.get_seq_length(), 0
    inputs = call["input_ids"] if call.get("inputs_embeds") is None else call["inputs_embeds"]
    rest = {name: value for name, value in call.items() if name not in (*CUT, "cache", "past_key_values")}
    mask, hidden = rest.pop("attention_mask", None), None
    try:
        while True:
            columns = slice(done, min(done + size, inputs.shape[1]))
            cut = {name: call[name][:, columns] for name in CUT[:2] if call.get(name) is not None}
            if call.get("position_ids") is not None:  # rows may be preceded by a dimension of their kinds
                cut["position_ids"] = call["position_ids"][..., columns]
            if mask is not None:
                cut["attention_mask"] = mask[:, : past + columns.stop]
            output = run(**{compat.CACHE_NAME: cache}, **cut, **rest)
            state = output.last_hidden_state
            hidden = state.new_empty(*inputs.shape[:2], state.shape[-1]) if hidden is None else hidden
            hidden[:, columns] = state
            done = columns.stop
            if done == inputs.shape[1]:
                output.last_hidden_state = hidden
                return output
    except BaseException:
        cache.crop(-done)
        raise
