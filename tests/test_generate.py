"""generate over a paged cache gives stock's logits: every family, head geometry, rope and precision."""

from __future__ import annotations

import pytest
import torch
from pairs import (
    BLOCK,
    PAGED,
    STRADDLING,
    USUAL,
    assert_generates_alike,
    assert_same,
    attention_peak,
    cache_of,
    feed,
    pair,
    record_steps,
    using,
)
from tiny import GREEDY, YARN, build, prompts, relative_error, twin
from transformers import DynamicCache, GenerationConfig

import hf_mla


@pytest.mark.parametrize("family", USUAL)
def test_64_tokens_of_a_padded_batch_are_stock(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stock, patched = pair(family, num_hidden_layers=3)
    assert attention_peak(stock) > 8 / 40  # far from uniform, so that a wrong or missing key shows
    steps = record_steps(monkeypatch)
    got = assert_generates_alike(stock, patched, 1e-4, **prompts(STRADDLING), max_new_tokens=64)
    assert steps == [(2 * BLOCK, False)] + 63 * [(1, True)]
    assert cache_of(got).memory_report().tokens == sum(STRADDLING) + 63 * len(STRADDLING)  # no pad is stored


def test_logits_would_differ_if_a_key_were_lost() -> None:
    stock, patched = pair()
    inputs = prompts([2 * BLOCK])
    cache = hf_mla.PagedMLACache(block_size=BLOCK)
    feed(patched, inputs["input_ids"], cache)
    for layer in cache.mla_layers:
        layer.pages[cache.table.rows[0][0], 5] = 0
    token = torch.tensor([[7]])
    whole = torch.cat([inputs["input_ids"], token], 1)
    assert relative_error(feed(patched, token, cache)[0, -1], stock(whole).logits[0, -1]) > 1e-2


@pytest.mark.parametrize("mscale", [0.707, 1.0])
@pytest.mark.parametrize("factor", [4.0, 40.0])
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite"])
def test_yarn_beyond_the_original_length(family: str, factor: float, mscale: float) -> None:
    rope = {**YARN, "factor": factor, "mscale": mscale, "mscale_all_dim": mscale}
    stock, patched = pair(family, rope_parameters=rope)
    attention = stock.model.layers[0].self_attn
    assert attention.scaling != pytest.approx((20 + 16) ** -0.5)  # yarn's mscale is in it, so 1/sqrt(d) would fail
    assert rope["original_max_position_embeddings"] < 70
    assert_generates_alike(stock, patched, **prompts([70, 33]), max_new_tokens=12)


@pytest.mark.parametrize("q_lora_rank", [None, 24])
@pytest.mark.parametrize("interleave", [True, False])
def test_both_rope_layouts_with_and_without_query_compression(interleave: bool, q_lora_rank: int | None) -> None:
    stock, patched = pair("deepseek_v3", rope_interleave=interleave, q_lora_rank=q_lora_rank)
    assert_generates_alike(stock, patched, **prompts([3, 20]), max_new_tokens=12)


@pytest.mark.parametrize("family", ["deepseek_v2", "glm4_moe_lite"])
def test_queries_without_compression(family: str) -> None:
    stock, patched = pair(family, q_lora_rank=None)
    assert_generates_alike(stock, patched, **prompts([3, 20]), max_new_tokens=12)


@pytest.mark.parametrize("family", USUAL)
def test_biases_in_the_projections(family: str) -> None:
    stock, patched = pair(family, attention_bias=True)
    assert patched.model.layers[0].self_attn.kv_a_proj_with_mqa.bias is not None
    assert_generates_alike(stock, patched, **prompts([3, 20]), max_new_tokens=12)


@pytest.mark.parametrize("rank", [96, 40])
@pytest.mark.parametrize("heads", [1, 4, 5, 17])
def test_head_counts_and_ranks(heads: int, rank: int) -> None:
    hidden = 136 if heads == 17 else 80
    sizes = {"num_attention_heads": heads, "num_key_value_heads": heads, "hidden_size": hidden, "kv_lora_rank": rank}
    stock, patched = pair(**sizes)
    assert_generates_alike(stock, patched, **prompts([3, 20]), max_new_tokens=12)


@pytest.mark.parametrize("scale", [10.0, 100.0])
def test_very_sharp_attention(scale: float) -> None:
    stock, patched = pair(sharp=4 * scale)
    assert attention_peak(stock) > 0.9
    assert_generates_alike(stock, patched, 1e-4, **prompts([3, 20]), max_new_tokens=12)


@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
def test_every_block_size(block_size: int) -> None:
    stock, patched = pair(block_size=block_size)
    assert_generates_alike(stock, patched, **prompts([3, 60]), max_new_tokens=12)


@torch.no_grad()
def _teacher_forced(model: object, ids: torch.Tensor, mask: torch.Tensor, cache: object, prompt: int) -> torch.Tensor:
    """[B, steps, vocab] logits of `ids` fed token by token after a prompt of `prompt` columns."""
    logits = [feed(model, ids[:, :prompt], cache, mask[:, :prompt])[:, -1:]]
    for column in range(prompt, ids.shape[1]):
        logits.append(feed(model, ids[:, column : column + 1], cache, mask[:, : column + 1]))
    return torch.cat(logits, 1).float()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["deepseek_v2", "youtu"])
