"""A patched model beside an unpatched one: what doesn't decode from pages is stock, what does follows changes."""

import contextlib
import gc
import importlib
import threading
import weakref

import peft
import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import remove_hook_from_submodules
from test_patch import BATCH, cache_of, inside, paged_scores, stock_scores
from tiny import GREEDY, build, prompts, relative_error, scores_of, twin
from transformers import DynamicCache, StaticCache

import hf_mla
from hf_mla import PagedMLACache, compat

TOLERANCE = 1e-4
patching = importlib.import_module("hf_mla.patch")


@pytest.fixture(scope="module")
def stock():
    return build("deepseek_v2")


@pytest.fixture
def model(stock):
    return hf_mla.patch(twin(stock))


def logits(model, cache, ids, mask=None, **options):
    return model(input_ids=ids, attention_mask=mask, **{compat.CACHE_NAME: cache}, **options).logits


PLAIN = {
    "default": lambda model: {},
    "no cache": lambda model: {"use_cache": False},
    "dynamic": lambda model: {compat.CACHE_NAME: DynamicCache()},
    "static": lambda model: {compat.CACHE_NAME: StaticCache(config=model.config, max_cache_len=32)},
    "static by name": lambda model: {"cache_implementation": "static"},
    "beams": lambda model: {"num_beams": 3},
    "sampling": lambda model: {"do_sample": True},
}


@pytest.mark.parametrize("way", PLAIN)
def test_without_a_paged_cache_generate_gives_stocks_bits(stock, model, way):
    outs = []
    for which in (stock, model):
        torch.manual_seed(0)
        outs.append(which.generate(**BATCH, **{"max_new_tokens": 6, **GREEDY, **PLAIN[way](which)}))
    assert torch.equal(outs[0].sequences, outs[1].sequences) and torch.equal(*map(scores_of, outs))
    assert type(cache_of(outs[0])) is type(cache_of(outs[1]))


def test_a_prefill_into_a_paged_cache_gives_stocks_bits_or_where_padded_its_logits(stock, model):
    with torch.no_grad():
        even = torch.cat([BATCH["input_ids"][:1]] * 2)
        assert torch.equal(logits(model, PagedMLACache(), even), stock(even).logits)
        got = logits(model, PagedMLACache(), BATCH["input_ids"], BATCH["attention_mask"])  # without its padding
        kept = BATCH["attention_mask"].bool()
        assert relative_error(got[kept], stock(**BATCH).logits[kept]) < 1e-5


@pytest.mark.parametrize("cache", ["paged_mla", None])
def test_attentions_are_stocks(stock, model, cache):
    outs = []
    for which in (stock, model):
        which.set_attn_implementation("eager")
        given = {"cache_implementation": cache if which is model else None, "output_attentions": True}
        outs.append(which.generate(**BATCH, max_new_tokens=4, **GREEDY, **given))
    stock.set_attn_implementation("sdpa")
    assert relative_error(*map(scores_of, outs)) < TOLERANCE
    for expected, got in zip(outs[0].attentions, outs[1].attentions, strict=True):
        assert len(got) == len(expected) == 3
        assert all(relative_error(*pair) < TOLERANCE for pair in zip(got, expected, strict=True))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_gives_stocks_loss_and_gradients(stock, checkpointing):
    results, labels = [], BATCH["input_ids"].masked_fill(BATCH["attention_mask"] == 0, -100)
    for which in (twin(stock), hf_mla.patch(twin(stock))):
        which.train()
        if checkpointing:
            which.gradient_checkpointing_enable()
        loss = which(**BATCH, labels=labels).loss
        loss.backward()
        results.append((loss, [p.grad for p in which.parameters()]))
    assert torch.equal(results[0][0], results[1][0])
    for expected, got in zip(results[0][1], results[1][1], strict=True):
        assert (expected is None and got is None) or torch.equal(expected, got)


def test_a_paged_cache_in_training_is_refused_and_the_next_call_is_fine(stock, model):
    with pytest.raises(ValueError, match="training mode"):
        logits(model.train(), PagedMLACache(), BATCH["input_ids"])
    assert relative_error(paged_scores(model.eval()), stock_scores(stock)) < TOLERANCE


def test_gradients_through_pages_raise_instead_of_leaving_the_history_out(model):
    cache = PagedMLACache()
    logits(model, cache, BATCH["input_ids"])
    out = logits(model, cache, torch.tensor([[5], [6]]))
    with pytest.raises(RuntimeError, match="no gradients flow through a PagedMLACache"):
        out.sum().backward()


