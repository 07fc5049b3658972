"""Absorption from whatever kv_b_proj is: plain, subclassed, adapted, packed; never stale, never a second copy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import BLOCK, PAGED
from tiny import GREEDY, build, prompts, relative_error, scores_of, twin
from torch import nn

import hf_mla
from hf_mla.absorb import absorb_query, absorbed_weights, project_back

NOPE, V, RANK, HEADS = 20, 28, 40, 5
GREEDY_8 = {**prompts([3, 20]), "max_new_tokens": 8, **GREEDY}


def layers_of(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "kv_b_proj")]


def linear(bias: bool = False) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(RANK, HEADS * (NOPE + V), bias=bias)


def attend(projection: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """One query over three latents, absorbed and expanded: two [1, 1, H, V]."""
    torch.manual_seed(1)
    q, ckv = torch.randn(1, HEADS, 1, NOPE), torch.randn(1, 3, RANK)
    keys, values = projection(ckv).view(1, 3, HEADS, NOPE + V).transpose(1, 2).split([NOPE, V], -1)
    expanded = ((q @ keys.transpose(2, 3)).softmax(-1) @ values).transpose(1, 2)
    weights = absorbed_weights(projection, NOPE, V, RANK, ckv)
    scores = torch.einsum("bshr,btr->bhst", absorb_query(q, weights), ckv)
    latents = torch.einsum("bhst,btr->bshr", scores.softmax(-1), ckv)
    return project_back(latents, weights), expanded


class Scaled(nn.Linear):
    """A subclass whose forward isn't its weight's."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows) * 3 + 0.5


class Packed(nn.Module):
    """A quantised layer without `.weight`, as some keep theirs."""

    def __init__(self, source: nn.Linear):
        super().__init__()
        self.scale = source.weight.abs().amax(1, keepdim=True) / 127
        self.packed = (source.weight / self.scale).round().to(torch.int8)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(rows, self.packed * self.scale)


class Tagged(torch.Tensor):
    """A tensor subclass that computes with twice what its memory holds."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is nn.functional.linear:
            plain = [a.as_subclass(torch.Tensor) if isinstance(a, Tagged) else a for a in args]
            return function(plain[0], 2 * plain[1], *plain[2:])
        return super().__torch_function__(function, types, args, kwargs or {})


def tagged() -> nn.Module:
    projection = linear()
    weight = projection.weight.detach().as_subclass(Tagged)
    del projection.weight
    projection.weight = weight
    return projection


@pytest.mark.parametrize(
    "make",
    [
        linear,
        lambda: linear(bias=True),
        lambda: Scaled(RANK, HEADS * (NOPE + V)),
        lambda: Packed(linear()),
        tagged,
        lambda: nn.Sequential(linear(), nn.Identity()),
    ],
    ids=["plain", "bias", "subclass", "packed", "tensor subclass", "wrapped"],
)
@torch.no_grad()
def test_absorbed_is_expanded(make: Callable[[], nn.Module]) -> None:
    absorbed, expanded = attend(make())
    assert relative_error(absorbed, expanded) < 1e-5


def test_a_plain_weight_is_viewed_and_nothing_is_kept() -> None:
    projection = linear()
    weights = absorbed_weights(projection, NOPE, V, RANK, torch.zeros(1))
    assert weights.w_uk._base is not None and weights.w_uk.data_ptr() == projection.weight.data_ptr()
    storage = projection.weight.untyped_storage().data_ptr()
    assert weights.w_uv.untyped_storage().data_ptr() == storage and weights.bias_v is None


def assert_as_unpatched(stock: Any, patched: Any, tolerance: float = 1e-4) -> torch.Tensor:
    expected = scores_of(stock.generate(**GREEDY_8))
    assert relative_error(scores_of(patched.generate(**GREEDY_8, **PAGED)), expected) < tolerance
    return expected


def pair_of(change: Callable[[Any], Any]) -> tuple[Any, Any]:
    """(stock, patched), both changed alike before the patch."""
    stock = change(build(num_hidden_layers=2))
    return stock, hf_mla.patch(change(build(num_hidden_layers=2)), block_size=BLOCK)


def test_weights_loaded_edited_and_replaced_after_patch() -> None:
    stock, patched = pair_of(lambda model: model)
    seen = [assert_as_unpatched(stock, patched)]
    other = build(seed=3, num_hidden_layers=2).state_dict()
    for model in (stock, patched):
        model.load_state_dict(other)
    seen.append(assert_as_unpatched(stock, patched))
    for model in (stock, patched):
        with torch.no_grad():
            layers_of(model)[1].kv_b_proj.weight.mul_(-1.5)
    seen.append(assert_as_unpatched(stock, patched))
    for model in (stock, patched):
        layers_of(model)[0].kv_b_proj = Packed(layers_of(model)[0].kv_b_proj).requires_grad_(False)
    seen.append(assert_as_unpatched(stock, patched))
    assert all(relative_error(a, b) > 1e-4 for a, b in zip(seen, seen[1:], strict=False))


def test_lora_adapters_with_a_bias_are_switched_while_patched() -> None:
    peft = pytest.importorskip("peft")

    def adapted(model: Any) -> Any:
        torch.manual_seed(5)
        options = {"r": 4, "lora_alpha": 32, "target_modules": ["kv_b_proj"], "init_lora_weights": False}
        model = peft.get_peft_model(model, peft.LoraConfig(**options), "one")
        model.add_adapter("two", peft.LoraConfig(**options, lora_bias=True))
        for name, parameter in model.named_parameters():
            if "lora_B.two.bias" in name:
                parameter.data.normal_()
        return model.eval()

    stock, patched = pair_of(adapted)
    seen = []
    for name in ("one", "two", "one"):
        for model in (stock, patched):
            model.set_adapter(name)
        seen.append(assert_as_unpatched(stock, patched))
    assert relative_error(seen[1], seen[0]) > 1e-2 and relative_error(seen[2], seen[0]) < 1e-5
    with stock.disable_adapter(), patched.disable_adapter():
        assert relative_error(assert_as_unpatched(stock, patched), seen[0]) > 1e-2
    for model in (stock, patched):
        model.merge_adapter()
    assert relative_error(assert_as_unpatched(stock, patched), seen[0]) < 1e-3


def test_nothing_is_saved(tmp_path: Path) -> None:
    model = build(num_hidden_layers=2)
    names = set(model.state_dict())
    patched = hf_mla.patch(twin(model), block_size=BLOCK)
    patched.generate(**GREEDY_8, **PAGED)
    assert set(patched.state_dict()) == names
    assert sum(p.numel() for p in patched.parameters()) == sum(p.numel() for p in model.parameters())
