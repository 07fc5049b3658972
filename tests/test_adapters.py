"""PEFT's adapters on kv_b_proj, in every way that PEFT has to put, switch and take them: as the unpatched model's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import BLOCK, PAGED, assert_same, cache_of, record_steps
from tiny import GREEDY, build, prompts, relative_error, scores_of

import hf_mla
from hf_mla import PagedMLACache

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.slow


TARGETS = ["kv_b_proj", "o_proj"]
LORA = {"r": 4, "lora_alpha": 32, "target_modules": TARGETS, "init_lora_weights": False}
BATCH = prompts([3, 20])


def both(adapt: Callable[[Any], Any]) -> tuple[Any, Any]:
    """(stock, patched) with the same adapters; patched before they come."""
    models = []
    for model in (build(num_hidden_layers=2), hf_mla.patch(build(num_hidden_layers=2), block_size=BLOCK)):
        torch.manual_seed(5)
        models.append(adapt(model).eval())
    return models[0], models[1]


def lora(model: Any) -> Any:
    model = peft.get_peft_model(model, peft.LoraConfig(**LORA), "one")
    model.add_adapter("two", peft.LoraConfig(**LORA))
    return model


def compare(stock: Any, patched: Any, **arguments: Any) -> torch.Tensor:
    """Both generate alike, the patched one from pages; stock's logits."""
    arguments = {**BATCH, "max_new_tokens": 8, **GREEDY, **arguments}
    expected, got = stock.generate(**arguments), patched.generate(**arguments, **PAGED)
    assert type(cache_of(got)) is PagedMLACache
    assert_same(got, expected, 1e-4)
    return scores_of(expected)


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}], ids=["greedy", "beams"])
@pytest.mark.parametrize("names", [["one", "two"], ["two", "__base__"]])
def test_each_row_of_a_batch_may_have_its_own_adapter(
    names: list[str], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, patched = both(lora)
    steps = record_steps(monkeypatch)
    mixed = compare(stock, patched, adapter_names=names, **options)
    assert not any(absorbed for _, absorbed in steps)
    steps.clear()
    alike = compare(stock, patched, **options)  # all rows with the active one, "one"
    assert relative_error(mixed, alike) > 1e-2 and [absorbed for _, absorbed in steps[1:]] == [True] * (len(steps) - 1)


@pytest.mark.slow
def test_rows_with_adapters_of_their_own_find_nothing_of_others_in_a_pool() -> None:
    options = {**LORA, "target_modules": ["q_a_proj", "kv_a_proj_with_mqa"]}  # which change the latents themselves

    def adapt(model: Any) -> Any:
        model = peft.get_peft_model(model, peft.LoraConfig(**options), "one")
        model.add_adapter("two", peft.LoraConfig(**options))
        return model

    stock, patched = both(adapt)
    pool, ids = hf_mla.PrefixPool(), prompts([40])["input_ids"].repeat(2, 1)
    arguments = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 4, **GREEDY}
    for names in (["one", "two"], ["two", "one"], ["one", "one"], ["two", "__base__"]):
        got = patched.generate(**arguments, adapter_names=names, past_key_values=pool)
        assert_same(got, stock.generate(**arguments, adapter_names=names), 1e-4)
        assert pool.reused == [0, 0]


def test_an_adapter_that_begins_at_a_token() -> None:
    """aLoRA leaves what comes before as it is. On kv_b_proj PEFT can't do it: stock gives that four dimensions."""
    token = int(BATCH["input_ids"][1, 10])
    options = {**LORA, "target_modules": ["q_a_proj", "kv_a_proj_with_mqa", "o_proj"], "task_type": "CAUSAL_LM"}

    def adapt(model: Any) -> Any:
        return peft.get_peft_model(model, peft.LoraConfig(**options, alora_invocation_tokens=[token]))

    stock, patched = both(adapt)
    begun = compare(stock, patched)
    plain, _ = both(lambda model: peft.get_peft_model(model, peft.LoraConfig(**options)))
    assert relative_error(begun, scores_of(plain.generate(**BATCH, max_new_tokens=8, **GREEDY))) > 1e-2


