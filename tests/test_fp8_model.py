"""Models over a cache of 8-bit latents: patched ones do what unpatched ones do over the same, near what is exact."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from packaging.version import Version
from pairs import BLOCK, absorb_up_to, cache_of, feed, record_steps, using
from tiny import GREEDY, VERSION, build, prompts, relative_error, scores_of, twin

import hf_mla

FP8 = torch.float8_e4m3fn
OPTIONS = {"block_size": BLOCK, "cache_dtype": FP8}


def new_cache() -> hf_mla.PagedMLACache:
    return hf_mla.PagedMLACache(block_size=BLOCK, dtype=FP8)


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    patched = build("deepseek_v3", num_hidden_layers=2)
    return twin(patched), hf_mla.patch(patched, **OPTIONS)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("family", ["deepseek_v3", pytest.param("deepseek_v32", marks=pytest.mark.slow)])
def test_generation(family: str, beams: int) -> None:
    if family == "deepseek_v32" and Version("5.20") > VERSION:
        pytest.skip("stock caches expanded keys and values here")
    patched = build(family, num_hidden_layers=2)
    stock = twin(patched)
    hf_mla.patch(patched, **OPTIONS)
    options = {**prompts([35, 35]), **GREEDY, "max_new_tokens": 20, "num_beams": beams}
    got = patched.generate(**options, cache_implementation="paged_mla")
    expected = stock.generate(**options, **using(hf_mla.PagedMLACache(stock.config, block_size=BLOCK, dtype=FP8)))
    assert torch.equal(got.sequences, expected.sequences)
    assert relative_error(scores_of(got), scores_of(expected)) < 1e-4
    cache = cache_of(got)
    cache.table.check()
    assert {layer.pages.dtype for layer in cache.mla_layers} == {FP8}
    if beams == 1:  # nothing is read back in the first step, 8-bit history in the second
        exact = scores_of(stock.generate(**options))
        errors = [relative_error(scores_of(got)[:, step], exact[:, step]) for step in (0, 1)]
        assert errors[0] < 1e-5 and 1e-4 < errors[1] < 0.3  # attention of random weights is sharp


def test_padded_rows_are_each_alone(models: tuple[Any, Any]) -> None:
    inputs = prompts([1, BLOCK, 2 * BLOCK + 3])
    together = models[1].generate(**inputs, **GREEDY, max_new_tokens=12, cache_implementation="paged_mla")
    for row, ids in enumerate(inputs["input_ids"]):
        alone = ids[inputs["attention_mask"][row].bool()][None]
        one = models[1].generate(alone, **GREEDY, max_new_tokens=12, cache_implementation="paged_mla")
        assert relative_error(scores_of(together)[row], scores_of(one)[0]) < 1e-4


@pytest.mark.parametrize("absorbed", [4, 128])
def test_turns_crops_and_copies(models: tuple[Any, Any], absorbed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that is fed in pieces, cropped, copied and reordered goes on as one of an unpatched model does.

    Where history is expanded (of 4 columns on), a patched model has the step's own latents exactly.
    """
    absorb_up_to(monkeypatch, absorbed)
    ids = prompts([90, 90])["input_ids"]
    steps = record_steps(monkeypatch)
    results: list[list[torch.Tensor]] = []
    exact = hf_mla.PagedMLACache(block_size=BLOCK)
    for model, cache in ((models[0], exact), (models[0], new_cache()), (models[1], new_cache())):
        logits = []
        logits += [feed(model, ids[:, :40], cache), feed(model, ids[:, 40:60], cache)]
        other = copy.deepcopy(cache)
        cache.crop(-20)
        logits += [feed(model, ids[:, 50:70], cache), feed(model, ids[:, 70:71], cache)]
        other.reorder_cache(torch.tensor([1, 1]))
        logits += [feed(model, ids[:, 60:80], other), feed(model, ids[:, 80:81], other)]
        other.table.check()
        results.append(logits)
    for wanted, stock, patched in zip(*results, strict=True):
        if absorbed >= 20:
            assert relative_error(patched, stock) < 1e-4
        assert relative_error(patched, wanted) <= 1.2 * relative_error(stock, wanted) + 1e-5
    assert (20, absorbed >= 20) in steps and (1, True) in steps


def test_memory_report_counts_bytes() -> None:
    cache = hf_mla.PagedMLACache(dtype=FP8)
    cache.update(torch.randn(1, 1, 100, 512), torch.randn(1, 1, 100, 64), 0)
    assert cache.memory_report().bytes_per_token == 656
    assert cache.update(torch.randn(1, 1, 1, 512), torch.randn(1, 1, 1, 64), 0)[0].dtype == torch.float32


def test_what_is_not_served_is_refused() -> None:
    with pytest.raises(ValueError, match="cache_dtype"):
        hf_mla.MLAConfig(cache_dtype=torch.float8_e5m2)
    with pytest.raises(ValueError, match="dtype"):
        hf_mla.PagedMLACache(dtype=torch.float8_e5m2)
    with pytest.raises(ValueError, match="'flashinfer' can't read"):
        hf_mla.MLAConfig(backend="flashinfer", cache_dtype=FP8)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_on_a_gpu_with_graphs_and_fused_kernels(family: str) -> None:
    sizes = {"kv_lora_rank": 128, "qk_rope_head_dim": 64, "head_dim": 64, "num_hidden_layers": 2}
    scores = []
    for options in ({"graphs": True, "fused": True}, {"graphs": False, "fused": False, "backend": "reference"}):
        model = build(family, sharp=1.0, **sizes).to("cuda", torch.bfloat16)
        hf_mla.patch(model, cache_dtype=FP8, **options)
        inputs = {name: x.cuda() for name, x in prompts([100, 37]).items()}
        forced = prompts([12, 12], seed=3)["input_ids"].cuda()
        cache = hf_mla.PagedMLACache(model.config, dtype=FP8)
        mask, logits = (
            inputs["attention_mask"],
            [feed(model, inputs["input_ids"], cache, inputs["attention_mask"])[:, -1:]],
        )
        for column in forced.T:
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
            positions = (mask.sum(1, keepdim=True) - 1).long()
            logits.append(feed(model, column[:, None], cache, mask, position_ids=positions))
        scores.append(torch.cat(logits, 1).float())
    assert relative_error(*scores) < 0.05
