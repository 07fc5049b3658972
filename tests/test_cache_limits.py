"""Where PagedMLACache ends: pool limits, failures in the middle, refusals, memory, and use on an unpatched model."""

import copy
import gc
import weakref

import pytest
import torch
from test_cache import BLOCK, TOLERANCE, decode, entries, paged, run
from tiny import GREEDY, build, prompts, relative_error, twin
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import hf_mla
from hf_mla import PagedMLACache, PoolExhausted, compat


@pytest.fixture(scope="module")
def stock():
    return build("deepseek_v3", sharp=2.0)


@pytest.fixture(scope="module")
def model(stock):
    return hf_mla.patch(twin(stock))


def state(cache):
    """Everything that a refused step must leave alone."""
    table = cache.table
    rows = [entries(cache, row).clone() for row in range(len(table.rows))]
    return copy.deepcopy((table.rows, table.stored, table.length, table.kept, cache.get_seq_length())), rows


def assert_unchanged(cache, before):
    cache.table.check()
    after = state(cache)
    assert str(before[0]) == str(after[0])
    assert all(torch.equal(old, new) for old, new in zip(before[1], after[1], strict=True))


def test_a_full_pool_refuses_before_anything_is_lost_and_goes_on_after_a_crop(stock, model):
    cache, batch = paged(max_tokens=4 * BLOCK), prompts([30, 30])
    run(model, cache, batch["input_ids"])
    before = state(cache)
    with pytest.raises(PoolExhausted, match="max_tokens"):
        run(model, cache, prompts([5, 5], seed=3)["input_ids"])
    assert_unchanged(cache, before)
    cache.crop(-20)
    reference = DynamicCache()
    run(stock, reference, batch["input_ids"][:, :10])
    assert relative_error(decode(model, cache), decode(stock, reference, rows=2)) < TOLERANCE


def test_a_full_pool_goes_on_once_a_row_is_dropped(stock, model):
    cache, batch = paged(max_tokens=2 * BLOCK), prompts([BLOCK, BLOCK])
    run(model, cache, batch["input_ids"])
    with pytest.raises(PoolExhausted):
        decode(model, cache)
    cache.batch_select_indices(torch.tensor([1]))
    reference = DynamicCache()
    run(stock, reference, batch["input_ids"][1:])
    assert relative_error(decode(model, cache), decode(stock, reference, rows=1)) < TOLERANCE


def test_a_prompt_longer_than_the_pool_leaves_an_empty_cache_that_serves_a_shorter_one(model):
    cache = paged(max_tokens=BLOCK)
    with pytest.raises(PoolExhausted, match="1 blocks of 16 tokens, 0 of them in use, and 2 more"):
        run(model, cache, prompts([BLOCK + 1])["input_ids"])
    assert cache.batch_size == -1 and cache.get_seq_length() == 0
    run(model, cache, prompts([BLOCK])["input_ids"])
    assert cache.table.stored == [BLOCK]


def test_copy_on_write_counts_towards_the_limit(model):
    cache = paged(max_tokens=2 * BLOCK)
    run(model, cache, prompts([10])["input_ids"])
    cache.batch_repeat_interleave(3)  # one block, and two copies are needed to write
    before = state(cache)
    with pytest.raises(PoolExhausted):
        run(model, cache, torch.tensor([[5], [6], [7]]))
    assert_unchanged(cache, before)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("past", [0, 20])
@pytest.mark.parametrize("layer", [0, 2])
def test_a_forward_that_fails_halfway_can_be_tried_again(stock, model, layer, past, error):
    batch = prompts([past + 3, max(past, 1)])
    ids, mask = batch["input_ids"], batch["attention_mask"]
    cache, reference = paged(), DynamicCache()
    if past:
        run(model, cache, ids[:, :past], mask[:, :past])
        cache.batch_repeat_interleave(2)
        ids, mask = ids.repeat_interleave(2, 0), mask.repeat_interleave(2, 0)
        run(stock, reference, ids[:, :past], mask[:, :past])
        before = state(cache)

    def fail(*args):
        raise error("once")

    handle = model.model.layers[layer].mlp.register_forward_pre_hook(fail)
    with pytest.raises(error, match="once"):
        run(model, cache, ids[:, past:], mask)
    handle.remove()
    assert [cache.get_seq_length(i) for i in range(3)] == [past] * 3
    assert not past or assert_unchanged(cache, before) is None
    got, expected = run(model, cache, ids[:, past:], mask), run(stock, reference, ids[:, past:], mask)
    kept = mask[:, past:].bool()  # nothing is computed for the others in a prompt
    assert relative_error(got[kept], expected[kept]) < TOLERANCE
    cache.table.check()


def test_an_interrupted_forward_keeps_no_cache_alive(model):
    cache = paged()

    def interrupt(*args):
        raise KeyboardInterrupt

    handle = model.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(model, cache, prompts([5])["input_ids"])
    handle.remove()
    alive = weakref.ref(cache)
    del cache
    gc.collect()
    assert alive() is None


