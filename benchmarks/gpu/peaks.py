"""Predicted peaks against measured ones, and plans that keep their budget, model by model.

Responsible for: the prediction before anything runs, and both peaks of the unplanned step; then
plans at 75 %, 50 % and the smallest budget, each with its peaks, its bits, and its time in turn
with the unplanned step; beside them activation checkpointing round every block. Not responsible for
plans that offload (:mod:`benchmarks.gpu.offload`) or compile (:mod:`benchmarks.gpu.compiled`).

All predictions come first, so that a short run has them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

from benchmarks.gpu import apart, models, page_parts, steps, timing
from benchmarks.gpu.device import Device
from benchmarks.gpu.models import Case
from benchmarks.gpu.piece import Order, collect
from benchmarks.gpu.results import Document, Results, Row, bar

import memfit
from memfit.run.fitted import Fitted

BUDGETS = ("75%", "50%", "minimum")
PEAK_BAR = 0.03
"""Largest relative error of a predicted peak that is within what is promised."""

_PREDICTION_SECONDS = 20.0
_MODEL_SECONDS = 40.0
"""About what a model takes of each: less time left, and it is not begun."""
_TIMING_SECONDS = 6.0


def run(order: Order, results: Results) -> None:
    """Measure all that there is time for."""
    chosen = models.cases(order.models, small=order.is_small)
    for case in chosen:
        if results.fits(f"{case.name}, predicted", _PREDICTION_SECONDS):
            left = results.seconds_left
            collect(results, case.name, apart.rows(predicted, case, order.kind, seconds=left))
    for case in chosen:
        for budget in BUDGETS:
            name = f"{case.name}, {budget}"
            if results.fits(name, _MODEL_SECONDS):
                left = results.seconds_left
                found = apart.rows(planned, case, order.kind, budget, seconds=left)
                collect(results, name, found)
        if models.MODELS[case.model].blocks and results.fits(f"{case.name}, blocks", 20):
            left = results.seconds_left
            found = apart.rows(checkpointed, case, order.kind, seconds=left)
            collect(results, f"{case.name}, blocks", found)


def predicted(case: Case, kind: str) -> Iterator[Row]:
    """The prediction, then the peaks of the step that it was made of."""
    device = Device(kind)  # type: ignore[arg-type]
    workload = models.build(case, device.place)
    prediction = memfit.predict(workload).as_dict()
    reserved = prediction["reserved"]
    yield {
        "kind": "predicted",
        "predicted_peak_bytes": prediction["predicted_peak_bytes"],
        "predicted_interval_bytes": prediction["interval_bytes"],
        "predicted_reserved_bytes": reserved and reserved["peak_reserved_bytes"],
        "notes": prediction["notes"],
    }
    device.library_bytes()  # what capturing left, if it did
    workload, eager = steps.ordinary(workload)
    found = steps.peaks(eager.step, workload, device)
    library_bytes = device.library_bytes()
    yield {
        **steps.as_row(found),
        "library_bytes": library_bytes,
        **errors(prediction, found.allocated_bytes, found.reserved_bytes),
    }


def errors(prediction: Row, allocated_bytes: int, reserved_bytes: int | None) -> Row:
    """How far the prediction is off, and its bar."""
    peak = prediction["predicted_peak_bytes"]
    error = peak / allocated_bytes - 1
    found: Row = {"peak_error": error}
    if reserved_bytes and prediction["reserved"]:
        found["reserved_error"] = prediction["reserved"]["peak_reserved_bytes"] / reserved_bytes - 1
    found["bars"] = [
        bar(
            "predicted peak",
            met=abs(error) <= PEAK_BAR,
            got=f"{error:+.2%} off",
            wanted=f"within {PEAK_BAR:.0%}",
        )
    ]
    return found


def planned(case: Case, kind: str, budget: str) -> Iterator[Row]:
    """A plan for a budget: its peaks, its bits, its time."""
    device = Device(kind)  # type: ignore[arg-type]
    workload = models.build(case, device.place)
    plan = memfit.plan(workload, "1%" if budget == "minimum" else budget)
    if budget == "minimum" and not plan.fits:
        plan = memfit.plan(workload, plan.minimum_budget_bytes)
    yield {"kind": "planned", **of_plan(plan)}
    if not plan.fits:
        return
    workload, eager = steps.ordinary(workload)
    with Fitted(workload, plan, loss_reduction=plan.loss_reduction) as fitted:
        yield from ways_compared(
            workload, eager, fitted, device, plan.budget_bytes, exact=plan.as_dict()["promise"]
        )


def of_plan(plan: memfit.Plan) -> Row:
    """What a plan says, as figures."""
    document = plan.as_dict()
    return {
        "verdict": document["verdict"],
        "budget_bytes": document["budget_bytes"],
        "minimum_budget_bytes": plan.minimum_budget_bytes,
        "promise": document["promise"],
        "predicted_peak_bytes": document["planned"]["predicted_peak_bytes"],
        "predicted_step_ratio": document["predicted_step_ratio"],
        "predicted_step_seconds": document["planned"]["predicted_step_seconds"],
        "predicted_reserved_bytes": document["reserved"]
        and document["reserved"]["peak_reserved_bytes"],
        "actions": [f"{action['count']} {action['kind']}" for action in document["actions"]],
        "cost_source": document["cost_source"],
    }


def ways_compared(
    workload: memfit.Workload,
    eager: Fitted,
    fitted: Fitted,
    device: Device,
    budget_bytes: int,
    *,
    exact: str,
) -> Iterator[Row]:
    """Measure a fitted step beside an eager one of the same workload.

    Args:
        workload: The workload; its optimizer exists.
        eager: Its step without a plan.
        fitted: With one.
        device: Where.
        budget_bytes: What the plan has to keep.
        exact: The class of the plan; ``exact`` asks for the same bits, another for rounding.

    Yields:
        Bits, then peaks, then times.
    """
    bits = steps.Bits(workload, eager)
    yield of_bits(bits, bits.of(fitted), exact=exact == "exact")
    del bits  # it holds three times the parameters
    found = steps.peaks(fitted.step, workload, device)
    library_bytes = device.library_bytes()
    report = fitted.report()
    yield {
        **steps.as_row(found),
        "library_bytes": library_bytes,
        "divergence": report.divergence,
        "kept_drops": list(report.kept_drops),
        "bars": [within(found.allocated_bytes, budget_bytes)],
    }
    if device.is_gpu:
        inside = steps.held(fitted.step, device, budget_bytes)
        got = "ran" if inside["ran"] else "out of memory"
        what = "step with torch's allocator held to the budget"
        yield {"held": inside, "bars": [bar(what, met=inside["ran"], got=got, wanted="to run")]}
    yield {
        "times": {
            name: asdict(times)
            for name, times in timing.in_turn(
                {"unplanned": eager.step, "planned": fitted.step},
                device,
                before=undo(eager, fitted),
                seconds=_TIMING_SECONDS,
            ).items()
        }
    }


def undo(eager: Fitted, fitted: Fitted) -> dict[str, Callable[[], None]] | None:
    """What each way undoes of the other: state and parameters have other homes, if they do."""
    kinds = {action.kind for action in fitted.plan.actions}
    if kinds.isdisjoint({"offload_optimizer", "offload_parameters"}):
        return None
    return {"unplanned": eager.place_state, "planned": fitted.place_state}


def within(peak_bytes: int, budget_bytes: int) -> dict[str, Any]:
    """The bar of a measured peak."""
    return bar(
        "measured peak",
        met=peak_bytes <= budget_bytes,
        got=f"{peak_bytes:,} bytes",
        wanted=f"at most {budget_bytes:,}",
    )


def of_bits(bits: steps.Bits, compared: Row, *, exact: bool) -> Row:
    """Bits as figures, with their bar where eager has bits to compare with."""
    repeats = steps.is_bitwise(bits.control)
    same = steps.is_bitwise(compared)
    found: Row = {
        "eager_repeats_itself": repeats,
        "eager_error": steps.error_of(bits.control),
        "with_deterministic_algorithms": bits.is_deterministic,
        "is_bitwise": same,
        "error": steps.error_of(compared),
        "compared": compared,
    }
    if exact and repeats:
        got = "the same" if same else f"{found['error']:.1e} off"
        found["bars"] = [bar("bits of the step", met=same, got=got, wanted="eager's")]
    return found


def checkpointed(case: Case, kind: str) -> Iterator[Row]:
    """``torch.utils.checkpoint`` round every block: its peak, and its time beside eager's."""
    from benchmarks.planners.checkpointing import wrapped

    device = Device(kind)  # type: ignore[arg-type]
    workload, eager = steps.ordinary(models.build(case, device.place))
    chosen = models.blocks(case, workload.model)
    inside = memfit.Workload(
        model=workload.model,
        batch=workload.batch,
        loss=partial(loss_of, workload),
        optimizer=workload.optimizer,
    )
    step = wrapped(inside, [(block, None) for block in chosen]).step
    yield {
        "kind": "blocks",
        "blocks": len(chosen),
        **steps.as_row(steps.peaks(step, workload, device)),
    }
    times = timing.in_turn(
        {"unplanned": eager.step, "planned": step}, device, seconds=_TIMING_SECONDS
    )
    yield {"times": {name: asdict(found) for name, found in times.items()}}


