"""Whether a plan keeps its word: real steps with and without it, compared.

Responsible for running both from the same state, comparing loss, gradients, parameters and module
buffers bit for bit, measuring both peaks, and timing both in turn. Not responsible for predictions
or for showing the result.

One model is alive at a time. The peak and time passes run after the comparison has let go of the
reference gradients, so what is measured is a step and nothing else.
"""

from __future__ import annotations

import contextlib
import gc
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from memfit.apply.executor import NARROW_STATE
from memfit.measure import cpu_seconds_in_turn, measure_peak, static_tensors
from memfit.run.fitted import Fitted
from memfit.tensors.narrow_parameters import own_type, widen
from memfit.track import cpu
from memfit.verify.approximation import (
    approximation,
    batch_noise,
    drawn_batches,
    idle_parameters,
    loss_of_batch,
    may_be_drawn,
    output_error,
    rounding_spread,
    update_error,
)
from memfit.weights.in_eight_bits import restore
from memfit.workload import Workload

EQUIVALENT = 1e-5
"""Largest relative error that counts as rounding."""

_FLOOR = 1e-3
"""Fraction of the largest reference element below which an element's error counts as if it were
that large: sums that cancel to nearly nothing carry the rounding of their terms."""

_SEED = 1234

_UPDATES = 5
"""Steps after which losses are compared, and parameters where updates read what was rounded: the
first does not."""

_DRAWS = 3
"""Draws of examples that the unplanned steps are run with, the planned one's among them."""

_MOST_HALVINGS = 20
"""Steps after which a loss scale has fallen from its beginning to nearly nothing."""

Tensors = dict[str, Tensor]


@dataclass(slots=True)
class _Comparison:
    """How far tensors are from their references."""

    bitwise: bool = True
    max_relative_error: float = 0.0

    def add(self, reference: Tensor, tensor: Tensor, floor: float) -> None:
        """Take in one pair; ``floor`` is the least magnitude errors are held against."""
        if reference.shape != tensor.shape or reference.dtype != tensor.dtype:
            self.bitwise, self.max_relative_error = False, float("inf")
            return
        if _same_bits(reference, tensor):
            return
        self.bitwise = False
        wide = torch.complex128 if reference.is_complex() else torch.float64
        expected = reference.detach().to(wide)
        error = float((expected - tensor.detach().to(wide)).abs().max())
        scale = max(float(expected.abs().max()), floor)
        relative = error / scale if scale > 0 else float("inf")
        if relative != relative:  # noqa: PLR0124 - not a number on one side only
            relative = float("inf")
        self.max_relative_error = max(self.max_relative_error, relative)

    def result(self, tolerance: float) -> dict[str, Any]:
        """The comparison in the words of the JSON contract."""
        if self.bitwise:
            return {"agreement": "bitwise", "max_relative_error": 0.0}
        kind = "equivalent" if self.max_relative_error <= tolerance else "different"
        return {"agreement": kind, "max_relative_error": self.max_relative_error}


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if torch.equal(a, b):
        return True
    if not (a.is_floating_point() or a.is_complex()):
        return False
    return bool(torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num()))


@dataclass(slots=True)
class Observed:
    """What one step gave.

    Attributes:
        loss: The tensors that it returned, by their place.
        gradients: By name of the parameter.
        parameters: Those that train, after it.
        buffers: Module buffers after it.
    """

    loss: Tensors = field(default_factory=dict)
    gradients: Tensors = field(default_factory=dict)
    parameters: Tensors = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)


def verify(
    workload_factory: Callable[[], Workload],
    plan: Mapping[str, Any],
    *,
    steps: int = 3,
    loss_reduction: str = "",
) -> dict[str, Any]:
    """Run real steps with and without a plan and compare.

    The random state of the process is as before when this returns.

    Args:
        workload_factory: Builds the workload.
        plan: The plan as parsed JSON.
        steps: Pairs of steps that are timed.
        loss_reduction: How the loss reduces, as the trace says.

    Returns:
        ``unplanned`` and ``planned``, each with ``measured_peak_bytes`` and ``step_cpu_seconds``;
        ``loss``, ``gradients``, ``parameters`` and ``buffers``, each with ``agreement``
        (``bitwise``, ``equivalent`` or ``different``) and ``max_relative_error``; ``divergence``,
        where the model left the plan, empty if it did not; ``kept_drops``, drops not carried out.
        For an approximate plan also ``approximation``, how far gradients are off, and updates
        where these read what was rounded; of inference ``outputs``, how far these are.
    """
    kinds = {action["kind"] for action in plan.get("actions", ())}
    if "offload_parameters" in kinds:
        cpu.start()  # while each block is with its tensor: later, one may lie in the plan's room
    with random_state_kept():
        seed()
        workload = workload_factory()
        ordinary = Fitted(workload, {"actions": []})
        workload = replace(workload, optimizer=ordinary.optimizer)
        planned = Fitted(workload, plan, loss_reduction=loss_reduction)
        is_approximate = plan.get("promise") == "approximate"
        compared = _compare(
            workload,
            ordinary,
            planned,
            is_approximate=is_approximate,
            rounds_updates=NARROW_STATE in kinds,
        )
        gc.collect()
        settled = planned.report()
        ways = {"unplanned": ordinary, "planned": planned}
        found = {**measure(workload, ways, steps), **compared}
        if planned.loss_scale != 1:
            after = planned.report()
            found["approximation"] |= {
                "scaled_steps": after.steps - settled.steps,
                "skipped_steps": after.skipped_steps - settled.skipped_steps,
            }
        return found


