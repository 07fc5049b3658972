"""Which code multiplies a mixture's experts in a step over a paged cache.

For its decode loop, generate exchanges "grouped_mm" for "batched_mm" on GPUs, which copies the weights of every
selected expert once a token: 20 GB a layer at 200 tokens of DeepSeek-V2-Lite. And "grouped_mm" writes each pair of
token and expert a dozen times, half of them in fp32, which takes as long as its products. A step on a GPU takes:

    fused_experts    where the module is as transformers' decorator describes by default, in fp16 or bf16
    grouped_experts  likewise, for more tokens and in bf16
    "grouped_mm"     for other modules in bf16
    "batched_mm"     for other dtypes: grouped products wait for the host there, and can't be captured in a graph

On a CPU, and where another name was configured, nothing changes.

    T tokens, K experts a token, E experts, D hidden values
"""

from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from transformers.integrations import moe

from .known import is_silu

EXPERTS_NAME = "hf_mla_experts"  # in transformers' registry of experts' functions

# How many copies of an expert's weights batched_mm may make, in terms of the experts there are: up to four times what
# the layer's own weights take.
MAX_COPIES = 4

# What transformers' decorator leaves on a module where each attribute has its default; some versions lack some.
PLAIN = {
    "has_gate": True,
    "has_bias": False,
    "has_post_expert_norm": False,
    "is_transposed": False,
    "is_concatenated": True,
    "_is_expert_parallel": False,
}


def is_registered(module: nn.Module) -> bool:
    """Whether `module` looks names up in the registry that ours is in; modules of quantized experts have their own."""
    cells = getattr(type(module).forward, "__closure__", None) or ()
    return any(cell.cell_contents is moe.ALL_EXPERTS_FUNCTIONS for cell in cells)


def decode_name(configured: str | None, registered: bool) -> str | None:
    """The name to look up in a step over a paged cache, where `configured` is the config's."""
    if configured not in ("batched_mm", "grouped_mm"):
        return configured
    return EXPERTS_NAME if registered else "grouped_mm"


class Kernels(NamedTuple):
    """The modules of kernels: for few tokens, and for many."""

    few: Any
    many: Any


@lru_cache
def _kernels() -> Kernels | str:
    """The kernels, or why they can't be had."""
    try:
        from .kernels import triton_experts, triton_grouped
    except Exception as error:  # broken binary packages raise anything
        return f"triton is not usable: {type(error).__name__}: {error}"
    return Kernels(triton_experts, triton_grouped)


def unfit(module: Any, hidden_states: torch.Tensor, top_k_weights: torch.Tensor) -> str | None:
    """Why our kernels can't stand for `module`'s products of hidden_states [T, D] (of any device), or None."""
    kernels = _kernels()
    if isinstance(kernels, str):
        return kernels
    for name, value in PLAIN.items():
        if getattr(module, name, value) != value:
            return f"{name} is {getattr(module, name)}"
    if getattr(module._apply_gate, "__func__", None) is not getattr(moe, "_default_apply_gate", None):
        return "it gates in its own way"
    if not is_silu(module.act_fn):
        return f"its activation is {type(module.act_fn).__name__}"
    tokens, dtype = hidden_states.shape[0], hidden_states.dtype
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it is in {dtype}"
    most = kernels.few.MAX_TOKENS if dtype == torch.float16 else torch.inf  # torch's grouped products are bf16's
    if not 1 <= tokens <= most:
        return f"{tokens} tokens in {dtype}"
    weights = module.gate_up_proj, module.down_proj
    for weight in weights:
        if type(weight) not in (torch.Tensor, nn.Parameter):
            return f"its weights are of {type(weight).__name__}"
        if weight.dtype != hidden_states.dtype or weight.device != hidden_states.device:
            return f"its weights are {weight.dtype} on {weight.device}"
        if weight.dim() != 3 or not weight.is_contiguous():
            return "its weights are not contiguous"
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*weights, hidden_states, top_k_weights)):
        return "gradients are wanted"
    return "torch.compile is tracing" if torch.compiler.is_compiling() else None


def _stock_name(module: Any, hidden_states: torch.Tensor, pairs: int) -> str:
    """transformers' own function for what our kernels aren't for."""
    if hidden_states.is_cuda:
        copied = getattr(module, "num_experts", 0) * MAX_COPIES
        return "grouped_mm" if module.down_proj.dtype == torch.bfloat16 or pairs > copied else "batched_mm"
    configured = getattr(module.config, "original", module.config)._experts_implementation
    return "grouped_mm" if configured == EXPERTS_NAME else configured


def paged_experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The experts of a step over a paged cache, registered with transformers as `EXPERTS_NAME`.

    Args:
        module: An expert module as transformers' `use_experts_implementation` makes them.
        hidden_states: [T, D].
        top_k_index: [T, K] int64.
        top_k_weights: [T, K].

    Returns:
        [T, D] in hidden_states' dtype.
    """
    if hidden_states.is_cuda and unfit(module, hidden_states, top_k_weights) is None:
        few, many = cast(Kernels, _kernels())
        given = hidden_states, module.gate_up_proj, module.down_proj, top_k_index, top_k_weights
        if hidden_states.shape[0] <= few.MAX_TOKENS:
            return few.fused_experts(*given)
        return many.grouped_experts(*given, moe._grouped_linear)
    stock = moe.ALL_EXPERTS_FUNCTIONS[_stock_name(module, hidden_states, top_k_index.numel())]
    return stock(module, hidden_states, top_k_index, top_k_weights)


moe.ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, paged_experts)
