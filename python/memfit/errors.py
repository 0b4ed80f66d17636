"""Every exception and warning that memfit raises on purpose.

Responsible for the class hierarchy and the facts each error carries. Not responsible for how an
error is shown or which exit code it becomes: the program does that.

One base class, so that ``except memfit.MemfitError`` catches all of them. A message is lower case,
names the thing in backticks with its value, and says what to do next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

StepPhase = Literal["build", "forward", "backward", "optimizer"]
"""Part of a step in which the user's own code can fail."""


class MemfitError(Exception):
    """Base class of every error that memfit raises on purpose."""


class UsageError(MemfitError):
    """The request itself is wrong: a bad target, a bad setting, a missing dependency."""


class WorkloadError(MemfitError):
    """The user's own code failed; ``__cause__`` is its exception.

    Attributes:
        phase: Part of the step that failed.
    """

    def __init__(self, message: str, *, phase: StepPhase) -> None:
        """Create the error.

        Args:
            message: What failed, for a person.
            phase: Part of the step that failed.
        """
        super().__init__(message)
        self.phase: StepPhase = phase


class CaptureError(MemfitError):
    """A step ran, or could run, but could not be recorded as a trace."""


class BudgetError(MemfitError):
    """A budget cannot be understood or is below what the static tensors take."""


class DoesNotFit(MemfitError):  # noqa: N818 - an answer rather than a fault; reads as `except DoesNotFit`
    """No allowed plan brings the step under the budget.

    Attributes:
        minimum_peak_bytes: Lowest peak that any allowed plan reached.
        minimum_budget_bytes: The budget to ask for: that peak, and what is kept free for what the
            prediction is not sure of.
        plan: The plan that reaches it, or ``None`` when there is none.
    """

    def __init__(
        self,
        message: str,
        *,
        minimum_peak_bytes: int = 0,
        minimum_budget_bytes: int = 0,
        plan: Any = None,
    ) -> None:
        """Create the error.

        Args:
            message: The arithmetic, for a person.
            minimum_peak_bytes: Lowest peak that any allowed plan reached.
            minimum_budget_bytes: The smallest budget to ask for; by default that peak.
            plan: The plan that reaches it.
        """
        super().__init__(message)
        self.minimum_peak_bytes = minimum_peak_bytes
        self.minimum_budget_bytes = minimum_budget_bytes or minimum_peak_bytes
        self.plan = plan


@dataclass(slots=True, frozen=True)
class Holder:
    """Who held a part of the memory that was in use.

    Attributes:
        name: What it was, for a person.
        bytes: Bytes.
        blocks: Allocations.
    """

    name: str
    bytes: int
    blocks: int


class OutOfBudget(MemfitError, RuntimeError):  # noqa: N818 - an answer rather than a fault; reads as `except OutOfBudget`
    """A guard refused memory; ``__cause__`` is torch's own error, which is a `RuntimeError` too.

    Attributes:
        device: Where.
        budget_bytes: The budget.
        in_use_bytes: What was in use when the request came.
        requested_bytes: What was asked for.
        by_category: What was in use, divided as far as it is known.
        holders: The largest holders of it, the largest first.
        plan: A plan that would fit; ``None`` where none is known.
    """

    def __init__(
        self,
        message: str,
        *,
        device: str = "cpu",
        budget_bytes: int = 0,
        in_use_bytes: int = 0,
        requested_bytes: int = 0,
        by_category: Mapping[str, int] | None = None,
        holders: tuple[Holder, ...] = (),
        plan: Any = None,
    ) -> None:
        """Create the error.

        Args:
            message: The arithmetic, for a person.
            device: Where.
            budget_bytes: The budget.
            in_use_bytes: What was in use when the request came.
            requested_bytes: What was asked for.
            by_category: What was in use, divided as far as it is known.
            holders: The largest holders of it.
            plan: A plan that would fit.
        """
        super().__init__(message)
        self.device = device
        self.budget_bytes = budget_bytes
        self.in_use_bytes = in_use_bytes
        self.requested_bytes = requested_bytes
        self.by_category = dict(by_category or {})
        self.holders = holders
        self.plan = plan


