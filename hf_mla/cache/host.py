"""`HostTier`: where the blocks of an idle cache lie while it is off the GPU.

A slab is host memory of one size, pinned where there is CUDA. Blocks of all layers are packed into slabs one behind
the other: gathered on the device into a staging buffer of a slab's size, then copied as a whole, since a copy of every
block by itself would be a hundred thousand small ones. Slabs are kept for the next cache: pinning memory takes longer
than filling it.
"""

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import kernels
from .blocks import PoolExhausted
from .layer import PagedMLALayer
from .paged import PagedMLACache

SLAB_BYTES = 32 << 20  # large enough that a copy's start doesn't count


@dataclass(frozen=True)
class Part:
    """Blocks `first` to `stop` (in the order of a cache's blocks) of one layer, from byte `offset` of a slab on."""

    layer: int
    first: int
    stop: int
    offset: int
    nbytes: int


@dataclass
class Load:
    """What goes into one slab, all from one device."""

    device: torch.device
    parts: list[Part] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


def _loads(layers: list[PagedMLALayer], count: int, slab_bytes: int) -> list[Load]:
    """`count` blocks of each layer, packed into slabs."""
    loads: list[Load] = []
    for i, layer in enumerate(layers):
        assert layer.layout is not None
        size, first = layer.layout.block_bytes, 0
        while first < count:
            if not loads or loads[-1].device != layer.device or loads[-1].nbytes + size > slab_bytes:
                loads.append(Load(layer.device))
            room = (slab_bytes - loads[-1].nbytes) // size
            stop = min(count, first + max(1, room))
            loads[-1].parts.append(Part(i, first, stop, loads[-1].nbytes, (stop - first) * size))
            first = stop
    return loads


@dataclass(eq=False)
class SwappedBlocks:
    """A cache's blocks on the host. Never changed, so that copies of the cache share it."""

    count: int
    loads: list[Load]
    slabs: list[torch.Tensor]

    def __deepcopy__(self, memo: dict) -> "SwappedBlocks":
        return self


