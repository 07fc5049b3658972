"""torch.compile with fullgraph: without a cache, over stock's cache, and over a paged one."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pairs import PAGED, pair, using
from test_graphs import gpu_model, on_gpu, twin_of_stock
from tiny import GREEDY, prompts, relative_error
from transformers import CompileConfig, DynamicCache

import hf_mla


@pytest.fixture(autouse=True)
def fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@torch.no_grad()
def decode_steps(call: Any, model: Any, caches: list[Any]) -> list[torch.Tensor]:
    """Logits of three decode steps of `call` over each cache, the prompt being the model's."""
    batch, logits = prompts([9, 5]), []
    for cache in caches:
        mask = batch["attention_mask"]
        model(**batch, **using(cache))
        for token in range(3):
            mask = torch.cat([mask, mask.new_ones(2, 1)], dim=1)
            step = {"input_ids": torch.tensor([[3 + token], [4]]), "position_ids": (mask.cumsum(1) - 1)[:, -1:]}
            logits.append(call(**step, attention_mask=mask, **using(cache)).logits)
    return logits


@pytest.mark.slow
def test_fullgraph_without_a_cache_and_over_stocks() -> None:
    stock, patched = pair()
    batch = prompts([9, 5])
    compiled = torch.compile(patched.__call__, fullgraph=True, backend="eager")
    with torch.no_grad():
        expected = stock(**batch, use_cache=False).logits
        assert relative_error(compiled(**batch, use_cache=False).logits, expected) < 1e-5
    expected = decode_steps(stock, stock, [DynamicCache()])
    assert relative_error(torch.cat(decode_steps(compiled, patched, [DynamicCache()])), torch.cat(expected)) < 1e-5


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_fullgraph_over_paged_caches(backend: str) -> None:
    """Several caches, by one compiled call: none takes another's place, and none compiles anew."""
    stock, patched = pair()
    compiled = torch.compile(patched.__call__, fullgraph=True, backend=backend, dynamic=True)
    expected = decode_steps(stock, stock, [DynamicCache() for _ in range(3)])
    with torch._dynamo.config.patch(error_on_recompile=True):
        got = decode_steps(compiled, patched, [hf_mla.PagedMLACache() for _ in range(3)])
    assert relative_error(torch.cat(got), torch.cat(expected)) < 1e-5


@pytest.mark.parametrize("change", [copy.copy, copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_a_copied_cache_has_a_ticket_of_its_own(change: Any) -> None:
    cache = hf_mla.PagedMLACache()
    assert int(change(cache).ticket) != int(cache.ticket)


@pytest.mark.parametrize("mode", ["reduce-overhead", "default", None])
def test_generate_compiles_where_it_is_told_to(mode: str | None) -> None:
    stock, patched = pair()
    config = CompileConfig(fullgraph=True, backend="eager", mode=None)
    wrapped = type(patched)._valid_auto_compile_criteria
    asked = SimpleNamespace(compile_config=CompileConfig(mode=mode), disable_compile=False)
    wrapped(patched, using(hf_mla.PagedMLACache()), asked)
    assert asked.compile_config.mode == (mode if mode is None else "default")
    config._compile_all_devices = True
    arguments = {**prompts([9, 5]), "max_new_tokens": 6, **GREEDY}
    expected = stock.generate(**arguments)
    got = patched.generate(**arguments, compile_config=config, **PAGED)
    assert hasattr(patched, "_compiled_call")
    assert relative_error(torch.stack(got.logits), torch.stack(expected.logits)) < 1e-5
    plain = pair()[1]
    plain.generate(**arguments, **PAGED)
    assert not hasattr(plain, "_compiled_call")


def test_what_the_operator_does_not_take_is_refused() -> None:
    patched = pair()[1]
    cache = hf_mla.PagedMLACache()
    compiled = torch.compile(patched.__call__, fullgraph=True, backend="eager")
    with torch.no_grad(), pytest.raises(Exception, match="inputs_embeds: not supported by a compiled pass"):
        compiled(inputs_embeds=torch.randn(1, 4, patched.config.hidden_size), **using(cache))


def test_modes_with_graphs_of_their_own_are_refused() -> None:
    patched = pair(num_hidden_layers=1)[1]
    cache, batch = hf_mla.PagedMLACache(), prompts([9, 5])
    compiled = torch.compile(patched.__call__, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad(), pytest.raises(Exception, match="mode: one with CUDA graphs of its own"):
        compiled(**batch, **using(cache))


@pytest.mark.gpu
def test_generate_compiles_on_a_gpu() -> None:
    model = gpu_model()
    stock = twin_of_stock(model)
    arguments = {**on_gpu(prompts([9, 5])), "max_new_tokens": 12, **GREEDY}
    expected = stock.generate(**arguments)
    hf_mla.patch(model)
    for _ in range(2):
        got = model.generate(**arguments, compile_config=CompileConfig(fullgraph=True), **PAGED)
        assert relative_error(torch.stack(got.logits), torch.stack(expected.logits)) < 1e-4
