"""PrefixPool: prompts that come back begin where they are no longer known, and give what a fresh stock model gives."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from pairs import BLOCK, USUAL, assert_same, cache_of, pair, record_steps, using
from tiny import GREEDY, build, prompts, relative_error, scores_of

import hf_mla
from hf_mla import PrefixPool

TOLERANCE = 1e-5


def ids_of(length: int, seed: int = 1) -> torch.Tensor:
    return prompts([length], seed=seed)["input_ids"]


def batch(*rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Left-padded rows."""
    width = max(row.shape[1] for row in rows)
    pads = [torch.nn.functional.pad(row, (width - row.shape[1], 0)) for row in rows]
    mask = [torch.nn.functional.pad(torch.ones_like(row), (width - row.shape[1], 0)) for row in rows]
    return {"input_ids": torch.cat(pads), "attention_mask": torch.cat(mask)}


def check(pool: PrefixPool) -> None:
    """The pool's book is sound, and nothing is in use any more."""
    gc.collect()
    pool._blocks.check()
    assert not pool._blocks.users


def both(stock: Any, patched: Any, pool: PrefixPool, inputs: dict, **options: Any) -> list[int]:
    """Generates with both and compares; the tokens that each row's prefill found."""
    arguments = {**inputs, "max_new_tokens": 8, **GREEDY, **options}
    got = patched.generate(**arguments, past_key_values=pool)
    assert_same(got, stock.generate(**arguments))
    return pool.reused


@pytest.mark.parametrize("family", [USUAL[0], *(pytest.param(name, marks=pytest.mark.slow) for name in USUAL[1:])])
def test_a_prompt_that_comes_back(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stock, patched = pair(family)
    pool, ids = PrefixPool(), ids_of(70)
    inputs = batch(ids)
    assert both(stock, patched, pool, inputs) == [0]
    steps = record_steps(monkeypatch)
    assert both(stock, patched, pool, inputs) == [64]
    assert [new for new, _ in steps] == [6] + 7 * [1]
    assert both(stock, patched, pool, batch(ids[:, :64])) == [48]  # all is known, and the last token still run
    assert both(stock, patched, pool, batch(ids[:, :65])) == [64]
    assert both(stock, patched, pool, batch(torch.cat([ids[:, :40], ids_of(30, seed=9)], 1))) == [32]
    assert both(stock, patched, pool, batch(ids_of(70, seed=5))) == [0]
    check(pool)


def test_a_chats_answers_are_known_too() -> None:
    stock, patched = pair()
    pool, ids = PrefixPool(), ids_of(20)
    for turn in range(3):
        arguments = {**batch(ids), "max_new_tokens": 20, **GREEDY}
        got = patched.generate(**arguments, past_key_values=pool)
        assert_same(got, stock.generate(**arguments))
        assert pool.reused == [(ids.shape[1] - 7) // BLOCK * BLOCK if turn else 0]
        ids = torch.cat([got.sequences, ids_of(6, seed=turn)], 1)
        del got
    check(pool)


def test_rows_that_know_different_parts() -> None:
    stock, patched = pair()
    pool = PrefixPool()
    a, b, c = ids_of(70, 1), ids_of(40, 2), ids_of(55, 3)
    both(stock, patched, pool, batch(a))
    both(stock, patched, pool, batch(b[:, :30]))
    assert both(stock, patched, pool, batch(a, b, c, a[:, :33])) == [64, 16, 0, 32]
    assert both(stock, patched, pool, batch(a, b, c)) == [64, 32, 48]
    assert both(stock, patched, pool, batch(c, torch.cat([a, b], 1)), max_new_tokens=30) == [48, 64]
    check(pool)


def test_only_what_is_not_known_is_run() -> None:
    _, patched = pair()
    pool, seen = PrefixPool(), []
    a, b = ids_of(200, 1), ids_of(200, 2)
    patched.generate(**batch(a), max_new_tokens=1, past_key_values=pool)
    patched.model.layers[1].mlp.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[:2]))
    pool.clear()  # the hook makes another model of it
    patched.generate(**batch(a), max_new_tokens=1, past_key_values=pool)
    seen.clear()
    patched.generate(**batch(a, b), max_new_tokens=1, past_key_values=pool)
    assert pool.reused == [192, 0] and seen == [(1, 192), (2, 8)]


def test_rows_that_know_nothing_are_completed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    stock, patched = pair()
    pool, a = PrefixPool(), ids_of(200, 1)
    both(stock, patched, pool, batch(a), max_new_tokens=1)
    steps = record_steps(monkeypatch)
    rows = batch(a, ids_of(190, 2), ids_of(165, 3), ids_of(40, 4))
    assert both(stock, patched, pool, rows, max_new_tokens=1) == [192, 0, 0, 0]
    assert [new for new, _ in steps] == [182, 32, 8]  # two rows to where the first goes on, another one, and all
    check(pool)


