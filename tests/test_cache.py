"""PagedMLACache as a transformers cache: contents, rows, blocks, limits and failures, against DynamicCache.

What `generate` does with it is tested elsewhere; here it goes through `update` and forward passes.
"""

import copy
import pickle

import pytest
import torch
from tiny import build, prompts, relative_error, twin
from transformers import DynamicCache

import hf_mla
from hf_mla import PagedMLACache, compat

TOLERANCE = 1e-4
BLOCK = 16


@pytest.fixture(scope="module")
def stock():
    return build("deepseek_v2")


@pytest.fixture(scope="module")
def model(stock):
    return hf_mla.patch(twin(stock))


@torch.no_grad()
def run(model, cache, ids, mask=None):
    """Logits [B, q, vocab] of one forward pass over a cache."""
    return model(input_ids=ids, attention_mask=mask, use_cache=True, **{compat.CACHE_NAME: cache}).logits


def decode(model, cache, mask=None, steps=3, rows=None):
    """Logits [B, steps, vocab] of decoding the fixed tokens 5, 6, ... in every row."""
    rows = rows or cache.batch_size if isinstance(cache, PagedMLACache) else rows or len(cache.layers[0].keys)
    out = []
    for step in range(steps):
        mask = None if mask is None else torch.cat([mask, mask.new_ones(rows, 1)], 1)
        out.append(run(model, cache, torch.arange(5 + step, 5 + step + rows)[:, None], mask))
    return torch.cat(out, 1)


def entries(cache, row, layer=0):
    """[stored, R + P] of one row, read from the pages through the table."""
    pages, layout = cache.layers[layer].pages, cache.layers[layer].layout
    blocks = pages[torch.tensor(cache.table.rows[row], dtype=torch.int64)]
    return blocks.flatten(0, 1)[: cache.table.stored[row], : layout.kv_lora_rank + layout.qk_rope_head_dim]


def poison(cache):
    """NaN in every value of the pages that holds no token: free blocks, block 0, tails of blocks, padding."""
    for layer in cache.mla_layers:
        used = torch.zeros(layer.pages.shape, dtype=torch.bool)
        for row, stored in zip(cache.table.rows, cache.table.stored, strict=True):
            for i, block in enumerate(row):
                used[block, : max(0, min(BLOCK, stored - i * BLOCK)), : layer.layout.kv_lora_rank + 16] = True
        layer.pages[~used] = torch.nan


def paged(**options):
    return PagedMLACache(**{"block_size": BLOCK, **options})


def test_lengths_speak_padded_columns_and_blocks_hold_stored_tokens(model):
    cache, batch = paged(), prompts([20, 3])
    run(model, cache, batch["input_ids"], batch["attention_mask"])
    assert [cache.get_seq_length(i) for i in range(3)] == [20] * 3
    assert cache.get_mask_sizes(4, 1) == (24, 0) and cache.get_max_length() == -1
    assert cache.table.stored == [20, 3] and [len(row) for row in cache.table.rows] == [2, 1]


@pytest.mark.parametrize("side", ["left", "right"])
def test_lengths_in_the_middle_of_a_forward_are_those_of_a_dynamic_cache(model, side):
    seen = {}
    for cache in (paged(), DynamicCache()):
        log = seen.setdefault(type(cache), [])

        def note(module, args, kwargs, log=log, cache=cache):
            i = module.layer_idx
            log.append([(cache.get_seq_length(j), cache.get_mask_sizes(1, j)) for j in range(i + 1)])

        layers = model.model.layers
        handles = [layer.self_attn.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
        batch = prompts([6, 4], side=side)
        run(model, cache, batch["input_ids"], batch["attention_mask"])
        decode(model, cache, batch["attention_mask"], rows=2)
        for handle in handles:
            handle.remove()
    assert seen[PagedMLACache] == seen[DynamicCache] and len(seen[DynamicCache]) == 12


@pytest.mark.parametrize("tokens_to_remove", [-1, -15, -17, 0, -34, -100, 5, 100])
def test_crop_leaves_what_a_dynamic_cache_keeps(stock, model, tokens_to_remove):
    caches, batch = (paged(), DynamicCache()), prompts([34, 34])
    for cache, which in zip(caches, (model, stock), strict=True):
        run(which, cache, batch["input_ids"])
    if tokens_to_remove > 0 and compat.VERSION >= compat.Version("5.20"):
        for cache in caches:
            with pytest.raises(ValueError, match=str(tokens_to_remove)):
                cache.crop(tokens_to_remove)
    else:
        for cache in caches:
            cache.crop(tokens_to_remove)
    assert caches[0].get_seq_length() == caches[1].get_seq_length() == caches[0].layers[2].get_seq_length()
    caches[0].table.check()
    got, expected = decode(model, caches[0], rows=2), decode(stock, caches[1], rows=2)
    assert relative_error(got, expected) < TOLERANCE


ROWS = {
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([2, 0])),
    "select negative": lambda cache: cache.batch_select_indices(torch.tensor([-1, 0])),
    "select bool": lambda cache: cache.batch_select_indices(torch.tensor([True, False, True])),
}


