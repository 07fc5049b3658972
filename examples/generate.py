"""Generates text with latents kept in pages, from the small model beside this file or from any other MLA model.

python examples/generate.py
python examples/generate.py --compare --prompt "And Moses said" --max-new-tokens 200
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_mla


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(Path(__file__).parent / "small_model"), help="folder or hub name")
    parser.add_argument("--prompt", default="In the beginning", help="text to continue")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="most tokens to generate")
    parser.add_argument("--backend", help="attention kernels: reference, triton or flashinfer (else chosen by hf_mla)")
    parser.add_argument("--compare", action="store_true", help="also generate with transformers' own cache")
    parser.add_argument(
        "--dtype",
        choices=["float32", "float16", "bfloat16", "auto"],
        help="dtype of the weights: the checkpoint's (auto), or on the CPU float32, so that rounding splits no ties",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def generate(model: Any, inputs: Any, max_new_tokens: int, **options: Any) -> tuple[torch.Tensor, Any, float]:
    """Greedy tokens [1, prompt + new] of one prompt, the cache that held them, and the seconds taken."""
    began = time.perf_counter()
    output = model.generate(
        **inputs, max_new_tokens=max_new_tokens, do_sample=False, return_dict_in_generate=True, **options
    )
    sequences = output.sequences.cpu()
    cache = getattr(output, "cache", None)
    if cache is None:  # its name up to transformers 5.23
        cache = output.past_key_values
    return sequences, cache, time.perf_counter() - began


def report(title: str, tokenizer: Any, sequences: torch.Tensor, prompt_length: int, seconds: float) -> None:
    new = sequences.shape[1] - prompt_length
    print(f"--- {title}: {new} tokens in {seconds:.2f} s, {new / seconds:.1f} tokens/s")
    print(tokenizer.decode(sequences[0], skip_special_tokens=True))


def main() -> None:
    args = parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    dtype = args.dtype or ("float32" if args.device == "cpu" else "auto")
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).to(args.device).eval()
    inputs = tokenizer(args.prompt, return_tensors="pt").to(args.device)
    length = inputs["input_ids"].shape[1]

    options = {"backend": args.backend} if args.backend else {}
    with hf_mla.patched(model, **options):
        generate(model, inputs, 2, cache_implementation="paged_mla")  # compiles and warms up what needs it
        paged, cache, seconds = generate(model, inputs, args.max_new_tokens, cache_implementation="paged_mla")
    report("hf_mla", tokenizer, paged, length, seconds)
    print(cache)
    if args.compare:
        generate(model, inputs, 2)
        stock, _, seconds = generate(model, inputs, args.max_new_tokens)
        report("transformers", tokenizer, stock, length, seconds)
        print(f"--- the same tokens: {'yes' if torch.equal(paged, stock) else 'no'}")


if __name__ == "__main__":
    main()
