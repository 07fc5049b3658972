"""Steps in few kernels: the same logits as stock, on the modules that are known, and gone when unpatched."""

import copy
import inspect
import pickle
from collections import Counter

import pytest
import torch
from pairs import BLOCK, STRADDLING, assert_generates_alike, feed
from tiny import FAMILIES, YARN, build, prompts, relative_error, twin
from torch import nn

import hf_mla
from hf_mla import fused, known, standin
from hf_mla.standin import StandIn

pytest.importorskip("triton")

FEW = ("complex rope", "interleaved rope")  # the fast suite's
MODELS = {
    "complex rope": ("deepseek_v2", {"rope_parameters": YARN}),
    "plain queries, groups": (
        "deepseek_v2",
        {"q_lora_rank": None, "n_routed_experts": 8, "n_group": 4, "topk_group": 2} | {
            "topk_method": "group_limited_greedy"
        },
    ),
    "interleaved rope": ("deepseek_v3", {"rope_interleave": True, "attention_bias": True}),
    "half rope, groups": (
        "deepseek_v3",
        {"rope_interleave": False, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "rope_parameters": YARN},
    ),
    "glm4_moe_lite": ("glm4_moe_lite", {}),
    "youtu": ("youtu", {}),
}  # fmt: skip


@pytest.fixture
def anywhere(monkeypatch):
    """Run the kernels wherever the model is, in its dtype, and count what they did: {(stand-in, done): calls}."""
    monkeypatch.setattr(standin, "runs_on", lambda x: True)
    calls = Counter()

    def counting(kind):
        original = kind.fused

        def counted(self, *args, **kwargs):
            result = original(self, *args, **kwargs)
            calls[kind.__name__, result is not NotImplemented] += 1
            return result

        return counted

    for kind in set(fused.STAND_INS.values()):
        monkeypatch.setattr(kind, "fused", counting(kind))
    return calls


def pair(family="deepseek_v2", **changes):
    patched = build(family, **{"num_hidden_layers": 2, **changes})
    return twin(patched), hf_mla.patch(patched, block_size=BLOCK)


