"""A pruned model as a file, and back.

Responsible for what the file holds and for refusing one of another model. It holds which indices
were kept, what modules noted of their sizes, and the state; no code: the model is built as before
it was pruned, and cut as the file says.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from memfit.answers import save
from memfit.errors import UsageError
from memfit.prune.cut import cut
from memfit.prune.groups import Kept, tensors_of
from memfit.prune.sizes import Noted, set_noted
from memfit.weights.weightless import fake_mode_of
from memfit.workload import Workload

_VERSION = 1


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to cut a model.

    Attributes:
        shapes: Shapes of parameters and buffers before, by name, of those that are cut.
        kept: What is left of them.
        noted: Attributes of modules that are then others.
    """

    shapes: Mapping[str, tuple[int, ...]]
    kept: Kept
    noted: Noted

    @classmethod
    def of(cls, model: nn.Module, left: Kept, noted: Noted) -> Recipe:
        """The recipe of a model that was cut.

        Args:
            model: The model before.
            left: What is left of its tensors.
            noted: What was set.
        """
        tensors = tensors_of(model)
        return cls({name: tuple(tensors[name].shape) for name in left}, left, noted)


def write(path: str | os.PathLike[str], recipe: Recipe, state: Mapping[str, Tensor]) -> None:
    """Write a file, whole or not at all.

    Args:
        path: The file.
        recipe: How the model was cut.
        state: The pruned model's ``state_dict``.

    Raises:
        UsageError: The file cannot be written.
    """
    content = {
        "memfit_pruned": _VERSION,
        "shapes": dict(recipe.shapes),
        "kept": recipe.kept,
        "attributes": recipe.noted,
        "state_dict": dict(state),
    }
    memory = io.BytesIO()
    torch.save(content, memory)
    save(path, memory.getvalue())


def load(model: nn.Module, path: str | os.PathLike[str]) -> nn.Module:
    """Cut a copy of a model as a file says, and give it the file's state.

    Args:
        model: The model as it is built; it stays as it is.
        path: The file.

    Raises:
        UsageError: The file cannot be read, is no pruned model, or is of another model.
    """
    content = _read(path)
    recipe = Recipe(content["shapes"], content["kept"], content["attributes"])
    if fake_mode_of(model) is not None:
        raise UsageError("the model was built without weights: build it ordinarily")
    _require_same(model, recipe, path)
    pruned = cut(Workload(model, ()), recipe.kept).model
    set_noted(pruned, recipe.noted)
    try:
        pruned.load_state_dict(content["state_dict"])
    except RuntimeError as error:
        first = str(error).splitlines()[1:2] or [str(error)]
        message = f"`{path}` is of another model: {first[0].strip().rstrip('.')}"
        raise UsageError(message) from error
    return pruned


def _read(path: str | os.PathLike[str]) -> dict[str, Any]:
    if not Path(path).exists():
        raise UsageError(f"cannot read `{path}`: there is no such file")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UsageError(f"cannot read `{path}`: {error.strerror}") from error
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError, KeyError) as error:
        raise UsageError(f"cannot read `{path}`: it is no file that torch saved") from error
    if not isinstance(content, dict) or content.get("memfit_pruned") != _VERSION:
        message = f"`{path}` is no pruned model: `memfit prune --save` and `Pruned.save` write such"
        raise UsageError(message)
    wrong = [
        name
        for name in ("shapes", "kept", "attributes", "state_dict")
        if not isinstance(content.get(name), dict)
    ]
    if wrong:
        raise UsageError(f"`{path}` is no whole pruned model: it has no `{wrong[0]}`")
    if not (_is_kept(content) and _is_noted(content["attributes"])):
        raise UsageError(f"`{path}` is no whole pruned model: what was kept cannot be read")
    return content


def _is_kept(content: Mapping[str, Any]) -> bool:
    """Whether the indices are some of the shapes' own."""
    shapes = content["shapes"]
    return all(
        isinstance(dimensions, dict)
        and isinstance(shapes.get(name), tuple)
        and all(_are_indices(shapes[name], *one) for one in dimensions.items())
        for name, dimensions in content["kept"].items()
    )


def _are_indices(shape: tuple[Any, ...], dimension: Any, indices: Any) -> bool:
    return (
        isinstance(dimension, int)
        and 0 <= dimension < len(shape)
        and isinstance(indices, Tensor)
        and indices.dtype is torch.int64
        and indices.dim() == 1
        and indices.numel() > 0
        and int(indices.min()) >= 0
        and int(indices.max()) < shape[dimension]
    )


def _is_noted(attributes: Mapping[str, Any]) -> bool:
    """Whether modules are given numbers and sizes alone."""
    return all(
        isinstance(noted, dict) and all(isinstance(it, int | tuple) for it in noted.values())
        for noted in attributes.values()
    )


def _require_same(model: nn.Module, recipe: Recipe, path: str | os.PathLike[str]) -> None:
    """Refuse a file of another model by the name of what differs.

    Raises:
        UsageError: It is of another.
    """
    tensors = tensors_of(model)
    for name, shape in recipe.shapes.items():
        if name not in tensors:
            raise UsageError(f"`{path}` is of another model: it has `{name}`, and this has not")
        found = tuple(tensors[name].shape)
        if found != tuple(shape):
            message = (
                f"`{path}` is of another model: `{name}` was {tuple(shape)} before pruning, and "
                f"is {found} here"
            )
            raise UsageError(message)
    modules = dict(model.named_modules())
    for module in recipe.noted:
        if module not in modules:
            raise UsageError(f"`{path}` is of another model: this has no module `{module}`")