@pytest.mark.parametrize(
    "options",
    [{"num_beams": 3}, {"num_return_sequences": 2, "do_sample": True, "top_k": 1}, {"prefill_chunk_size": 5}],
    ids=["beams", "sequences", "chunks"],
)
@pytest.mark.slow
def test_ways_to_generate(options: dict) -> None:
    stock, patched = pair()
    pool, inputs = PrefixPool(), batch(ids_of(40), ids_of(21, 2))
    arguments = {**inputs, "max_new_tokens": 20, "do_sample": False, **options}
    expected = stock.generate(**arguments)
    for _ in range(3):
        assert torch.equal(patched.generate(**arguments, past_key_values=pool), expected)
    assert pool.reused[0] == 32
    check(pool)


@pytest.mark.slow
def test_assisted_decoding_runs_as_without_a_pool() -> None:
    stock, patched = pair()
    pool, ids = PrefixPool(), ids_of(12).repeat(1, 4)
    arguments = {**batch(ids), "max_new_tokens": 12, "do_sample": False, "prompt_lookup_num_tokens": 3}
    for _ in range(2):
        assert torch.equal(patched.generate(**arguments, past_key_values=pool), stock.generate(**arguments))
    assert both(stock, patched, pool, batch(ids)) == [32]
    check(pool)


@pytest.mark.slow
def test_right_pads_holes_and_odd_positions() -> None:
    stock, patched = pair()
    pool, ids = PrefixPool(), ids_of(50)
    both(stock, patched, pool, batch(ids))
    padded = {"input_ids": torch.cat([ids, ids[:, :4]], 1), "attention_mask": torch.ones(1, 54, dtype=torch.int64)}
    padded["attention_mask"][:, 50:] = 0
    assert both(stock, patched, pool, padded) == [48]
    holes = {"input_ids": ids.clone(), "attention_mask": torch.ones_like(ids)}
    holes["attention_mask"][:, 20:25] = 0
    assert both(stock, patched, pool, holes) == [16]
    fresh = PrefixPool()
    moved = {**batch(ids), "position_ids": torch.arange(3, 53)[None]}
    for _ in range(2):
        assert both(stock, patched, fresh, moved) == [0]
    assert fresh.known_tokens == 0 and both(stock, patched, fresh, batch(ids)) == [0]
    check(pool)


def test_embeddings_are_neither_looked_up_nor_remembered() -> None:
    stock, patched = pair()
    pool, ids = PrefixPool(), ids_of(40)
    both(stock, patched, pool, batch(ids))
    known = pool.known_tokens
    embeds = torch.randn(1, 40, 80)
    arguments = {"inputs_embeds": embeds, "attention_mask": torch.ones_like(ids), "max_new_tokens": 20, **GREEDY}
    got = patched.generate(**arguments, past_key_values=pool)
    assert_same(got, stock.generate(**arguments))
    assert pool.known_tokens == known


def test_the_least_recently_used_goes_first_and_what_is_in_use_never() -> None:
    stock, patched = pair()
    pool = PrefixPool(max_tokens=8 * BLOCK)
    a, b, c = (ids_of(50, seed) for seed in (1, 2, 3))
    both(stock, patched, pool, batch(a))
    both(stock, patched, pool, batch(b))
    assert both(stock, patched, pool, batch(a)) == [48]  # b is the older one now
    both(stock, patched, pool, batch(c))
    assert both(stock, patched, pool, batch(a)) == [48]
    held = patched.generate(**batch(a), max_new_tokens=8, past_key_values=pool, **GREEDY)
    both(stock, patched, pool, batch(b))
    both(stock, patched, pool, batch(c))
    assert both(stock, patched, pool, batch(a)) == [48]
    with pytest.raises(hf_mla.PoolExhausted, match="max_tokens"):
        patched.generate(**batch(ids_of(90, 4)), max_new_tokens=1, past_key_values=pool)
    pool._blocks.check()
    assert both(stock, patched, pool, batch(a)) == [48]
    del held
    assert both(stock, patched, pool, batch(ids_of(90, 4))) == [0]
    check(pool)


def test_a_cache_that_generate_returns_goes_on_alone() -> None:
    stock, patched = pair()
    pool, ids = PrefixPool(), ids_of(40)
    first = patched.generate(**batch(ids), max_new_tokens=8, past_key_values=pool, **GREEDY)
    known = dict(pool._blocks.block_of)
    cache = cache_of(first)
    cache.crop(-(cache.get_seq_length() - 30))  # into a known block, which mustn't be written
    other = torch.cat([ids[:, :30], ids_of(40, 7)], 1)
    arguments = {**batch(other), "max_new_tokens": 8, **GREEDY}
    assert_same(patched.generate(**arguments, **using(cache)), stock.generate(**arguments))
    assert pool._blocks.block_of == known
    assert both(stock, patched, pool, batch(ids)) == [32]
    del cache, first
    check(pool)


