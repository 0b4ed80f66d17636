"""What calls add to memory, as far as was seen: fakes are asked of nothing that was."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from memfit.options import Options
from memfit.plan.items_apart import ItemsMixedError
from memfit.run.script import pieces as module
from memfit.run.script.call_growth import CallGrowth
from memfit.run.script.pieces import PiecesOfBatch
from memfit.run.script.planned_step import key_of
from memfit.run.script.request import FitRequest
from memfit.track import cpu

MIB = 1 << 20


def recorder(*made: tuple[str, int, int]) -> Any:
    """Of ops that make one allocation each, which lives until the next one.

    Args:
        made: Phase of each, what it makes, and what it takes inside.
    """
    ledger = SimpleNamespace(
        now=len(made),
        producer=[None, *range(len(made))],
        bytes=[9 * MIB, *(size for _, size, _ in made)],
        ranges=lambda i: [[0, len(made)]] if i == 0 else [[i - 1, i]],
    )
    ops = [SimpleNamespace(phase=phase) for phase, _, _ in made]
    return SimpleNamespace(ledger=ledger, ops=ops, scratch=[inside for _, _, inside in made])


def observation(*made: tuple[str, int, int]) -> Any:
    return SimpleNamespace(way=None, may_round=False, device_kind="cpu", recorder=recorder(*made))


STEP = (("forward", 2 * MIB, MIB), ("backward", 5 * MIB, 0), ("optimizer", 8 * MIB, 0))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls of which fakes were asked."""
    found: list[Any] = []

    def call_bytes(model: nn.Module, *inputs: Any) -> None:
        found.append(inputs)

    monkeypatch.setattr(module, "call_bytes", call_bytes)
    monkeypatch.setattr(module, "items_apart", refused)
    return found


def refused(*_: Any) -> None:
    raise ItemsMixedError("it may not run in pieces")


def test_an_evaluation_adds_as_much_as_the_forward_of_a_step_and_a_step_as_all_of_it():
    model, growth = nn.Linear(4, 4), CallGrowth()
    inputs = ((torch.randn(8, 4),), {})
    step = key_of(model, inputs)
    growth.recorded(step, recorder(*STEP))
    larger = key_of(model, ((torch.randn(16, 4),), {}))
    assert growth.of_step(step) == 5 * MIB
    assert growth.of_step(larger) == 4 * 5 * MIB
    with torch.no_grad():
        evaluation = key_of(model.eval(), inputs)
        other = key_of(model, ((torch.randn(8, 4, 1),), {}))
    assert growth.of_evaluation(evaluation) == 3 * MIB
    assert growth.of_step(evaluation) is None
    assert growth.of_evaluation(other) is None


@pytest.mark.parametrize("recorded", [0, 1])
def test_fakes_are_asked_of_an_evaluation_only_where_no_step_was_seen(
    recorded: int, asked: list[Any]
):
    model, inputs = nn.Linear(4, 4), ((torch.randn(8, 4),), {})
    of_batch = PiecesOfBatch(FitRequest("1GiB", Options(allow="equivalent")))
    if recorded:
        of_batch.recorded(key_of(model, inputs), observation(*STEP))
    with torch.no_grad():
        key = key_of(model.eval(), inputs)
        with of_batch.evaluation(key, model, inputs, 0, 64 * MIB):
            model(*inputs[0])
        assert len(asked) == 1 - recorded
        with of_batch.evaluation(key, model, inputs, 62 * MIB, 64 * MIB):  # that is too much
            model(*inputs[0])
    assert len(asked) == 1


def test_an_evaluation_that_took_more_than_a_step_is_known_by_what_it_took():
    class Doubling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.weight).repeat(1 if self.training else 1 << 10)

    assert cpu.start() is None
    model, inputs = Doubling(), ((torch.randn(1 << 10),), {})
    of_batch = PiecesOfBatch(FitRequest("1GiB", Options(allow="equivalent")))
    of_batch.recorded(key_of(model, inputs), observation(("forward", 4 << 10, 0)))
    with torch.no_grad():
        key = key_of(model.eval(), inputs)
        with of_batch.evaluation(key, model, inputs, 0, 64 * MIB):
            model(*inputs[0])
    seen = of_batch._seen.of_evaluation(key)
    assert seen is not None
    assert 4 * MIB <= seen < 5 * MIB
