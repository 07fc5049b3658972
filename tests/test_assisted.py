"""Assisted and prompt-lookup decoding: drafts are verified several tokens a step and rejected ones rolled back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pairs import BLOCK, PAGED, assert_same, cache_of, pair, record_steps, using
from tiny import GREEDY, build, prompts, twin

import hf_mla


def recite(length: int) -> dict[str, torch.Tensor]:
    """A prompt that repeats itself, so that prompt lookup finds drafts."""
    ids = prompts([12])["input_ids"].repeat(1, -(-length // 12))[:, :length]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def record_crops(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Columns removed by every later crop of a PagedMLACache."""
    crops: list[int] = []
    crop = hf_mla.PagedMLACache.crop

    def recording(self: Any, tokens_to_remove: int) -> None:
        before = self.get_seq_length()
        crop(self, tokens_to_remove)
        self.table.check()
        crops.append(before - self.get_seq_length())

    monkeypatch.setattr(hf_mla.PagedMLACache, "crop", recording)
    return crops


def assistant(kind: str, stock: Any) -> Any:
    if kind == "the same weights":
        return twin(stock)
    model = build(seed=7, num_hidden_layers=1)
    return hf_mla.patch(model, block_size=BLOCK) if kind == "patched" else model


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize("kind", ["unpatched", "patched", "the same weights"])
def test_an_assistants_drafts(kind: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stock, patched = pair(family)
    helper, inputs = assistant(kind, stock), prompts([2 * BLOCK - 3])
    arguments = {**inputs, "max_new_tokens": 24, **GREEDY}
    expected = stock.generate(**arguments, assistant_model=helper)
    steps, crops = record_steps(monkeypatch), record_crops(monkeypatch)
    got = patched.generate(**arguments, assistant_model=helper, **PAGED)
    assert isinstance(cache_of(got), hf_mla.PagedMLACache)
    assert_same(got, expected)
    assert_same(got, stock.generate(**arguments))  # drafts don't change what is said
    assert any(new > 1 and absorbed for new, absorbed in steps)
    assert any(crops) == (kind != "the same weights")


@pytest.mark.parametrize("kind", ["unpatched", "patched"])
def test_sampling_with_an_assistant(kind: str) -> None:
    stock, patched = pair()
    helper = assistant(kind, stock)
    arguments = {**prompts([29]), "max_new_tokens": 24, "do_sample": True, "assistant_model": helper}
    torch.manual_seed(3)
    expected = stock.generate(**arguments)
    torch.manual_seed(3)
    assert torch.equal(patched.generate(**arguments, **PAGED), expected)


def test_an_assistant_with_a_paged_cache_of_its_own() -> None:
    stock, patched = pair()
    expected = patched.generate(**prompts([29]), max_new_tokens=16, assistant_model=stock, **GREEDY)
    got = stock.generate(**prompts([29]), max_new_tokens=16, assistant_model=patched, **GREEDY)
    assert_same(got, expected)


@pytest.mark.parametrize("drafts", [2, 10])
def test_prompt_lookup(drafts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stock, patched = pair()
    arguments = {**recite(50), "max_new_tokens": 40, **GREEDY}
    expected = stock.generate(**arguments, prompt_lookup_num_tokens=drafts)
    steps, crops = record_steps(monkeypatch), record_crops(monkeypatch)
    got = patched.generate(**arguments, prompt_lookup_num_tokens=drafts, **PAGED)
    assert_same(got, expected)
    assert any(new > 1 and absorbed for new, absorbed in steps) and any(crops)
    assert cache_of(got).get_seq_length() == cache_of(expected).get_seq_length()


def test_drafts_longer_than_a_block_are_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    stock, patched = pair()
    arguments = {**recite(70), "max_new_tokens": 24, "prompt_lookup_num_tokens": 2 * BLOCK, **GREEDY}
    crops = record_crops(monkeypatch)
    assert_same(patched.generate(**arguments, **PAGED), stock.generate(**arguments))
    assert max(crops) > BLOCK


def test_drafts_over_a_cache_of_the_users_own_and_one_more_turn() -> None:
    stock, patched = pair()
    cache, first = hf_mla.PagedMLACache(block_size=BLOCK), recite(30)
    said = patched.generate(**first, max_new_tokens=20, prompt_lookup_num_tokens=4, **using(cache))
    turn = torch.cat([said, prompts([9], seed=4)["input_ids"]], 1)
    mask = torch.ones_like(turn)
    got = patched.generate(turn, attention_mask=mask, max_new_tokens=12, **using(cache), **GREEDY)
    assert_same(got, stock.generate(turn, attention_mask=mask, max_new_tokens=12, **GREEDY))


def test_the_assistant_does_not_inherit_the_name() -> None:
    stock, patched = pair()
    helper = build(seed=7, num_hidden_layers=1)  # unpatched: it would raise if asked for a paged cache
    got = patched.generate(**prompts([20]), max_new_tokens=8, assistant_model=helper, **PAGED)
    assert torch.equal(got, stock.generate(**prompts([20]), max_new_tokens=8))
    assert helper.generation_config.cache_implementation is None
