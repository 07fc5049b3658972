"""A pool's caches against plain lists, over random sequences of all that is done to them.

The model of a row is the list of its tokens; of the pool, the tokens that belong to each key. The pages are written
with the tokens' own numbers and free blocks are wiped, so that whoever reads a block that went to someone else fails.
"""

import random
from collections import Counter
from pathlib import Path

import pytest
import torch

from hf_mla import PoolExhausted
from hf_mla.cache.layer import PagedMLALayer
from hf_mla.cache.ledger import Ledger
from hf_mla.cache.persist import read_blocks, write_blocks
from hf_mla.cache.prefixes import PrefixBlocks, keys_of
from hf_mla.cache.sequences import SequenceTable

BLOCK = 16
ROOT = b"root" * 8


class Row:
    """One cache of one layer over the pool, with its rows as lists of tokens."""

    def __init__(self, blocks: PrefixBlocks):
        self.table = SequenceTable(BLOCK, allocator=blocks)
        self.ledger = Ledger(ROOT, blocks, self.table)
        self.texts: list[list[int]] = []


class Machine:
    """The operations, each applied to the pool and to the lists."""

    def __init__(self, seed: int, folder: Path, max_blocks: int):
        self.random = random.Random(seed)
        self.blocks = PrefixBlocks(BLOCK, max_blocks)
        self.layer = PagedMLALayer(0, BLOCK, 16)
        self.layer.lay_out(3, 1, torch.float32, torch.device("cpu"))
        self.caches: list[Row] = []
        self.file: tuple[Path, set[bytes]] | None = None
        self.path = folder / "pool"
        self.done: Counter[str] = Counter()
        self.meaning: dict[bytes, list[int]] = {}

    def write(self, cache: Row, new: list[list[int]]) -> bool:
        """Store the same number of new tokens in every row; whether there was room."""
        before = [list(row) for row in cache.table.rows]
        try:
            extension = cache.table.extend(None, len(new), len(new[0]))
        except PoolExhausted:
            assert cache.table.rows == before
            return False
        self.layer.grow(self.blocks.num_blocks)
        self.layer.copy_blocks(extension.copies, self.blocks.num_blocks)
        values = torch.tensor(new, dtype=torch.float32).flatten()
        for slot, value in zip(extension.slot_mapping.tolist(), values.tolist(), strict=True):
            block = slot // BLOCK
            assert block not in self.blocks.key_of, "a known block was written"
            assert self.blocks.users[block] == 1, "a shared block was written"
            self.layer.pages[block, slot % BLOCK] = value
        cache.ledger.note(torch.tensor(new), None)
        for text, tokens in zip(cache.texts, new, strict=True):
            text.extend(tokens)
            for index, key in enumerate(keys_of(ROOT, text, BLOCK)):
                self.meaning[key] = text[index * BLOCK : (index + 1) * BLOCK]
        return True

    def tokens(self, count: int) -> list[int]:
        """Of two values, so that texts often begin alike."""
        return [self.random.choice((3, 3, 3, 4)) if count < 40 else 3 for _ in range(count)]

    def open(self) -> None:
        """A prompt of one row: what is known is attached, the rest is stored."""
        text, cache = self.tokens(self.random.randint(1, 70)), Row(self.blocks)
        keys = keys_of(ROOT, text[: (len(text) - 1) // BLOCK * BLOCK], BLOCK)
        found = self.blocks.find(keys)
        for key, block in zip(keys, found, strict=False):
            assert self.blocks.block_of[key] == block
        length = len(found) * BLOCK
        cache.texts = [text[:length]]
        if length:
            cache.table.attach([found], torch.ones(1, length, dtype=torch.bool))
            cache.ledger.begin([text[:length]], [keys[: len(found)]], length)
            self.done["found"] += 1
        self.caches.append(cache)
        if not self.write(cache, [text[length:]]):
            self.close(cache)

    def close(self, cache: Row) -> None:
        cache.ledger.flush()
        cache.table.reset()
        self.caches.remove(cache)

    def extend(self, cache: Row) -> None:
        count = self.random.choice((1, 1, 2, 15, 16, 17, 40))
        self.write(cache, [self.tokens(count) for _ in cache.texts])

    def fork(self, cache: Row) -> None:
        chosen = [self.random.randrange(len(cache.texts)) for _ in range(self.random.randint(1, 3))]
        cache.ledger.flush()
        cache.ledger.select(chosen)
        cache.table.select(chosen)
        cache.texts = [list(cache.texts[row]) for row in chosen]

    def crop(self, cache: Row) -> None:
        length = cache.table.length
        count = self.random.randint(0, min(length - 1, 40))
        cache.ledger.flush()
        cache.table.crop(count)
        cache.ledger.crop()
        cache.texts = [text[: length - count] for text in cache.texts]

    def fail(self, cache: Row) -> None:
        """A step that is undone after its copies."""
        try:
            extension = cache.table.extend(None, len(cache.texts), self.random.randint(1, 20))
        except PoolExhausted:
            return
        self.layer.copy_blocks(extension.copies, self.blocks.num_blocks)
        cache.table.undo(extension)

    def save(self) -> None:
        known = self.blocks.known(ROOT)
        if known:
            write_blocks(self.path, ROOT, known, [self.layer.store])
            self.file = self.path, {key for key, _ in known}

    def load(self) -> None:
        if self.file is None:
            return
        before = dict(self.blocks.block_of)
        with read_blocks(self.path, ROOT, BLOCK, 16, 1) as saved:
            assert set(saved.keys) == self.file[1]
            new = [i for i, key in enumerate(saved.keys) if key not in self.blocks.block_of]
            try:
                blocks = self.blocks.allocate(len(new))
            except PoolExhausted:
                assert self.blocks.block_of == before
                return
            self.layer.grow(self.blocks.num_blocks)
            self.layer.pages.view(torch.uint8)[blocks] = saved.pages(0)[new]
            for i, block in zip(new, blocks, strict=True):
                self.blocks.learn(block, saved.keys[i], ROOT)
            self.blocks.release(blocks)
            self.done["loaded"] += len(new)

    def step(self) -> None:
        """One operation, and what must hold after each."""
        names = ["open", "extend", "extend", "extend", "fork", "crop", "fail", "close", "save", "load", "evict"]
        name = self.random.choice(names)
        if name in ("open", "save", "load"):
            getattr(self, name)()
        elif name == "evict":
            if self.random.random() < 0.2:
                self.blocks.forget_idle()
        elif self.caches:
            getattr(self, name)(self.random.choice(self.caches))
        else:
            return
        self.done[name] += 1
        self.check()

    def check(self) -> None:
        self.blocks.check()
        assert self.blocks.num_blocks <= self.blocks.max_blocks + 1
        wanted = Counter(block for cache in self.caches for row in cache.table.rows for block in row)
        assert self.blocks.users == dict(wanted), "the reference counts aren't the caches' uses"
        for block in self.blocks._free:
            self.layer.grow(block + 1)
            self.layer.pages[block] = float("nan")
        for cache in self.caches:
            cache.table.check()
            for row, text in zip(cache.table.rows, cache.texts, strict=True):
                stored = self.layer.pages[row].flatten(0, 1)[: len(text), 0] if row else torch.empty(0)
                assert stored.tolist() == text
        for block, key in self.blocks.key_of.items():
            assert self.layer.pages[block, :, 0].tolist() == self.meaning[key], "a block isn't what its key says"


@pytest.mark.parametrize("seed, max_blocks", [(0, 12), (1, 40)])
def test_five_hundred_random_operations(seed: int, max_blocks: int, tmp_path: Path) -> None:
    machine = Machine(seed, tmp_path, max_blocks)
    while machine.done.total() < 500:
        machine.step()
    assert len(machine.done) >= 10 and min(machine.done.values()) >= 5, machine.done
    for cache in list(machine.caches):
        machine.close(cache)
    machine.check()
    machine.blocks.forget_idle()
    assert not machine.blocks.users and machine.blocks.num_free == machine.blocks.num_blocks - 1
