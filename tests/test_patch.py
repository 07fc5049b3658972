"""patch, unpatch, patched, enable: what they put on a model, what they leave alone, what they refuse."""

import copy
import gc
import importlib
import io
import pickle
import weakref
from pathlib import Path

import pytest
import torch
import transformers
from tiny import EVERY_FAMILY, FAMILIES, GREEDY, build, prompts, relative_error, scores_of, twin
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import hf_mla
from hf_mla import PagedMLACache, compat
from hf_mla.families import SERVED

patching = importlib.import_module("hf_mla.patch")  # `hf_mla.patch` is the function
BATCH = prompts([9, 4])


def paged_scores(model, batch=BATCH, **options):
    options = {"max_new_tokens": 4, "cache_implementation": "paged_mla", **GREEDY, **options}
    return scores_of(model.generate(**batch, **options))


def stock_scores(model, batch=BATCH, **options):
    return paged_scores(model, batch, cache_implementation=None, **options)


def cache_of(output):
    return getattr(output, compat.CACHE_NAME, None) or output.past_key_values


def llama():
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 16}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes))


def inside(model):
    """Identity of everything that lies on every module, with the sizes of the containers."""
    return {
        (name, key): (id(value), len(value) if isinstance(value, dict) else None)
        for name, module in model.named_modules()
        for key, value in module.__dict__.items()
    }


@pytest.fixture(scope="module")
def stock():
    return build("deepseek_v2")


@pytest.fixture
def model(stock):
    return twin(stock)


@pytest.mark.parametrize("family", FAMILIES)
def test_unpatch_restores_the_very_objects(family):
    model = build(family)
    before, config = inside(model), model.config.to_json_string()
    for _ in range(2):
        assert hf_mla.patch(hf_mla.patch(model)) is model
        assert inside(model) != before
        paged_scores(model)
        assert hf_mla.unpatch(hf_mla.unpatch(model)) is model
        assert inside(model) == before and model.config.to_json_string() == config


def test_unpatch_leaves_what_lay_on_an_instance_before(model):
    attention = model.model.layers[1].self_attn
    calls, original = [], attention.expand_kv

    def expand_kv(*args):
        calls.append(1)
        return original(*args)

    attention.expand_kv = expand_kv
    hf_mla.patch(model)
    stock_scores(model)
    assert calls
    hf_mla.unpatch(model)
    assert attention.__dict__["expand_kv"] is expand_kv


def test_patching_again_with_the_same_options_touches_nothing_and_with_others_takes_them(model):
    hf_mla.patch(model, block_size=16)
    before = inside(model)
    hf_mla.patch(model, block_size=16)
    assert inside(model) == before
    hf_mla.patch(model, block_size=32)
    output = model.generate(**BATCH, max_new_tokens=2, cache_implementation="paged_mla", **GREEDY)
    assert cache_of(output).options.block_size == 32


def test_another_model_on_the_same_config_object_stays_stock(stock, model):
    other = type(model)(model.config).eval()
    other.load_state_dict(model.state_dict())
    before, expected = inside(other), stock_scores(stock)
    hf_mla.patch(model)
    assert relative_error(paged_scores(model), expected) < 1e-4
    assert torch.equal(stock_scores(other), expected) and inside(other) == before
    assert all(layer.self_attn.config is model.config for layer in other.model.layers)
    with pytest.raises(ValueError, match="needs a patched model, and DeepseekV2ForCausalLM is not"):
        paged_scores(other)


def test_a_patched_model_saves_the_same_files(model, tmp_path):
    model.save_pretrained(tmp_path / "before")
    keys = list(model.state_dict())
    hf_mla.patch(model)
    paged_scores(model)
    assert list(model.state_dict()) == keys
    model.save_pretrained(tmp_path / "after")
    before, after = ({p.name: p.read_bytes() for p in (tmp_path / d).iterdir()} for d in ("before", "after"))
    assert before == after and "config.json" in before