@pytest.mark.parametrize("to", ["eager", "sdpa"])
def test_the_attention_implementation_can_be_changed_there_and_back(stock, model, to):
    expected = stock_scores(stock)
    model.set_attn_implementation(to)
    assert model.model.layers[0].self_attn.config._attn_implementation == to == model.config._attn_implementation
    assert relative_error(paged_scores(model), expected) < TOLERANCE
    assert relative_error(stock_scores(model), expected) < TOLERANCE
    model.set_attn_implementation("sdpa")
    assert torch.equal(stock_scores(model), expected)
    assert relative_error(paged_scores(model), expected) < TOLERANCE


def test_our_attention_cannot_be_chosen_from_outside(model):
    model.set_attn_implementation("hf_mla_absorbed")
    with pytest.raises(ValueError, match="only hf_mla.patch may choose"):
        stock_scores(model)


@pytest.mark.parametrize("switch", ["argument", "environment"])
def test_switched_off_the_model_is_stock_bit_for_bit(stock, monkeypatch, switch):
    model = twin(stock)
    before = inside(model)
    if switch == "environment":
        monkeypatch.setenv("HF_MLA_DISABLE", "1")
    hf_mla.patch(model, **({"enabled": False} if switch == "argument" else {}))
    assert {key: value for key, value in inside(model).items() if key[1] != "_hf_mla"} == before
    output = model.generate(**BATCH, max_new_tokens=4, cache_implementation="paged_mla", **GREEDY)
    assert torch.equal(scores_of(output), stock_scores(stock)) and type(cache_of(output)) is DynamicCache
    monkeypatch.delenv("HF_MLA_DISABLE", raising=False)
    hf_mla.patch(model)
    output = model.generate(**BATCH, max_new_tokens=2, cache_implementation="paged_mla", **GREEDY)
    assert type(cache_of(output)) is PagedMLACache


def test_two_threads_generate_at_once_each_as_alone(stock, model):
    batches = [prompts([30, 11], seed=3), prompts([5, 17], seed=4), prompts([8], seed=5)]
    expected = [stock_scores(stock, batch, max_new_tokens=24) for batch in batches]
    got: dict[int, torch.Tensor] = {}
    start = threading.Barrier(3)

    def work(i):
        start.wait()
        # One thread runs stock code meanwhile: the seam is each thread's own.
        scores = stock_scores if i == 2 else paged_scores
        got[i] = scores(model, batches[i], max_new_tokens=24)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert relative_error(got[0], expected[0]) < TOLERANCE and relative_error(got[1], expected[1]) < TOLERANCE
    assert torch.equal(got[2], expected[2])


@torch.no_grad()
def test_two_caches_in_turn_each_as_alone(model):
    prompt = [prompts([20], seed=3)["input_ids"], prompts([7], seed=4)["input_ids"]]
    alone = []
    for ids in prompt:
        cache = PagedMLACache()
        alone.append([logits(model, cache, x) for x in (ids, *torch.tensor([[[5]], [[6]], [[7]]]))])
    caches = [PagedMLACache(), PagedMLACache()]
    turns = [[logits(model, cache, ids)] for cache, ids in zip(caches, prompt, strict=True)]
    for token in torch.tensor([[[5]], [[6]], [[7]]]):
        for cache, outs in zip(caches, turns, strict=True):
            outs.append(logits(model, cache, token))
    assert all(torch.equal(*pair) for pairs in zip(alone, turns, strict=True) for pair in zip(*pairs, strict=True))


OFFLOADS = {
    "cpu": lambda model, folder: cpu_offload(model, execution_device=torch.device("cpu")),
    "disk": lambda model, folder: disk_offload(model, folder, execution_device=torch.device("cpu")),
    "cpu and disk": lambda model, folder: dispatch_model(
        model, {"model": "cpu", "lm_head": "disk"}, main_device="cpu", offload_dir=folder, force_hooks=True
    ),
}


@pytest.mark.parametrize("patch_first", [True, False])
@pytest.mark.parametrize("way", OFFLOADS)
def test_an_offloaded_model_gives_the_same(stock, tmp_path, way, patch_first):
    model = twin(stock)
    if patch_first:
        hf_mla.patch(model)
    model = OFFLOADS[way](model, str(tmp_path / "a"))
    hf_mla.patch(model)
    assert relative_error(paged_scores(model), stock_scores(stock)) < TOLERANCE
    hf_mla.unpatch(model)
    assert torch.equal(stock_scores(model), stock_scores(OFFLOADS[way](twin(stock), str(tmp_path / "b"))))


def test_unpatch_below_accelerates_hooks_leaves_nothing_behind(model):
    cpu_offload(model, execution_device=torch.device("cpu"))
    remove_hook_from_submodules(hf_mla.unpatch(model))
    values = [value for module in model.modules() for value in module.__dict__.values()]
    assert not [value for value in values if type(value).__module__.startswith("hf_mla")]


