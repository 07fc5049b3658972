"""Absorption from quantised projections: the weight is what the quantised one stands for, and tokens are stock's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import BLOCK, PAGED, cache_of, feed
from test_absorb import GREEDY_8, assert_as_unpatched, layers_of
from tiny import GREEDY, build, prompts, relative_error, scores_of, twin
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, DynamicCache, FineGrainedFP8Config

import hf_mla
from hf_mla import PagedMLACache
from hf_mla.absorb import absorbed_weights

NOPE, V, RANK, HEADS = 32, 64, 128, 4

pytestmark = pytest.mark.slow


def linear(dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(RANK, HEADS * (NOPE + V), bias=False).to(dtype)


@torch.no_grad()
def absorbed(projection: nn.Module, like: torch.Tensor) -> torch.Tensor:
    """The absorbed halves put together again, [out, RANK]."""
    weights = absorbed_weights(projection, NOPE, V, RANK, like)
    assert weights.bias_v is None or weights.bias_v.abs().max() < 1e-6
    assert weights.w_uk.dtype == weights.w_uv.dtype == like.dtype
    return torch.cat([weights.w_uk, weights.w_uv], 1).flatten(0, 1)


# torchao: a Linear whose weight is a tensor of another class


def torchao_config(name: str) -> Any:
    """A config by its name; "int4" and "static" for those that need values."""
    ao = pytest.importorskip("torchao.quantization")
    if name == "int4":
        return ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=ao.PerGroup(16))
    if name == "static":  # inputs of 0.6 and more are clipped, so the identity would be
        kind = getattr(ao, "Int8StaticActivationInt8WeightConfig", None)
        return (
            kind(act_quant_scale=torch.tensor(0.005), granularity=ao.PerTensor()) if kind else pytest.skip("no such")
        )
    return getattr(ao, name)()


TORCHAO = ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "int4"]
WITH_INPUTS = ["Int8DynamicActivationInt8WeightConfig", "static"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*TORCHAO, *WITH_INPUTS])
def test_torchaos_weight_is_what_it_stands_for(name: str, dtype: torch.dtype) -> None:
    ao = pytest.importorskip("torchao.quantization")
    holder = nn.Sequential(linear(dtype))
    ao.quantize_(holder, torchao_config(name))
    assert type(holder[0].weight) not in (nn.Parameter, torch.Tensor)
    got = absorbed(holder[0], torch.zeros(1, dtype=dtype))
    assert torch.equal(got, holder[0].weight.dequantize().to(dtype))
    assert 1e-3 < relative_error(got, linear(dtype).weight) < (0.15 if name == "int4" else 0.05)


@pytest.mark.parametrize("name", TORCHAO)
def test_torchao_generates_as_unpatched(name: str) -> None:
    ao = pytest.importorskip("torchao.quantization")

    def quantised(model: Any) -> Any:
        ao.quantize_(model, torchao_config(name), filter_fn=lambda module, path: path.endswith("kv_b_proj"))
        return model

    changes = {"num_hidden_layers": 2, "kv_lora_rank": 48}  # groups of 16
    stock = quantised(build(**changes))
    patched = hf_mla.patch(quantised(build(**changes)), block_size=BLOCK)
    scores = assert_as_unpatched(stock, patched)
    assert relative_error(scores, scores_of(build(**changes).generate(**GREEDY_8))) > 1e-4


# bitsandbytes

WHOLE_BLOCKS = {  # what bitsandbytes' CPU kernels ask of a weight's shape
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "head_dim": 32,
    "v_head_dim": 64,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 2,  # no experts, among which rounding might choose others
    "vocab_size": 128,
}


@pytest.fixture(scope="module")
def load_in_4_bits(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Loads one and the same model, quantised as transformers does it."""
    pytest.importorskip("bitsandbytes")
    folder = tmp_path_factory.mktemp("whole")
    build("deepseek_v3", **WHOLE_BLOCKS).save_pretrained(folder)

    def load(**options: Any) -> Any:
        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32, **options)
        arguments = {"quantization_config": config, "dtype": torch.float32, "device_map": "cpu"}
        model = AutoModelForCausalLM.from_pretrained(folder, **arguments)
        model.generation_config.eos_token_id = None
        assert "Linear4bit" in type(layers_of(model)[0].kv_b_proj).__name__
        return model

    return load


ROUNDED = 2e-2  # bitsandbytes' CPU kernels compute in bfloat16