def stand_ins(model):
    return {
        name: m.__dict__["forward"]
        for name, m in model.named_modules()
        if isinstance(m.__dict__.get("forward"), StandIn)
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_twenty_padded_steps_are_stocks(name, anywhere):
    family, changes = MODELS[name]
    stock, patched = pair(family, **changes)
    assert_generates_alike(stock, patched, 1e-4, **prompts([1, BLOCK - 1, BLOCK + 1]), max_new_tokens=20)
    assert all(done for _, done in anywhere) and sum(anywhere.values()) >= 19 * (2 * 4 + 1)
    # Every module with a stand-in took part, but for the norms whose work the attention and the layer do.
    layers = patched.config.num_hidden_layers
    assert {kind for kind, _ in anywhere} == {type(stand_in).__name__ for stand_in in stand_ins(patched).values()}
    assert anywhere["FusedLayer", True] == 20 * layers
    norms = sum("norm" in name for name in stand_ins(patched)) - 2 * layers
    assert anywhere["FusedNorm", True] == 20 * norms + layers  # stock's attention reads the prompt


@pytest.mark.slow
def test_beams_share_blocks_and_rows_straddle_them(anywhere):
    stock, patched = pair("deepseek_v3")
    batch = prompts([BLOCK - 1, BLOCK + 1])
    got = patched.generate(**batch, max_new_tokens=4, num_beams=2, cache_implementation="paged_mla")
    assert torch.equal(got, stock.generate(**batch, max_new_tokens=4, num_beams=2))
    assert_generates_alike(stock, patched, 1e-4, **prompts(STRADDLING), max_new_tokens=4)
    assert all(done for _, done in anywhere)


def test_only_over_a_paged_cache_without_gradients_and_attention_in_single_columns(anywhere):
    stock, patched = pair()
    ids, mask = prompts([9])["input_ids"], torch.ones(1, 40, dtype=torch.int64)
    cache = hf_mla.PagedMLACache()
    with torch.enable_grad():
        patched(input_ids=ids, **{hf_mla.compat.CACHE_NAME: hf_mla.PagedMLACache()})
    with torch.no_grad():
        patched(input_ids=ids)  # no cache
    assert not anywhere
    feed(patched, ids, cache, mask[:, :9])  # prefill
    feed(patched, ids[:, :3], cache, mask[:, :12])  # a short continuation
    assert anywhere["FusedNorm", True] and anywhere["FusedMLP", True] and anywhere["FusedSoftmaxRouter", True]
    assert anywhere["FusedLayer", True] == 2 * 2
    assert not any("Attention" in name for name, _ in anywhere)
    logits = feed(patched, ids[:, 5:6], cache, mask[:, :13])
    assert anywhere["FusedComplexAttention", True] == 2
    whole = torch.cat([ids, ids[:, :3], ids[:, 5:6]], 1)
    with torch.no_grad():
        assert relative_error(logits, stock(input_ids=whole).logits[:, -1:]) < 1e-5


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_padded_prompts_are_read_as_by_stock(name, anywhere):
    family, changes = MODELS[name]
    stock, patched = pair(family, **changes)
    batch = prompts([1, BLOCK - 1, 3 * BLOCK + 1])
    mask = batch["attention_mask"]
    got = feed(patched, batch["input_ids"], hf_mla.PagedMLACache(), mask)
    with torch.no_grad():
        expected = stock(**batch).logits
    assert relative_error(got[mask.bool()], expected[mask.bool()]) < 1e-4
    assert anywhere["FusedLayer", True] == 2 and all(done for _, done in anywhere)


def test_a_weight_in_float32_is_three_in_bfloat16():
    weight = torch.randn(7, 33)
    parts = fused.in_bfloat16(weight)
    assert [part.dtype for part in parts] == [torch.bfloat16] * 3
    assert relative_error(sum(part.double() for part in parts), weight) < 2**-24


def test_on_a_cpu_nothing_is_fused_and_no_kernel_is_imported(monkeypatch):
    def fail(*args):
        raise AssertionError("a kernel was asked for")

    monkeypatch.setattr(standin, "triton_kernels", fail)
    stock, patched = pair()
    assert_generates_alike(stock, patched.cpu(), **prompts([3, 5]), max_new_tokens=4)


@pytest.mark.parametrize("options", [{"fused": False}, {"backend": "reference"}, {"enabled": False}])
def test_switched_off(options):
    model = hf_mla.patch(build("deepseek_v2"), **options)
    assert not stand_ins(model)


def test_an_option_of_another_type_is_refused():
    with pytest.raises(ValueError, match="fused is 1"):
        hf_mla.patch(build("youtu"), fused=1)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_module_of_the_first_families_is_known(family):
    model = hf_mla.patch(build(family))
    types = Counter(type(stand_in).__name__ for stand_in in stand_ins(model).values())
    assert types["FusedLayer"] == 3
    assert types["FusedComplexAttention"] + types["FusedRealAttention"] == 3
    assert types["FusedNorm"] == 3 * 4 + 1
    mixtures = sum(hasattr(layer.mlp, "experts") for layer in model.model.layers)
    assert types["FusedMLP"] == 3
    assert types["FusedSoftmaxRouter"] + types["FusedSigmoidRouter"] == mixtures == (0 if family == "youtu" else 2)


def test_unpatch_removes_them_and_keeps_what_was_there():
    model = build("deepseek_v2")
    keys = list(model.state_dict())
    norm = model.model.layers[1].input_layernorm
    own = type(norm).forward.__get__(norm)
    norm.__dict__["forward"] = own
    hf_mla.patch(model)
    assert norm.__dict__["forward"] is own and stand_ins(model)
    assert list(model.state_dict()) == keys
    hf_mla.unpatch(model)
    assert [name for name, m in model.named_modules() if "forward" in m.__dict__] == ["model.layers.1.input_layernorm"]


def test_signatures_are_those_of_the_class():
    model = build("deepseek_v3")
    layer = model.model.layers[0]
    before = [str(inspect.signature(m.forward)) for m in (layer, layer.self_attn, layer.mlp)]
    hf_mla.patch(model)
    assert [str(inspect.signature(m.forward)) for m in (layer, layer.self_attn, layer.mlp)] == before


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_have_their_own(duplicate, anywhere):
    stock, patched = pair()
    copied = duplicate(patched)
    for name, stand_in in stand_ins(copied).items():
        assert stand_in.module() is copied.get_submodule(name)
        assert stand_in.key is not stand_ins(patched)[name].key
    with torch.no_grad():
        for parameter in patched.parameters():
            parameter.zero_()
    assert_generates_alike(stock, copied, 1e-4, **prompts([3, 7]), max_new_tokens=3)
    assert anywhere


def test_an_unknown_forward_is_left_alone():
    class Shifted(nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.weight, self.variance_epsilon = norm.weight, norm.variance_epsilon

        def forward(self, hidden_states):
            input_dtype = hidden_states.dtype
            hidden_states = hidden_states.to(torch.float32)
            variance = hidden_states.pow(2).mean(-1, keepdim=True)
            hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
            return (1 + self.weight) * hidden_states.to(input_dtype)

    model = build("deepseek_v2")
    layer = model.model.layers[0]
    layer.input_layernorm = Shifted(layer.input_layernorm)
    layer.self_attn.__class__ = type("Other", (type(layer.self_attn),), {"forward": lambda self, **kwargs: None})
    assert known.kind_of(layer.input_layernorm) is None and known.kind_of(layer.self_attn) is None
    assert known.fingerprint(Shifted.forward) not in known.KNOWN
    assert known.fingerprint(eval("lambda x: x")) is None and known.fingerprint(len) is None
    assert known.kind_of(model.model.norm) == "norm"


def break_known(model):
    """What may happen to a patched model's modules afterwards; where it does, stock code has to run."""
    attention, layer = model.model.layers[0].self_attn, model.model.layers[1]
    seen = []
    attention.kv_a_layernorm.register_forward_hook(lambda *_: seen.append("norm"))
    layer.post_attention_layernorm.register_forward_pre_hook(lambda *_: seen.append("post"))
    layer.mlp.act_fn.register_forward_hook(lambda *_: seen.append("act"))
    layer.mlp.register_forward_hook(lambda *_: seen.append("mlp"))
    return seen


def test_hooks_on_skipped_modules_still_run(anywhere):
    stock, patched = pair("youtu")
    seen = break_known(patched)
    assert_generates_alike(stock, patched, 1e-4, **prompts([3, 5]), max_new_tokens=4)
    assert Counter(seen) == dict.fromkeys(["norm", "post", "act", "mlp"], 4)
    assert anywhere["FusedLayer", False] == anywhere["FusedMLP", False] == 4
    assert anywhere["FusedRealAttention", False] == anywhere["FusedRealAttention", True] == 3


class Adapted(nn.Module):
    """A linear map with a low-rank addition, as an adapter puts in its place."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.a = nn.Linear(base.in_features, 3, bias=False)
        self.b = nn.Linear(3, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


def test_adapted_projections(anywhere):
    model = build("deepseek_v2", num_hidden_layers=2)
    attention, mlp = model.model.layers[1].self_attn, model.model.layers[0].mlp
    for owner, names in ((attention, ["q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]), (mlp, ["up_proj"])):
        for name in names:
            setattr(owner, name, Adapted(getattr(owner, name)))
    stock, patched = twin(model), hf_mla.patch(model)
    assert_generates_alike(stock, patched, 1e-4, **prompts([3, 5]), max_new_tokens=4)
    assert all(done for _, done in anywhere)


def test_offloaded_afterwards(anywhere):
    accelerate = pytest.importorskip("accelerate")
    stock, patched = pair("deepseek_v3")
    accelerate.cpu_offload(patched, execution_device=torch.device("cpu"))
    assert_generates_alike(stock, patched, 1e-4, **prompts([3, 5]), max_new_tokens=4)
    assert anywhere["FusedNorm", True] and not anywhere["FusedRealAttention", True]
    hf_mla.unpatch(patched)
    anywhere.clear()
    again = patched.generate(**prompts([3, 5]), max_new_tokens=4)
    assert torch.equal(again, stock.generate(**prompts([3, 5]), max_new_tokens=4))
    assert not anywhere and not any(isinstance(m.__dict__.get("_old_forward"), StandIn) for m in patched.modules())


def test_another_cache_dtype_is_not_fused(anywhere):
    model = build("deepseek_v3", num_hidden_layers=2)
    hf_mla.patch(model, cache_dtype=torch.float16)
    model.generate(**prompts([3, 5]), max_new_tokens=3, cache_implementation="paged_mla")
    assert anywhere["FusedRealAttention", False] and not anywhere["FusedRealAttention", True]
    assert anywhere["FusedNorm", True]