@pytest.mark.parametrize("patch_first", [True, False])
def test_lora_on_kv_b_proj_is_followed_on_off_and_merged(stock, patch_first):
    config = peft.LoraConfig(r=4, target_modules=["kv_b_proj"], init_lora_weights=False, lora_alpha=32)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(twin(stock), config).eval()
    model = twin(stock)
    if patch_first:
        hf_mla.patch(model)
    model = hf_mla.patch(peft.get_peft_model(model, config).eval())
    model.load_state_dict(adapted.state_dict())
    on, off = stock_scores(adapted), stock_scores(stock)
    assert relative_error(on, off) > 0.01
    assert relative_error(paged_scores(model), on) < TOLERANCE
    with model.disable_adapter():
        assert relative_error(paged_scores(model), off) < TOLERANCE
    model.merge_adapter()
    assert relative_error(paged_scores(model), on) < TOLERANCE
    model.unmerge_adapter()
    assert relative_error(paged_scores(model), on) < TOLERANCE
    assert relative_error(paged_scores(model.merge_and_unload()), on) < TOLERANCE


@pytest.mark.parametrize("assign", [False, True])
def test_weights_loaded_or_edited_after_the_patch_are_the_ones_used(model, assign):
    paged_scores(model)
    other = build("deepseek_v2", seed=7)
    model.load_state_dict(twin(other).state_dict(), assign=assign)
    assert relative_error(paged_scores(model), stock_scores(other)) < TOLERANCE
    for which in (model, other):
        with torch.no_grad():
            which.model.layers[1].self_attn.kv_b_proj.weight.mul_(-2)
    assert relative_error(paged_scores(model), stock_scores(other)) < TOLERANCE


def test_a_hook_on_kv_b_proj_is_followed(model):
    other = hf_mla.unpatch(twin(model))
    for which in (model, other):
        which.model.layers[1].self_attn.kv_b_proj.register_forward_hook(lambda module, args, out: out * -2)
    assert relative_error(paged_scores(model), stock_scores(other)) < TOLERANCE


@pytest.mark.parametrize("fails", [False, True])
def test_a_forward_keeps_no_cache_alive(model, fails):
    cache = PagedMLACache()
    model.model.layers[1].register_forward_pre_hook(lambda module, args: 1 / (not fails) and None)
    with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
        logits(model, cache, BATCH["input_ids"])
    alive = weakref.ref(cache)
    del cache
    gc.collect()
    assert alive() is None


BAD = [
    ("backend", "cuda", "auto, reference, triton, flashinfer"),
    ("backend", None, "auto"),
    ("block_size", 48, "16, 32, 64, 128, 256"),
    ("block_size", 64.0, "16, 32"),
    ("entry_alignment", 96, "a power of two"),
    ("entry_alignment", "16", "a power of two"),
    ("cache_dtype", torch.int8, "torch.bfloat16"),
    ("cache_dtype", "bfloat16", "torch.bfloat16"),
    ("max_tokens", 0, "above 0"),
    ("max_tokens", True, "above 0"),
    ("enabled", "no", "True, False"),
    ("graphs", 1, "True, False"),
    ("fused", None, "True, False"),
    ("blocksize", 64, "block_size"),
]


@pytest.mark.parametrize(("name", "value", "allowed"), BAD)
def test_a_bad_option_is_named_with_its_value_and_what_is_allowed(stock, name, value, allowed):
    before = inside(stock)
    for call in (lambda **options: hf_mla.patch(stock, **options), hf_mla.enable, hf_mla.MLAConfig.from_options):
        with pytest.raises(ValueError, match=name) as error:
            call(**{name: value})
        assert allowed in str(error.value) and (repr(value) in str(error.value) or name == "blocksize")
    assert inside(stock) == before and patching._from_pretrained is None


def test_the_backend_of_the_environment_is_taken_unless_one_is_given(stock, monkeypatch):
    model = twin(stock)
    monkeypatch.setenv("HF_MLA_BACKEND", "reference")
    hf_mla.patch(model)
    assert patching.find_bindings(model)[0][1].config.backend == "reference"
    hf_mla.patch(model, backend="auto")
    assert patching.find_bindings(model)[0][1].config.backend == "auto"
    for variable, value in (("HF_MLA_BACKEND", "cuda"), ("HF_MLA_DISABLE", "yes")):
        with monkeypatch.context() as patched, pytest.raises(ValueError, match=f"{variable} is '{value}'; allowed"):
            patched.setenv(variable, value)
            hf_mla.patch(model)


@pytest.mark.skipif(torch.cuda.is_available(), reason="FlashInfer may run here")
def test_a_backend_that_is_missing_is_refused_at_once(stock):
    with pytest.raises(ValueError, match="backend 'flashinfer' can't run here"):
        hf_mla.patch(twin(stock), backend="flashinfer")
    with pytest.raises(ValueError, match="backend 'flashinfer' can't run here"):
        hf_mla.enable(backend="flashinfer")
    assert patching._from_pretrained is None
