"""The decode step in a CUDA graph: one launch instead of the few thousand that Python would issue.

A graph is captured the first time that a batch size (rounded up to a bucket) and a table width (a power of two)
decode, in a fraction of a second and without torch.compile, and is kept for later calls. What changes from step to
step lives in fixed buffers that are refreshed before each replay: token, position, stored length, slot and block table
of each row, and the address of each layer's pages, which the kernels read from memory, so that a graph serves any
cache of its layout.

    b rows of the bucket, M table columns; rows beyond the batch repeat the last one's token, store and see nothing

A step that can't be captured runs eagerly, and the reason is logged once.
"""

import logging
import operator
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.utils import logging as transformers_logging

from . import compat, experts, kernels
from .attention import ActiveStep
from .cache import PagedMLACache
from .cache.layer import PagedMLALayer
from .cache.sequences import Extension
from .cache.step import DeviceStep, StepPlan
from .standin import StandIn

logger: logging.Logger = transformers_logging.get_logger(__name__)

MAX_GRAPHS = 16  # least recently used ones go first; a graph of DeepSeek-V2-Lite takes some tens of MiB
MIN_TABLE_COLUMNS = 16

# What a decode call may bring; anything else (hidden states wanted, packed sequences ...) runs eagerly.
KNOWN_ARGUMENTS = {
    "input_ids",
    "attention_mask",
    "position_ids",
    "use_cache",
    "return_dict",
    "cache",
    "past_key_values",
}


