"""Trains the small model that ships in examples/small_model: a DeepSeek-V2 with MLA's true head sizes.

The text is the King James Bible of Debian's packages bible-kjv and bible-kjv-text (the translation of 1611, out of
copyright). Make the file, one verse a line with its reference, and train on a GPU in a few minutes with

    apt-get install bible-kjv bible-kjv-text && bible -f ge1:1-re22:21 < /dev/null > kjv.txt
    python examples/train_small_model.py --text kjv.txt

Two kinds of rows share a batch: running text (language), and running text with numbers to remember (recall). Loss
alone teaches to answer with any of a row's numbers, but hardly to choose it by name: this takes two attention heads,
neither of which is worth anything without the other. So these heads are taught where to look (see `Guidance`). Rows
grow from 128 to 4096 tokens, each time that recall has been learnt at the length before, or its time is over. Text is
shared out so that it is read `--text-epochs` times, however fast the machine is; the schedule follows the clock, so
that training ends after `--minutes`. The checkpoint with the best held-out loss and recall is saved.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from recall import build_recall_prompts, recall_accuracy, text_loss
from small_model_card import HELD_OUT_FILE, finish
from small_model_data import BatchMaker, Rows, encode_stream, read_chapters, split_by_books, train_tokenizer
from small_model_tools import Guidance, MixedOptimizer, Routing, add_dropout, choose_experts, safe_attention
from torch.nn.functional import cross_entropy
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, GenerationConfig

MAX_LENGTH = 4096
LENGTHS = (128, 256, 512, 1024, 2048, 4096)
LEARNT = 0.08  # recall loss (nats a token) at which rows grow; a number of the row, not chosen by name, costs 0.23
PATIENCE = 0.08  # share of the time after which rows grow in any case
EVAL_LENGTHS = (500, 3500)
ASKED_FACTS = 4  # of how many the recall loss is measured
LEAST_FACTS, MOST_FACTS = 3, 48
LOSS_WEIGHTS = {"text": 1.0, "recall": 2.0, "guidance": 0.3, "balance": 0.01}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="the text, made as described above")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "small_model", help="folder to write")
    parser.add_argument("--minutes", type=float, default=4.5, help="time for training, evaluations included")
    parser.add_argument("--batch-tokens", type=int, default=32768, help="tokens of a step")
    parser.add_argument("--text-epochs", type=float, default=30, help="times that the training text is read")
    parser.add_argument("--lr", type=float, default=1.5e-3, help="peak learning rate of AdamW")
    parser.add_argument("--dropout", type=float, default=0.1, help="dropout of what each sublayer adds")
    parser.add_argument("--eval-seconds", type=float, default=30, help="time between evaluations")
    parser.add_argument("--eval-prompts", type=int, default=8, help="recall prompts for each depth and length")
    parser.add_argument("--max-length", type=int, default=MAX_LENGTH, help="longest row of the curriculum")
    parser.add_argument("--held-out-tokens", type=int, help="evaluate on the first tokens of the held-out text only")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def make_model(tokenizer: Any, device: str, dtype: torch.dtype) -> DeepseekV2ForCausalLM:
    """The untrained model; 5.5 M parameters, of which attention has 3 M."""
    config = DeepseekV2Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=768,
        moe_intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        first_k_dense_replace=1,
        topk_method="greedy",
        routed_scaling_factor=1.0,
        max_position_embeddings=MAX_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = DeepseekV2ForCausalLM._from_config(config, attn_implementation="sdpa").to(device=device, dtype=dtype)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def losses_of(
    model: DeepseekV2ForCausalLM, parts: dict[str, Rows], routing: Routing, guidance: Guidance
) -> dict[str, torch.Tensor]:
    """Mean loss of each kind of rows and, in training, of the lessons and routers; logits only where needed."""
    ids = torch.cat([rows.ids for rows in parts.values()])
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)
    flat = ids.flatten()
    shift, targets = 0, []
    for rows in parts.values():
        targets.append(rows.targets + shift)
        shift += rows.ids.numel()
    where = torch.cat(targets)
    each = cross_entropy(model.lm_head(hidden.index_select(0, where - 1)).float(), flat[where], reduction="none")
    split = each.split([len(rows) for rows in targets])
    losses = {kind: loss.mean() for kind, loss in zip(parts, split, strict=True)}
    if model.training:
        losses |= {"guidance": guidance.take(parts.values()), "balance": routing.take()}
    return losses


def total(losses: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.stack([LOSS_WEIGHTS[kind] * loss for kind, loss in losses.items()]).sum()


class Composer:
    """Decides what a step's rows are, from the share of the time that has passed and from what has been learnt."""

    def __init__(self, maker: BatchMaker, args: argparse.Namespace) -> None:
        self.maker = maker
        self.batch_tokens = args.batch_tokens
        self.text_budget = args.text_epochs * len(maker.stream)
        self.lengths = [length for length in LENGTHS if length <= args.max_length]
        if not self.lengths:
            raise ValueError(f"--max-length must be at least {LENGTHS[0]}, got {args.max_length}")
        self.level = 0
        self.text_tokens = 0
        self.rng = random.Random(args.seed)

    @torch.no_grad()
    def grow(self, model: DeepseekV2ForCausalLM, routing: Routing, guidance: Guidance) -> None:
        """Lengthens the rows if the recall loss at this length, measured without dropout, shows that it is learnt."""
        length = self.lengths[self.level]
        rows = max(1, self.batch_tokens // length)
        parts = {"recall": self.maker.recall(rows, length, ASKED_FACTS)}
        model.eval()
        loss = losses_of(model, parts, routing, guidance)["recall"].item()
        model.train()
        if loss < LEARNT:
            self.level = min(self.level + 1, len(self.lengths) - 1)

    def compose(self, progress: float) -> dict[str, Rows]:
        """Rows of one step; `progress` is in 0..1."""
        self.level = max(self.level, min(int(progress / PATIENCE), len(self.lengths) - 1))
        length = self.lengths[self.level]
        if self.rng.random() < 0.35:  # shorter rows come back now and then, so that what they taught stays
            length = self.rng.choice(self.lengths[: self.level + 1])
        rows = max(2, self.batch_tokens // length)
        behind = self.text_budget * progress - self.text_tokens
        text = min(max(1, round(behind / length)), rows // 2)
        most = min(self.maker.most_facts(length), MOST_FACTS)
        facts = round(LEAST_FACTS * (most / LEAST_FACTS) ** self.rng.random())
        self.text_tokens += text * length
        return {"text": self.maker.text(text, length), "recall": self.maker.recall(rows - text, length, facts)}


def learning_rate(progress: float) -> float:
    """Share of the peak rate: warm-up over 2 % of the time, then a cosine down to a hundredth."""
    if progress < 0.02:
        return (progress + 1e-3) / 0.021
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


@dataclass
class Best:
    """The best weights so far, by held-out loss a token plus twice the share of wrong answers."""

    score: float = math.inf
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    note: str = ""

    def offer(self, model: torch.nn.Module, held_out: float, recall: float, note: str) -> bool:
        """Keeps a copy if it is the best; says whether it is."""
        score = held_out + 2 * (1 - recall)
        if not score < self.score:
            return False
        self.score, self.note = score, note
        self.weights = {name: weight.detach().clone() for name, weight in model.state_dict().items()}
        return True


def train(args: argparse.Namespace, model: DeepseekV2ForCausalLM, tokenizer: Any, stream: Any, held_out: str) -> dict:
    """Trains until the time is up, leaves the best weights in `model`; returns facts for the model card."""
    maker = BatchMaker(tokenizer, stream.to(args.device))
    composer, routing, guidance, best = Composer(maker, args), Routing(), Guidance(), Best()
    routing.watch(model)
    guidance.watch(model)
    experts = choose_experts(model, maker.text(2, 256).ids)
    add_dropout(model, args.dropout)
    optimizer = MixedOptimizer(model, args.lr, args.device)
    prompts = [
        prompt
        for length in sorted({min(length, args.max_length - 24) for length in EVAL_LENGTHS})
        for prompt in build_recall_prompts(tokenizer, held_out, length=length, per_depth=args.eval_prompts, seed=1)
    ]
    print(f"{sum(weight.numel() for weight in model.parameters()):,} parameters, {len(stream):,} training tokens")
    began = logged = evaluated = time.monotonic()
    step, tokens, seconds, last_tokens = 0, 0, 60 * args.minutes, 0
    sums: dict[str, list[torch.Tensor]] = {}
    while (progress := (time.monotonic() - began) / seconds) < 1:
        parts = composer.compose(progress)
        losses = losses_of(model, parts, routing, guidance)
        total(losses).backward()
        optimizer.step(learning_rate(progress))
        step, tokens = step + 1, tokens + sum(rows.ids.numel() for rows in parts.values())
        for kind, loss in losses.items():
            sums.setdefault(kind, []).append(loss.detach())
        if (now := time.monotonic()) - logged > 5:
            means = {kind: torch.stack(seen).mean().item() for kind, seen in sums.items()}
            shown = " ".join(f"{kind} {mean:.3f}" for kind, mean in means.items())
            epochs = composer.text_tokens / len(stream)
            print(
                f"{now - began:5.0f} s step {step} length {composer.lengths[composer.level]} {shown} "
                f"least load {routing.lowest_load():.3f} text epochs {epochs:.1f} "
                f"{(tokens - last_tokens) / (now - logged):,.0f} tokens/s",
                flush=True,
            )
            composer.grow(model, routing, guidance)
            logged, last_tokens = time.monotonic(), tokens
            sums.clear()
        routing.loads.clear()
        due = time.monotonic() - evaluated > args.eval_seconds
        if due or time.monotonic() - began >= seconds:
            evaluate(args, model, tokenizer, held_out, prompts, best, f"step {step}")
            evaluated = time.monotonic()
            last_tokens, logged = tokens, evaluated
    if best.weights:
        model.load_state_dict(best.weights)
    trained = time.monotonic() - began
    print(f"best: {best.note}; {tokens / trained:,.0f} tokens/s, evaluations included", flush=True)
    return {
        "minutes": trained / 60,
        "steps": step,
        "tokens": tokens,
        "text_epochs": composer.text_tokens / len(stream),
        "experts": experts,
        "longest": composer.lengths[composer.level],
        "checkpoint": best.note,
    }


def evaluate(
    args: argparse.Namespace, model: Any, tokenizer: Any, held_out: str, prompts: list, best: Best, note: str
) -> None:
    """Prints held-out loss and recall, and offers the weights as the best."""
    model.eval()
    loss = text_loss(model, tokenizer, held_out, window=512, batch_size=32, max_tokens=args.held_out_tokens)
    recall = recall_accuracy(model, tokenizer, prompts, batch_size=32)
    model.train()
    kept = best.offer(model, loss.per_token, sum(recall.values()) / len(recall), note)
    depths = " ".join(f"{depth}: {share:.2f}" for depth, share in recall.items())
    print(
        f"  held out {loss.per_token:.3f} a token, {loss.per_byte:.3f} a byte; recall {depths}{' (best)' * kept}",
        flush=True,
    )


def main() -> None:
    args = parse_args()
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    chapters, held_chapters = split_by_books(read_chapters(args.text), 0.05)
    tokenizer = train_tokenizer([chapter.text for chapter in chapters], 4096, MAX_LENGTH)
    stream = encode_stream(tokenizer, chapters)
    held_out = "".join(chapter.text for chapter in held_chapters)
    dtype = torch.bfloat16 if args.device.startswith("cuda") else torch.float32
    model = make_model(tokenizer, args.device, dtype).train()
    books = list(dict.fromkeys(chapter.book for chapter in held_chapters))
    with safe_attention():
        facts = train(args, model, tokenizer, stream, held_out)
        finish(args, model, tokenizer, held_out, {**facts, "held_books": books, "train_tokens": len(stream)})
    print(f"wrote {args.out} ({HELD_OUT_FILE}, README.md, weights, tokenizer)")


if __name__ == "__main__":
    main()