@pytest.mark.parametrize("change", ROWS)
@pytest.mark.parametrize("served", [True, False], ids=["patched", "unpatched"])
def test_rows_move_as_in_a_dynamic_cache(stock, model, change, served):
    which = model if served else stock
    caches, batch = (paged(), DynamicCache()), prompts([19] * 3)
    for cache, runner in zip(caches, (which, stock), strict=True):
        run(runner, cache, batch["input_ids"])
        ROWS[change](cache)
    rows = caches[1].layers[0].keys.shape[0]
    assert caches[0].batch_size == rows
    got, expected = decode(which, caches[0]), decode(stock, caches[1], rows=rows)
    assert relative_error(got, expected) < TOLERANCE if served else torch.equal(got, expected)
    caches[0].table.check()


@pytest.mark.parametrize("indices", [[3], [-4], [True, False]])
def test_rows_that_are_not_there_are_refused_and_nothing_moves(model, indices):
    cache = paged()
    run(model, cache, prompts([5] * 3)["input_ids"])
    before = copy.deepcopy(cache.table.rows)
    with pytest.raises(ValueError, match="indices"):
        cache.batch_select_indices(torch.tensor(indices))
    assert cache.table.rows == before


def test_a_cache_whose_rows_were_all_dropped_starts_anew(stock, model):
    cache, batch = paged(), prompts([9, 9])
    run(model, cache, batch["input_ids"])
    cache.batch_select_indices(torch.tensor([], dtype=torch.int64))
    assert cache.get_seq_length() == 0 and not cache.table.allocator.users
    assert torch.equal(run(model, cache, batch["input_ids"]), run(stock, DynamicCache(), batch["input_ids"]))


def test_a_reset_cache_answers_like_a_new_one_and_keeps_its_pool(model):
    cache, batch = paged(), prompts([20, 7])
    run(model, cache, prompts([40, 30], seed=5)["input_ids"])
    pool = cache.memory_report().bytes_pool
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.memory_report().blocks_used == 0
    outs = []
    for fresh in (cache, paged()):
        run(model, fresh, batch["input_ids"], batch["attention_mask"])
        outs.append(decode(model, fresh, batch["attention_mask"]))
    assert torch.equal(*outs) and cache.memory_report().bytes_pool == pool


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_a_copy_of_a_cache_is_equal_and_independent(model, duplicate):
    cache, batch = paged(), prompts([20, 7])
    run(model, cache, batch["input_ids"], batch["attention_mask"])
    other = duplicate(cache)
    expected = decode(model, cache, batch["attention_mask"])
    cache.reset()
    poison(cache)
    assert torch.equal(decode(model, other, batch["attention_mask"]), expected)


