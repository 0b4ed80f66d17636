"""Model by change by plan: each ends the same, with torch's own error, or refused with a reason.

A third of the cases run here; ``make differential`` runs all of them.
"""

from __future__ import annotations

import itertools
import os

import pytest
from changes import CHANGES
from comparison import compare
from subjects import BODIES, workload

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
    "all that is exact": KINDS[:5],
    "micro-batches": ("micro_batch",),
}
"""Kinds of action that are allowed, by name."""

SHARE = 3
"""One case of this many runs where not all do."""


def cases() -> list[tuple[str, str, str]]:
    """Every change with every plan, and every model with every plan: body, change, plan."""
    bodies = itertools.cycle(BODIES)
    pairs = list(itertools.product(CHANGES, PLANS))
    found = [(next(bodies), change, plan) for change, plan in pairs]
    found += [(body, "nothing", plan) for body, plan in itertools.product(BODIES, PLANS)]
    return list(dict.fromkeys(found))


CASES = cases()
RUN = CASES if os.environ.get("MEMFIT_DIFFERENTIAL") == "all" else CASES[::SHARE]


def test_there_are_enough():
    assert len(CASES) >= 400
    assert len(RUN) >= 150


@pytest.mark.offloads_parameters
@pytest.mark.parametrize(("body", "change", "plan"), RUN, ids=map(", ".join, RUN))
def test_a_planned_step_is_the_step_or_says_why_not(tmp_path, body, change, plan):
    allowed = PLANS[plan]
    exact = "micro_batch" not in allowed
    outcome = compare(
        lambda: workload(body, exact=exact),
        CHANGES[change],
        {
            "forbid": [kind for kind in KINDS if kind not in allowed],
            "allow": "exact" if exact else "equivalent",
            "offload": str(tmp_path),
        },
    )
    assert outcome in {"same", "torch's own error", "refused"}
