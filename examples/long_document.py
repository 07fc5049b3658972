"""Asks questions about a long document that is read once: a PrefixPool keeps what was read for the questions after it.

python examples/long_document.py                           # the small model beside this file, ten questions, on a CPU
python examples/long_document.py --kept document.safetensors   # reads the document in the first run only
python examples/long_document.py --chat                    # your own questions; an empty line ends

The document is Bible text with ten sentences such as "The secret number of Moses is 4821." in it; a question is the
beginning of one of them.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from typing import Any

import torch
from recall import FACT, NAMES
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_mla

FOLDER = Path(__file__).parent / "small_model"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(FOLDER), help="folder or hub name")
    parser.add_argument("--tokens", type=int, default=3000, help="about how long the document is")
    parser.add_argument("--questions", type=int, default=10, help="how many facts are hidden and asked for")
    parser.add_argument("--kept", type=Path, help="file that the read document is loaded from or else saved to")
    parser.add_argument("--chat", action="store_true", help="ask for questions instead")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def make_document(tokenizer: Any, tokens: int, facts: int) -> tuple[str, dict[str, str]]:
    """Text of about so many tokens, and the number of each name that is hidden in it."""
    chance = random.Random(0)
    numbers = {name: str(chance.randint(1000, 9999)) for name in chance.sample(NAMES, facts)}
    hidden = [f"{FACT.format(name=name)} {number}." for name, number in numbers.items()]
    lines, room = [], tokens - sum(len(tokenizer(line + "\n")["input_ids"]) for line in hidden)
    for line in (FOLDER / "heldout.txt").read_text().splitlines():
        room -= len(tokenizer(line + "\n")["input_ids"])
        if room < 0:
            break
        lines.append(line)
    for place, line in enumerate(hidden):
        lines.insert((place * len(lines)) // facts, line)
    return "\n".join(lines) + "\n", numbers


def read(model: Any, ids: torch.Tensor, pool: hf_mla.PrefixPool, piece: int = 512) -> None:
    """Let the pool know a document [1, T], a piece at a time so that progress can be shown."""
    with tqdm(total=ids.shape[1], desc="reading", unit=" tokens") as bar:
        for end in (*range(piece, ids.shape[1], piece), ids.shape[1]):
            part = ids[:, :end]
            model.generate(part, attention_mask=torch.ones_like(part), max_new_tokens=1, past_key_values=pool)
            bar.update(end - bar.n)


def answer(model: Any, tokenizer: Any, prompt: str, pool: hf_mla.PrefixPool) -> tuple[str, float]:
    """What the model says next, up to the end of the sentence, and the seconds until it said the first token."""
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    began = time.perf_counter()
    model.generate(**inputs, max_new_tokens=1, do_sample=False, past_key_values=pool)
    first = time.perf_counter() - began
    output = model.generate(**inputs, max_new_tokens=8, do_sample=False, past_key_values=pool)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]).split(".")[0].strip(), first


def main() -> None:
    args = parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    dtype = torch.float32 if args.device == "cpu" else "auto"
    model = hf_mla.patch(AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).to(args.device).eval())
    document, numbers = make_document(tokenizer, args.tokens, args.questions)
    ids = tokenizer(document, return_tensors="pt")["input_ids"].to(args.device)

    pool = hf_mla.PrefixPool()
    began = time.perf_counter()
    if args.kept is not None and args.kept.exists():
        pool.load(args.kept, model)
        print(f"{ids.shape[1]} tokens loaded from {args.kept} in {time.perf_counter() - began:.2f} s")
    else:
        read(model, ids, pool)
        print(f"{ids.shape[1]} tokens read in {time.perf_counter() - began:.2f} s")
        if args.kept is not None:
            pool.save(args.kept, model)
    print(pool)

    if args.chat:
        while question := input("> "):
            print(answer(model, tokenizer, document + question, pool)[0])
        return
    right = 0
    for name, number in numbers.items():
        question = FACT.format(name=name)
        said, seconds = answer(model, tokenizer, document + question, pool)
        right += said == number
        print(
            f"{question} {said} ({'right' if said == number else number}; first token after {1000 * seconds:.0f} ms)"
        )
    print(f"{right} of {len(numbers)} right; {pool.reused[0]} tokens of each prompt were known")


if __name__ == "__main__":
    main()
