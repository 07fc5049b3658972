"""Tiny random models of each family, with attention made sharp, and the comparison with stock that the tests share."""

import copy

import torch
import transformers
from packaging.version import Version
from transformers import PreTrainedConfig, PreTrainedModel

VERSION = Version(transformers.__version__)

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


INDEXED = "indexed_attention" if VERSION >= Version("5.20") else "deepseek_sparse_attention"
# 5.15 fills its boolean masks the wrong way round, so stock is only right with eager's.
SPARSE_ATTENTION = {} if VERSION >= Version("5.17") else {"attn_implementation": "eager"}
# Sparse attention that picks 8 tokens, so that most of what is cached is left out. 16 heads, since tokens that all of
# them score 0 are ties, and which of those is picked is chance. An indexer's head is wider than its rope part.
SPARSE = {
    **MOE,
    "index_topk": 8,
    "index_head_dim": 24,
    "index_n_heads": 16,
    "head_dim": 16,
    **SPARSE_ATTENTION,
}
SINKS = {
    **SPARSE,
    "indexer_types": ["full", "shared", "full"],
    "learnable_sink_init": 1.0,
    "attn_implementation": "eager",  # stock supports sinks in no other
}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
LINEAR = {"linear_head_dim": 12, "linear_num_heads": 3, "linear_conv_kernel_dim": 4}
HYBRID = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "moe_intermediate_size": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
LLAMA_4_SCALE = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
MORE_FAMILIES = {
    "axk1": ("AXK1", {**MOE, "head_dim": 16}),
    "minicpm3": ("MiniCPM3", {"num_attention_heads": 40, "num_key_value_heads": 40, "kv_lora_rank": 256}),
    "mistral4": ("Mistral4", {**MOE, "rope_parameters": LLAMA_4_SCALE}),
    "longcat_flash": (
        "LongcatFlash",
        {
            "num_hidden_layers": 4,
            "num_layers": 2,
            "ffn_hidden_size": 64,
            "expert_ffn_hidden_size": 16,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "moe_topk": 2,
            "head_dim": 16,
        },
    ),
    "kimi_linear": ("KimiLinear", {**HYBRID, **LINEAR}),
    "bailing_hybrid": ("BailingHybrid", {**HYBRID, "head_dim": 12}),
    "deepseek_v32": ("DeepseekV32", SPARSE),
    "glm_moe_dsa": ("GlmMoeDsa", {**SPARSE, "indexer_types": ["full", "shared", "full"]}),
    "axk2": ("AXK2", {**SPARSE, "gated_norm_rank": 4}),
    "hy_v4": ("HYV4", SINKS),
    "hy_v4_vl_text": ("HYV4VL", {**SINKS, "rope_parameters": MROPE}),
    "mistral_large4_text": (
        "MistralLarge4",
        {
            **SPARSE,
            "num_hidden_layers": 4,
            "indexer_types": ["full", "shared", "full", "full"],
            "no_rope_layers": [1, 0, 1, 0],
            "kv_source_layers": [0, 1, 0, 1],
        },
    ),
    "dots3_note_text": ("Dots3NoteText", {**SPARSE, "num_hidden_layers": 4, "sliding_window_size": 9}),
    "glm5_next_text": (
        "Glm5Next",
        {
            **SPARSE,
            **LINEAR,
            "qk_rope_head_dim": 0,
            "index_kpool": 4,
            "layer_types": ["linear_attention", INDEXED, INDEXED],
        },
    ),
}
WRAPPED = {"hy_v4_vl_text", "mistral_large4_text", "glm5_next_text"}
EVERY_FAMILY = {**FAMILIES, **MORE_FAMILIES}
INSTALLED = [name for name, (stem, _) in EVERY_FAMILY.items() if hasattr(transformers, f"{stem}Config")]


def config_of(family: str, **changes: object) -> PreTrainedConfig:
    """A tiny config of `family`; a multimodal one wraps its text config beside a tiny vision tower's."""
    stem, extra = EVERY_FAMILY[family]
    values = {**COMMON, **extra, **changes}
    if family in WRAPPED:
        return getattr(transformers, f"{stem}Config")(text_config=values, vision_config=VISION)
    return getattr(transformers, f"{stem}Config")(**values)


def build(family: str = "deepseek_v2", seed: int = 0, sharp: float = 4.0, **changes: object) -> PreTrainedModel:
    """A random model of `family` in fp32, eval mode.

    `sharp` scales the query projections, so that softmax is far from uniform and a wrong key shows; the embeddings
    are N(0, 1).
    """
    config = config_of(family, **changes)
    stem = EVERY_FAMILY[family][0].removesuffix("Text")
    kind = "ForConditionalGeneration" if family in WRAPPED else "ForCausalLM"
    torch.manual_seed(seed)
    return randomise(getattr(transformers, f"{stem}{kind}")(config), sharp)


@torch.no_grad()
def randomise(model: PreTrainedModel, sharp: float = 4.0) -> PreTrainedModel:
    """Give a model weights that keep activations near 1 and attention sharp, and no end of text; in eval mode."""
    for key, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            fan_in = 1 if "embed" in key else parameter.shape[-1]
            parameter.normal_(0, fan_in**-0.5)
        elif "bias" in key:
            parameter.normal_()
        if key.endswith(("q_proj.weight", "q_b_proj.weight")):
            parameter.mul_(sharp)
    model.generation_config.eos_token_id = None
    return model.eval()


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
