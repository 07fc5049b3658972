"""Caches that leave for host memory and come back, against plain lists of what was stored."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pairs import PAGED, cache_of, feed, pair, raises_value_error, using
from tiny import GREEDY, prompts
from transformers import DynamicCache

import hf_mla
from hf_mla.cache import host

LAYERS, RANK, ROPE, BLOCK = 3, 20, 4, 16
SLAB = 3 * BLOCK * (RANK + ROPE) * 4 + 256  # three blocks, and some bytes that hold none


@pytest.fixture(autouse=True)
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "SLAB_BYTES", SLAB)


class Chats(RuleBasedStateMachine):
    """Caches of an unpatched model, whose update gives back all that they hold, beside what they were given.

    What a cache was given is a tensor [layers, rows, columns, R + P]; freed pages are gone, so a wrong read fails.
    """

    @initialize(slabs=st.sampled_from([None, 3, 8]), max_tokens=st.sampled_from([None, 100]))
    def begin(self, slabs, max_tokens):
        host.SLAB_BYTES = SLAB  # set here, too: not a fixture's test
        self.tier = hf_mla.HostTier(None if slabs is None else slabs * SLAB)
        self.max_tokens = max_tokens
        self.chats: list[list] = []  # [cache, given or None]

    @precondition(lambda self: len(self.chats) < 4)
    @rule()
    def new_chat(self):
        self.chats.append([hf_mla.PagedMLACache(block_size=BLOCK, max_tokens=self.max_tokens), None])

    def one(self, data, out=None):
        chosen = [chat for chat in self.chats if out is None or (chat[0].table.away is not None) == out]
        return data.draw(st.sampled_from(chosen)) if chosen else None

    @rule(rows=st.integers(1, 3), new=st.sampled_from([1, 1, 5, BLOCK, 37]), data=st.data())
    def extend(self, rows, new, data):
        chat = self.one(data, out=False)
        if chat is None:
            return
        cache, given = chat
        rows = rows if given is None else given.shape[1]
        more = torch.randn(LAYERS, rows, new, RANK + ROPE)
        wanted = more if given is None else torch.cat([given, more], 2)
        try:
            for layer, x in enumerate(more[:, :, None]):
                got = torch.cat(cache.update(x[..., :RANK], x[..., RANK:], layer), -1)
                assert torch.equal(got[:, 0], wanted[layer])
        except hf_mla.PoolExhausted:
            assert self.max_tokens is not None and layer == 0
            return
        chat[1] = wanted

    @precondition(lambda self: self.chats)
    @rule(data=st.data())
    def fork(self, data):
        chat = self.one(data)  # in or out
        if len(self.chats) < 4:
            self.chats.append([copy.deepcopy(chat[0]), chat[1]])

    @rule(data=st.data(), columns=st.integers(0, 40))
    def crop(self, data, columns):
        chat = self.one(data, out=False)
        if chat is not None and chat[1] is not None:
            columns = min(columns, chat[1].shape[2])
            chat[0].crop(-columns)
            chat[1] = chat[1][:, :, : chat[1].shape[2] - columns] if columns < chat[1].shape[2] else None

    @rule(data=st.data(), chosen=st.lists(st.integers(0, 7), min_size=1, max_size=3))
    def reorder(self, data, chosen):
        chat = self.one(data, out=False)
        if chat is not None and chat[1] is not None:
            rows = torch.tensor([index % chat[1].shape[1] for index in chosen])
            chat[0].reorder_cache(rows)
            chat[1] = chat[1][:, rows]

    @rule(data=st.data())
    def swap_out(self, data):
        chat = self.one(data, out=False)
        if chat is None:
            return
        used = self.tier.nbytes_used
        try:
            self.tier.swap_out(chat[0])
        except hf_mla.PoolExhausted:
            assert self.tier.max_slabs is not None and chat[0].table.away is None and self.tier.nbytes_used == used
            return
        assert chat[0].memory_report().bytes_pool == 0

    @rule(data=st.data())
    def swap_in(self, data):
        chat = self.one(data, out=True)
        if chat is not None:
            self.tier.swap_in(chat[0])

    @rule(data=st.data())
    def use_one_that_is_out(self, data):
        chat = self.one(data, out=True)
        if chat is None:
            return
        cache, rows = chat[0], 1 if chat[1] is None else chat[1].shape[1]
        x = torch.randn(rows, 1, 1, RANK + ROPE)
        raises_value_error("swapped out", lambda: cache.update(x[..., :RANK], x[..., RANK:], 0))
        raises_value_error("swapped out", lambda: self.tier.swap_out(cache))
        if chat[1] is not None:
            raises_value_error("swapped out", lambda: cache.crop(-1))

    @precondition(lambda self: self.chats)
    @rule(data=st.data())
    def drop(self, data):
        chat = self.one(data)
        self.chats = [other for other in self.chats if other is not chat]

    @precondition(lambda self: self.chats)
    @rule(data=st.data())
    def reset(self, data):
        chat = self.one(data)
        chat[0].reset()
        chat[1] = None

    @invariant()
    def books_agree(self):
        for cache, given in getattr(self, "chats", []):
            assert cache.get_seq_length() == (0 if given is None else given.shape[2])
            if cache.table.away is None:
                cache.table.check()

    def teardown(self):
        """All of them come back, and every slab is free again."""
        for cache, given in getattr(self, "chats", []):
            if cache.table.away is not None:
                self.tier.swap_in(cache)
            if given is None:
                continue
            slots = cache.table.slots_of_columns()
            for layer, wanted in zip(cache.mla_layers, given, strict=True):
                entries = layer.pages[slots // BLOCK, slots % BLOCK]
                assert torch.equal(entries[..., : RANK + ROPE], wanted)
        if hasattr(self, "tier"):
            assert self.tier.nbytes_used == 0
            self.tier.release()
            assert self.tier.nbytes == 0


TestChats = Chats.TestCase
TestChats.settings = settings(
    max_examples=40,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [None, torch.float8_e4m3fn])
def test_a_chat_goes_on_as_if_it_had_never_left(dtype: torch.dtype | None, device: str) -> None:
    _, model = pair()
    model.to(device)
    tier = hf_mla.HostTier()
    staying, leaving = (hf_mla.PagedMLACache(model.config, block_size=BLOCK, dtype=dtype) for _ in range(2))
    inputs = {name: x.to(device) for name, x in prompts([40, 3]).items()}
    for turn, length in enumerate((43, 60)):
        outputs = []
        for cache in (staying, leaving):
            ids = (
                torch.cat([inputs["input_ids"], torch.full((2, length - 40), 7, device=device)], 1)
                if turn
                else inputs["input_ids"]
            )
            mask = torch.cat([inputs["attention_mask"], torch.ones_like(ids[:, 40:])], 1)
            outputs.append(
                model.generate(ids, attention_mask=mask, max_new_tokens=4, **GREEDY, **using(cache)).sequences
            )
        assert torch.equal(*outputs)
        before = [layer.pages.view(torch.uint8)[leaving.table.blocks()] for layer in leaving.mla_layers]
        tier.swap_out(leaving)
        assert all(layer.pages.numel() == 0 for layer in leaving.mla_layers)
        raises_value_error("swapped out", lambda: model.generate(**inputs, max_new_tokens=2, **using(leaving)))
        raises_value_error("swapped out", lambda: leaving.reorder_cache(torch.tensor([0, 0])))
        tier.swap_in(leaving)
        for layer, pages in zip(leaving.mla_layers, before, strict=True):
            assert torch.equal(layer.pages.view(torch.uint8)[leaving.table.blocks()], pages)


def test_what_cannot_be_swapped_is_refused() -> None:
    _, model = pair()
    tier = hf_mla.HostTier()
    raises_value_error("max_bytes", lambda: hf_mla.HostTier(max_bytes=1))
    raises_value_error("is a DynamicCache", lambda: tier.swap_out(DynamicCache()))
    cache = cache_of(model.generate(**prompts([5]), max_new_tokens=2, return_dict_in_generate=True, **PAGED))
    raises_value_error("isn't swapped out", lambda: tier.swap_in(cache))
    with hf_mla.PrefixPool().session(model) as pooled:
        raises_value_error("PrefixPool", lambda: tier.swap_out(pooled))
    refused = []
    hook = model.model.layers[0].register_forward_hook(
        lambda *_: raises_value_error("forward pass", lambda: tier.swap_out(cache)) or refused.append(1)
    )
    feed(model, torch.tensor([[5]]), cache, torch.ones(1, cache.get_seq_length() + 1))
    hook.remove()
    assert refused


def test_a_sparse_models_cache_is_refused() -> None:
    _, model = pair("deepseek_v32")
    cache = cache_of(model.generate(**prompts([5]), max_new_tokens=2, return_dict_in_generate=True, **PAGED))
    raises_value_error("more than latents", lambda: hf_mla.HostTier().swap_out(cache))
