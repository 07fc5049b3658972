"""What the examples' folder offers runs as it is, in a fresh process and offline."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
needs_model = pytest.mark.skipif(
    not (EXAMPLES / "small_model" / "model.safetensors").exists(), reason="examples/small_model holds no weights"
)


def environment() -> dict[str, str]:
    """The process's own, with this checkout first on the path and no network."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment(), cwd="/")


@needs_model
@pytest.mark.slow
def test_generate() -> None:
    done = run("generate.py", "--max-new-tokens", "20")
    assert done.returncode == 0, done.stderr
    assert "20 tokens" in done.stdout and "PagedMLACache(1 rows" in done.stdout
    assert "transformers:" not in done.stdout


@needs_model
@pytest.mark.slow
def test_generate_compares_with_stock() -> None:
    done = run(
        "generate.py", "--compare", "--prompt", "And Moses said", "--max-new-tokens", "40", "--backend", "reference"
    )
    assert done.returncode == 0, done.stderr
    assert "transformers: 40 tokens" in done.stdout
    assert "the same tokens: yes" in done.stdout


@needs_model
@pytest.mark.slow
def test_generate_refuses_an_unknown_backend() -> None:
    done = run("generate.py", "--backend", "abacus")
    assert done.returncode != 0
    assert "allowed: auto, reference" in done.stderr


@needs_model
@pytest.mark.slow
def test_chats_take_turns() -> None:
    done = run("swap_chats.py", "--max-new-tokens", "8")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("[Moses]") == done.stdout.count("[David]") == 3
    assert done.stdout.count("tokens; leaves, now HostTier(") == 6


@pytest.fixture
def run_notebook(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[str, list[dict[str, Any]]]]:
    """What a notebook prints and what it shows, by media type, run from its own folder."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    for name, value in environment().items():
        monkeypatch.setenv(name, value)

    def execute(name: str) -> tuple[str, list[dict[str, Any]]]:
        notebook = nbformat.read(EXAMPLES / name, as_version=4)
        assert not [cell for cell in notebook.cells if cell.get("outputs")], "it is kept without outputs"
        resources = {"metadata": {"path": str(EXAMPLES)}}
        nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
        outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
        printed = "".join(output.get("text", "") for output in outputs)
        return printed, [output.data for output in outputs if "data" in output]

    return execute


@needs_model
@pytest.mark.slow
def test_quickstart_notebook(run_notebook: Any) -> None:
    printed, shown = run_notebook("quickstart.ipynb")
    assert "the same tokens: True" in printed
    assert any("PagedMLACache" in data.get("text/html", "") for data in shown)


@needs_model
@pytest.mark.slow
def test_cache_contents_notebook(run_notebook: Any) -> None:
    pytest.importorskip("matplotlib")
    printed, shown = run_notebook("cache_contents.ipynb")
    assert sum("image/png" in data for data in shown) == 3
    layers, heads, tokens = 3, 4, 1536  # of the small model, in float32
    expanded, latents = (tokens * layers * values * 4 for values in (heads * (128 + 64 + 128), 512 + 64))
    for name, count in (("expanded keys and values", expanded), ("DynamicCache", latents), ("PagedMLACache", latents)):
        assert f"{name} {count:,} bytes" in printed
    assert "DeepSeek-V3: 4880.0 KiB a token expanded, 68.6 KiB as latents" in printed
    # Six whole blocks of the prompt that all four samples share, and four more of each.
    assert "Samples of one prompt: 40 cells, 22 blocks" in printed


@needs_model
@pytest.mark.slow
def test_long_document(tmp_path: Path) -> None:
    arguments = ("--tokens", "1500", "--questions", "5", "--kept", str(tmp_path / "document.safetensors"))
    first, second = run("long_document.py", *arguments), run("long_document.py", *arguments)
    assert first.returncode == 0, first.stderr
    assert second.returncode == 0, second.stderr
    assert "tokens read in" in first.stdout and "100%" in first.stderr
    assert "tokens loaded from" in second.stdout
    answers = [[line.split(" (")[0] for line in done.stdout.splitlines()[2:7]] for done in (first, second)]
    assert answers[0] == answers[1] and len(answers[0]) == 5
    assert "5 of 5 right" in first.stdout


@needs_model
@pytest.mark.slow
def test_prefix_reuse_notebook(run_notebook: Any) -> None:
    pytest.importorskip("matplotlib")
    printed, shown = run_notebook("prefix_reuse.ipynb")
    assert sum("image/png" in data for data in shown) == 2
    assert "known 1536 of 1556 tokens" in printed
    assert "known of each row: [640, 384, 0]" in printed
    assert "the same tokens as transformers': True" in printed
    assert "refused: path: small_model/model.safetensors wasn't written by PrefixPool.save" in printed
