"""What is measured of one point, in a process of its own: numerics, peak, paired step times.

Responsible for running eager and the method from one state and comparing gradients, for the peak
by allocator events, and for interleaved times, of as many rounds as a verdict takes. Not
responsible for the verdict, nor for what the methods do.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from benchmarks.planners.judgement import is_open
from benchmarks.planners.models import SEED
from benchmarks.planners.way import Way, ordinary_step
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from memfit import Workload
from memfit.measure import measure_peak, static_tensors
from memfit.measure.peak import storage_bytes
from memfit.measure.step_time import cpu_seconds

FLOOR = 1e-3
"""Fraction of the largest gradient element below which errors count as if it were that large."""

Gradients = dict[str, Tensor]


LEAST_SECONDS = 20.0
"""Of every step at least: what a machine shared with others is slow at stays so for seconds."""
MOST = 10
"""Times as many rounds as asked for at most, for that and where a verdict is open."""
SCATTER = 0.1
"""Rounds whose ratios differ by more are too few for a median: which of them was disturbed?"""
ROUNDS_OF_SCATTER = 5
"""As many are then run at least."""


def measure(
    workload: Workload,
    way: Way,
    rounds: int,
    peer: Callable[[], Callable[[], Any]] | None = None,
) -> dict[str, Any]:
    """Measure one way of running a workload's step.

    Args:
        workload: The workload; its optimizer exists and has run no step.
        way: The way.
        rounds: How often eager, the method and the peer run in turn and are timed, at least.
        peer: Makes the step of another planner, of a workload of its own, once all that needs no
            other step is measured.

    Returns:
        The figures of the row.
    """
    eager = ordinary_step(workload)
    found = numerics(workload, eager, way)
    static = static_tensors(workload, workload.optimizer)  # type: ignore[arg-type]
    batch = [t for t in tree_leaves(workload.batch) if isinstance(t, Tensor)]
    peak = measure_peak(way.step, static)
    steps = [eager, way.step]
    if peer is not None:
        steps.append(peer())
        for step in steps[1:]:  # What the peer compiled may have made others compile again.
            step()
    times = _in_turn(steps, rounds)
    ratios = [b / a for a, b in zip(times[0], times[1], strict=False)]
    if peer is not None:
        besides = _ratios(times)
        found |= {"beside_ratios": besides, "beside_ratio": statistics.median(besides)}
    return {
        **found,
        "peak_bytes": peak.peak_bytes,
        "static_bytes": peak.static_bytes,
        "floor_bytes": peak.static_bytes - storage_bytes(batch),
        "left_bytes": peak.left_bytes,
        "eager_seconds": statistics.median(times[0]),
        "step_seconds": statistics.median(times[1]),
        "step_ratio": statistics.median(ratios),
        "step_ratios": ratios,
        "step_times": {"eager": times[0], "way": times[1]},
    }


def _in_turn(steps: list[Callable[[], Any]], rounds: int) -> list[list[float]]:
    """CPU seconds of some steps, round by round, forwards and backwards.

    Of three, the last two take more rounds while it is open on which side of the bar they are.
    """
    times: list[list[float]] = [[] for _ in steps]
    most = MOST * rounds
    for step in steps:  # memory that was another's before takes a step to settle
        step()

    def is_short() -> bool:
        taken = len(times[1])
        if taken < rounds or sum(times[1]) < LEAST_SECONDS:
            return True
        return taken < ROUNDS_OF_SCATTER and _scatter(times[0], times[1]) > SCATTER

    while len(times[1]) < most and is_short():
        _round(steps, times, backwards=len(times[1]) % 2 == 1)
    while len(steps) > 2 and len(times[1]) < most and is_open(_ratios(times)):
        _round(steps[1:], times[1:], backwards=len(times[1]) % 2 == 1)
    return times


def _round(steps: list[Callable[[], Any]], times: list[list[float]], *, backwards: bool) -> None:
    order = reversed(range(len(steps))) if backwards else range(len(steps))
    for which in order:
        times[which].append(cpu_seconds(steps[which]))


def _scatter(eager: list[float], way: list[float]) -> float:
    """How far apart the ratios of the rounds are."""
    ratios = [ours / theirs for theirs, ours in zip(eager, way, strict=True)]
    return max(ratios) / min(ratios) - 1


def _ratios(times: list[list[float]]) -> list[float]:
    """The second of the steps over the third."""
    return [ours / theirs for ours, theirs in zip(*times[1:], strict=True)]


def numerics(workload: Workload, eager: Callable[[], Any], way: Way) -> dict[str, Any]:
    """One step each from one state and seed; the method's first step, if it has not to settle.

    Args:
        workload: The workload; its optimizer exists already and has no state.
        eager: An ordinary step of it.
        way: The way, whose gradients are held against those of eager or of its own reference.

    Returns:
        Both losses, the largest error of any gradient, whether all is the same bit for bit, and
        seconds until the first step was done.
    """
    state = [t.detach().clone() for t in _persistent(workload.model)]
    optimizer = workload.optimizer
    assert isinstance(optimizer, Optimizer)

    reference = eager if way.reference is None else way.reference
    expected_loss, expected, _ = _observed(workload.model, reference)
    settling = time.monotonic()
    if way.settle is not None:
        way.settle()
    settling = time.monotonic() - settling
    with torch.no_grad():
        for tensor, before in zip(_persistent(workload.model), state, strict=True):
            tensor.copy_(before)
    optimizer.state.clear()
    loss, gradients, first_seconds = _observed(workload.model, way.step)
    bitwise = expected_loss == loss and all(
        torch.equal(tensor, gradients[name]) for name, tensor in expected.items()
    )
    return {
        "loss": loss,
        "expected_loss": expected_loss,
        "gradient_error": largest_error(expected, gradients),
        "bitwise": bitwise,
        "first_step_wall_seconds": settling + first_seconds,
    }


def _observed(model: nn.Module, step: Callable[[], Any]) -> tuple[float, Gradients, float]:
    """Loss and gradients of one step; a copy is made when a gradient is complete."""
    gradients: Gradients = {}
    handles = []
    for name, parameter in model.named_parameters():

        def keep(p: Any, name: str = name) -> None:
            gradients[name] = p.grad.detach().clone()

        if parameter.requires_grad:
            handles.append(parameter.register_post_accumulate_grad_hook(keep))  # type: ignore[no-untyped-call]
    random.seed(SEED)
    torch.manual_seed(SEED)
    start = time.monotonic()
    try:
        result = step()
    finally:
        seconds = time.monotonic() - start
        for handle in handles:
            handle.remove()
    return float(result), gradients, seconds


def largest_error(expected: Gradients, got: Gradients) -> float:
    """Largest error of any gradient, relative to that gradient's largest element.

    Args:
        expected: What is right.
        got: What was computed.

    Returns:
        The error; infinite where a gradient is missing or no number.
    """
    if expected.keys() != got.keys():
        return float("inf")
    floor = FLOOR * max(float(t.abs().max()) for t in expected.values())
    worst = 0.0
    for name, tensor in expected.items():
        error = float((tensor.double() - got[name].double()).abs().max())
        worst = max(worst, error / max(float(tensor.abs().max()), floor))
        if error != error:  # noqa: PLR0124 - not a number
            return float("inf")
    return worst


def _persistent(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]