def bucket_of(rows: int) -> int:
    """Batch size that a graph for `rows` rows is captured with: 1, 2, 4, then multiples of 8."""
    return rows if rows <= 2 else 4 if rows <= 4 else -(-rows // 8) * 8


def columns_of(columns: int) -> int:
    """Table columns that a graph for `columns` used ones has: the next power of two, at least 16."""
    return max(MIN_TABLE_COLUMNS, 1 << (columns - 1).bit_length())


_address = operator.methodcaller("data_ptr")


class Weights:
    """Every parameter and buffer of a decoder: the dict that owns it, its name there, itself and its address."""

    def __init__(self, decoder: nn.Module):
        found = [
            (owner, name, tensor)
            for module in decoder.modules()
            for owner in (module._parameters, module._buffers)
            for name, tensor in owner.items()
            if tensor is not None
        ]
        self.owners: list[dict] = [owner for owner, _, _ in found]
        self.names = [name for _, name, _ in found]
        self.tensors = [tensor for _, _, tensor in found]
        self.addresses = [tensor.data_ptr() for tensor in self.tensors]

    def changed(self) -> bool:
        """Whether one has been exchanged or moved. Read at every step, so in C's loops: some 300 weights in 40 us."""
        same = all(map(operator.is_, map(dict.get, self.owners, self.names), self.tensors))
        return not (same and all(map(operator.eq, map(_address, self.tensors), self.addresses)))


@dataclass
class Captured:
    """One graph and the buffers around it.

    Args:
        graph: The captured step.
        input_ids, position_ids: [b, 1] int64.
        device_step: Table [b, M], lengths [b, 1] and slots [b] that the kernels read.
        page_bases: [layers] int64, the address of each layer's pages.
        bases: What `page_bases` holds, on the host.
        output: The decoder's output but for the cache, which a graph must not keep alive: tensors that each replay
            overwrites, by name.
        kind: The output's class.
        weights: What the graph read; edits in place are seen by it.
    """

    graph: Any
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    device_step: DeviceStep
    page_bases: torch.Tensor
    bases: list[int]
    output: dict[str, Any]
    kind: Any
    weights: Weights


def _send(values: torch.Tensor, buffer: torch.Tensor) -> None:
    """Copy from the host without waiting for the device, which may be a step behind; `values` is free afterwards."""
    buffer.copy_(values.pin_memory(), non_blocking=True)


def _foreign(decoder: nn.Module) -> str | None:
    """Why the decoder's modules can't be trusted to do the same again without Python, or None."""
    devices = {tensor.device for tensor in (*decoder.parameters(), *decoder.buffers())}
    if len(devices) > 1 or next(iter(devices)).type != "cuda":
        return f"the model is on {', '.join(sorted(map(str, devices)))}, not on one CUDA device"
    for name, module in decoder.named_modules():
        if not type(module).__module__.startswith(("torch.nn.modules.", "transformers.")):
            return f"{name} is a {type(module).__module__}.{type(module).__name__}"
        if module is decoder:
            continue
        if "forward" in module.__dict__ and not isinstance(module.__dict__["forward"], StandIn):
            return f"{name} has another forward"
        if not compat.only_output_collectors(module):
            return f"{name} has hooks"
    return None


def _may_replay(config: Any, kwargs: dict) -> bool:
    """Cheap conditions, checked at every step; what they refuse is ordinary, so nothing is said."""
    ids = kwargs.get("input_ids")
    if ids is None or not ids.is_cuda or ids.shape[1] != 1:
        return False
    if kwargs.get("attention_mask") is None or kwargs.get("position_ids") is None:
        return False
    others = (value for name, value in kwargs.items() if name not in KNOWN_ARGUMENTS)
    if any(value is not None and value is not False for value in others):
        return False
    if any(getattr(config, f"output_{name}", False) for name in ("attentions", "hidden_states", "router_logits")):
        return False
    return not (
        torch.is_grad_enabled()
        or torch.is_autocast_enabled("cuda")
        or torch.cuda.is_current_stream_capturing()
        or torch.compiler.is_compiling()
    )


class DecodeGraphs:
    """The captured decode steps of one decoder.

    Args:
        backend: Kernels asked for; graphs need those that don't plan on the host.
    """

    def __init__(self, backend: str):
        self.backend = backend
        self._graphs: OrderedDict[tuple, Captured | None] = OrderedDict()
        self._lock = threading.Lock()
        self._pool: Any = None
        self._said: set[str] = set()

    def __reduce__(self) -> tuple:  # graphs belong to this process and this model
        return DecodeGraphs, (self.backend,)

    def run(self, decoder: Any, step: ActiveStep, kwargs: dict) -> Any:
        """The output of an absorbed step, replayed or captured, or None where it has to run from Python."""
        if not _may_replay(decoder.config, kwargs) or not self._lock.acquire(blocking=False):
            return None
        try:
            return self._replay(decoder, step, kwargs)
        finally:
            self._lock.release()

    def _say(self, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            logger.warning(f"hf_mla: decode steps run eagerly, without a CUDA graph: {reason}")

    def _replay(self, decoder: Any, step: ActiveStep, kwargs: dict) -> Any:
        """The step's output, or None where it has to run eagerly."""
        ids, plan, cache = kwargs["input_ids"], step.plan, step.cache
        layers = cache.mla_layers
        for layer in layers:
            layer.grow(plan.num_blocks)
        layouts = tuple(layer.layout for layer in layers)
        columns = columns_of(max(plan.block_table.shape[1], cache.expected_columns))
        bucket = bucket_of(ids.shape[0])
        experts_name = experts.decode_name(getattr(decoder.config, "_experts_implementation", None), True)
        key = (bucket, columns, layouts, experts_name, torch.cuda.current_stream(ids.device).cuda_stream)
        captured = self._graphs.get(key)
        if captured is not None and captured.weights.changed():
            self._graphs.clear()
            captured = None
        if key not in self._graphs:
            return self._capture(key, decoder, step, kwargs)
        self._graphs.move_to_end(key)
        if captured is None:
            return None
        self._refresh(captured, step, ids, kwargs["position_ids"])
        captured.graph.replay()
        for layer in layers:
            layer.length += 1
        return self._output(captured, cache, ids.shape[0])

    @staticmethod
    def _output(captured: Captured, cache: PagedMLACache, rows: int) -> Any:
        values = dict(captured.output)
        values["last_hidden_state"] = values["last_hidden_state"][:rows].clone()
        values[compat.CACHE_NAME] = cache
        return captured.kind(**values)

    @staticmethod
    def _refresh(captured: Captured, step: ActiveStep, ids: torch.Tensor, positions: torch.Tensor) -> None:
        """Put a step's data into the buffers; rows beyond the batch see and store nothing."""
        plan, rows = step.plan, ids.shape[0]
        target = captured.device_step
        captured.input_ids[:rows].copy_(ids)
        captured.position_ids[:rows].copy_(positions)
        if rows < captured.input_ids.shape[0]:
            captured.input_ids[rows:].copy_(ids[-1:])
            captured.position_ids[rows:].copy_(positions[-1:])
            target.kv_lens[rows:].zero_()
            target.slot_mapping[rows:].fill_(-1)
        _send(plan.block_table, target.block_table[:rows, : plan.block_table.shape[1]])
        _send(plan.extension.kv_lens, target.kv_lens[:rows])
        _send(plan.extension.slot_mapping, target.slot_mapping[:rows])
        bases = [layer.address if isinstance(layer, PagedMLALayer) else 0 for layer in step.cache.layers]
        if bases != captured.bases:
            _send(torch.tensor(bases, dtype=torch.int64, device="cpu"), captured.page_bases)
            captured.bases = bases

    def _capture(self, key: tuple, decoder: Any, step: ActiveStep, kwargs: dict) -> Any:
        """Run the step eagerly over the graph's buffers, capture it, and return the eager output."""
        reason = _foreign(decoder) or self._unfit_backend(step)
        if reason is not None:
            self._say(reason)
            self._graphs[key] = None
            return None
        lengths = [layer.length for layer in step.cache.mla_layers]
        original_plan = step.plan
        generator = torch.cuda.default_generators[kwargs["input_ids"].device.index]
        random_state = generator.clone_state()
        try:
            captured, output = self._record(key, decoder, step, kwargs)
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._say(f"the capture failed: {str(error).splitlines()[0]}")
            self._graphs[key] = None
            # A broken capture leaves the generator waiting for its end and the memory pool in use.
            generator.graphsafe_set_state(random_state)
            self._pool = None
            for layer, length in zip(step.cache.mla_layers, lengths, strict=True):
                layer.length = length
            return None
        finally:
            step.plan = step.cache._step = original_plan
        self._graphs[key] = captured
        while len(self._graphs) > MAX_GRAPHS:
            self._graphs.popitem(last=False)
        return output

    def _unfit_backend(self, step: ActiveStep) -> str | None:
        layer = step.cache.mla_layers[0]
        assert layer.layout is not None
        try:
            kernels.resolve_backend(
                self.backend,
                device=layer.device,
                dtype=layer.layout.dtype,
                num_heads=1,
                kv_lora_rank=layer.layout.kv_lora_rank,
                qk_rope_head_dim=layer.layout.qk_rope_head_dim,
                block_size=layer.layout.block_size,
                graph=True,
            )
        except ValueError as error:
            return str(error)
        return None

    def _buffers(self, bucket: int, columns: int, decoder: nn.Module, cache: PagedMLACache) -> Captured:
        device = cache.mla_layers[0].device

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            with torch.inference_mode(False):  # refreshed outside inference mode too
                return torch.zeros(shape, dtype=dtype, device=device)

        return Captured(
            graph=torch.cuda.CUDAGraph(),
            input_ids=zeros(bucket, 1),
            position_ids=zeros(bucket, 1),
            device_step=DeviceStep(
                block_table=zeros(bucket, columns, dtype=torch.int32),
                kv_lens=zeros(bucket, 1, dtype=torch.int32),
                slot_mapping=zeros(bucket).fill_(-1),
            ),
            page_bases=zeros(len(cache.layers)),
            bases=[],
            output={},
            kind=None,
            weights=Weights(decoder),
        )

    def _record(self, key: tuple, decoder: Any, step: ActiveStep, kwargs: dict) -> tuple[Captured, Any]:
        ids, cache = kwargs["input_ids"], step.cache
        bucket, columns = key[:2]
        captured = self._buffers(bucket, columns, decoder, cache)
        self._refresh(captured, step, ids, kwargs["position_ids"])
        # Planned for the longest rows that the table can hold: the split count has to do for all of them.
        longest = torch.full((bucket, 1), columns * cache.options.block_size, dtype=torch.int32, device="cpu")
        plan = StepPlan(
            extension=Extension([], longest, step.plan.extension.slot_mapping),
            block_table=step.plan.block_table,
            history_slots=None,
            absorbed=True,
            num_blocks=step.plan.num_blocks,
            backend="triton",
            page_bases=captured.page_bases,
        )
        plan._devices[ids.device] = captured.device_step
        step.plan = cache._step = plan
        call = {**kwargs, "input_ids": captured.input_ids, "position_ids": captured.position_ids}

        def run() -> None:
            for layer, length in zip(cache.mla_layers, lengths, strict=True):
                layer.length = length
            result = type(decoder).forward(decoder, **call)
            plan.check_read()
            captured.kind = type(result)
            captured.output = {name: value for name, value in result.items() if name != compat.CACHE_NAME}

        lengths = [layer.length for layer in cache.mla_layers]
        current, side = torch.cuda.current_stream(ids.device), torch.cuda.Stream(ids.device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            run()  # compiles kernels, makes library handles
            output = self._output(captured, cache, ids.shape[0])
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            captured.graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                run()
            finally:
                captured.graph.capture_end()
        current.wait_stream(side)
        return captured, output
