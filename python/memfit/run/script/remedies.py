"""Options that were not given, and what they would bring a step that no plan fits.

Responsible for the lower plans that other options would allow, for the lines that offer them, and
for why a pass took more than the budget.
Not responsible for what is done where nothing fits (:mod:`memfit.run.script.strict`).
"""

from __future__ import annotations

from collections.abc import Collection
from copy import copy

from memfit import _native
from memfit.answers import Plan
from memfit.run.script.planned_step import PlannedStep, comes_nearer
from memfit.run.script.request import EQUIVALENT, FitRequest
from memfit.run.script.slices import KIND as SLICES

_LOWER = 0.98
"""A way is named where it lowers the peak to this part."""


def remedies(
    request: FitRequest, planned: PlannedStep, budget: str | int, outside_bytes: int, but: str = ""
) -> list[tuple[str, Plan]]:
    """Options that were not given, with the lower plans that they would allow.

    Args:
        request: What was asked for.
        planned: A step; there are no ways where its plan fits.
        budget: The budget.
        outside_bytes: What the script holds besides.
        but: An option to leave out.
    """
    if planned.plan.fits:
        return []
    # Of a copy: a plan that nobody asked for decides nothing about the step.
    ways = (
        (option, copy(planned.step).plan(budget, outside_bytes, request=wider))
        for option, wider in request.wider()
        if option != but
    )
    return [(option, plan) for option, plan in ways if _is_worth(plan, planned.plan)]


def _is_worth(plan: Plan, than: Plan) -> bool:
    """Whether a plan brings enough to say so."""
    peaks = [it.planned.predicted_peak_bytes for it in (plan, than)]
    return plan.fits or (comes_nearer(plan, than) and peaks[0] <= _LOWER * peaks[1])


def offers(
    request: FitRequest,
    planned: PlannedStep,
    budget: str | int,
    outside_bytes: int,
    impossible: Collection[str],
) -> list[str]:
    """What was not allowed and may help, a line each: with a number where a plan gives one.

    Args:
        request: What was asked for.
        planned: A step that no plan fits.
        budget: The budget.
        outside_bytes: What the script holds besides.
        impossible: Kinds of action that are known not to be there for it.
    """
    found = [
        f"{_given(option)} a step would take "
        f"{_native.bytes_text(plan.planned.predicted_peak_bytes)}, at "
        f"{plan.predicted_step_ratio:.2f} x"
        for option, plan in remedies(request, planned, budget, outside_bytes, but=EQUIVALENT)
    ]
    options = request.options
    out = {*options.forbid, *impossible}
    if options.promise == "exact" and "micro_batch" not in out:
        found.append(f"`{EQUIVALENT}` may run the model on pieces of its batch: not tried")
    if options.promise == "exact" and SLICES not in out:
        classes = planned.step.classes_to_slice()
        what = f"compute its loss over {classes:,} classes in slices: not tried"
        found += [f"`{EQUIVALENT}` may {what}"] if classes else []
    return found


def _given(option: str) -> str:
    return f"with `{option}`" if option.startswith("--") else option


def _rounded_up(size_bytes: int) -> str:
    """Bytes as people read them, and no fewer when they are given back as a budget."""
    text, more = _native.bytes_text(size_bytes), size_bytes
    while _native.parse_budget(text, 0) < size_bytes:
        more += max(size_bytes >> 10, 1)
        text = _native.bytes_text(more)
    return text


def why_over(
    kind: str,
    peak_bytes: int,
    planned: PlannedStep | None,
    departure: str,
    update_bytes: int = 0,
) -> tuple[str, str]:
    """Why a pass was over the budget, if it was, and what would keep the budget.

    Args:
        kind: How the pass ran.
        peak_bytes: Most bytes live at once in it.
        planned: The step that its plan was made for.
        departure: Why it ran unplanned, or where it left its plan; empty if it did not.
        update_bytes: Most that updates in no plan take at once; 0 where that is not known.
    """
    larger = f"a budget of {_rounded_up(peak_bytes)}"
    if kind == "observed":
        return "a step that was recorded, to plan those like it, took more", larger
    if kind == "unplanned":
        return f"a step ran unplanned: {departure or 'nothing was planned for it'}", larger
    if planned is not None and not departure and planned.holds_more(peak_bytes):
        return "the script holds more than when its steps were planned", larger
    if planned is None or planned.plan.fits:
        is_of_updates = planned is not None and update_bytes > planned.plan.budget_bytes
        what = (
            "in its updates, which no plan lowers"
            if is_of_updates
            else "than the plan for it foresaw"
        )
        left = f"a step left its plan: {departure}"
        return (left if departure else f"a step took more {what}"), larger
    if planned.runs_as_recorded:
        return "no plan fits, and a step that runs as it was recorded takes more", larger
    lowest = _native.bytes_text(planned.plan.minimum_peak_bytes)
    least = planned.plan.minimum_budget_bytes
    return f"no plan fits: the smallest peak is {lowest}", f"`--budget {least}`"
