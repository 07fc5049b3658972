"""Multimodal models are served through their text model: an image in the prompt, then decoding from pages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from pairs import BLOCK, PAGED, assert_generates_alike, assert_same, cache_of
from tiny import COMMON, GREEDY, LLAMA_4_SCALE, MOE, prompts, randomise, relative_error, scores_of, twin

import hf_mla
from hf_mla.patch import find_bindings

IMAGE = 90  # the token that stands for the one merged patch of an image
TOWER = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "patch_size": 4}


def kimi() -> tuple[Any, dict[str, torch.Tensor]]:
    """Kimi-K2.5 around DeepSeek-V3; [patches, 3, 4, 4] pixels of two images of 2 x 2 patches."""
    tower = {**TOWER, "pos_emb_height": 4, "pos_emb_width": 4, "pos_emb_time": 1}
    text = {**COMMON, **MOE, "model_type": "deepseek_v3", "head_dim": 16}
    config = transformers.Kimi_K25Config(
        text_config=text, vision_config=tower, image_token_id=IMAGE, video_token_id=91, projection_hidden_size=16
    )
    pixels = {"pixel_values": torch.randn(8, 3, 4, 4), "image_grid_thw": torch.tensor([[1, 2, 2], [1, 2, 2]])}
    return transformers.Kimi_K25ForConditionalGeneration(config), pixels


def mistral() -> tuple[Any, dict[str, torch.Tensor]]:
    """Mistral Small 4 in Mistral 3's wrapper; two images of 8 x 8 pixels."""
    tower = {**TOWER, "model_type": "pixtral", "image_size": 16, "head_dim": 8}
    text = {**COMMON, **MOE, "model_type": "mistral4", "rope_parameters": LLAMA_4_SCALE}
    config = transformers.Mistral3Config(
        text_config=text, vision_config=tower, image_token_index=IMAGE, spatial_merge_size=2
    )
    pixels = {"pixel_values": torch.randn(2, 3, 8, 8), "image_sizes": torch.tensor([[8, 8], [8, 8]])}
    return transformers.Mistral3ForConditionalGeneration(config), pixels


@pytest.mark.parametrize("make", [kimi, mistral])
def test_an_image_in_the_prompt(make: Any) -> None:
    if make is kimi and not hasattr(transformers, "Kimi_K25Config"):
        pytest.skip("this transformers has no Kimi-K2.5")
    torch.manual_seed(0)
    model, pixels = make()
    stock = twin(randomise(model))
    patched = hf_mla.patch(model, block_size=BLOCK)
    ((decoder, binding),) = find_bindings(patched)
    assert decoder is patched.model.language_model and len(binding.attentions) == 3
    inputs = {**prompts([9, 2 * BLOCK], vocab=IMAGE), **pixels}
    inputs["input_ids"][:, -4] = IMAGE
    for more in ({}, {"num_beams": 3}):
        got = assert_generates_alike(stock, patched, 1e-4, **inputs, **more, max_new_tokens=24)
    assert isinstance(cache_of(got), hf_mla.PagedMLACache)
    others = {**inputs, "pixel_values": inputs["pixel_values"].flip(0)}
    first, other = (patched.generate(**given, max_new_tokens=2, **GREEDY, **PAGED) for given in (inputs, others))
    assert relative_error(scores_of(other), scores_of(first)) > 1e-3  # the image is seen
    hf_mla.unpatch(patched)
    expected = stock.generate(**inputs, max_new_tokens=2, **GREEDY)
    assert_same(patched.generate(**inputs, max_new_tokens=2, **GREEDY), expected, 1e-7)
