"""Every decoding mode of generate, and everything that it can return, over a paged cache as over a dynamic one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pairs import BLOCK, PAGED, STRADDLING, assert_generates_alike, assert_same, cache_of, pair, record_steps
from tiny import GREEDY, build, prompts, relative_error, scores_of
from transformers import StoppingCriteria

import hf_mla
from hf_mla import PoolExhausted

RETURNED = {"return_dict_in_generate": True, "output_logits": True, "output_scores": True}


def both(inputs: dict[str, torch.Tensor], family: str = "deepseek_v2", **arguments: Any) -> tuple[Any, Any]:
    """(stock's output, the patched model's), drawn from the same random state."""
    stock, patched = pair(family)
    torch.manual_seed(11)
    expected = stock.generate(**inputs, **arguments)
    torch.manual_seed(11)
    return expected, patched.generate(**inputs, **arguments, **PAGED)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_k": 5}, {"top_p": 0.8}])
def test_sampling_with_a_seed(options: dict[str, Any]) -> None:
    expected, got = both(prompts(STRADDLING), do_sample=True, max_new_tokens=20, **RETURNED, **options)
    assert_same(got, expected)
    assert len({tuple(row) for row in got.sequences[:, -20:].tolist()}) == len(STRADDLING)


def test_several_samples_of_each_prompt() -> None:
    expected, got = both(prompts([3, 20]), do_sample=True, num_return_sequences=3, max_new_tokens=20, **RETURNED)
    assert got.sequences.shape == (6, 40)
    assert_same(got, expected)


@pytest.mark.parametrize("family", ["deepseek_v2", "youtu"])
@pytest.mark.parametrize("beams", [3, 4])
def test_beams_of_padded_prompts(beams: int, family: str) -> None:
    inputs = prompts([BLOCK - 1, BLOCK, 5])
    expected, got = both(inputs, family, num_beams=beams, num_return_sequences=2, max_new_tokens=36, **RETURNED)
    assert torch.equal(got.sequences, expected.sequences)
    assert torch.equal(got.beam_indices, expected.beam_indices)
    assert relative_error(got.sequences_scores, expected.sequences_scores) < 1e-5
    assert relative_error(scores_of(got), scores_of(expected)) < 1e-5
    origins = got.beam_indices[:, :20].tolist()
    assert any(len({*row} - {-1}) > 1 for row in origins)  # beams did change rows


def test_beams_share_blocks_and_free_every_one() -> None:
    _, got = both(prompts([3 * BLOCK]), num_beams=4, max_new_tokens=24, **RETURNED)
    table = cache_of(got).table
    table.check()
    assert len(table.rows) == 4
    assert len({block for row in table.rows for block in row}) < sum(len(row) for row in table.rows)
    cache_of(got).reset()
    table.check()
    assert not table.allocator.users


@pytest.mark.parametrize("mode", [{"num_beams": 4}, {"num_return_sequences": 4, "do_sample": True}])
def test_pool_is_no_larger_than_the_rows_need(mode: dict[str, Any]) -> None:
    inputs = prompts([BLOCK, 2 * BLOCK])
    _, got = both(inputs, max_new_tokens=2 * BLOCK, **mode, **RETURNED)
    assert cache_of(got).memory_report().blocks_total <= 4 * (3 + 4) + 8  # and a copy of each row's last block


def test_sampling_with_beams() -> None:
    expected, got = both(prompts([5, 20]), num_beams=3, do_sample=True, max_new_tokens=16, **RETURNED)
    assert torch.equal(got.sequences, expected.sequences)


def test_an_end_token_in_some_rows() -> None:
    free, _ = both(prompts([5, 20, 9]), max_new_tokens=20, **GREEDY)
    end = int(free.sequences[1, 24])  # what row 1 says fifth
    expected, got = both(prompts([5, 20, 9]), max_new_tokens=20, eos_token_id=end, **GREEDY)
    assert (got.sequences[1, 25:] == 0).all() and got.sequences.shape[1] > 25  # it stopped, others went on
    assert_same(got, expected)


def test_an_end_token_in_beams() -> None:
    free, _ = both(prompts([5, 20]), max_new_tokens=20, **GREEDY)
    end = int(free.sequences[1, 24])
    expected, got = both(prompts([5, 20]), num_beams=3, max_new_tokens=20, eos_token_id=end, **RETURNED)
    assert torch.equal(got.sequences, expected.sequences)


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.8},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 12, "eos_token_id": list(range(3, 60))},
        {"bad_words_ids": [[t] for t in range(3, 50)]},
        {"max_length": 29},
        {"max_length": 21},
        {"max_new_tokens": 1},
    ],
    ids=lambda options: "-".join(f"{name}" for name in options),
)
def test_processors_and_lengths(options: dict[str, Any]) -> None:
    limit = {} if {"max_length", "max_new_tokens"} & {*options} else {"max_new_tokens": 20}
    expected, got = both(prompts([5, 20]), **limit, **options, **GREEDY)
    assert_same(got, expected)


def test_stopping_criteria() -> None:
    class AtLength(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            return torch.full((len(input_ids),), input_ids.shape[1] >= 27)

    expected, got = both(prompts([5, 20]), max_new_tokens=20, stopping_criteria=[AtLength()], **GREEDY)
    assert got.sequences.shape[1] == 27
    assert_same(got, expected)


def test_a_streamer_is_given_the_tokens_as_they_come() -> None:
    class Recorder:
        def __init__(self) -> None:
            self.said: list[Any] = []

        def put(self, value: torch.Tensor) -> None:
            self.said += value.flatten().tolist()

        def end(self) -> None:
            self.said.append("end")

    stock, patched = pair()
    theirs, ours = Recorder(), Recorder()
    expected = stock.generate(**prompts([20]), max_new_tokens=9, streamer=theirs)
    got = patched.generate(**prompts([20]), max_new_tokens=9, streamer=ours, **PAGED)
    assert ours.said == theirs.said == [*got[0].tolist(), "end"]
    assert torch.equal(got, expected)


@pytest.mark.parametrize("with_ids", [False, True])
def test_embeddings_in_place_of_tokens(with_ids: bool) -> None:
    inputs = prompts([5, 20])
    embeddings = build(num_hidden_layers=2).get_input_embeddings()(inputs["input_ids"]).detach()
    ids = inputs.pop("input_ids")
    inputs = {**inputs, "inputs_embeds": embeddings, **({"input_ids": ids} if with_ids else {})}
    expected, got = both(inputs, max_new_tokens=20, **GREEDY)
    assert got.sequences.shape == (2, 40 if with_ids else 20)
    assert_same(got, expected)


def test_classifier_free_guidance() -> None:
    expected, got = both(prompts([20]), max_new_tokens=20, guidance_scale=1.5, output_scores=True, **GREEDY)
    assert_same(got, expected)
    assert relative_error(torch.cat(got.scores), torch.cat(expected.scores)) < 1e-5


def test_no_cache_is_as_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = record_steps(monkeypatch)
    expected, got = both(prompts([5, 20]), max_new_tokens=6, use_cache=False, **GREEDY)
    assert not steps
    assert_same(got, expected, 1e-7)


@pytest.mark.parametrize("mode", [{"do_sample": False}, {"num_beams": 2, "do_sample": False}])
def test_outputs_have_stocks_types_and_shapes(mode: dict[str, Any]) -> None:
    expected, got = both(prompts([5, 20]), max_new_tokens=4, output_hidden_states=True, **mode, **RETURNED)
    assert type(got) is type(expected) and [*got.keys()] == [*expected.keys()]
    for theirs, ours in zip(expected.scores + expected.logits, got.scores + got.logits, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    for theirs, ours in zip(expected.hidden_states, got.hidden_states, strict=True):
        assert [state.shape for state in ours] == [state.shape for state in theirs]
        assert all(relative_error(a[:, -1], b[:, -1]) < 1e-5 for a, b in zip(ours, theirs, strict=True))
    assert isinstance(both(prompts([5, 20]), max_new_tokens=4, **mode)[1], torch.Tensor)


def test_attention_weights_with_eager_are_stocks() -> None:
    stock, patched = pair(attn_implementation="eager")
    arguments = {**prompts([17, 17]), "max_new_tokens": 4, "output_attentions": True, **GREEDY}
    expected, got = stock.generate(**arguments), patched.generate(**arguments, **PAGED)
    assert_same(got, expected)
    for theirs, ours in zip(expected.attentions, got.attentions, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a.shape == b.shape and relative_error(a, b) < 1e-5


def test_eager_models_decode_absorbed() -> None:
    stock, patched = pair(attn_implementation="eager")
    assert_generates_alike(stock, patched, **prompts([5, 20]), max_new_tokens=20)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_under_every_gradient_mode(context: Any) -> None:
    stock, patched = pair()
    with context():
        assert_generates_alike(stock, patched, **prompts([5, 20]), max_new_tokens=20)


@pytest.mark.parametrize("prompt, new", [(100, 4), (60, 40)], ids=["in the prompt", "while generating"])
def test_a_pool_too_small_raises_and_the_model_stays_usable(prompt: int, new: int) -> None:
    stock, patched = pair()
    hf_mla.patch(patched, block_size=BLOCK, max_tokens=64)
    with pytest.raises(PoolExhausted, match="max_tokens"):
        patched.generate(**prompts([prompt]), max_new_tokens=new, **GREEDY, **PAGED)
    got = assert_generates_alike(stock, patched, **prompts([40]), max_new_tokens=24)
    assert cache_of(got).memory_report().blocks_total <= 64 // BLOCK