def test_half_precision_is_no_worse_than_stock_in_half_precision(family: str, dtype: torch.dtype) -> None:
    # All layers dense: a router flips experts on the smallest rounding, which would drown the attention's error.
    dense = {} if family == "youtu" else {"first_k_dense_replace": 2}
    half = build(family, num_hidden_layers=2, sharp=2.0, **dense).to(dtype)
    exact = twin(half).float()  # the same rounded weights
    inputs = prompts([5, 17, 31, 40])
    ids = torch.cat(
        [inputs["input_ids"], torch.randint(3, 97, (4, 40), generator=torch.Generator().manual_seed(3))], 1
    )
    mask = torch.cat([inputs["attention_mask"], torch.ones(4, 40, dtype=torch.int64)], 1)

    truth = _teacher_forced(exact, ids, mask, DynamicCache(), 40)
    stock_error = relative_error(_teacher_forced(half, ids, mask, DynamicCache(), 40), truth)
    hf_mla.patch(half)
    paged_error = relative_error(_teacher_forced(half, ids, mask, hf_mla.PagedMLACache(block_size=BLOCK), 40), truth)
    print(f"{family} {dtype}: stock {stock_error:.2e}, paged {paged_error:.2e}")
    assert 1e-5 < stock_error < 0.2  # the comparison means something
    assert paged_error < 1.25 * stock_error


def test_the_name_in_a_generation_config_works_twice() -> None:
    stock, patched = pair()
    inputs = prompts([3, 20])
    config = GenerationConfig(max_new_tokens=8, pad_token_id=0, **GREEDY, **PAGED)
    expected = stock.generate(**inputs, max_new_tokens=8, **GREEDY)
    for _ in range(2):
        got = patched.generate(**inputs, generation_config=config)
        assert isinstance(cache_of(got), hf_mla.PagedMLACache)
        assert_same(got, expected)
    assert config.cache_implementation == "paged_mla"


def test_the_name_in_the_models_own_generation_config() -> None:
    stock, patched = pair()
    patched.generation_config.cache_implementation = "paged_mla"
    got = patched.generate(**prompts([3, 20]), max_new_tokens=8, **GREEDY)
    assert isinstance(cache_of(got), hf_mla.PagedMLACache)
    assert_same(got, stock.generate(**prompts([3, 20]), max_new_tokens=8, **GREEDY))


@pytest.mark.filterwarnings("ignore:.*past_key_values.*deprecated:FutureWarning")
@pytest.mark.parametrize("name", sorted({"past_key_values", *using(None)}))
def test_a_cache_of_the_users_own_is_filled(name: str) -> None:
    stock, patched = pair()
    cache = hf_mla.PagedMLACache(block_size=32)
    got = patched.generate(**prompts([3, 20]), max_new_tokens=8, **GREEDY, **{name: cache})
    assert_same(got, stock.generate(**prompts([3, 20]), max_new_tokens=8, **GREEDY))
    assert cache_of(got) is cache and cache.get_seq_length() == 27


def test_a_cache_and_the_name_together_are_refused_as_in_stock() -> None:
    _, patched = pair()
    with pytest.raises(ValueError, match="cache_implementation"):
        patched.generate(**prompts([3]), max_new_tokens=2, **PAGED, **using(hf_mla.PagedMLACache()))


def test_an_unpatched_model_asked_for_the_name_raises() -> None:
    with pytest.raises(ValueError, match="hf_mla.patch"):
        build(num_hidden_layers=1).generate(**prompts([3]), max_new_tokens=2, **PAGED)


def test_another_name_and_none_run_stock_caches() -> None:
    stock, patched = pair()
    for arguments in ({}, {"cache_implementation": "dynamic"}, {"cache_implementation": "static"}):
        expected = stock.generate(**prompts([3, 20]), max_new_tokens=8, **GREEDY, **arguments)
        got = patched.generate(**prompts([3, 20]), max_new_tokens=8, **GREEDY, **arguments)
        assert type(cache_of(got)) is type(cache_of(expected))
        assert_same(got, expected, 1e-7)
