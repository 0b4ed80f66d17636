"""What autograd's graph takes where a forward of inference keeps one, or would.

Responsible for the sentence that compares both. Each figure is that of a recorded forward. Not
responsible for recording (:mod:`memfit.capture.recording`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from memfit.capture.record.gradient_mode import Gradients
from memfit.errors import MemfitError

_MOST_OPS = 5_000
"""A longer forward is not recorded twice: decoding, mostly, which libraries put under `no_grad`."""
_LEAST_PART = 100
"""A difference of less than the peak by this factor is not told."""


def keeps_graph(trace: dict[str, Any]) -> bool:
    """Whether autograd recorded an op of the forward.

    Args:
        trace: The JSON of a trace of inference.
    """
    return any(op["node"] is not None for op in trace["ops"])


def graph_note(
    trace: dict[str, Any], record_again: Callable[[Gradients], dict[str, Any] | None]
) -> str | None:
    """Say what a graph takes in a forward of inference, or would take.

    Args:
        trace: The JSON of the forward as memfit runs it: under `no_grad`, which the forward may
            have turned off.
        record_again: Records it with gradients on or off for certain; ``None`` where that fails.

    Returns:
        A sentence with both peaks; ``None`` where they are alike, or a second recording would take
        too long.
    """
    if len(trace["ops"]) > _MOST_OPS:
        return None
    kept = keeps_graph(trace)
    try:
        other = record_again("off" if kept else "on")
    except MemfitError:
        return None  # such as a write in place to a parameter, which only `no_grad` allows
    if other is None:
        return None
    with_graph, without = (trace, other) if kept else (other, trace)
    high, low = _prediction(with_graph), _prediction(without)
    peak, least = high["predicted_peak_bytes"], low["predicted_peak_bytes"]
    if peak - least < peak / _LEAST_PART:
        return None
    return _sentence(high, low, kept=kept, batch=trace["meta"]["batch"])


def _prediction(trace: dict[str, Any]) -> dict[str, Any]:
    from memfit._native import Trace, predict

    native = Trace.from_json(json.dumps(trace).encode(), None, trace["meta"]["batch"])
    return dict(predict(native, {}))


def _sentence(high: dict[str, Any], low: dict[str, Any], *, kept: bool, batch: int) -> str:
    from memfit._native import bytes_text

    peak, least = high["predicted_peak_bytes"], low["predicted_peak_bytes"]
    at = f" at batch {batch}" if batch else ""
    line, line_bytes = _grown_most(high, low)
    most = f" (the most of one line: {bytes_text(line_bytes)}, {line})" if line else ""
    both = "`torch.no_grad()` or `torch.inference_mode()`"
    if kept:
        return (
            f"the forward turns gradients on, and autograd's graph holds "
            f"{bytes_text(peak - least)} of the peak{at}{most}: the peak would be "
            f"{bytes_text(least)} under {both}"
        )
    return (
        f"predicted under `torch.no_grad()`, as memfit runs inference: the peak would be "
        f"{bytes_text(peak)}{at} where the forward runs without it and without "
        f"`torch.inference_mode()`, as autograd's graph would hold {bytes_text(peak - least)} "
        f"more{most}"
    )


def _grown_most(high: dict[str, Any], low: dict[str, Any]) -> tuple[str, int]:
    """The line that holds most more at the peak with a graph than at the one without."""
    before = {share["name"]: share["bytes"] for share in low["breakdown"]["source"]}
    grown = [
        (share["bytes"] - before.get(share["name"], 0), share["name"])
        for share in high["breakdown"]["source"]
        if not share["name"].startswith("(")
    ]
    more, line = max(grown, default=(0, ""))
    return (line, more) if more > 0 else ("", 0)
