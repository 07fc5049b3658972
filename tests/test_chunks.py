"""Long prompts in several passes, and long continuations over history that is expanded a piece at a time."""

from __future__ import annotations

from types import SimpleNamespace
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
    pair,
    record_steps,
    using,
)
from tiny import GREEDY, build, config_of, prompts, relative_error, twin
from transformers import DynamicCache

import hf_mla
from hf_mla import chunks, history
from hf_mla.attention import LatentsOrKV
from hf_mla.cache.pieces import units_of
from hf_mla.cache.sequences import SequenceTable
from hf_mla.kernels import partial

TOLERANCE = 1e-5


def in_full(first: str, *others: str) -> list[Any]:
    """All of them in the full suite, the first one in the fast one."""
    return [first, *(pytest.param(name, marks=pytest.mark.slow) for name in others)]


def new_cache(**options: Any) -> hf_mla.PagedMLACache:
    return hf_mla.PagedMLACache(block_size=BLOCK, **options)


def cut_prompts(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """Make passes of more new columns than this several, of `columns` for one row."""
    for name in ("MOST_TOKENS", "LEAST_TOKENS", "LEAST_COLUMNS"):
        monkeypatch.setattr(chunks, name, columns)


@pytest.fixture
def expanded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A workspace so small that a piece is one block a row; the tokens that each expansion was given."""
    tokens: list[int] = []
    expand = LatentsOrKV.expand

    def recording(self: Any, ckv: torch.Tensor, k_pe: torch.Tensor) -> Any:
        tokens.append(ckv.shape[0] * ckv.shape[2])
        return expand(self, ckv, k_pe)

    monkeypatch.setattr(LatentsOrKV, "expand", recording)
    monkeypatch.setattr(history, "WORKSPACE_BYTES", 1)
    return tokens


def problem(queries: int, keys: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Any:
    generator = torch.Generator().manual_seed(queries * 7 + keys)
    shapes = [(2, 3, queries, 24), (2, 3, keys, 24), (2, 3, keys, 20)]
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    return (q * scale).to(dtype), (k * scale).to(dtype), v.to(dtype)


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    scores = q.double() @ k.double().transpose(2, 3) * 0.3
    if causal:
        scores += torch.full(scores.shape[2:], float("-inf"), dtype=torch.double).triu(1)
    return scores.softmax(-1) @ v.double(), scores.logsumexp(-1)


@pytest.mark.parametrize("scale", [1.0, 10.0, 100.0])
@pytest.mark.parametrize("queries, keys, causal", [(1, 1, True), (7, 7, True), (33, 33, True), (5, 40, False)])
def test_attend(queries: int, keys: int, causal: bool, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = problem(queries, keys, scale**0.5)
    wanted = exact(q, k, v, causal)
    for score_bytes in (partial.SCORE_BYTES, 1, 2000):
        monkeypatch.setattr(partial, "SCORE_BYTES", score_bytes)
        strided = k.transpose(1, 2).contiguous().transpose(1, 2)
        out, lse = partial.attend(q, strided, v, 0.3, causal)
        assert relative_error(out, wanted[0]) < 1e-5 and relative_error(lse, wanted[1]) < 1e-6


def test_attend_refuses_what_has_no_meaning() -> None:
    q, k, v = problem(3, 4)
    with pytest.raises(ValueError, match="as many keys"):
        partial.attend(q, k, v, 0.3, causal=True)
    with pytest.raises(ValueError, match="key has no tokens"):
        partial.attend(q, k[:, :, :0], v[:, :, :0], 0.3, causal=False)


@pytest.mark.parametrize("cuts", [[1], [39], [7, 8, 31], list(range(1, 40))])
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_merged_parts_are_one_pass(cuts: list[int], scale: float) -> None:
    q, k, v = problem(5, 40, scale**0.5)
    wanted_out, wanted_lse = exact(q, k, v, causal=False)
    out, lse = torch.full((2, 3, 5, 20), float("nan")), torch.full((2, 3, 5), float("-inf"))  # nothing yet
    for start, stop in zip([0, *cuts], [*cuts, 40], strict=True):
        part = partial.attend(q, k[:, :, start:stop], v[:, :, start:stop], 0.3, causal=False)
        out, lse = partial.merge(out, lse, *part)
        out, lse = partial.merge(out, lse, torch.full_like(out, float("nan")), torch.full_like(lse, float("-inf")))
    assert relative_error(out, wanted_out) < 1e-5 and relative_error(lse, wanted_lse) < 1e-6


def test_merging_nothing_with_nothing() -> None:
    nothing = torch.full((2, 3), float("nan")), torch.full((2,), float("-inf"))
    out, lse = partial.merge(nothing[0].clone(), nothing[1], *nothing)
    assert (out == 0).all() and (lse == float("-inf")).all()


def test_units_hold_every_stored_column_and_all_history_once() -> None:
    table, generator = SequenceTable(4), torch.Generator().manual_seed(3)
    for new in (9, 1, 13, 30):
        kept = torch.rand(6, new, generator=generator) < 0.6
        kept[:3] = True
        kept[5] = False
        before = list(table.stored) or [0] * 6
        extension = table.extend(kept, 6, new)
        for limit in (1, 8, 50, 1000):
            seen: dict[int, list[int]] = {}
            for unit in units_of(extension, table.table, 4, limit):
                rows = list(range(6)) if unit.rows is None else unit.rows.tolist()
                slots = torch.cat(unit.pieces, 1) if unit.pieces else torch.empty(len(rows), 0)
                assert all(piece.numel() <= max(limit, 4 * len(rows)) for piece in unit.pieces)
                for i, row in enumerate(rows):
                    columns = range(new) if unit.columns is None else unit.columns.tolist()
                    assert list(columns) == kept[row].nonzero().flatten().tolist()
                    wanted = [table.rows[row][t // 4] * 4 + t % 4 for t in range(before[row])]
                    assert slots[i].tolist() == wanted and row not in seen
                    seen[row] = wanted
            assert set(seen) == {row for row in range(6) if kept[row].any()}


@pytest.mark.parametrize("family", in_full(*USUAL, "longcat_flash"))
def test_a_long_continuation_is_read_in_pieces(
    family: str, expanded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, patched = pair(family) if family in USUAL else (None, hf_mla.patch(build(family), block_size=BLOCK))
    stock = stock or hf_mla.unpatch(twin(patched))
    absorb_up_to(monkeypatch, 0)
    inputs = prompts([90, 57, 3])
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    expected = feed(stock, ids, DynamicCache(config=stock.config), mask)
    cache, logits = new_cache(), []
    for piece in (slice(0, 40), slice(40, 41), slice(41, 90)):  # the shortest row begins in the last one
        logits.append(feed(patched, ids[:, piece], cache, mask[:, : piece.stop]))
        for layer in cache.mla_layers:  # what is not stored is not read
            free = [block for block in range(len(layer.pages)) if block not in cache.table.allocator.users]
            layer.pages[free] = float("nan")
    kept = mask.bool()
    assert relative_error(torch.cat(logits, 1)[kept], expected[kept]) < TOLERANCE
    assert BLOCK in expanded  # of the history, a block of a row; else the new columns
    assert max(expanded[len(cache.mla_layers) :]) <= 3 * 49


@pytest.mark.parametrize("side", ["left", "right"])
def test_masks_with_holes(side: str, expanded: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    stock, patched = pair()
    absorb_up_to(monkeypatch, 0)
    inputs = prompts([60, 60, 44, 21], side=side)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    mask[1, 25:37] = 0
    mask[2, [20, 31]] = 0
    expected = feed(stock, ids, DynamicCache(), mask)
    cache = new_cache()
    logits = [feed(patched, ids[:, p], cache, mask[:, : p.stop]) for p in (slice(0, 30), slice(30, 60))]
    kept = mask.bool()
    assert relative_error(torch.cat(logits, 1)[kept], expected[kept]) < TOLERANCE


def test_large_scores_and_a_bfloat16_cache(expanded: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("deepseek_v2", sharp=100.0, num_hidden_layers=2)
    stock, patched = twin(model), hf_mla.patch(model, block_size=BLOCK)
    absorb_up_to(monkeypatch, 0)
    ids = prompts([70])["input_ids"]
    cache = new_cache()
    feed(patched, ids[:, :30], cache)
    assert relative_error(feed(patched, ids[:, 30:], cache), feed(stock, ids, DynamicCache())[:, 30:]) < 1e-4
    coarse = new_cache(dtype=torch.bfloat16)
    feed(patched, ids[:, :30], coarse)
    assert torch.isfinite(feed(patched, ids[:, 30:], coarse)).all()


@pytest.mark.parametrize("family", in_full(*USUAL, "deepseek_v32"))
def test_a_long_prompt_is_several_passes(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if family in USUAL:
        stock, patched = pair(family)
    else:
        stock = build(family)
        patched = hf_mla.patch(twin(stock), block_size=BLOCK)
    absorb_up_to(monkeypatch, 4)
    cut_prompts(monkeypatch, 24)
    steps = record_steps(monkeypatch)
    inputs = prompts([70, 41, 3])
    got = assert_generates_alike(stock, patched, max_new_tokens=5, **inputs)
    assert [new for new, _ in steps] == [24, 24, 22, 1, 1, 1, 1]
    assert got.sequences.shape == (3, 75)
    embeds = patched.get_input_embeddings()(inputs["input_ids"])
    cut = feed(patched, inputs["input_ids"], new_cache(), inputs["attention_mask"])
    given = {"inputs_embeds": embeds, "attention_mask": inputs["attention_mask"], **using(new_cache())}
    assert torch.equal(patched(**given).logits, cut)


def test_several_passes_are_as_one_and_bound_what_one_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    _, patched = pair()
    tokens: list[int] = []
    patched.model.layers[1].mlp.register_forward_pre_hook(lambda _, args: tokens.append(args[0].shape[:2].numel()))
    arguments = {**prompts([120, 95]), **GREEDY, **PAGED, "max_new_tokens": 4}
    once = patched.generate(**arguments)
    assert max(tokens) == 240
    tokens.clear()
    cut_prompts(monkeypatch, 32)
    assert_same(patched.generate(**arguments), once)
    assert max(tokens) == 64


def test_wanted_states_are_of_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    stock, patched = pair()
    cut_prompts(monkeypatch, 16)
    ids = prompts([50])["input_ids"]
    got = patched(ids, output_hidden_states=True, **using(new_cache())).hidden_states
    assert relative_error(got[-1], stock(ids, output_hidden_states=True).hidden_states[-1]) < TOLERANCE


@pytest.mark.parametrize("past", [0, 20])
def test_a_prompt_that_fails_in_a_later_pass_is_undone(past: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stock, patched = pair()
    cut_prompts(monkeypatch, 16)
    ids, cache, calls = prompts([past + 60])["input_ids"], new_cache(), []
    if past:
        feed(patched, ids[:, :past], cache)

    def fail(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt

    handle = patched.model.layers[1].mlp.register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        feed(patched, ids[:, past:], cache)
    handle.remove()
    assert cache.get_seq_length() == past
    cache.table.check()
    assert relative_error(feed(patched, ids[:, past:], cache), stock(ids).logits[:, past:]) < TOLERANCE


def test_a_pass_is_cut_by_tokens_and_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("deepseek_v2")

    def columns(rows: int, width: int) -> int:
        module = SimpleNamespace(config=config, dtype=torch.bfloat16)
        return chunks.columns_at_once(module, torch.empty(rows, width, device="meta"))

    assert columns(1, 100_000) == chunks.MOST_TOKENS and columns(1, 1500) == 1500
    assert columns(4, 100_000) == chunks.MOST_TOKENS // 4
    assert columns(200, 1000) == 1000 and columns(200, 5000) == chunks.LEAST_COLUMNS
    token = chunks.pass_bytes_per_token(config, 2)
    for free, wanted in [(10**12, chunks.MOST_TOKENS), (int(5000 * token / chunks.MEMORY_SHARE), 4096), (0, 2048)]:
        monkeypatch.setattr(chunks, "_free_bytes", lambda _, free=free: free)
        assert columns(1, 100_000) == wanted


def test_rope_that_goes_by_the_texts_length_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
    model = build("deepseek_v3", num_hidden_layers=2, rope_parameters=rope, max_position_embeddings=32)
    stock, patched = twin(model), hf_mla.patch(model, block_size=BLOCK)
    cut_prompts(monkeypatch, 16)
    steps = record_steps(monkeypatch)
    assert_generates_alike(stock, patched, max_new_tokens=3, **prompts([60]))
    assert steps[0] == (60, False)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("queries, keys, causal", [(300, 300, True), (128, 4096, False), (2048, 2048, True)])
def test_attend_on_a_gpu(queries: int, keys: int, causal: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(2, 16, queries, 192), (2, 16, keys, 192), (2, 16, keys, 128)]
    q, k, v = (torch.randn(shape, generator=generator, device="cuda").to(dtype) for shape in shapes)
    out, lse = partial.attend(q, k, v, 192**-0.5, causal)
    scores = q.double() @ k.double().transpose(2, 3) * 192**-0.5
    if causal:
        scores.masked_fill_(torch.ones(queries, keys, device="cuda").triu(1).bool(), float("-inf"))
    assert out.shape == (2, 16, queries, 128) and lse.shape == (2, 16, queries)
    assert relative_error(out, scores.softmax(-1) @ v.double()) < {torch.float32: 1e-3}.get(dtype, 1e-2)
    assert (lse - scores.logsumexp(-1)).abs().max() < 2e-3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_several_passes_on_a_gpu(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    model = build("deepseek_v2", num_hidden_layers=2, first_k_dense_replace=2, head_dim=64, **sizes).to("cuda")
    inputs = {name: tensor.to("cuda") for name, tensor in prompts([500, 333, 60]).items()}
    exact = twin(model)(**inputs).logits[:, -1]
    stock, patched = twin(model).to(dtype), hf_mla.patch(model.to(dtype))
    cut_prompts(monkeypatch, 150)
    got = feed(patched, inputs["input_ids"], hf_mla.PagedMLACache(), inputs["attention_mask"])[:, -1]
    error = relative_error(got, exact)
    assert error < max(1e-4, 1.5 * relative_error(stock(**inputs).logits[:, -1], exact)), error
