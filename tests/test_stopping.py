"""generate looks a step late whether to stop, on a GPU over a paged cache: nobody sees the step too many."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pairs import cache_of, using
from test_graphs import gpu_model, on_gpu, twin_of_stock
from tiny import GREEDY, prompts, relative_error
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import utils

import hf_mla
from hf_mla.stopping import may_look_late

PAGED = {"cache_implementation": "paged_mla"}


@pytest.fixture
def undone(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Steps that each late look took back."""
    if not hasattr(utils, "DeferredStopCheck"):
        pytest.skip("transformers before 5.17 looks at once")
    counts: list[int] = []
    finish = utils.DeferredStopCheck.finish

    def recording(check: Any) -> int:
        counts.append(finish(check))
        return counts[-1]

    monkeypatch.setattr(utils.DeferredStopCheck, "finish", recording)
    return counts


class Streamed:
    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.tokens.append(-1)


class CountedSyncs(LogitsProcessor):
    """Has any wait for the device raise, between the third decode step and the last."""

    def __init__(self, last: int) -> None:
        self.calls, self.last = 0, last

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self.calls += 1
        if self.calls in (4, self.last):
            torch.cuda.set_sync_debug_mode("error" if self.calls == 4 else "default")
        return scores


def test_cpus_small_pools_and_other_caches_look_at_once() -> None:
    cache = hf_mla.PagedMLACache()
    cache.runs_ahead = True
    assert may_look_late(torch.device("cuda"), cache)
    assert not may_look_late(torch.device("cpu"), cache)
    cache.runs_ahead = False
    assert not may_look_late(torch.device("cuda"), cache)
    limited = hf_mla.PagedMLACache(max_tokens=100)
    limited.runs_ahead = True
    assert not may_look_late(torch.device("cuda"), limited) and not may_look_late(torch.device("cuda"), None)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [[20], [13, 40, 16]])
@pytest.mark.parametrize("own_cache", [False, True])
def test_stops_where_stock_stops(rows: list[int], own_cache: bool, undone: list[int]) -> None:
    model = gpu_model()
    stock = twin_of_stock(model)
    batch = on_gpu(prompts(rows))
    free = stock.generate(**batch, max_new_tokens=12, **GREEDY).sequences[:, -12:]
    options = {**GREEDY, "max_new_tokens": 40, "eos_token_id": sorted({int(row[5 + i]) for i, row in enumerate(free)})}
    hf_mla.patch(model)
    expected = stock.generate(**batch, **options)
    got = model.generate(**batch, **options, **(using(hf_mla.PagedMLACache()) if own_cache else PAGED))
    assert torch.equal(got.sequences, expected.sequences) and len(got.logits) == len(expected.logits)
    assert max(relative_error(a, b) for a, b in zip(got.logits, expected.logits, strict=True)) < 1e-4
    assert cache_of(got).get_seq_length() == cache_of(expected).get_seq_length()
    cache_of(got).table.check()
    assert undone == [1]


@pytest.mark.gpu
def test_stops_at_the_length_without_a_step_too_many(undone: list[int]) -> None:
    model = hf_mla.patch(gpu_model())
    output = model.generate(**on_gpu(prompts([20])), max_new_tokens=9, **GREEDY, **PAGED)
    assert undone == [0] and cache_of(output).get_seq_length() == 20 + 8


@pytest.mark.gpu
def test_a_streamer_gets_the_tokens(undone: list[int]) -> None:
    model = gpu_model()
    stock = twin_of_stock(model)
    batch = on_gpu(prompts([20]))
    end = int(stock.generate(**batch, max_new_tokens=8, **GREEDY).sequences[0, -1])
    heard = []
    for one, more in ((stock, {}), (hf_mla.patch(model), PAGED)):
        streamer = Streamed()
        one.generate(**batch, max_new_tokens=30, eos_token_id=end, streamer=streamer, **GREEDY, **more)
        heard.append(streamer.tokens)
    assert heard[0] == heard[1] and undone == [1]


@pytest.mark.gpu
def test_sampling_uses_as_many_random_numbers_as_stock(undone: list[int]) -> None:
    model = gpu_model()
    stock = twin_of_stock(model)
    batch = on_gpu(prompts([20, 7]))
    generator = torch.cuda.default_generators[0]
    found = []
    for one, more in ((stock, {}), (hf_mla.patch(model), PAGED)):
        torch.manual_seed(3)
        tokens = one.generate(**batch, max_new_tokens=60, do_sample=True, eos_token_id=list(range(0, 97, 3)), **more)
        found.append((tokens.tolist(), generator.get_offset()))
    assert found[0] == found[1] and undone == [1]


@pytest.mark.gpu
def test_the_host_never_waits_for_the_device() -> None:
    model = hf_mla.patch(gpu_model())
    batch = on_gpu(prompts([20, 9]))
    model.generate(**batch, max_new_tokens=30, **PAGED)  # captures
    processor = CountedSyncs(last=29)
    try:
        model.generate(**batch, max_new_tokens=30, logits_processor=LogitsProcessorList([processor]), **PAGED)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert processor.calls == 30