def test_models_that_a_pool_cannot_serve_are_refused() -> None:
    pool, inputs = PrefixPool(), batch(ids_of(20))
    with pytest.raises(ValueError, match="isn't patched"):
        build().generate(**inputs, max_new_tokens=1, past_key_values=pool)
    sparse = hf_mla.patch(build("deepseek_v32"), block_size=BLOCK)
    with pytest.raises(ValueError, match="more than latents"):
        sparse.generate(**inputs, max_new_tokens=1, past_key_values=pool)
    with pytest.raises(ValueError, match="max_tokens"):
        PrefixPool(max_tokens=0)


def test_a_patch_that_is_off_leaves_all_to_stock() -> None:
    stock, patched = pair()
    hf_mla.patch(patched, enabled=False)
    pool = PrefixPool()
    arguments = {**batch(ids_of(30)), "max_new_tokens": 4, **GREEDY}
    assert_same(patched.generate(**arguments, past_key_values=pool), stock.generate(**arguments))
    assert pool.known_tokens == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, pytest.param(RuntimeError, marks=pytest.mark.slow)])
def test_a_call_that_fails_leaves_the_pool_sound(error: type[BaseException]) -> None:
    stock, patched = pair()
    pool, a, b = PrefixPool(), ids_of(50, 1), ids_of(60, 2)
    both(stock, patched, pool, batch(a))
    module = patched.model.layers[1].mlp.experts
    forward = type(module).forward

    def fail(*_: Any) -> None:
        raise error("stop")

    module.forward = fail
    with pytest.raises(error):
        patched.generate(**batch(a, b), max_new_tokens=1, past_key_values=pool)
    del module.forward
    assert type(module).forward is forward
    check(pool)
    assert both(stock, patched, pool, batch(a, b)) == [48, 0]
    check(pool)


def test_logits_after_reuse_are_a_fresh_prefills() -> None:
    stock, patched = pair()
    pool = PrefixPool()
    a, b = ids_of(90, 1), ids_of(77, 2)
    arguments = {**batch(a, b), "max_new_tokens": 1, **GREEDY}
    expected = scores_of(stock.generate(**arguments))
    for _ in range(3):
        got = patched.generate(**arguments, past_key_values=pool)
        assert relative_error(scores_of(got), expected) < TOLERANCE
    assert "known" in repr(pool)
    pool.clear()
    del got
    pool.clear()
    assert pool.known_tokens == 0


def test_a_generation_config_that_asks_for_pages_goes_with_a_pool() -> None:
    _, patched = pair()
    patched.generation_config.cache_implementation = "paged_mla"
    pool, arguments = PrefixPool(), {**batch(ids_of(50)), "max_new_tokens": 4}
    fresh = patched.generate(**arguments)
    for _ in range(2):
        assert torch.equal(patched.generate(**arguments, past_key_values=pool), fresh)
    assert pool.reused == [48]


@pytest.mark.slow
def test_copies_of_a_cache_share_the_pools_blocks() -> None:
    stock, patched = pair()
    pool, ids = PrefixPool(), ids_of(40)
    cache = cache_of(patched.generate(**batch(ids), max_new_tokens=3, past_key_values=pool, **GREEDY))
    cache.crop(-(cache.get_seq_length() - 38))
    before, copied = pool.nbytes, copy.deepcopy(cache)
    assert copied.mla_layers[0].pages is cache.mla_layers[0].pages
    for seed, each in ((5, copied), (6, cache)):
        arguments = {**batch(torch.cat([ids[:, :38], ids_of(9, seed)], 1)), "max_new_tokens": 8, **GREEDY}
        assert_same(patched.generate(**arguments, **using(each)), stock.generate(**arguments))
    assert pool.nbytes < 2 * before
    del cache, each
    gc.collect()
    assert pool._blocks.users
    del copied
    check(pool)


@pytest.mark.gpu
def test_on_a_gpu_with_graphs_and_pages_that_move() -> None:
    stock, patched = pair()
    stock, patched = stock.to("cuda"), patched.to("cuda")
    pool, a, b = PrefixPool(), ids_of(70, 1), ids_of(55, 2)
    for rows, found in [((a,), [0]), ((a, b), [64, 0]), ((b, a, a), [48, 64, 64]), ((a,), [64])]:
        inputs = {name: tensor.to("cuda") for name, tensor in batch(*rows).items()}
        arguments = {**inputs, "max_new_tokens": 60, **GREEDY}
        got = patched.generate(**arguments, past_key_values=pool)
        assert_same(got, stock.generate(**arguments), 1e-4)
        assert pool.reused == found
        del got
    check(pool)
