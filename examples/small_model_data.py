"""Text, tokenizer and batches for `train_small_model.py`.

Shape legend: N rows, T tokens of a row, K facts of a row, F tokens of a fact, M attention weights of a lesson.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from recall import DIGITS, FACT, NAMES
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
OPENING = 0.15  # share of recall rows that begin with a fact
REFERENCE = re.compile(r"^(\d?[A-Za-z]+)(\d+):\d+ (.*)$")


@dataclass(frozen=True)
class Chapter:
    """A chapter's verses, one a line."""

    book: str
    text: str


def read_chapters(path: Path) -> list[Chapter]:
    """Chapters of a file of lines such as "Ge1:1 In the beginning ...", references taken off.

    Raises ValueError for a file in which no line has that form.
    """
    verses: dict[tuple[str, str], list[str]] = {}
    for line in path.read_text().splitlines():
        if found := REFERENCE.match(line):
            verses.setdefault((found[1], found[2]), []).append(found[3].strip())
    if not verses:
        raise ValueError(f"text {path} has no lines of the form 'Ge1:1 In the beginning ...'")
    return [Chapter(book, "\n".join(lines) + "\n") for (book, _), lines in verses.items()]


def split_by_books(chapters: list[Chapter], share: float) -> tuple[list[Chapter], list[Chapter]]:
    """(training, held out): the last whole books that together hold at least `share` (0..1) of the characters."""
    wanted = share * sum(len(chapter.text) for chapter in chapters)
    held_books: set[str] = set()
    held = 0
    for chapter in reversed(chapters):
        if chapter.book not in held_books and held >= wanted:
            break
        held_books.add(chapter.book)
        held += len(chapter.text)
    return (
        [chapter for chapter in chapters if chapter.book not in held_books],
        [chapter for chapter in chapters if chapter.book in held_books],
    )


