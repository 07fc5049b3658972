"""Two threads over one cache: refused where they would mix, fine one after the other."""

import contextlib
import threading

import pytest
import torch
from pairs import pair, using
from test_adversary import GREEDY, IDS, dynamic, logits, two_steps
from tiny import prompts, relative_error

from hf_mla import PagedMLACache


@pytest.fixture(scope="module")
def models():
    return pair("deepseek_v3", num_hidden_layers=3)


def test_a_second_thread_in_a_pass_over_the_same_cache_is_refused(models):
    stock, model = models
    cache, errors = PagedMLACache(), []

    def intrude(*_):
        def other():
            with pytest.raises(ValueError, match="cache: another thread is in a forward pass") as error:
                logits(model, cache, IDS[:, :1])
            errors.append(error)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    handle = model.model.layers[1].register_forward_hook(intrude)
    try:
        got = two_steps(model, cache)
    finally:
        handle.remove()
    assert len(errors) == 2
    assert relative_error(got, two_steps(stock, dynamic(stock))) < 1e-5
    cache.table.check()


def test_one_thread_after_another_may_use_a_cache(models):
    stock, model = models
    cache, got = PagedMLACache(), []
    with pytest.raises(ValueError, match="attention_mask"):
        logits(model, cache, attention_mask=torch.ones(1, 3))
    for ids in (IDS, IDS[:, :3]):
        thread = threading.Thread(target=lambda ids=ids: got.append(logits(model, cache, ids)))
        thread.start()
        thread.join()
    assert relative_error(torch.cat(got, 1), two_steps(stock, dynamic(stock))) < 1e-5


def test_generations_of_two_threads_that_take_turns_on_one_cache_raise(models):
    """Between two passes of one generation the other has added columns, so the first's mask no longer fits."""
    stock, model = models
    cache, raised = PagedMLACache(), []
    turn = threading.Barrier(2)

    def one_pass(*_):
        if not turn.broken:
            with contextlib.suppress(threading.BrokenBarrierError):
                turn.wait(20)

    def work(seed):
        try:
            model.generate(**prompts([20], seed=seed), **GREEDY, **using(cache))
        except ValueError as error:
            raised.append(str(error))
            turn.abort()

    handle = model.register_forward_pre_hook(one_pass)
    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    handle.remove()
    assert raised and all("another thread" in message or "attention_mask has shape" in message for message in raised)
    cache.table.check()
