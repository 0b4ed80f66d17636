"""Whether a compiled plan keeps its word: real steps eager, compiled by torch alone, and planned.

Responsible for bringing the plan to where it compiles no more, for what its numbers are held
against and how far they may be off, and for measuring all three. Not responsible for observing,
comparing and measuring steps (:mod:`memfit.verify`).

Compiled code computes the same in another order, so its gradients are off by rounding. How far
that may be is not for a constant to say: what torch alone is off from eager is the yardstick.
Inductor draws random numbers of its own. A step that draws any is held against the step that torch
alone compiled, which draws the same; the yardstick is then compiled to draw those of eager.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from memfit.errors import NotCompiledWarning
from memfit.records import plain
from memfit.run.compiled.fit import NotCompiled, fit_compiled
from memfit.run.compiled.fitted import CompiledFitted
from memfit.run.compiled.recording import own_code
from memfit.run.fitted import Fitted
from memfit.verify.eager import (
    EQUIVALENT,
    Observed,
    State,
    compare,
    measure,
    observe,
    random_state_kept,
    seed,
)
from memfit.workload import Workload

_TIMES_THE_YARDSTICK = 2.0
"""How much farther off a plan may be than what torch alone compiled: it rounds other sums."""

_NO_YARDSTICK = 0.25
"""Where torch alone is off by more, its error says nothing about rounding.

That much is rounding in low precision, where a gradient cancels to nothing but what its terms were
rounded by (a bias before batch normalisation): 0.22 under bfloat16. A mask that differs between
forward and backward is off by 0.6 and more.
"""


def verify_compiled(
    workload_factory: Callable[[], Workload],
    trace: Mapping[str, Any],
    budget_bytes: int,
    request: Mapping[str, Any],
    *,
    steps: int = 3,
) -> dict[str, Any]:
    """Run real steps eager, compiled by torch alone and compiled by a plan, and compare them.

    The random state of the process is as before when this returns.

    Args:
        workload_factory: Builds the workload.
        trace: Its eager trace as parsed JSON.
        budget_bytes: Most bytes of the step.
        request: As in :func:`memfit.run.compiled.fit.fit_compiled`.
        steps: Steps of each that are timed.

    Returns:
        ``not_compiled``, where the step runs eager, with the reason. Else ``unplanned`` and
        ``planned``, ``loss``, ``gradients``, ``parameters`` and ``buffers`` as
        :func:`memfit.verify.eager.verify` returns them; ``predicted_peak_bytes`` of the compiled
        plan; and ``compiled``, what there is to say about it besides.
    """
    with random_state_kept():
        seed()
        workload = workload_factory()
        eager = Fitted(workload, {"actions": []})
        workload = replace(workload, optimizer=eager.optimizer)
        planned = fit_compiled(workload, trace, budget_bytes, request)
        if isinstance(planned, NotCompiled):
            return {"not_compiled": planned.reason}
        state = State.of(workload)
        _settle(planned)
        state.restore(workload)
        reason = planned.report().not_compiled
        if reason:
            return {"not_compiled": reason}
        torch_alone = Fitted(_compiled(workload), {"actions": []})
        compared, judged, error = _compare(workload, state, eager, torch_alone, planned)
        gc.collect()
        ways = {"unplanned": eager, "torch_compile": torch_alone, "planned": planned}
        measured = measure(workload, ways, steps)
        alone = {**measured.pop("torch_compile"), "max_relative_error": error}
        return {
            **measured,
            **compared,
            "predicted_peak_bytes": planned.plan.planned.predicted_peak_bytes,
            "compiled": {**judged, **_described(planned), "torch_compile": alone},
        }


def _settle(planned: CompiledFitted) -> None:
    """Run steps until nothing compiles any more."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotCompiledWarning)  # it is in the report
        while not planned.has_settled:
            planned.step()


def _compiled(workload: Workload, *, eager_numbers: bool = False) -> Workload:
    """The workload, its loss compiled by torch alone.

    Args:
        workload: The workload.
        eager_numbers: Whether to draw the random numbers that the eager step draws.
    """
    loss = workload.loss
    assert loss is not None, "only training steps are compiled"
    options: dict[str, Any] = {"fallback_random": True} if eager_numbers else {}
    return replace(workload, loss=torch.compile(own_code(loss), options=options))


def _compare(
    workload: Workload, state: State, eager: Fitted, torch_alone: Fitted, planned: Fitted
) -> tuple[dict[str, Any], dict[str, Any], float]:
    """One step of each from the same state: compared, what against, and the yardstick."""

    def run(fitted: Fitted) -> Observed:
        seen = observe(workload, fitted)
        state.restore(workload)
        return seen

    reference, expected = "eager", run(eager)
    draws = _has_drawn()
    alone = run(torch_alone)
    yardstick = alone
    if draws:
        yardstick = run(Fitted(_compiled(workload, eager_numbers=True), {"actions": []}))
    found = compare(expected, yardstick)
    error = max(found[what]["max_relative_error"] for what in ("loss", "gradients"))
    tolerance = EQUIVALENT
    if error <= _NO_YARDSTICK:
        tolerance = max(tolerance, _TIMES_THE_YARDSTICK * error)
    if draws:
        reference, expected = "torch_compile", alone
    judged = {"reference": reference, "tolerance": tolerance}
    return compare(expected, run(planned), tolerance), judged, error


def _has_drawn() -> bool:
    """Whether random numbers were drawn since the step that was observed last began."""
    after = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    seed()
    began = torch.get_rng_state()
    cuda_began = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    pairs = zip([after, *cuda], [began, *cuda_began], strict=True)
    return not all(torch.equal(one, other) for one, other in pairs)


def _described(planned: CompiledFitted) -> dict[str, Any]:
    report = planned.report()
    return {
        "corrections": report.corrections,
        "loosened": report.loosened,
        "actions": [plain(action) for action in planned.plan.actions],
        "graphs": [plain(graph) for graph in report.graphs],
    }
