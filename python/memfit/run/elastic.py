"""A fitted workload that lives within a lease, however large that is at the moment.

Responsible for what happens between two steps when the lease shall shrink or could grow: another
plan, memory given back, the lease resized. Not responsible for plans (the engine), for carrying
them out (:mod:`memfit.run.fitted`) nor for who gets what (the broker).

Only between steps, because there nothing of a step is live: whatever plan comes next finds what it
expects. A request to shrink that comes within a step is answered when that step is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from memfit._native import bytes_text
from memfit.answers import Plan
from memfit.errors import LeaseError, UsageError
from memfit.guard import overhead
from memfit.guard.leased import LeaseGuard, leased_limit
from memfit.guard.limit import Limit
from memfit.share.lease import Lease
from memfit.tensors.heap import trim
from memfit.workload import Workload

PLAN_SECONDS = 5.0
"""Longest that planning for a smaller or larger lease takes: the broker asks for about ten."""

GROW_EVERY = 0.25
"""Seconds between two tries to have more again."""

PARTS = 16
"""Where not all is free, so many parts of the lease are taken: few sizes, so few plans."""

Planner = Callable[[int, float], Plan]
"""Plans the step for a number of bytes, within about so many seconds."""


class Driven(Protocol):
    """What carries the plans out: a :class:`memfit.Fitted`."""

    def place_state(self) -> None:
        """Lay the model and the optimizer's state where the plan has them between steps."""

    def follow(self, plan: Plan) -> None:
        """Run the steps that come by this plan."""


class Elastic:
    """The lease of a fitted workload, and how it has changed.

    Attributes:
        lease: The lease.
        device: Where the step runs, as the broker names it.
        besides_bytes: What the process takes there besides the step.
        budget_bytes: What the step may take now.
        shrunk: How often it has made room for another.
        grown: How often it has taken room again.
        declined: How often it could not make room.
    """

    def __init__(self, lease: Lease, workload: Workload) -> None:
        """Know what the lease leaves for the step.

        Args:
            lease: The lease; it has to be held.
            workload: The step.

        Raises:
            UsageError: The lease has nothing on the step's device, or is too small for the process.
        """
        self.lease = lease
        self.device = device_of(workload)
        held = lease.claims.get(self.device)
        if held is None:
            message = f"the step runs on `{self.device}`, and {lease} holds nothing there"
            raise UsageError(message)
        self.besides_bytes = besides_of(workload, self.device)
        if held <= self.besides_bytes:
            message = (
                f"the lease holds {bytes_text(held)} on `{self.device}`, and this process takes "
                f"{bytes_text(self.besides_bytes)} there in addition to the step\nhint: lease more"
            )
            raise UsageError(message)
        self.budget_bytes = held - self.besides_bytes
        self.shrunk = self.grown = self.declined = 0
        self._whole = held
        self._held = held
        self._tried = time.monotonic()
        self._ratios: dict[int, float] = {}
        self._fitted: Driven | None = None
        self._planner: Planner | None = None
        self._guard = LeaseGuard({})

    def hold(self) -> Limit:
        """A budget for the step's device that follows the lease, for :mod:`memfit.guard`.

        Returns:
            The budget, which is not set yet.
        """
        limit = leased_limit(self.device, self._held)
        self._guard = LeaseGuard({self.device: limit})
        return limit

    def drive(self, fitted: Driven, made: Plan, planner: Planner) -> None:
        """Follow the lease from the next step on.

        Args:
            fitted: What runs the steps.
            made: Its plan.
            planner: Makes others.
        """
        self._fitted, self._planner = fitted, planner
        self._ratio = float(made.predicted_step_ratio)
        self._made = made

    def between_steps(self) -> None:
        """Answer a request to shrink, or try to have more again."""
        try:
            asked = self.lease.asked
            if asked is not None:
                self._make_room(asked)
            elif self._held < self._whole:
                self._grow()
        except LeaseError as error:
            # A child of a fork trains as it is; a broker that is away will ask again.
            if error.reason not in {"forked", "broken", "gave_up"}:
                raise

    def _make_room(self, asked: Mapping[str, int]) -> None:
        target = asked.get(self.device, 0)
        if target >= self._held:  # it is asked for another device's bytes
            self.lease.decline()
            return
        made = self._plan(target - self.besides_bytes)
        if made is not None and not made.fits:
            # All that it can give: the broker asks somebody else for the rest, or again.
            target = made.minimum_budget_bytes + self.besides_bytes
            made = self._plan(target - self.besides_bytes) if target < self._held else None
        if made is None or not made.fits:
            self._decline()
            return
        before = self._made
        self._follow(made)
        # State that the plan keeps elsewhere has to be there before its bytes are given back.
        self._fitted_now().place_state()
        overhead.release(self.device)
        try:
            self._resize(target)
        except LeaseError as error:
            if error.reason not in {"in_use", "already_waiting"}:
                raise
            self._follow(before)
            self._decline()
            return
        self.shrunk += 1

    def _decline(self) -> None:
        self.declined += 1
        self.lease.decline()

    def _grow(self) -> None:
        now = time.monotonic()
        if now - self._tried < GROW_EVERY:
            return
        self._tried = now
        target = self._whole
        if not self._is_worth(target):
            return
        try:
            self._resize(target)
        except LeaseError as error:
            part = max(self._whole // PARTS, 1)
            target = self._held + (error.largest_bytes or 0) // part * part
            if error.reason != "no_room" or target == self._held or not self._is_worth(target):
                return
            try:
                self._resize(target)
            except LeaseError:
                return  # somebody was faster
        made = self._plan(self.budget_bytes)
        if made is not None and made.fits:
            self._follow(made)
        self.grown += 1

    def _is_worth(self, target: int) -> bool:
        """Whether a plan for so much is faster than the one that runs."""
        if target not in self._ratios:
            made = self._plan(target - self.besides_bytes)
            fits = made is not None and made.fits
            self._ratios[target] = float(made.predicted_step_ratio) if made and fits else 1e9
        return self._ratios[target] < self._ratio

    def _plan(self, budget_bytes: int) -> Plan | None:
        if self._planner is None or budget_bytes <= 0:
            return None
        return self._planner(budget_bytes, PLAN_SECONDS)

    def _follow(self, made: Plan) -> None:
        self._fitted_now().follow(made)
        self._ratio = float(made.predicted_step_ratio)
        self._made = made

    def _fitted_now(self) -> Driven:
        assert self._fitted is not None, "asked for only between its steps"
        return self._fitted

    def _resize(self, size: int) -> None:
        claims = {**self.lease.claims, self.device: size}
        with self._guard.following({self.device: self._held}, claims):
            self.lease.resize(claims)
        self._held = size
        self.budget_bytes = size - self.besides_bytes


def device_of(workload: Workload) -> str:
    """The broker's name for where a step runs."""
    device = next((p.device for p in workload.model.parameters()), torch.device("cpu"))
    if device.type != "cuda":
        return "host"
    return f"cuda:{torch.cuda.current_device() if device.index is None else device.index}"


def besides_of(workload: Workload, device: str) -> int:
    """Bytes that this process takes on a device besides what a step knows of."""
    if device != "host":
        return overhead.expected(device)
    from memfit.measure.peak import static_tensors, storage_bytes

    trim()
    given = workload.optimizer
    optimizer = given if isinstance(given, torch.optim.Optimizer) else None
    known = storage_bytes(static_tensors(workload, optimizer))
    return max(overhead.resident() - known, 0)
