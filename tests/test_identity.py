"""What a pool of prefixes finds is of the same weights, config, adapters, dtypes and hooks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pairs import BLOCK, pair
from test_prefix_pool import batch, both, check, ids_of
from tiny import build, twin

import hf_mla
from hf_mla import PrefixPool, identity


def test_another_models_prefixes_are_not_found() -> None:
    stock, patched = pair()
    pool, inputs = PrefixPool(), batch(ids_of(50))
    both(stock, patched, pool, inputs)
    other = build(seed=1, num_hidden_layers=2)
    other_stock, other = twin(other), hf_mla.patch(other, block_size=BLOCK)
    assert both(other_stock, other, pool, inputs) == [0]
    assert both(other_stock, other, pool, inputs) == [48]
    assert both(stock, patched, pool, inputs) == [48]
    same = hf_mla.patch(twin(stock), block_size=BLOCK)
    assert both(stock, same, pool, inputs) == [48]  # equal weights are an equal model
    check(pool)


EDITS = ["in place", "data", "one value", "exchanged", "loaded", "config", "scale"]


@pytest.mark.parametrize(
    "edit", ["data", *(pytest.param(name, marks=pytest.mark.slow) for name in EDITS if name != "data")]
)
def test_weights_that_changed_find_nothing(edit: str) -> None:
    stock, patched = pair()
    pool, inputs = PrefixPool(), batch(ids_of(50))
    both(stock, patched, pool, inputs)
    for model in (stock, patched):
        weight = model.model.layers[0].self_attn.kv_b_proj.weight
        if edit == "in place":
            weight.detach().mul_(1.25)
        elif edit == "data":
            weight.data = weight.data * 1.25
        elif edit == "one value":
            with torch.no_grad():
                model.model.layers[0].self_attn.kv_a_proj_with_mqa.weight[3, 5] += 1
        elif edit == "exchanged":
            model.model.layers[0].self_attn.kv_b_proj.weight = torch.nn.Parameter(-weight.detach())
        elif edit == "loaded":
            model.load_state_dict(build(seed=3, num_hidden_layers=2).state_dict())
        elif edit == "config":
            model.config.rms_norm_eps = 0.1
        else:
            model.model.layers[1].self_attn.scaling *= 2
    assert both(stock, patched, pool, inputs) == [0]
    assert both(stock, patched, pool, inputs) == [48]


@pytest.mark.slow
def test_adapters_that_are_switched_find_their_own() -> None:
    peft = pytest.importorskip("peft")
    stock, patched = pair()
    settings = peft.LoraConfig(target_modules=["kv_b_proj", "kv_a_proj_with_mqa"], r=4, init_lora_weights=False)
    torch.manual_seed(4)
    stock = peft.get_peft_model(stock, settings)
    patched = peft.get_peft_model(hf_mla.unpatch(patched), settings)
    for model in (stock, patched):
        model.add_adapter("second", settings)
    patched.load_state_dict(stock.state_dict())
    for model in (stock, patched):
        model.eval()
    hf_mla.patch(patched, block_size=BLOCK)
    pool, inputs = PrefixPool(), batch(ids_of(50))
    for found in ([0], [48]):
        for name in ("default", "second"):
            stock.set_adapter(name)
            patched.set_adapter(name)
            assert both(stock, patched, pool, inputs) == found
        with stock.disable_adapter(), patched.disable_adapter():
            assert both(stock, patched, pool, inputs) == found
    stock.merge_adapter()
    patched.merge_adapter()
    assert both(stock, patched, pool, inputs) == [0]


@pytest.mark.slow
def test_a_hook_gone_and_another_in_its_place_in_memory_finds_nothing() -> None:
    stock, patched = pair()
    pool, inputs, addresses = PrefixPool(), batch(ids_of(50)), set()
    for scale in (1.0, 1.5, 2.0, 2.5):

        def hook(module: Any, args: Any, out: torch.Tensor, scale: float = scale) -> torch.Tensor:
            return out * scale

        handles = [model.model.layers[0].mlp.register_forward_hook(hook) for model in (stock, patched)]
        assert both(stock, patched, pool, inputs) == [0]
        assert both(stock, patched, pool, inputs) == [48]
        for handle in handles:
            handle.remove()
        addresses.add(id(hook))
        del hook, handles, handle
    if len(addresses) == 4:
        pytest.skip("no hook got the memory of an earlier one, so nothing was tested")


def test_another_dtype_or_geometry_is_refused_or_finds_nothing() -> None:
    stock, patched = pair()
    pool, inputs = PrefixPool(), batch(ids_of(50))
    both(stock, patched, pool, inputs)
    half = hf_mla.patch(twin(stock).to(torch.bfloat16), block_size=BLOCK)
    with pytest.raises(ValueError, match="holds torch.float32"):
        half.generate(**inputs, max_new_tokens=1, past_key_values=pool)
    hf_mla.patch(patched, block_size=32)
    with pytest.raises(ValueError, match="a pool of its own"):
        patched.generate(**inputs, max_new_tokens=1, past_key_values=pool)
    check(pool)


@pytest.mark.parametrize("at_once", [1 << 24, 640])
def test_a_checksum_is_of_all_values_and_their_places(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "AT_ONCE", at_once)
    weight = torch.randn(97, 80)
    whole = identity._checksum(weight)
    one = weight.clone()
    one[96, 79] += 1
    for edited in (weight.flip(0), -weight, weight.roll(1, 0), weight.roll(1), one, weight[:96]):
        assert identity._checksum(edited) != whole
    assert identity._checksum(weight.t().contiguous().t()) == whole
