"""PrefixPool.save and load: the same logits in another process, and files that don't fit are refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import BLOCK, pair
from safetensors.torch import load_file, save_file
from test_prefix_pool import batch, both, check, ids_of
from tiny import GREEDY, build, relative_error, scores_of

import hf_mla
from hf_mla import PrefixPool
from hf_mla.cache import persist


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Any, Any, PrefixPool, Path]:
    """A stock and a patched model, a pool that knows two prompts, and the file it was saved in."""
    stock, patched = pair()
    pool = PrefixPool()
    both(stock, patched, pool, batch(ids_of(50, 1), ids_of(70, 2)))
    path = tmp_path / "prefixes.safetensors"
    pool.save(path, patched)
    return stock, patched, pool, path


def test_what_was_saved_is_found_again(saved: Any) -> None:
    stock, patched, pool, path = saved
    other = PrefixPool()
    other.load(path, patched)
    assert other.known_tokens == pool.known_tokens
    check(other)
    assert both(stock, patched, other, batch(ids_of(50, 1), ids_of(70, 2), ids_of(20, 3))) == [48, 64, 0]
    other.load(path, patched)  # again: nothing is held twice
    pool.load(path, patched)
    check(other)
    check(pool)
    assert both(stock, patched, other, batch(ids_of(50, 1))) == [48]
    assert os.listdir(path.parent) == [path.name]


SCRIPT = """
import sys
sys.path[:0] = sys.argv[1:3]
import torch, hf_mla
from pairs import BLOCK
from test_prefix_pool import batch, ids_of
from tiny import GREEDY, build, scores_of
model = hf_mla.patch(build("deepseek_v2", num_hidden_layers=2), block_size=BLOCK)
pool = hf_mla.PrefixPool()
pool.load(sys.argv[3], model)
out = model.generate(**batch(ids_of(70, 2)), max_new_tokens=6, **GREEDY, past_key_values=pool)
assert pool.reused == [64]
torch.save(scores_of(out), sys.argv[4])
"""


@pytest.mark.slow
def test_another_process_computes_the_same_logits(saved: Any, tmp_path: Path) -> None:
    stock, _, _, path = saved
    here = Path(__file__).parent
    command = [sys.executable, "-c", SCRIPT, str(here), str(here.parent), str(path), str(tmp_path / "logits")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    expected = scores_of(stock.generate(**batch(ids_of(70, 2)), max_new_tokens=6, **GREEDY))
    assert relative_error(torch.load(tmp_path / "logits"), expected) < 1e-5


def test_latents_in_eight_bits_are_kept(tmp_path: Path) -> None:
    stock, patched = pair()
    hf_mla.patch(patched, block_size=BLOCK, cache_dtype=torch.float8_e4m3fn)
    pool, arguments = PrefixPool(), {**batch(ids_of(50, 1), ids_of(70, 2)), "max_new_tokens": 1, **GREEDY}
    patched.generate(**arguments, past_key_values=pool)
    again = scores_of(patched.generate(**arguments, past_key_values=pool))
    assert pool.reused == [48, 64]
    pool.save(tmp_path / "file", patched)
    other = PrefixPool()
    other.load(tmp_path / "file", patched)
    assert torch.equal(scores_of(patched.generate(**arguments, past_key_values=other)), again)
    assert other.reused == [48, 64] and relative_error(again, scores_of(stock.generate(**arguments))) < 0.3


def refused(pool: PrefixPool, path: Path, model: Any, match: str) -> None:
    before = dict(pool._blocks.block_of), pool._blocks.num_blocks
    with pytest.raises(ValueError, match=match):
        pool.load(path, model)
    assert (dict(pool._blocks.block_of), pool._blocks.num_blocks) == before
    pool._blocks.check()
    assert not pool._blocks.users


def test_files_that_are_not_whole_are_refused(saved: Any, tmp_path: Path) -> None:
    stock, patched, pool, path = saved
    whole, part = path.read_bytes(), tmp_path / "part"
    for size in (0, 1, 7, 8, 100, len(whole) // 2, len(whole) - 1):
        part.write_bytes(whole[:size])
        for target in (pool, PrefixPool()):
            refused(target, part, patched, "no whole safetensors file")
    part.write_bytes(b"PK\3\4" + whole[4:])
    refused(pool, part, patched, "no whole safetensors file")
    with pytest.raises(FileNotFoundError):
        pool.load(tmp_path / "nothing", patched)
    assert both(stock, patched, pool, batch(ids_of(50, 1))) == [48]


def test_foreign_files_are_refused(saved: Any, tmp_path: Path) -> None:
    stock, patched, pool, path = saved
    tensors, foreign = load_file(path), tmp_path / "foreign"
    with persist.safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    save_file({"weight": torch.ones(3)}, foreign)
    refused(pool, foreign, patched, "wasn't written by PrefixPool.save")
    layouts = json.loads(metadata["layouts"])
    wrongs = [
        (tensors, {"layouts": "[]"}),
        (tensors, {"layouts": "no json"}),
        (tensors, {"layouts": json.dumps([{**layouts[0], "kv_lora_rank": 41}, layouts[1]])}),
        (tensors, {"layouts": json.dumps([{**layouts[0], "dtype": "bfloat16"}, layouts[1]])}),
        (tensors, {"layouts": json.dumps([{**layouts[0], "dtype": "nothing"}, layouts[1]])}),
        ({name: tensor for name, tensor in tensors.items() if name != "pages.1"}, {}),
        ({**tensors, "pages.1": tensors["pages.1"][1:]}, {}),
        ({**tensors, "keys": tensors["keys"][:, :31].contiguous()}, {}),
    ]
    for content, changes in wrongs:
        save_file(content, foreign, {**metadata, **changes})
        refused(pool, foreign, patched, "wrong inside|holds")
        refused(PrefixPool(), foreign, patched, "wrong inside|holds")


def test_another_models_file_is_refused(saved: Any) -> None:
    _, patched, pool, path = saved
    refused(PrefixPool(), path, hf_mla.patch(build(seed=1, num_hidden_layers=2), block_size=BLOCK), "another model")
    refused(PrefixPool(), path, hf_mla.patch(build(num_hidden_layers=2), block_size=32), "block size")
    half = hf_mla.patch(build(num_hidden_layers=2).to(torch.bfloat16), block_size=BLOCK)
    refused(PrefixPool(), path, half, "dtype")
    with pytest.raises(ValueError, match="isn't patched"):
        pool.load(path, build())
    with pytest.raises(ValueError, match="knows no prefix"):
        PrefixPool().save(path, patched)


def test_a_pool_without_room_refuses_and_evicts_nothing(saved: Any) -> None:
    stock, patched, _, path = saved
    small = PrefixPool(max_tokens=4 * BLOCK)
    both(stock, patched, small, batch(ids_of(30, 8)))
    refused(small, path, patched, "max_tokens")
    assert both(stock, patched, small, batch(ids_of(30, 8))) == [16]


def test_a_save_that_fails_leaves_the_old_file(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stock, patched, pool, path = saved
    before = path.read_bytes()

    def fail(tensors: dict, name: str, metadata: dict) -> None:
        Path(name).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(persist, "save_file", fail)
    with pytest.raises(KeyboardInterrupt):
        pool.save(path, patched)
    assert path.read_bytes() == before and os.listdir(path.parent) == [path.name]
