"""The cache: blocks on the host, latents in pages."""

from .blocks import PoolExhausted
from .host import HostTier
from .paged import PagedMLACache
from .report import MemoryReport

__all__ = ["HostTier", "MemoryReport", "PagedMLACache", "PoolExhausted"]
