"""The experts' kernels against a plain loop in fp64, and which code a step over a paged cache takes.

T tokens, K experts a token, E experts, D hidden values, I an expert's inner values.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from tiny import build
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation
from transformers.models.deepseek_v2.configuration_deepseek_v2 import DeepseekV2Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Experts

import hf_mla
from hf_mla import attention, experts

triton_experts = pytest.importorskip("hf_mla.kernels.triton_experts")
plan = pytest.importorskip("hf_mla.kernels.triton_experts_plan")
Config, Tile = plan.Config, plan.Tile

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.bfloat16, torch.float16] if GPU else [torch.float32, torch.float16]  # the interpreter's bf16 is wrong
SMALL = Tile(32, 16, 4, 2)


@dataclass
class Case:
    hidden: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    index: torch.Tensor
    weights: torch.Tensor

    def run(self, config: Config | None = None) -> torch.Tensor:
        return triton_experts.fused_experts(
            self.hidden, self.gate_up, self.down, self.index, self.weights, config=config
        )


def make(tokens, top_k, num_experts, width=48, inner=40, dtype=torch.float16, device=DEVICE, seed=0) -> Case:
    gen = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=gen, device=device)

    return Case(
        hidden=normal(tokens, width).to(dtype),
        gate_up=normal(num_experts, 2 * inner, width).mul_(2 * width**-0.5).to(dtype),
        down=normal(num_experts, width, inner).mul_(inner**-0.5).to(dtype),
        index=torch.rand(tokens, num_experts, generator=gen, device=device).topk(top_k).indices,
        weights=normal(tokens, top_k).softmax(-1),
    )


def loop(x: Case) -> torch.Tensor:
    """The experts one by one in fp64; those that no token chose are not read."""
    out = torch.zeros_like(x.hidden, dtype=torch.float64)
    for expert in x.index.unique().tolist():
        if not 0 <= expert < len(x.down):
            continue
        token, k = torch.where(x.index == expert)
        gate, up = (x.hidden[token].double() @ x.gate_up[expert].double().T).chunk(2, -1)
        part = nn.functional.silu(gate) * up @ x.down[expert].double().T
        out.index_add_(0, token, part * x.weights[token, k, None].double())
    return out


def error_of(out: torch.Tensor, expected: torch.Tensor) -> float:
    assert out.isfinite().all()
    return ((out - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def check(x: Case, config: Config | None = None) -> None:
    """Within a few roundings of the type: five values are rounded on the way."""
    out = x.run(config)
    assert out.dtype == x.hidden.dtype and out.shape == x.hidden.shape and out.is_contiguous()
    assert error_of(out, loop(x)) < 3 * torch.finfo(x.hidden.dtype).eps


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "top_k", "num_experts"),
    [(1, 1, 1), (5, 3, 8), (17, 1, 5)]
    + [
        pytest.param(*sizes, marks=pytest.mark.slow)
        for sizes in [(1, 6, 64), (2, 8, 64), (17, 8, 24), (64, 2, 3), (64, 4, 64)]
    ],
)
def test_counts(tokens, top_k, num_experts, dtype):
    check(make(tokens, top_k, num_experts, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "inner"), [(1, 1), (33, 65), (128, 7), (130, 96)])
@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.slow
def test_sizes(tokens, width, inner, dtype):
    check(make(tokens, 2, 12, width, inner, dtype))


@pytest.mark.parametrize(
    "config",
    [
        Config(16, True, SMALL, SMALL),
        Config(32, True, replace(SMALL, rows=64, stages=3), replace(SMALL, depth=32, splits=2)),
        Config(64, True, replace(SMALL, depth=64), replace(SMALL, rows=64, splits=5)),
        Config(16, False, SMALL, replace(SMALL, splits=3)),
    ],
)
@pytest.mark.slow
def test_configs(config):
    check(make(37 if config.align else 3, 3, 4, width=72, inner=56), config)


@pytest.mark.slow
def test_every_default_config():
    for most in plan.CONFIGS:
        check(make(max(1, int(min(most, 30) * 4 / 2)), 2, 4, width=40, inner=24))


@pytest.mark.parametrize(("tokens", "align"), [(1, True), (16, True), (17, True), (40, True), (1, False), (5, False)])
def test_all_tokens_on_one_expert(tokens, align):
    x = make(tokens, 1, 9)
    x.index.fill_(7)
    check(x, Config(16, align, SMALL, SMALL))


@pytest.mark.parametrize("tokens", [1, 5])
def test_a_token_may_choose_an_expert_twice(tokens):
    x = make(tokens, 3, 8)
    x.index[:, 1] = x.index[:, 0]
    check(x)


@pytest.mark.parametrize("tokens", [1, 8])
def test_what_experts_without_tokens_hold_is_never_read(tokens):
    x = make(tokens, 2, 24)
    x.index.remainder_(11)
    idle = torch.ones(24, dtype=torch.bool, device=DEVICE)
    idle[x.index.flatten()] = False
    x.gate_up[idle], x.down[idle] = float("nan"), float("nan")
    check(x)


@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.parametrize("wild", [-1, 24, 2**31 - 1])
@pytest.mark.slow
def test_experts_that_live_elsewhere_contribute_nothing(tokens, wild):
    """Expert parallelism marks pairs of other ranks' experts by the number of experts, with weight zero or not."""
    x = make(tokens, 4, 24)
    x.index[:, 2] = wild
    check(x)
    x.index.fill_(wild)
    assert not x.run().any()