def _compare(
    workload: Workload,
    ordinary: Fitted,
    planned: Fitted,
    *,
    is_approximate: bool,
    rounds_updates: bool,
) -> dict[str, Any]:
    """One step each from the same state, compared; where updates are rounded, some more."""
    state = State.of(workload)
    expected = observe(workload, ordinary)
    state.restore(workload)
    _settle(planned)
    state.restore(workload)
    got = observe(workload, planned)
    state.restore(workload)
    report = planned.report()
    infers = is_approximate and workload.loss is None
    if infers:  # autocast returns numbers of its own type
        got.loss = {k: _as_type_of(expected.loss.get(k), it) for k, it in got.loss.items()}
    found = compare(expected, got)
    if infers:
        found["outputs"] = output_error(expected.loss, got.loss)
    elif is_approximate:
        noise = batch_noise(workload)
        state.restore(workload)
        found["approximation"] = approximation(expected.gradients, got.gradients, noise)
        gradients = expected.gradients if rounds_updates else None
        found["approximation"] |= _later(workload, ordinary, planned, state, gradients)
    return {
        **found,
        "divergence": report.divergence,
        "kept_drops": list(report.kept_drops),
    }


def _settle(planned: Fitted) -> None:
    """Run steps until the scale of the loss fits, where it is scaled."""
    for _ in range(_MOST_HALVINGS):
        if planned.loss_scale == 1:
            return
        seed()
        planned.step()
        if not planned.has_skipped_update:
            return


def _later(
    workload: Workload,
    ordinary: Fitted,
    planned: Fitted,
    state: State,
    gradients: Tensors | None,
) -> dict[str, Any]:
    """Losses and parameters after some steps on examples drawn from the batch, planned and not.

    The unplanned steps are repeated with other draws, so that what the plan changes stands beside
    what the order of the data does. All begin with the same state, which is there again.
    Parameters are compared where the unplanned gradients of the first step are given.
    """
    before = _trained(workload)
    ways = [planned] + [ordinary] * (_DRAWS if may_be_drawn(workload) else 1)
    losses: list[float | None] = []
    after: list[Tensors] = []
    idle: list[str] = []

    def is_the_loss() -> bool:
        seed()
        loss, same = loss_of_batch(workload), losses[-1]
        return (
            loss is not None and same is not None and math.isclose(loss, same, rel_tol=EQUIVALENT)
        )

    def run(way: Fitted, draw: int) -> None:
        seed()
        for batch in drawn_batches(workload, _UPDATES, draw):
            way.step(batch)
        ordinary.place_state()  # a model that is narrow does not run by itself

    for number, way in enumerate(ways):
        run(way, max(number - 1, 0))
        if number < 2:  # noqa: PLR2004 - planned and not, on the same examples
            after.append(_trained(workload))
        seed()
        losses.append(loss_of_batch(workload))
        if number == 1 and gradients is not None:
            idle = idle_parameters(workload, gradients, before, after[1], is_the_loss)
        state.restore(workload)
    spread = None
    if gradients is not None and planned.draw_roundings(1):
        run(planned, 0)
        spread = rounding_spread(before, after[1], after[0], _trained(workload), idle)
        state.restore(workload)
        planned.draw_roundings(0)
    others = [loss for loss in losses[1:] if loss is not None]
    loss = {"steps": _UPDATES, "planned": losses[0], "unplanned": losses[1]}
    if len(losses) > 2:  # noqa: PLR2004 - others beside the two
        loss |= {"lowest": min(others, default=None), "highest": max(others, default=None)}
    found: dict[str, Any] = {"later_loss": loss}
    if gradients is not None:
        error = update_error(before, after[1], after[0], idle)
        found |= {"update_error": error, "update_steps": _UPDATES, "idle_parameters": idle}
    return found if spread is None else {**found, "rounding_spread": spread}


def _trained(workload: Workload) -> Tensors:
    """Copies of the parameters that train."""
    named = workload.model.named_parameters()
    return {name: _wide_copy(p, p) for name, p in named if p.requires_grad}


def compare(expected: Observed, got: Observed, tolerance: float = EQUIVALENT) -> dict[str, Any]:
    """How far what one step gave is from what another gave.

    Args:
        expected: The reference.
        got: What is held against it.
        tolerance: Largest relative error that counts as rounding.

    Returns:
        ``loss``, ``gradients``, ``parameters`` and ``buffers`` as :func:`verify` returns them.
    """
    return {
        what: _compare_named(getattr(expected, what), getattr(got, what), tolerance)
        for what in ("loss", "gradients", "parameters", "buffers")
    }


