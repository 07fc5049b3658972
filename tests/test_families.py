"""Every family with latent attention against stock: decoding, beams, reused prefixes, rollbacks, failures.

What a family's linear, sliding and indexer layers keep is compared with it: they live in the same cache.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from pairs import (
    BLOCK,
    PAGED,
    STRADDLING,
    assert_generates_alike,
    assert_same,
    attention_peak,
    cache_of,
    feed,
    in_pieces,
    record_steps,
    using,
)
from tiny import EVERY_FAMILY, GREEDY, INSTALLED, MORE_FAMILIES, build, prompts, relative_error, twin
from transformers import DynamicCache

import hf_mla
from hf_mla.cache.indexed import PagedIndexedLayer
from hf_mla.cache.layer import PagedMLALayer
from hf_mla.families import REFUSED, SERVED

NEW = [family for family in INSTALLED if family in MORE_FAMILIES]  # the others have whole files of tests
# One of each way and of what sits between; the others' longer tests are for the full suite.
FEW = ("minicpm3", "longcat_flash", "kimi_linear", "deepseek_v32")
ALL = [family if family in FEW else pytest.param(family, marks=pytest.mark.slow) for family in NEW]
LINEAR = [family for family in NEW if SERVED[family].others == "linear attention"]
ROLLING = [family for family in NEW if family not in LINEAR]
SPARSE = [family for family in NEW if SERVED[family].way == "sparse"]


def pair(family: str) -> tuple[Any, Any]:
    """(stock, patched): equal weights, with the layers that the family's tiny config has."""
    patched = build(family)
    return twin(patched), hf_mla.patch(patched, block_size=BLOCK)


def text_config(model: Any) -> Any:
    return model.config.get_text_config(decoder=True)


def stock_cache(model: Any) -> DynamicCache:
    return DynamicCache(config=text_config(model))