def through_torch_save(model):
    file = io.BytesIO()
    torch.save(model, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda m: pickle.loads(pickle.dumps(m)), "save": through_torch_save}


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_of_a_patched_model_is_patched_and_independent(stock, model, way):
    other = COPIES[way](hf_mla.patch(model))
    expected = stock_scores(stock)
    assert relative_error(paged_scores(other), expected) < 1e-4
    hf_mla.unpatch(model)
    assert relative_error(paged_scores(other), expected) < 1e-4
    hf_mla.unpatch(other)
    assert torch.equal(stock_scores(other), expected)
    assert not other.model._forward_hooks and other.model.layers[0].self_attn.config is other.config
    assert torch.equal(stock_scores(model), expected) and set(inside(model)) == set(inside(other))


def test_a_patched_model_is_freed_without_the_garbage_collector():
    gc.collect()
    gc.disable()
    try:
        for patched in (False, True):
            model = build("deepseek_v3")
            if patched:
                hf_mla.patch(model)
                with torch.no_grad():
                    model(**BATCH, **{compat.CACHE_NAME: PagedMLACache()})
            alive = weakref.ref(model), weakref.ref(model.model.layers[0].self_attn)
            del model
            assert [ref() for ref in alive] == [None, None], f"patched: {patched}"
    finally:
        gc.enable()


@pytest.mark.parametrize("load", [AutoModelForCausalLM, transformers.DeepseekV2ForCausalLM])
def test_models_loaded_while_enabled_come_back_patched(stock, load, tmp_path):
    stock.save_pretrained(tmp_path / "mla")
    llama().save_pretrained(tmp_path / "llama")
    original = PreTrainedModel.__dict__["from_pretrained"]
    hf_mla.enable(block_size=16)
    try:
        model = load.from_pretrained(tmp_path / "mla")
        pair = load.from_pretrained(tmp_path / "mla", output_loading_info=True)
        other = AutoModelForCausalLM.from_pretrained(tmp_path / "llama")
    finally:
        hf_mla.disable()
    assert PreTrainedModel.__dict__["from_pretrained"] is original
    assert not patching.find_bindings(other) and not patching.find_bindings(load.from_pretrained(tmp_path / "mla"))
    assert set(pair[1]) >= {"missing_keys"} and patching.find_bindings(pair[0])
    output = model.generate(**BATCH, max_new_tokens=4, cache_implementation="paged_mla", **GREEDY, eos_token_id=None)
    assert cache_of(output).options.block_size == 16
    assert relative_error(scores_of(output), stock_scores(stock)) < 1e-4


