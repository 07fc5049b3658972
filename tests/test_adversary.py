"""Odd uses that once went wrong: modules exchanged after the patch, nested passes, caches lent to other models."""

import copy
import weakref

import pytest
import torch
from pairs import cache_of, pair, using
from tiny import build, prompts, relative_error, twin
from transformers import DynamicCache

import hf_mla
from hf_mla import PagedMLACache

IDS = prompts([20])["input_ids"]
GREEDY = {"max_new_tokens": 5, "do_sample": False}


@torch.no_grad()
def logits(model, cache, ids=IDS, **arguments):
    return model(ids, **using(cache), **arguments).logits


def two_steps(model, cache):
    """Logits of a prompt and of three more tokens."""
    return torch.cat([logits(model, cache), logits(model, cache, IDS[:, :3])], 1)


def dynamic(stock):
    return DynamicCache(config=stock.config)


@pytest.fixture(scope="module")
def models():
    return pair("deepseek_v3", num_hidden_layers=3)


# Modules exchanged after the patch


def new_attention(stock, model):
    model.model.layers[1].self_attn = copy.deepcopy(stock.model.layers[1].self_attn)


def copied_layer(stock, model):
    model.model.layers[1] = copy.deepcopy(model.model.layers[1])


@pytest.mark.parametrize("exchange", [new_attention, copied_layer])
def test_an_attention_exchanged_after_the_patch_is_refused_until_patched_again(exchange):
    stock, model = pair("deepseek_v3")
    exchange(stock, model)
    cache = PagedMLACache(model.config)
    logits(model, cache)
    with pytest.raises(ValueError, match=r"layer 1 .*hf_mla\.patch\(model\) again"):
        logits(model, cache, IDS[:, :3])
    assert cache.get_seq_length() == IDS.shape[1]
    hf_mla.patch(model, block_size=16)
    assert relative_error(logits(model, cache, IDS[:, :3]), two_steps(stock, dynamic(stock))[:, -3:]) < 1e-5


@pytest.mark.parametrize("exchange", [new_attention, copied_layer])
def test_unpatch_cleans_exchanged_modules_too(exchange):
    stock, model = pair("deepseek_v3")
    exchange(stock, model)
    hf_mla.unpatch(model)
    for module in model.modules():
        assert not {"expand_kv", "_hf_mla", "forward"} & set(module.__dict__)
        assert module.__dict__.get("config", model.config) is not None
        assert not type(module.__dict__.get("config")).__module__.startswith("hf_mla")


# A pass inside a pass


def nested_logits(model, make_cache):
    """Logits of two steps during each of which a hook runs the same model over another cache; the hook's follow."""
    inner, busy = [], []

    def hook(*_):
        if not busy:
            busy.append(True)
            inner.append(two_steps(model, make_cache()))
            busy.clear()

    handle = model.model.layers[0].register_forward_hook(hook)
    try:
        outer = two_steps(model, make_cache())
    finally:
        handle.remove()
    return torch.cat([outer, *inner], 1)


def test_a_hook_may_run_the_model_inside_its_own_pass(models):
    stock, model = models
    got = nested_logits(model, lambda: PagedMLACache(model.config))
    assert relative_error(got, nested_logits(stock, lambda: dynamic(stock))) < 1e-5


def test_a_pass_inside_a_pass_over_the_same_cache_is_refused(models):
    stock, model = models
    cache = PagedMLACache(model.config)
    logits(model, cache)
    handle = model.model.layers[0].register_forward_hook(lambda *_: logits(model, cache, IDS[:, :1]))
    try:
        with pytest.raises(ValueError, match="cache: .*inside"):
            logits(model, cache, IDS[:, :3])
    finally:
        handle.remove()
    cache.table.check()
    assert relative_error(logits(model, cache, IDS[:, :3]), two_steps(stock, dynamic(stock))[:, -3:]) < 1e-5


# Caches of another model


@pytest.mark.parametrize("layers", [2, 4])
@pytest.mark.parametrize("with_config", [True, False])
def test_a_cache_of_a_model_with_other_layers_is_refused_and_unharmed(models, layers, with_config):
    stock, model = models
    other = hf_mla.patch(build("deepseek_v3", num_hidden_layers=layers))
    cache = PagedMLACache(model.config) if with_config else PagedMLACache()
    logits(model, cache)
    with pytest.raises(ValueError, match=f"cache: .*3 layers.*{layers}"):
        logits(other, cache, IDS[:, :1])
    assert relative_error(logits(model, cache, IDS[:, :3]), two_steps(stock, dynamic(stock))[:, -3:]) < 1e-5


def test_an_unpatched_model_with_more_layers_than_the_cache_is_refused(models):
    with pytest.raises(ValueError, match="cache: .*3 layers"):
        logits(build("deepseek_v3", num_hidden_layers=4), PagedMLACache(models[0].config))


def test_a_copy_of_the_model_may_go_on_with_its_cache(models):
    stock, model = models
    cache = PagedMLACache(model.config)
    logits(model, cache)
    got = logits(copy.deepcopy(model), cache, IDS[:, :3])
    assert relative_error(got, two_steps(stock, dynamic(stock))[:, -3:]) < 1e-5


# Passes of an unpatched model that fail halfway


@pytest.mark.parametrize("then", ["unpatched", "patched"])
@pytest.mark.parametrize("past", [0, 20])
def test_a_failed_pass_of_an_unpatched_model_is_not_built_upon(models, then, past):
    stock, model = models
    failing, cache = twin(stock), PagedMLACache(stock.config)
    if past:
        logits(stock, cache)
    handle = failing.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        logits(failing, cache, IDS[:, :2])
    handle.remove()
    going_on = failing if then == "unpatched" else model
    for _ in range(2):
        with pytest.raises(ValueError, match="cache: layer 1 .*failed halfway"):
            logits(going_on, cache, IDS[:, :3])
    cache.crop(past - cache.get_seq_length())
    if past:
        assert relative_error(logits(going_on, cache, IDS[:, :3]), two_steps(stock, dynamic(stock))[:, -3:]) < 1e-5
    else:
        assert relative_error(two_steps(going_on, cache), two_steps(stock, dynamic(stock))) < 1e-5


