"""A router's choice of experts in Triton: scores to weights and experts in one launch.

Shapes: T tokens, E experts in G equal groups, k experts a token.

Method: DeepSeek-V2 (arXiv 2405.04434) chooses by softmax, from the groups with the best experts; DeepSeek-V3 (arXiv
2412.19437) by sigmoid and a bias that balances load, from the groups whose two best experts are best together.
`reference_fused.route` says the same in torch.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl


@triton.jit
def _first_best(values, at, free, beyond: tl.constexpr):
    """(largest of the free values, its lowest place); NaN never wins, and a place is always below `beyond`."""
    best = tl.max(tl.where(free, values, float("-inf")), axis=0)
    place = tl.min(tl.where(free & (values == best), at, beyond), axis=0)
    return best, tl.where(place < beyond, place, tl.min(tl.where(free, at, beyond - 1), axis=0))


@triton.jit
def _route_kernel(
    scores_ptr, bias_ptr, weights_ptr, experts_ptr, scores_st, scale,
    EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, TOP: tl.constexpr, TOP_PAD: tl.constexpr,
    GROUPS: tl.constexpr, GROUPS_PAD: tl.constexpr, GROUPS_KEPT: tl.constexpr, SOFTMAX: tl.constexpr,
    RENORMALISE: tl.constexpr,
):  # fmt: skip
    """One program routes one token. SOFTMAX: scores are logits, and ranked as such: softmax keeps their order."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS_PAD)
    real = expert < EXPERTS
    score = tl.load(scores_ptr + token * scores_st + expert, mask=real, other=float("-inf"))
    rank = score
    if not SOFTMAX:
        rank = score + tl.load(bias_ptr + expert, mask=real, other=0.0)
    if GROUPS_KEPT < GROUPS:
        size: tl.constexpr = EXPERTS // GROUPS
        group = tl.arange(0, GROUPS_PAD)
        member = real[None, :] & ((expert // size)[None, :] == group[:, None])  # [GROUPS_PAD, EXPERTS_PAD]
        ranks = tl.where(member, rank[None, :], float("-inf"))
        group_rank = tl.max(ranks, axis=1)
        if not SOFTMAX:  # the two best together
            place = tl.min(tl.where(ranks == group_rank[:, None], expert[None, :], EXPERTS_PAD), axis=1)
            others = tl.where(expert[None, :] == place[:, None], float("-inf"), ranks)
            group_rank += tl.max(others, axis=1)
        free_group = group < GROUPS
        for _ in tl.static_range(GROUPS_KEPT):
            _, kept = _first_best(group_rank, group, free_group, GROUPS)
            free_group = free_group & (group != kept)
        dropped = tl.sum((member & (free_group & (group < GROUPS))[:, None]).to(tl.int32), axis=0) > 0
        rank = tl.where(dropped, float("-inf"), rank)
    if SOFTMAX:
        score = tl.exp(score - tl.max(score, axis=0))
        score = score / tl.sum(score, axis=0)
    slot = tl.arange(0, TOP_PAD)
    weights = tl.zeros([TOP_PAD], dtype=tl.float32)
    chosen = tl.zeros([TOP_PAD], dtype=tl.int32)
    free = real
    for i in tl.static_range(TOP):
        _, place = _first_best(rank, expert, free, EXPERTS)
        free = free & (expert != place)
        chosen = tl.where(slot == i, place, chosen)
        weights = tl.where(slot == i, tl.sum(tl.where(expert == place, score, 0.0), axis=0), weights)
    if RENORMALISE:
        weights = weights / (tl.sum(weights, axis=0) + 1e-20)
    at = token * TOP + slot
    tl.store(weights_ptr + at, weights * scale, mask=slot < TOP)
    tl.store(experts_ptr + at, chosen.to(tl.int64), mask=slot < TOP)


def route(
    scores: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    scale: float,
    groups: int = 1,
    groups_kept: int = 1,
    renormalise: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts from scores [T, E] float32, in one launch.

    Args:
        scores: Without a bias: the router's logits, whose softmax weighs the experts (DeepSeek-V2). With one:
            the sigmoid of the logits (DeepSeek-V3's noaux_tc).
        bias: [E] float32, added to the scores for choosing only, or None.
        top_k: Experts a token.
        scale: Factor on the weights.
        groups: Equal groups that the experts lie in, of which each token's best `groups_kept` may be chosen from: by
            their best expert without a bias, by the sum of the two best with one.
        renormalise: Weights sum to `scale`.

    Returns:
        weights [T, k] float32 and experts [T, k] int64, best first. Of equals, the lowest is chosen.
    """
    tokens, experts = scores.shape
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=scores.device)
    chosen = torch.empty(tokens, top_k, dtype=torch.int64, device=scores.device)
    if not tokens:
        return weights, chosen
    with torch.cuda.device(scores.device) if scores.is_cuda else nullcontext():
        _route_kernel[(tokens,)](
            scores, scores if bias is None else bias, weights, chosen, scores.stride(0), scale,
            EXPERTS=experts, EXPERTS_PAD=triton.next_power_of_2(experts), TOP=top_k,
            TOP_PAD=triton.next_power_of_2(top_k), GROUPS=groups, GROUPS_PAD=triton.next_power_of_2(groups),
            GROUPS_KEPT=groups_kept, SOFTMAX=bias is None, RENORMALISE=renormalise,
            num_warps=4 if groups_kept < groups else 1,
        )  # fmt: skip
    return weights, chosen
