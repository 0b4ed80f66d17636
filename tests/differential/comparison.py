"""Steps by a plan beside the same steps without one.

Responsible for running both, with the same changes at the same moments, and for saying how they
compare: the same, torch's own error from both, or refused by memfit with a reason. Anything else is
a fault of memfit's and fails the test.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import memfit
from memfit.errors import MemfitError
from memfit.run.fitted import Fitted

STEPS = 4
TOLERANCE = 2e-5
"""Of equivalent plans, relative to the largest element."""


@dataclass
class Side:
    """One of the two, while it runs.

    Attributes:
        workload: Its workload.
        optimizer: The optimizer that runs.
        fitted: What runs its steps; ``None`` without a plan.
        step: Steps that ran.
        batch: The batch of the next step.
        undo: Runs at the end.
        kept: For changes to keep something in.
    """

    workload: memfit.Workload
    optimizer: torch.optim.Optimizer
    fitted: Fitted | None = None
    step: int = 0
    batch: Any = None
    undo: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    kept: dict[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> Any:
        return self.workload.model

    def run(self) -> Tensor:
        """One step: its loss."""
        if self.fitted is not None:
            return self.fitted.step(self.batch)
        workload = self.workload
        try:
            loss = workload.loss(self.model, self.batch)
            loss.backward()
            if workload.clip_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), workload.clip_grad_norm)
            self.optimizer.step()
            return loss.detach()
        finally:
            self.optimizer.zero_grad()
            self.model.zero_grad()


Change = Callable[[Side], None]
"""Called on both sides before each step but the first."""


@dataclass
class Run:
    """What one side did.

    Attributes:
        losses: Of the steps.
        error: What ended it.
        state: Parameters, buffers and optimizer state afterwards.
        seen: What the change kept in ``kept["seen"]``.
    """

    losses: list[Tensor]
    error: Exception | None
    state: dict[str, Tensor]
    seen: list[Any]


def compare(
    build: Callable[[], memfit.Workload],
    trace: Callable[[], memfit.Trace],
    change: Change,
    options: dict[str, Any],
) -> str:
    """Run both and say how they compare.

    Args:
        build: Makes the workload, the same each time.
        trace: Records one; once for all that are the same.
        change: What happens between steps.
        options: As in :func:`memfit.fit`.

    Returns:
        ``same``, or ``torch's own error`` or ``refused`` with what it says.
    """
    with warnings.catch_warnings():  # memfit's own of what left its plan, and what torch says of it
        warnings.simplefilter("ignore")
        return _compare(build, trace, change, options)


def _compare(
    build: Callable[[], memfit.Workload],
    trace: Callable[[], memfit.Trace],
    change: Change,
    options: dict[str, Any],
) -> str:
    plain = build()
    expected = _run(Side(plain, plain.optimizer(plain.model.parameters())), change)
    planned = build()
    try:
        recorded = trace()
        least = memfit.plan(recorded, "1B", **options).minimum_budget_bytes
        plan = memfit.plan(recorded, least, **options)
        fitted = memfit.fit(planned, plan=plan, **options)  # replans are held to them too
    except MemfitError as refusal:
        return _refused(refusal)
    kinds = {action.kind for action in fitted.plan.actions}
    assert kinds, "a plan that does nothing proves nothing"
    assert not kinds & set(options["forbid"])
    assert fitted.optimizer is not None
    found = _run(Side(planned, fitted.optimizer, fitted), change)
    if isinstance(found.error, MemfitError) and type(found.error) is not type(expected.error):
        return _refused(found.error)
    assert repr(found.error) == repr(expected.error)
    _require_same(expected, found, 0.0 if fitted.plan.promise == "exact" else TOLERANCE)
    return "same" if expected.error is None else f"torch's own error: {expected.error!r}"


def _refused(error: MemfitError) -> str:
    assert str(error), "a refusal says why"
    return f"refused: {error}"


def _run(side: Side, change: Change) -> Run:
    losses: list[Tensor] = []
    error = None
    side.batch = side.workload.batch
    with side.undo:
        try:
            for side.step in range(STEPS):
                if side.step:
                    change(side)
                torch.manual_seed(side.step)
                losses.append(side.run())
        except Exception as raised:  # noqa: BLE001 - whatever torch or a change raises
            error = raised
    if side.fitted is not None:
        side.fitted.close()
    return Run(losses, error, _state(side), side.kept.get("seen", []))


def _state(side: Side) -> dict[str, Tensor]:
    state = {name: value.clone() for name, value in side.model.state_dict().items()}
    for index, entry in side.optimizer.state_dict()["state"].items():
        for name, value in entry.items():
            if isinstance(value, Tensor):
                state[f"{index} {name}"] = value.clone()
    return state


def _require_same(expected: Run, found: Run, tolerance: float) -> None:
    assert len(found.losses) == len(expected.losses)
    for step, (loss, wanted) in enumerate(zip(found.losses, expected.losses, strict=True)):
        _require_close(f"the loss of step {step}", loss, wanted, tolerance)
    if expected.error is not None:
        return  # an optimizer may have been in the middle of its step
    assert found.state.keys() == expected.state.keys()
    for name, wanted in expected.state.items():
        _require_close(
            name, found.state[name], wanted, tolerance * (10 if name[0].isdigit() else 1)
        )
    assert len(found.seen) == len(expected.seen)
    for index, (seen, wanted) in enumerate(zip(found.seen, expected.seen, strict=True)):
        _require_close(
            f"what was seen {index}", torch.as_tensor(seen), torch.as_tensor(wanted), tolerance
        )


def _require_close(name: str, found: Tensor, wanted: Tensor, tolerance: float) -> None:
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype), name
    if not tolerance:
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True, msg=name)
        return
    scale = max(float(wanted.double().abs().nan_to_num().max()) if wanted.numel() else 0.0, 1e-3)
    error = (found.double() - wanted.double()).abs()
    both = ~(found.isnan() & wanted.isnan())
    assert bool((error[both] <= tolerance * scale).all()), (name, float(error[both].max()), scale)
