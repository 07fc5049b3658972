"""Recall prompts and text loss: the measures that training, tests and benchmarks of the small model share.

A recall prompt is a passage of running text in which sentences such as "The secret number of Moses is 4821." stand on
lines of their own; it ends with one of them broken off before the number. `depth` says where in the passage the asked
sentence stands: 0.0 at its beginning (farthest from the question), 1.0 at its end.

Shape legend: B rows, T tokens of a row, V vocabulary.
"""

from __future__ import annotations

import bisect
import inspect
import itertools
import math
import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import cross_entropy

NAMES = (
    "Aaron Abimelech Abner Abraham Absalom Ahab Amos Andrew Asa Babylon Balaam Baruch Benjamin Caleb Christ Cyrus Dan "
    "Daniel David Egypt Eleazar Eli Elijah Elisha Ephraim Esau Esther Gad Gideon Gilead Hezekiah Isaac Isaiah Israel "
    "Jacob James Jehu Jephthah Jeremiah Jeroboam Jerusalem Jesus Joab John Jonathan Joseph Joshua Josiah Judah Laban "
    "Levi Lot Manasseh Mary Mordecai Moses Naphtali Nathan Noah Paul Peter Pharaoh Pilate Rachel Rehoboam Reuben "
    "Samson Samuel Sarah Saul Simeon Simon Solomon Timothy Zedekiah Zion"
).split()
"""Names that facts are about, all of them words of the text."""

FACT = "The secret number of {name} is"
DIGITS = 4


@dataclass(frozen=True)
class RecallPrompt:
    """One passage with its question: `prompt` ends in "... is", `answer` holds the digits, `depth` is in 0..1."""

    prompt: str
    answer: str
    depth: float


@dataclass(frozen=True)
class TextLoss:
    """Summed cross entropy of a text in nats; the predicted tokens, and the UTF-8 bytes they stand for."""

    nats: float
    tokens: int
    bytes: int

    @property
    def per_token(self) -> float:
        """Mean loss in nats a token."""
        return self.nats / self.tokens

    @property
    def per_byte(self) -> float:
        """Mean loss in nats a byte: comparable between tokenizers."""
        return self.nats / self.bytes

    @property
    def perplexity(self) -> float:
        """exp of the mean loss a token."""
        return math.exp(self.per_token)


def build_recall_prompts(
    tokenizer: Any,
    text: str,
    *,
    length: int,
    depths: Sequence[float] = (0.1, 0.3, 0.5, 0.7, 0.9),
    per_depth: int = 8,
    facts: int = 4,
    seed: int = 0,
) -> list[RecallPrompt]:
    """Passages of about `length` tokens cut from `text` (whole lines), with `facts` planted sentences each.

    The asked sentence stands at each of `depths` (0..1), `per_depth` passages for each; the others stand at random
    lines, so that the right number has to be chosen by its name. The same arguments give the same prompts.
    Raises ValueError if `facts` is not in 1..len(NAMES) or `length` leaves no room for running text.
    """
    if not 1 <= facts <= len(NAMES):
        raise ValueError(f"facts must be in 1..{len(NAMES)}, got {facts}")
    lines = [line for line in text.splitlines() if line.strip()]
    sizes = [len(ids) + 1 for ids in tokenizer(lines, add_special_tokens=False)["input_ids"]]
    sentence = len(tokenizer(_fact(NAMES[0], "1" * DIGITS), add_special_tokens=False)["input_ids"]) + 1
    room = length - sentence * (facts + 1)
    if room < max(sizes):
        raise ValueError(f"length={length} has no room for running text beside {facts} facts of {sentence} tokens")
    rng = random.Random(seed)
    wanted = [depth for depth in depths for _ in range(per_depth)]
    return [_build_one(rng, lines, sizes, room=room, depth=depth, facts=facts) for depth in wanted]


def _fact(name: str, number: str) -> str:
    return f"{FACT.format(name=name)} {number}."


def _build_one(
    rng: random.Random, lines: list[str], sizes: list[int], *, room: int, depth: float, facts: int
) -> RecallPrompt:
    first = rng.randrange(len(lines))
    chosen: list[int] = []
    ends = [0]
    for index in itertools.islice(itertools.cycle(range(len(lines))), first, None):
        if ends[-1] + sizes[index] > room:
            break
        chosen.append(index)
        ends.append(ends[-1] + sizes[index])
    names = rng.sample(NAMES, facts)
    numbers = [str(rng.randrange(10 ** (DIGITS - 1), 10**DIGITS)) for _ in names]
    places = [rng.randint(0, len(chosen)) for _ in names]
    places[0] = min(bisect.bisect_left(ends, depth * ends[-1]), len(chosen))
    passage: list[str] = []
    for place in range(len(chosen) + 1):
        here = [index for index, at in enumerate(places) if at == place]
        passage += [_fact(names[index], numbers[index]) for index in here]
        passage += [lines[index] for index in chosen[place : place + 1]]
    passage.append(FACT.format(name=names[0]))
    return RecallPrompt("\n".join(passage), numbers[0], depth)