class HostTier:
    """Host memory for caches whose chats are idle: they leave the GPU, and come back bit for bit.

    Several caches may be out at a time. One that is out can be dropped, reset and copied; a model that is given it,
    and whatever changes or reads it, raises a ValueError. For caches of latents alone (see docs/families.md: nothing
    beside them). Not for a cache of a PrefixPool, which shares its blocks.

    Args:
        max_bytes: Host memory that may be taken, in whole slabs of 32 MiB; None takes what is needed.

    Raises:
        ValueError: A number of bytes that holds no slab.

    Example:
        >>> tier = hf_mla.HostTier()
        >>> tier.swap_out(cache)  # its memory on the GPU is free
        >>> tier.swap_in(cache)  # generate goes on as if nothing had been
    """

    def __init__(self, max_bytes: int | None = None):
        if max_bytes is not None and (type(max_bytes) is not int or max_bytes < SLAB_BYTES):
            raise ValueError(f"max_bytes is {max_bytes!r}; allowed: None or a whole number from {SLAB_BYTES} on")
        self.slab_bytes = SLAB_BYTES
        self.max_slabs = None if max_bytes is None else max_bytes // SLAB_BYTES
        self._slabs = 0
        self._free: list[torch.Tensor] = []

    @property
    def nbytes(self) -> int:
        """Host memory taken."""
        return self._slabs * self.slab_bytes

    @property
    def nbytes_used(self) -> int:
        """Host memory taken by caches that are out."""
        return (self._slabs - len(self._free)) * self.slab_bytes

    def release(self) -> None:
        """Give up the host memory that no cache lies in."""
        self._slabs -= len(self._free)
        self._free.clear()

    def __repr__(self) -> str:
        return f"HostTier({self.nbytes_used >> 20} of {self.nbytes >> 20} MiB used)"

    def swap_out(self, cache: PagedMLACache) -> None:
        """Move all that `cache` holds to the host and free its memory on the device. Waits until that is done.

        Raises:
            ValueError: A cache that is out already, in a forward pass, a pool's, or with layers beside latents.
            PoolExhausted: (a ValueError) `max_bytes` is reached. The cache is unchanged.
        """
        self._check(cache)
        blocks = cache.table.blocks()
        layers = [layer for layer in cache.mla_layers if layer.layout is not None]
        loads = _loads(layers, len(blocks), self.slab_bytes)
        slabs = self._take(len(loads))
        swapped = SwappedBlocks(len(blocks), loads, slabs)
        # The slabs come back when the last cache that shares them is swapped in, reset or dropped.
        weakref.finalize(swapped, self._free.extend, slabs)
        index = {device: torch.tensor(blocks, device=device) for device in {load.device for load in loads}}
        for load, slab in zip(loads, slabs, strict=True):
            staging = torch.empty(load.nbytes, dtype=torch.uint8, device=load.device)
            for part in load.parts:
                pages: Any = layers[part.layer].pages
                out = staging[part.offset : part.offset + part.nbytes]
                kernels.take_blocks(pages, index[load.device][part.first : part.stop], out)
            slab[: load.nbytes].copy_(staging, non_blocking=True)
        _wait(index)
        cache.table.leave(swapped)
        for layer in layers:
            _empty(layer)

    def swap_in(self, cache: PagedMLACache) -> None:
        """Bring back what `swap_out` took, of this tier or another, into blocks of the cache's own pool.

        Raises:
            ValueError: A cache that isn't out.
            PoolExhausted: (a ValueError) The pool has no room. As after running out of device memory, the cache is
                still out.
        """
        swapped = cache.table.away
        if not isinstance(swapped, SwappedBlocks):
            raise ValueError("cache: it isn't swapped out, so there is nothing to bring back")
        layers = [layer for layer in cache.mla_layers if layer.layout is not None]
        blocks = cache.table.allocator.allocate(swapped.count)
        try:
            index = {device: torch.tensor(blocks, device=device) for device in {load.device for load in swapped.loads}}
            for layer in layers:
                layer.grow(cache.table.allocator.num_blocks)
            for load, slab in zip(swapped.loads, swapped.slabs, strict=True):
                staging = slab[: load.nbytes].to(load.device, non_blocking=True)
                for part in load.parts:
                    pages: Any = layers[part.layer].pages
                    source = staging[part.offset : part.offset + part.nbytes]
                    kernels.put_blocks(pages, index[load.device][part.first : part.stop], source)
            _wait(index)
        except BaseException:
            cache.table.allocator.release(blocks)
            cache.table.allocator.shrink()
            for layer in layers:
                _empty(layer)
            raise
        cache.table.come_back(blocks)

    @staticmethod
    def _check(cache: PagedMLACache) -> None:
        if not isinstance(cache, PagedMLACache):
            raise ValueError(f"cache is a {type(cache).__name__}; allowed: a PagedMLACache")
        if cache._step is not None:
            raise ValueError("cache: a forward pass over it is going on; swap it out between passes")
        if not cache.table.alone:
            raise ValueError(
                "cache: its blocks are a PrefixPool's, which other caches use; allowed: a cache of its own"
            )
        if not cache.is_all_mla:
            raise ValueError(
                "cache: it has layers that hold more than latents, or none; only latents can be swapped out"
            )
        cache.table.check_here()

    def _take(self, count: int) -> list[torch.Tensor]:
        """`count` slabs, free ones first."""
        new = max(0, count - len(self._free))
        if self.max_slabs is not None and self._slabs + new > self.max_slabs:
            raise PoolExhausted(
                f"max_bytes: the tier has {self.max_slabs} slabs of {self.slab_bytes} bytes, "
                f"{self._slabs - len(self._free)} of them in use, and {count} more are needed; swap in or drop "
                "another cache, or use a larger tier"
            )
        options: Any = {"dtype": torch.uint8, "device": "cpu", "pin_memory": torch.cuda.is_available()}
        with torch.inference_mode(False):  # else they could only be filled in inference mode
            made = [torch.empty(self.slab_bytes, **options) for _ in range(new)]
        self._slabs += new
        return made + [self._free.pop() for _ in range(count - new)]


def _empty(layer: PagedMLALayer) -> None:
    """Give up a layer's pages."""
    assert layer.layout is not None
    layer.store.pages = layer.layout.allocate(0, layer.device)


def _wait(devices: dict[torch.device, torch.Tensor]) -> None:
    """Until all copies of these devices' current streams are done."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
