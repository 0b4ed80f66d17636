"""Tensors in a file of weights, read where they lie.

Responsible for opening a checkpoint (safetensors, the index of one in several files, or what
``torch.save`` writes), for saying what is in it, and for its tensors, which are views of the mapped
file: their pages are the file's, clean, and the system takes them back whenever it wants. Not
responsible for what they belong to (:mod:`memfit.weights.load_quantized`).
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memfit.errors import CheckpointError, UsageError, first_line
from memfit.tensors.storage import is_wrapper

_INDEX = "model.safetensors.index.json"
_ALONE = "model.safetensors"
_MOST_INDEX_BYTES = 64 << 20


@dataclass(frozen=True)
class Checkpoint:
    """An open checkpoint.

    Attributes:
        path: What was opened.
        shapes: Shape of each tensor, by name.
    """

    path: Path
    shapes: Mapping[str, tuple[int, ...]]
    _read: Callable[[str], Tensor]

    def tensor(self, name: str) -> Tensor:
        """A tensor as it lies in the file; it must not be written to.

        Args:
            name: One of :attr:`shapes`.

        Raises:
            CheckpointError: It cannot be read.
        """
        try:
            return self._read(name)
        except (OSError, RuntimeError, ValueError) as error:
            message = f"`{name}` of `{self.path}` cannot be read: {first_line(error)}"
            raise CheckpointError(message) from error


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a file of weights; what kind it is, its first bytes say.

    Args:
        path: A file, or a folder with ``model.safetensors`` or its index in it.

    Raises:
        CheckpointError: It is no file of weights, or a damaged one.
        UsageError: It is of safetensors, which is not installed.
    """
    path = Path(path)
    if path.is_dir():
        path = path / (_INDEX if (path / _INDEX).is_file() else _ALONE)
    try:
        with path.open("rb") as file:
            head = file.read(9)
    except OSError as error:
        message = f"`{path}` cannot be read: {error.strerror or error}"
        raise CheckpointError(message) from error
    if head.startswith(b"PK\x03\x04"):
        return _of_torch(path)
    if head[7:] == b"\x00{":  # a length of eight bytes, and a header
        return _of_safetensors(path)
    if head.lstrip().startswith(b"{"):
        return _sharded(path)
    raise CheckpointError(
        f"`{path}` is no file of weights: they are read from safetensors, its index, or what "
        "`torch.save` writes since torch 1.6"
    )


def _of_safetensors(path: Path) -> Checkpoint:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise UsageError(
            f"`{path}` is of safetensors, which is not installed\n"
            "hint: `pip install memfit[quantize]`"
        ) from None
    try:
        file: Any = safe_open(path, framework="pt")
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - the file is no mapping
    except (SafetensorError, OSError) as error:
        message = f"`{path}` is no file of safetensors, or a damaged one: {first_line(error)}"
        raise CheckpointError(message) from error

    def read(name: str) -> Tensor:
        try:
            tensor: Tensor = file.get_tensor(name)
        except SafetensorError as error:
            raise ValueError(str(error)) from error
        return tensor

    return Checkpoint(path, shapes, read)


def _sharded(path: Path) -> Checkpoint:
    """The files of an index; each is opened once."""
    files: Any = None
    with suppress(ValueError, OSError):
        if path.stat().st_size <= _MOST_INDEX_BYTES:
            files = json.loads(path.read_text(encoding="utf-8")).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        message = f"`{path}` is no index of safetensors: its `weight_map` names the file of each"
        raise CheckpointError(message)
    shards = {name: open_checkpoint(path.parent / name) for name in sorted(set(files.values()))}
    for tensor, name in files.items():
        if tensor not in shards[name].shapes:
            message = f"`{path}` says that `{tensor}` is in `{name}`, and it is not"
            raise CheckpointError(message)
    shapes = {tensor: shards[name].shapes[tensor] for tensor, name in files.items()}
    return Checkpoint(path, shapes, lambda tensor: shards[files[tensor]].tensor(tensor))


def _of_torch(path: Path) -> Checkpoint:
    try:
        found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (RuntimeError, OSError, EOFError, pickle.UnpicklingError, ValueError) as error:
        message = f"`{path}` cannot be read by `torch.load(..., weights_only=True)`: "
        raise CheckpointError(message + first_line(error)) from error
    if not isinstance(found, Mapping) or not found or not all(map(_is_plain, found.values())):
        message = f"`{path}` holds no tensors by name: save `model.state_dict()` alone"
        raise CheckpointError(message)
    tensors = {str(name): tensor for name, tensor in found.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return Checkpoint(path, shapes, lambda name: tensors[name].detach())


def _is_plain(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.layout is torch.strided
        and not value.is_quantized
        and not is_wrapper(type(value))
    )
