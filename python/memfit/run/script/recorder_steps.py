"""Steps that run as they were recorded, where that takes less than any plan.

A recorder keeps nothing in memory that backward needs, whatever it is: it asks no proof, and no op
to be repeatable. So it may keep a budget that no plan does. Responsible for whether steps may run
so, and for such a pass. Not responsible for the recording (:mod:`memfit.run.script.observed`) nor
for the choice (:mod:`memfit.run.script.planned_step`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from memfit.options import HOST
from memfit.run.script.passes import Kind, ObservedPass
from memfit.run.script.place import strays_to
from memfit.run.script.step_updates import live_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn
    from torch.optim import Optimizer

    from memfit.run.script.observed import Observation
    from memfit.run.script.planned_step import Call, PlannedStep
    from memfit.run.script.request import FitRequest

AS_RECORDED = "steps that no plan fits run as recorded, what is saved in files until it is used"
"""What is said at the end of steps that run so as nothing else fits."""

THOUGH_A_PLAN_FITS = "some steps run as recorded, what is saved in files until it is used"
"""What is said where a plan fits, which the step may leave, or another model lacks room."""


_OF_SPARE = 3 / 4
"""Part of what a recorded step left of the budget in which saved tensors stay in memory: no two
steps that run so need be alike."""

_WORTH = 1 / 32
"""Part of the budget that is worth it."""


class AsRecordedPass(ObservedPass):
    """A pass on the CPU that keeps what autograd saves as the recorder does, or in memory.

    Nothing is to be learnt of it, and nothing is written down.
    """

    kind: Kind = "planned"

    @staticmethod
    def of(
        planned: PlannedStep,
        model: nn.Module,
        call: Call,
        optimizers: Iterable[Optimizer],
        request: FitRequest,
        budget_bytes: int,
        more_bytes: int,
    ) -> AsRecordedPass:
        """Begin one.

        Args:
            planned: The recorded step.
            model: The model.
            call: What is about to be called in it.
            optimizers: The optimizers that update it.
            request: Where saved tensors may go.
            budget_bytes: The budget; 0 where that is not known.
            more_bytes: What the script holds more than when it was recorded.
        """
        device = torch.device("cpu")
        folder = strays_to(request, device.type)
        what = (device, model, call, optimizers)
        spare = budget_bytes - planned.recorded_peak_bytes - max(more_bytes, 0)
        planned.spare_bytes = int(_OF_SPARE * spare) if spare > budget_bytes * _WORTH else 0
        most = live_bytes(device) + planned.spare_bytes if planned.spare_bytes else 0
        where = (planned.step.way, budget_bytes, folder)
        running = AsRecordedPass(*what, *where, most_bytes=most)
        running.undoes, planned.left = planned.undoes, []
        planned.waits_for_graphs = True
        return running


def said_of(planned: PlannedStep) -> str:
    """What is said at the end of a step that runs as recorded.

    Args:
        planned: The step.
    """
    return AS_RECORDED if planned.runs_as_recorded else THOUGH_A_PLAN_FITS


def recorded_peak_bytes(observation: Observation, request: FitRequest, device: torch.device) -> int:
    """What a recorded step took; 0 where steps may not run so, for want of a place, say.

    Args:
        observation: The recording.
        request: Where saved tensors may go.
        device: Where the model is.
    """
    place = strays_to(request, device.type)
    may_go = place not in ("", HOST) and "offload" not in request.options.forbid
    if device.type != "cpu" or not may_go or observation.spill_problem:
        return 0
    return observation.peak_bytes
