"""Fused decode steps on a GPU, in bf16, at the sizes of real heads: errors, experts chosen, and kernels launched."""

from collections import Counter

import pytest
import torch
from pairs import feed
from tiny import GREEDY, YARN, build, prompts, relative_error, scores_of, twin
from transformers import LogitsProcessor, LogitsProcessorList

import hf_mla
from hf_mla import fused
from hf_mla.decoder import DecoderForward

pytestmark = pytest.mark.gpu
cuda = torch.device("cuda")

REAL = {
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "q_lora_rank": 384,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 1536,
    "vocab_size": 997,
    "num_hidden_layers": 4,
}
# A near tie between experts is decided by rounding and then moves everything, so errors are compared without any.
DENSE = {"first_k_dense_replace": 4}
REAL_MODELS = {
    "complex rope": ("deepseek_v2", {**DENSE, "rope_parameters": YARN}),
    "plain queries": ("deepseek_v2", {**DENSE, "q_lora_rank": None}),
    "interleaved rope": ("deepseek_v3", DENSE),
    "half rope": ("deepseek_v3", {**DENSE, "rope_interleave": False}),
    "glm4_moe_lite": ("glm4_moe_lite", {"mlp_layer_types": ["dense"] * 4}),
    "youtu": ("youtu", {}),
}
BATCH, STEPS = [5, 130, 64, 63, 1, 200, 17, 90], 24


class Forced(LogitsProcessor):
    """Takes given tokens [B, n], so that runs of different rounding stay comparable."""

    def __init__(self, tokens, start):
        self.tokens, self.start = tokens, start

    def __call__(self, input_ids, scores):
        at = input_ids.shape[1] - self.start
        return torch.full_like(scores, -torch.inf).scatter(1, self.tokens[:, at : at + 1], 0.0)


def decode_logits(model, **kwargs):
    """[B, STEPS, vocab] of forced steps after the first, float32."""
    batch = {name: tensor.to(cuda) for name, tensor in prompts(BATCH, vocab=997).items()}
    tokens = torch.randint(3, 997, (len(BATCH), STEPS + 1), generator=torch.Generator().manual_seed(5)).to(cuda)
    forced = LogitsProcessorList([Forced(tokens, batch["input_ids"].shape[1])])
    output = model.generate(**batch, max_new_tokens=STEPS + 1, logits_processor=forced, **GREEDY, **kwargs)
    return scores_of(output)[:, 1:].float()


def real_model(name, models=REAL_MODELS):
    family, changes = models[name]
    return build(family, sharp=1.0, **{**REAL, **changes}).to(cuda, torch.bfloat16)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("name", REAL_MODELS)
def test_bf16_is_as_near_to_float32_as_stock(name, graphs):
    model = real_model(name)
    exact, stock = decode_logits(twin(model).float()), decode_logits(twin(model))
    hf_mla.patch(model, graphs=graphs)
    got = decode_logits(model, cache_implementation="paged_mla")
    assert relative_error(got, exact) <= 1.1 * relative_error(stock, exact)
    if graphs:
        forward = model.model.__dict__["forward"]
        assert isinstance(forward, DecoderForward) and any(forward.graphs._graphs.values())


MIXTURES = {
    "softmax": ("deepseek_v2", {"n_routed_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 128}),
    "sigmoid": (
        "deepseek_v3",
        {
            "n_routed_experts": 64,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 128,
            "n_group": 8,
            "topk_group": 4,
        },
    ),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_in_bf16_fused_and_not(name):
    model = real_model(name, MIXTURES)
    exact_model = twin(model).float()
    exact_model.set_experts_implementation("eager")  # transformers' grouped products are bf16's
    exact = decode_logits(exact_model)
    errors = {}
    for fuse in (False, True):
        hf_mla.patch(model, fused=fuse)
        got = decode_logits(model, cache_implementation="paged_mla")
        # The middle of all rows and steps: a few have other experts than in float32, with and without fusion.
        errors[fuse] = ((got - exact).norm(dim=-1) / exact.norm(dim=-1)).median().item()
    assert errors[True] <= 1.1 * errors[False]


@pytest.mark.parametrize(("dtype", "rows"), [(torch.bfloat16, 33), (torch.float32, 33), (torch.float32, 3000)])
def test_router_logits_without_casts_are_those_of_float32(dtype, rows):
    router = real_model("softmax", MIXTURES).model.layers[1].mlp.gate.to(dtype)
    hidden = torch.randn(rows, 1, REAL["hidden_size"], device=cuda).bfloat16()
    got = fused._router_logits(router, hidden)
    exact = hidden[:, 0].double() @ router.weight.double().t()
    assert got.dtype == torch.float32
    assert relative_error(got, exact) < 1e-5


@pytest.mark.parametrize("name", MIXTURES)
def test_fused_and_not_choose_the_same_first_experts(name):
    # Up to the first mixture both compute nearly the same numbers, so that near ties alone are decided differently.
    model = real_model(name, MIXTURES)
    chosen = {}
    for fuse in (False, True):
        hf_mla.patch(model, fused=fuse, graphs=False)
        picked = []
        gate = model.model.layers[1].mlp.gate
        handle = gate.register_forward_hook(lambda module, args, output, picked=picked: picked.append(output[2]))
        decode_logits(model, cache_implementation="paged_mla")
        handle.remove()
        chosen[fuse] = torch.stack(picked[1:])  # [steps, rows, k]
    in_both = (chosen[True].unsqueeze(-1) == chosen[False].unsqueeze(-2)).any(-1)
    assert in_both.float().mean() > 0.95


def launches(model):
    """Kernels that a decode step of two rows launches."""
    cache, ids = hf_mla.PagedMLACache(), torch.full((2, 70), 7, device=cuda)
    mask = torch.ones_like(ids)
    feed(model, ids[:, :67], cache, mask[:, :67])
    feed(model, ids[:, 67:68], cache, mask[:, :68])  # compiles kernels
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        feed(model, ids[:, 68:69], cache, mask[:, :69])
        torch.cuda.synchronize()
    kernels = [event.name for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return Counter(name for name in kernels if not name.startswith(("Memcpy", "Memset")))


@pytest.mark.parametrize(("name", "most"), [("softmax", 30), ("sigmoid", 31)])
def test_kernels_a_layer(name, most):
    # A layer's are what two models of different depth differ by; 23 and 24 without cuBLAS's reductions of split sums.
    family, changes = MIXTURES[name]
    shallow, deep = (
        launches(
            hf_mla.patch(
                build(family, sharp=1.0, **{**REAL, **changes, "num_hidden_layers": layers}).to(cuda, torch.bfloat16),
                graphs=False,
            )
        )
        for layers in (2, 6)
    )
    assert (deep.total() - shallow.total()) / 4 <= most, deep - shallow