def test_enable_twice_takes_the_last_options_and_one_disable_ends_it(stock, tmp_path):
    stock.save_pretrained(tmp_path)
    original = PreTrainedModel.__dict__["from_pretrained"]
    hf_mla.enable(block_size=16)
    hf_mla.enable(block_size=32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    hf_mla.disable()
    hf_mla.disable()
    assert patching.find_bindings(model)[0][1].config.block_size == 32
    assert PreTrainedModel.__dict__["from_pretrained"] is original


def test_enable_leaves_a_model_that_is_not_served_loadable_and_says_why(tmp_path, caplog, monkeypatch):
    build("youtu").save_pretrained(tmp_path)
    monkeypatch.delitem(SERVED, "youtu")
    monkeypatch.setattr(transformers.utils.logging.get_logger("transformers"), "propagate", True)
    hf_mla.enable()
    try:
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
    finally:
        hf_mla.disable()
    assert not patching.find_bindings(model) and "family 'youtu'" in caplog.text


@pytest.mark.parametrize("broken", [False, True])
def test_patched_puts_back_the_options_that_were_there(model, broken):
    hf_mla.patch(model, block_size=16)
    try:
        with hf_mla.patched(model, block_size=128) as same:
            assert same is model and patching.find_bindings(model)[0][1].config.block_size == 128
            with hf_mla.patched(model, enabled=False):
                assert isinstance(cache_of(model.generate(**BATCH, max_new_tokens=2, **GREEDY)), DynamicCache)
            assert patching.find_bindings(model)[0][1].config.block_size == 128
            if broken:
                raise KeyError
    except KeyError:
        assert broken
    assert patching.find_bindings(model)[0][1].config.block_size == 16
    output = model.generate(**BATCH, max_new_tokens=2, cache_implementation="paged_mla", **GREEDY)
    assert cache_of(output).options.block_size == 16


def test_patched_leaves_an_unpatched_model_as_it_was(model):
    before = inside(model)
    with pytest.raises(KeyError), hf_mla.patched(model):
        raise KeyError
    assert inside(model) == before


@pytest.mark.parametrize("earlier", [None, 16])
@pytest.mark.parametrize("where", ["LatentsOrKV", "AttentionConfig", "DecoderForward"])
def test_a_patch_that_fails_halfway_leaves_the_model_as_it_was(stock, model, monkeypatch, where, earlier):
    if earlier:
        hf_mla.patch(model, block_size=earlier)
    before, calls = inside(model), []
    owner = getattr(patching, where)
    real = owner.__init__

    def fail(*args, **kwargs):
        calls.append(1)
        if len(calls) == (2 if where in ("LatentsOrKV", "AttentionConfig") else 1):
            raise RuntimeError("halfway")
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, "__init__", fail)
    with pytest.raises(RuntimeError, match="halfway"):
        hf_mla.patch(model, block_size=32)
    if earlier:
        assert patching.find_bindings(model)[0][1].config.block_size == earlier
        assert set(inside(model)) == set(before)
        assert relative_error(paged_scores(model), stock_scores(stock)) < 1e-4
    else:
        assert inside(model) == before


def modules_with_latents():
    root = Path(transformers.__file__).parent / "models"
    files = sorted(p for p in root.glob("*/modeling_*.py") if "def expand_kv" in p.read_text())
    return [f"transformers.models.{p.parent.name}.{p.stem}" for p in files]


@pytest.mark.parametrize("name", modules_with_latents())
def test_every_family_of_transformers_is_served_or_refused_by_name(name):
    classes = [c for c in vars(importlib.import_module(name)).values() if getattr(c, "__module__", "") == name]
    heads = [c for c in classes if c.__name__.endswith(("ForCausalLM", "ForConditionalGeneration"))]
    with torch.device("meta"):
        model = heads[0](heads[0].config_class())
    try:
        hf_mla.patch(model)
    except ValueError as error:
        types = {module.config.model_type for module in model.modules() if isinstance(module, PreTrainedModel)}
        assert not types & set(SERVED) and any(f"family {t!r}" in str(error) for t in types)
        assert not patching.find_bindings(model)
    else:
        assert patching.find_bindings(model)[0][0].config.model_type in SERVED


def test_the_families_that_the_tests_compare_are_those_that_are_served():
    assert set(EVERY_FAMILY) == set(SERVED)


def test_what_is_no_model_of_ours_is_refused_by_name(model):
    with pytest.raises(ValueError, match="model: LlamaForCausalLM has no module with a kv_b_proj"):
        hf_mla.patch(llama())
    with pytest.raises(ValueError, match="model is a str"):
        hf_mla.patch("deepseek-ai/DeepSeek-V2-Lite")
    attention = model.model.layers[1].self_attn

    class DeepseekV2Attention(type(attention)):
        def forward(self, hidden_states, **kwargs):
            return hidden_states, None

    attention.__class__ = DeepseekV2Attention
    before = inside(model)
    with pytest.raises(ValueError, match=r"layers.1.self_attn .*DeepseekV2Attention.* doesn't call update, expand_kv"):
        hf_mla.patch(model)
    assert inside(model) == before
