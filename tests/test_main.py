"""`python -m hf_mla` tells a bug report's reader what they need, on any machine."""

import os
import subprocess
import sys

import pytest
import torch
import transformers

import hf_mla
from hf_mla.config import ENVIRONMENT


def run_report(**environment: str) -> str:
    finished = subprocess.run(
        [sys.executable, "-m", "hf_mla"],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=120,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_report_names_versions_backends_and_environment():
    lines = run_report(HF_MLA_DISABLE="1").splitlines()
    facts = {tuple(line.split(maxsplit=1)) for line in lines if line.startswith("  ")}
    assert {
        ("hf_mla", hf_mla.__version__),
        ("torch", torch.__version__),
        ("transformers", transformers.__version__),
        ("reference", "available"),
    } <= facts
    names = {name for name, _ in facts}
    assert {"triton", "flashinfer", "flashinfer-python", "accelerate", "auto", "cpu"} <= names
    assert {name.partition("=")[0] for name in names if "=" in name} == set(ENVIRONMENT)
    assert "HF_MLA_DISABLE=1" in names


@pytest.mark.slow
def test_report_survives_broken_optional_packages(tmp_path):
    for name in ("triton", "flashinfer"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('{name} is broken here')\n")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    lines = run_report(PYTHONPATH=path).splitlines()
    reasons = dict(line.split(maxsplit=1) for line in lines[lines.index("backends") + 1 :] if line.startswith("  "))
    assert reasons["reference"] == "available"
    assert reasons["triton"].startswith("no: ")
    assert reasons["flashinfer"].startswith("no: ")
