"""A prompt's kernels against what transformers' modules do with its queries and keys."""

import pytest
import torch
from transformers.models.deepseek_v2.modeling_deepseek_v2 import apply_rotary_emb
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb, apply_rotary_pos_emb_interleave

triton_prompt = pytest.importorskip("hf_mla.kernels.triton_prompt")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter cuts bf16 off where GPUs round, so bf16 is tested on those alone.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def random(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def angles(rope, rows, columns, pairs, dtype):
    """(what transformers' function takes, cosines, sines)"""
    angle = random(rows, columns, pairs) * 5
    if rope == "complex":
        factors = torch.polar(torch.full_like(angle, 1.1), angle)
        return (factors,), factors.real, factors.imag
    twice = torch.cat([angle, angle + (rope == "half")], -1)  # each value has its own angle where all are read
    cos, sin = twice.cos().to(dtype), twice.sin().to(dtype)
    return (cos, sin), cos, sin


FUNCTIONS = {
    "complex": apply_rotary_emb,
    "interleave": apply_rotary_pos_emb_interleave,
    "half": apply_rotary_pos_emb,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rope", FUNCTIONS)
@pytest.mark.parametrize(
    ("rows", "columns", "heads", "nope", "rope_dim"), [(1, 1, 1, 8, 4), (2, 5, 17, 20, 16), (3, 4, 5, 34, 12)]
)
def test_rotate(rope, rows, columns, heads, nope, rope_dim, dtype):
    q = random(rows, columns, heads, nope + rope_dim, dtype=dtype)
    compressed = random(rows, columns, 10 + rope_dim, dtype=dtype)
    k_pe = compressed[..., 10:]
    for shared in {1, rows}:
        given, cos, sin = angles(rope, shared, columns, rope_dim // 2, dtype)
        before = q.clone(), compressed.clone()
        q_out, k_out = triton_prompt.rotate(q, k_pe, cos, sin, rope)
        assert torch.equal(q, before[0]) and torch.equal(compressed, before[1])
        wide = [x.float() for x in (cos, sin)] if rope != "complex" else given
        q_exact, k_exact = FUNCTIONS[rope](q[..., nope:].transpose(1, 2).float(), k_pe.unsqueeze(1).float(), *wide)
        assert torch.equal(q_out[..., :nope], q[..., :nope])
        tolerance = {"atol": 8 * torch.finfo(dtype).eps, "rtol": torch.finfo(dtype).eps}
        torch.testing.assert_close(q_out[..., nope:].transpose(1, 2), q_exact.to(dtype), **tolerance)
        torch.testing.assert_close(k_out.unsqueeze(1), k_exact.to(dtype), **tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "heads", "nope", "value", "rope"), [(1, 1, 4, 8, 2), (7, 17, 20, 28, 16)])
def test_join_keys(tokens, heads, nope, value, rope, dtype):
    kv = random(tokens, heads * (nope + value) + 3, dtype=dtype)[:, :-3]
    k_rot = random(tokens, rope + 5, dtype=dtype)[:, 5:]
    got = triton_prompt.join_keys(kv, k_rot, heads, nope)
    keys = kv.unflatten(-1, (heads, -1))[..., :nope]
    assert torch.equal(got, torch.cat([keys, k_rot[:, None].expand(-1, heads, -1)], -1))


def test_nothing():
    q, k = triton_prompt.rotate(random(0, 3, 2, 6), random(0, 3, 4), random(1, 3, 2), random(1, 3, 2), "complex")
    assert q.shape == (0, 3, 2, 6) and k.shape == (0, 3, 4)
    assert triton_prompt.join_keys(random(0, 20), random(0, 4), 2, 6).shape == (0, 2, 10)


@pytest.mark.gpu
def test_offsets_beyond_32_bits():
    tokens, heads, nope, rope = 720_000, 16, 128, 64  # 2.2e9 values of queries
    q, k_pe = (
        random(1, tokens, heads, nope + rope, dtype=torch.bfloat16),
        random(1, tokens, rope, dtype=torch.bfloat16),
    )
    given, cos, sin = angles("complex", 1, tokens, rope // 2, torch.float32)
    q_out, k_out = triton_prompt.rotate(q, k_pe, cos, sin, "complex")
    last = slice(-9, None)
    q_end, k_end = triton_prompt.rotate(q[:, last], k_pe[:, last], cos[:, last], sin[:, last], "complex")
    assert torch.equal(q_out[:, last], q_end) and torch.equal(k_out[:, last], k_end)
    kv = q.flatten(2)[0]
    keys = triton_prompt.join_keys(kv, k_out[0], heads, nope)
    assert torch.equal(keys[last], triton_prompt.join_keys(kv[last], k_out[0, last], heads, nope))
