"""Whether the passes of a loop need room that others take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memfit.run.script import need as needs
from memfit.run.script.need import NeedOfRoom
from memfit.run.script.planned_step import PlannedStep


def planned(predicted: int, recorded: int) -> Any:
    """A step within 1,000 bytes."""
    plan: Any = SimpleNamespace(
        fits=predicted <= 1000,
        budget_bytes=1000,
        planned=SimpleNamespace(predicted_peak_bytes=predicted),
    )
    step: Any = None
    return PlannedStep(
        (), step, plan, 1, undoes=False, outside_bytes=0, recorded_peak_bytes=recorded
    )


@pytest.mark.parametrize(
    ("predicted", "recorded", "keeps"),
    [(900, 0, True), (1100, 0, False), (1100, 900, True), (1100, 1050, False)],
)
def test_a_loop_that_keeps_the_budget_as_recorded_needs_no_room_of_others(
    predicted: int,
    recorded: int,
    keeps: bool,  # noqa: FBT001
):
    plans: Any = [planned(900, 0), planned(predicted, recorded)]
    known: Any = None
    need = NeedOfRoom(torch.device("cpu"), plans, known, known, lambda: False)
    assert need.keeps() is keeps


@pytest.mark.parametrize(("steps", "taken"), [(1, 1200), (2, 800)])
def test_what_came_to_be_in_the_first_recorded_step_is_there_in_the_second(
    monkeypatch: pytest.MonkeyPatch, steps: int, taken: int
):
    """The state of two optimizers, say: the next recorded step took more than there was."""
    live, asked = iter([100, 500]), []
    monkeypatch.setattr(needs, "live_bytes", lambda _: next(live))
    seen: Any = SimpleNamespace(steps=steps, peak_bytes=800)

    def is_tight(_: torch.device, peak_bytes: int) -> bool:
        asked.append(peak_bytes)
        return peak_bytes > 900

    updates: Any = SimpleNamespace(is_tight=is_tight)
    plans: Any = []
    need = NeedOfRoom(torch.device("cpu"), plans, updates, seen, lambda: False)
    assert need.is_of_state() is (taken > 900)
    assert asked == [taken]
