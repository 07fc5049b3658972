"""Blocks that are known by what they hold, so that a prompt that comes back finds them: host side only, no tensors.

A full block's key is a hash of the key before it and the block's tokens, so it stands for all tokens up to its end;
the first one's predecessor is the root, which stands for whatever else the latents depend on (model, adapter, dtype).

A known block that nobody uses is idle: it keeps what it holds until its room is needed, the least recently used first
and of one text the last first. It can be found again, and a block in use never goes.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from .blocks import BlockAllocator


def next_key(before: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a block that holds `tokens`, after the block (or the root) of key `before`; 32 bytes."""
    return hashlib.sha256(before + array("q", tokens).tobytes()).digest()


def keys_of(root: bytes, tokens: Sequence[int], block_size: int) -> list[bytes]:
    """The keys of the full blocks of a text."""
    keys, key = [], root
    for start in range(0, len(tokens) - block_size + 1, block_size):
        key = next_key(key, tokens[start : start + block_size])
        keys.append(key)
    return keys


class PrefixBlocks(BlockAllocator):
    """Free list, reference counts and keys of a pool of equal blocks.

    Args:
        block_size: Tokens a block.
        max_blocks: Blocks the pool may grow to, or None for no limit; then nothing ever has to go.
    """

    def __init__(self, block_size: int, max_blocks: int | None = None):
        super().__init__(block_size, max_blocks)
        self.key_of: dict[int, bytes] = {}
        self.block_of: dict[bytes, int] = {}
        self.root_of: dict[bytes, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    def __deepcopy__(self, memo: dict) -> "PrefixBlocks":  # copies of a cache in a pool stay in it
        return self

    @property
    def num_idle(self) -> int:
        """Known blocks that nobody uses."""
        return len(self._idle)

    def holders(self, block: int) -> int:
        """Users of a block, and one more where it is known: it mustn't be written then either."""
        return super().holders(block) + (block in self.key_of)

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of the longest known run of `keys`, each with one user more."""
        found = []
        for key in keys:
            block = self.block_of.get(key)
            if block is None:
                break
            found.append(block)
        self.retain(found)
        return found

    def learn(self, block: int, key: bytes, root: bytes) -> None:
        """Remember what a full block in use holds; of blocks that hold the same, the first stays the known one."""
        assert block in self.users
        if key not in self.block_of and block not in self.key_of:
            self.key_of[block], self.block_of[key], self.root_of[key] = key, block, root

    def known(self, root: bytes) -> list[tuple[bytes, int]]:
        """(key, block) of all that is known under a root, in the order in which it became known."""
        return [(key, self.block_of[key]) for key, other in self.root_of.items() if other == root]

    def forget_idle(self) -> None:
        """Free every idle block; blocks in use stay known."""
        self._reclaim(len(self._idle))

    def retain(self, blocks: Iterable[int]) -> None:
        """Add one user to each block, idle ones included."""
        for block in blocks:
            self._idle.pop(block, None)
            self.users[block] = self.users.get(block, 0) + 1

    def release(self, blocks: Iterable[int]) -> None:
        """Remove one user from each block; those without any become idle where they are known, else free."""
        for block in reversed(list(blocks)):  # the end of a text is worth nothing without its beginning
            self.users[block] -= 1
            if self.users[block]:
                continue
            del self.users[block]
            if block in self.key_of:
                self._idle[block] = None
            else:
                self._free.append(block)

    def _reclaim(self, count: int) -> int:
        if count > len(self._idle):
            return 0
        for _ in range(count):
            block, _ = self._idle.popitem(last=False)
            key = self.key_of.pop(block)
            del self.block_of[key], self.root_of[key]
            self._free.append(block)
        return count

    def check(self) -> None:
        """Raise AssertionError if a block is lost, in two places at once, or known under another name."""
        free, idle, used = set(self._free), set(self._idle), set(self.users)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & idle and not free & used and not idle & used, "a block is in two places"
        assert free | idle | used == set(range(1, self.num_blocks)), "a block is lost, or block 0 is not reserved"
        assert all(count > 0 for count in self.users.values()), "a used block has no users"
        assert idle <= set(self.key_of) and not free & set(self.key_of), "an idle block isn't known, or a free one is"
        assert {key: block for block, key in self.key_of.items()} == self.block_of, "keys and blocks disagree"
        assert set(self.root_of) == set(self.block_of), "a key without a root"