def test_a_row_that_writes_into_a_shared_block_leaves_the_other_rows_bits(model):
    cache = paged()
    run(model, cache, prompts([20])["input_ids"])
    cache.batch_repeat_interleave(3)
    assert cache.memory_report().blocks_used == 2 and cache.memory_report().tokens == 60
    before = [entries(cache, row, layer=1).clone() for row in range(3)]
    run(model, cache, torch.tensor([[5], [6], [7]]))
    assert cache.memory_report().blocks_used == 1 + 3
    assert cache.table.rows[0][0] == cache.table.rows[1][0] == cache.table.rows[2][0]
    after = [entries(cache, row, layer=1) for row in range(3)]
    assert all(torch.equal(old, new[:20]) for old, new in zip(before, after, strict=True))
    assert not torch.equal(after[0][20], after[1][20]) and not torch.equal(after[1][20], after[2][20])


@pytest.mark.parametrize("side", ["left", "right"])
def test_latents_after_five_decoded_tokens_equal_recomputed_ones(stock, model, side):
    cache, reference, batch = paged(), DynamicCache(), prompts([20, 13, 1], side=side)
    run(model, cache, batch["input_ids"], batch["attention_mask"])
    decode(model, cache, batch["attention_mask"], steps=5)
    ids = torch.cat([batch["input_ids"], torch.arange(5, 8)[:, None] + torch.arange(5)], 1)
    mask = torch.cat([batch["attention_mask"], torch.ones(3, 5, dtype=torch.int64)], 1)
    run(stock, reference, ids, mask)
    for layer in range(3):
        keys, values = reference.layers[layer].keys, reference.layers[layer].values
        for row in range(3):
            expected = torch.cat([keys[row, 0], values[row, 0]], -1)[mask[row].bool()]
            assert relative_error(entries(cache, row, layer), expected) < TOLERANCE


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK])
def test_lengths_around_a_block_edge(stock, model, length):
    batch = prompts([2 * BLOCK + 1, length])
    cache, reference = paged(), DynamicCache()
    for which, kept in ((model, cache), (stock, reference)):
        run(which, kept, batch["input_ids"], batch["attention_mask"])
    got = decode(model, cache, batch["attention_mask"], steps=2)
    expected = decode(stock, reference, batch["attention_mask"], steps=2, rows=2)
    assert cache.table.stored == [2 * BLOCK + 3, length + 2]
    assert relative_error(got, expected) < TOLERANCE


@pytest.mark.parametrize("alignment", [16, 256])
@pytest.mark.parametrize("steps", [1, 3])
def test_nan_in_all_that_holds_no_token_reaches_no_output(model, alignment, steps):
    outs = []
    for poisoned in (False, True):
        cache, batch = paged(entry_alignment=alignment), prompts([20, 7])
        cache.reserve_tokens([64, 64])
        run(model, cache, batch["input_ids"], batch["attention_mask"])
        if poisoned:
            poison(cache)
        decoded = decode(model, cache, batch["attention_mask"], steps=steps)
        # A long continuation reads the history back through the dense path.
        mask = torch.ones(2, 20 + steps + 140, dtype=torch.int64)
        mask[:, :20] = batch["attention_mask"]
        long = run(model, cache, torch.arange(280).view(2, 140) % 90 + 3, mask)
        outs.append(torch.cat([decoded, long], 1))
    assert torch.equal(*outs) and outs[1].isfinite().all()


def test_freed_then_poisoned_blocks_are_reused_without_a_trace(model):
    cache, batch = paged(max_tokens=96), prompts([20, 7])
    run(model, cache, prompts([48, 48], seed=9)["input_ids"])
    cache.crop(-48)
    poison(cache)
    outs = []
    for used in (cache, paged()):
        run(model, used, batch["input_ids"], batch["attention_mask"])
        outs.append(decode(model, used, batch["attention_mask"], steps=8))
    assert torch.equal(*outs) and outs[0].isfinite().all()


def test_a_pool_that_grows_keeps_what_it_holds(model):
    cache = paged()
    run(model, cache, prompts([15, 15])["input_ids"])
    before = [entries(cache, row, layer).clone() for row in range(2) for layer in range(3)]
    pool = cache.memory_report().bytes_pool
    decode(model, cache, steps=40)
    after = [entries(cache, row, layer)[:15] for row in range(2) for layer in range(3)]
    assert cache.memory_report().bytes_pool > pool
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
