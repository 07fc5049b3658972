"""One forward pass over a paged cache, planned once and read by every layer.

B rows, q new columns a row, L padded columns including the new ones, M table columns
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from .. import kernels
from .layout import EntryLayout
from .mask_check import MaskCheck
from .pieces import Unit, units_of
from .sequences import Extension


@dataclass(frozen=True)
class DeviceStep:
    """A step's index tensors on one device.

    Args:
        block_table: [B, M] int32.
        kv_lens: [B, q] int32, stored tokens each query sees.
        slot_mapping: [B * q] int64, -1 where a column isn't stored.
    """

    block_table: torch.Tensor
    kv_lens: torch.Tensor
    slot_mapping: torch.Tensor


@dataclass
class StepPlan:
    """What all layers of one forward pass share.

    Args:
        extension: The new columns (host tensors).
        block_table: [B, M] int32 on the host.
        history_slots: [B, L] int64 on the host, the slot of every padded column, where the step needs the history
            expanded or picks columns from it; None where it doesn't (no history yet, or all of it is read in pages).
        absorbed: Attention reads the pages with absorbed weights; latents are passed on unexpanded.
        in_pieces: Attention reads the pages and expands a piece of the history at a time; latents likewise.
        num_blocks: Blocks each layer's pages must have.
        backend: Kernels asked for.
        mask_check: Says once the step is queued whether it was planned for the mask that it was given; None where
            that is sure.
        packed: Where the pass is given the stored tokens alone, as one row: their places among B * q columns, [T]
            int64 on the host, and the tokens of each row. `slot_mapping` is then [T].
        page_bases: [layers] int64 on the device, the pages' addresses, where a captured graph reads them from memory.
        expand: What the next update must do to the latents that it returns, where the model won't.
        unread: The layer that attention was last handed latents of, until it has read the pages.
        holders: Which layer holds the latents that attention is handed, by the tensor's id: layers may share them.
    """

    extension: Extension
    block_table: torch.Tensor
    history_slots: torch.Tensor | None
    absorbed: bool
    num_blocks: int
    backend: str
    mask_check: MaskCheck | None = None
    in_pieces: bool = False
    packed: tuple[torch.Tensor, list[int]] | None = None
    page_bases: torch.Tensor | None = None
    expand: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None
    unread: int | None = None
    holders: dict[int, int] = field(default_factory=dict)
    _devices: dict[torch.device, DeviceStep] = field(default_factory=dict)
    _history: dict[torch.device, torch.Tensor] = field(default_factory=dict)
    _decode: dict[tuple[EntryLayout, int, torch.device], kernels.DecodePlan] = field(default_factory=dict)
    _units: dict[tuple[int, int, torch.device], list[Unit]] = field(default_factory=dict)

    @property
    def columns(self) -> int:
        """New columns a row."""
        return self.extension.kv_lens.shape[1]

    @property
    def reads_pages(self) -> bool:
        """Whether attention is ours and reads the history in the pages; else it is the model's own."""
        return self.absorbed or self.in_pieces

    def hand_on(self, layer_idx: int) -> None:
        """Note that this layer's attention goes on with new latents alone, so it has to read the rest in the pages."""
        self.check_read()
        self.unread = layer_idx

    def check_read(self) -> None:
        """Raise where stock attention ran on what was handed on: it knows no history.

        Raises:
            ValueError: naming the layer.
        """
        if self.unread is not None:
            raise ValueError(
                f"model: the attention of layer {self.unread} isn't patched, so it was exchanged or copied after the "
                "patch; call hf_mla.patch(model) again"
            )

    def on(self, device: torch.device) -> DeviceStep:
        """The step's tensors on `device`, copied there at the first call."""
        if device not in self._devices:
            self._devices[device] = DeviceStep(
                self.block_table.to(device, non_blocking=True),
                self.extension.kv_lens.to(device, non_blocking=True),
                self.extension.slot_mapping.to(device, non_blocking=True),
            )
        return self._devices[device]

    def base_of(self, layer_idx: int) -> torch.Tensor | None:
        """[1] int64, where a graph finds the address of a layer's pages; None outside graphs."""
        return None if self.page_bases is None else self.page_bases[layer_idx : layer_idx + 1]

    def history_on(self, device: torch.device) -> torch.Tensor:
        """`history_slots` on `device`."""
        if device not in self._history:
            assert self.history_slots is not None
            self._history[device] = self.history_slots.to(device, non_blocking=True)
        return self._history[device]

    def units(self, layout: EntryLayout, limit: int, device: torch.device) -> list[Unit]:
        """How a step that reads the history in pieces of `limit` tokens is cut up, made at the first call."""
        key = (layout.block_size, limit, device)
        if key not in self._units:
            units = units_of(self.extension, self.block_table, layout.block_size, limit)
            self._units[key] = [unit.to(device) for unit in units]
        return self._units[key]

    def decode_plan(self, layout: EntryLayout, num_heads: int, device: torch.device) -> kernels.DecodePlan:
        """The kernels' plan for layers of this geometry on this device, made at the first call."""
        key = (layout, num_heads, device)
        if key not in self._decode:
            tensors = self.on(device)
            self._decode[key] = kernels.plan(
                tensors.block_table,
                tensors.kv_lens,
                kv_lens_host=self.extension.kv_lens,
                num_heads=num_heads,
                kv_lora_rank=layout.kv_lora_rank,
                qk_rope_head_dim=layout.qk_rope_head_dim,
                block_size=layout.block_size,
                dtype=layout.dtype,
                backend=self.backend,
            )
        return self._decode[key]