def loss_of(workload: memfit.Workload, model: Any, batch: Any) -> Any:
    """The loss of a workload under its autocast, as a fitted step computes it."""
    import torch

    assert workload.loss is not None
    if workload.autocast is None:
        return workload.loss(model, batch)
    with torch.autocast(next(model.parameters()).device.type, workload.autocast):
        return workload.loss(model, batch)


def page(document: Document) -> list[str]:
    """Two tables: predictions, and plans."""
    rows: dict[str, Row] = document["rows"]
    first, second = [], []
    for name, row in rows.items():
        if row.get("kind") == "predicted":
            first.append(_predicted_cells(name, row))
        elif row.get("kind") in {"planned", "blocks"}:
            second.append(_planned_cells(name, row))
    return [
        (
            "Predicted before anything ran, measured from the second step on. Of what was measured "
            "*cuBLAS* is what it keeps as workspace in torch's allocator."
        ),
        *page_parts.table(
            (
                "model",
                "predicted",
                "measured",
                "cuBLAS",
                "error",
                "reserved, predicted",
                "measured",
            ),
            first,
        ),
        (
            "Plans, and activation checkpointing round every block. *Held*: the step with torch's "
            "allocator allowed no more than the budget. *Bits*: loss, gradients, parameters and "
            "buffers against those of the unplanned step. Times in turn, by the device's clock."
        ),
        *page_parts.table(
            ("model", "budget", "peak", "reserved", "held", "bits", "unplanned", "step", "ratio"),
            second,
        ),
    ]


def _predicted_cells(name: str, row: Row) -> list[str]:
    gib = page_parts.gib
    return [
        name,
        gib(row.get("predicted_peak_bytes")),
        gib(row.get("peak_allocated_bytes")),
        gib(row.get("library_bytes")),
        page_parts.percent(row.get("peak_error")),
        gib(row.get("predicted_reserved_bytes")),
        page_parts.failed(row) or gib(row.get("peak_reserved_bytes")),
    ]


def _planned_cells(name: str, row: Row) -> list[str]:
    gib = page_parts.gib
    held = row.get("held")
    verdict = row.get("verdict", "fits")
    return [
        name,
        gib(row.get("budget_bytes")) if verdict == "fits" else "none fits",
        gib(row.get("peak_allocated_bytes")),
        gib(row.get("peak_reserved_bytes")),
        "" if held is None else "yes" if held["ran"] else "no",
        page_parts.failed(row) or page_parts.bits(row),
        *page_parts.times(row, "unplanned", "planned"),
    ]