def test_a_token_of_nan_stays_alone():
    x = make(9, 2, 4)
    expected = x.run()
    x.hidden[3] = float("nan")
    out = x.run()
    assert out[3].isnan().all()
    rest = torch.arange(9, device=DEVICE) != 3
    assert torch.equal(out[rest], expected[rest])


@pytest.mark.parametrize("tokens", [1, 6])
def test_strides_and_types_of_the_routing_do_not_change_a_bit(tokens):
    x = make(tokens, 2, 8, width=64)
    expected = x.run()
    wide = torch.full((tokens, 3, 100), float("nan"), dtype=x.hidden.dtype, device=DEVICE)
    wide[:, 1, 16:80] = x.hidden
    columns = x.hidden.T.contiguous().T
    index = x.index.int().repeat_interleave(2, dim=1)[:, ::2]
    for hidden in (wide[:, 1, 16:80], columns):
        assert torch.equal(replace(x, hidden=hidden, index=index).run(), expected)


def test_weights_in_the_output_type_are_rounded_products_as_stock():
    x = make(4, 2, 8)
    x.weights = x.weights.to(x.hidden.dtype)
    check(x)


def test_no_tokens_chosen_and_bad_arguments():
    x = make(4, 2, 8)
    empty = replace(x, index=x.index[:, :0], weights=x.weights[:, :0])
    assert not empty.run().any()
    wrong = {
        "hidden": x.hidden[None],
        "gate_up": x.gate_up[:, 1:],
        "down": x.down.transpose(1, 2),
        "index": x.index.float(),
        "weights": x.weights[1:],
    }
    named = {"gate_up": "gate_up_proj", "down": "down_proj", "index": "top_k_index", "weights": "top_k_weights"}
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=named.get(name, name)):
            replace(x, **{name: value}).run()
    with pytest.raises(ValueError, match="contiguous"):
        replace(x, down=x.down.transpose(1, 2).contiguous().transpose(1, 2)).run()
    with pytest.raises(ValueError, match="agree"):
        replace(x, down=x.down.double()).run()
    with pytest.raises(ValueError, match="T from 1 to"):
        make(plan.MAX_TOKENS + 1, 1, 8, width=16, inner=16).run()


def test_configs_fit_a_smaller_gpu(monkeypatch):
    monkeypatch.setattr(plan, "_shared_bytes", lambda device: 99 << 10)
    for most in plan.CONFIGS:
        pairs = int(min(most, 500) * 64)
        config = plan.pick_config.__wrapped__(pairs, 64, torch.device("cpu"))
        for tile in (config.up, config.down):
            assert tile.stages >= 2
            assert (tile.rows + config.block_m) * tile.depth * 2 * tile.stages <= 99 << 10


# Which code is chosen


def module_of(dtype=torch.bfloat16, cls=DeepseekV2Experts, **options) -> nn.Module:
    config = DeepseekV2Config(
        hidden_size=48, moe_intermediate_size=16, n_routed_experts=8, num_attention_heads=4, **options
    )
    config._experts_implementation = "grouped_mm"
    module = cls(config).to(dtype).requires_grad_(False)
    for weight in module.parameters():
        nn.init.normal_(weight, std=0.2)
    return module


