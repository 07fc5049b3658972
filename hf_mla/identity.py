"""What the latents of a text depend on beside its tokens: weights, config, adapters, and whoever changes activations.

Weights are told apart by their values, so a fingerprint holds from one process to the next. Reading all of them takes
one pass over their memory, so it is done again only when something looks changed: an address, a version counter, an
adapter's state, a module's number (an epsilon, a scale), or one of the values that are sampled from every tensor.
"""

import hashlib
import itertools
import json
import uuid
import weakref
from typing import Any

import torch
from torch import nn

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SAMPLES = 16  # of each tensor, at least
AT_ONCE = 1 << 24  # values
RUN = 64  # neighbouring values that are summed before they are weighted by place
ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # spreads places over 64 bits; products wrap

# What a config says that has no part in a forward pass.
UNRELATED = (
    "transformers_version",
    "dtype",
    "use_cache",
    "architectures",
    "id2label",
    "label2id",
    "attn_implementation",
)

# Numbers of modules that change by themselves or have no part in a forward pass.
IDLE_NUMBERS = ("training", "gradient_checkpointing", "max_seq_len_cached")

_process = uuid.uuid4().hex  # of what has no meaning in another process
_count = itertools.count()
_numbers: dict[int, tuple[weakref.ref, int]] = {}  # by a hook's id, which another may get once it is gone
_seen: "weakref.WeakKeyDictionary[nn.Module, tuple[tuple, bytes]]" = weakref.WeakKeyDictionary()


@torch.no_grad()
def fingerprint(decoder: nn.Module) -> bytes:
    """32 bytes that are the same for equal weights, config, adapters and hooks.

    Raises:
        ValueError: Weights that aren't at hand, as under CPU offload.
    """
    tensors, numbers, switches = _look(decoder)
    addresses = tuple((id(t), t.data_ptr(), -1 if t.is_inference() else t._version) for _, t in tensors)
    state = addresses, _config_of(decoder), numbers, switches, _samples(tensors)
    seen = _seen.get(decoder)
    if seen is not None and seen[0] == state:
        return seen[1]
    digest = hashlib.sha256(repr((_config_of(decoder), sorted(numbers), switches)).encode())
    for name, tensor in tensors:
        digest.update(repr((name, tuple(tensor.shape), str(tensor.dtype), _checksum(tensor))).encode())
    _seen[decoder] = state, digest.digest()
    return digest.digest()


def _look(decoder: nn.Module) -> tuple[list[tuple[str, torch.Tensor]], list[tuple], list[tuple]]:
    """Tensors by name, modules' own numbers, and adapters and hooks; in one go, since every prompt waits for it."""
    tensors: list[tuple[str, torch.Tensor]] = []
    numbers: list[tuple] = []
    switches: list[tuple] = []
    for name, module in decoder.named_modules():
        own = module.__dict__
        for attribute, value in own.items():
            if type(value) in (int, float, bool) and attribute[0] != "_" and attribute not in IDLE_NUMBERS:
                numbers.append((name, attribute, value))
        for group in (own["_parameters"], own["_buffers"]):
            for attribute, tensor in group.items():
                if tensor is not None:
                    tensors += _parts_of(f"{name}.{attribute}", tensor)
        if own["_forward_hooks"] or own["_forward_pre_hooks"] or "merged_adapters" in own:
            switches += _switches_of(name, module)
    return tensors, numbers, switches


def _config_of(decoder: Any) -> str:
    values = {k: v for k, v in decoder.config.to_dict().items() if k not in UNRELATED and not k.startswith("_")}
    return json.dumps([type(decoder).__name__, values], sort_keys=True, default=str)


def _parts_of(name: str, tensor: Any) -> list[tuple[str, torch.Tensor]]:
    """A tensor, or the ordinary ones that one of another class (quantised, sharded) is made of."""
    if tensor.is_meta:
        raise ValueError(
            f"model: {name} is offloaded, so what the model computes can't be told; a pool of prefixes needs all "
            "weights in memory"
        )
    if type(tensor) in (nn.Parameter, torch.Tensor) or not hasattr(tensor, "__tensor_flatten__"):
        return [(name, tensor)]
    parts, _ = tensor.__tensor_flatten__()
    return [found for part in parts for found in _parts_of(f"{name}.{part}", getattr(tensor, part))]


def _samples(tensors: list[tuple[str, torch.Tensor]]) -> bytes:
    """Some values of every tensor: edits through `.data` leave no other trace."""
    groups: dict[tuple, list[torch.Tensor]] = {}
    for _, tensor in tensors:
        count = tensor.numel()
        step = max(1, count // SAMPLES)
        if tensor.is_contiguous() and tensor.dtype.itemsize > 1:
            part = tensor.as_strided((-(-count // step),), (step,))
        else:
            part = _integers(tensor)[::step]
        groups.setdefault((part.device, part.dtype), []).append(part)
    return b"".join(torch.cat(parts).view(torch.uint8).cpu().numpy().tobytes() for parts in groups.values())


def _integers(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor's bits, [n]."""
    flat = tensor.detach().reshape(-1)
    return flat.view(INTEGERS[flat.element_size()]) if flat.element_size() in INTEGERS else flat.view(torch.uint8)


def _checksum(tensor: torch.Tensor) -> int:
    """Of values and, but for neighbours, their places; integers, so the same on every device."""
    flat = _integers(tensor)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, len(flat), AT_ONCE):  # a sum in int64 takes a copy in int64
        part = flat[start : start + AT_ONCE]
        whole = len(part) // RUN * RUN
        sums = torch.cat([part[:whole].view(-1, RUN).sum(1, dtype=torch.int64), part[whole:].to(torch.int64)])
        places = torch.arange(start + 1, start + len(sums) + 1, device=flat.device) * ODD
        total += (sums * (places ^ (places >> 29))).sum()
    return int(total)


def _switches_of(name: str, module: nn.Module) -> list[tuple]:
    """Which adapters act and how much, and hooks, which are known to this process alone."""
    found: list[tuple] = []
    if hasattr(module, "merged_adapters"):
        attributes = ("_disable_adapters", "_active_adapter", "merged_adapters", "scaling")
        found.append((name, *(repr(getattr(module, attribute, None)) for attribute in attributes)))
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    hooks = [h for h in hooks if not getattr(h, "__module__", "").startswith("transformers.utils.output_capturing")]
    if hooks:
        found.append((name, _process, *map(_number_of, hooks)))
    return found


def _number_of(hook: Any) -> int:
    """A number that this hook alone ever has; a new one at each call where its life can't be followed."""
    held, number = _numbers.get(id(hook), (None, 0))
    if held is not None and held() is hook:
        return number
    number = next(_count)
    try:
        _numbers[id(hook)] = weakref.ref(hook), number
    except TypeError:
        _numbers.pop(id(hook), None)
    return number