def observe(workload: Workload, fitted: Fitted) -> Observed:
    """Run one step from a fixed random state and keep what it gave.

    A gradient is copied when it is complete and before anybody uses it: an optimizer that runs
    inside backward comes later. With micro-batches the last copy is the whole batch's.

    Args:
        workload: What is run.
        fitted: How it is run.
    """
    model = workload.model
    seen = Observed()
    handles = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:

            def keep(p: Any, name: str = name) -> None:
                if p.grad is not None:
                    gradient = _wide_copy(p.grad, p).to_dense()
                    scale = fitted.loss_scale
                    seen.gradients[name] = gradient if scale == 1 else gradient / scale

            handles.append(parameter.register_post_accumulate_grad_hook(keep))  # type: ignore[no-untyped-call]
    seed()
    try:
        result = fitted.step()
    finally:
        for handle in handles:
            handle.remove()
    given = [t.detach().clone() for t in tree_leaves(result) if isinstance(t, Tensor)]
    seen.loss = {str(index): tensor for index, tensor in enumerate(given)}
    seen.parameters = {n: _wide_copy(p, p) for n, p in model.named_parameters() if p.requires_grad}
    seen.buffers = {n: b.detach().clone() for n, b in model.named_buffers()}
    return seen


def _compare_named(expected: Tensors, got: Tensors, tolerance: float) -> dict[str, Any]:
    comparison = _Comparison()
    if expected.keys() != got.keys():
        comparison.bitwise, comparison.max_relative_error = False, float("inf")
    floor = _FLOOR * max((_largest(t) for t in expected.values()), default=0.0)
    for name in expected.keys() & got.keys():
        comparison.add(expected[name], got[name], floor)
    return comparison.result(tolerance)


def _largest(tensor: Tensor) -> float:
    if tensor.numel() == 0:
        return 0.0
    largest = float(tensor.detach().abs().max())
    return largest if largest < float("inf") else 0.0


@dataclass(slots=True)
class State:
    """Everything a step changes, before it.

    Attributes:
        tensors: Parameters and module buffers.
        optimizer: The optimizer's state, by parameter.
    """

    tensors: list[Tensor]
    optimizer: list[dict[str, Any]]

    @staticmethod
    def of(workload: Workload) -> State:
        """Copy the state of a workload whose optimizer has run no step yet, or any number."""
        optimizer = workload.optimizer
        states = []
        if isinstance(optimizer, torch.optim.Optimizer):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    state = optimizer.state.get(parameter, {})
                    states.append({k: _copied(v) for k, v in state.items()})
        return State([t.detach().clone() for t in _persistent(workload.model)], states)

    def restore(self, workload: Workload) -> None:
        """Put it back."""
        widen(workload.model.parameters())
        restore(workload.model)
        with torch.no_grad():
            for tensor, before in zip(_persistent(workload.model), self.tensors, strict=True):
                tensor.copy_(before)
        optimizer = workload.optimizer
        if isinstance(optimizer, torch.optim.Optimizer):
            optimizer.state.clear()
            states = iter(self.optimizer)
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    state = next(states)
                    if state:
                        optimizer.state[parameter] = {k: _copied(v) for k, v in state.items()}


def _wide_copy(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A copy of a parameter or its gradient, in the type that the parameter has without a plan."""
    return tensor.detach().to(own_type(parameter), copy=True)


def _as_type_of(reference: Tensor | None, tensor: Tensor) -> Tensor:
    if reference is None or not tensor.is_floating_point():
        return tensor
    return tensor.to(reference.dtype)


def _persistent(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def measure(
    workload: Workload, ways: Mapping[str, Fitted], steps: int
) -> dict[str, dict[str, Any]]:
    """Peaks and times of ways to run a step, warmed up.

    Args:
        workload: What is run.
        ways: How it is run, by name.
        steps: Steps of each that are timed, in turn.

    Returns:
        ``measured_peak_bytes`` and ``step_cpu_seconds`` by name.
    """
    peaks = []
    for fitted in ways.values():
        seed()
        fitted.step()
        static = static_tensors(workload, fitted.optimizer)
        peaks.append(measure_peak(fitted.step, static).peak_bytes)
        del static
    calls = [fitted.step for fitted in ways.values()]
    before = [fitted.place_state for fitted in ways.values()]
    seconds = cpu_seconds_in_turn(calls, max(steps, 1), before)
    return {
        name: {"measured_peak_bytes": peak, "step_cpu_seconds": cpu}
        for name, peak, cpu in zip(ways, peaks, seconds, strict=True)
    }


def seed() -> None:
    """Begin with the random state that every observed step begins with."""
    random.seed(_SEED)
    torch.manual_seed(_SEED)


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """Put the random state of the process back on leaving."""
    held = random.getstate()
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        try:
            yield
        finally:
            random.setstate(held)
