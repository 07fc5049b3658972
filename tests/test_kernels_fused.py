"""The fused kernels against float64 and against transformers' own modules, at sizes that fill no tile."""

import pytest
import torch
from transformers.models.deepseek_v2.configuration_deepseek_v2 import DeepseekV2Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import (
    DeepseekV2RMSNorm,
    DeepseekV2TopkRouter,
    apply_rotary_emb,
)
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3TopkRouter,
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_interleave,
)

from hf_mla.kernels import reference_fused

triton_fused = pytest.importorskip("hf_mla.kernels.triton_fused")
triton_route = pytest.importorskip("hf_mla.kernels.triton_route")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter cuts bf16 off where GPUs round, so bf16 is tested on those alone.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
BUDGET = 1.1  # of the error that transformers' own code has against float64
TINY = {torch.float32: 4e-7, torch.float16: 1e-6, torch.bfloat16: 1e-6}  # relative; where stock has no error at all


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def random(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def error(got, exact):
    return ((got.double() - exact).norm() / exact.norm()).item()


def assert_as_good(got, stock, exact):
    assert got.dtype == stock.dtype and got.shape == stock.shape
    assert error(got, exact) <= BUDGET * error(stock, exact) + TINY[stock.dtype]


def norm_module(size, dtype, eps=1e-5):
    module = DeepseekV2RMSNorm(size, eps).to(DEVICE)
    module.weight.data.normal_()
    return module.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size", "stride"), [(1, 2048, 2048), (3, 37, 80), (5, 1, 1), (2, 1536, 1540)])
@torch.no_grad()
def test_rms_norm(dtype, rows, size, stride):
    module, x = norm_module(size, dtype), random(rows, 1, stride, dtype=dtype)[..., :size] * 3
    got = triton_fused.rms_norm(x, module.weight, module.variance_epsilon)
    exact = reference_fused.rms_norm(x.double(), module.weight.double(), module.variance_epsilon)
    assert_as_good(got, module(x), exact)
    if dtype != torch.float32:
        assert (got != module(x)).float().mean() < 0.02  # stock's roundings, but for the sum's and the root's last bit


@torch.no_grad()
def test_rms_norm_of_nothing_and_of_zeros():
    module = norm_module(8, torch.float32)
    assert triton_fused.rms_norm(random(0, 8), module.weight, 1e-5).shape == (0, 8)
    assert (triton_fused.rms_norm(random(2, 8) * 0, module.weight, 1e-5) == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 2048), (7, 33)])
@torch.no_grad()
def test_add_rms_norm(dtype, rows, size):
    module = norm_module(size, dtype)
    x, y = random(rows, 1, size, dtype=dtype), random(rows, 1, size + 5, dtype=dtype)[..., :size]
    total, normed = triton_fused.add_rms_norm(x, y, module.weight, module.variance_epsilon)
    assert torch.equal(total, x + y)
    exact = reference_fused.rms_norm(total.double(), module.weight.double(), module.variance_epsilon)
    assert_as_good(normed, module(x + y), exact)


@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_add(dtype):
    terms = [random(3, 1, 333, dtype=dtype) for _ in range(3)]
    assert torch.equal(triton_fused.add(*terms), terms[0] + (terms[1] + terms[2]))


def angles(rope, rows, pairs, dtype):
    """(what transformers' function takes, cosines, sines)"""
    angle = random(rows, 1, pairs) * 5
    if rope == "complex":
        factors = torch.polar(torch.full_like(angle, 0.9), angle)
        return factors, factors.real[:, 0], factors.imag[:, 0]
    both = torch.cat([angle, angle], -1)
    pair = (both.cos() * 0.9).to(dtype), (both.sin() * 0.9).to(dtype)
    return pair, pair[0][:, 0], pair[1][:, 0]


