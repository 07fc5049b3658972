"""What a decode step looks like to a backend: geometry and lengths, no tensors of values."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Problem:
    """Geometry of a layer's decode (H, R = kv_lora_rank, P = qk_rope_head_dim, S = block_size), device and dtype."""

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    block_size: int


@dataclass(frozen=True)
class Step:
    """One step's metadata: block_table [B, M] and kv_lens [B, Sq] on the device, kv_lens_host [B, Sq] on the CPU."""

    block_table: torch.Tensor
    kv_lens: torch.Tensor
    kv_lens_host: torch.Tensor

    @property
    def batch(self) -> int:
        return self.kv_lens_host.shape[0]

    @property
    def q_len(self) -> int:
        return self.kv_lens_host.shape[1]

    @property
    def max_len(self) -> int:
        return int(self.kv_lens_host.max()) if self.kv_lens_host.numel() else 0
