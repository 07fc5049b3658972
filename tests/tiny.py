"""Tiny random models of each family, with attention made sharp, and the comparison with stock that the tests share."""

import copy

import torch
import transformers
from transformers import PreTrainedModel

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 64,
}
# Head sizes that all differ, so that a swapped one can't go unnoticed.
COMMON = {
    "vocab_size": 97,
    "hidden_size": 80,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "kv_lora_rank": 40,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 16,
    "v_head_dim": 28,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "sdpa",
}
MOE = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
FAMILIES = {
    "deepseek_v2": ("DeepseekV2", {**MOE, "head_dim": 16}),
    "deepseek_v3": ("DeepseekV3", {**MOE, "head_dim": 16}),
    "glm4_moe_lite": ("Glm4MoeLite", {**MOE, "head_dim": 16}),
    "youtu": ("Youtu", {"head_dim": 16, "tie_word_embeddings": False}),
}


def build(family: str = "deepseek_v2", seed: int = 0, sharp: float = 4.0, **changes: object) -> PreTrainedModel:
    """A random model of `family` in fp32, eval mode.

    `sharp` scales the query projections, so that softmax is far from uniform and a wrong key shows; the embeddings
    are N(0, 1).
    """
    name, extra = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**COMMON, **extra, **changes})
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                fan_in = 1 if "embed" in key else parameter.shape[-1]
                parameter.normal_(0, fan_in**-0.5)
            elif "bias" in key:
                parameter.normal_()
            if key.endswith(("q_proj.weight", "q_b_proj.weight")):
                parameter.mul_(sharp)
    model.generation_config.eos_token_id = None
    return model


def prompts(lengths: list[int], seed: int = 1, side: str = "left", vocab: int = 97) -> dict[str, torch.Tensor]:
    """Random prompts of these lengths, padded on `side` with token 0: input_ids and attention_mask."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.zeros(len(lengths), width, dtype=torch.int64)
    mask = torch.zeros(len(lengths), width, dtype=torch.int64)
    for row, length in enumerate(lengths):
        columns = slice(width - length, None) if side == "left" else slice(0, length)
        ids[row, columns] = torch.randint(3, vocab, (length,), generator=generator)
        mask[row, columns] = 1
    return {"input_ids": ids, "attention_mask": mask}


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """|got - expected| / |expected|, in fp64; NaN where either has one."""
    got, expected = got.double(), expected.double()
    return ((got - expected).norm() / expected.norm()).item()


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """An unpatched copy to compare with."""
    return copy.deepcopy(model)


def scores_of(output: object) -> torch.Tensor:
    """[B, steps, vocab] raw logits of a generate output made with output_logits=True."""
    return torch.stack(output.logits, dim=1)


GREEDY = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