def reason(module: nn.Module, tokens=3, dtype=None, requires_grad=False) -> str | None:
    hidden = torch.zeros(tokens, 48, dtype=dtype or module.down_proj.dtype, requires_grad=requires_grad)
    return experts.unfit(module, hidden, torch.zeros(tokens, 2))


@pytest.mark.parametrize("act", ["silu", "swish"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_fits_plain_experts(dtype, act):
    module = module_of(dtype, hidden_act=act)
    assert reason(module) is None
    del module.act_fn
    module.act_fn = nn.functional.silu
    assert reason(module) is None
    for name in experts.PLAIN:  # some versions of transformers lack some of the names
        module.__dict__.pop(name, None)
    assert reason(module) is None


@pytest.mark.parametrize("name", list(experts.PLAIN))
def test_the_kernel_does_not_fit_other_layouts(name):
    module = module_of()
    setattr(module, name, not experts.PLAIN[name])
    assert name in reason(module)


def test_the_kernel_does_not_fit_other_functions_types_and_sizes():
    class OwnGate(DeepseekV2Experts):
        def _apply_gate(self, gate_up_out):
            return gate_up_out[..., ::2] * gate_up_out[..., 1::2]

    assert "gates" in reason(module_of(cls=OwnGate))
    assert "GELU" in reason(module_of(hidden_act="gelu"))
    assert "float32" in reason(module_of(torch.float32))
    assert "float32" in reason(module_of(), dtype=torch.float32)
    assert "weights are torch.float16" in reason(module_of(torch.float16), dtype=torch.bfloat16)
    assert reason(module_of(), tokens=513) is None
    assert "513 tokens" in reason(module_of(torch.float16), tokens=513)
    assert "0 tokens" in reason(module_of(), tokens=0)
    module = module_of()
    module.down_proj.data = module.down_proj.data.transpose(1, 2).contiguous().transpose(1, 2)
    assert "contiguous" in reason(module)
    module = module_of()
    module._apply_gate = lambda gate_up_out: gate_up_out
    assert "gates" in reason(module)


def test_the_kernel_does_not_fit_where_gradients_are_wanted():
    assert "gradients" in reason(module_of(), requires_grad=True)
    trained = module_of().requires_grad_(True)
    assert "gradients" in reason(trained)
    with torch.no_grad():
        assert reason(trained) is None


def test_without_triton(monkeypatch):
    monkeypatch.setattr(experts, "_kernels", lambda: "triton is not usable: no such module")
    assert "triton" in reason(module_of())


@pytest.mark.parametrize(
    ("dtype", "pairs", "name"),
    [
        (torch.bfloat16, 4, "grouped_mm"),
        (torch.bfloat16, 4000, "grouped_mm"),
        (torch.float16, 4, "batched_mm"),
        (torch.float32, 8 * experts.MAX_COPIES, "batched_mm"),
        (torch.float32, 8 * experts.MAX_COPIES + 1, "grouped_mm"),
    ],
)
def test_what_else_a_gpu_takes(dtype, pairs, name):
    assert experts._stock_name(module_of(dtype), SimpleNamespace(is_cuda=True), pairs) == name


@pytest.mark.parametrize("configured", ["grouped_mm", "batched_mm", experts.EXPERTS_NAME])
def test_a_cpu_takes_what_the_config_says(configured, monkeypatch):
    calls = []
    for name in ("grouped_mm", "batched_mm"):
        monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, name, lambda *_, name=name: calls.append(name))
    module = module_of(torch.float32)
    module.config._experts_implementation = configured
    expected = configured if configured != experts.EXPERTS_NAME else "grouped_mm"
    x = make(3, 2, 8, device="cpu")
    for _ in range(2):
        experts.paged_experts(module, x.hidden, x.index, x.weights)
        module.config = attention.ExpertsConfig(attention.PatchKey(), module.config, True)
    assert calls == [expected] * 2


def test_names_in_a_step(monkeypatch):
    step = None
    monkeypatch.setattr(attention, "paged_step", lambda key: step)
    view = attention.ExpertsConfig(attention.PatchKey(), SimpleNamespace(_experts_implementation="batched_mm"), True)
    own_registry = copy.copy(view)
    own_registry.__dict__["registered"] = False
    assert view._experts_implementation == own_registry._experts_implementation == "batched_mm"
    step = SimpleNamespace(plan=SimpleNamespace(reads_pages=True))
    for name in ("batched_mm", "grouped_mm"):
        view._experts_implementation = name
        for ours in (True, False):
            step.plan.reads_pages = ours
            assert view._experts_implementation == experts.EXPERTS_NAME
            assert own_registry._experts_implementation == ("grouped_mm" if ours else name)
    for name in ("eager", "sonicmoe", None):
        view._experts_implementation = name
        assert view._experts_implementation == own_registry._experts_implementation == name


def test_which_modules_find_our_function():
    class Interface(type(ALL_EXPERTS_FUNCTIONS)):
        _global_mapping = {}

    @use_experts_implementation(experts_interface=Interface())
    class Quantized(nn.Module):
        def forward(self, hidden_states, top_k_index, top_k_weights):
            return hidden_states

    assert experts.is_registered(module_of())
    assert not experts.is_registered(Quantized.__new__(Quantized))
    assert not experts.is_registered(nn.Linear(1, 1))


def test_a_patched_model_asks_for_our_function_over_a_paged_cache(monkeypatch):
    calls = []

    def spy(module, *args):
        calls.append(args[0].shape[0])
        return experts.paged_experts(module, *args)

    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, experts.EXPERTS_NAME, spy)
    model = build("deepseek_v2")
    model.set_experts_implementation("grouped_mm")
    hf_mla.patch(model)
    ids = torch.randint(3, 97, (2, 5))
    model.generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False, cache_implementation="paged_mla")
    layers = calls.count(10)
    assert layers and calls == [10] * layers + [2] * (2 * layers)
    calls.clear()
    model.generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert not calls


