"""The cache: blocks on the host, latents in pages."""

from .blocks import PoolExhausted
from .paged import PagedMLACache
from .report import MemoryReport

__all__ = ["MemoryReport", "PagedMLACache", "PoolExhausted"]