@torch.no_grad()
def recall_answers(
    model: Any, tokenizer: Any, prompts: Sequence[RecallPrompt], *, batch_size: int = 16, **generate_kwargs: Any
) -> list[str]:
    """The numbers that `model.generate` (greedy unless told otherwise) completes the prompts with, "" for no number.

    Prompts are batched with left padding; the tokenizer needs a pad token and `padding_side="left"`.
    """
    options = {"do_sample": False, "max_new_tokens": DIGITS + 2, "pad_token_id": tokenizer.pad_token_id}
    options.update(generate_kwargs)
    answers: list[str] = []
    for start in range(0, len(prompts), batch_size):
        texts = [item.prompt for item in prompts[start : start + batch_size]]
        inputs = tokenizer(texts, return_tensors="pt", padding=True).to(model.device)
        output = model.generate(**inputs, **options)
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        for text in tokenizer.batch_decode(sequences[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True):
            found = re.match(r"\s*(\d+)", text)
            answers.append(found.group(1) if found else "")
    return answers


def score_recall(prompts: Sequence[RecallPrompt], answers: Sequence[str]) -> dict[float, float]:
    """Share of exact answers (0..1) for each depth, in the order of depth."""
    hits: dict[float, list[bool]] = {}
    for item, answer in zip(prompts, answers, strict=True):
        hits.setdefault(item.depth, []).append(answer == item.answer)
    return {depth: sum(found) / len(found) for depth, found in sorted(hits.items())}


def recall_accuracy(
    model: Any, tokenizer: Any, prompts: Sequence[RecallPrompt], *, batch_size: int = 16, **generate_kwargs: Any
) -> dict[float, float]:
    """`score_recall` of `recall_answers`: exact-match share (0..1) for each depth. Chance is 1 / 9000."""
    return score_recall(prompts, recall_answers(model, tokenizer, prompts, batch_size=batch_size, **generate_kwargs))


def _windows(tokenizer: Any, text: str, window: int, max_tokens: int | None) -> tuple[list[list[int]], int]:
    """Token lists of at most `window` ids, BOS first, and the bytes that all but the BOS tokens stand for."""
    if window < 2:
        raise ValueError(f"window must be at least 2 tokens, got {window}")
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    n_bytes = len(text.encode())
    if max_tokens is not None and max_tokens < len(ids):
        ids = ids[:max_tokens]
        n_bytes = len(tokenizer.decode(ids).encode())
    step = window - 1
    return [[tokenizer.bos_token_id, *ids[at : at + step]] for at in range(0, len(ids), step)], n_bytes


def _batches(windows: list[list[int]], batch_size: int) -> Iterable[torch.Tensor]:
    for _, group in itertools.groupby(windows, key=len):
        rows = list(group)
        for start in range(0, len(rows), batch_size):
            yield torch.tensor(rows[start : start + batch_size])


def _nats(logits: torch.Tensor, targets: torch.Tensor) -> float:
    """Summed loss of logits [B, T, V] against targets [B, T]."""
    return cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum").item()


@torch.no_grad()
def text_loss(
    model: Any, tokenizer: Any, text: str, *, window: int = 1024, batch_size: int = 8, max_tokens: int | None = None
) -> TextLoss:
    """Loss of `text` in independent windows of `window` tokens (BOS first), by plain forwards without a cache."""
    windows, n_bytes = _windows(tokenizer, text, window, max_tokens)
    nats, tokens = 0.0, 0
    for batch in _batches(windows, batch_size):
        ids = batch.to(model.device)
        nats += _nats(model(input_ids=ids[:, :-1], use_cache=False).logits, ids[:, 1:])
        tokens += ids[:, 1:].numel()
    return TextLoss(nats, tokens, n_bytes)


@torch.no_grad()
def cached_text_loss(
    model: Any,
    tokenizer: Any,
    text: str,
    make_cache: Callable[[], Any],
    *,
    chunk: int = 1,
    window: int = 1024,
    batch_size: int = 8,
    max_tokens: int | None = None,
) -> TextLoss:
    """The same loss as `text_loss`, fed through a cache `chunk` tokens a forward; `make_cache()` gives a new one for
    each batch of windows. Equal to `text_loss` up to rounding when the cache is right.
    """
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1 token, got {chunk}")
    windows, n_bytes = _windows(tokenizer, text, window, max_tokens)
    argument = cache_argument(model)
    nats, tokens = 0.0, 0
    for batch in _batches(windows, batch_size):
        ids = batch.to(model.device)
        cache = make_cache()
        for start in range(0, ids.shape[1] - 1, chunk):
            stop = min(start + chunk, ids.shape[1] - 1)
            logits = model(input_ids=ids[:, start:stop], use_cache=True, **{argument: cache}).logits
            nats += _nats(logits, ids[:, start + 1 : stop + 1])
        tokens += ids[:, 1:].numel()
    return TextLoss(nats, tokens, n_bytes)


def cache_argument(model: Any) -> str:
    """What this transformers calls the cache in a model's forward: "past_key_values" up to 5.23, "cache" from 5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
