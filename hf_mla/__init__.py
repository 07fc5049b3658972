"""Multi-head latent attention for Hugging Face transformers: decode from a paged cache of compressed latents.

hf_mla.patch(model)
model.generate(**inputs, cache_implementation="paged_mla")
"""

from . import compat

compat.check_version()

from . import batching, compiled, generation, stopping  # noqa: E402
from .cache import HostTier, MemoryReport, PagedMLACache, PoolExhausted  # noqa: E402
from .config import MLAConfig  # noqa: E402
from .parallel import tp_plan  # noqa: E402
from .patch import disable, enable, patch, patched, unpatch  # noqa: E402
from .pool import PrefixPool  # noqa: E402

__version__ = "0.1.0"
__all__ = [
    "HostTier",
    "MLAConfig",
    "MemoryReport",
    "PagedMLACache",
    "PoolExhausted",
    "PrefixPool",
    "disable",
    "enable",
    "patch",
    "patched",
    "tp_plan",
    "unpatch",
]

generation.install()
stopping.install()
compiled.install()
batching.install()