# A GPU's own


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 8, 32, 64, 200, 512])
def test_lite_sizes_are_as_accurate_as_stock(tokens):
    x = make(tokens, 6, 64, 2048, 1408, torch.bfloat16)
    expected = loop(x)
    config = DeepseekV2Config(hidden_size=2048, moe_intermediate_size=1408, n_routed_experts=64)
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        module = DeepseekV2Experts(config)
    module.gate_up_proj, module.down_proj = nn.Parameter(x.gate_up, False), nn.Parameter(x.down, False)
    stock = error_of(module(x.hidden, x.index, x.weights), expected)
    assert experts.unfit(module, x.hidden, x.weights) is None
    ours = error_of(experts.paged_experts(module, x.hidden, x.index, x.weights), expected)
    assert ours <= 1.5 * stock, (ours, stock)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 200])
def test_a_thousand_runs_give_the_same_bits(tokens):
    x = make(tokens, 6, 64, 512, 384, torch.bfloat16)
    expected = x.run()
    wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(1000):
        wrong += (x.run() != expected).sum()
    assert not wrong.item()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 64, 200])
def test_a_captured_graph_serves_other_routing(tokens):
    x = make(tokens, 6, 64, 512, 384, torch.bfloat16)
    x.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = x.run()
    for seed in range(1, 5):
        other = make(tokens, 6, 64, 512, 384, torch.bfloat16, seed=seed)
        if seed == 4:
            other.index.fill_(63)
        for name in ("hidden", "index", "weights"):
            getattr(x, name).copy_(getattr(other, name))
        graph.replay()
        assert torch.equal(out, x.run())
        assert error_of(out, loop(x)) < 2 * torch.finfo(torch.bfloat16).eps


@pytest.mark.gpu
def test_offsets_beyond_32_bits():
    x = make(3, 2, 4, 64, 32, torch.bfloat16)
    rows = 2**31 // (64 * 64) + 8  # experts of [64, 64], so that the last ones start beyond 2**31 values
    gate_up = torch.empty(rows, 64, 64, dtype=torch.bfloat16, device=DEVICE)
    down = torch.empty(rows, 64, 32, dtype=torch.bfloat16, device=DEVICE)
    gate_up[-4:], down[-4:] = x.gate_up, x.down
    far = replace(x, gate_up=gate_up, down=down, index=x.index + rows - 4)
    config = Config(16, False, SMALL, SMALL)
    assert torch.equal(far.run(config), x.run(config))
