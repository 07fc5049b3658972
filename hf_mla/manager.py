"""transformers' manager of continuous batching over pages of latents.

transformers makes a cache of keys and values sized by `config.head_dim`, which multi-head latent attention hasn't, and
reads and writes it in ways that know no latents. The subclass here

    - makes a BatchCache (cache/batch.py) and leaves the model's attention implementation as it is;
    - lets steps of one new token a request take transformers' fast path, a block table and a CUDA graph, which it
      keeps for flash attention otherwise;
    - refuses what can't be served before anything runs.

Everything else, from the queue to the sampling, is transformers'.
"""

import copy
import logging
from contextvars import ContextVar
from typing import Any

from torch import nn
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.continuous_api import (
    SCHEDULER_MAPPING,
    ContinuousBatchingManager,
    ContinuousBatchProcessor,
)
from transformers.generation.continuous_batching.initialization import (
    resolve_using_hints,
    update_cb_config_after_cache_creation,
)
from transformers.utils import logging as transformers_logging

from .attention import ATTENTION_NAME, ConfigView, PatchKey
from .cache.batch import BatchCache, Capacity
from .config import BLOCK_SIZES
from .families import SERVED
from .patch import binding_of, find_bindings

logger: logging.Logger = transformers_logging.get_logger(__name__)

# Tokens of a request up to which the fast path's tables reach where nothing tells how long requests are.
FAST_PATH_TOKENS = 16384

refusals: ContextVar[list[Exception] | None] = ContextVar("refusals", default=None)


class BatchConfig(ConfigView):
    """The decoder's config as transformers' buffers are to see it: no masks are wanted."""

    @property
    def _attn_implementation(self) -> str:
        return ATTENTION_NAME


def _check_served(model: nn.Module, decoder: Any) -> None:
    name = decoder.config.model_type
    family = SERVED[name]
    if family.way != "absorbed" or family.others:
        served = ", ".join(key for key, value in SERVED.items() if value.way == "absorbed" and not value.others)
        raise ValueError(
            f"model: continuous batching of family {name!r} isn't served, since its cache isn't of latents alone; "
            f"served: {served}"
        )
    if len(find_bindings(model)) > 1:
        raise ValueError("model: it has several patched decoders; continuous batching serves models with one")


def _check_config(config: ContinuousBatchingConfig) -> None:
    if config.page_size not in BLOCK_SIZES:
        raise ValueError(
            f"continuous_batching_config: page_size is {config.page_size}; allowed for latents: "
            f"{', '.join(map(str, BLOCK_SIZES))}"
        )
    if config.varlen_compile_config or config.decode_compile_config or config.default_compile_level:
        raise ValueError(
            "continuous_batching_config: it asks for torch.compile; allowed for a patched model: no compile config "
            "and default_compile_level=0, since it runs its own kernels in CUDA graphs"
        )


