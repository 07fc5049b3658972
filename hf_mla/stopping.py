"""generate looks whether to stop one step late, so that the host never waits for the GPU.

transformers does so on Apple's GPUs only (DeferredStopCheck): the flag that all rows have finished is copied
asynchronously and read after the next step was queued; where it says stop, that step is undone. Where a decode step is
one launch, the waiting is a fifth of it on CUDA too, so over paged caches it is done there as well.
transformers before 5.17 can't do it.
"""

from typing import Any

import torch
from transformers.generation import utils

from .cache import PagedMLACache


def may_look_late(device: torch.device, cache: Any) -> bool:
    """Whether one step too many does no harm: it can be undone, and no limit of the pool can refuse it."""
    return (
        device.type == "cuda"
        and isinstance(cache, PagedMLACache)
        and cache.runs_ahead
        and cache.is_all_mla
        and cache.options.max_tokens is None
    )


def install() -> None:
    """Have generate's loop use `PagedStopCheck`; done once, at import."""
    stock: Any = getattr(utils, "DeferredStopCheck", None)
    if stock is None or stock.__name__ == "PagedStopCheck":
        return

    class PagedStopCheck(stock):
        """Also for paged caches on CUDA; the random numbers of the step too many are given back."""

        def __init__(self, input_ids: torch.LongTensor, *args: Any):
            super().__init__(input_ids, *args)
            on_gpu = input_ids.device.type == "cuda"
            self.generator = torch.cuda.default_generators[input_ids.device.index] if on_gpu else None
            self.offsets = (0, 0)  # of the random numbers after the last two steps

        @staticmethod
        def is_supported(device: torch.device, cache: Any, cache_is_returned: bool, is_assistant: bool) -> bool:
            late = not is_assistant and may_look_late(device, cache)
            return late or stock.is_supported(device, cache, cache_is_returned, is_assistant)

        def __call__(self, *args: Any) -> bool:
            if self.generator is not None:
                self.offsets = self.offsets[1], self.generator.get_offset()
            return super().__call__(*args)

        def finish(self) -> int:
            undone = super().finish()
            if undone and self.generator is not None:
                self.generator.set_offset(self.offsets[0])
            return undone

    utils.DeferredStopCheck = PagedStopCheck
