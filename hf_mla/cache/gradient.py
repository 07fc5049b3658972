"""Gradients end where latents come back from pages: a backward pass says so instead of leaving the history out."""

from typing import Any

import torch


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grad: torch.Tensor) -> None:
        raise RuntimeError(
            "no gradients flow through a PagedMLACache; use use_cache=False or a DynamicCache to differentiate"
        )


def refuse_gradient(out: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """`out`, which was read from pages; where a gradient would have gone on to `source`, a backward pass raises."""
    if torch.is_grad_enabled() and source.requires_grad:
        return _NoGradient.apply(out, source)
    return out
