"""Experts for many tokens against a plain loop in fp64 and against transformers' grouped products."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_experts import DEVICE, DTYPES, Case, error_of, loop, make
from torch import nn
from transformers.integrations import moe
from transformers.models.deepseek_v2.configuration_deepseek_v2 import DeepseekV2Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Experts

from hf_mla import experts

triton_grouped = pytest.importorskip("hf_mla.kernels.triton_grouped")
GPU = torch.cuda.is_available()
# torch multiplies groups of bf16 alone on a GPU.
GROUPED_DTYPES = [torch.bfloat16] if GPU else DTYPES


def product(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """A grouped product whose rows after the last end hold NaN, and which reads no expert without rows."""
    out = torch.full((len(rows), weights.shape[1]), float("nan"), dtype=rows.dtype, device=rows.device)
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            out[start:end] = nn.functional.linear(rows[start:end], weights[expert])
        start = end
    return out


def run(x: Case, by=product, **options) -> torch.Tensor:
    return triton_grouped.grouped_experts(x.hidden, x.gate_up, x.down, x.index, x.weights, by, **options)


def check(x: Case, by=product, **options) -> None:
    out = run(x, by, **options)
    assert out.dtype == x.hidden.dtype and out.shape == x.hidden.shape and out.is_contiguous()
    assert error_of(out, loop(x)) < 3 * torch.finfo(x.hidden.dtype).eps


@pytest.mark.parametrize("dtype", GROUPED_DTYPES)
@pytest.mark.parametrize(
    ("tokens", "top_k", "num_experts"),
    [(1, 1, 1), (7, 3, 8), (3, 5, 5)]
    + [pytest.param(*sizes, marks=pytest.mark.slow) for sizes in [(1, 6, 64), (65, 6, 24)]],
)
@pytest.mark.parametrize("by", [product, moe._grouped_linear])
def test_counts(by, tokens, top_k, num_experts, dtype):
    check(make(tokens, top_k, num_experts, dtype=dtype), by)


@pytest.mark.parametrize(("width", "inner"), [(1, 1), (33, 65), (1100, 520)])
def test_sizes_that_fill_no_block(width, inner):
    check(make(5, 2, 6, width, inner))


@pytest.mark.parametrize("max_pairs", [1, 3, 4, 12, 20, 33, 38, 39, 1000])
def test_chunks(max_pairs):
    x = make(13, 3, 8, dtype=GROUPED_DTYPES[0])
    chunks = []

    def counting(rows, weights, ends):
        chunks.append(len(rows))
        return product(rows, weights, ends)

    check(x, counting, max_pairs=max_pairs)
    assert sum(chunks) == 2 * 13 * 3 and max(chunks) <= max(3, max_pairs)


def test_a_token_on_one_expert_only_and_twice_on_one():
    x = make(9, 3, 7)
    x.index[:, 1] = x.index[:, 0]
    check(x)
    x.index.fill_(4)
    check(x)


def test_what_experts_without_tokens_hold_is_never_read():
    x = make(8, 2, 24)
    x.index.remainder_(11)
    x.gate_up[11:], x.down[11:] = float("nan"), float("nan")
    check(x)


@pytest.mark.parametrize("wild", [-1, -(2**40), 24, 2**31 - 1, 2**40])
def test_experts_that_live_elsewhere_contribute_nothing(wild):
    x = make(8, 4, 24)
    x.index[:, 2] = wild
    check(x, max_pairs=12)
    x.index.fill_(wild)
    assert not run(x).any()


def test_strides_and_types_of_the_routing_do_not_change_a_bit():
    x = make(6, 2, 8, width=64)
    expected = run(x, max_pairs=5)
    wide = torch.full((6, 3, 100), float("nan"), dtype=x.hidden.dtype, device=DEVICE)
    wide[:, 1, 16:80] = x.hidden
    index = x.index.int().repeat_interleave(2, dim=1)[:, ::2]
    for hidden in (wide[:, 1, 16:80], x.hidden.T.contiguous().T):
        assert torch.equal(run(replace(x, hidden=hidden, index=index), max_pairs=5), expected)


def test_weights_in_the_output_type_and_nothing_chosen():
    x = make(4, 2, 8)
    x.weights = x.weights.to(x.hidden.dtype)
    check(x)
    assert not run(replace(x, index=x.index[:, :0], weights=x.weights[:, :0])).any()
    assert run(replace(x, hidden=x.hidden[:0], index=x.index[:0], weights=x.weights[:0])).shape == (0, 48)


def lite_module(x: Case) -> nn.Module:
    sizes = {
        "hidden_size": x.hidden.shape[1],
        "moe_intermediate_size": x.down.shape[2],
        "n_routed_experts": len(x.down),
    }
    config = DeepseekV2Config(num_attention_heads=4, **sizes)
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        module = DeepseekV2Experts(config)
    module.gate_up_proj, module.down_proj = nn.Parameter(x.gate_up, False), nn.Parameter(x.down, False)
    return module


@pytest.mark.skipif(GPU, reason="of fp32")
def test_transformers_grouped_products_say_the_same():
    x = make(37, 3, 8, dtype=torch.float32)
    torch.testing.assert_close(run(x, moe._grouped_linear), lite_module(x)(x.hidden, x.index, x.weights))


@pytest.mark.gpu
def test_lite_sizes_are_as_accurate_as_stock(monkeypatch):
    x = make(2000, 6, 64, 2048, 1408, torch.bfloat16)
    expected, module = loop(x), lite_module(x)
    stock = error_of(module(x.hidden, x.index, x.weights), expected)
    assert experts.unfit(module, x.hidden, x.weights) is None
    monkeypatch.setattr(triton_grouped, "MAX_PAIRS", 5000)
    for ours in (experts.paged_experts(module, x.hidden, x.index, x.weights), run(x, moe._grouped_linear)):
        assert error_of(ours, expected) <= 1.5 * stock


@pytest.mark.gpu
def test_runs_give_the_same_bits_and_never_wait():
    x = make(3000, 6, 64, 512, 384, torch.bfloat16)
    expected = run(x, moe._grouped_linear)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        outs = [run(x, moe._grouped_linear) for _ in range(20)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(out, expected) for out in outs)


@pytest.mark.gpu
def test_a_captured_graph_serves_other_routing():
    x = make(700, 6, 64, 512, 384, torch.bfloat16)
    run(x, moe._grouped_linear)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(x, moe._grouped_linear)
    for seed in (1, 2):
        other = make(700, 6, 64, 512, 384, torch.bfloat16, seed=seed)
        if seed == 2:
            other.index.fill_(63)
        for name in ("hidden", "index", "weights"):
            getattr(x, name).copy_(getattr(other, name))
        graph.replay()
        assert error_of(out, loop(x)) < 2 * torch.finfo(torch.bfloat16).eps


@pytest.mark.gpu
def test_offsets_beyond_32_bits():
    x = make(270_000, 4, 8, 2048, 16, torch.bfloat16)  # 2.2e9 values of rows
    got = run(x, moe._grouped_linear, max_pairs=4 * 270_000)
    assert error_of(got[-1000:], run(x, moe._grouped_linear)[-1000:].double()) < 2**-7
