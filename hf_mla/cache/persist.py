"""Known blocks in a safetensors file.

    keys      [N, 32] uint8, the blocks' keys in the order in which they became known
    pages.i   [N, block_size, entry] uint8, the bytes of what the blocks hold in layer i

The metadata tells the format, the root of the keys (a hash of the model's weights, config, adapters and dtypes) and
the geometry.
"""

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .layer import PageStore
from .layout import EntryLayout

FORMAT = "hf_mla.prefixes.1"


def _described(layout: EntryLayout) -> dict[str, object]:
    return {**asdict(layout), "dtype": str(layout.dtype).removeprefix("torch.")}


def write_blocks(path: Path, root: bytes, known: Sequence[tuple[bytes, int]], stores: Sequence[PageStore]) -> None:
    """Write blocks (key, block) of all layers; the file appears at `path` when it is whole."""
    index = torch.tensor([block for _, block in known], dtype=torch.int64, device="cpu")
    keys = torch.tensor([list(key) for key, _ in known], dtype=torch.uint8, device="cpu")
    tensors, layouts = {"keys": keys}, []
    for i, store in enumerate(stores):
        assert store.pages is not None and store.layout is not None
        tensors[f"pages.{i}"] = store.pages.view(torch.uint8)[index.to(store.pages.device)].to("cpu")
        layouts.append(_described(store.layout))
    metadata = {"format": FORMAT, "root": root.hex(), "layouts": json.dumps(layouts)}
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    os.close(handle)
    try:
        save_file(tensors, name, metadata)
        with open(name, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


class SavedBlocks:
    """An open file.

    Args:
        file: safetensors' handle.
        keys: Of the blocks.
        layouts: Geometry of each layer.
    """

    def __init__(self, file: Any, keys: list[bytes], layouts: list[EntryLayout]):
        self.file = file
        self.keys = keys
        self.layouts = layouts

    def pages(self, layer_idx: int) -> torch.Tensor:
        """[N, block_size, entry] uint8 on the host."""
        return self.file.get_tensor(f"pages.{layer_idx}")


@contextmanager
def read_blocks(
    path: Path, root: bytes, block_size: int, entry_alignment: int, num_layers: int
) -> Iterator[SavedBlocks]:
    """Open and check a file.

    Raises:
        ValueError: Not such a file, not whole, of another root or geometry.
        OSError: The file can't be opened.
    """
    with open(path, "rb"):  # safetensors' own error doesn't always tell that it isn't there
        pass
    try:
        opened = safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"path: {path} is no whole safetensors file: {error}") from error
    with opened as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise ValueError(f"path: {path} wasn't written by PrefixPool.save (format {metadata.get('format')!r})")
        if metadata.get("root") != root.hex():
            raise ValueError(
                f"path: {path} holds prefixes of another model, adapter, dtype or block size; its weights, config and "
                "the patch's options must be those of the model that they were saved for"
            )
        try:
            saved = _parsed(file, metadata, num_layers)
        except (KeyError, TypeError, ValueError, AttributeError, SafetensorError) as error:
            raise ValueError(f"path: {path} has a wrong inside: {error}") from error
        wrong = [x for x in saved.layouts if (x.block_size, x.entry_alignment) != (block_size, entry_alignment)]
        if wrong:
            raise ValueError(
                f"path: {path} holds blocks of {wrong[0].block_size} tokens aligned to {wrong[0].entry_alignment} "
                f"bytes; the model's patch has {block_size} and {entry_alignment}"
            )
        yield saved


def _parsed(file: Any, metadata: dict[str, str], num_layers: int) -> SavedBlocks:
    layouts = [
        EntryLayout(**{**one, "dtype": getattr(torch, one["dtype"])}) for one in json.loads(metadata["layouts"])
    ]
    if len(layouts) != num_layers or set(file.keys()) != {"keys", *(f"pages.{i}" for i in range(num_layers))}:
        raise ValueError(f"it has {len(layouts)} layers and the model {num_layers}, or tensors are missing")
    keys = file.get_tensor("keys")
    if keys.dtype != torch.uint8 or keys.ndim != 2 or keys.shape[1] != 32:
        raise ValueError(f"keys are {list(keys.shape)} {keys.dtype}")
    for i, layout in enumerate(layouts):
        part = file.get_slice(f"pages.{i}")
        wanted = [len(keys), layout.block_size, layout.entry_values * layout.dtype.itemsize]
        if part.get_shape() != wanted or part.get_dtype() != "U8":
            raise ValueError(f"pages.{i} are {part.get_shape()} {part.get_dtype()}, not {wanted} U8")
    return SavedBlocks(file, [bytes(key) for key in keys.tolist()], layouts)