def test_no_memory_for_a_copied_block_leaves_the_cache_as_it_was(model, monkeypatch):
    cache = paged()
    run(model, cache, prompts([10])["input_ids"])
    cache.batch_repeat_interleave(2)
    before = state(cache)

    def grow(num_blocks):
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(cache.layers[1], "grow", grow)
    with pytest.raises(torch.OutOfMemoryError):
        run(model, cache, torch.tensor([[5], [6]]))
    assert_unchanged(cache, before)


def test_what_does_not_fit_the_cache_is_refused_by_name_and_changes_nothing(stock, model):
    cache, batch = paged(), prompts([9, 4])
    mask = torch.cat([batch["attention_mask"], torch.ones(2, 1, dtype=torch.int64)], 1)
    run(model, cache, batch["input_ids"], batch["attention_mask"])
    before, one = state(cache), torch.tensor([[5], [6]])
    wrong = [
        ("batch", one[:1], mask[:1]),
        ("attention_mask is None", one, None),
        ("attention_mask has shape", one, mask[:, :-1]),
        ("unmasks", one, torch.ones_like(mask)),
    ]
    for message, ids, given in wrong:
        with pytest.raises(ValueError, match=message):
            run(model, cache, ids, given)
        assert_unchanged(cache, before)
    with pytest.raises(ValueError, match="batch: the cache holds 2 rows and was given 1"):
        run(stock, cache, one[:1], mask[:1])
    assert_unchanged(cache, before)
    other = hf_mla.patch(build("deepseek_v3", kv_lora_rank=24))
    with pytest.raises(ValueError, match="kv_lora_rank 40 .* was given 24"):
        run(other, cache, one, mask)
    with pytest.raises(ValueError, match="torch.float32 .* was given torch.bfloat16"):
        run(twin(model).to(torch.bfloat16), cache, one, mask)
    assert_unchanged(cache, before)


def test_a_model_without_latents_is_refused():
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 97}
    llama = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes))
    with pytest.raises(ValueError, match="multi-head latent attention only"):
        run(llama, PagedMLACache(), torch.tensor([[5]]))
    with pytest.raises(ValueError, match="LlamaConfig has no kv_lora_rank"):
        PagedMLACache(llama.config)


@pytest.mark.parametrize("first", [True, False])
def test_a_cache_can_be_begun_in_inference_mode_and_used_outside_and_back(model, first):
    outs, batch = [], prompts([40, 2 * BLOCK - 1])
    mask = torch.cat([batch["attention_mask"], torch.ones(2, 4, dtype=torch.int64)], 1)
    for modes in ((first, not first, first), (False,) * 3):
        cache = paged()
        cache.reserve_tokens([64, 64])  # pages are made once, in the first mode
        with torch.inference_mode(modes[0]):
            run(model, cache, batch["input_ids"], batch["attention_mask"])
        with torch.inference_mode(modes[1]):  # the second row takes a block within the table that is there
            run(model, cache, torch.tensor([[5, 6], [7, 8]]), mask[:, :-2])
        with torch.inference_mode(modes[2]):
            outs.append(run(model, cache, torch.tensor([[5, 6], [7, 8]]), mask))
    assert torch.equal(*outs)


@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
def test_block_size_changes_no_answer(stock, model, block_size):
    batch, cache, reference = prompts([40, 7]), PagedMLACache(block_size=block_size), DynamicCache()
    for which, used in ((model, cache), (stock, reference)):
        run(which, used, batch["input_ids"], batch["attention_mask"])
    got = decode(model, cache, batch["attention_mask"])
    assert relative_error(got, decode(stock, reference, batch["attention_mask"], rows=2)) < TOLERANCE
    assert cache.layers[0].pages.shape[1] == block_size


def test_an_entry_aligned_to_256_bytes_gives_the_packed_ones_bits(model):
    outs, batch = [], prompts([40, 7])
    for alignment, values in ((16, 56), (256, 64)):
        cache = paged(entry_alignment=alignment)
        run(model, cache, batch["input_ids"], batch["attention_mask"])
        outs.append(decode(model, cache, batch["attention_mask"]))
        assert cache.layers[0].pages.shape[2] == values
    assert torch.equal(*outs)


def test_a_lower_cache_dtype_halves_the_bytes_and_stays_near(model):
    outs, batch, sizes = [], prompts([40, 7]), []
    for dtype in (None, torch.bfloat16):
        cache = paged(dtype=dtype)
        run(model, cache, batch["input_ids"], batch["attention_mask"])
        outs.append(decode(model, cache, batch["attention_mask"]))
        sizes.append(cache.memory_report().bytes_used)
    assert cache.layers[0].pages.dtype == torch.bfloat16 and sizes[0] == 2 * sizes[1]
    assert outs[1].dtype == torch.float32 and 0 < relative_error(outs[1], outs[0]) < 0.05


