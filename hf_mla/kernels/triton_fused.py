"""The small steps of a decode layer in Triton, one launch each where torch takes many.

Shapes: T tokens, D values of a row, H heads, N = qk_nope_head_dim, R = kv_lora_rank, P = qk_rope_head_dim, E routed
experts in G groups, k of them a token; pages [blocks, S, >= R+P]; slot = block * S + offset, -1 for a token that is not
stored.

Roundings are those of transformers' own modules: computed in float32 and rounded to the tensors' dtype where theirs
are, but for rope, which rounds once where theirs rounds each product. `reference_fused` says the same in torch.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl

# Flavours of rope: whether a pair is (i, i + P/2) or (2i, 2i + 1), in the input and in the output.
ROPES = {"complex": (False, False), "interleave": (False, True), "half": (True, True)}

HEADS_A_PROGRAM = 16


def _on(tensor: torch.Tensor) -> AbstractContextManager:
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def _warps(values: int) -> int:
    """Warps for `values` values in one program, 8 a thread where that is no more than 16 warps."""
    return max(1, min(16, values // 256))


@triton.jit
def _normed(x, weight, eps, size: tl.constexpr, dtype: tl.constexpr):
    """RMSNorm of one row x (float32, zeros beyond `size`): rounded to dtype, times the weight, rounded again."""
    scaled = (x * tl.rsqrt(tl.sum(x * x, axis=0) / size + eps)).to(dtype)
    return (weight.to(tl.float32) * scaled.to(tl.float32)).to(dtype)


@triton.jit
def _rms_norm_kernel(x_ptr, weight_ptr, out_ptr, x_st, eps, SIZE: tl.constexpr, PAD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, PAD)
    live = cols < SIZE
    x = tl.load(x_ptr + row * x_st + cols, mask=live, other=0.0)
    weight = tl.load(weight_ptr + cols, mask=live, other=0.0)
    tl.store(out_ptr + row * SIZE + cols, _normed(x.to(tl.float32), weight, eps, SIZE, x.dtype), mask=live)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of x [..., D] with weight [D], contiguous and of the same dtype; x's rows may lie any stride apart.

    Returns [..., D], contiguous: weight * (x / sqrt(mean(x^2) + eps)), the quotient rounded to x's dtype first.
    """
    size = x.shape[-1]
    rows = x.reshape(-1, size)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    pad = triton.next_power_of_2(size)
    with _on(x):
        _rms_norm_kernel[(rows.shape[0],)](
            rows, weight, out, rows.stride(0), eps, SIZE=size, PAD=pad, num_warps=_warps(pad)
        )
    return out


@triton.jit
def _add_rms_norm_kernel(
    x_ptr, y_ptr, weight_ptr, sum_ptr, out_ptr, x_st, y_st, eps, SIZE: tl.constexpr, PAD: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, PAD)
    live = cols < SIZE
    x = tl.load(x_ptr + row * x_st + cols, mask=live, other=0.0)
    y = tl.load(y_ptr + row * y_st + cols, mask=live, other=0.0)
    weight = tl.load(weight_ptr + cols, mask=live, other=0.0)
    total = (x.to(tl.float32) + y.to(tl.float32)).to(x.dtype)
    tl.store(sum_ptr + row * SIZE + cols, total, mask=live)
    tl.store(out_ptr + row * SIZE + cols, _normed(total.to(tl.float32), weight, eps, SIZE, x.dtype), mask=live)