# Gradients


@pytest.mark.parametrize("patched", [True, False])
def test_gradients_through_an_expanded_history_raise(models, patched):
    stock, model = models
    cache = PagedMLACache(model.config)
    logits(model, cache)
    many = prompts([140], seed=2)["input_ids"]  # too many columns to be absorbed
    out = (model if patched else stock)(many, **using(cache)).logits
    with pytest.raises(RuntimeError, match="no gradients flow through a PagedMLACache"):
        out.sum().backward()


def test_gradients_of_a_prompt_without_history_are_stocks(models):
    grads = []
    for model, cache in ((models[0], dynamic(models[0])), (models[1], PagedMLACache())):
        embeds = models[0].get_input_embeddings()(IDS).detach().requires_grad_()
        model(inputs_embeds=embeds, **using(cache)).logits.square().sum().backward()
        grads.append(embeds.grad)
    assert relative_error(grads[1], grads[0]) < 1e-6


# Surroundings


def test_a_default_device_moves_none_of_the_hosts_books(models):
    stock, model = models
    cache = PagedMLACache(model.config)
    batch = prompts([20, 9])
    with torch.device("meta"):
        for columns in (20, 3, 1):
            ids, new = batch["input_ids"][:, :columns], cache.get_seq_length() + columns
            mask = torch.cat([batch["attention_mask"], batch["attention_mask"].new_ones(2, 4)], 1)[:, :new]
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -columns:]
            logits(model, cache, ids, attention_mask=mask, position_ids=positions)
        cache.reorder_cache(torch.tensor([1, 0], device="cpu"))
        cache.crop(-1)
    cache.table.check()


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (["deepseek"], {}, "config is a str; allowed: "),
        ([64], {}, "config is a int; allowed: "),
        ([], {"dtype": "bfloat16"}, "^dtype is 'bfloat16'; allowed: None, torch.float32"),
    ],
)
def test_a_bad_argument_of_a_cache_is_named(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        PagedMLACache(*arguments, **options)


def test_a_model_in_place_of_its_config_is_named(models):
    with pytest.raises(ValueError, match=r"config is a DeepseekV3ForCausalLM; allowed: .*model\.config"):
        PagedMLACache(models[1])


@pytest.mark.parametrize("wrong", [None, "deepseek", PagedMLACache])
@pytest.mark.parametrize("call", [hf_mla.patch, hf_mla.unpatch, lambda model: hf_mla.patched(model).__enter__()])
def test_something_that_is_no_model_is_named(call, wrong):
    with pytest.raises(ValueError, match=r"^model is a (NoneType|str|type); allowed: a loaded transformers model"):
        call(wrong)


@pytest.mark.parametrize("wrong", ["triton", 64, {"block_size": 16}, hf_mla.MLAConfig])
def test_a_config_that_is_none_is_named(models, wrong):
    for call in (hf_mla.patch, lambda *arguments: hf_mla.patched(*arguments).__enter__()):
        with pytest.raises(ValueError, match=r"^config is .*; allowed: None, an MLAConfig"):
            call(models[0], wrong)
    with pytest.raises(ValueError, match=r"^config is .*; allowed: None, an MLAConfig"):
        hf_mla.enable(wrong)


def test_a_config_may_stand_for_options_and_options_change_it(monkeypatch):
    model = build()
    config = hf_mla.MLAConfig(block_size=32, max_tokens=640)

    def block_sizes(**arguments):
        output = model.generate(IDS, **GREEDY, **arguments, return_dict_in_generate=True)
        return cache_of(output).options.block_size, cache_of(output).options.max_tokens

    hf_mla.patch(model, config)
    assert block_sizes(cache_implementation="paged_mla") == (32, 640)
    with hf_mla.patched(model, config, block_size=16):
        assert block_sizes(cache_implementation="paged_mla") == (16, 640)
    assert block_sizes(cache_implementation="paged_mla") == (32, 640)
    monkeypatch.setenv("HF_MLA_DISABLE", "1")
    assert not hf_mla.MLAConfig().enabled and hf_mla.MLAConfig(enabled=True).enabled and config.enabled
    monkeypatch.setenv("HF_MLA_DISABLE", "yes")
    with pytest.raises(ValueError, match="HF_MLA_DISABLE is 'yes'; allowed: 0, 1"):
        hf_mla.MLAConfig()


@pytest.mark.parametrize("with_config", [True, False])
@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32"])
def test_a_cache_is_initialized_once_it_holds_something_as_stocks_is(family, with_config):
    model = hf_mla.patch(build(family))
    cache = PagedMLACache(model.config) if with_config else PagedMLACache()
    expected = dynamic(model)
    for step in (IDS, IDS[:, :1]):
        assert cache.is_initialized == expected.is_initialized
        for each in (cache, expected):
            logits(model, each, step)
        assert cache.is_initialized and expected.is_initialized
    cache.reset()
    assert not cache.is_initialized


@pytest.mark.gpu
def test_a_captured_graph_keeps_no_cache_alive():
    model = hf_mla.patch(build("deepseek_v3").cuda().to(torch.bfloat16))
    output = model.generate(IDS.cuda(), **GREEDY, cache_implementation="paged_mla", return_dict_in_generate=True)
    cache = weakref.ref(cache_of(output))
    del output
    assert cache() is None
