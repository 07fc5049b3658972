"""The kernels' door: choosing, refusing, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest
import torch
from mla_cases import WILD, check, make

from hf_mla import kernels

GEOMETRY = {"num_heads": 4, "kv_lora_rank": 128, "qk_rope_head_dim": 64, "block_size": 16}


def test_import_is_light():
    code = (
        "import sys, types; sys.modules['flashinfer'] = None; import hf_mla.kernels\n"
        "assert 'triton_decode' not in str(list(sys.modules)), 'triton kernels were imported'\n"
        "assert 'triton.language' not in sys.modules or 'torch' in sys.modules\n"
        "reasons = hf_mla.kernels.available_backends()\n"
        "assert reasons['reference'] is None and 'flashinfer' in reasons['flashinfer'], reasons"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_available_backends_says_why_not():
    reasons = kernels.available_backends()
    assert set(reasons) == set(kernels.BACKENDS)
    assert reasons["reference"] is None
    assert all(reason is None or isinstance(reason, str) for reason in reasons.values())


def test_auto_on_cpu_is_the_reference():
    assert kernels.resolve_backend("auto", device="cpu", dtype=torch.float32, **GEOMETRY) == "reference"


@pytest.mark.parametrize(
    ("name", "graph", "match"),
    [
        ("flashinfer", False, "flashinfer"),
        ("nothing", False, "unknown"),
        ("reference", True, "CUDA graph"),
        ("auto", True, "CUDA graph"),
    ],
)
def test_explicit_names_are_refused_with_the_reason(name, graph, match):
    with pytest.raises(ValueError, match=match):
        kernels.resolve_backend(name, device="cpu", dtype=torch.float32, graph=graph, **GEOMETRY)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"num_heads": 0}, "num_heads"),
        ({"block_size": 24}, "block_size"),
        ({"dtype": torch.int8}, "dtype"),
        ({"kv_lens_host": torch.tensor([[3]])}, "kv_lens_host"),
        ({"kv_lens_host": torch.tensor([[3, -1], [3, 3]])}, "negative"),
        ({"kv_lens_host": torch.tensor([[3, 2], [3, 3]])}, "decrease"),
        ({"kv_lens_host": torch.tensor([[3, 4], [3, 3000]])}, "3000"),
    ],
)
def test_plan_names_the_bad_argument(change, match):
    x = make([3, 20], q_len=2)
    with pytest.raises(ValueError, match=match):
        x.plan("reference", **change)


def test_plan_checks_tensors():
    x = make([3, 20])
    good = x.block_table
    for table, match in ((good.float(), "block_table"), (good[0], "block_table"), (good[:1], "rows")):
        x.block_table = table
        with pytest.raises(ValueError, match=match):
            x.plan("reference")
    x.block_table, x.kv_lens = good, x.kv_lens.float()
    with pytest.raises(ValueError, match="kv_lens"):
        x.plan("reference")


def test_decode_names_the_bad_argument():
    x = make([3, 20])
    plan = x.plan("reference")
    for change, match in (
        ({"q_latent": x.q_latent[..., :64]}, "q_latent"),
        ({"q_pe": x.q_pe.half()}, "q_pe"),
        ({"q_latent": x.q_latent.repeat_interleave(2, -1)[..., ::2]}, "contiguous"),
        ({"pages": x.pages[..., :100]}, "pages"),
        ({"pages": x.pages[:, :8]}, "blocks of 8"),
        ({"pages": x.pages.half()}, "float16"),
    ):
        arguments = {"q_latent": x.q_latent, "q_pe": x.q_pe, "pages": x.pages, **change}
        with pytest.raises(ValueError, match=match):
            kernels.decode(plan, sm_scale=1.0, **arguments)


def test_write_names_the_bad_argument():
    pages, ckv, k_pe, slots = torch.zeros(2, 16, 24), torch.zeros(3, 16), torch.zeros(3, 8), torch.arange(3)
    kernels.write_latents(pages, ckv, k_pe, slots)
    for arguments, match in (
        ((pages, ckv, k_pe, slots.int()), "int64"),
        ((pages, ckv, k_pe[:2], slots), "k_pe"),
        ((pages, ckv.half(), k_pe, slots), "float32"),
        ((pages[..., :20], ckv, k_pe, slots), "pages"),
    ):
        with pytest.raises(ValueError, match=match):
            kernels.write_latents(*arguments)


@pytest.mark.parametrize("q_len", [1, 2])
def test_every_backend_of_this_machine_agrees(q_len):
    for name, why in kernels.available_backends().items():
        if why is None and name != "flashinfer":
            x = make([0, 1, 17, 40], q_len=q_len, device="cuda" if torch.cuda.is_available() else "cpu")
            check(x, *x.decode(name))


def test_flashinfer_serves_only_aligned_queries():
    from hf_mla.kernels import flashinfer
    from hf_mla.kernels.problem import Step

    table = torch.zeros(2, 4, dtype=torch.int32)
    for lens, served in (
        ([[4, 5], [1, 2]], True),
        ([[4, 5], [0, 0]], True),
        ([[5], [0]], True),
        ([[4, 4], [1, 2]], False),
        ([[4, 5], [0, 1]], False),
        ([[4, 6], [1, 2]], False),
    ):
        lens = torch.tensor(lens, dtype=torch.int32)
        assert (flashinfer.step_reason(Step(table, lens, lens)) is None) == served, lens


def test_flashinfer_metadata(monkeypatch):
    """CSR pages of each row; wild table columns are not followed; a row without tokens gets entries of block 0."""
    from hf_mla.kernels import flashinfer
    from hf_mla.kernels.problem import Problem, Step

    csr = types.SimpleNamespace(csr=lambda **fields: fields)
    monkeypatch.setitem(sys.modules, "flashinfer", types.ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.mla", types.SimpleNamespace(MLAPlanMetadata=csr))
    table = torch.tensor([[7, 5, 3], [WILD, WILD, WILD], [9, WILD, WILD]])
    lens = torch.tensor([[36, 37], [0, 0], [15, 16]], dtype=torch.int32)
    problem = Problem(torch.device("cpu"), torch.bfloat16, 4, 128, 64, 16)
    fields = flashinfer._metadata(problem, Step(table, lens, lens))
    assert {name: x.tolist() for name, x in fields.items()} == {
        "qo_indptr": [0, 2, 4, 6],
        "kv_indptr": [0, 3, 4, 5],
        "kv_indices": [7, 5, 3, 0, 9],
        "kv_len_arr": [37, 2, 16],
    }
    assert all(x.dtype == torch.int32 for x in fields.values())
