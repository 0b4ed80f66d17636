"""Which points are measured: peers first, then memfit at a ladder and at every peer's peak.

Responsible for the list only. A point is a dictionary that JSON can hold: it goes to a process of
its own and is the key under which its row is kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, get_args

from memfit.questions import Kind

Point = dict[str, Any]
Row = dict[str, Any]

LADDER = ("75%", "50%")
MILP_FRACTIONS = (0.7, None)
COMPILE_BUDGETS = (0.9, 0.7, 0.5, 0.3, 0.1, 0.0)
COMPILE_BUDGETS_LARGE = (0.9, 0.5, 0.1, 0.0)
LARGE = frozenset({"gpt2"})
DROPOUT_BUDGETS = (None, 0.5)
"""Budgets that are run with dropout on as well: gradients are wrong below some of them."""
SHOWN_ON = "vit"
"""The model on which that is shown with eager's random numbers too, with eager as the reference."""

NEAR = 0.02
"""Peaks of peers that are this near to each other share memfit's point."""

DROPOUT_FREE = frozenset({"resnet50"})

INEXACT = tuple(kind for kind in ("micro_batch", "chunk_loss", "chunk") if kind in get_args(Kind))
"""Kinds of action that change rounding: `allow="exact"` alone would fall back on them."""

METHODS = (
    "eager",
    "every block",
    "every second block",
    "selective",
    "sac_milp",
    "torch.compile",
    "memfit",
    "memfit compiled",
)
EAGER_PEERS = ("every block", "every second block", "selective", "sac_milp")
COMPILED = ("torch.compile", "memfit compiled")


def like(row: Row) -> tuple[str, bool]:
    """What a row may be compared with: eager or compiled code, with dropout or without."""
    return "compiled" if row["method"] in COMPILED else "eager", row.get("dropout", True)


def peers(model: str, *, quick: bool) -> list[Point]:
    """Every point of every other planner."""
    points: list[Point] = [{"method": method} for method in EAGER_PEERS[:3]]
    points += [
        {"method": "sac_milp", "options": {"name": model, "quick": quick, "budget": fraction}}
        for fraction in MILP_FRACTIONS
    ]
    budgets = COMPILE_BUDGETS_LARGE if model in LARGE else COMPILE_BUDGETS
    compiled: list[tuple[bool, dict[str, Any]]] = [
        (False, {"budget": budget, "reference": "eager"}) for budget in (None, *budgets)
    ]
    if model not in DROPOUT_FREE:
        compiled += [(True, {"budget": b, "reference": "compiled"}) for b in DROPOUT_BUDGETS]
    if model == SHOWN_ON:
        compiled += [(True, {"budget": b, "reference": "eager"}) for b in DROPOUT_BUDGETS]
    points += [
        {"method": "torch.compile", "dropout": dropout, "options": options}
        for dropout, options in compiled
    ]
    return [{"model": model, "quick": quick, **point} for point in points]


def ours(model: str, measured: Iterable[Row], *, quick: bool) -> list[Point]:
    """The points of memfit: the ladder and the minimum, then the peak of each peer's point.

    Args:
        model: The model.
        measured: Rows of the peers.
        quick: Whether the model is the small version.

    Returns:
        The points, exact and equivalent, with the optimizer fused and without, eager and compiled.
    """
    exact: dict[str, Any] = {"allow": "exact", "forbid": list(INEXACT)}
    unfused: dict[str, Any] = {"allow": "exact", "forbid": [*INEXACT, "fuse_optimizer"]}
    loose: dict[str, Any] = {"allow": "equivalent", "forbid": []}
    # In slices at most: micro-batches draw dropout anew, so their gradients cannot be compared.
    whole: dict[str, Any] = {"allow": "equivalent", "forbid": ["micro_batch"]}
    eager = [{"budget": budget, **exact} for budget in (*LADDER, "minimum")]
    eager += [{"budget": budget, **loose} for budget in (LADDER[-1], "minimum")]
    eager += [{"budget": "minimum", **choice} for choice in (whole, unfused)]
    compiled = [{"budget": "minimum", **exact}]
    rows = [row for row in measured if row["model"] == model and "peak_bytes" in row]
    for peak in _distinct(row["peak_bytes"] for row in rows if row["method"] in EAGER_PEERS):
        eager += [{"budget": str(peak), **choice} for choice in (exact, unfused)]
    compiled += [
        {"budget": str(peak), **exact}
        for peak in _distinct(
            row["peak_bytes"]
            for row in rows
            if row["method"] == "torch.compile" and not row["dropout"]
        )
    ]
    points: list[Point] = [{"method": "memfit", "options": options} for options in eager]
    points += [
        {"method": "memfit compiled", "dropout": False, "options": {**each, "reference": "eager"}}
        for each in compiled
    ]
    if model not in DROPOUT_FREE:
        unbudgeted = [
            str(row["peak_bytes"])
            for row in rows
            if row["method"] == "torch.compile"
            and row["dropout"]
            and row["options"] == {"budget": None, "reference": "compiled"}
        ]
        points += [
            {
                "method": "memfit compiled",
                "options": {"budget": budget, "reference": "compiled", **exact},
            }
            for budget in (LADDER[-1], *unbudgeted)
        ]
    return [{"model": model, "quick": quick, **point} for point in points]


def _distinct(peaks: Iterable[int]) -> list[int]:
    """The peaks, without those that a smaller one stands near to."""
    kept: list[int] = []
    for peak in sorted(peaks):
        if not kept or peak > kept[-1] * (1 + NEAR):
            kept.append(peak)
    return kept


def label(row: Row) -> str:
    """A row's method and options, for people."""
    options = row.get("options", {})
    words = [row["method"]]
    if row["method"] in {"sac_milp", "torch.compile"}:
        budget = options.get("budget")
        if budget is not None:
            words.append(f"{budget:g}" if row["method"] == "torch.compile" else f"{budget:.0%}")
        elif row["method"] == "sac_milp":
            words.append("least")
        if shows_randomness(row):
            words.append("with eager's random numbers")
    elif options:
        budget = str(options["budget"])
        words.append(f"{int(budget) / 2**20:.0f} MiB" if budget.isdigit() else budget)
        if options["allow"] != "exact":
            words.append(options["allow"])
            words += ["whole batch"] if "micro_batch" in options["forbid"] else []
        if "fuse_optimizer" in options["forbid"]:
            words.append("optimizer apart")
    if row["method"] in COMPILED and row["model"] not in DROPOUT_FREE:
        words.append("dropout on" if row.get("dropout", True) else "dropout off")
    return ", ".join(words)


def shows_randomness(row: Row) -> bool:
    """Whether a row only shows which gradients are right: it draws random numbers as eager does."""
    of_eager = row.get("options", {}).get("reference") == "eager"
    return bool(row["method"] == "torch.compile" and row["dropout"] and of_eager)
