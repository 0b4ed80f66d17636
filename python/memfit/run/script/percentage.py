"""A budget that is a percentage of a step that has not run yet.

Responsible for what it comes to at least: a step takes more than what is live before it, so that
share of what is live is within the budget, whatever the step will take. Not responsible for the
budget itself (:mod:`memfit.run.script.loop_budget`), by which alone anything is judged.
"""

from __future__ import annotations

from memfit import _native


def least_bytes(written: str | int, live_bytes: int) -> int:
    """What a budget is, or is at least.

    Args:
        written: The budget as the user wrote it, or bytes.
        live_bytes: What is live where it is.

    Returns:
        Its bytes; 0 where a percentage leaves room for all that is live, or nothing is.
    """
    if "%" not in str(written):
        return _native.parse_budget(str(written), 0)
    least = _native.parse_budget(str(written), live_bytes) if live_bytes else 0
    return least if least < live_bytes else 0
