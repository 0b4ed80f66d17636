"""What is said of a loop: a line when it is planned, and all of it at the end.

Responsible for the words, and for the record that the program prints. Not responsible for when they
are shown (:mod:`memfit.run.script.script`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from memfit import _native
from memfit.answers import Plan
from memfit.run.script.loop import Loop
from memfit.run.script.planned_step import PlannedStep
from memfit.run.script.request import FitRequest
from memfit.run.script.roots import class_names
from memfit.run.script.verdict import BudgetKept

_EXACT = 0.001
"""How far off predictions may be, as a part."""


def _names(loop: Loop) -> str:
    return " + ".join(f"`{name}`" for name in loop.models)


def unplanned(loop: Loop) -> str:
    """A line about a loop that is not planned, or whose last pass is not.

    Args:
        loop: The loop.
    """
    if loop.refusal:
        return f"{_names(loop)} runs unplanned: {loop.refusal}"
    return f"{_names(loop)}: {loop.in_the_way}"


def recorded_slowly(loop: Loop) -> str:
    """What is said of a step of which the recording takes long, while it does."""
    return f"{_names(loop)}: a step is recorded op by op, which takes longer than those to come"


def of_one_step(root: nn.Module) -> str:
    """A line about models that are made anew for each step.

    Args:
        root: One of them.
    """
    names = " + ".join(f"`{name}`" for name in class_names(root))
    return f"{names} runs unplanned: each has one step, which is recorded, and is gone after it"


def _way(plan: Plan) -> str:
    """How a step ran that was never recorded as it is."""
    for action in plan.actions:
        if action.kind == "autocast":
            return " under autocast"
        if action.kind == "chunk":
            what = "its loss" if action.chunk.loss else "messages along edges"
            return f" with {what} in slices"
    return " in pieces of its batch"


def found(loop: Loop, plan: Plan, *, in_files: bool) -> str:
    """A line about a loop that was planned.

    Args:
        loop: The loop.
        plan: The plan.
        in_files: Whether what lacks room goes to files where no plan fits.
    """
    size = _native.bytes_text
    optimizer = " + ".join(loop.optimizers) or "no optimizer"
    planned = next((it for it in loop.plans if it.plan is plan), None)
    whole = None if planned is None else planned.unplanned_peak_bytes
    takes = size(max(whole or plan.unplanned.predicted_peak_bytes, loop.placing.update_bytes))
    if whole is None:
        takes += _way(plan)
    if loop.undoes:
        takes += " without the script's checkpoints"
    if loop.placing.is_loose and not loop.placing.update_bytes:
        takes += " before its optimizers step"
    noun = "parameter" if loop.parameters == 1 else "parameters"
    head = f"{_names(loop)} ({loop.parameters:,} {noun}, {optimizer})"
    if plan.fits and loop.placing.most_update_bytes > plan.budget_bytes * (1 + _EXACT):
        most = f"{size(loop.placing.most_update_bytes)} in its updates, which no plan lowers"
        return f"{head}: a step takes {most}, above {size(plan.budget_bytes)}"
    if plan.fits and not plan.actions:
        return f"{head}: a step takes {takes}, within {size(plan.budget_bytes)} as it is"
    actions = plan.as_dict()["actions"]
    done = ", ".join(_native.effect(action) for action in actions)
    took = f"step time x {plan.predicted_step_ratio:.2f} ({done})"
    predicted = size(max(plan.planned.predicted_peak_bytes, loop.placing.update_bytes))
    if plan.fits:
        return f"{head}: a step takes {takes}; planned: {predicted}, {took}"
    head = f"{head}: a step takes {takes}, and no plan fits {_with_what_is_kept_free(plan)}"
    least = max(_least_budget_bytes(loop, plan, planned), loop.placing.most_update_bytes)
    ask = f"the smallest budget to ask for is {size(least)}: `--budget {least}`"
    if in_files:
        ask = "what that takes beyond the budget goes to files"
    if planned is not None and planned.runs_as_recorded:
        took = size(planned.recorded_peak_bytes)
        return f"{head}: it runs as it was recorded, what is saved in files, {took}; {ask}"
    if not plan.actions:
        return f"{head} or saves anything: it runs as it is; {ask}"
    return f"{head}: it runs by the one with the smallest peak, {predicted}, {took}; {ask}"


def _with_what_is_kept_free(plan: Plan) -> str:
    """The budget of a plan that does not fit, and what every plan keeps free, if that is why."""
    budget = _native.bytes_text(plan.budget_bytes)
    if plan.minimum_peak_bytes > plan.budget_bytes:
        return budget
    return f"{budget} with {_native.bytes_text(plan.margin_bytes)} to spare"


def _least_budget_bytes(loop: Loop, plan: Plan, planned: PlannedStep | None) -> int:
    """The smallest budget to ask for: that of a plan, or what steps take as recorded.

    The steps that are recorded come first, whatever the budget is.

    Args:
        loop: The loop.
        plan: A plan that does not fit.
        planned: The step that it is for.
    """
    least = plan.minimum_budget_bytes
    if planned is not None and planned.runs_as_recorded:
        least = min(least, planned.recorded_peak_bytes)
    return max(least, loop.counts["observed"].peak_bytes)


def record(
    request: FitRequest, loops: Sequence[Loop], kept: BudgetKept, *, stopped: bool, refusal: str
) -> dict[str, Any]:
    """What was found and done in a script, in the program's words.

    Args:
        request: What the user has asked for.
        loops: Its loops.
        kept: Whether the budget was.
        stopped: Whether the script was ended before a step that would not keep it.
        refusal: Why nothing was planned; empty where something may have been.
    """
    verdict = kept.verdict()
    over = verdict is not None and not verdict["kept"]
    shown = without_parts(loops)
    is_kept, is_alone = verdict is not None and not over, len(shown) == 1
    return {
        "budget": request.budget,
        "verdict": verdict,
        "stopped": stopped or (over and request.is_strict),
        "refusal": refusal or None,
        "loops": [
            described(loop, kept.between_peak_bytes, is_kept=is_kept, is_alone=is_alone)
            for loop in shown
        ],
    }


def without_parts(loops: Sequence[Loop]) -> list[Loop]:
    """Loops but those of modules that never trained by themselves, where the model around them did.

    ``spectral_norm`` calls the parametrization that it registers, for one.

    Args:
        loops: The loops.
    """
    trained = [loop for loop in loops if loop.has_stepped]
    wholes = [it for loop in trained for it in (loop.root, *loop.partners) if it is not None]
    inside = {part for whole in wholes for part in whole.modules() if part is not whole}
    return [loop for loop in loops if loop.has_stepped or loop.root not in inside]


def described(
    loop: Loop, between_peak_bytes: int, *, is_kept: bool, is_alone: bool
) -> dict[str, Any]:
    """A loop for the record, in the program's words.

    Args:
        loop: The loop.
        between_peak_bytes: Most bytes live at once between passes: no smaller budget is kept.
        is_kept: Whether the script has kept its budget: it need ask for no larger one.
        is_alone: Whether it has no other loop, whose steps may need more than this one's.
    """
    shown = _shown(loop)
    plan = None if shown is None else _plan_described(loop, shown, between_peak_bytes)
    if plan is not None and not _is_worth_asking_for(plan, is_kept=is_kept, is_alone=is_alone):
        plan["minimum_budget_bytes"] = None
    return {
        "models": list(loop.models),
        "parameters": loop.parameters,
        "optimizers": list(loop.optimizers),
        "device": str(loop.device),
        "refusal": loop.refusal or None,
        "observed": _counted(loop, "observed"),
        "planned": _counted(loop, "planned"),
        "unplanned": _counted(loop, "unplanned"),
        "plan": plan,
        "replans": loop.replans,
        "divergence": loop.divergence or None,
        "notes": [*loop.notes, *_of_updates(loop), *_of_other_sizes(loop)],
    }


def _is_worth_asking_for(plan: dict[str, Any], *, is_kept: bool, is_alone: bool) -> bool:
    """Whether the smallest budget for a loop tells what to ask for.

    A smaller one is no help where this one was not kept, and may not do for another loop. A larger
    one is not needed where it was: what lacked room was in files, or another loop's plan had it.
    """
    if plan["minimum_budget_bytes"] is None:
        return False
    is_less = plan["minimum_budget_bytes"] <= plan["budget_bytes"]
    return is_alone if is_less and is_kept else not (is_less or is_kept)


def _shown(loop: Loop) -> PlannedStep | None:
    """Of the steps that have run by their plans the one that takes most; the latest if none has."""
    plans = loop.plans.all
    run = [planned for planned in plans if planned.has_run] or plans[-1:]
    return max(reversed(run), key=lambda planned: planned.takes_bytes, default=None)


def _of_updates(loop: Loop) -> list[str]:
    """What plans know nothing of, where several optimizers update a model."""
    knows_none = loop.placing.is_loose and bool(loop.plans) and not loop.placing.update_bytes
    return ["predicted without updates: plans know none of several optimizers"] * knows_none


def _of_other_sizes(loop: Loop) -> list[str]:
    """How often steps ran at sizes that were not recorded."""
    plans = loop.plans
    counted = (
        (
            "steps of sizes that were not recorded, foreseen from two that were",
            plans.foreseen_steps,
        ),
        ("steps larger than any planned, run by the plan of least peak", plans.larger_steps),
        ("evaluations on pieces of their batch", loop.ways.pieces.evaluations),
        ("evaluations with parameters offloaded until they are used", loop.evaluations.count),
    )
    return [f"{what}: {count}" for what, count in counted if count]


def _counted(loop: Loop, kind: Any) -> dict[str, int]:
    count = loop.counts[kind]
    return {
        "steps": count.steps,
        "peak_bytes": count.step_peak_bytes if count.steps else count.peak_bytes,
    }


def _plan_described(loop: Loop, planned: PlannedStep, between_bytes: int) -> dict[str, Any]:
    plan, whole = planned.plan, planned.unplanned_peak_bytes
    update_bytes = loop.placing.update_bytes
    more = planned.rounding_bytes  # plans keep it free; it was not there
    lowest = max(plan.minimum_peak_bytes - more, update_bytes)
    return {
        "budget_bytes": plan.budget_bytes,
        "fits": plan.fits,
        "unplanned_peak_bytes": None if whole is None else max(whole - more, update_bytes),
        "predicted_peak_bytes": planned.recorded_peak_bytes + planned.spare_bytes
        if planned.runs_as_recorded
        else max(plan.planned.predicted_peak_bytes - more, update_bytes),
        # With what is kept free it does not fit; without, it is no reason why.
        "minimum_peak_bytes": None if plan.fits or lowest <= plan.budget_bytes else lowest,
        "minimum_budget_bytes": None
        if plan.fits
        else max(_least_budget_bytes(loop, plan, planned), update_bytes, between_bytes),
        "predicted_step_ratio": plan.predicted_step_ratio,
        "may_round": any(it.step.may_round for it in loop.plans),
        "other_kinds": sorted(loop.ran_by.difference(planned.kinds)),
        "actions": [
            {"kind": action.kind, "count": action.count, "bytes": action.bytes}
            for action in plan.actions
            if action.kind in planned.kinds
        ],
    }