def train_tokenizer(texts: list[str], vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE in which every digit is a token of its own: a number can then be recalled digit by digit."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # each name counts as frequent, so that all of them become single tokens
    named = [FACT.format(name=name) for name in NAMES for _ in range(100)]
    tokenizer.train_from_iterator([*texts, *named], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS} $B",
        special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        padding_side="left",
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def encode_stream(tokenizer: Any, chapters: list[Chapter]) -> torch.Tensor:
    """All chapters as one int64 stream [tokens], each between BOS and EOS."""
    ids: list[int] = []
    for encoded in tokenizer([chapter.text for chapter in chapters], add_special_tokens=False)["input_ids"]:
        ids += [tokenizer.bos_token_id, *encoded, tokenizer.eos_token_id]
    return torch.tensor(ids)


@dataclass(frozen=True)
class Lesson:
    """Attention that a row needs: in `layer`, the tokens at `queries` [N, M] should look at those at `keys` [N, M]."""

    layer: int
    queries: torch.Tensor
    keys: torch.Tensor


@dataclass(frozen=True)
class Rows:
    """ids [N, T] int64 and `targets` [any] int64: flat positions (row * T + t, t >= 1) whose tokens carry loss."""

    ids: torch.Tensor
    targets: torch.Tensor
    lessons: tuple[Lesson, ...] = ()


class BatchMaker:
    """Draws rows on the device of `stream`; no host synchronisation, as shapes never depend on what was drawn."""

    def __init__(self, tokenizer: Any, stream: torch.Tensor) -> None:
        self.stream = stream
        self.device = stream.device
        self.bos = tokenizer.bos_token_id

        def encode(text: str) -> list[int]:
            return tokenizer(text, add_special_tokens=False)["input_ids"]

        facts = [encode(f"{FACT.format(name=name)} {'0' * DIGITS}.\n") for name in NAMES]
        if len({len(fact) for fact in facts}) != 1:
            raise ValueError("NAMES must be single tokens: train the tokenizer with them, or on more text")
        self.facts = torch.tensor(facts, device=self.device)
        self.digits = torch.tensor([encode(str(digit)) for digit in range(10)], device=self.device).flatten()
        self.newline = encode("\n")[0]
        self.name = next(at for at, pair in enumerate(zip(*facts[:2], strict=True)) if pair[0] != pair[1])
        self.first_digit = facts[0].index(encode("0")[0])
        self.fact_length = len(facts[0])

    def most_facts(self, length: int) -> int:
        """How many facts a row of `length` tokens can state and ask for."""
        return min((length - 2) // self.fact_length // 2, len(NAMES))

    def text(self, rows: int, length: int) -> Rows:
        """Running text; every token carries loss."""
        ids = self._slices(rows, length)
        positions = torch.arange(rows * length, device=self.device).view(rows, length)
        return Rows(ids, positions[:, 1:].flatten())

    def recall(self, rows: int, length: int, facts: int) -> Rows:
        """Running text with `facts` sentences written over it twice each; the numbers' second time carries loss.

        In half of the rows all first times come before all second times, so that the number must be chosen by its
        name among `facts`, and long ways back are as frequent as short ones. Two lessons come along: each digit (and
        the space before the number) is to look at its sentence's name in the first layer, and what precedes an asked
        digit is to look, in the second, at that digit's first time. Raises ValueError if the row is too short.
        """
        most = self.most_facts(length)
        if not 1 <= facts <= most:
            raise ValueError(f"facts must be in 1..{most} at length={length}, got {facts}")
        slots = (length - 2) // self.fact_length
        opening = torch.rand(rows, 1, device=self.device) < OPENING
        places = self._two_places(rows, slots, facts, opening)
        spare = length - 2 - slots * self.fact_length
        offset = (2 + torch.randint(spare + 1, (rows, 1), device=self.device)).masked_fill(opening, 1)
        names = torch.rand(rows, len(NAMES), device=self.device).argsort(1)[:, :facts]
        sentences = self.facts[names]
        drawn = torch.randint(10, (rows, facts, DIGITS), device=self.device)
        drawn[..., 0] = torch.randint(1, 10, (rows, facts), device=self.device)
        sentences[..., self.first_digit : self.first_digit + DIGITS] = self.digits[drawn]
        ids = self._slices(rows, length)
        starts = [place * self.fact_length + offset for place in places]
        ids.scatter_(1, torch.cat(starts, 1) - 1, self.newline)
        ids[:, 0] = self.bos
        within = torch.arange(self.fact_length, device=self.device)
        first, second = (start[..., None] + within for start in starts)
        for at in (first, second):
            ids.scatter_(1, at.flatten(1), sentences.flatten(1))
        # the space before the number and the stop after it carry loss as well: generation starts and ends with them
        answers = slice(self.first_digit - 1, self.first_digit + DIGITS + 1)
        row = torch.arange(rows, device=self.device)[:, None, None] * length
        return Rows(ids, (second[..., answers] + row).flatten(), self._lessons(first, second))

    def _lessons(self, first: torch.Tensor, second: torch.Tensor) -> tuple[Lesson, ...]:
        """Lessons for sentences whose tokens stand at `first` and again at `second`, both [N, K, F]."""
        digits = slice(self.first_digit, self.first_digit + DIGITS)
        before = slice(self.first_digit - 1, self.first_digit + DIGITS - 1)
        both = torch.cat([first, second], 1)
        numbers = both[..., self.first_digit - 1 : self.first_digit + DIGITS]
        named = both[..., self.name, None].expand_as(numbers)
        return (
            Lesson(0, numbers.flatten(1), named.flatten(1)),
            Lesson(1, second[..., before].flatten(1), first[..., digits].flatten(1)),
        )

    def _slices(self, rows: int, length: int) -> torch.Tensor:
        start = torch.randint(len(self.stream) - length, (rows, 1), device=self.device)
        ids = self.stream[start + torch.arange(length, device=self.device)]
        ids[:, 0] = self.bos
        return ids

    def _two_places(
        self, rows: int, slots: int, facts: int, opening: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots [N, K] of the first and of the second time of each fact; `opening` rows [N, 1] use slot 0."""
        places = torch.rand(rows, slots, device=self.device).argsort(1)[:, : 2 * facts]
        places = places - places.amin(1, keepdim=True) * opening
        pairs = places.view(rows, 2, facts)
        ordered = places.sort(1).values
        shuffle = torch.rand(rows, facts, device=self.device).argsort(1)
        apart_first, apart_second = ordered[:, :facts], ordered[:, facts:].gather(1, shuffle)
        apart = torch.rand(rows, 1, device=self.device) < 0.5
        return torch.where(apart, apart_first, pairs.amin(1)), torch.where(apart, apart_second, pairs.amax(1))
