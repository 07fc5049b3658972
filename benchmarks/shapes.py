"""Models' full-size shapes with random weights, and the least time that one of their decode steps can take.

B rows, E routed experts a layer, k of them a token, R = kv_lora_rank, P = qk_rope_head_dim
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Glm4MoeLiteConfig,
    MiniCPM3Config,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 4096,
}

V2 = {
    "q_lora_rank": None,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    "topk_method": "greedy",
    "max_position_embeddings": 163840,
    "rope_parameters": YARN,
}
V2_LITE = {
    **V2,
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "n_shared_experts": 2,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}

TINY = {
    **V2,
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}

# Name -> class of the config and its values. V3's has its attention and sizes, but four layers and few experts; of
# GLM-4.7-Flash, 12 of its 47 layers.
SHAPES: dict[str, tuple[type[PreTrainedConfig], dict]] = {
    "v2-lite": (DeepseekV2Config, V2_LITE),
    "v3-attention": (
        DeepseekV3Config,
        {"num_hidden_layers": 4, "first_k_dense_replace": 1, "n_routed_experts": 16, "n_group": 1, "topk_group": 1},
    ),
    "glm4-moe-lite": (Glm4MoeLiteConfig, {"num_hidden_layers": 12}),
    "minicpm3": (MiniCPM3Config, {}),
    "tiny": (DeepseekV2Config, TINY),
}


def make_config(shape: str, num_layers: int | None = None) -> PreTrainedConfig:
    """The config of a shape, with fewer layers if `num_layers` says so; no token ends a sequence."""
    config_class, values = SHAPES[shape]
    values = values if num_layers is None else {**values, "num_hidden_layers": num_layers}
    return config_class(**values, bos_token_id=None, eos_token_id=None, pad_token_id=0)


def build(config: PreTrainedConfig, device: torch.device, dtype: torch.dtype, seed: int = 0) -> PreTrainedModel:
    """A model made on the device: matrices normal(0, 0.02), norms 1. No weight passes through the host."""
    with no_init_weights(), torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 0.02, generator=generator)
    return model.eval()


@dataclass(frozen=True)
class Floor:
    """What a decode step must read: every weight that it uses once, and the latents of the history once.

    Args:
        weight_bytes: Weights but the embedding (of which a step reads B rows) and the routed experts.
        expert_bytes: Routed experts, all layers.
        num_experts: E.
        experts_per_token: k.
        latent_bytes: Latents of one stored token over all layers, R + P values a layer.
        bandwidth: Bytes a second of the device's memory, as measured.
    """

    weight_bytes: int
    expert_bytes: int
    num_experts: int
    experts_per_token: int
    latent_bytes: int
    bandwidth: float

    @classmethod
    def of(cls, model: PreTrainedModel, bandwidth: float) -> "Floor":
        config, sizes = model.config, {name: p.nbytes for name, p in model.named_parameters()}
        experts = sum(size for name, size in sizes.items() if ".experts." in name)
        embedding = sum(size for name, size in sizes.items() if "embed_tokens" in name)
        return cls(
            weight_bytes=sum(sizes.values()) - experts - embedding,
            expert_bytes=experts,
            num_experts=getattr(config, "n_routed_experts", 1),
            experts_per_token=getattr(config, "num_experts_per_tok", 1),
            latent_bytes=config.num_hidden_layers
            * (config.kv_lora_rank + config.qk_rope_head_dim)
            * model.dtype.itemsize,
            bandwidth=bandwidth,
        )

    def expected_experts(self, batch: int) -> float:
        """How many experts of a layer B rows are expected to hit, each row choosing k of E evenly and on its own."""
        return self.num_experts * (1 - (1 - self.experts_per_token / self.num_experts) ** batch)

    def step_bytes(self, batch: int, stored_tokens: float) -> float:
        """Bytes that a step of B rows reads with these many tokens stored over all rows."""
        experts = self.expert_bytes * self.expected_experts(batch) / self.num_experts
        return self.weight_bytes + experts + self.latent_bytes * stored_tokens

    def step_ms(self, batch: int, stored_tokens: float) -> float:
        return self.step_bytes(batch, stored_tokens) / self.bandwidth * 1000


def measure_bandwidth(device: torch.device, num_bytes: int) -> float:
    """Bytes a second, read and written together, of copying `num_bytes` on the device: the best of some rounds."""
    source = torch.randint(256, (num_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copies, best = 8, float("inf")
    for _ in range(4):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(copies):
            target.copy_(source)
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * num_bytes * copies / best


def synchronize(device: torch.device) -> None:
    """Wait for the device; nothing to wait for on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def counted_experts(model: PreTrainedModel, batch: int) -> Iterator[list[int]]:
    """Collects how many distinct experts each layer's decode steps hit; needs a model that calls its modules."""
    counts: list[int] = []

    def count(_: torch.nn.Module, arguments: tuple) -> None:
        top_k_index = arguments[1]  # [tokens, k]
        if top_k_index.shape[0] == batch:
            counts.append(top_k_index.unique().numel())

    modules = [module for name, module in model.named_modules() if name.endswith(".experts")]
    handles = [module.register_forward_pre_hook(count) for module in modules]
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()
