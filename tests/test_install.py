"""`import hf_mla` in a fresh interpreter: needs no optional package, and does nothing but import."""

import importlib.metadata
import json
import os
import subprocess
import sys

import pytest
from packaging.requirements import Requirement

from hf_mla import compat

OPTIONAL = ("triton", "flashinfer", "IPython", "jupyter", "ipykernel", "ipywidgets")

# What any program that holds a model has imported: what follows it is hf_mla's own doing.
BASELINE = "import torch, transformers\nfrom transformers import GenerationMixin, PreTrainedModel, masking_utils\n"

ASK_FOR_FLASHINFER = """
import torch, hf_mla.kernels as kernels
assert kernels.available_backends()["reference"] is None
reason = kernels.available_backends()["flashinfer"]
assert reason, "a missing package was called available"
try:
    kernels.resolve_backend("flashinfer", device=torch.device("cpu"), dtype=torch.bfloat16, num_heads=16,
                            kv_lora_rank=512, qk_rope_head_dim=64, block_size=64)
except ValueError as error:
    assert "flashinfer" in str(error), error
else:
    raise AssertionError("an absent backend was resolved")
assert kernels.resolve_backend("auto", device=torch.device("cpu"), dtype=torch.float32, num_heads=16,
                               kv_lora_rank=512, qk_rope_head_dim=64, block_size=64) == "reference"
"""

# Audit events of the outside world, beyond opening files to read.
FORBIDDEN_EVENTS = ("socket.", "subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.mkdir")
FORBIDDEN_EVENTS += ("os.remove", "os.rename", "shutil.", "tempfile.", "urllib.", "webbrowser.")


def run_python(code: str, *path: str) -> str:
    """Runs code in a fresh interpreter with the folders of `path` first on its module path; returns its output."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [*path, os.environ.get("PYTHONPATH")]))
    finished = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_import_with_optional_packages_absent():
    absent = f"import sys\nsys.modules.update(dict.fromkeys({OPTIONAL!r}))\n"
    run_python(absent + "import hf_mla\n" + ASK_FOR_FLASHINFER)


@pytest.mark.slow
def test_import_with_broken_optional_packages(tmp_path):
    for name in ("flashinfer", "IPython", "jupyter"):
        (tmp_path / f"{name}.py").write_text(f"raise RuntimeError('{name} is broken here')\n")
    # torch itself imports triton, and takes nothing but an ImportError for its absence.
    (tmp_path / "triton.py").write_text("raise ImportError('triton is broken here')\n")
    run_python("import hf_mla\n" + ASK_FOR_FLASHINFER, str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("error", ["OSError", "RuntimeError"])
def test_import_with_a_triton_that_raises_anything(tmp_path, error):
    (tmp_path / "triton.py").write_text(f"raise {error}('triton is broken here')\n")
    forget = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.modules.pop('triton', None)\n"
    ask = "import hf_mla, hf_mla.kernels\nassert hf_mla.kernels.available_backends()['triton']"
    run_python(BASELINE + forget + ask)


@pytest.mark.slow
def test_import_pulls_in_no_optional_package():
    report = f"import json, sys\nprint(json.dumps([name for name in {OPTIONAL!r} if name in sys.modules]))\n"
    before = json.loads(run_python(BASELINE + report))
    after = json.loads(run_python(BASELINE + "import hf_mla, hf_mla.kernels\n" + report))
    assert after == before


@pytest.mark.slow
def test_import_touches_neither_network_nor_files_nor_processes():
    watch = f"""
import json, os, sys
events = []
def watch(event, arguments):
    if event == "open":
        path, mode, flags = arguments
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if writes or not str(path).endswith((".py", ".pyc", ".so")):
            events.append(f"open {{path}} {{mode}} {{flags}}")
    elif event.startswith({FORBIDDEN_EVENTS!r}):
        events.append(event)
sys.addaudithook(watch)
import hf_mla, hf_mla.kernels
print(json.dumps(events))
"""
    assert json.loads(run_python(BASELINE + watch)) == []


def test_required_transformers_begins_where_the_tests_do():
    try:
        requirements = [Requirement(line) for line in importlib.metadata.requires("hf_mla") or []]
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("hf_mla runs from its source tree")
    specifier = next(requirement.specifier for requirement in requirements if requirement.name == "transformers")
    assert specifier.contains(compat.OLDEST) and specifier.contains(compat.NEWEST)
    major, minor, patch = map(int, compat.OLDEST.split("."))
    assert patch == 0 and not specifier.contains(f"{major}.{minor - 1}.99")
