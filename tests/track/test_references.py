"""Who refers to a tensor: one reference too many is found, wherever the others are."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from memfit.track.references import held_by_python_alone

_GLOBAL = torch.rand(8)


def is_alone(tensor: Tensor) -> bool:
    return bool(held_by_python_alone([tensor]))


def refer(tensor: Tensor) -> None:
    """Hold a tensor as an array of numpy does: the collector knows nothing of it."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(tensor))


def let_go(tensor: Tensor) -> None:
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(tensor))


def in_variables() -> bool:
    tensor = torch.rand(8)
    twice = tensor
    refer(twice)
    seen = is_alone(tensor)
    let_go(tensor)
    assert is_alone(tensor)
    return seen


def in_a_cell() -> bool:
    tensor = torch.rand(8)

    def inner() -> Tensor:
        return tensor

    refer(tensor)
    seen = is_alone(inner())
    let_go(tensor)
    assert is_alone(tensor)
    return seen


def in_an_attribute() -> bool:
    module = torch.nn.Linear(2, 2)
    refer(module.weight)
    seen = is_alone(module.weight)
    let_go(module.weight)
    assert is_alone(module.weight)
    return seen


def in_a_generator() -> bool:
    def tensors() -> Iterator[Tensor]:
        tensor = torch.rand(8)
        yield tensor

    suspended = tensors()
    held = [next(suspended)]
    refer(held[0])
    seen = is_alone(held[0])
    let_go(held[0])
    assert is_alone(held[0])
    return seen


def in_a_running_generator() -> bool:
    def answers() -> Iterator[bool]:
        tensor = torch.rand(8)
        refer(tensor)
        yield is_alone(tensor)
        let_go(tensor)

    return any(list(answers()))


def in_a_global() -> bool:
    refer(_GLOBAL)
    seen = is_alone(_GLOBAL)
    let_go(_GLOBAL)
    assert is_alone(_GLOBAL)
    return seen


def in_the_locals_of_a_caller() -> bool:
    def called(tensor: Tensor) -> bool:
        return is_alone(tensor)

    mine = torch.rand(8)
    refer(mine)
    seen = called(mine)
    let_go(mine)
    assert called(mine)
    assert locals()["mine"] is mine
    assert called(mine)
    return seen


@pytest.mark.parametrize(
    "seen",
    [
        in_variables,
        in_a_cell,
        in_an_attribute,
        in_a_generator,
        in_a_running_generator,
        in_a_global,
        in_the_locals_of_a_caller,
    ],
)
def test_a_reference_that_python_cannot_show_is_found(seen):
    assert not seen()


@pytest.mark.parametrize("count", [2, 200])
def test_only_what_arrays_hold_is_left_out(count: int):
    tensors = [torch.rand(8) for _ in range(count)]
    arrays = [torch.rand(8).numpy(), tensors[0].numpy()]
    of_arrays = [it.base for it in arrays]
    found = held_by_python_alone([*tensors, *of_arrays])
    assert len(found) == count
    assert all(it is tensor for it, tensor in zip(found, tensors, strict=True))
