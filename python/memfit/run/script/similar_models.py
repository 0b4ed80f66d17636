"""Whether two models are of one make, so that what was learnt of one holds for the other.

Folds of a cross-validation, clients of a federation, tasks of a meta-learner and trials of a search
each train a model of their own, one after the other. Responsible for telling that they are alike,
as far as models and optimizers tell. Not responsible for what follows
(:mod:`memfit.run.script.loop`), nor for whether they run alike: a pass that does not leaves its
plan, and what takes more than was foreseen is recorded again.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

from torch import nn

from memfit.tensors.barrier import without_barrier

Make = tuple[Any, ...]
"""Classes of all modules by path; names, shapes, types and devices of parameters and buffers."""


def make_of(root: nn.Module) -> Make:
    """What tells a model from others, but for its values.

    Args:
        root: The model.
    """
    with without_barrier():
        # By name: a module with parametrizations has a class of its own.
        modules = tuple((path, type(it).__qualname__) for path, it in root.named_modules())
        tensors = chain(root.named_parameters(), root.named_buffers())
        held = tuple(
            (name, it.shape, it.dtype, it.device, it.requires_grad) for name, it in tensors
        )
    return modules, held


def are_named(classes: Iterable[str], objects: Iterable[object]) -> bool:
    """Whether some objects are of classes of these names, and of all of them.

    Args:
        classes: The names.
        objects: The objects.
    """
    return set(classes) == {type(it).__name__ for it in objects}
