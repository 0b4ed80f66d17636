"""Running a refused step again, by a tighter plan.

Responsible for one step under a budget: refused, everything it changed put back, planned again,
retried. Not responsible for what is put back (:mod:`memfit.run.step_backup`), for refusing
(:mod:`memfit.guard.limit`) nor for planning.

Why that is sound: until the optimizer runs, a step changes gradients, module buffers and random
states only. Gradients are thrown away, the others put back, so the retry computes what the first
try would have; by an exact plan, bit for bit.
"""

from __future__ import annotations

import gc
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from memfit import _native
from memfit.answers import CompiledPlan, Plan
from memfit.errors import BudgetError, OutOfBudget, RecoveryWarning
from memfit.guard.limit import Limit, limit_on
from memfit.measure.peak import static_tensors, storage_bytes
from memfit.run.step_backup import BeforeStep, Buffers
from memfit.workload import Workload

MAX_RETRIES = 3
"""Times one step is tried again."""

Within = Callable[[Any, int], Plan]
"""Plans a step with a batch for a number of bytes, whether that fits or not."""


@dataclass(slots=True)
class Counts:
    """What became of the steps.

    Attributes:
        refused_attempts: Attempts at a step that were refused.
        recovered_steps: Steps that ran to their end after one.
    """

    refused_attempts: int = 0
    recovered_steps: int = 0


class Driven(Protocol):
    """What runs the steps: a :class:`memfit.Fitted`."""

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer, once there is one."""

    @property
    def plan(self) -> Plan | CompiledPlan:
        """The plan that steps run by."""

    @property
    def has_begun_update(self) -> bool:
        """Whether the optimizer has begun, in the last step."""

    def place_state(self) -> None:
        """Lay the model and the optimizer's state where the plan has them between steps."""

    def step_once(self, batch: Any) -> Any:
        """Run one step."""

    def adopt(self, batch: Any, plan: Plan) -> None:
        """Run steps with such a batch by this plan."""


class Recovery:
    """Runs the steps of a fitted workload under a budget.

    Attributes:
        counts: What became of the steps.
    """

    def __init__(
        self, workload: Workload, budget_bytes: int, within: Within, limit: Limit | None = None
    ) -> None:
        """Prepare; no budget is on before the first step.

        Args:
            workload: The workload.
            budget_bytes: The budget.
            within: Plans the step for fewer bytes.
            limit: Holds it, where its budget may change; by default one of its own.
        """
        self.counts = Counts()
        self._workload = workload
        self._within = within
        self._limit = limit or _limit(workload, budget_bytes)
        self._buffers = Buffers(workload.model)

    def close(self) -> None:
        """End the budget, and give back what is kept for the next step."""
        self._limit.end()

    def step(self, fitted: Driven, batch: Any) -> Any:
        """Run one step, again if need be.

        Args:
            fitted: Runs it.
            batch: The batch.

        Returns:
            What the step returns.

        Raises:
            OutOfBudget: It was refused and cannot be run again, or was refused every time; a note
                says which.
            BudgetError: More than the budget is taken before the step.
        """
        refusals: list[OutOfBudget] = []
        while True:
            before = BeforeStep(self._buffers, self._workload.model, fitted.optimizer)
            try:
                result = self._attempt(fitted, batch)
            except BudgetError as error:
                if not refusals:
                    raise
                refusals[-1].add_note(f"it cannot be tried again: {error}")
                raise refusals[-1] from None
            except RuntimeError as error:
                refused = self._limit.refused(error)
                if refused is None:
                    raise
                self.counts.refused_attempts += 1
                _let_go(error)
                refusals.append(refused)
                tighter = self._tighter(fitted, batch, before, refusals)
                if tighter is None:
                    raise refused from error
            else:
                before.completed()
                if refusals:
                    self._recovered(refusals[0], fitted.plan)
                return result
            fitted.adopt(batch, tighter)

    def _attempt(self, fitted: Driven, batch: Any) -> Any:
        """One try. The rest of the program may allocate what it likes between steps."""
        fitted.place_state()  # the model may be more than the budget before its parts go elsewhere
        self._limit.set()
        try:
            return fitted.step_once(batch)
        finally:
            self._limit.loosen()

    def _tighter(
        self, fitted: Driven, batch: Any, before: BeforeStep, refusals: list[OutOfBudget]
    ) -> Plan | None:
        """The plan to try next; ``None`` where there is none, and a note says why."""
        refused = refusals[-1]
        reason = before.restore(has_begun=fitted.has_begun_update)
        made = self._within(batch, self._target(fitted, batch, refused))
        refused.plan = made if made.fits else None
        if reason:
            refused.add_note(
                f"the step cannot be run again, and did not leave everything as before: {reason}"
            )
            return None
        refused.add_note("everything is as before the step")
        if not made.fits:
            refused.add_note(
                f"no allowed plan has a peak of {_native.bytes_text(made.budget_bytes)} or less: "
                f"the smallest is {_native.bytes_text(made.minimum_peak_bytes)}"
            )
            return None
        if len(refusals) > MAX_RETRIES:
            refused.add_note(f"it was tried {len(refusals)} times, each by a tighter plan")
            return None
        return made

    def _target(self, fitted: Driven, batch: Any, refused: OutOfBudget) -> int:
        """Peak that a plan must have so that the step fits beside what else is taken."""
        budget_bytes = self._limit.budget_bytes
        peak_bytes = fitted.plan.planned.predicted_peak_bytes
        short = refused.in_use_bytes + refused.requested_bytes - refused.budget_bytes
        static = static_tensors(replace(self._workload, batch=batch), fitted.optimizer)
        besides = self._limit.in_use_bytes() - storage_bytes(static, self._limit.device_type)
        return max(0, min(peak_bytes - max(short, 1), budget_bytes - max(besides, 0)))

    def _recovered(self, refused: OutOfBudget, plan: Plan | CompiledPlan) -> None:
        self.counts.recovered_steps += 1
        peak_bytes = plan.planned.predicted_peak_bytes
        warnings.warn(
            f"a step was refused {_native.bytes_text(refused.requested_bytes)} at "
            f"{_native.bytes_text(refused.in_use_bytes)} in use, within a budget of "
            f"{_native.bytes_text(refused.budget_bytes)}; it ran, and the next will, by a plan "
            f"with a peak of {_native.bytes_text(peak_bytes)}",
            RecoveryWarning,
            stacklevel=4,
        )


def _limit(workload: Workload, budget_bytes: int) -> Limit:
    """The budget on the device of the model."""
    parameter = next(workload.model.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    return limit_on(device, budget_bytes)


def _let_go(error: BaseException) -> None:
    """Free what the frames of a failed step hold; their lines stay in the traceback.

    On CUDA the caching allocator gives it back, too: what it keeps counts as taken.
    """
    chain: BaseException | None = error
    while chain is not None:
        traceback.clear_frames(chain.__traceback__)
        chain = chain.__context__
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
