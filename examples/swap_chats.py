"""Two chats take turns on a device that has room for one: the other's latents wait in host memory.

    python examples/swap_chats.py

Each chat has a cache of its own. While it is idle its cache is off the GPU (on a machine without one: out of the
pages, all the same), and when it comes back the model goes on from it without reading the conversation anew.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_mla

SMALL_MODEL = Path(__file__).parent / "small_model"
CHATS = {
    "Moses": ["And Moses said unto the people,", "\nAnd the people answered,", "\nAnd Moses went"],
    "David": ["And David the king said,", "\nThen came the prophet", "\nAnd David rose"],
}


class Chat:
    """A conversation: its tokens so far, [1, L], and its cache."""

    def __init__(self, model: Any, tokenizer: Any):
        self.model, self.tokenizer = model, tokenizer
        self.cache = hf_mla.PagedMLACache(model.config)
        self.ids = torch.empty(1, 0, dtype=torch.int64, device=model.device)

    def say(self, text: str, max_new_tokens: int) -> str:
        """Append `text`; the model's continuation."""
        said = self.tokenizer(text, return_tensors="pt")["input_ids"].to(self.model.device)
        ids = torch.cat([self.ids, said], 1)
        self.ids = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            past_key_values=self.cache,
        )
        return self.tokenizer.decode(self.ids[0, ids.shape[1] :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(SMALL_MODEL), help="a path, or a name on the hub")
    parser.add_argument("--max-new-tokens", type=int, default=30)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model).eval()
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    hf_mla.patch(model)
    tier = hf_mla.HostTier()
    chats = {name: Chat(model, tokenizer) for name in CHATS}
    for turn in range(3):
        for name, chat in chats.items():
            if turn:
                tier.swap_in(chat.cache)
            text = CHATS[name][turn]
            print(f"[{name}] {text.strip()}{chat.say(text, args.max_new_tokens)}")
            print(f"    {chat.cache.memory_report().tokens} tokens; leaves", end="")
            tier.swap_out(chat.cache)
            print(f", now {tier}")


if __name__ == "__main__":
    main()
