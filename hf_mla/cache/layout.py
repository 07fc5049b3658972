"""How one token's latents lie in a page.

entry   [ ckv: kv_lora_rank | k_pe: qk_rope_head_dim | padding ]     one token of one layer
block   [block_size, entry]                                          starts at a multiple of 256 bytes
pages   [num_blocks, block_size, entry]                              one tensor a layer

8-bit entries (float8_e4m3fn) hold ckv in 8 bits, k_pe in 16 and a scale: see `kernels/fp8.py`.
"""

from dataclasses import dataclass

import torch

from ..kernels import fp8

BLOCK_ALIGNMENT = 256  # bytes; what TMA descriptors and 128-byte cache lines ask for, with room


@dataclass(frozen=True)
class EntryLayout:
    """Geometry of a layer's pages.

    Args:
        kv_lora_rank: Values of the compressed latent (ckv).
        qk_rope_head_dim: Values of the shared rope key (k_pe); 0 where a model has none.
        block_size: Tokens a block.
        entry_alignment: Bytes an entry is padded to a multiple of.
        dtype: Type of the stored values.
    """

    kv_lora_rank: int
    qk_rope_head_dim: int
    block_size: int
    entry_alignment: int
    dtype: torch.dtype

    @property
    def entry_values(self) -> int:
        """Values from one token's entry to the next."""
        bytes_used = (self.kv_lora_rank + self.qk_rope_head_dim) * self.dtype.itemsize
        if self.dtype == fp8.FP8:
            bytes_used = fp8.entry_bytes(self.kv_lora_rank, self.qk_rope_head_dim)
        return -(-bytes_used // self.entry_alignment) * self.entry_alignment // self.dtype.itemsize

    def compute_dtype(self, given: torch.dtype) -> torch.dtype:
        """In which queries and new latents, `given` in another, come to the pages: theirs, unless they quantise."""
        return given if self.dtype == fp8.FP8 else self.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer: a multiple of 256, since 16 entries of 16 bytes are."""
        return self.block_size * self.entry_values * self.dtype.itemsize

    def allocate(self, num_blocks: int, device: torch.device) -> torch.Tensor:
        """Uninitialised pages [num_blocks, block_size, entry_values]; nothing may rely on what they hold."""
        with torch.inference_mode(False):  # else a cache begun in inference mode couldn't be written outside of it
            return torch.empty(num_blocks, self.block_size, self.entry_values, dtype=self.dtype, device=device)
