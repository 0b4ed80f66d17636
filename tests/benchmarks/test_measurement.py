"""How many rounds of steps are run in turn, by what the ones before them took."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from benchmarks.planners import measurement
from benchmarks.planners.measurement import ROUNDS_OF_SCATTER

Steps = list[Callable[[], Any]]


@pytest.fixture
def taking(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Steps]:
    """Steps that claim to take some seconds, the last of each from then on."""

    def steps(*seconds: list[float]) -> Steps:
        left = [list(each) for each in seconds]

        def next_of(which: int) -> float:
            return left[which].pop(0) if len(left[which]) > 1 else left[which][0]

        monkeypatch.setattr(measurement, "cpu_seconds", lambda step: next_of(step()))
        return [lambda which=which: which for which in range(len(seconds))]

    return steps


def test_rounds_that_agree_are_as_many_as_asked_for(taking: Callable[..., Steps]) -> None:
    times = measurement._in_turn(taking([15.0, 15.4], [17.0]), 2)
    assert times == [[15.0, 15.4], [17.0, 17.0]]


def test_a_disturbed_round_is_outvoted(taking: Callable[..., Steps]) -> None:
    eager, way = measurement._in_turn(taking([20.1, 15.0], [17.0]), 2)
    assert eager == [20.1, *[15.0] * (ROUNDS_OF_SCATTER - 1)]
    assert way == [17.0] * ROUNDS_OF_SCATTER


def test_short_steps_are_run_until_they_are_long_enough(taking: Callable[..., Steps]) -> None:
    eager, way = measurement._in_turn(taking([2.0], [2.0]), 3)
    assert len(eager) == len(way) == measurement.LEAST_SECONDS / 2.0
