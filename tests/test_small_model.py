"""The shipped model, which has learnt something: its losses and what it recalls are the same over a paged cache.

Random weights can't tell a cache that loses far tokens from one that keeps them; this model's answers depend on them.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from pairs import PAGED, record_steps, using
from tiny import relative_error
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import hf_mla

EXAMPLES = Path(__file__).parent.parent / "examples"
FOLDER = EXAMPLES / "small_model"
pytestmark = pytest.mark.skipif(not (FOLDER / "model.safetensors").exists(), reason=f"{FOLDER} holds no weights")

DEPTHS = (0.0, 0.5, 0.9)


@pytest.fixture(scope="module")
def recall() -> ModuleType:
    """examples/recall.py, without putting the folder on the path."""
    spec = importlib.util.spec_from_file_location("example_recall", EXAMPLES / "recall.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def held_out() -> str:
    return (FOLDER / "heldout.txt").read_text()


def load(dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=dtype).eval()


@pytest.fixture(scope="module")
def stock() -> Any:
    return load(torch.float32)


@pytest.fixture(scope="module")
def patched() -> Any:
    return hf_mla.patch(load(torch.float32))


@pytest.mark.parametrize(
    "chunk", [pytest.param(1, marks=pytest.mark.slow), 7, pytest.param(64, marks=pytest.mark.slow), 200]
)
def test_loss_over_a_paged_cache_is_the_loss(
    chunk: int, stock: Any, patched: Any, tokenizer: Any, held_out: str, recall: ModuleType
) -> None:
    sizes = {"window": 257, "batch_size": 4, "max_tokens": 4 * 256}
    plain = recall.text_loss(stock, tokenizer, held_out, **sizes)
    paged = recall.cached_text_loss(patched, tokenizer, held_out, hf_mla.PagedMLACache, chunk=chunk, **sizes)
    assert (paged.tokens, paged.bytes) == (plain.tokens, plain.bytes)
    assert paged.nats == pytest.approx(plain.nats, rel=1e-5)
    assert plain.per_byte < 1.5  # it is a trained model: an untrained one of this vocabulary pays 2.5 nats and more


@pytest.mark.slow
def test_loss_with_latents_in_eight_bits(patched: Any, tokenizer: Any, held_out: str, recall: ModuleType) -> None:
    sizes = {"window": 257, "batch_size": 4, "max_tokens": 4 * 256, "chunk": 7}

    def eight_bits() -> Any:
        return hf_mla.PagedMLACache(dtype=torch.float8_e4m3fn)

    exact = recall.cached_text_loss(patched, tokenizer, held_out, hf_mla.PagedMLACache, **sizes)
    loss = recall.cached_text_loss(patched, tokenizer, held_out, eight_bits, **sizes)
    print(f"perplexity: {exact.perplexity:.3f}, with latents in 8 bits {loss.perplexity:.3f}")
    assert loss.nats != exact.nats
    assert loss.perplexity == pytest.approx(exact.perplexity, rel=0.01)


@pytest.mark.slow
def test_recall_with_latents_in_eight_bits(patched: Any, tokenizer: Any, held_out: str, recall: ModuleType) -> None:
    prompts = recall.build_recall_prompts(
        tokenizer, held_out, length=250, depths=DEPTHS, per_depth=4, facts=4, seed=250
    )
    shares = []
    with hf_mla.patched(load(torch.float32), cache_dtype=torch.float8_e4m3fn) as coarse:
        for model in (patched, coarse):
            answers = recall.recall_answers(model, tokenizer, prompts, **PAGED)
            shares.append(sum(recall.score_recall(prompts, answers).values()) / len(DEPTHS))
    print(f"recall of one of 4 facts: {shares[0]:.2f}, with latents in 8 bits {shares[1]:.2f}")
    assert shares[1] >= shares[0] - 0.1


@torch.no_grad()
def token_nats(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    """[B, T - 1] loss of each token of `ids` [B, T], all but the first 64 fed one by one over `cache`."""
    logits = [model(ids[:, :64], **using(cache)).logits]
    logits += [model(ids[:, t, None], **using(cache)).logits for t in range(64, ids.shape[1] - 1)]
    return cross_entropy(torch.cat(logits, 1).float().transpose(1, 2), ids[:, 1:], reduction="none")


def test_loss_in_bfloat16_is_as_near_to_exact_as_stocks(stock: Any, tokenizer: Any, held_out: str) -> None:
    ids = torch.tensor(tokenizer(held_out, verbose=False)["input_ids"][: 4 * 128]).view(4, 128)
    exact = token_nats(stock, ids, DynamicCache())
    half = load(torch.bfloat16)
    of_stock = token_nats(half, ids, DynamicCache())
    of_paged = token_nats(hf_mla.patch(half), ids, hf_mla.PagedMLACache())
    errors = relative_error(of_paged, exact), relative_error(of_stock, exact)
    print(f"relative error of the token losses in bf16: paged {errors[0]:.2e}, stock {errors[1]:.2e}")
    assert 1e-4 < errors[1] < 0.1
    assert errors[0] < 1.25 * errors[1]
    assert of_paged.mean().item() == pytest.approx(of_stock.mean().item(), rel=5e-3)


def check_recall(
    recall: ModuleType, models: list[Any], tokenizer: Any, text: str, length: int, per_depth: int, facts: int = 1
) -> dict[float, float]:
    """The share of right answers by depth, after checking that stock and patched give the same ones."""
    stock, patched = models
    prompts = recall.build_recall_prompts(
        tokenizer, text, length=length, depths=DEPTHS, per_depth=per_depth, facts=facts, seed=length
    )
    answers = recall.recall_answers(stock, tokenizer, prompts)
    assert recall.recall_answers(patched, tokenizer, prompts, **PAGED) == answers
    shares = recall.score_recall(prompts, answers)
    print(f"recall of one of {facts} facts over {length} tokens by depth: {shares}")
    return shares


def test_a_planted_fact_is_recalled_from_every_depth(
    stock: Any, patched: Any, tokenizer: Any, held_out: str, recall: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = record_steps(monkeypatch)
    shares = check_recall(recall, [stock, patched], tokenizer, held_out, length=250, per_depth=8)
    assert min(shares.values()) >= 0.5  # chance is 1 / 9000
    assert any(absorbed for _, absorbed in steps)


def test_the_right_one_of_four_facts_is_recalled(
    stock: Any, patched: Any, tokenizer: Any, held_out: str, recall: ModuleType
) -> None:
    shares = check_recall(recall, [stock, patched], tokenizer, held_out, length=250, per_depth=8, facts=4)
    assert min(shares.values()) >= 0.5  # 1 / 4 for who copies any of the passage's numbers


@pytest.mark.slow
@pytest.mark.parametrize("length, per_depth", [(1000, 4), (2500, 2)])
def test_recall_over_long_passages(
    length: int, per_depth: int, stock: Any, patched: Any, tokenizer: Any, held_out: str, recall: ModuleType
) -> None:
    shares = check_recall(recall, [stock, patched], tokenizer, held_out, length, per_depth)
    assert sum(shares.values()) / len(shares) >= 0.5


def test_without_the_passages_middle_a_fact_is_not_recalled(
    patched: Any, tokenizer: Any, held_out: str, recall: ModuleType
) -> None:
    prompts = recall.build_recall_prompts(
        tokenizer, held_out, length=250, depths=(0.5,), per_depth=6, facts=1, seed=250
    )
    right = {False: 0, True: 0}
    for item, forget in ((item, forget) for item in prompts for forget in right):
        ids = tokenizer(item.prompt, return_tensors="pt")["input_ids"]
        cache = hf_mla.PagedMLACache()
        with torch.no_grad():
            patched(ids[:, :-1], **using(cache))
        if forget:
            for layer in cache.mla_layers:
                layer.pages[cache.table.rows[0][1:-1]] = 0  # all but the first and the last block
        mask = torch.ones_like(ids)
        said = patched.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, **using(cache))
        right[forget] += tokenizer.decode(said[0, ids.shape[1] :]).strip().startswith(item.answer)
    assert right[False] >= 4 and right[True] <= 1


@pytest.mark.parametrize("prompt", ["In the beginning", "And Moses said unto the people,"])
def test_greedy_text_is_stocks(prompt: str, stock: Any, patched: Any, tokenizer: Any) -> None:
    inputs = tokenizer(prompt, return_tensors="pt")
    options = {"max_new_tokens": 80, "do_sample": False}
    expected = stock.generate(**inputs, **options)
    assert torch.equal(patched.generate(**inputs, **options, **PAGED), expected)
