"""A token's latents in 8 bits: how an entry of such pages lies in bytes, and how it is made and read in plain torch.

T tokens, R = kv_lora_rank, P = qk_rope_head_dim, N blocks of S = block_size tokens

entry  [ ckv: R float8_e4m3fn | to 16 bytes | k_pe: P bfloat16 | to 4 bytes | scale: float32 | padding ]
pages  [N, S, entry bytes], float8_e4m3fn; 512 + 64 values take 644 bytes, 656 with the usual padding

One scale a token, its largest magnitude / 448, multiplies ckv alone: rope parts have outliers, which would cost the
latents their precision, and stay as they are. Four scales, one for each 128 values, would fit into the same 656 bytes,
but they would have to multiply every value of a tile, and gain little: attention over normal latents is off by 3% with
either, over channels that differ lognormally by 3% instead of 2%, for e4m3 is as exact over 15 powers of two.
"""

from __future__ import annotations

import torch

FP8 = torch.float8_e4m3fn
ROPE_DTYPE = torch.bfloat16
LARGEST = 448.0  # of e4m3fn
SMALLEST_MAGNITUDE = 1e-12  # of a token, so that its scale's reciprocal and logarithm are finite


def rope_offset(kv_lora_rank: int) -> int:
    """Byte of an entry at which k_pe begins."""
    return -(-kv_lora_rank // 16) * 16


def scale_offset(kv_lora_rank: int, qk_rope_head_dim: int) -> int:
    """Byte of an entry at which the scale lies."""
    return rope_offset(kv_lora_rank) + -(-2 * qk_rope_head_dim // 4) * 4


def entry_bytes(kv_lora_rank: int, qk_rope_head_dim: int) -> int:
    """Bytes of an entry, without padding."""
    return scale_offset(kv_lora_rank, qk_rope_head_dim) + 4


def quantise(ckv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """ckv [..., R] -> values [..., R] in float8_e4m3fn and scales [..., 1] float32; ckv is about values * scales."""
    wide = ckv.float()
    scale = wide.abs().amax(-1, keepdim=True).clamp(min=SMALLEST_MAGNITUDE) / LARGEST
    return (wide / scale).to(FP8), scale


def pack(ckv: torch.Tensor, k_pe: torch.Tensor) -> torch.Tensor:
    """ckv [T, R] and k_pe [T, P] of any float dtype -> entries [T, bytes] uint8, without padding."""
    rank, rope = ckv.shape[1], k_pe.shape[1]
    values, scale = quantise(ckv)
    entries = torch.zeros(len(ckv), entry_bytes(rank, rope), dtype=torch.uint8, device=ckv.device)
    entries[:, :rank] = values.view(torch.uint8)
    start = rope_offset(rank)
    entries[:, start : start + 2 * rope] = k_pe.to(ROPE_DTYPE).contiguous().view(torch.uint8)
    entries[:, -4:] = scale.view(torch.uint8)
    return entries


def unpack(entries: torch.Tensor, kv_lora_rank: int, qk_rope_head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """entries [..., bytes] of 8-bit pages -> ckv [..., R] and k_pe [..., P], both float32."""
    entries = entries.view(torch.uint8)
    start, scale_at = rope_offset(kv_lora_rank), scale_offset(kv_lora_rank, qk_rope_head_dim)
    scale = entries[..., scale_at : scale_at + 4].contiguous().view(torch.float32)
    k_pe = entries[..., start : start + 2 * qk_rope_head_dim].contiguous().view(ROPE_DTYPE)
    return entries[..., :kv_lora_rank].contiguous().view(FP8).float() * scale, k_pe.float()