def ids_of(length: int, rows: int = 2, seed: int = 5) -> torch.Tensor:
    return torch.randint(3, 97, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", ALL)
def test_64_tokens_of_a_padded_batch_are_stock(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stock, patched = pair(family)
    assert attention_peak(stock) > 8 / 40  # far from uniform, so that a wrong or missing key shows
    steps = record_steps(monkeypatch)
    got = assert_generates_alike(stock, patched, 1e-4, **prompts(STRADDLING), max_new_tokens=64)
    assert steps == [(2 * BLOCK, False)] + 63 * [(1, SERVED[family].way != "dense")]
    cache = cache_of(got)
    assert cache.memory_report().tokens == sum(STRADDLING) + 63 * len(STRADDLING)  # no pad is stored
    assert cache.memory_report().bytes_expanded > cache.memory_report().bytes_used


@pytest.mark.parametrize("family", NEW)
def test_layers_are_paged_or_those_of_stock(family: str) -> None:
    stock, _ = pair(family)
    config = text_config(stock)
    expected = {"DynamicLayer": PagedMLALayer, "DynamicIndexedLayer": PagedIndexedLayer}
    theirs = [type(layer) for layer in DynamicCache(config=config).layers]
    ours = [type(layer) for layer in hf_mla.PagedMLACache(config).layers]
    assert ours == [expected.get(kind.__name__, kind) for kind in theirs]
    assert any(issubclass(kind, PagedMLALayer) for kind in ours)


@pytest.mark.parametrize("family", NEW)
@torch.no_grad()
def test_decoding_reads_the_pages(family: str) -> None:
    _, patched = pair(family)
    cache = hf_mla.PagedMLACache(block_size=BLOCK)
    feed(patched, ids_of(40), cache)
    assert feed(patched, ids_of(1), cache).isfinite().all()
    for layer in cache.mla_layers:
        if layer.pages is not None:
            layer.pages.fill_(float("nan"))
    assert feed(patched, ids_of(1), cache).isnan().all()


@pytest.mark.parametrize("family", ALL)
def test_three_beams(family: str) -> None:
    stock, patched = pair(family)
    beams = {"num_beams": 3, "num_return_sequences": 2}
    got = assert_generates_alike(stock, patched, 1e-4, **prompts([3, BLOCK + 1]), max_new_tokens=24, **beams)
    assert torch.equal(got.beam_indices[:, :1] >= 0, torch.ones(4, 1, dtype=torch.bool))


@pytest.mark.parametrize("family", ALL)
@torch.no_grad()
def test_a_prefix_reused_by_deepcopy(family: str) -> None:
    stock, patched = pair(family)
    prefix = ids_of(2 * BLOCK + 3, rows=1)
    cache = hf_mla.PagedMLACache(block_size=BLOCK)  # laid out by the model that it first meets
    feed(patched, prefix, cache)
    for seed, length in ((7, 1), (8, 5), (9, BLOCK)):
        whole = torch.cat([prefix, ids_of(length, rows=1, seed=seed)], 1)
        expected = stock.generate(whole, max_new_tokens=12, **GREEDY)
        got = patched.generate(whole, max_new_tokens=12, **GREEDY, **using(copy.deepcopy(cache)))
        assert_same(got, expected, 1e-4)
    assert cache.get_seq_length() == prefix.shape[1]
    cache.table.check()


@pytest.mark.parametrize("size", [1, 5, 20])
@pytest.mark.parametrize("family", ALL)
@torch.no_grad()
def test_continuations_of_any_length(family: str, size: int) -> None:
    stock, patched = pair(family)
    mask = torch.ones(2, 40, dtype=torch.int64)
    mask[0, :7] = 0
    ids, cache = ids_of(40), hf_mla.PagedMLACache(block_size=BLOCK)
    theirs = stock_cache(stock)
    for piece in in_pieces(40, size) if size > 1 else [slice(0, 20), *in_pieces(40, 1)[20:]]:
        got = feed(patched, ids[:, piece], cache, mask[:, : piece.stop])
        expected = feed(stock, ids[:, piece], theirs, mask[:, : piece.stop])
        seen = mask[:, piece].bool()  # what a pad's own logits are is nobody's business
        assert relative_error(got[seen], expected[seen]) < 1e-4


@pytest.mark.parametrize("family", ROLLING)
@torch.no_grad()
def test_crop_and_go_on(family: str) -> None:
    stock, patched = pair(family)
    ids, cache = ids_of(40), hf_mla.PagedMLACache(text_config(patched), block_size=BLOCK)
    cache.activate_past_recording()
    feed(patched, ids, cache)
    cache.crop(-9)
    assert cache.get_seq_length() == 31
    other = torch.cat([ids[:, :31], ids_of(6, seed=6)], 1)
    expected = stock(other).logits
    assert relative_error(feed(patched, other[:, 31:34], cache), expected[:, 31:34]) < 1e-4
    for column in range(34, 37):
        assert relative_error(feed(patched, other[:, column : column + 1], cache)[:, 0], expected[:, column]) < 1e-4


@pytest.mark.parametrize("family", LINEAR)
@torch.no_grad()
def test_linear_layers_roll_back_no_further_than_in_stock(family: str) -> None:
    stock, patched = pair(family)
    for model, cache in ((stock, stock_cache(stock)), (patched, hf_mla.PagedMLACache(text_config(patched)))):
        feed(model, ids_of(20), cache)
        assert not cache.is_croppable
        with pytest.raises(RuntimeError, match="activate_past_recording"):
            cache.crop(-1)


@pytest.mark.parametrize("family", ALL)
@torch.no_grad()
def test_reset_and_other_rows(family: str) -> None:
    stock, patched = pair(family)
    cache = hf_mla.PagedMLACache(block_size=BLOCK)
    for rows in (2, 2 if family in LINEAR else 3):  # stock's linear layers keep their rows' shapes
        cache.reset()
        ids = ids_of(30, rows, seed=rows)
        feed(patched, ids[:, :29], cache)
        expected = stock(ids).logits[:, -1]
        assert relative_error(feed(patched, ids[:, 29:], cache)[:, 0], expected) < 1e-4
        if family in LINEAR:
            continue  # stock's linear layers know no such change
        cache.batch_select_indices(torch.tensor([1, 0]))
        cache.batch_repeat_interleave(2)
        more = torch.cat([ids[[1, 1, 0, 0]], ids_of(1, 4)], 1)
        assert relative_error(feed(patched, more[:, -1:], cache)[:, 0], stock(more).logits[:, -1]) < 1e-4


@pytest.mark.parametrize("family", ALL)
@torch.no_grad()
def test_a_pass_that_fails_halfway(family: str) -> None:
    stock, patched = pair(family)
    cache = hf_mla.PagedMLACache(block_size=BLOCK)
    ids = ids_of(21)
    feed(patched, ids[:, :20], cache)
    last = [module for module in patched.modules() if hasattr(module, "kv_b_proj")][-1].o_proj
    handle = last.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        feed(patched, ids[:, 20:], cache)
    handle.remove()
    if SERVED[family].others:
        with pytest.raises(ValueError, match="failed halfway"):
            feed(patched, ids[:, 20:], cache)
        cache.reset()
        feed(patched, ids[:, :20], cache)
    assert relative_error(feed(patched, ids[:, 20:], cache), stock(ids).logits[:, 20:]) < 1e-4


@pytest.mark.parametrize("family", SPARSE)
@torch.no_grad()
def test_selections_are_honoured(family: str) -> None:
    """What the indexer leaves out doesn't reach the logits, and what it picks does."""
    stock, patched = pair(family)
    everything = copy.deepcopy(patched)
    for module in everything.modules():
        if hasattr(module, "index_topk"):
            module.index_topk = 1000
    ids = ids_of(40)
    logits = []
    for model in (patched, everything):
        cache = hf_mla.PagedMLACache(block_size=BLOCK)
        feed(model, ids[:, :39], cache)
        logits.append(feed(model, ids[:, 39:], cache)[:, 0])
    expected = stock(ids).logits[:, -1]
    assert relative_error(logits[0], expected) < 1e-4
    assert relative_error(logits[1], expected) > 1e-2


@pytest.mark.parametrize("family", ALL)
def test_assisted_decoding_as_in_stock(family: str) -> None:
    stock, patched = pair(family)
    helper = build(family, seed=7)
    inputs = prompts([12])
    answers = []
    for model, more in ((stock, {}), (patched, PAGED)):
        try:
            answers.append(model.generate(**inputs, max_new_tokens=12, assistant_model=helper, **GREEDY, **more))
        except ValueError as error:
            answers.append(str(error))
    if isinstance(answers[0], str):
        assert answers[1] == answers[0]
    else:
        assert_same(answers[1], answers[0], 1e-4)


@pytest.mark.parametrize("family", INSTALLED)
def test_what_is_left_alone_runs_stock(family: str) -> None:
    stock, patched = pair(family)
    inputs = prompts([3, 20])
    for arguments in ({}, {"use_cache": False}):
        expected = stock.generate(**inputs, max_new_tokens=4, **GREEDY, **arguments)
        assert_same(patched.generate(**inputs, max_new_tokens=4, **GREEDY, **arguments), expected, 1e-7)
    hf_mla.unpatch(patched)
    assert not any("expand_kv" in module.__dict__ for module in patched.modules())


def test_a_refusal_gives_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    stock, _ = pair("axk1")
    monkeypatch.delitem(SERVED, "axk1")
    monkeypatch.setitem(REFUSED, "axk1", "its latents are made of cheese")
    with pytest.raises(ValueError, match=r"family 'axk1' \(AXK1Model\) isn't served: its latents are made of cheese"):
        hf_mla.patch(stock)


def test_served_and_refused_are_apart() -> None:
    assert not set(SERVED) & set(REFUSED)
    assert set(EVERY_FAMILY) == set(SERVED)
