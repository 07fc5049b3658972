"""Attention of a step of several new columns, a prompt's above all, with queries and keys each written once.

transformers' modules cast, rotate, concatenate and copy them, which takes as long as attention itself. What attends is
the model's own attention function, as ever; so are the projections, the cache, and `expand_kv` where it isn't known.

    B rows, S new columns, L padded columns, H heads, D hidden values, N = qk_nope_head_dim, R = kv_lora_rank,
    P = qk_rope_head_dim, V = v_head_dim
"""

from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .attention import ActiveStep, LatentsOrKV
from .known import is_known_expansion
from .standin import is_plain, triton_kernels

Angles = tuple[str, torch.Tensor, torch.Tensor]


def attend(
    module: Any, step: ActiveStep, hidden_states: torch.Tensor, angles: Angles, mask: Any, **kwargs: Any
) -> Any:
    """What the forward of an MLA module of a known kind returns, or NotImplemented where it has to run itself.

    Args:
        module: The module, whose step this is.
        step: The step.
        hidden_states: [B, S, D].
        angles: The flavour of rope, cosines and sines [B or 1, S, P / 2 or P].
        mask: The attention mask, as the module was given it.
        **kwargs: Of the attention function.

    Returns:
        [B, S, D] and what else the attention function returned.
    """
    function = ALL_ATTENTION_FUNCTIONS.get(module.config._attn_implementation)
    rows, columns = hidden_states.shape[:2]
    rope, cos, sin = angles
    if function is None or cos.shape[1] != columns:  # no function: eager, the modeling file's own
        return NotImplemented
    q = project_query(module, hidden_states)
    compressed = module.kv_a_proj_with_mqa(hidden_states)
    if not is_plain(q) or not is_plain(compressed) or q.dtype != compressed.dtype:
        return NotImplemented
    ckv, k_pe = compressed.contiguous().split([module.kv_lora_rank, module.qk_rope_head_dim], dim=-1)
    ckv = module.kv_a_layernorm(ckv).view(rows, 1, columns, -1)
    q = q.contiguous().view(rows, columns, -1, module.qk_head_dim)
    q, k_pe = triton_kernels().prompt.rotate(q, k_pe, cos, sin, rope)
    ckv, k_pe = step.cache.update(ckv, k_pe.unsqueeze(1), module.layer_idx)
    keys, values = _expand(module, step, ckv, k_pe)
    out, weights = function(
        module, q.transpose(1, 2), keys, values, mask, dropout=0.0, scaling=module.scaling, **kwargs
    )
    return module.o_proj(out.reshape(rows, columns, -1).contiguous()), weights


def project_query(module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """[..., D] -> [..., H * (N + P)]"""
    if module.q_lora_rank is None:
        return module.q_proj(hidden_states)
    return module.q_b_proj(module.q_a_layernorm(module.q_a_proj(hidden_states)))


def _expand(module: Any, step: ActiveStep, ckv: torch.Tensor, k_pe: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [B, H, L, N + P] and values [B, H, L, V] from latents [B, 1, L, R] and [B, 1, L, P], or these if absorbed.

    Keys lie in memory as [B, L, H, N + P]: what comes next reads any order, and leaves its result in the queries'.
    """
    ours = module.__dict__.get("expand_kv")
    known = isinstance(ours, LatentsOrKV) and ours.replaced is None and is_known_expansion(module)
    if step.plan.absorbed or not known:
        return module.expand_kv(ckv, k_pe)
    kv = module.kv_b_proj(ckv)
    rows, _, columns, _ = ckv.shape
    nope, value = module.qk_nope_head_dim, module.v_head_dim
    kv = kv.view(rows, columns, -1, nope + value)
    if not is_plain(kv) or type(k_pe) is not torch.Tensor or k_pe.dtype != kv.dtype or k_pe.stride(-1) != 1:
        return module.expand_kv(ckv, k_pe)
    heads = kv.shape[2]
    keys = triton_kernels().prompt.join_keys(
        kv.view(rows * columns, -1), k_pe.reshape(rows * columns, -1), heads, nope
    )
    return keys.view(rows, columns, heads, -1).transpose(1, 2), kv[..., nope:].transpose(1, 2)