def stock_rope(rope, q, k, given):
    """[T, H, P] and [T, P], through transformers' functions of [B, H, S, P]."""
    q, k = q.unsqueeze(2).contiguous(), k[:, None, None].contiguous()
    function = apply_rotary_pos_emb_interleave if rope == "interleave" else apply_rotary_pos_emb
    rotated = apply_rotary_emb(q, k, given) if rope == "complex" else function(q, k, *given)
    return rotated[0][:, :, 0], rotated[1][:, 0, 0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rope", list(triton_fused.ROPES))
@pytest.mark.parametrize(("heads", "nope", "rank", "rope_dim"), [(16, 128, 512, 64), (1, 7, 40, 2), (19, 20, 129, 24)])
@torch.no_grad()
def test_rope_norm_write(dtype, rope, heads, nope, rank, rope_dim):
    tokens, block = 5, 16
    q = random(tokens, heads, nope + rope_dim, dtype=dtype)
    kv = random(tokens, rank + rope_dim + 3, dtype=dtype)[:, : rank + rope_dim]
    norm = norm_module(rank, dtype)
    given, cos, sin = angles(rope, tokens, rope_dim // 2, dtype)
    storage = torch.full((4, 2 * block, rank + rope_dim + 8), float("nan"), dtype=dtype, device=DEVICE)
    pages = storage[:, :block]
    slots = torch.tensor([17, -1, 40, 5, 63], device=DEVICE)
    q_before = q.clone()
    q_pe = triton_fused.rope_norm_write(q, kv, norm.weight, norm.variance_epsilon, cos, sin, rope, pages, slots)
    assert torch.equal(q, q_before)
    ckv, k_pe = kv[:, :rank], kv[:, rank:]
    stock_q, stock_k = stock_rope(rope, q[..., nope:], k_pe, given)
    wide = cos.double(), sin.double()
    assert_as_good(q_pe, stock_q, reference_fused.rotate(q[..., nope:].double(), *wide, rope))
    stored = slots >= 0
    got = pages[slots[stored] // block, slots[stored] % block]
    assert_as_good(
        got[:, rank : rank + rope_dim], stock_k[stored], reference_fused.rotate(k_pe.double(), *wide, rope)[stored]
    )
    exact = reference_fused.rms_norm(ckv.double(), norm.weight.double(), norm.variance_epsilon)
    assert_as_good(got[:, :rank], norm(ckv)[stored], exact[stored])
    written = torch.zeros(storage.shape, dtype=torch.bool, device=DEVICE)
    written[slots[stored] // block, slots[stored] % block, : rank + rope_dim] = True
    assert storage[~written].isnan().all() and not storage[written].isnan().any()


@torch.no_grad()
def test_one_position_for_all_rows_and_the_pages_address_from_memory():
    tokens, heads, rank, rope_dim = 3, 4, 32, 8
    q, kv = random(tokens, heads, 16 + rope_dim), random(tokens, rank + rope_dim)
    norm = norm_module(rank, torch.float32)
    _, cos, sin = angles("complex", 1, rope_dim // 2, torch.float32)
    slots = torch.tensor([3, 30, 1], device=DEVICE)
    pages, expected = (torch.zeros(2, 16, rank + rope_dim, device=DEVICE) for _ in range(2))
    arguments = q, kv, norm.weight, 1e-5, cos, sin, "complex"
    base = torch.tensor([pages.data_ptr()], device=DEVICE)
    got = triton_fused.rope_norm_write(*arguments, torch.empty_like(pages), slots, base)
    assert torch.allclose(got, reference_fused.rope_norm_write(*arguments, expected, slots), atol=1e-5)
    assert torch.allclose(pages, expected, atol=1e-5) and expected.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 10944), (3, 1, 77), (0, 1, 8)])
def test_silu_mul(dtype, shape):
    gate, up = random(*shape, dtype=dtype) * 4, random(*shape, dtype=dtype)
    got, stock = triton_fused.silu_mul(gate, up), torch.nn.functional.silu(gate) * up
    if got.numel():
        assert_as_good(got, stock, torch.nn.functional.silu(gate.double()) * up.double())


def same_choice(got, expected):
    """The same experts with the same weights, in any order."""
    order, wanted = got[1].argsort(), expected[1].argsort()
    assert torch.equal(got[1].gather(1, order), expected[1].gather(1, wanted))
    torch.testing.assert_close(got[0].gather(1, order), expected[0].gather(1, wanted), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("experts", "groups", "kept", "top"), [(64, 1, 1, 6), (60, 1, 1, 3), (160, 8, 3, 6), (24, 3, 2, 5), (8, 4, 4, 1)]
)
@torch.no_grad()
def test_route_is_deepseek_v2s(experts, groups, kept, top):
    config = DeepseekV2Config(
        n_routed_experts=experts, n_group=groups, topk_group=kept, num_experts_per_tok=top, hidden_size=32,
        routed_scaling_factor=2.5, topk_method="greedy" if groups == 1 else "group_limited_greedy",
    )  # fmt: skip
    router = DeepseekV2TopkRouter(config).to(DEVICE)
    router.weight.data.normal_()
    logits, weights, chosen = router(random(9, 32))
    got = triton_route.route(logits, None, top, 2.5, groups, kept)
    assert got[1].dtype == chosen.dtype and got[0].dtype == weights.dtype
    same_choice(got, (weights, chosen))


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize(("experts", "groups", "kept", "top"), [(256, 8, 4, 8), (384, 1, 1, 8), (12, 3, 1, 2)])
@torch.no_grad()
def test_route_is_deepseek_v3s(experts, groups, kept, top, renormalise):
    config = DeepseekV3Config(
        n_routed_experts=experts, n_group=groups, topk_group=kept, num_experts_per_tok=top, hidden_size=32,
        routed_scaling_factor=2.5, norm_topk_prob=renormalise,
    )  # fmt: skip
    router = DeepseekV3TopkRouter(config).to(DEVICE)
    router.weight.data.normal_()
    router.e_score_correction_bias.normal_(0, 0.1)
    logits, weights, chosen = router(random(9, 32))
    got = triton_route.route(logits.sigmoid(), router.e_score_correction_bias, top, 2.5, groups, kept, renormalise)
    same_choice(got, (weights, chosen))


def test_route_of_ties_infinities_and_nan_chooses_distinct_experts():
    logits = torch.zeros(5, 12, device=DEVICE)
    logits[1, 3:] = -torch.inf
    logits[2, ::2] = torch.nan
    logits[3] = torch.nan
    logits[4, 5:9] = 1.0
    weights, chosen = triton_route.route(logits, None, 4, 1.0)
    for row in chosen.tolist():
        assert len(set(row)) == 4 and all(0 <= expert < 12 for expert in row)
    assert set(chosen[1, :3].tolist()) == {0, 1, 2}
    assert set(chosen[4].tolist()) == {5, 6, 7, 8}
    assert torch.allclose(weights[0], torch.full_like(weights[0], 1 / 12))