def add_rms_norm(
    x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x + y, its RMSNorm) of x and y [..., D], both rounded to their dtype; strides and weight as for `rms_norm`."""
    size = x.shape[-1]
    x_rows, y_rows = x.reshape(-1, size), y.reshape(-1, size)
    total, out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    if not out.numel():
        return total, out
    pad = triton.next_power_of_2(size)
    with _on(x):
        _add_rms_norm_kernel[(x_rows.shape[0],)](
            x_rows, y_rows, weight, total, out, x_rows.stride(0), y_rows.stride(0), eps,
            SIZE=size, PAD=pad, num_warps=_warps(pad),
        )  # fmt: skip
    return total, out


@triton.jit
def _load_pair(ptr, pair, live, PAIRS: tl.constexpr, HALVES: tl.constexpr):
    """Both values of each pair, in float32."""
    first = pair if HALVES else 2 * pair
    second = pair + PAIRS if HALVES else 2 * pair + 1
    a = tl.load(ptr + first, mask=live, other=0.0).to(tl.float32)
    b = tl.load(ptr + second, mask=live, other=0.0).to(tl.float32)
    return a, b


@triton.jit
def _store_pair(ptr, pair, live, a, b, PAIRS: tl.constexpr, HALVES: tl.constexpr):
    first = pair if HALVES else 2 * pair
    second = pair + PAIRS if HALVES else 2 * pair + 1
    tl.store(ptr + first, a.to(ptr.dtype.element_ty), mask=live)
    tl.store(ptr + second, b.to(ptr.dtype.element_ty), mask=live)


@triton.jit
def _rope_norm_write_kernel(
    q_ptr, kv_ptr, weight_ptr, cos_ptr, sin_ptr, pages_ptr, slot_ptr, out_ptr,
    eps, num_heads, q_st, q_sh, kv_st, cos_st, cos_sp, sin_st, sin_sp, pages_sb, pages_se, slot_st,
    NOPE: tl.constexpr, RANK: tl.constexpr, RANK_PAD: tl.constexpr, PAIRS: tl.constexpr, PAIRS_PAD: tl.constexpr,
    SECOND: tl.constexpr, HALVES_IN: tl.constexpr, HALVES_OUT: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr, INDIRECT: tl.constexpr,
):  # fmt: skip
    """Programs (t, 0) norm, rotate and store token t's latents; programs (t, 1 + i) rotate BLOCK_H heads' queries.

    SECOND: where the cosine of a pair's second value is, counted from that of the first. INDIRECT: pages_ptr points
    to the address of the pages.
    """
    if INDIRECT:
        pages_ptr = tl.multiple_of(tl.load(pages_ptr).to(tl.pointer_type(kv_ptr.dtype.element_ty)), 16)
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    pair = tl.arange(0, PAIRS_PAD)
    cos_at, sin_at = cos_ptr + token * cos_st + pair * cos_sp, sin_ptr + token * sin_st + pair * sin_sp
    cos = tl.load(cos_at, mask=pair < PAIRS, other=0.0).to(tl.float32)
    sin = tl.load(sin_at, mask=pair < PAIRS, other=0.0).to(tl.float32)
    if SECOND > 0:
        cos2 = tl.load(cos_at + SECOND * cos_sp, mask=pair < PAIRS, other=0.0).to(tl.float32)
        sin2 = tl.load(sin_at + SECOND * sin_sp, mask=pair < PAIRS, other=0.0).to(tl.float32)
    else:
        cos2 = cos
        sin2 = sin
    if part == 0:
        slot = tl.load(slot_ptr + token * slot_st)
        if slot >= 0:
            entry = pages_ptr + slot // BLOCK_SIZE * pages_sb + slot % BLOCK_SIZE * pages_se
            kv = kv_ptr + token * kv_st
            cols = tl.arange(0, RANK_PAD)
            x = tl.load(kv + cols, mask=cols < RANK, other=0.0)
            weight = tl.load(weight_ptr + cols, mask=cols < RANK, other=0.0)
            tl.store(entry + cols, _normed(x.to(tl.float32), weight, eps, RANK, x.dtype), mask=cols < RANK)
            a, b = _load_pair(kv + RANK, pair, pair < PAIRS, PAIRS, HALVES_IN)
            rotated_a, rotated_b = a * cos - b * sin, b * cos2 + a * sin2
            _store_pair(entry + RANK, pair, pair < PAIRS, rotated_a, rotated_b, PAIRS, HALVES_OUT)
    else:
        head = (part - 1) * BLOCK_H + tl.arange(0, BLOCK_H)
        live = (head < num_heads)[:, None] & (pair < PAIRS)[None, :]
        q = q_ptr + token * q_st + head.to(tl.int64)[:, None] * q_sh + NOPE
        a, b = _load_pair(q, pair[None, :], live, PAIRS, HALVES_IN)
        rotated_a = a * cos[None, :] - b * sin[None, :]
        rotated_b = b * cos2[None, :] + a * sin2[None, :]
        out = out_ptr + (token * num_heads + head)[:, None] * (2 * PAIRS)
        _store_pair(out, pair[None, :], live, rotated_a, rotated_b, PAIRS, HALVES_OUT)


def rope_norm_write(
    q: torch.Tensor,
    compressed_kv: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rope: str,
    pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    base: torch.Tensor | None = None,
) -> torch.Tensor:
    """Norm the latents, rotate keys and queries, and store the keys' part in pages, all in one launch.

    Args:
        q: [T, H, N + P], last dimension contiguous; only the last P values of a head are read.
        compressed_kv: [T, R + P], any row stride, of the dtype of q and pages.
        weight: [R], kv_a_layernorm's, of that dtype; `eps` is its epsilon.
        cos: [T or 1, P / 2 or P], any strides and float dtype; `sin` likewise. "half" reads all P values.
        rope: A key of `ROPES`.
        pages: [blocks, S, >= R + P].
        slot_mapping: [T] int64; -1 stores nothing.
        base: [1] int64 on the device: where the address of the pages is read from instead.

    Returns:
        q_pe, rotated, [T, H, P] contiguous. Arguments are taken as validated.
    """
    tokens, heads, width = q.shape
    rank = weight.shape[0]
    rope_dim = compressed_kv.shape[1] - rank
    pairs = rope_dim // 2
    halves_in, halves_out = ROPES[rope]
    out = torch.empty(tokens, heads, rope_dim, dtype=q.dtype, device=q.device)
    if not tokens:
        return out
    grid = tokens, 1 + triton.cdiv(heads, HEADS_A_PROGRAM)
    with _on(pages):
        _rope_norm_write_kernel[grid](
            q, compressed_kv, weight, cos, sin, pages if base is None else base, slot_mapping, out,
            eps, heads, q.stride(0), q.stride(1), compressed_kv.stride(0),
            cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1),
            sin.stride(0) if sin.shape[0] > 1 else 0, sin.stride(1),
            *pages.stride()[:2], slot_mapping.stride(0),
            NOPE=width - rope_dim, RANK=rank, RANK_PAD=triton.next_power_of_2(rank), PAIRS=pairs,
            PAIRS_PAD=triton.next_power_of_2(pairs), SECOND=pairs if rope == "half" else 0, HALVES_IN=halves_in,
            HALVES_OUT=halves_out, BLOCK_SIZE=pages.shape[1], BLOCK_H=HEADS_A_PROGRAM, INDIRECT=base is not None,
            num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def _silu_mul_kernel(gate_ptr, up_ptr, out_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_ptr + at, mask=at < count, other=0.0)
    up = tl.load(up_ptr + at, mask=at < count, other=0.0)
    x = gate.to(tl.float32)
    silu = (x / (1.0 + tl.exp(-x))).to(gate.dtype)
    tl.store(out_ptr + at, (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype), mask=at < count)


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, of one shape and dtype, the first factor rounded to that dtype; contiguous."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    count, block = out.numel(), 1024
    if count:
        with _on(gate):
            _silu_mul_kernel[(triton.cdiv(count, block),)](gate, up, out, count, BLOCK=block, num_warps=4)
    return out


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
    with _on(scores):
        _route_kernel[(tokens,)](
            scores, scores if bias is None else bias, weights, chosen, scores.stride(0), scale,
            EXPERTS=experts, EXPERTS_PAD=triton.next_power_of_2(experts), TOP=top_k,
            TOP_PAD=triton.next_power_of_2(top_k), GROUPS=groups, GROUPS_PAD=triton.next_power_of_2(groups),
            GROUPS_KEPT=groups_kept, SOFTMAX=bias is None, RENORMALISE=renormalise,
            num_warps=4 if groups_kept < groups else 1,
        )  # fmt: skip
    return weights, chosen
