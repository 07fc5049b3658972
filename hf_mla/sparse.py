"""Absorbed attention over the tokens that a model's own indexer picks (DeepSeek-V3.2's sparse attention).

    B rows, q new columns, L padded columns, K picked tokens a query, H heads, R = kv_lora_rank, P = qk_rope_head_dim

An indexer speaks padded columns and its picks may be masked ones, where a query sees fewer than K: the mask that the
model built says which count. Plain torch on any device: the picked latents are gathered, K of them instead of L.
"""

import torch

from . import kernels

# New columns up to which picked latents are gathered a query at a time; beyond, expanding the history once is less.
MAX_SPARSE_COLUMNS = 16


def _visible(mask: torch.Tensor | None, indices: torch.Tensor, length: int) -> torch.Tensor:
    """mask [B or 1, 1, q, L] (bool, or added to scores) at indices [B, q, K]: True where a token is seen."""
    if mask is None:  # 5.15 builds none where nothing is padded: causality is left
        columns = torch.arange(length - indices.shape[1], length, device=indices.device)
        return indices <= columns[:, None]
    picked = mask[:, 0].expand(indices.shape[0], -1, -1).gather(-1, indices)
    return picked if picked.dtype == torch.bool else picked == 0


def sparse_decode(
    q_latent: torch.Tensor,
    q_pe: torch.Tensor,
    pages: torch.Tensor,
    slots: torch.Tensor,
    indices: torch.Tensor,
    mask: torch.Tensor | None,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to picked tokens.

    Args:
        q_latent: [B, q, H, R] in the pages' dtype; q_pe [B, q, H, P] likewise.
        pages: [N, S, >= R + P].
        slots: [B, L] int64, the slot of each padded column, -1 where it isn't stored.
        indices: [B, q, K] int, distinct padded columns that each query picks.
        mask: [B or 1, 1, q, L], bool (True is seen) or added to scores (0 is seen), or None: all up to the query.
        sm_scale: Scale of the scores.

    Returns:
        out [B, q, H, R] in the queries' dtype and lse [B, q, H] float32 (natural log); 0 and -inf where none is seen.
    """
    rank, rope = q_latent.shape[-1], q_pe.shape[-1]
    work = torch.float64 if q_latent.dtype == torch.float64 else torch.float32
    indices = indices.long()
    picked = slots.gather(1, indices.flatten(1)).view_as(indices)
    picked = picked.masked_fill(~_visible(mask, indices, slots.shape[1]), -1)
    outs, sums = [], []
    for column in range(indices.shape[1]):
        ckv, k_pe = kernels.gather_latents(pages, picked[:, column], rank, rope)  # unseen ones are zeros
        keys = torch.cat([ckv, k_pe], -1).to(work)
        query = torch.cat([q_latent[:, column], q_pe[:, column]], -1).to(work)
        scores = torch.bmm(query, keys.transpose(1, 2)).mul_(sm_scale)
        scores.masked_fill_((picked[:, column] < 0)[:, None], float("-inf"))
        # Shifted by the maximum, not by the lse: the lse is rounded, and scores of hundreds would feel it.
        top = scores.amax(-1, keepdim=True)
        weights = scores.sub_(top.masked_fill(top == float("-inf"), 0)).exp_()
        total = weights.sum(-1, keepdim=True)
        sums.append((top + total.log()).squeeze(-1).float())
        outs.append(torch.bmm(weights, keys[..., :rank]).div_(total.masked_fill_(total == 0, 1)))
    return torch.stack(outs, 1).to(q_latent.dtype), torch.stack(sums, 1)
