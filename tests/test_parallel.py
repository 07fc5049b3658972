"""Models that transformers shards over processes: patched, with attention whole or by heads, and experts."""

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import config_of
from transformers import AutoModelForCausalLM

import hf_mla

NEW = 6
SIZES = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "vocab_size": 96,
    "hidden_size": 64,
}


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_plan(family: str) -> None:
    plan = hf_mla.tp_plan(config_of(family, **SIZES), 4)
    assert plan["model.layers.*.self_attn.kv_b_proj"] == "colwise"
    assert plan["model.layers.*.self_attn.o_proj"] == "rowwise"
    assert plan["model.layers.*.mlp.down_proj"] == "rowwise"
    assert not any("q_a_proj" in name or "gate.weight" in name or name.endswith(".mlp.gate") for name in plan)


@pytest.mark.parametrize("size", [3, 0, -2, True, 1.0])
def test_uneven_heads_are_refused(size: Any) -> None:
    with pytest.raises(ValueError, match="tp_size.*num_attention_heads"):
        hf_mla.tp_plan(config_of("deepseek_v3", **SIZES), size)


def test_untested_families_are_refused() -> None:
    with pytest.raises(ValueError, match="minicpm3.*deepseek_v2"):
        hf_mla.tp_plan(config_of("minicpm3"), 2)


def generate(model: Any, inputs: dict, **options: Any) -> Any:
    return model.generate(
        **inputs, max_new_tokens=NEW, do_sample=False, output_logits=True, return_dict_in_generate=True, **options
    )


def worker(rank: int, world: int, port: int, folder: str, how: str) -> None:
    from transformers.distributed import DistributedConfig

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world)
    saved = torch.load(f"{folder}/inputs.pt")
    options: dict[str, Any] = {"tp_size": world}
    if how == "experts":
        # The flag alone is refused where a config has ep_size: without a plan of its own no dense layer is sharded.
        has_size = hasattr(DistributedConfig, "ep_size")
        options |= {"ep_size": world} if has_size else {"enable_expert_parallel": True}
    elif how == "heads":
        from transformers import AutoConfig

        options["tp_plan"] = hf_mla.tp_plan(AutoConfig.from_pretrained(folder), world)
    config = DistributedConfig(**options)
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    hf_mla.patch(model)
    output = generate(model, saved, cache_implementation="paged_mla")
    layer = model.model.layers[1]

    def local(weight: Any) -> list[int]:
        return list((weight.to_local() if hasattr(weight, "to_local") else weight).shape)

    cache = getattr(output, "cache", None)
    cache = output.past_key_values if cache is None else cache
    shapes = {"kv_b": local(layer.self_attn.kv_b_proj.weight), "experts": local(layer.mlp.experts.down_proj)}
    torch.save((output.sequences, torch.stack(output.logits, 1)), f"{folder}/out{rank}.pt")
    Path(f"{folder}/shapes{rank}.json").write_text(json.dumps({**shapes, "cache": type(cache).__name__}))
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, how, world",
    [
        ("deepseek_v2", "auto", 2),
        ("deepseek_v3", "auto", 2),
        ("deepseek_v3", "heads", 2),
        ("deepseek_v3", "heads", 4),
        ("deepseek_v3", "experts", 2),
    ],
)
def test_logits_are_those_of_one_process(tmp_path: Path, family: str, how: str, world: int) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(family, **SIZES), dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    model.generation_config.eos_token_id = None
    ids = torch.randint(3, 96, (2, 9))
    mask = torch.ones_like(ids)
    ids[1, :4] = mask[1, :4] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    expected = generate(model, inputs)
    model.save_pretrained(tmp_path)
    torch.save(inputs, tmp_path / "inputs.pt")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(worker, (world, port, str(tmp_path), how), nprocs=world)
    config, logits = model.config, torch.stack(expected.logits, 1)
    for rank in range(world):
        shapes = json.loads((tmp_path / f"shapes{rank}.json").read_text())
        sharded = how == "heads" or (how, family) == ("auto", "deepseek_v2")
        heads = config.num_attention_heads // (world if sharded else 1)
        assert shapes["kv_b"][0] == heads * (config.qk_nope_head_dim + config.v_head_dim)
        assert shapes["experts"][0] == config.n_routed_experts // (world if how == "experts" else 1)
        assert shapes["cache"] == "PagedMLACache"
        sequences, got = torch.load(tmp_path / f"out{rank}.pt")
        assert torch.equal(sequences, expected.sequences)
        assert (got - logits).abs().max() <= 1e-4 * logits.abs().max()
