"""Continuous batching of patched models: every answer as that of unpatched `generate`, one prompt at a time."""

import pytest
import torch
from tiny import FAMILIES, MORE_FAMILIES, build, twin
from transformers import GenerationConfig

import hf_mla
from hf_mla import compat
from hf_mla.families import SERVED

pytestmark = pytest.mark.skipif(not compat.BATCHING, reason="transformers before 5.20 is refused")
if compat.BATCHING:
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

FAMILY_NAMES = [
    name
    for name in (*FAMILIES, *MORE_FAMILIES)
    if name in SERVED and SERVED[name].way == "absorbed" and not SERVED[name].others
]
PAGE = 16


def config_of(**changes):
    values = {"page_size": PAGE, "num_blocks": 64, "max_batch_tokens": 48, **changes}
    return ContinuousBatchingConfig(**values)


def some_prompts(lengths, seed=1, prefix=()):
    generator = torch.Generator().manual_seed(seed)
    return [[*prefix, *torch.randint(3, 97, (length,), generator=generator).tolist()] for length in lengths]


def alone(model, prompt, new=8, **options):
    """The new tokens of unpatched generate, for one prompt."""
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, **options)
    return out[0, len(prompt) :].tolist()


def greedy(**changes):
    return GenerationConfig(**{"max_new_tokens": 8, "do_sample": False, "eos_token_id": -1, **changes})


def run(model, prompts, generation=None, **changes):
    return list(model.generate_batch(prompts, generation or greedy(), config_of(**changes)).values())


def poison(monkeypatch):
    """NaN in every page before anything is stored."""
    from hf_mla.cache.batch import LatentAllocator

    register = LatentAllocator.register_cache_tensor

    def poisoned(self, sector, size, tensor, pool):
        register(self, sector, size, tensor, pool)
        for layer in self.layers:
            layer.pages.fill_(float("nan"))

    monkeypatch.setattr(LatentAllocator, "register_cache_tensor", poisoned)


FAST = ("deepseek_v2", "deepseek_v3")


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in FAMILY_NAMES]
)
def test_mixed_lengths_in_chunks_beside_decoding_ones(family, monkeypatch):
    poison(monkeypatch)
    model = build(family)
    stock = twin(model)
    hf_mla.patch(model)
    prompts = some_prompts([1, 3, PAGE, PAGE + 1, 70, 2, 2 * PAGE - 1])
    results = run(model, prompts)
    assert [result.generated_tokens for result in results] == [alone(stock, prompt) for prompt in prompts]
    assert all(result.error is None for result in results)


def test_decode_steps_take_the_block_table_and_others_do_not(monkeypatch):
    from hf_mla.cache import batch

    seen = []
    for name in ("plan_decode", "plan_mixed"):
        plan = getattr(batch, name)
        monkeypatch.setattr(batch, name, lambda *given, name=name, plan=plan: seen.append(name) or plan(*given))
    model = hf_mla.patch(build())
    run(model, some_prompts([5, 20]))
    assert seen == ["plan_mixed", *["plan_decode"] * 7]


def test_more_requests_than_blocks_lose_nothing():
    model = build()
    stock = twin(model)
    hf_mla.patch(model)
    prompts = some_prompts([30, 12, 25, 31, 3, 17, 28, 9])
    generation = greedy(max_new_tokens=24)
    manager = model.init_continuous_batching(generation, config_of(num_blocks=7, max_requests_per_batch=8))
    offloads = []
    with torch.no_grad():
        manager.start()
        processor = manager.batch_processor
        offload = processor.offloading_manager.offload_requests
        processor.offloading_manager.offload_requests = lambda: offloads.append(1) or offload()
        ids = manager.add_requests(prompts)
        results = {}
        while len(results) < len(prompts) and manager.is_running():
            result = manager.get_result(timeout=1)
            if result is not None:
                results[result.request_id] = result
        cache = processor.cache
        manager.stop()
    assert offloads, "the pool was to be too small"
    for name, prompt in zip(ids, prompts, strict=True):
        assert results[name].error is None
        assert results[name].generated_tokens == alone(stock, prompt, 24)
    assert_all_free(cache)


def assert_all_free(cache):
    """Nobody holds a block, and each is free or kept for its contents."""
    allocator = cache.cache_allocators["full_attention"]
    assert not allocator.block_table and not allocator.ledger.shared_ref_counts
    kept = set(allocator.ledger.cached_blocks)
    free = [leaf for tree in cache.pool._free_blocks[0].trees.values() for leaf in tree]
    assert sorted([*kept, *free, *cache.pool.free_sectors]) == list(range(2, cache.num_blocks + 2))


@pytest.mark.parametrize("length", [2 * PAGE, 2 * PAGE + 1, 2 * PAGE - 1])
def test_requests_share_the_blocks_of_a_prefix(length):
    """Also where it ends at a block's boundary, with one new token after it."""
    model = build()
    stock = twin(model)
    hf_mla.patch(model)
    (prefix,) = some_prompts([length], seed=3)
    prompts = [prefix, *some_prompts([1, 1, 5, PAGE], prefix=prefix), prefix]
    results = run(model, prompts, max_batch_tokens=PAGE * 3)
    assert [result.generated_tokens for result in results] == [alone(stock, prompt) for prompt in prompts]


