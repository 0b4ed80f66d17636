"""Which points are measured: peers first, then memfit at a ladder and at the peaks of their front.

Responsible for the list only. A point is a dictionary that JSON can hold: it goes to a process of
its own and is the key under which its row is kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, get_args

from memfit.options import Kind

Point = dict[str, Any]
Row = dict[str, Any]

FIELDS = ("model", "quick", "method", "dropout", "options", "beside")
"""What makes a point; all else in a row was measured."""

LADDER = ("75%", "50%")
MILP_FRACTIONS = (0.7, None)
COMPILE_BUDGETS = (0.9, 0.7, 0.5, 0.3, 0.1, 0.0)
COMPILE_BUDGETS_LARGE = (0.9, 0.5, 0.1, 0.0)
LARGE = frozenset({"gpt2"})
DROPOUT_BUDGETS = (None, 0.5)
"""Budgets that are run with dropout on as well: gradients are wrong below some of them."""
SHOWN_ON = "vit"
"""The model on which that is shown with eager's random numbers too, with eager as the reference."""

DROPOUT_FREE = frozenset({"resnet50"})

INEXACT = tuple(kind for kind in ("micro_batch", "chunk_loss", "chunk") if kind in get_args(Kind))
"""Kinds of action that change rounding: `allow="exact"` alone would fall back on them."""
EXACT: dict[str, Any] = {"allow": "exact", "forbid": list(INEXACT)}

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


def kind_of(methods: set[str]) -> str | None:
    """What a run of some methods, eager beside them, is a whole run of.

    Returns:
        ``""`` of all, ``"eager"`` or ``"compiled"`` of one kind; ``None`` if it leaves some out.
    """
    every = set(METHODS[1:])
    compiled = set(COMPILED)
    for kind, whole in {"": every, "eager": every - compiled, "compiled": compiled}.items():
        if methods == whole:
            return kind
    return None


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


def ladder(model: str, *, quick: bool) -> list[Point]:
    """The points of memfit that ask for a budget of their own: fractions, and the least.

    Args:
        model: The model.
        quick: Whether the model is the small version.

    Returns:
        The points, exact and equivalent, with the optimizer fused and without, eager and compiled.
    """
    unfused: dict[str, Any] = {"allow": "exact", "forbid": [*INEXACT, "fuse_optimizer"]}
    loose: dict[str, Any] = {"allow": "equivalent", "forbid": []}
    # In slices at most: micro-batches draw dropout anew, so their gradients cannot be compared.
    whole: dict[str, Any] = {"allow": "equivalent", "forbid": ["micro_batch"]}
    eager = [{"budget": budget, **EXACT} for budget in (*LADDER, "minimum")]
    eager += [{"budget": budget, **loose} for budget in (LADDER[-1], "minimum")]
    eager += [{"budget": "minimum", **choice} for choice in (whole, unfused)]
    points: list[Point] = [{"method": "memfit", "options": options} for options in eager]
    compiled: list[tuple[bool, str]] = [(False, "minimum")]
    if model not in DROPOUT_FREE:
        compiled.append((True, LADDER[-1]))
    points += [_compiled(dropout, budget) for dropout, budget in compiled]
    return [{"model": model, "quick": quick, **point} for point in points]


def duels(front: Iterable[Row]) -> list[Point]:
    """Memfit within the peak of each peer of a front, in turn with it.

    Args:
        front: Rows of peers, as :func:`benchmarks.planners.judgement.front` has them.

    Returns:
        The points; ``beside`` is the peer's.
    """
    points = []
    for peer in front:
        budget = str(peer["peak_bytes"])
        point: Point
        if peer["method"] in COMPILED:
            point = _compiled(peer["dropout"], budget)
        else:
            point = {"method": "memfit", "options": {"budget": budget, **EXACT}}
        point |= {"model": peer["model"], "quick": peer["quick"], "beside": method_of(peer)}
        points.append(point)
    return points


def _compiled(dropout: bool, budget: str) -> Point:  # noqa: FBT001 - a field of the point
    """A compiled point, whose gradients are held against code that draws the same numbers."""
    reference = "compiled" if dropout else "eager"
    options = {"budget": budget, "reference": reference, **EXACT}
    return {"method": "memfit compiled", "dropout": dropout, "options": options}


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


def method_of(row: Row) -> Point:
    """A row's method and options, without the model it was measured on."""
    return {key: row[key] for key in FIELDS[2:] if key in row}


def peer_of(row: Row) -> Point:
    """The peer that a row of memfit was measured in turn with."""
    return {"model": row["model"], "quick": row["quick"], **row["beside"]}


def shows_randomness(row: Row) -> bool:
    """Whether a row only shows which gradients are right: it draws random numbers as eager does."""
    of_eager = row.get("options", {}).get("reference") == "eager"
    return bool(row["method"] == "torch.compile" and row["dropout"] and of_eager)