def decoded(model: Any, cache: Any) -> torch.Tensor:
    """Logits of three steps after a prompt, whatever tokens these would choose."""
    ids = prompts([20, 20])["input_ids"]
    return torch.cat(
        [feed(model, ids[:, start:end], cache) for start, end in ((0, 16), (16, 17), (17, 19), (19, 20))], 1
    )


def assert_decodes_alike(stock: Any, patched: Any) -> torch.Tensor:
    expected = decoded(stock, DynamicCache(config=stock.config))[:, 16:]
    assert (
        relative_error(decoded(patched, PagedMLACache(patched.config, block_size=BLOCK))[:, 16:], expected) < ROUNDED
    )
    return expected


@pytest.mark.parametrize("options", [{}, {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}])
def test_a_model_loaded_in_4_bits(load_in_4_bits: Callable[..., Any], options: dict[str, Any]) -> None:
    patched = hf_mla.patch(load_in_4_bits(**options), block_size=BLOCK)
    seen, whole = assert_decodes_alike(load_in_4_bits(**options), patched), build("deepseek_v3", **WHOLE_BLOCKS)
    assert relative_error(seen, decoded(whole, DynamicCache(config=whole.config))[:, 16:]) > 5 * ROUNDED
    output = patched.generate(**GREEDY_8, **PAGED)
    assert type(cache_of(output)) is PagedMLACache and output.sequences.shape == (2, 28)


def test_lora_over_4_bits_is_followed_on_off_and_switched(load_in_4_bits: Callable[..., Any]) -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> Any:
        torch.manual_seed(5)
        options = {"r": 4, "lora_alpha": 8, "target_modules": ["kv_b_proj"], "init_lora_weights": False}
        model = peft.get_peft_model(load_in_4_bits(), peft.LoraConfig(**options), "one")
        model.add_adapter("two", peft.LoraConfig(**options))
        return model.eval()

    stock, patched = adapted(), hf_mla.patch(adapted(), block_size=BLOCK)
    seen = []
    for name in ("one", "two", "one"):
        for model in (stock, patched):
            model.set_adapter(name)
        seen.append(assert_decodes_alike(stock, patched))
    assert relative_error(seen[1], seen[0]) > 5 * ROUNDED and relative_error(seen[2], seen[0]) < 1e-5
    with stock.disable_adapter(), patched.disable_adapter():
        assert relative_error(assert_decodes_alike(stock, patched), seen[0]) > 5 * ROUNDED
    for model in (stock, patched):
        model.merge_adapter()
    assert_decodes_alike(stock, patched)


def test_bitsandbytes_8_bits() -> None:
    """By itself: on CPUs bitsandbytes takes rows [T, R] alone, and stock gives it four dimensions."""
    bnb = pytest.importorskip("bitsandbytes")
    whole = linear()
    projection = bnb.nn.Linear8bitLt(RANK, whole.out_features, bias=False, has_fp16_weights=False, threshold=6.0)
    projection.load_state_dict(whole.state_dict())
    assert 1e-4 < relative_error(absorbed(projection.to("cpu"), torch.zeros(1)), whole.weight) < 2e-2


# fp8 with scales of blocks, as DeepSeek-V3 is published


def fp8_linear(
    weight: torch.Tensor, block: tuple[int, int] | None, scale_dtype: torch.dtype = torch.float32, **options: Any
) -> Any:
    """transformers' own module, its weight [out, in] quantised block by block."""
    from transformers.integrations.finegrained_fp8 import FP8Linear

    if scale_dtype != torch.float32:
        options["scale_fmt"] = "ue8m0"
    module = FP8Linear(weight.shape[1], weight.shape[0], block_size=block, **options)
    rows, columns = block or weight.shape
    with torch.no_grad():
        for i, row in enumerate(weight.split(rows, 0)):
            for j, part in enumerate(row.split(columns, 1)):
                scale = (part.abs().max() / 448).log2().ceil().exp2() if scale_dtype != torch.float32 else None
                scale = part.abs().max() / 448 if scale is None else scale
                at = module.weight_scale_inv[i, j] if block else module.weight_scale_inv
                at.copy_(scale)
                filled = module.weight[i * rows : i * rows + rows, j * columns : j * columns + columns]
                filled.copy_((part / scale).to(torch.float8_e4m3fn))
    return module


