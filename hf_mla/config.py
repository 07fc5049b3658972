"""Settings of a patched model, and the only place that reads environment variables."""

import os
from dataclasses import dataclass, field, fields, replace

import torch

from . import kernels

ENVIRONMENT: dict[str, str] = {
    "HF_MLA_BACKEND": "kernel backend when none is given to patch(): auto, reference, triton or flashinfer",
    "HF_MLA_DISABLE": "1 makes patch() leave models on stock transformers code, to compare with it",
}

BACKENDS = ("auto", *kernels.BACKENDS)
BLOCK_SIZES = (16, 32, 64, 128, 256)
CACHE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)


def _backend_of_environment() -> str:
    backend = os.environ.get("HF_MLA_BACKEND") or "auto"
    if backend not in BACKENDS:
        raise ValueError(f"environment variable HF_MLA_BACKEND is {backend!r}; allowed: {', '.join(BACKENDS)}")
    return backend


def _enabled_by_environment() -> bool:
    disable = os.environ.get("HF_MLA_DISABLE") or "0"
    if disable not in ("0", "1"):
        raise ValueError(f"environment variable HF_MLA_DISABLE is {disable!r}; allowed: 0, 1")
    return disable == "0"


@dataclass(frozen=True)
class MLAConfig:
    """How a patched model keeps and reads its latents.

    Where `backend` or `enabled` isn't given, the environment variables decide (see ENVIRONMENT), then the default.

    Args:
        backend: Kernels that read the pages: "auto" (the fastest measured one that can run here), "reference" (plain
            torch), "triton" or "flashinfer". One asked for by name raises where it can't run; it doesn't fall back.
        block_size: Tokens a block of the cache holds; one of 16, 32, 64, 128, 256.
        entry_alignment: Bytes that one token's entry (latent and rope part) is padded to a multiple of; a power of two
            from 16 (packed, for the usual sizes) to 4096. 256 turns DeepSeek's 576 bf16 values into 640.
        cache_dtype: Type in which latents are stored; None keeps the model's own. torch.float8_e4m3fn stores them in 8
            bits with a scale a token, and the rope parts in bf16: 656 bytes of DeepSeek's 1152, at some loss.
        max_tokens: Tokens the pool of one cache may hold over all rows, or None to grow as needed.
        graphs: Replay decode steps as CUDA graphs where they can be captured; False runs every step from Python.
        fused: Run decode steps on GPUs in few kernels, in bf16 and fp16, where the model's modules are known; False
            runs transformers' own code between the seams. Has no effect with the "reference" backend.
        enabled: False leaves the model on stock code, and `cache_implementation="paged_mla"` makes a DynamicCache.

    Raises:
        ValueError: A value that isn't allowed, or an environment variable's; the message names it and what is.
    """

    backend: str = field(default_factory=_backend_of_environment)
    block_size: int = 64
    entry_alignment: int = 16
    cache_dtype: torch.dtype | None = None
    max_tokens: int | None = None
    graphs: bool = True
    fused: bool = True
    enabled: bool = field(default_factory=_enabled_by_environment)

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(f"backend is {self.backend!r}; allowed: {', '.join(BACKENDS)}")
        if self.block_size not in BLOCK_SIZES or not isinstance(self.block_size, int):
            raise ValueError(f"block_size is {self.block_size!r}; allowed: {', '.join(map(str, BLOCK_SIZES))} tokens")
        alignment = self.entry_alignment
        if not isinstance(alignment, int) or not 16 <= alignment <= 4096 or alignment & (alignment - 1):
            raise ValueError(f"entry_alignment is {alignment!r}; allowed: a power of two from 16 to 4096 bytes")
        if self.cache_dtype is not None and self.cache_dtype not in CACHE_DTYPES:
            raise ValueError(
                f"cache_dtype is {self.cache_dtype!r}; allowed: None, {', '.join(map(str, CACHE_DTYPES))}"
            )
        if self.cache_dtype == torch.float8_e4m3fn and self.backend == "flashinfer":
            raise ValueError(
                f"cache_dtype is {self.cache_dtype}, which backend 'flashinfer' can't read; allowed: auto, reference, "
                "triton"
            )
        if self.max_tokens is not None and (type(self.max_tokens) is not int or self.max_tokens < 1):
            raise ValueError(f"max_tokens is {self.max_tokens!r}; allowed: None or a whole number of tokens above 0")
        for name in ("graphs", "fused", "enabled"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed: True, False")

    @classmethod
    def from_options(cls, config: "MLAConfig | None" = None, **options: object) -> "MLAConfig":
        """Build from keyword options, or change these in `config`.

        Raises:
            ValueError: A config that isn't one, an unknown option or a value that isn't allowed.
        """
        if config is not None and not isinstance(config, cls):
            raise ValueError(f"config is {config!r}; allowed: None, an {cls.__name__}, or its fields as keywords")
        known = [option.name for option in fields(cls)]
        for name in options:
            if name not in known:
                raise ValueError(f"unknown option {name!r}; allowed: {', '.join(known)}")
        return cls(**options) if config is None else replace(config, **options)  # type: ignore[arg-type]
