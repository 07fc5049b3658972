"""The pages of one attention layer.

B rows, S new columns, R = kv_lora_rank, P = qk_rope_head_dim
"""

import copy

import torch
from transformers.cache_utils import CacheLayerMixin

from .. import kernels
from .layout import EntryLayout
from .step import StepPlan


class PageStore:
    """Where the pages of a layer lie; caches of one pool share it.

    Args:
        layout: Geometry, or None before the first latents.
        pages: [blocks, block_size, entry], or None likewise.
        shared: Copies of a cache go on with the same pages, as its blocks are a pool's.
    """

    def __init__(self) -> None:
        self.shared = False
        self.layout: EntryLayout | None = None
        self.pages: torch.Tensor | None = None

    def __deepcopy__(self, memo: dict) -> "PageStore":
        if self.shared:
            return self
        new = memo[id(self)] = PageStore()
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new


class PagedMLALayer(CacheLayerMixin):
    """Latents of one layer in pages; which row owns which block is the cache's book, shared by all layers.

    Args:
        layer_idx: Index of the layer, for messages.
        block_size: Tokens a block.
        entry_alignment: Bytes an entry is padded to a multiple of.
        dtype: Type of the stored values, or None for that of the latents.
    """

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, layer_idx: int, block_size: int, entry_alignment: int, dtype: torch.dtype | None = None):
        super().__init__()
        self.layer_idx = layer_idx
        self.block_size = block_size
        self.entry_alignment = entry_alignment
        self.dtype = dtype
        self.store = PageStore()
        self.length = 0  # padded columns written

    @property
    def layout(self) -> EntryLayout | None:
        """Geometry of the pages, or None before the first latents."""
        return self.store.layout

    @property
    def pages(self) -> torch.Tensor | None:
        """[blocks, block_size, entry], or None before the first latents."""
        return self.store.pages

    @property
    def device(self) -> torch.device:
        """The pages' device; there are pages."""
        assert self.store.pages is not None
        return self.store.pages.device

    def __repr__(self) -> str:
        pages = (
            "empty" if self.pages is None else f"{tuple(self.pages.shape)}, {self.pages.dtype}, {self.pages.device}"
        )
        return f"PagedMLALayer({pages})"

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Take geometry, dtype and device from the first latents, [B, 1, S, R] and [B, 1, S, P]."""
        for name, tensor in (("kv_nope", key_states), ("k_rot", value_states)):
            if tensor.ndim != 4 or tensor.shape[1] != 1:
                raise ValueError(
                    f"{name} of layer {self.layer_idx} has shape {tuple(tensor.shape)}; a PagedMLACache holds "
                    "latents, [batch, 1, tokens, values]: it serves models with multi-head latent attention only"
                )
        self.lay_out(key_states.shape[-1], value_states.shape[-1], key_states.dtype, key_states.device)

    def lay_out(self, kv_lora_rank: int, qk_rope_head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        """Take geometry, the latents' dtype, and the device; no blocks yet."""
        self.store.layout = EntryLayout(
            kv_lora_rank=kv_lora_rank,
            qk_rope_head_dim=qk_rope_head_dim,
            block_size=self.block_size,
            entry_alignment=self.entry_alignment,
            dtype=self.dtype or dtype,
        )
        self.store.pages = self.store.layout.allocate(0, device)
        self.is_initialized = True

    @property
    def address(self) -> int:
        """Where the pages lie; changes when they grow."""
        return 0 if self.pages is None else self.pages.data_ptr()

    def prepare(self, ckv: torch.Tensor, k_pe: torch.Tensor) -> None:
        """Initialise at the first call, and check that later latents fit.

        Raises:
            ValueError: Latents of another geometry, dtype or device, as another model's would be.
        """
        if self.layout is None:
            self.lazy_initialization(ckv, k_pe)
            return
        got, held = (ckv.shape[-1], k_pe.shape[-1]), (self.layout.kv_lora_rank, self.layout.qk_rope_head_dim)
        if got != held or ckv.ndim != 4:
            raise ValueError(
                f"cache: layer {self.layer_idx} holds latents of kv_lora_rank {held[0]} and qk_rope_head_dim "
                f"{held[1]}, and was given {got[0]} and {got[1]}; use one cache per model"
            )
        if self.dtype is None and ckv.dtype != self.layout.dtype or ckv.device != self.device:
            raise ValueError(
                f"cache: layer {self.layer_idx} holds {self.layout.dtype} on {self.device}, and was given {ckv.dtype} "
                f"on {ckv.device}; use a new cache after moving or casting a model"
            )

    def grow(self, num_blocks: int) -> None:
        """Make room for `num_blocks` blocks, keeping what is stored; a layer at a time, so the peak is one layer's."""
        assert self.layout is not None and self.pages is not None
        if self.pages.shape[0] >= num_blocks:
            return
        pages = self.layout.allocate(num_blocks, self.device)
        pages[: self.pages.shape[0]].copy_(self.pages)
        self.store.pages = pages

    def copy_blocks(self, copies: list[tuple[int, int]], num_blocks: int) -> None:
        """Copy whole blocks, [(source, target)], as copy-on-write needs."""
        if self.pages is None or not copies:
            return
        self.grow(num_blocks)
        source, target = torch.tensor(copies, dtype=torch.int64, device=self.device).unbind(1)
        kernels.copy_blocks(self.pages, source, target)

    @torch.no_grad()
    def write(self, ckv: torch.Tensor, k_pe: torch.Tensor, step: StepPlan) -> None:
        """Store a step's latents, [B, 1, S, R] and [B, 1, S, P], in their slots."""
        self.prepare(ckv, k_pe)
        assert self.layout is not None and self.pages is not None
        self.grow(step.num_blocks)
        kernels.write_latents(
            self.pages,
            ckv.flatten(0, 2).to(self.layout.compute_dtype(ckv.dtype)),
            k_pe.flatten(0, 2).to(self.layout.compute_dtype(ckv.dtype)),
            step.on(self.device).slot_mapping,
            base=step.base_of(self.layer_idx),
        )
        self.length += step.columns

    def history(self, step: StepPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """All padded columns, [B, 1, L, R] and [B, 1, L, P]; zeros where a column isn't stored."""
        return self.read(step.history_on(self.device))

    def read(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents [B, 1, T, R] and [B, 1, T, P] of slots [B, T] int64; zeros at -1."""
        assert self.layout is not None and self.pages is not None
        ckv, k_pe = kernels.gather_latents(self.pages, slots, self.layout.kv_lora_rank, self.layout.qk_rope_head_dim)
        return ckv.unsqueeze(1), k_pe.unsqueeze(1)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        raise RuntimeError("a PagedMLALayer is updated through its PagedMLACache, which knows the blocks")

    def get_seq_length(self) -> int:
        """Padded columns held."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(key columns, offset) of the mask for `query_length` new columns."""
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        """-1: bounded by the pool, not by a length."""
        return -1
