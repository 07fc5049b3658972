"""SequenceTable and BlockAllocator against plain lists, over random sequences of everything that a cache does to them.

The model of a row is a list with one item a padded column: a token's number, or None where a mask left it out. The
pages are a dict, block -> block_size numbers; free blocks are wiped after every operation, so that whoever still reads
one fails.
"""

import copy

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hf_mla.cache.blocks import PoolExhausted
from hf_mla.cache.sequences import SequenceTable

BLOCK = 4
WIPED = "wiped"
indices = st.lists(st.integers(0, 7), min_size=1, max_size=5)


class Table(RuleBasedStateMachine):
    """The operations, each applied to the table, to the pages and to the lists."""

    @initialize(max_blocks=st.sampled_from([None, 3, 8]))
    def begin(self, max_blocks):
        self.table = SequenceTable(BLOCK, max_blocks)
        self.rows: list[list[int | None]] = []
        self.pages: dict[int, list] = {}
        self.tokens = 0

    def book(self, rows, new, data):
        """Extend the table: (mask [B, q], what it returned), or None where the pool is exhausted."""
        mask = data.draw(st.lists(st.lists(st.booleans(), min_size=new, max_size=new), min_size=rows, max_size=rows))
        mask = torch.tensor(mask, dtype=torch.bool).view(rows, new) | data.draw(st.booleans())
        given_none = bool(mask.all()) and data.draw(st.booleans())
        before = copy.deepcopy(self.table)
        try:
            return mask, self.table.extend(None if given_none else mask, rows, new)
        except PoolExhausted:
            assert self.table.rows == before.rows and self.table.stored == before.stored
            assert self.table.length == before.length and str(self.table.kept) == str(before.kept)
            assert self.table.allocator.users == before.allocator.users
            assert self.table.allocator.num_free == before.allocator.num_free
            return None

    @rule(rows=st.integers(1, 4), new=st.sampled_from([1, 1, 1, 2, 3, 4, 5, 9]), data=st.data())
    def extend(self, rows, new, data):
        rows = len(self.rows) or rows
        booked = self.book(rows, new, data)
        if booked is None:
            return
        mask, extension = booked
        for source, target in extension.copies:
            self.pages[target] = list(self.pages[source])
        self.rows = self.rows or [[] for _ in range(rows)]
        for i, slot in enumerate(extension.slot_mapping.tolist()):
            row, column = divmod(i, new)
            assert (slot >= 0) == bool(mask[row, column])
            token = None
            if slot >= 0:
                self.tokens += 1
                token = self.tokens
                self.pages.setdefault(slot // BLOCK, [WIPED] * BLOCK)[slot % BLOCK] = token
            self.rows[row].append(token)
            stored = sum(item is not None for item in self.rows[row])
            assert extension.kv_lens[row, column] == stored

    @precondition(lambda self: self.rows)
    @rule(new=st.integers(1, 6), data=st.data())
    def extend_in_vain(self, new, data):
        """A step that fails: perhaps after its copies and writes, and undone."""
        users = dict(self.table.allocator.users)
        booked = self.book(len(self.rows), new, data)
        if booked is None:
            return
        if data.draw(st.booleans()):
            for source, target in booked[1].copies:
                self.pages[target] = list(self.pages[source])
            for slot in booked[1].slot_mapping.tolist():
                if slot >= 0:
                    self.pages.setdefault(slot // BLOCK, [WIPED] * BLOCK)[slot % BLOCK] = "undone"
        self.table.undo(booked[1])
        assert self.table.allocator.users == users

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def crop(self, data):
        length = len(self.rows[0])
        columns = data.draw(st.integers(0, length))
        self.table.crop(columns)
        self.rows = [row[: length - columns] for row in self.rows] if columns < length else []

    @precondition(lambda self: self.rows)
    @rule(chosen=indices)
    def select(self, chosen):
        chosen = [index % len(self.rows) for index in chosen]
        self.table.select(chosen)
        self.rows = [list(self.rows[index]) for index in chosen]

    @precondition(lambda self: self.rows)
    @rule()
    def drop_all(self):
        self.table.select([])
        self.rows = []

    @precondition(lambda self: self.rows)
    @rule(bad=st.sampled_from([-1, 99]))
    def select_what_is_not_there(self, bad):
        before = copy.deepcopy(self.table.rows)
        try:
            self.table.select([0, bad])
        except ValueError:
            assert self.table.rows == before
        else:
            raise AssertionError("a row that isn't there was taken")

    @rule()
    def reset(self):
        self.table.reset()
        self.rows = []

    @rule()
    def go_on_with_a_copy(self):
        old, self.table = self.table, copy.deepcopy(self.table)
        old.reset()

    @invariant()
    def nothing_is_lost_shared_or_freed_twice(self):
        if hasattr(self, "table"):
            self.table.check()
            limit = self.table.allocator.max_blocks
            assert limit is None or self.table.allocator.num_blocks <= limit + 1

    @invariant()
    def rows_read_back_what_was_written(self):
        if not hasattr(self, "table"):
            return
        for block in set(self.pages) - set(self.table.allocator.users):
            self.pages[block] = [WIPED] * BLOCK
        assert len(self.table.rows) == len(self.rows)
        assert self.table.length == (len(self.rows[0]) if self.rows else 0)
        for row, slots in zip(self.rows, self.table.slots_of_columns().tolist() if self.rows else [], strict=True):
            assert [None if s < 0 else self.pages[s // BLOCK][s % BLOCK] for s in slots] == row


TestTable = Table.TestCase
TestTable.settings = settings(
    max_examples=80,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