class MLABatchingManager(ContinuousBatchingManager):
    """transformers' manager over pages of latents; made by `model.init_continuous_batching` of a patched model.

    `capacity` says how many tokens and requests fit, once the manager was started.

    Raises:
        ValueError: A family, setting or tensor-parallel plan that can't be served.
    """

    def __init__(
        self,
        model: Any,
        generation_config: Any,
        continuous_batching_config: ContinuousBatchingConfig,
        workload_hints: Any = None,
    ) -> None:
        found = binding_of(model)
        if found is None:
            raise ValueError(f"model: {type(model).__name__} isn't patched; call hf_mla.patch(model) first")
        self.decoder, self.binding = found
        _check_served(model, self.decoder)
        _check_config(continuous_batching_config)
        super().__init__(model, generation_config, continuous_batching_config, workload_hints)
        if self.distributed_helper.tp_size > 1:
            raise ValueError("model: it is split by tensor parallelism; continuous batching serves whole models")
        self._resolve(continuous_batching_config, workload_hints)

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        """Nothing to switch: attention is ours in every pass."""

    def _resolve(self, asked: ContinuousBatchingConfig, hints: Any) -> None:
        """Settings that transformers decides by the attention implementation's name."""
        resolved, wanted = self.continuous_batching_config, copy.deepcopy(asked)
        resolve_using_hints(wanted, hints)
        if wanted.max_blocks_per_request is None:
            longest = getattr(self.decoder.config, "max_position_embeddings", FAST_PATH_TOKENS)
            wanted.max_blocks_per_request = -(-min(longest, FAST_PATH_TOKENS) // resolved.page_size)
        resolved.max_blocks_per_request = wanted.max_blocks_per_request
        graphs = asked.use_cuda_graph
        graph = True if graphs is None else graphs if isinstance(graphs, bool) else graphs[1]
        graph = graph and self.binding.config.graphs and self.model.device.type == "cuda"
        # A pass of prompts is planned on the host, so it can't be captured.
        resolved.use_cuda_graph = (False, graph and self.binding.config.backend in ("auto", "triton"))
        if asked.use_async_batching is None:
            resolved.use_async_batching = self.model.device.type == "cuda"

    @property
    def capacity(self) -> Capacity | None:
        """What the pool holds; None before the manager was started."""
        processor: Any = getattr(self, "batch_processor", None)
        return None if processor is None else processor.cache.capacity

    def start(self) -> None:
        """Start the background thread; what can't be allocated is raised here, not there."""
        if self.capacity is None:
            self.batch_processor = self._create_batch_processor()
        super().start()

    def add_request(self, input_ids: list[int], *args: Any, **kwargs: Any) -> str | None:
        """As transformers'.

        Raises:
            ValueError: No tokens; a prompt that the pool can't hold together with the tokens asked for.
        """
        try:
            self._check_request(input_ids, kwargs.get("max_new_tokens", args[1] if len(args) > 1 else None))
        except ValueError as error:
            refused = refusals.get()
            if refused is not None:
                refused.append(error)
            raise
        return super().add_request(input_ids, *args, **kwargs)

    def _check_request(self, input_ids: list[int], max_new_tokens: int | None) -> None:
        if not len(input_ids):
            raise ValueError("input_ids is empty; allowed: at least one token")
        if len(input_ids) == 1 and self.num_return_sequences > 1:
            # transformers computes all but the last token before it forks a request: here, a pass of nothing.
            raise ValueError(
                f"input_ids has 1 token and num_return_sequences is {self.num_return_sequences}; "
                "allowed: at least 2 tokens"
            )
        new = self.generation_config.max_new_tokens if max_new_tokens is None else max_new_tokens
        length, capacity = len(input_ids) + (new or 1), self.capacity
        if capacity is not None and not capacity.requests(length):
            raise ValueError(
                f"input_ids has {len(input_ids)} tokens, and {new or 1} more are wanted; allowed: {capacity.tokens} "
                "together, all that the pool holds; give it more num_blocks or max_memory_percent in the "
                "ContinuousBatchingConfig, or hf_mla.patch a larger max_tokens"
            )

    def _create_batch_processor(self) -> ContinuousBatchProcessor:
        """transformers' processor over a BatchCache; one that is there is reset and used again."""
        if isinstance(getattr(self, "batch_processor", None), ContinuousBatchProcessor):
            return super()._create_batch_processor()
        settings, model = self.continuous_batching_config, self.model
        cache = BatchCache(
            [module for _, module in self.binding.attentions],
            self.binding.config,
            self.decoder.config,
            settings,
            model.device,
            model.dtype,
        )
        self._use_prefix_sharing = cache.use_prefix_sharing
        update_cb_config_after_cache_creation(settings, cache.num_blocks, cache.max_batch_tokens)
        if settings.scheduler_type not in SCHEDULER_MAPPING:
            raise ValueError(
                f"scheduler_type is {settings.scheduler_type!r}; allowed: {', '.join(map(repr, SCHEDULER_MAPPING))}"
            )
        scheduler = SCHEDULER_MAPPING[settings.scheduler_type](
            cache=cache, safety_margin=settings.safety_margin, max_requests_per_batch=settings.max_requests_per_batch
        )
        return ContinuousBatchProcessor(
            cache=cache,
            config=BatchConfig(PatchKey(), self.decoder.config),
            generation_config=self.generation_config,
            continuous_batching_config=settings,
            logit_processor=self.logit_processor,
            input_queue=self.input_queue,
            cancel_queue=self.cancel_queue,
            output_router=self.output_router,
            background_thread_status=self.background_thread_status,
            model_device=model.device,
            model_dtype=model.dtype,
            scheduler=scheduler,
            distributed_helper=self.distributed_helper,
        )