class LeaseError(MemfitError):
    """Memory was not leased, or a lease cannot be changed.

    Attributes:
        reason: Why, for programs: ``above_capacity``, ``no_room``, ``timed_out``, ``contended``,
            ``already_waiting``, ``unknown_device``, ``not_recorded`` (the broker's disk is full),
            ``bad_request``, ``ended``, ``no_broker``, ``broker_away``, ``broken``, ``forked``,
            ``in_use`` (a guarded lease that shall shrink below what is live).
        device: Where there is not enough, if it is that.
        asked_bytes: What was asked for there.
        largest_bytes: The largest that could have been had there.
    """

    def __init__(
        self,
        message: str,
        reason: str = "",
        device: str | None = None,
        asked_bytes: int | None = None,
        largest_bytes: int | None = None,
    ) -> None:
        """Create the error.

        Args:
            message: What is wrong, for a person.
            reason: The same for programs.
            device: Where.
            asked_bytes: What was asked for there.
            largest_bytes: The largest that could have been had there.
        """
        super().__init__(message)
        self.reason = reason
        self.device = device
        self.asked_bytes = asked_bytes
        self.largest_bytes = largest_bytes


class ReplayError(MemfitError):
    """A dropped tensor cannot be computed again with the value it had."""


class TraceFileError(MemfitError):
    """A trace or plan file is damaged, truncated, or of a newer schema."""


class SnapshotError(MemfitError):
    """A file is no CUDA memory snapshot, or a damaged one; the message says what it is."""


class CheckpointError(MemfitError):
    """A file of weights cannot be read, or does not hold the weights of the model."""


class OffloadError(MemfitError):
    """A tensor could not be written elsewhere, or did not come back as it was.

    Raised before anything is computed from wrong bytes: no gradient is wrong, none is whole either.
    """


class ParkError(MemfitError):
    """A model is parked, or could not be parked or woken; either way no byte of it is lost.

    Attributes:
        reason: Why, for programs: ``parked`` (used while it is), ``unsupported``, ``in_use``,
            ``aliased``, ``replaced``, ``no_space``, ``transfer``, ``folder``, ``source``,
            ``changed``, ``no_memory``, ``not_released``, ``driver``, ``layout``, ``closed``,
            ``forked``, ``interrupted``.
        tensor: The parameter or module buffer that it is about, if it is one.
    """

    def __init__(self, message: str, reason: str = "", tensor: str | None = None) -> None:
        """Create the error.

        Args:
            message: What is wrong, for a person.
            reason: The same for programs.
            tensor: The parameter or module buffer that it is about.
        """
        super().__init__(message)
        self.reason = reason
        self.tensor = tensor


class PoolError(MemfitError):
    """A pool has no such model, or no room for it.

    Attributes:
        reason: Why, for programs: ``too_large``, ``timed_out``, ``contended``, ``not_woken``,
            ``stuck``, ``unknown``, ``name_taken``, ``in_use``, ``forked``, ``lease_ended``.
        wanted_bytes: What the model and its activations take, if it can never fit.
        available_bytes: What it could have had.
    """

    def __init__(
        self,
        message: str,
        reason: str = "",
        wanted_bytes: int | None = None,
        available_bytes: int | None = None,
    ) -> None:
        """Create the error.

        Args:
            message: What is wrong, for a person.
            reason: The same for programs.
            wanted_bytes: What the model and its activations take.
            available_bytes: What it could have had.
        """
        super().__init__(message)
        self.reason = reason
        self.wanted_bytes = wanted_bytes
        self.available_bytes = available_bytes


class DivergenceWarning(UserWarning):
    """The running model left the recorded step; tensors are kept instead of dropped."""


class TorchVersionWarning(UserWarning):
    """The installed torch is newer than those memfit was tested with, or one of several."""


class NotCompiledWarning(UserWarning):
    """A step that was asked to be compiled runs eager, or runs compiled above its budget."""


class RecoveryWarning(UserWarning):
    """A step was refused memory, put back, and run by a tighter plan."""


class NoBrokerWarning(UserWarning):
    """No broker runs, so a lease holds nothing back from other processes."""


class PoolWarning(UserWarning):
    """A use of a pool took more than it counted with, so the pool may have exceeded its budget."""


class MemoryGrowthWarning(UserWarning):
    """Each iteration of a loop keeps more bytes than the one before."""


def first_line(error: BaseException) -> str:
    """What an error says, without its hints; its kind where it says nothing.

    Args:
        error: The error.
    """
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