def test_the_memory_report_is_exact(model):
    batch, cache = prompts([40, 7]), PagedMLACache(model.config, block_size=BLOCK)
    assert cache.memory_report().bytes_used == 0 and "0 tokens" in repr(cache)
    model.generate(**batch, max_new_tokens=20, **{compat.CACHE_NAME: cache}, **GREEDY)
    report, a_token = cache.memory_report(), 3 * (40 + 16) * 4
    assert (report.rows, report.layers, report.bytes_per_token) == (2, 3, a_token)
    assert report.tokens == 59 + 26 and report.blocks_used == 4 + 2  # the last token is never fed back
    assert report.bytes_used == 6 * BLOCK * a_token
    assert report.bytes_used - report.tokens * a_token < 2 * BLOCK * a_token
    assert report.bytes_pool == sum(layer.pages.nbytes for layer in cache.layers)
    assert report.bytes_expanded == report.tokens * 3 * 5 * (20 + 16 + 28) * 4
    assert "85 tokens" in repr(cache) and "6 of " in repr(cache) and "KiB" in repr(cache)
    html = cache._repr_html_()
    assert html.startswith("<table") and html.count("<tr>") == html.count("</tr>") and ">85<" in html


def test_generate_makes_pages_once_and_wastes_less_than_a_block_a_row(model, monkeypatch):
    made = []
    allocate = hf_mla.cache.layout.EntryLayout.allocate
    monkeypatch.setattr(
        hf_mla.cache.layout.EntryLayout,
        "allocate",
        lambda self, n, device: made.append(n) or allocate(self, n, device),
    )
    output = model.generate(**prompts([100, 7]), max_new_tokens=64, cache_implementation="paged_mla", **GREEDY)
    report = (output.cache if compat.CACHE_NAME == "cache" else output.past_key_values).memory_report()
    assert [n for n in made if n] == [report.blocks_total + 1] * 3
    assert report.bytes_pool - report.tokens * report.bytes_per_token <= (2 + 1) * 64 * report.bytes_per_token


def plan_shapes(cache, model):
    """Shapes of all that a decode step hands to the kernels, but for the pages."""
    run(model, cache, prompts([20, 20])["input_ids"])
    plan = cache.begin_step(None, 2, 1, max_absorbed=1)
    tensors = plan.on(torch.device("cpu"))
    return [tuple(t.shape) for t in (tensors.block_table, tensors.kv_lens, tensors.slot_mapping)], plan.absorbed


def test_a_steps_work_does_not_grow_with_the_pool(model):
    small, large = paged(), paged()
    small.reserve_tokens([64, 64])
    large.reserve_tokens([640, 640])
    shapes = plan_shapes(small, model), plan_shapes(large, model)
    assert large.memory_report().blocks_total == 10 * small.memory_report().blocks_total
    assert shapes[0] == shapes[1] == ([(2, 2), (2, 1), (2,)], True)


@pytest.mark.parametrize("lengths", [[20, 20], [20, 7]])
def test_an_unpatched_model_gives_the_same_bits_as_with_a_dynamic_cache(stock, lengths):
    batch, caches = prompts(lengths), (paged(), DynamicCache())
    mask = batch["attention_mask"] if len(set(lengths)) > 1 else None
    outs = [[run(stock, cache, batch["input_ids"], mask), decode(stock, cache, mask, rows=2)] for cache in caches]
    assert torch.equal(outs[0][0], outs[1][0]) and torch.equal(outs[0][1], outs[1][1])


@pytest.mark.parametrize("options", [{}, {"num_beams": 3, "num_return_sequences": 3}])
def test_an_unpatched_model_generates_the_same_bits_as_with_a_dynamic_cache(stock, options):
    outs = []
    for cache in (paged(), DynamicCache()):
        given = {compat.CACHE_NAME: cache, "max_new_tokens": 12, **GREEDY, **options}
        outs.append(stock.generate(**prompts([20, 7]), **given))
    assert torch.equal(outs[0].sequences, outs[1].sequences)
    assert all(torch.equal(*pair) for pair in zip(outs[0].logits, outs[1].logits, strict=True))


def test_an_unpatched_model_goes_on_from_a_padded_batch_that_a_patched_one_cached(stock, model):
    batch, cache, reference = prompts([20, 7]), paged(), DynamicCache()
    run(model, cache, batch["input_ids"], batch["attention_mask"])
    run(stock, reference, batch["input_ids"], batch["attention_mask"])
    got = decode(stock, cache, batch["attention_mask"], rows=2)
    assert relative_error(got, decode(stock, reference, batch["attention_mask"], rows=2)) < TOLERANCE
    assert cache.table.stored == [23, 10]
