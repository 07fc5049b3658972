"""`generate_batch`, `init_continuous_batching` and `generate(cache_implementation="paged")` of patched models.

Where a model is patched, transformers' continuous batching gets the manager of manager.py, and `generate_batch` raises
where it would log an error and hand back less than was asked for. Every other model goes straight through.
"""

import contextlib
import copy
import functools
from collections.abc import Iterator
from typing import Any

from transformers.generation.continuous_batching.continuous_api import ContinuousMixin

from . import compat
from .patch import binding_of


def _with_managers(original: Any) -> Any:
    from .manager import ContinuousBatchingConfig, ContinuousBatchingManager, MLABatchingManager

    @functools.wraps(original)
    def init_continuous_batching(
        self: Any,
        generation_config: Any = None,
        continuous_batching_config: Any = None,
        workload_hints: Any = None,
    ) -> Any:
        found = binding_of(self)
        kept = getattr(self, "_cached_continuous_batching_manager", None)
        if isinstance(kept, ContinuousBatchingManager):
            if found is not None and isinstance(kept, MLABatchingManager) and kept.binding is found[1]:
                return kept
            if found is not None or isinstance(kept, MLABatchingManager):  # patched or unpatched since
                self.destroy_cached_continuous_batching_manager()
        if found is None:
            return original(self, generation_config, continuous_batching_config, workload_hints)
        config = self.generation_config if generation_config is None else generation_config
        if config.eos_token_id is None:
            config = copy.deepcopy(config)
            config.eos_token_id = -1  # no token stops a request
        if continuous_batching_config is None:
            continuous_batching_config = getattr(config, "continuous_batching_config", None)
        return MLABatchingManager(
            self, config, continuous_batching_config or ContinuousBatchingConfig(), workload_hints
        )

    return init_continuous_batching


@contextlib.contextmanager
def _refusals_noted() -> Iterator[list[Exception]]:
    from .manager import refusals

    refused: list[Exception] = []
    token = refusals.set(refused)
    try:
        yield refused
    finally:
        refusals.reset(token)


def _complete(original: Any) -> Any:
    @functools.wraps(original)
    def generate_batch(
        self: Any, inputs: list[list[int]], generation_config: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        if binding_of(self) is None or not inputs:
            return original(self, inputs, generation_config, *args, **kwargs)
        with _refusals_noted() as refused:
            results = original(self, inputs, generation_config, *args, **kwargs)
        if refused:
            raise refused[0]
        config = self.generation_config if generation_config is None else generation_config
        expected = len(inputs) * (config.num_return_sequences or 1)
        failed = {name: result.error for name, result in results.items() if result.error is not None}
        if failed or len(results) < expected:
            name, reason = next(iter(failed.items()), ("", "the generation thread ended, see the log"))
            raise RuntimeError(
                f"generate_batch: {expected - len(results) + len(failed)} of {expected} requests have no whole "
                f"answer; {name} {reason}"
            )
        return results

    return generate_batch


def _refuse(original: Any) -> Any:
    @functools.wraps(original)
    def init_continuous_batching(self: Any, *args: Any, **kwargs: Any) -> Any:
        if binding_of(self) is not None:
            raise ValueError(
                f"model: it is patched, and transformers {compat.VERSION} can't be given a cache of latents for "
                f"continuous batching; versions that can: {compat.BATCHING_SINCE} to {compat.NEWEST}"
            )
        return original(self, *args, **kwargs)

    return init_continuous_batching


def install() -> None:
    """Let a patched model's continuous batching be served from latents; done once, at import."""
    if "_hf_mla" in ContinuousMixin.__dict__:
        return
    ContinuousMixin._hf_mla = True
    if not compat.BATCHING:
        ContinuousMixin.init_continuous_batching = _refuse(ContinuousMixin.init_continuous_batching)
        return
    ContinuousMixin.init_continuous_batching = _with_managers(ContinuousMixin.init_continuous_batching)
    ContinuousMixin.generate_batch = _complete(ContinuousMixin.generate_batch)
