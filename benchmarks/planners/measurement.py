"""What is measured of one point, in a process of its own: numerics, peak, paired step times.

Responsible for running eager and the method from one state and comparing gradients, for the peak
by allocator events, and for interleaved times. Not responsible for what the methods do.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
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


def measure(workload: Workload, way: Way, pairs: int) -> dict[str, Any]:
    """Measure one way of running a workload's step.

    Args:
        workload: The workload; its optimizer exists and has run no step.
        way: The way.
        pairs: Interleaved pairs of eager and the method that are timed.

    Returns:
        The figures of the row.
    """
    eager = ordinary_step(workload)
    found = numerics(workload, eager, way)
    static = static_tensors(workload, workload.optimizer)  # type: ignore[arg-type]
    batch = [t for t in tree_leaves(workload.batch) if isinstance(t, Tensor)]
    peak = measure_peak(way.step, static)
    times: tuple[list[float], list[float]] = ([], [])
    for pair in range(pairs):
        for which in (0, 1) if pair % 2 == 0 else (1, 0):
            times[which].append(cpu_seconds((eager, way.step)[which]))
    ratios = [b / a for a, b in zip(*times, strict=True)]
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
