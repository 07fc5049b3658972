"""Attention of many new columns over cached history: a piece of it is read from the pages, expanded and attended to.

Expanding all of a long history at once takes 2H(nope + v) values a token; here a bounded workspace does, and what its
pieces contribute is merged by log-sum-exp.

    B rows, S new columns, H heads, R = kv_lora_rank, P = qk_rope_head_dim
"""

from collections.abc import Callable
from typing import Any

import torch

from .cache.layer import PagedMLALayer
from .cache.step import StepPlan
from .kernels import partial

# What the keys and values of one piece may take.
WORKSPACE_BYTES = 512 << 20

Expand = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def _tokens_at_once(module: Any, query: torch.Tensor) -> int:
    """Tokens whose up-projected latents, keys and values fit the workspace."""
    values = query.shape[1] * (2 * module.qk_nope_head_dim + module.v_head_dim + module.qk_rope_head_dim)
    return max(1, WORKSPACE_BYTES // (values * query.element_size()))


def attend_in_pieces(
    module: Any,
    query: torch.Tensor,
    ckv: torch.Tensor,
    k_pe: torch.Tensor,
    layer: PagedMLALayer,
    plan: StepPlan,
    sm_scale: float,
    expand: Expand,
) -> torch.Tensor:
    """Attention of a step that reads its history in pieces.

    Args:
        module: The attention module, for its head sizes.
        query: [B, H, S, nope + P].
        ckv: The step's own latents, [B, 1, S, R]; k_pe [B, 1, S, P] likewise.
        layer: Where the history lies.
        plan: The step.
        sm_scale: Scale of the scores.
        expand: Latents [b, 1, T, R], [b, 1, T, P] -> keys [b, H, T, nope + P] and values [b, H, T, v].

    Returns:
        [B, S, H, v] in the query's dtype; 0 for columns that aren't stored.
    """
    assert layer.layout is not None
    rows, heads, columns, _ = query.shape
    result = query.new_zeros(rows, columns, heads, module.v_head_dim)
    for unit in plan.units(layer.layout, _tokens_at_once(module, query), layer.device):
        own = [x if unit.rows is None else x[unit.rows] for x in (query, ckv, k_pe)]
        own = [x if unit.columns is None else x[:, :, unit.columns] for x in own]
        out, lse = partial.attend(own[0], *expand(own[1], own[2]), sm_scale, causal=True)
        for slots in unit.pieces:
            latents = (x.to(query.dtype) for x in layer.read(slots))
            piece, piece_lse = partial.attend(own[0], *expand(*latents), sm_scale, causal=False)
            out, lse = partial.merge(out, lse, piece, piece_lse)
        out = out.transpose(1, 2).to(query.dtype)
        if unit.rows is None and unit.columns is None:
            return out
        rows_of = slice(None) if unit.rows is None else unit.rows
        if unit.columns is None:
            result[rows_of] = out
        else:  # of one row
            result[rows_of, unit.columns] = out.flatten(0, 1) if unit.rows is not None else out
    return result
