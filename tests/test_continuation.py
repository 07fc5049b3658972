"""One cache over several calls: chat turns, shared prefixes, chunks, crops, errors and interrupts in between."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from pairs import (
    BLOCK,
    PAGED,
    USUAL,
    absorb_up_to,
    assert_generates_alike,
    assert_same,
    feed,
    in_pieces,
    pair,
    record_steps,
    using,
)
from tiny import GREEDY, prompts, relative_error, scores_of
from transformers import DynamicCache

from hf_mla import PagedMLACache, PoolExhausted

TOLERANCE = 1e-5


def new_cache(**options: Any) -> PagedMLACache:
    return PagedMLACache(block_size=BLOCK, **options)


def caches_alive(collect: bool = True) -> int:
    if collect:
        gc.collect()
    return sum(type(thing) is PagedMLACache for thing in gc.get_objects())


def extended(
    ids: torch.Tensor, mask: torch.Tensor, said: torch.Tensor, turn: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(history with the next user turn of 9 + turn tokens, its mask)."""
    added = prompts([9 + turn] * len(ids), seed=20 + turn)["input_ids"]
    history = torch.cat([said, added], 1)
    return history, torch.cat([mask, mask.new_ones(len(ids), history.shape[1] - mask.shape[1])], 1)


@pytest.mark.parametrize("columns", [0, 128], ids=["expanded", "absorbed"])
@pytest.mark.parametrize("given", ["the whole history", "new tokens"])
def test_three_chat_turns_are_as_fresh(given: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stock, patched = pair()
    absorb_up_to(monkeypatch, columns)
    cache, inputs = new_cache(), prompts([20, 5])
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    for turn in range(3):
        shown = ids if given == "the whole history" else ids[:, cache.get_seq_length() :]
        got = patched.generate(shown, attention_mask=mask, max_new_tokens=14, **using(cache), **GREEDY)
        fresh = stock.generate(ids, attention_mask=mask, max_new_tokens=14, **GREEDY)
        assert torch.equal(got.sequences[:, -14:], fresh.sequences[:, -14:])
        assert relative_error(scores_of(got), scores_of(fresh)) < TOLERANCE
        ids, mask = extended(ids, mask, fresh.sequences, turn)
    cache.table.check()


@pytest.mark.parametrize("family", USUAL)
def test_turns_of_one_row_without_pads(family: str) -> None:
    stock, patched = pair(family)
    cache, ids = new_cache(), prompts([20])["input_ids"]
    for turn in range(3):
        mask = torch.ones_like(ids)
        got = patched.generate(ids, attention_mask=mask, max_new_tokens=10, **using(cache), **GREEDY)
        assert_same(got, stock.generate(ids, attention_mask=mask, max_new_tokens=10, **GREEDY))
        ids, _ = extended(ids, mask, got.sequences, turn)


def test_the_same_prompt_twice_gives_the_same_and_leaves_nothing_behind() -> None:
    _, patched = pair()
    before = caches_alive()
    first = patched.generate(**prompts([20, 5]), max_new_tokens=10, **PAGED)
    assert torch.equal(patched.generate(**prompts([20, 5]), max_new_tokens=10, **PAGED), first)
    assert caches_alive(collect=False) == before  # not even in a cycle


@pytest.mark.parametrize("prefix", [BLOCK, BLOCK + 3])
def test_copies_of_a_prefix_go_on_differently(prefix: int) -> None:
    stock, patched = pair()
    start = prompts([prefix])["input_ids"]
    kept = new_cache()
    feed(patched, start, kept)
    for seed in (31, 32, 33):
        whole = torch.cat([start, prompts([7], seed=seed)["input_ids"]], 1)
        arguments = {"input_ids": whole, "attention_mask": torch.ones_like(whole), "max_new_tokens": 20, **GREEDY}
        got = patched.generate(**arguments, **using(copy.deepcopy(kept)))
        assert_same(got, stock.generate(**arguments))
    assert kept.get_seq_length() == prefix


def test_a_prefix_repeated_for_several_rows() -> None:
    stock, patched = pair()
    start = prompts([BLOCK + 3])["input_ids"]
    cache = new_cache()
    feed(patched, start, cache)
    cache.batch_repeat_interleave(3)
    assert cache.memory_report().blocks_used == 2  # shared until one writes
    whole = torch.cat([start.repeat(3, 1), prompts([7, 7, 7])["input_ids"]], 1)
    arguments = {"input_ids": whole, "attention_mask": torch.ones_like(whole), "max_new_tokens": 20, **GREEDY}
    assert_same(patched.generate(**arguments, **using(cache)), stock.generate(**arguments))
    cache.table.check()


@pytest.mark.parametrize("order", [[2, 0, 1], [1, 1, 2], [2], [0, 0, 1, 2, 2]])
def test_rows_of_different_lengths_in_another_order(order: list[int]) -> None:
    stock, patched = pair()
    inputs, cache = prompts([20, 5, 33]), new_cache()
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    feed(patched, ids, cache, mask)
    (cache.reorder_cache if len(order) == 3 else cache.batch_select_indices)(torch.tensor(order))
    ids = torch.cat([ids[order], prompts([BLOCK] * len(order), seed=8)["input_ids"]], 1)
    mask = torch.cat([mask[order], mask.new_ones(len(order), BLOCK)], 1)
    expected = feed(stock, ids, DynamicCache(), mask)
    for end in range(34, ids.shape[1] + 1):
        got = feed(patched, ids[:, end - 1 : end], cache, mask[:, :end])
        assert relative_error(got, expected[:, end - 1 : end]) < TOLERANCE
    cache.table.check()


@pytest.mark.parametrize("removed", [1, 5, BLOCK, BLOCK + 9])
def test_going_on_after_a_crop(removed: int) -> None:
    stock, patched = pair()
    inputs, other = prompts([40, 33]), prompts([40, 40], seed=9)["input_ids"]
    ids, mask, ours = inputs["input_ids"], inputs["attention_mask"], new_cache()
    feed(patched, ids, ours, mask)
    ours.crop(-removed)
    ours.table.check()
    assert ours.get_seq_length() == 40 - removed
    whole = torch.cat([ids[:, : 40 - removed], other[:, :removed]], 1)
    got = feed(patched, whole[:, -removed:], ours, mask)
    expected = feed(stock, whole, DynamicCache(), mask)[:, -removed:]
    assert relative_error(got, expected) < TOLERANCE


def test_a_crop_by_a_tensor_is_a_crop_by_its_number() -> None:  # as assisted decoding does it before 5.20
    stock, patched = pair()
    ids, cache = prompts([40])["input_ids"], new_cache()
    feed(patched, ids[:, :39], cache)
    for end, removed in ((34, 5), (33, 2)):
        cache.crop(torch.tensor(-removed))
        assert type(cache.get_seq_length()) is int and cache.get_seq_length() == end
        got = feed(patched, ids[:, end, None], cache, torch.ones(1, end + 1))
        assert relative_error(got, stock(ids[:, : end + 1]).logits[:, -1:]) < TOLERANCE


@pytest.mark.parametrize("columns", [0, 4, 128])
@pytest.mark.parametrize("size", [1, 3, BLOCK, 2 * BLOCK - 1, 64])
def test_prefill_in_chunks(size: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stock, patched = pair()
    absorb_up_to(monkeypatch, columns)
    steps = record_steps(monkeypatch)
    arguments = {**prompts([50, 37, 1]), "max_new_tokens": 6}
    expected = stock.generate(**arguments, **GREEDY)
    got = patched.generate(**arguments, prefill_chunk_size=size, **GREEDY, **PAGED)
    assert_same(got, expected)
    chunks = [piece.stop - piece.start for piece in in_pieces(50, size)]
    assert steps == [(new, place > 0 and new <= columns) for place, new in enumerate(chunks + 5 * [1])]


@pytest.mark.parametrize("columns", [0, 128])
@pytest.mark.parametrize("family", USUAL)
def test_pieces_of_any_size_are_one_pass(family: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stock, patched = pair(family)
    absorb_up_to(monkeypatch, columns)
    inputs = prompts([40, 29])
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    expected = feed(stock, ids, DynamicCache(), mask)
    for sizes in ([40], [1, 39], [39, 1], [16, 16, 8], [7, 1, 20, 12]):
        cache, end, logits = new_cache(), 0, []
        for size in sizes:
            end += size
            logits.append(feed(patched, ids[:, end - size : end], cache, mask[:, :end]))
        kept = mask.bool()
        assert relative_error(torch.cat(logits, 1)[kept], expected[kept]) < TOLERANCE


def test_chunks_wider_than_absorption_pays_for() -> None:
    stock, patched = pair()
    ids = prompts([420])["input_ids"]
    expected, cache = feed(stock, ids, DynamicCache()), new_cache()
    logits = [feed(patched, ids[:, piece], cache) for piece in (slice(0, 100), slice(100, 400), slice(400, 420))]
    assert relative_error(torch.cat(logits, 1), expected) < TOLERANCE


@pytest.mark.parametrize(
    "started, goes_on",
    [(torch.inference_mode, torch.no_grad), (torch.no_grad, torch.inference_mode)],
)
def test_a_cache_goes_on_in_another_gradient_mode(started: Any, goes_on: Any) -> None:
    stock, patched = pair()
    ids, cache = prompts([40])["input_ids"], new_cache()
    with started():
        patched(ids[:, :12], **using(cache))
    for piece in (slice(12, 15), slice(15, 40)):  # into the pages that are there, and beyond them
        with goes_on():
            got = patched(ids[:, piece], **using(cache)).logits
            assert relative_error(got, stock(ids).logits[:, piece]) < TOLERANCE


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("past", [0, BLOCK - 1, BLOCK])
def test_a_step_that_fails_in_the_middle_can_be_tried_again(past: int, error: type[BaseException]) -> None:
    stock, patched = pair()
    ids, cache = prompts([past + 3])["input_ids"], new_cache()
    if past:
        feed(patched, ids[:, :past], cache)

    def fail(*_: Any) -> None:
        raise error("stop")

    handle = patched.model.layers[1].mlp.register_forward_pre_hook(fail)
    with pytest.raises(error):
        feed(patched, ids[:, past:], cache)
    handle.remove()
    got = feed(patched, ids[:, past:], cache, torch.ones_like(ids))
    cache.table.check()
    assert relative_error(got, stock(ids).logits[:, past:]) < TOLERANCE


def interrupted(model: Any) -> None:
    """A step over a cache that is given up in the middle."""
    cache = new_cache()
    feed(model, prompts([12])["input_ids"], cache)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model.model.layers[1].mlp.register_forward_pre_hook(interrupt)
    try:
        feed(model, torch.tensor([[5]]), cache)
    except KeyboardInterrupt:
        handle.remove()


def test_after_an_interrupt_stock_calls_and_new_caches_work() -> None:
    stock, patched = pair()
    interrupted(patched)
    ids = prompts([12])["input_ids"]
    assert relative_error(patched(ids).logits, stock(ids).logits) < TOLERANCE
    assert_generates_alike(stock, patched, **prompts([5, 20]), max_new_tokens=6)


def test_an_interrupted_cache_is_freed_by_the_next_call() -> None:
    _, patched = pair()
    before = caches_alive()
    interrupted(patched)
    patched(torch.tensor([[5]]))
    assert caches_alive() == before


def test_a_cache_that_ran_out_of_blocks_keeps_what_it_has() -> None:
    stock, patched = pair()
    ids, cache = prompts([70])["input_ids"], new_cache(max_tokens=3 * BLOCK)
    feed(patched, ids[:, :40], cache)
    with pytest.raises(PoolExhausted, match="max_tokens"):
        feed(patched, ids[:, 40:], cache)
    cache.table.check()
    got = feed(patched, ids[:, 40:48], cache)
    assert relative_error(got, stock(ids[:, :48]).logits[:, 40:]) < TOLERANCE
    cache.reset()
    assert relative_error(feed(patched, ids[:, :48], cache), stock(ids[:, :48]).logits) < TOLERANCE
