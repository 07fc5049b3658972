"""MLA decode, latent writes, block copies and gathers in plain torch: the oracle, and the path for any device.

Shapes: B rows, Sq query tokens a row, H heads, R = kv_lora_rank, P = qk_rope_head_dim, N blocks, S = block_size,
M table columns.
pages [N, S, >= R+P]: an entry is [ckv (R) | k_pe (P) | maybe padding], or what `fp8` says; slot = block * S + offset.
"""

from __future__ import annotations

import torch

from . import fp8


def split_slots(slots: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Block ids and offsets of int64 slots; pages may be strided, so a slot is not an index into a flat view."""
    return torch.div(slots, block_size, rounding_mode="floor"), slots % block_size


def _entries(pages: torch.Tensor, rank: int, rope: int) -> torch.Tensor:
    """pages without their padding; of 8-bit ones bytes, since not every device indexes 8-bit floats."""
    if pages.dtype == fp8.FP8:
        return pages.view(torch.uint8)[:, :, : fp8.entry_bytes(rank, rope)]
    return pages[:, :, : rank + rope]


def _latents(entries: torch.Tensor, rank: int, rope: int) -> torch.Tensor:
    """What was taken out of `_entries` -> [..., R+P]; of 8-bit pages in float32."""
    return torch.cat(fp8.unpack(entries, rank, rope), -1) if entries.dtype == torch.uint8 else entries


def _gather_rows(
    pages: torch.Tensor, block_table: torch.Tensor, row_lens: torch.Tensor, rank: int, rope: int
) -> torch.Tensor:
    """Latents [B, T, R+P] of every row, T = the longest row rounded up to blocks; tokens beyond a row are zero."""
    size = pages.shape[1]
    columns = -(-int(row_lens.max()) // size)
    used = torch.arange(columns, device=pages.device) * size < row_lens[:, None]
    ids = torch.where(used, block_table[:, :columns], 0).long()  # wild ids beyond a row are never dereferenced
    taken = _entries(pages, rank, rope).index_select(0, ids.flatten())
    latents = _latents(taken, rank, rope).view(len(ids), columns * size, rank + rope)
    beyond = torch.arange(columns * size, device=pages.device) >= row_lens[:, None]
    return latents.masked_fill_(beyond[..., None], 0)  # 0 * NaN is NaN: page tails must not reach the products


def decode(
    q_latent: torch.Tensor,
    q_pe: torch.Tensor,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    kv_lens: torch.Tensor,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend q_latent [B, Sq, H, R], q_pe [B, Sq, H, P] over the first kv_lens [B, Sq] tokens of each row.

    The arithmetic is float32 (float64 for float64 queries). Heads are folded into query rows, so that a product reads
    the latents once for all heads. Returns out [B, Sq, H, R] in the queries' dtype and lse [B, Sq, H] float32, natural
    log; where a length is 0: out 0, lse -inf.
    """
    batch, q_len, heads, rank = q_latent.shape
    work = torch.float64 if q_latent.dtype == torch.float64 else torch.float32
    lens = kv_lens.long()
    if q_latent.numel() == 0 or not int(lens.max()):
        lse = q_latent.new_full((batch, q_len, heads), float("-inf"), dtype=torch.float32)
        return q_latent.new_zeros(batch, q_len, heads, rank), lse
    latents = _gather_rows(pages, block_table, lens.amax(1), rank, q_pe.shape[-1]).to(work)
    query = torch.cat([q_latent, q_pe], -1).to(work).reshape(batch, q_len * heads, -1)
    scores = torch.bmm(query, latents.transpose(1, 2)).mul_(sm_scale)
    unseen = torch.arange(latents.shape[1], device=lens.device) >= lens[:, :, None]
    scores.view(batch, q_len, heads, -1).masked_fill_(unseen[:, :, None], float("-inf"))
    # Shifted by the maximum, not by the lse: the lse is rounded, and scores of hundreds would feel it.
    top = scores.amax(-1, keepdim=True)
    weights = scores.sub_(top.masked_fill(top == float("-inf"), 0)).exp_()
    total = weights.sum(-1, keepdim=True)
    lse = (top + total.log()).view(batch, q_len, heads).float()
    out = torch.bmm(weights, latents[..., :rank]).div_(total.masked_fill_(total == 0, 1))
    return out.view(batch, q_len, heads, rank).to(q_latent.dtype), lse


def write_latents(pages: torch.Tensor, ckv: torch.Tensor, k_pe: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Store ckv [T, R] and k_pe [T, P] at int64 slots [T]; a slot of -1 is skipped, other values stay untouched.

    8-bit pages quantise them, and rewrite the few bytes between ckv and k_pe.
    """
    kept = (slot_mapping >= 0).nonzero().squeeze(1)
    if kept.numel() == len(slot_mapping):
        block, offset = split_slots(slot_mapping, pages.shape[1])
    else:
        block, offset = split_slots(slot_mapping[kept], pages.shape[1])
        ckv, k_pe = ckv[kept], k_pe[kept]
    rank, rope = ckv.shape[1], k_pe.shape[1]
    if pages.dtype == fp8.FP8:
        _entries(pages, rank, rope).index_put_((block, offset), fp8.pack(ckv, k_pe))
        return
    pages[:, :, :rank].index_put_((block, offset), ckv)
    pages[:, :, rank : rank + rope].index_put_((block, offset), k_pe)


def copy_blocks(pages: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    """Copy blocks src [C] to blocks dst [C] (int64, on pages' device): for copy-on-write. dst has no repeats."""
    if pages.dtype == fp8.FP8:
        pages = pages.view(torch.uint8)  # not every device indexes 8-bit floats
    pages.index_copy_(0, dst, pages.index_select(0, src))


def _blocks(pages: torch.Tensor, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Contiguous pages [N, S, E] and `packed` uint8 as rows of a block each, in 8-byte words, which move fast."""
    words = pages.view(len(pages), -1).view(torch.int64)
    return words, packed.view(torch.int64).view(-1, words.shape[1])


def take_blocks(pages: torch.Tensor, blocks: torch.Tensor, packed: torch.Tensor) -> None:
    """Copy blocks [C] (int64, on pages' device) one behind the other into `packed`, uint8 of as many bytes."""
    words, rows = _blocks(pages, packed)
    torch.index_select(words, 0, blocks, out=rows)


def put_blocks(pages: torch.Tensor, blocks: torch.Tensor, packed: torch.Tensor) -> None:
    """The other way round: what `take_blocks` packed, into blocks [C]."""
    words, rows = _blocks(pages, packed)
    words.index_copy_(0, blocks, rows)


def gather_latents(
    pages: torch.Tensor, slots: torch.Tensor, kv_lora_rank: int, qk_rope_head_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read the entries at int64 `slots` [...]: (ckv [..., R], k_pe [..., P]); a slot of -1 gives zeros.

    Of 8-bit pages both are float32.
    """
    block, offset = split_slots(slots.clamp(min=0), pages.shape[1])
    taken = _entries(pages, kv_lora_rank, qk_rope_head_dim)[block, offset]
    entries = _latents(taken, kv_lora_rank, qk_rope_head_dim).masked_fill_((slots < 0)[..., None], 0)
    return entries[..., :kv_lora_rank], entries[..., kv_lora_rank:]
