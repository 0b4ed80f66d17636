"""Offloaded parameters used between steps where there is no room for them: which go again."""

from __future__ import annotations

import pytest
import torch
from test_offload_parameters import (
    NOTHING,
    WEIGHT,
    _any_folder,  # noqa: F401 - a fixture
    build,
    plan,
    same,
)

from memfit.apply.offload.parameters import BEFORE_RETURN
from memfit.measure.peak import storage_bytes
from memfit.run.fitted import Fitted

pytestmark = [pytest.mark.offloads_parameters, pytest.mark.usefixtures("_any_folder")]


@pytest.fixture(autouse=True)
def _no_room():
    def lacks(_size: int) -> bool:
        return True

    BEFORE_RETURN.append(lacks)
    yield
    BEFORE_RETURN.remove(lacks)


@pytest.fixture
def fitted():
    workload = build()
    with Fitted(workload, plan(workload, fuse=True, room=2 * WEIGHT)) as running:
        running.step()
        yield running


def weights(fitted):
    return [it for it in fitted.workload.model.parameters() if it.ndim > 1]


@pytest.mark.parametrize("look", [lambda p: p.norm().item(), lambda p: (p @ p).sum().item()])
def test_what_is_computed_with_goes_when_others_come(fitted, look):
    for matrix in weights(fitted):
        look(matrix)
        assert storage_bytes([matrix]) == WEIGHT
    assert storage_bytes(weights(fitted)) <= 3 * WEIGHT, "the room of the plan, and the last"


GIVEN = {
    "a pointer": lambda p: p.data_ptr(),
    "a pointer after a look": lambda p: (p.norm(), p.data_ptr()),
    "a pointer of a view that is gone": lambda p: p.detach().data_ptr(),
    "a pointer of an array that is gone": lambda p: p.detach().numpy().ctypes.data,
    "a pointer of a transposed one": lambda p: (p.norm(), p.t().data_ptr()),
    "a pointer of the data": lambda p: p.data.data_ptr(),
    "a view": lambda p: p.detach(),
}


@pytest.mark.parametrize("given", GIVEN.values(), ids=list(GIVEN))
def test_what_is_given_away_stays_until_the_next_step(fitted, given):
    kept = [given(matrix) for matrix in weights(fitted)]
    assert storage_bytes(weights(fitted)) == WEIGHT * len(kept)


def test_what_a_graph_accumulates_into_goes_once_nothing_of_it_is_saved(fitted):
    """As of the loss of the step before, which scripts mostly hold."""
    loss = sum(matrix.square().sum() for matrix in weights(fitted))
    loss.backward()
    fitted.step()
    for matrix in weights(fitted):
        matrix.norm().item()
    assert storage_bytes(weights(fitted)) <= 3 * WEIGHT
    assert loss.grad_fn is not None


@pytest.mark.parametrize("frozen", [False, True])
def test_a_graph_of_others_finds_what_it_saved(fitted, frozen):
    found = weights(fitted)
    for matrix in found if frozen else ():
        matrix.requires_grad_(requires_grad=False)
    given = torch.ones(3, found[0].shape[1], requires_grad=True)
    made = sum(torch.nn.functional.linear(given, matrix).sum() for matrix in found)
    for matrix in found:
        matrix.norm().item()
    made.backward()
    assert given.grad is not None
    expected = sum(matrix.sum(0) for matrix in found).detach()
    assert torch.allclose(given.grad, expected.expand_as(given.grad), rtol=1e-4, atol=1e-4)


def test_a_graph_finds_what_it_saved(fitted):
    found = weights(fitted)
    for matrix in found:
        matrix.norm().item()
    sum(matrix.square().sum() for matrix in found).backward()
    assert all(torch.equal(matrix.grad, 2 * matrix) for matrix in found)


def test_what_is_written_one_after_another_is_written():
    workloads = build(), build()
    plans = NOTHING, plan(workloads[1], fuse=True, room=2 * WEIGHT)
    results = []
    for workload, made in zip(workloads, plans, strict=True):
        with Fitted(workload, made) as fitted:
            torch.manual_seed(0)
            for _ in range(3):
                fitted.step()
                with torch.no_grad():
                    for parameter in workload.model.parameters():
                        parameter.mul_(0.9).add_(0.01)
        results.append([it.detach().clone() for it in workload.model.parameters()])
    assert same(*results)