def stands_for(module: Any) -> torch.Tensor:
    """The weight of an FP8Linear: W[i, j] = fp8[i, j] * scale[i // rows, j // columns]."""
    rows, columns = module.block_size or module.weight.shape
    i, j = torch.meshgrid(*map(torch.arange, module.weight.shape), indexing="ij")
    scale = module.weight_scale_inv.float()
    return module.weight.float() * (scale[i // rows, j // columns] if module.block_size else scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("block", "scale_dtype", "options"),
    [
        ((128, 128), torch.float32, {}),
        ((48, 40), torch.float32, {}),  # 8 blocks by 4, the last of which is narrower
        ((100, 128), torch.float32, {}),  # the last is lower
        ((64, 64), "float8_e8m0fnu", {}),
        (None, torch.float32, {}),
        (None, torch.float32, {"activation_scheme": "static"}),
    ],
)
def test_fp8_is_dequantised_by_its_blocks(
    block: tuple[int, int] | None, scale_dtype: Any, options: dict[str, Any], dtype: torch.dtype
) -> None:
    whole = linear().weight.detach() * torch.linspace(0.1, 10, HEADS * (NOPE + V))[:, None]  # so that scales differ
    kind = getattr(torch, scale_dtype) if isinstance(scale_dtype, str) else scale_dtype
    module = fp8_linear(whole, block, kind, **options)
    assert module.weight.dtype == torch.float8_e4m3fn and module.weight_scale_inv.dtype == kind
    got = absorbed(module, torch.zeros(1, dtype=dtype))
    assert torch.equal(got, stands_for(module).to(dtype))
    assert 1e-2 < relative_error(got, whole) < 6e-2


def test_fp8_follows_its_weight_and_scales() -> None:
    module = fp8_linear(linear().weight, (64, 64))
    before = absorbed(module, torch.zeros(1))
    with torch.no_grad():
        module.weight_scale_inv.mul_(4)
    assert torch.equal(absorbed(module, torch.zeros(1)), before * 4)


def test_decode_steps_of_fp8_projections_are_those_of_their_weights() -> None:
    """The forward of such a projection needs a GPU; a prompt is read before, by projections of the same weights."""
    stock = build("deepseek_v3", num_hidden_layers=2)
    replaced = []
    for attention in layers_of(stock):
        replaced.append(fp8_linear(attention.kv_b_proj.weight, (32, 16)))
        attention.kv_b_proj.weight.data = stands_for(replaced[-1])
    patched = hf_mla.patch(twin(stock), block_size=BLOCK)
    ids, cache, dynamic = prompts([20])["input_ids"], PagedMLACache(stock.config), DynamicCache(config=stock.config)
    feed(patched, ids, cache), feed(stock, ids, dynamic)
    for attention, projection in zip(layers_of(patched), replaced, strict=True):
        attention.kv_b_proj = projection
    for step in (ids[:, :3], ids[:, :1]):
        assert relative_error(feed(patched, step, cache), feed(stock, step, dynamic)) < 1e-5


@pytest.mark.gpu
def test_a_model_quantised_to_fp8_generates_as_unpatched(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
    sizes |= {"kv_lora_rank": 512, "q_lora_rank": 256, "qk_nope_head_dim": 128, "v_head_dim": 128, "vocab_size": 256}
    sizes |= {"qk_rope_head_dim": 64, "head_dim": 64, "moe_intermediate_size": 128, "num_hidden_layers": 2}
    build("deepseek_v3", **sizes).to(torch.bfloat16).save_pretrained(tmp_path)

    def load() -> Any:
        arguments = {"quantization_config": FineGrainedFP8Config(), "dtype": torch.bfloat16, "device_map": "cuda"}
        model = AutoModelForCausalLM.from_pretrained(tmp_path, **arguments)
        model.generation_config.eos_token_id = None
        return model

    inputs = {key: value.cuda() for key, value in prompts([3, 20]).items()}
    stock = load()
    assert type(layers_of(stock)[0].kv_b_proj).__name__ == "FP8Linear"
    try:
        expected = stock.generate(**inputs, max_new_tokens=1, **GREEDY)
    except (ImportError, OSError) as error:
        pytest.skip(f"the kernels of fp8 can't be loaded: {error}")
    patched = hf_mla.patch(load())
    got = patched.generate(**inputs, max_new_tokens=1, **GREEDY, **PAGED)
    assert type(cache_of(got)) is PagedMLACache and torch.equal(scores_of(got), scores_of(expected))
    expected = stock.generate(**inputs, max_new_tokens=2, **GREEDY)
    got = patched.generate(**inputs, max_new_tokens=2, **GREEDY, **PAGED)
    assert relative_error(scores_of(got), scores_of(expected)) < 5e-2  # stock's inputs to kv_b_proj lose bits, too
