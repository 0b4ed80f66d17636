"""Model by change by plan: each ends the same, or with torch's own error, or as refused here.

A third of the cases run here; ``make differential`` runs all of them.
"""

from __future__ import annotations

import functools
import itertools
import os

import pytest
from changes import CHANGES
from comparison import compare
from subjects import BODIES, workload

import memfit

KINDS = (
    "remat",
    "fuse_optimizer",
    "offload",
    "offload_optimizer",
    "offload_parameters",
    "micro_batch",
    "chunk",
)
PLANS: dict[str, tuple[str, ...]] = {
    "remat": ("remat",),
    "offload": ("offload",),
    "remat and offload": ("remat", "offload"),
    "optimizer in backward": ("fuse_optimizer",),
    "state offloaded": ("offload_optimizer",),
    "parameters offloaded": ("offload_parameters",),
    "all offloaded": KINDS[1:5],
    "micro-batches": ("micro_batch",),
}
"""Kinds of action that are allowed, by name."""

WIDE = {
    "optimizer in backward",
    "state offloaded",
    "parameters offloaded",
    "all offloaded",
}
"""Plans that help where parameters take most."""

REFUSED = {
    ("recurrent", "remat"),  # its peak is inside one op
    ("recurrent", "offload"),
    ("recurrent", "remat and offload"),
    ("recurrent", "optimizer in backward"),  # it clips
    ("counting", "micro-batches"),  # a mean over the batch
    ("images", "micro-batches"),  # likewise
}
"""Models, and plans that they cannot have or that do not help them."""

WHOLE_STEP = {"step hook", "step hook of all", "step replaced"}
"""Changes that an optimizer which runs parameter by parameter refuses."""

SHARE = 3
"""One case of this many runs where not all do."""


def cases() -> list[tuple[str, str, str]]:
    """Every change with every plan, and every model with every plan: body, change, plan."""
    found = []
    for turn, plan in enumerate(PLANS):
        able = [body for body in BODIES if (body, plan) not in REFUSED]
        bodies = itertools.islice(itertools.cycle(able), 5 * turn, None)  # others for each plan
        found += [(body, change, plan) for change, body in zip(CHANGES, bodies, strict=False)]
        found += [(body, "nothing", plan) for body in able]
    return list(dict.fromkeys(found))


CASES = cases()
RUN = CASES if os.environ.get("MEMFIT_DIFFERENTIAL") == "all" else CASES[::SHARE]


def test_there_are_enough():
    assert len(CASES) >= 400
    assert len(RUN) >= 150


@functools.cache
def trace(body: str, *, wide: bool, exact: bool) -> memfit.Trace:
    """A step of a workload, which is the same whatever changes afterwards."""
    return memfit.trace(workload(body, wide=wide, exact=exact))


@pytest.mark.offloads_parameters
@pytest.mark.parametrize(("body", "change", "plan"), RUN, ids=map(", ".join, RUN))
def test_a_planned_step_is_the_step_or_says_why_not(tmp_path, body, change, plan):
    allowed = PLANS[plan]
    exact = "micro_batch" not in allowed
    outcome = compare(
        lambda: workload(body, wide=plan in WIDE, exact=exact),
        lambda: trace(body, wide=plan in WIDE, exact=exact),
        CHANGES[change],
        {
            "forbid": [kind for kind in KINDS if kind not in allowed],
            "allow": "exact" if exact else "equivalent",
            "offload": str(tmp_path),
        },
    )
    how = outcome.partition(":")[0]
    if change in WHOLE_STEP and plan in WIDE:
        assert how in {"same", "refused"}, outcome
    elif change in {"written", "double precision"}:
        assert how in {"same", "torch's own error"}, outcome
    else:
        assert outcome == "same"
