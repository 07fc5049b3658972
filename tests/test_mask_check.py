"""Decode steps are planned before their masks are read: the results are those of the masks all the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pairs import PAGED, using
from tiny import build, relative_error
from transformers import DynamicCache

import hf_mla
from hf_mla.cache.mask_check import MaskCheck
from hf_mla.cache.sequences import SequenceTable


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What each check said."""
    said: list[bool] = []
    holds = MaskCheck.holds

    def recording(check: MaskCheck) -> bool:
        said.append(holds(check))
        return said[-1]

    monkeypatch.setattr(MaskCheck, "holds", recording)
    return said


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """New columns of each step whose mask was read before it."""
    counts: list[int] = []
    read = SequenceTable.read_mask

    def recording(table: SequenceTable, mask: Any, batch_size: int, num_new: int) -> Any:
        if mask is not None:
            counts.append(num_new)
        return read(table, mask, batch_size, num_new)

    monkeypatch.setattr(SequenceTable, "read_mask", recording)
    return counts


def make_inputs(padded: bool) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(1, 90, (3, 9))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :4] = 0
        mask[2, :1] = 0
    return ids, mask


@torch.no_grad()
def steps(model: Any, cache: Any, ids: torch.Tensor, mask: torch.Tensor, widths: list[int]) -> list[torch.Tensor]:
    """Logits of a prompt of `widths[0]` columns and of each further piece."""
    logits, end = [], 0
    for width in widths:
        start, end = end, end + width
        positions = (mask[:, :end].cumsum(1) - 1).clamp(min=0)[:, start:end]
        out = model(ids[:, start:end], attention_mask=mask[:, :end], position_ids=positions, **using(cache))
        logits.append(out.logits * mask[:, start:end, None])
    return logits


@pytest.mark.parametrize("padded", [False, True])
def test_generate_reads_the_prompts_mask_alone(padded: bool, answers: list[bool], reads: list[int]) -> None:
    model = build("deepseek_v2")
    ids, mask = make_inputs(padded)
    options = {"max_new_tokens": 7, "do_sample": False}
    expected = model.generate(ids, attention_mask=mask, **options)
    assert torch.equal(hf_mla.patch(model).generate(ids, attention_mask=mask, **options, **PAGED), expected)
    # Newer versions of transformers hand no mask on where it masks nothing.
    assert reads in ([[9, 1]] if padded else [[9], []]) and all(answers)
    assert len(answers) == (5 if padded else 6 if reads else 0)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("widths", [[4, 1, 1, 1, 1, 1], [4, 2, 3]])
def test_columns_masked_while_decoding(padded: bool, widths: list[int], answers: list[bool]) -> None:
    """As a loop does that goes on with pads for finished rows."""
    model = build("deepseek_v2")
    ids, mask = make_inputs(padded)
    mask[1, 6:8] = 0
    expected = steps(model, DynamicCache(), ids, mask, widths)
    cache = hf_mla.PagedMLACache()
    got = steps(hf_mla.patch(model), cache, ids, mask, widths)
    assert all(relative_error(a, b) < 1e-5 for a, b in zip(got, expected, strict=True))
    assert False in answers
    assert cache.memory_report().tokens == int(mask.sum())
    cache.table.check()


@pytest.mark.parametrize("padded", [False, True])
def test_a_mask_that_unmasks_the_past_is_refused_and_can_be_mended(padded: bool, answers: list[bool]) -> None:
    model = hf_mla.patch(build("deepseek_v2"))
    ids, mask = make_inputs(padded=True)
    if not padded:
        mask[0, 4:5] = 0
        mask[:, :4] = 1
    cache = hf_mla.PagedMLACache()
    expected = steps(model, hf_mla.PagedMLACache(), ids, mask, [7, 1, 1])
    steps(model, cache, ids, mask, [7, 1])
    with pytest.raises(ValueError, match="attention_mask unmasks"), torch.no_grad():
        model(ids[:, 8:], attention_mask=torch.ones_like(mask), **using(cache))
    assert answers[-1] is False and cache.get_seq_length() == 8
    positions = (mask.cumsum(1) - 1)[:, 8:]
    with torch.no_grad():
        logits = model(ids[:, 8:], attention_mask=mask, position_ids=positions, **using(cache)).logits
    assert relative_error(logits, expected[2]) < 1e-5


def test_rows_chosen_anew_are_checked_anew(answers: list[bool]) -> None:
    model = hf_mla.patch(build("deepseek_v2"))
    ids, mask = make_inputs(padded=True)
    cache = hf_mla.PagedMLACache()
    steps(model, cache, ids, mask, [6, 1, 1])
    order = torch.tensor([2, 0, 1])
    cache.reorder_cache(order)
    positions = (mask.cumsum(1) - 1)[:, 8:]
    with torch.no_grad():
        model(ids[order, 8:], attention_mask=mask[order], position_ids=positions[order], **using(cache))
    assert answers == [True, True]
