"""Rows of a batch don't know of each other: pads, holes, masks, positions, and what doesn't fit is refused.

The reference is the unpatched model in fp32, usually over the row alone and without a cache.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pairs import BLOCK, PAGED, absorb_up_to, assert_same, cache_of, feed, pair, raises_value_error, using
from tiny import GREEDY, prompts, relative_error, scores_of
from transformers import DynamicCache

from hf_mla import PagedMLACache

TOLERANCE = 1e-5


def new_cache() -> PagedMLACache:
    return PagedMLACache(block_size=BLOCK)


def ones(rows: int, columns: int) -> torch.Tensor:
    return torch.ones(rows, columns, dtype=torch.int64)


def positions_of(mask: torch.Tensor) -> torch.Tensor:
    return (mask.cumsum(1) - 1).clamp(min=0)


def row_ids(inputs: dict[str, torch.Tensor], row: int) -> torch.Tensor:
    """[1, n] the tokens of one row without its pads."""
    return inputs["input_ids"][row][inputs["attention_mask"][row].bool()][None]


@torch.no_grad()
def decode_padded(model: Any, inputs: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """[B, steps, vocab] logits of `tokens` [B, steps], fed one by one after a padded prompt."""
    cache, mask = new_cache(), inputs["attention_mask"]
    model(**inputs, position_ids=positions_of(mask), **using(cache))
    logits = []
    for step in range(tokens.shape[1]):
        mask = torch.cat([mask, ones(len(mask), 1)], 1)
        logits.append(feed(model, tokens[:, step, None], cache, mask, position_ids=positions_of(mask)[:, -1:]))
    cache.table.check()
    assert cache.memory_report().tokens == int(mask.sum())
    return torch.cat(logits, 1)


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_left_padded_right_padded_and_alone_are_one(family: str) -> None:
    stock, patched = pair(family)
    lengths = [5, BLOCK, 2 * BLOCK + 1]
    tokens = torch.randint(3, 97, (3, 20), generator=torch.Generator().manual_seed(5))
    left, right = prompts(lengths, side="left"), prompts(lengths, side="right")
    of_left, of_right = decode_padded(patched, left, tokens), decode_padded(patched, right, tokens)
    for row, length in enumerate(lengths):
        alone = torch.cat([row_ids(left, row), tokens[row, None]], 1)
        expected = stock(alone, use_cache=False).logits[0, length:]
        assert relative_error(of_left[row], expected) < TOLERANCE
        assert relative_error(of_right[row], expected) < TOLERANCE


@pytest.mark.parametrize("holes", [[7], [15, 16, 17], [0, 30, 39], list(range(5, 35))])
def test_masks_with_holes_in_the_middle(holes: list[int]) -> None:
    stock, patched = pair()
    inputs = prompts([40, 28])
    inputs["attention_mask"][0, holes] = 0
    expected = stock.generate(**inputs, max_new_tokens=20, **GREEDY)
    got = patched.generate(**inputs, max_new_tokens=20, **GREEDY, **PAGED)
    assert_same(got, expected)
    assert cache_of(got).table.stored == [40 - len(holes) + 19, 28 + 19]


def test_holes_made_by_masked_new_tokens() -> None:
    stock, patched = pair()
    inputs, mask = prompts([20, 9]), prompts([20, 9])["attention_mask"]
    ours, theirs = new_cache(), DynamicCache()
    feed(patched, inputs["input_ids"], ours, mask), feed(stock, inputs["input_ids"], theirs, mask)
    for step in range(6):
        mask = torch.cat([mask, torch.tensor([[step % 2], [1]])], 1)  # row 0 hides every other token as it comes
        token = torch.full((2, 1), 5 + step)
        got, expected = feed(patched, token, ours, mask), feed(stock, token, theirs, mask)
        assert relative_error(got, expected) < TOLERANCE
    assert ours.table.stored == [23, 15]


@pytest.mark.parametrize("columns", [0, 128], ids=["expanded", "absorbed"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_pads_within_a_later_turn(side: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stock, patched = pair()
    absorb_up_to(monkeypatch, columns)
    turns = [prompts([20, 7]), prompts([2, 19], seed=6, side=side), prompts([11, 4], seed=7, side=side)]
    ours, theirs, mask = new_cache(), DynamicCache(), ones(2, 0)
    for turn in turns:
        new, mask = turn["attention_mask"], torch.cat([mask, turn["attention_mask"]], 1)
        at = {"position_ids": positions_of(mask)[:, -new.shape[1] :]}
        got = feed(patched, turn["input_ids"], ours, mask, **at)
        expected = feed(stock, turn["input_ids"], theirs, mask, **at)
        assert relative_error(got[new.bool()], expected[new.bool()]) < TOLERANCE
    assert ours.table.stored == [33, 30]


@pytest.mark.filterwarnings("ignore:.*past_key_values.*deprecated:FutureWarning")
@pytest.mark.parametrize("way", ["by keyword", "by its old name", "by position"])
def test_the_decoder_called_by_itself(way: str) -> None:
    stock, patched = pair()
    ids, cache = prompts([20])["input_ids"], new_cache()
    keywords = {"by keyword": using(cache), "by its old name": {"past_key_values": cache}, "by position": {}}[way]
    for piece in (slice(0, 15), slice(15, 20)):
        arguments = (ids[:, piece], None, None, cache) if way == "by position" else (ids[:, piece],)
        with torch.no_grad():
            got = patched.model(*arguments, **keywords).last_hidden_state
        assert relative_error(got, stock.model(ids).last_hidden_state[:, piece]) < TOLERANCE
    assert cache.get_seq_length() == 20


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5])
def test_a_batch_equals_its_rows_alone(rows: int) -> None:
    stock, patched = pair()
    lengths = [2 * BLOCK, 1, BLOCK - 1, BLOCK + 1, BLOCK][:rows]
    inputs = prompts(lengths)
    batch = patched.generate(**inputs, max_new_tokens=18, **GREEDY, **PAGED)
    for row in range(rows):
        alone = stock.generate(row_ids(inputs, row), max_new_tokens=18, **GREEDY)
        assert torch.equal(batch.sequences[row, -18:], alone.sequences[0, -18:])
        assert relative_error(scores_of(batch)[row], scores_of(alone)[0]) < TOLERANCE


def test_a_long_row_beside_a_row_of_one_token() -> None:
    stock, patched = pair()
    inputs = prompts([1, 300])
    expected = stock.generate(**inputs, max_new_tokens=4, **GREEDY)
    got = patched.generate(**inputs, max_new_tokens=4, **GREEDY, **PAGED)
    assert_same(got, expected)
    assert cache_of(got).memory_report().blocks_used == 1 + -(-303 // BLOCK)


def test_a_row_of_nothing_but_pads_leaves_the_others_alone() -> None:
    stock, patched = pair()
    inputs = prompts([20, 0, 5])
    got = patched.generate(**inputs, max_new_tokens=18, **GREEDY, **PAGED)
    for row in (0, 2):
        alone = stock.generate(row_ids(inputs, row), max_new_tokens=18, **GREEDY)
        assert relative_error(scores_of(got)[row], scores_of(alone)[0]) < TOLERANCE
    assert scores_of(got).isfinite().all()
    assert cache_of(got).table.stored == [37, 17, 22]


def test_one_row_without_a_mask() -> None:
    stock, patched = pair()
    ids = prompts([37])["input_ids"]
    assert_same(
        patched.generate(ids, max_new_tokens=12, **GREEDY, **PAGED), stock.generate(ids, max_new_tokens=12, **GREEDY)
    )


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32])
def test_masks_of_any_type(dtype: torch.dtype) -> None:
    stock, patched = pair()
    inputs = prompts([3, 20])
    expected = stock.generate(**inputs, max_new_tokens=6, **GREEDY)
    inputs["attention_mask"] = inputs["attention_mask"].to(dtype)
    assert_same(patched.generate(**inputs, max_new_tokens=6, **GREEDY, **PAGED), expected)


def test_positions_given_by_the_user() -> None:
    stock, patched = pair()
    ids, ours, theirs = prompts([24])["input_ids"], new_cache(), DynamicCache()
    position_ids = torch.arange(24)[None] * 2 + 3
    more = {"position_ids": position_ids}
    assert relative_error(feed(patched, ids, ours, **more), feed(stock, ids, theirs, **more)) < TOLERANCE
    token, more = torch.tensor([[9]]), {"position_ids": torch.tensor([[90]])}
    got = feed(patched, token, ours, **more)
    assert relative_error(got, feed(stock, token, theirs, **more)) < TOLERANCE
    assert relative_error(got, feed(stock, token, stock_cache(stock, ids))) > 1e-3  # positions mattered


def stock_cache(stock: Any, ids: torch.Tensor) -> DynamicCache:
    cache = DynamicCache()
    feed(stock, ids, cache)
    return cache


@pytest.mark.parametrize("new", [1, 3])
def test_a_4d_mask_of_the_users_own_is_obeyed(new: int) -> None:
    stock, patched = pair()
    ids, ours, theirs = prompts([24, 24])["input_ids"], new_cache(), DynamicCache()
    prefix = torch.ones(2, 1, 24, 24, dtype=torch.bool).tril()
    prefix[:, :, :, 4:9] = False
    prefix |= torch.eye(24, dtype=torch.bool)
    assert relative_error(feed(patched, ids, ours, prefix), feed(stock, ids, theirs, prefix)) < TOLERANCE
    mask = torch.ones(2, 1, new, 24 + new, dtype=torch.bool).tril(24)
    mask[0, :, :, 10:20] = False
    token = torch.full((2, new), 9)
    got, expected = feed(patched, token, ours, mask), feed(stock, token, theirs, mask)
    assert relative_error(got, expected) < TOLERANCE
    assert relative_error(got, feed(stock, token, stock_cache(stock, ids))) > 1e-3  # the mask mattered


def test_after_a_4d_mask_plain_masks_go_on() -> None:
    stock, patched = pair()
    ids, ours, theirs = prompts([24])["input_ids"], new_cache(), DynamicCache()
    mask = torch.ones(1, 1, 24, 24, dtype=torch.bool).tril()
    feed(patched, ids, ours, mask), feed(stock, ids, theirs, mask)
    token = torch.tensor([[9]])
    assert relative_error(feed(patched, token, ours, ones(1, 25)), feed(stock, token, theirs, ones(1, 25))) < TOLERANCE


@pytest.mark.parametrize("columns", [0, 128])
def test_tokens_masked_after_they_were_seen(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stock, patched = pair()
    absorb_up_to(monkeypatch, columns)
    inputs, mask = prompts([24, 17]), prompts([24, 17])["attention_mask"]
    ours, theirs = new_cache(), DynamicCache()
    feed(patched, inputs["input_ids"], ours, mask), feed(stock, inputs["input_ids"], theirs, mask)
    for step in range(3):
        mask = torch.cat([mask, ones(2, 1)], 1)
        mask[:, 10 + step] = 0
        token = torch.full((2, 1), 5 + step)
        got, expected = feed(patched, token, ours, mask), feed(stock, token, theirs, mask)
        assert relative_error(got, expected) < TOLERANCE


def refused(case: str, patched: Any, cache: PagedMLACache) -> None:
    """One call that doesn't fit a cache of two rows, 9 and 5 of 9 columns stored."""
    token = torch.tensor([[9], [9]])
    if case == "batch":
        raises_value_error("batch", lambda: feed(patched, torch.tensor([[9]]), cache, ones(1, 10)))
    elif case == "short mask":
        raises_value_error("attention_mask", lambda: feed(patched, token, cache, ones(2, 9)))
    elif case == "long mask":
        raises_value_error("attention_mask", lambda: feed(patched, token, cache, ones(2, 11)))
    elif case == "no mask":
        raises_value_error("attention_mask", lambda: feed(patched, token, cache))
    else:
        raises_value_error("attention_mask", lambda: feed(patched, token, cache, ones(2, 10)))


@pytest.mark.parametrize("case", ["batch", "short mask", "long mask", "no mask", "past unmasked again"])
def test_what_does_not_fit_is_refused_and_the_cache_goes_on(case: str) -> None:
    stock, patched = pair()
    inputs, ours, theirs = prompts([9, 5]), new_cache(), DynamicCache()
    mask = inputs["attention_mask"]
    feed(patched, inputs["input_ids"], ours, mask), feed(stock, inputs["input_ids"], theirs, mask)
    refused(case, patched, ours)
    ours.table.check()
    assert ours.get_seq_length() == 9 and ours.table.stored == [9, 5]
    token, mask = torch.tensor([[9], [9]]), torch.cat([mask, ones(2, 1)], 1)
    assert relative_error(feed(patched, token, ours, mask), feed(stock, token, theirs, mask)) < TOLERANCE


def test_training_mode_is_refused() -> None:
    _, patched = pair()
    patched.train()
    raises_value_error("training", lambda: feed(patched, torch.tensor([[9]]), new_cache()))
