"""Which blocks are free and how many users each has: host side only, no tensors.

Invariants (checked by `check`):
    1. Block 0 is never handed out: it is where padding rows of a batch may point.
    2. A block is either free or has at least one user, never both.
    3. Free blocks and used blocks together are blocks 1 .. num_blocks - 1, each once.
"""

from collections import deque
from collections.abc import Iterable


class PoolExhausted(ValueError):
    """More blocks were asked for than the pool may hold. Nothing was taken."""


class BlockAllocator:
    """Free list and reference counts of a pool of equal blocks.

    Args:
        block_size: Tokens a block, for messages.
        max_blocks: Blocks the pool may grow to, or None for no limit.
    """

    def __init__(self, block_size: int, max_blocks: int | None = None):
        self.block_size = block_size
        self.max_blocks = max_blocks
        self.num_blocks = 1  # block 0 is reserved
        self.users: dict[int, int] = {}
        self._free: deque[int] = deque()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def reserve(self, count: int) -> None:
        """Grow the pool, if needed, until `count` blocks are free.

        Growth beyond the first fill is by at least an eighth, so that appending token after token copies the pages
        a logarithmic number of times.

        Raises:
            PoolExhausted: `max_blocks` would be passed.
        """
        missing = count - len(self._free)
        if missing <= 0:
            return
        limit = None if self.max_blocks is None else self.max_blocks + 1 - self.num_blocks
        if limit is not None and missing > limit:
            missing -= self._reclaim(missing - limit)
        if limit is not None and missing > limit:
            raise PoolExhausted(
                f"max_tokens: the pool holds {self.max_blocks} blocks of {self.block_size} tokens, "
                f"{len(self.users)} of them in use, and {count} more are needed; give the cache more max_tokens, "
                "shorten the prompts or make the batch smaller"
            )
        step = max(missing, len(self.users) // 8)
        step = step if limit is None else min(step, limit)
        self._free.extend(range(self.num_blocks, self.num_blocks + step))
        self.num_blocks += step

    def _reclaim(self, count: int) -> int:
        """Free `count` blocks that nobody needs, or none where there are fewer: how many were freed."""
        return 0

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, each with one user; grows the pool where allowed.

        Raises:
            PoolExhausted: Not enough blocks; none was taken.
        """
        self.reserve(count)
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self.users[block] = 1
        return blocks

    def retain(self, blocks: Iterable[int]) -> None:
        """Add one user to each block."""
        for block in blocks:
            self.users[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Remove one user from each block; blocks without users become free."""
        for block in blocks:
            self.users[block] -= 1
            if not self.users[block]:
                del self.users[block]
                self._free.append(block)

    def shrink(self) -> None:
        """Give up the whole pool, of which no block is in use."""
        assert not self.users
        self.num_blocks = 1
        self._free.clear()

    def holders(self, block: int) -> int:
        """How many need what the block holds; where there are several, it must be copied before it is written."""
        return self.users[block]

    def check(self) -> None:
        """Raise AssertionError if an invariant of the module's docstring doesn't hold."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & set(self.users), "a block is free and in use"
        assert all(count > 0 for count in self.users.values()), "a used block has no users"
        assert free | set(self.users) == set(range(1, self.num_blocks)), "a block is lost, or block 0 is not reserved"
