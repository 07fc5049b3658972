"""A stock model beside a patched one, and what the tests of generation ask of the two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import GREEDY, build, prompts, relative_error, scores_of, twin
from transformers import PreTrainedModel

import hf_mla
from hf_mla import decoder
from hf_mla.compat import CACHE_NAME

BLOCK = 16
PAGED = {"cache_implementation": "paged_mla"}
# The families that these tests go through; test_families.py has every one that is served.
USUAL = ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu"]
# Rows of these lengths begin and end on both sides of a block's boundary, and cross others while they grow.
STRADDLING = [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK]


def pair(
    family: str = "deepseek_v2", block_size: int = BLOCK, **changes: Any
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """(stock, patched): equal weights, two layers unless told otherwise."""
    patched = build(family, **{"num_hidden_layers": 2, **changes})
    return twin(patched), hf_mla.patch(patched, block_size=block_size)


def cache_of(output: Any) -> Any:
    """The cache of a model's or generate's output, whatever this transformers calls it."""
    return getattr(output, CACHE_NAME)


def using(cache: Any) -> dict[str, Any]:
    """The keyword that hands a cache to a forward or to generate."""
    return {CACHE_NAME: cache}


def assert_same(got: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """The same tokens, and raw logits as near as fp32 rounding leaves them."""
    assert torch.equal(got.sequences, expected.sequences)
    assert relative_error(scores_of(got), scores_of(expected)) < tolerance


def assert_generates_alike(
    stock: PreTrainedModel, patched: PreTrainedModel, tolerance: float = 1e-5, **arguments: Any
) -> Any:
    """Greedy generation of both compared; the patched one's output, whose cache is a sound PagedMLACache."""
    expected = stock.generate(**GREEDY, **arguments)
    got = patched.generate(**GREEDY, **arguments, **PAGED)
    assert_same(got, expected, tolerance)
    cache = cache_of(got)
    assert isinstance(cache, hf_mla.PagedMLACache)
    cache.table.check()
    return got


@torch.no_grad()
def attention_peak(model: PreTrainedModel, length: int = 40) -> float:
    """Mean over heads and late queries of the largest attention weight: 1 / length if attention were uniform."""
    eager = twin(model)
    eager.set_attn_implementation("eager")
    weights = eager(**prompts([length]), output_attentions=True).attentions
    return torch.stack([layer[:, :, length // 2 :].amax(-1).mean() for layer in weights]).min().item()


def record_steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """(new columns, absorbed) of every later step over a PagedMLACache, in order."""
    steps: list[tuple[int, bool]] = []
    begin = hf_mla.PagedMLACache.begin_step

    def recording(self: Any, mask: Any, batch_size: int, num_new: int, **options: Any) -> Any:
        plan = begin(self, mask, batch_size, num_new, **options)
        steps.append((num_new, plan.absorbed))
        return plan

    monkeypatch.setattr(hf_mla.PagedMLACache, "begin_step", recording)
    return steps


def absorb_up_to(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """Make steps of more new columns than this expand the history."""
    monkeypatch.setattr(decoder, "MAX_ABSORBED_COLUMNS", columns)


@torch.no_grad()
def feed(model: PreTrainedModel, ids: torch.Tensor, cache: Any, mask: torch.Tensor | None = None, **more: Any) -> Any:
    """Logits of the new columns `ids` [B, q] over `cache`; `mask` [B, L] covers the history too."""
    return model(input_ids=ids, attention_mask=mask, **using(cache), **more).logits


def in_pieces(length: int, size: int) -> list[slice]:
    """Slices of `size` that cover 0 .. length."""
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def raises_value_error(match: str, call: Callable[[], Any]) -> None:
    """`call` raises a ValueError whose message matches."""
    with pytest.raises(ValueError, match=match):
        call()
