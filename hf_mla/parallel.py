"""A plan for transformers' tensor parallelism that shards MLA by heads.

transformers' own plan for DeepSeek-V3 leaves attention whole on every rank; that for DeepSeek-V2 shards it.
Latents have no heads, so in either case every rank holds the whole cache; with heads sharded it reads that for its own
heads only.
"""

from typing import Any

# Sharding heads: up-projections by output columns, the output projection by input rows. What comes before the latents
# (the a-projections and norms) stays whole; gradients through it need the sum that "mla_kv_a_proj" makes.
BY_HEADS = {
    "q_proj": "colwise",
    "q_b_proj": "colwise",
    "kv_a_proj_with_mqa": "mla_kv_a_proj",
    "kv_b_proj": "colwise",
    "o_proj": "rowwise",
}
TESTED = ("deepseek_v2", "deepseek_v3")


def tp_plan(config: Any, tp_size: int) -> dict[str, str]:
    """The family's plan with attention sharded by heads, for `DistributedConfig(tp_size=..., tp_plan=...)`.

    Args:
        config: Config of a causal LM, or the model.
        tp_size: How many ranks share the heads.

    Returns:
        Module patterns, from the causal LM's root, and how transformers is to shard them.

    Raises:
        ValueError: A family that this isn't tested with, or heads that tp_size doesn't divide.
    """
    config = getattr(config, "config", config)
    family = getattr(config, "model_type", type(config).__name__)
    if family not in TESTED:
        raise ValueError(f"config: no plan that shards heads for family {family!r}; allowed: {', '.join(TESTED)}")
    heads = config.num_attention_heads
    if isinstance(tp_size, bool) or not isinstance(tp_size, int) or tp_size < 1 or heads % tp_size:
        raise ValueError(f"tp_size is {tp_size!r}; allowed: divisors of num_attention_heads, {heads}")
    absent = "q_b_proj" if config.q_lora_rank is None else "q_proj"
    attention = {f"layers.*.self_attn.{name}": way for name, way in BY_HEADS.items() if name != absent}
    own = {name: way for name, way in config.base_model_tp_plan.items() if ".self_attn." not in name}
    return {f"model.{name}": way for name, way in {**own, **attention}.items()}
