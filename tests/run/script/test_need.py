"""Whether the passes of a loop need room that others take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

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
