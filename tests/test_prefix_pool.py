"""PrefixPool: prompts that come back begin where they are no longer known, and give what a fresh stock model gives."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from pairs import BLOCK, USUAL, assert_same, cache_of, pair, record_steps, using
from tiny import GREEDY, build, prompts, relative_error, scores_of, twin

import hf_mla
from hf_mla import PrefixPool, identity

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


@pytest.mark.parametrize(
    "options",
    [{"num_beams": 3}, {"num_return_sequences": 2, "do_sample": True, "top_k": 1}, {"prefill_chunk_size": 5}],
    ids=["beams", "sequences", "chunks"],
)
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


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
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
