"""What a patched model leaves in a folder: what stock leaves, to be loaded by anyone, with this package or without."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import BLOCK, PAGED, assert_same, cache_of
from tiny import GREEDY, build, prompts, scores_of, twin
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.utils.logging import get_logger

import hf_mla
from hf_mla import PagedMLACache

PROMPT = prompts([3, 20])


@pytest.fixture(scope="module")
def stock() -> PreTrainedModel:
    return build(num_hidden_layers=2)


@pytest.fixture
def model(stock: PreTrainedModel) -> PreTrainedModel:
    return hf_mla.patch(twin(stock), block_size=BLOCK)


def load(folder: Path) -> Any:
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    loaded.generation_config.eos_token_id = None  # as `build` has it; what is loaded takes the config's
    return loaded


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def generate(model: Any, **arguments: Any) -> Any:
    return model.generate(**PROMPT, max_new_tokens=8, **GREEDY, **arguments)


@pytest.mark.parametrize("shard", [None, "40KB"])
def test_a_used_model_saves_stocks_files_and_they_load_bit_for_bit(
    stock: PreTrainedModel, model: PreTrainedModel, tmp_path: Path, shard: str | None
) -> None:
    options = {} if shard is None else {"max_shard_size": shard}
    expected = generate(model, **PAGED)
    model.save_pretrained(tmp_path / "patched", **options)
    stock.save_pretrained(tmp_path / "stock", **options)
    saved = files(tmp_path / "patched")
    assert saved == files(tmp_path / "stock") and (len(saved) > 4) == (shard is not None)
    assert not [name for name, content in saved.items() if b"hf_mla" in content or b"paged" in content]
    loaded = load(tmp_path / "patched")
    assert loaded.state_dict().keys() == stock.state_dict().keys()
    assert all(torch.equal(tensor, stock.state_dict()[name]) for name, tensor in loaded.state_dict().items())
    with pytest.raises(ValueError, match="needs a patched model"):
        generate(loaded, **PAGED)
    assert torch.equal(scores_of(generate(loaded)), scores_of(generate(stock)))
    assert torch.equal(scores_of(generate(hf_mla.patch(loaded, block_size=BLOCK), **PAGED)), scores_of(expected))


def test_the_config_alone_says_nothing_of_the_patch(model: PreTrainedModel, stock: PreTrainedModel) -> None:
    assert model.config.to_json_string(use_diff=False) == stock.config.to_json_string(use_diff=False)
    assert "hf_mla" not in repr(model.config) and "hf_mla" not in repr(model)
    assert model.generation_config.to_json_string() == stock.generation_config.to_json_string()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "isn't imported" in record.getMessage()]


def test_a_generation_config_with_the_name_is_saved_with_a_warning_and_loads_again(
    stock: PreTrainedModel,
    model: PreTrainedModel,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(get_logger("transformers"), "propagate", True)
    model.save_pretrained(tmp_path)
    GenerationConfig(cache_implementation="static").save_pretrained(tmp_path / "other")
    assert not warnings_of(caplog)
    model.generation_config.cache_implementation = "paged_mla"
    model.save_pretrained(tmp_path)
    assert len(warnings_of(caplog)) == 1 and "cache_implementation = None" in warnings_of(caplog)[0]
    assert json.loads((tmp_path / "generation_config.json").read_text())["cache_implementation"] == "paged_mla"
    assert b"paged" not in (tmp_path / "config.json").read_bytes()
    assert GenerationConfig.from_pretrained(tmp_path).cache_implementation == "paged_mla"
    loaded = load(tmp_path)
    with pytest.raises(ValueError, match=r"needs a patched model.*hf_mla\.patch"):
        generate(loaded)
    got = generate(hf_mla.patch(loaded, block_size=BLOCK))
    assert type(cache_of(got)) is PagedMLACache
    assert_same(got, generate(stock), 1e-4)
    assert_same(generate(hf_mla.unpatch(loaded), cache_implementation="dynamic"), generate(stock), 1e-6)


LOAD_WITHOUT = """
import sys
from transformers import AutoModelForCausalLM, GenerationConfig
for load in (GenerationConfig.from_pretrained, AutoModelForCausalLM.from_pretrained):
    try:
        loaded = load(sys.argv[1])
    except ValueError as error:
        print("refused:", error)
    else:
        print("loaded:", getattr(loaded, "generation_config", loaded).cache_implementation)
assert "hf_mla" not in sys.modules
"""


def load_without_the_package(folder: Path) -> list[str]:
    command = [sys.executable, "-c", LOAD_WITHOUT, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_what_the_warning_says_of_processes_without_the_package(model: PreTrainedModel, tmp_path: Path) -> None:
    model.generation_config.cache_implementation = "paged_mla"
    model.save_pretrained(tmp_path)
    refused = load_without_the_package(tmp_path)
    assert len(refused) == 2 and all(line.startswith("refused: ") and "paged_mla" in line for line in refused)
    model.generation_config.cache_implementation = None
    model.save_pretrained(tmp_path)
    assert load_without_the_package(tmp_path) == ["loaded: None"] * 2