@pytest.mark.parametrize("kind", ["PromptTuningConfig", pytest.param("PromptEncoderConfig", marks=pytest.mark.slow)])
def test_virtual_tokens_before_the_prompt(kind: str) -> None:
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=7)
    stock, patched = both(lambda model: peft.get_peft_model(model, config))
    arguments = {**BATCH, "max_new_tokens": 8, **GREEDY}
    whole = scores_of(stock.generate(**arguments, use_cache=False))
    if relative_error(scores_of(stock.generate(**arguments)), whole) > 1e-4:  # it looks for the cache's former name
        pytest.skip("this PEFT repeats the virtual tokens at every step of this transformers' generate")
    assert relative_error(compare(stock, patched), whole) < 1e-4


def test_adapters_are_added_mixed_swapped_and_deleted_while_patched(tmp_path: Path) -> None:
    from peft.utils.hotswap import hotswap_adapter

    stock, patched = both(lora)
    for name in ("one", "two"):
        stock.save_pretrained(tmp_path, selected_adapters=[name])
    seen = [compare(stock, patched)]
    for model in (stock, patched):
        model.add_weighted_adapter(["one", "two"], [0.5, 0.7], "mixed", combination_type="cat")
        model.set_adapter("mixed")
    seen.append(compare(stock, patched))
    for model in (stock, patched):
        model.set_adapter("one")
        hotswap_adapter(model, str(tmp_path / "two"), adapter_name="one")
    seen.append(compare(stock, patched))
    for model in (stock, patched):
        model.set_adapter("two")
    assert relative_error(compare(stock, patched), seen[-1]) < 1e-6  # swapped in place
    for model in (stock, patched):
        model.load_adapter(str(tmp_path / "one"), "again")
        model.set_adapter("again")
        model.delete_adapter("two")
    assert relative_error(compare(stock, patched), seen[0]) < 1e-6
    assert all(relative_error(a, b) > 1e-2 for a, b in zip(seen, seen[1:], strict=False))


def test_unloaded_the_base_model_is_left_and_patched(tmp_path: Path) -> None:
    stock, patched = both(lora)
    adapted = compare(stock, patched)
    base = patched.unload()
    assert relative_error(compare(stock.unload(), base), adapted) > 1e-2
    assert not isinstance(base, peft.PeftModel)


TUNERS: dict[str, Callable[[], Any]] = {
    "dora": lambda: peft.LoraConfig(**LORA, use_dora=True),
    "rslora": lambda: peft.LoraConfig(**LORA, use_rslora=True),
    "loha": lambda: peft.LoHaConfig(r=4, alpha=16, target_modules=TARGETS, init_weights=False),
    "lokr": lambda: peft.LoKrConfig(r=4, alpha=16, target_modules=TARGETS, init_weights=False),
    "ia3": lambda: peft.IA3Config(target_modules=TARGETS, feedforward_modules=[], init_ia3_weights=False),
    "ia3 of inputs": lambda: peft.IA3Config(
        target_modules=TARGETS, feedforward_modules=TARGETS, init_ia3_weights=False
    ),
    "fourier": lambda: peft.FourierFTConfig(n_frequency=50, target_modules=TARGETS, init_weights=False, scaling=500.0),
    "vblora": lambda: peft.VBLoRAConfig(
        r=4, num_vectors=16, vector_length=4, topk=2, target_modules=TARGETS, init_vector_bank_bound=1.0
    ),
    "another copy": lambda: peft.LoraConfig(
        r=4, target_modules=["q_b_proj"], init_lora_weights=False, modules_to_save=["kv_b_proj"]
    ),
}


def disturb(model: Any) -> None:
    """Values for whatever an adapter begins with as zero."""
    generator = torch.Generator().manual_seed(7)
    for weight in model.parameters():
        if weight.requires_grad and not weight.any():
            weight.data.normal_(0, 0.3, generator=generator)
        elif weight.requires_grad:
            weight.data.mul_(1 + 0.3 * torch.rand(weight.shape, generator=generator))


@pytest.mark.slow
@pytest.mark.parametrize("name", TUNERS)
def test_other_adapters_are_followed_on_off_and_merged(name: str) -> None:
    stock, patched = both(lambda model: peft.get_peft_model(model, TUNERS[name]()))
    for model in (stock, patched):
        disturb(model)
    on = compare(stock, patched)
    with stock.disable_adapter(), patched.disable_adapter():
        assert relative_error(compare(stock, patched), on) > 1e-2
    assert relative_error(compare(stock, patched), on) < 1e-6
    if name != "another copy":
        for model in (stock, patched):
            model.merge_adapter()
        assert relative_error(compare(stock, patched), on) < 1e-3
