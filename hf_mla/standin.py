"""What stands in for the forward of a module in steps over a paged cache, and when it may.

A stand-in lies on the instance, computes in a step that it is for, and calls the class's own forward in any other; so
taking it off restores the module. Copies and pickles carry it along.
"""

import inspect
import weakref
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn

from .attention import ActiveStep, PatchKey, paged_step


class Kernels(NamedTuple):
    """The modules of kernels."""

    fused: Any
    route: Any


@lru_cache
def triton_kernels() -> Any:
    """`Kernels`, or None where Triton can't be imported."""
    try:
        from .kernels import triton_fused, triton_route
    except Exception:  # broken binary packages raise anything
        return None
    return Kernels(triton_fused, triton_route)


def runs_on(x: torch.Tensor) -> bool:
    """Whether the kernels are for tensors like `x`; tests put another rule here."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)


def is_plain(x: torch.Tensor, *weights: Any) -> bool:
    """Whether `x` and all weights are ordinary tensors of one dtype and device that the kernels are for."""
    return (
        type(x) is torch.Tensor
        and runs_on(x)
        and triton_kernels() is not None
        and all(
            type(w) in (nn.Parameter, torch.Tensor)
            and w.dtype == x.dtype
            and w.device == x.device
            and w.is_contiguous()
            for w in weights
        )
    )


def is_bare(module: Any) -> bool:
    """Whether calling `module` would run its forward and nothing else, so that its work may be done without it."""
    forward = module.__dict__.get("forward")
    hooks = module._forward_hooks or module._forward_pre_hooks
    return not hooks and (forward is None or isinstance(forward, StandIn))


class StandIn:
    """Stands in for the forward of a module that has none of its own on the instance.

    Args:
        key: The decoder's key.
        module: The module, held weakly.
    """

    decodes_only = False  # whether it is for absorbed steps of one new column; else any step will do

    def __init__(self, key: PatchKey, module: nn.Module):
        self.key = key
        self.module = weakref.ref(module)

    def __reduce__(self) -> tuple:  # a weak reference can't be copied or pickled
        return type(self), (self.key, self.module())

    @property
    def __signature__(self) -> inspect.Signature:
        module: Any = self.module()
        return inspect.signature(type(module).forward.__get__(module))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The fused computation where the step allows it, else the class's forward."""
        module: Any = self.module()
        step = paged_step(self.key)
        if step is not None and self._may_fuse(step):
            result = self.fused(module, step, *args, **kwargs)
            if result is not NotImplemented:
                return result
        return type(module).forward(module, *args, **kwargs)

    def fused(self, module: Any, step: ActiveStep, *args: Any, **kwargs: Any) -> Any:
        """What `forward` returns, or NotImplemented where the class's own has to run."""
        raise NotImplementedError

    def _may_fuse(self, step: ActiveStep) -> bool:
        decodes = step.plan.absorbed and step.plan.extension.kv_lens.shape[1] == 1
        return (
            (decodes or not self.decodes_only)
            and not torch.is_grad_enabled()
            and not torch.is_autocast_enabled("cuda")
            and not torch.compiler.is_compiling()
        )
