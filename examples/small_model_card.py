"""Saves the small model, measures what was saved, and writes its model card."""

from __future__ import annotations

import argparse
import platform
from typing import Any

import torch
import transformers
from recall import build_recall_prompts, recall_accuracy, text_loss
from transformers import AutoModelForCausalLM, AutoTokenizer

HELD_OUT_FILE = "heldout.txt"
HELD_OUT_BYTES = 30_000
FACTS, PROMPTS = 4, 16
RECALL_LENGTHS = (250, 500, 1000, 2000, 3000, 4000)
SAMPLE_PROMPTS = ("In the beginning", "And Moses said unto the people", "Blessed is the man that")

CARD = """---
license: apache-2.0
language: en
library_name: transformers
---
# A small DeepSeek-V2 for testing multi-head latent attention

Small enough to live in a repository, real enough to test with: the class is transformers' own `DeepseekV2ForCausalLM`,
attention has the head sizes of DeepSeek-V2 and V3, and it has learnt two things that a broken KV cache shows at once:
English of the King James Bible, and to recall a number from thousands of tokens ago. It knows nothing else.

Made by `examples/train_small_model.py`; this card's numbers are that run's own.

## Architecture

| | |
|---|---|
{architecture}

## Data

The King James Bible from Debian's packages bible-kjv and bible-kjv-text. The translation of 1611 is out of copyright;
the packages' notice for their file says: "This file is provided for unrestricted use provided that this legend is
included on all tape media and as a part of the software program in whole or part. Users may copy, modify or
distribute this file at will. -- Chip Chapin, September 4, 1989". Verse references were taken off. Trained on
{train_tokens:,} tokens, read {text_epochs:.1f} times; held out: the last books ({held_books}). `{held_out_file}` is
the beginning of the held-out text. Recall rows are made during training: sentences such as "The secret number of Moses
is 4821." written over running text, and repeated later. Weights: Apache 2.0, as the repository.

## Training

{minutes:.1f} minutes on {hardware} ({versions}): {steps:,} steps, {tokens:,} tokens in rows of 128 to {longest},
bf16 weights with float32 masters, Muon and AdamW, experts as {experts}. Two heads were taught where to look: the
first of the first layer from a number to its name, the first of the second layer from a question to its answer. Kept:
{checkpoint}, the best by held-out loss and recall.

## Measured

From the saved files, in {dtype}.

| held out | nats a token | nats a byte | perplexity a token |
|---|---|---|---|
{losses}

Recall: exact 4-digit answers among {facts} facts, {per_depth} prompts for each cell, greedy; chance is 1/9000. Depth
is where the asked sentence stands: 0.1 is near the beginning, far from the question.

| tokens | {depths} |
|---|{rule}|
{recall}

## Greedy samples

{samples}
"""


def finish(args: argparse.Namespace, model: Any, tokenizer: Any, held_out: str, facts: dict[str, Any]) -> None:
    """Writes weights (bf16 safetensors), tokenizer, held-out slice and, measured from these, README.md."""
    args.out.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    cut = held_out.index("\n", HELD_OUT_BYTES) + 1
    (args.out / HELD_OUT_FILE).write_text(held_out[:cut])
    tokenizer = AutoTokenizer.from_pretrained(args.out)
    model = AutoModelForCausalLM.from_pretrained(args.out, dtype=torch.bfloat16).to(args.device).eval()
    texts = {"all of it": held_out, f"`{HELD_OUT_FILE}`": held_out[:cut]}
    losses = {
        name: text_loss(model, tokenizer, text, batch_size=16, max_tokens=args.held_out_tokens)
        for name, text in texts.items()
    }
    recall = {length: measure_recall(args, model, tokenizer, held_out, length) for length in RECALL_LENGTHS}
    recall = {length: found for length, found in recall.items() if found}
    card = CARD.format(
        **facts | {"held_books": ", ".join(facts["held_books"])},
        architecture=architecture(model),
        hardware=torch.cuda.get_device_name() if args.device.startswith("cuda") else platform.processor() or "CPU",
        versions=f"torch {torch.__version__}, transformers {transformers.__version__}",
        held_out_file=HELD_OUT_FILE,
        dtype="bf16",
        losses="\n".join(
            f"| {name} | {loss.per_token:.4f} | {loss.per_byte:.4f} | {loss.perplexity:.2f} |"
            for name, loss in losses.items()
        ),
        facts=FACTS,
        per_depth=PROMPTS,
        depths=" | ".join(str(depth) for depth in next(iter(recall.values()), {})),
        rule="|".join("---" for _ in next(iter(recall.values()), {})),
        recall="\n".join(
            f"| {length} | {' | '.join(f'{share:.2f}' for share in found.values())} |"
            for length, found in recall.items()
        ),
        samples="\n\n".join(sample(model, tokenizer, prompt) for prompt in SAMPLE_PROMPTS),
    )
    (args.out / "README.md").write_text(card)
    print(card)


def measure_recall(
    args: argparse.Namespace, model: Any, tokenizer: Any, held_out: str, length: int
) -> dict[float, float]:
    """Recall for each depth in passages of `length` tokens; nothing where the run did not train for such lengths."""
    if length > args.max_length:
        return {}
    depths = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)
    prompts = build_recall_prompts(
        tokenizer, held_out, length=length, depths=depths, per_depth=PROMPTS, facts=FACTS, seed=length
    )
    return recall_accuracy(model, tokenizer, prompts, batch_size=16)


def architecture(model: Any) -> str:
    """Rows of the card's table of sizes."""
    config = model.config
    parameters = sum(weight.numel() for weight in model.parameters())
    rows = {
        "parameters": f"{parameters:,} (bf16, embeddings tied)",
        "layers, hidden size": f"{config.num_hidden_layers}, {config.hidden_size}",
        "heads": config.num_attention_heads,
        "kv_lora_rank, qk_rope_head_dim": f"{config.kv_lora_rank}, {config.qk_rope_head_dim}",
        "qk_nope_head_dim, v_head_dim": f"{config.qk_nope_head_dim}, {config.v_head_dim}",
        "q_lora_rank": config.q_lora_rank,
        "experts": f"{config.n_routed_experts} routed (top {config.num_experts_per_tok}), "
        f"{config.n_shared_experts} shared; dense in the first layer",
        "vocabulary": f"{config.vocab_size}, byte-level BPE, every digit a token",
        "positions": f"{config.max_position_embeddings}, rope without scaling",
    }
    return "\n".join(f"| {name} | {value} |" for name, value in rows.items())


@torch.no_grad()
def sample(model: Any, tokenizer: Any, prompt: str, new_tokens: int = 80) -> str:
    """Greedy continuation as a Markdown quotation."""
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    output = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)[0]
    return "> " + tokenizer.decode(output, skip_special_tokens=True).strip().replace("\n", "\n> ")
