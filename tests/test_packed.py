"""Prompts of different lengths run without their padding: stock's results, and nothing computed for masked columns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pairs import BLOCK, PAGED, pair, using
from tiny import GREEDY, INSTALLED, build, prompts, relative_error, scores_of
from torch import nn

import hf_mla
from hf_mla import packed
from hf_mla.families import SERVED

RAGGED = [50, 3, 17, 1, 32]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each packed pass."""
    sizes: list[int] = []
    run = packed.run

    def recording(forward: Any, call: dict, plan: Any) -> Any:
        sizes.append(sum(plan.packed[1]))
        return run(forward, call, plan)

    monkeypatch.setattr(packed, "run", recording)
    return sizes


@pytest.mark.parametrize(
    ("length", "to"), [(1, 128), (128, 128), (129, 256), (1000, 1024), (1025, 1152), (2049, 2304), (5000, 5120)]
)
def test_rows_have_few_lengths(length: int, to: int) -> None:
    assert packed.rounded(length) == to


def test_lengthened_rows_give_the_same(passes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "ROUNDS_ON", ("cpu",))
    monkeypatch.setattr(packed, "rounded", lambda length: -(-length // 16) * 16)
    stock, patched = pair()
    arguments = {**prompts(RAGGED), "max_new_tokens": 6, **GREEDY}
    expected, got = stock.generate(**arguments), patched.generate(**arguments, **PAGED)
    assert passes and relative_error(scores_of(got), scores_of(expected)) < 1e-5


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "minicpm3", "mistral4", "longcat_flash"])
def test_prompts_logits_are_stocks(family: str, side: str, passes: list[int]) -> None:
    stock, patched = pair(family)
    batch = prompts(RAGGED, side=side)
    mask = batch["attention_mask"]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = hf_mla.PagedMLACache(block_size=BLOCK)
    with torch.no_grad():
        expected = stock(**batch, position_ids=positions).logits
        got = patched(**batch, position_ids=positions, **using(cache)).logits
    assert passes == ([sum(RAGGED)] if side == "left" else [])  # generate goes on from a right-padded row's last pad
    assert relative_error(got[mask.bool()], expected[mask.bool()]) < 1e-5
    assert cache.memory_report().tokens == sum(RAGGED) and cache.get_seq_length() == 50


@pytest.mark.parametrize("family", [name for name in INSTALLED if SERVED[name].way == "absorbed"])
def test_generates_as_stock(family: str, passes: list[int]) -> None:
    stock, patched = pair(family, num_hidden_layers=3)
    arguments = {**prompts(RAGGED), "max_new_tokens": 6, **GREEDY}
    expected, got = stock.generate(**arguments), patched.generate(**arguments, **PAGED)
    assert relative_error(scores_of(got), scores_of(expected)) < 1e-5
    assert bool(passes) == (not SERVED[family].others)


def test_the_layers_see_no_padding(passes: list[int]) -> None:
    patched = pair()[1]
    seen = []
    forward = nn.Linear.forward

    def recording(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        seen.append(x.shape[:-1].numel())
        return forward(module, x)

    projection = patched.model.layers[1].self_attn.o_proj
    projection.forward = recording.__get__(projection)
    patched.generate(**prompts(RAGGED), max_new_tokens=1, **GREEDY, **PAGED)
    assert seen == [sum(RAGGED)]


@pytest.mark.parametrize(
    "change",
    [
        {"output_hidden_states": True},
        {"output_attentions": True},
        {"attn_implementation": "eager"},
        {"lengths": [50, 50, 49]},
        {"hook": True},
    ],
)
def test_is_not_done_where_someone_looks_inside_or_it_does_not_pay(change: dict, passes: list[int]) -> None:
    stock, patched = pair()
    arguments = {**prompts(change.pop("lengths", RAGGED)), "max_new_tokens": 4, **GREEDY}
    if change.get("output_attentions") or change.get("attn_implementation"):
        change.pop("attn_implementation", None)
        for model in (stock, patched):
            model.set_attn_implementation("eager")
    if change.pop("hook", False):
        patched.model.layers[0].register_forward_hook(lambda *_: None)
    expected = stock.generate(**arguments, **change)
    got = patched.generate(**arguments, **change, **PAGED)
    assert not passes
    assert relative_error(scores_of(got), scores_of(expected)) < 1e-5


def test_a_failed_pass_leaves_the_cache_as_it_was(passes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    stock, patched = pair()
    batch, cache = prompts(RAGGED), hf_mla.PagedMLACache()
    attend = packed.attend_rows
    monkeypatch.setattr(hf_mla.attention, "attend_rows", lambda *a, **k: (_ for _ in ()).throw(RuntimeError("broken")))
    with torch.no_grad(), pytest.raises(RuntimeError, match="broken"):
        patched(**batch, **using(cache))
    assert cache.get_seq_length() == 0 and cache.memory_report().tokens == 0
    monkeypatch.setattr(hf_mla.attention, "attend_rows", attend)
    with torch.no_grad():
        got, expected = patched(**batch, **using(cache)).logits, stock(**batch).logits
    kept = batch["attention_mask"].bool()
    assert relative_error(got[kept], expected[kept]) < 1e-5


def test_embeddings_run_packed(passes: list[int]) -> None:
    stock, patched = pair()
    batch = prompts(RAGGED)
    embeds = stock.get_input_embeddings()(batch.pop("input_ids")).detach()
    arguments = {"inputs_embeds": embeds, **batch, "max_new_tokens": 4, **GREEDY}
    assert (
        relative_error(scores_of(patched.generate(**arguments, **PAGED)), scores_of(stock.generate(**arguments)))
        < 1e-5
    )
    assert passes == [sum(RAGGED)]


@pytest.mark.gpu
def test_in_bf16_as_near_to_float32_as_stock(passes: list[int]) -> None:
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    model = build("deepseek_v3", first_k_dense_replace=3, **sizes).cuda()
    batch = {name: tensor.cuda() for name, tensor in prompts([700, 31, 412, 1]).items()}
    kept = batch["attention_mask"].bool()
    with torch.no_grad():
        exact = model(**batch).logits[kept]
        half = model.bfloat16()
        of_stock = relative_error(half(**batch).logits[kept].float(), exact)
        got = hf_mla.patch(half)(**batch, **using(hf_mla.PagedMLACache())).logits[kept].float()
    assert passes and relative_error(got, exact) < 1.25 * of_stock