def test_a_kept_manager_does_not_prefill_a_prefix_again(monkeypatch):
    from hf_mla.cache import batch

    model = build()
    stock = twin(model)
    hf_mla.patch(model)
    (system,) = some_prompts([3 * PAGE], seed=3)
    first, second = some_prompts([4, 7], prefix=system)
    model.generate_batch([first], greedy(), config_of(max_batch_tokens=128), persistent_manager=True)
    computed = []
    plan = batch.plan_mixed
    monkeypatch.setattr(
        batch,
        "plan_mixed",
        lambda chunks, *given: computed.append(sum(chunk.new for chunk in chunks)) or plan(chunks, *given),
    )
    try:
        (result,) = model.generate_batch([second], greedy(), persistent_manager=True).values()
    finally:
        model.destroy_cached_continuous_batching_manager()
    assert computed == [7]
    assert result.generated_tokens == alone(stock, second)


def test_several_sequences_a_prompt_and_a_seed():
    model = hf_mla.patch(build())
    prompts = some_prompts([20, 2, 33])
    sampled = greedy(do_sample=True, temperature=0.9, top_p=0.9, num_return_sequences=3, max_new_tokens=6)
    once, again = ([r.generated_tokens for r in run(model, prompts, sampled, seed=4)] for _ in range(2))
    other = [r.generated_tokens for r in run(model, prompts, sampled, seed=5)]
    assert len(once) == 9 and once == again != other
    assert all(len(tokens) == 6 for tokens in once)
    stock = twin(hf_mla.unpatch(model))
    hf_mla.patch(model)
    best = greedy(num_return_sequences=2, do_sample=True, top_k=1)
    with pytest.raises(ValueError, match="input_ids has 1 token and num_return_sequences is 2"):
        run(model, [[7]], best)
    results = run(model, prompts, best)
    assert [r.generated_tokens for r in results] == [alone(stock, p) for p in prompts for _ in range(2)]


def test_stop_tokens_and_log_probabilities():
    model = build()
    stock = twin(model)
    hf_mla.patch(model)
    prompts = some_prompts([9, 21])
    answers = [alone(stock, prompt, 10) for prompt in prompts]
    stop = answers[0][3]
    results = run(model, prompts, greedy(max_new_tokens=10, eos_token_id=stop), return_logprobs=True)
    for prompt, answer, result in zip(prompts, answers, results, strict=True):
        wanted = answer[: answer.index(stop) + 1] if stop in answer else answer
        assert result.generated_tokens == wanted
        ids = torch.tensor([[*prompt, *wanted]])
        logits = stock(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        expected = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
        torch.testing.assert_close(torch.tensor(result.logprobs), expected, atol=1e-4, rtol=1e-4)


def test_streaming_cancelling_and_limits_of_a_request():
    model = build()
    stock = twin(model)
    hf_mla.patch(model)
    first, second, third = some_prompts([18, 5, 40])
    manager = model.init_continuous_batching(greedy(max_new_tokens=200), config_of())
    with torch.no_grad():
        manager.start()
        cache = manager.batch_processor.cache
        manager.add_request(second, "cancelled", max_new_tokens=400, streaming=True)
        next(manager.request_id_iter("cancelled"))
        manager.cancel_request("cancelled")
        manager.add_request(first, "streamed", max_new_tokens=5, streaming=True)
        seen = [list(output.generated_tokens) for output in manager.request_id_iter("streamed")]
        manager.add_request(third, "short", max_new_tokens=2)
        (short,) = manager.request_id_iter("short")
        manager.stop()
    answer = alone(stock, first, 5)
    assert seen == [answer[: n + 1] for n in range(5)]
    assert short.generated_tokens == alone(stock, third, 2)
    assert_all_free(cache)


def test_what_does_not_fit_is_refused_and_what_fails_is_raised(monkeypatch):
    model = hf_mla.patch(build())
    with pytest.raises(ValueError, match="input_ids has 70 tokens, and 8 more are wanted; allowed: 64"):
        run(model, some_prompts([5, 70]), num_blocks=4)
    with pytest.raises(ValueError, match="input_ids is empty"):
        run(model, [[5, 6], []])
    with pytest.raises(ValueError, match="page_size is 48; allowed"):
        run(model, [[5, 6]], page_size=48)
    with pytest.raises(ValueError, match="no block of 16 tokens"):
        run(hf_mla.patch(build(), max_tokens=10), [[5, 6]])
    with pytest.raises(ValueError, match="family 'deepseek_v32' isn't served"):
        run(hf_mla.patch(build("deepseek_v32")), [[5, 6]])

    def broken(*args, **kwargs):
        raise RuntimeError("a kernel failed")

    monkeypatch.setattr("hf_mla.cache.batch.plan_decode", broken)
    with pytest.raises(RuntimeError, match="2 of 2 requests have no whole answer; req_. a kernel failed"):
        run(model, some_prompts([5, 7]))
    monkeypatch.undo()
    assert len(run(model, some_prompts([5, 7]))) == 2


def test_an_unpatched_model_is_left_alone():
    model = hf_mla.patch(build())
    run(model, some_prompts([5]))
    hf_mla.unpatch(model)
    manager = model.init_continuous_batching(greedy(), config_of())
    assert type(manager).__name__ == "ContinuousBatchingManager"


def test_the_capacity_counts_whole_blocks():
    model = hf_mla.patch(build())
    manager = model.init_continuous_batching(greedy(), config_of(num_blocks=10))
    assert manager.capacity is None
    manager.start()
    capacity = manager.capacity
    manager.stop()
    layers, values = 3, 40 + 16
    assert (capacity.tokens, capacity.bytes_per_token) == (10 * PAGE, layers * values * 4)
    assert (capacity.requests(PAGE), capacity.requests(PAGE + 1), capacity.requests(10 * PAGE + 1)) == (10, 5, 0)
    assert "160 tokens fit" in str(capacity)
