"""What the examples' folder offers runs as it is, in a fresh process and offline."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
needs_model = pytest.mark.skipif(
    not (EXAMPLES / "small_model" / "model.safetensors").exists(), reason="examples/small_model holds no weights"
)


def environment() -> dict[str, str]:
    """The process's own, with this checkout first on the path and no network."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}


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
def test_quickstart_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(EXAMPLES / "quickstart.ipynb", as_version=4)
    resources = {"metadata": {"path": str(EXAMPLES)}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    said = "".join(out.get("text", "") for cell in notebook.cells for out in cell.get("outputs", []))
    assert "the same tokens: True" in said
    tables = [out.data["text/html"] for cell in notebook.cells for out in cell.get("outputs", []) if "data" in out]
    assert any("PagedMLACache" in table for table in tables)
