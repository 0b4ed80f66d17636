"""The bars of the head-to-head, decided from the rows of a run.

Responsible for verdicts only: every number in them is in a row. A bar that could not be decided,
because a point failed or was refused, counts as missed and says why.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.planners.points import Row, label, like, method_of, shows_randomness

TIME = "time at a peer's peak"
TIME_BAR = 1.02
FLOOR_BAR = 0.75
PREDICTED_BAR = 0.10
NEAR = 0.03
"""How far the median of a few rounds may be off by noise alone."""
CHANCE = 0.1
"""How often as many rounds may fall on one side of the bar where both sides are as likely."""
SURELY = 0.05
"""So much quicker is a peer for certain: times of separate processes are noisy."""
SAME = 0.005
"""Peaks of peers that differ by less ask the same of memfit."""
RIGHT = 1e-4
"""Largest relative gradient error of a point whose gradients count as right."""
ROUNDING = 2.0
"""So many times eager's own error against float64 counts as right too: both are rounded."""


@dataclass(frozen=True)
class Verdict:
    """One bar at one place.

    Attributes:
        bar: What is asked.
        model: Of which model.
        subject: Against which point, or of which.
        value: What was measured; ``None`` where it could not be.
        limit: What it may be at most.
        met: Whether it is.
        note: What helps to read it.
    """

    bar: str
    model: str
    subject: str
    value: float | None
    limit: float
    met: bool
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For the results file."""
        return asdict(self)


def judge(rows: Sequence[Row]) -> list[Verdict]:
    """All verdicts of a run."""
    found: list[Verdict] = []
    for model in dict.fromkeys(row["model"] for row in rows):
        of_model = [row for row in rows if row["model"] == model]
        found += times_at_peers_peaks(model, of_model)
        found += lowest_peaks(model, of_model)
        found += budgets_kept(model, of_model)
        found += predicted_times(model, of_model)
    return found


def right(row: Row) -> bool:
    """Whether a point ran and its gradients are those of its reference, but for rounding."""
    most = max(RIGHT, ROUNDING * row.get("rounding_error", 0.0))
    return "gradient_error" in row and row["gradient_error"] <= most


def redraws(row: Row) -> bool:
    """Whether gradients differ because memfit's plan draws dropout anew, as it says: in pieces."""
    kinds = {action["kind"] for action in row.get("actions", [])}
    return not right(row) and "gradient_error" in row and bool(kinds & {"micro_batch", "chunk"})


def is_ours(row: Row) -> bool:
    """Whether a row is memfit's."""
    return bool(row["method"].startswith("memfit"))


def exact(row: Row) -> bool:
    """Whether memfit was asked for exact plans only; compiled ones are as near as compiling is."""
    return is_ours(row) and row["options"]["allow"] == "exact"


def apart(row: Row) -> bool:
    """Whether memfit had to leave the optimizer where peers have it, after backward."""
    return is_ours(row) and "fuse_optimizer" in row["options"]["forbid"]


def front(rows: Iterable[Row]) -> list[Row]:
    """The peers' points but those that another of their kind is as small as and quicker than.

    Args:
        rows: Rows of one model.

    Returns:
        The rows with right gradients that stay; a plan that holds beside them holds beside all.
    """
    peers = [row for row in rows if _is_peer(row) and _ran_right(row)]
    return [row for row in peers if _dominating(row, peers) is row]


def _is_peer(row: Row) -> bool:
    return not is_ours(row) and row["method"] != "eager"


def _dominating(peer: Row, peers: list[Row]) -> Row:
    """The quickest of the peers of a kind that spare one the duel with this; itself, if none does.

    Such a peer takes no more memory and is surely quicker; or takes all but the same memory.
    """
    spare = [
        row
        for row in peers
        if like(row) == like(peer)
        and row["peak_bytes"] <= peer["peak_bytes"]
        and (
            row["step_ratio"] <= (1 - SURELY) * peer["step_ratio"]
            or row["peak_bytes"] >= (1 - SAME) * peer["peak_bytes"]
        )
    ]
    best = min(spare, key=lambda row: (row["step_ratio"], row["peak_bytes"], label(row)))
    return best if best is peer else _dominating(best, peers)


def times_at_peers_peaks(model: str, rows: list[Row]) -> Iterable[Verdict]:
    """Memfit's exact step within a peer's peak, against the peer's time, measured in turn.

    A peer off the front is held against the plan for the one that is smaller and quicker.
    """
    peers = [row for row in rows if _is_peer(row) and _ran_right(row)]
    in_turn = {
        json.dumps(row["beside"], sort_keys=True): row
        for row in rows
        if "beside" in row and right(row)
    }
    for peer in peers:
        quicker = _dominating(peer, peers)
        chosen = in_turn.get(json.dumps(method_of(quicker), sort_keys=True))
        if chosen is None or chosen["peak_bytes"] > quicker["peak_bytes"]:
            yield Verdict(
                TIME,
                model,
                label(peer),
                None,
                TIME_BAR,
                met=False,
                note="no exact plan at or below this peak",
            )
            continue
        ratio = chosen["beside_ratio"] * quicker["step_ratio"] / peer["step_ratio"]
        others = "" if quicker is peer else f"; off the front, of {label(quicker)}"
        rounds = f"{len(chosen['beside_ratios'])} in turn"
        if is_open(chosen["beside_ratios"]):
            rounds += ", either side of the bar by noise"
        yield Verdict(
            TIME,
            model,
            label(peer),
            ratio,
            TIME_BAR,
            met=ratio <= TIME_BAR,
            note=f"{label(chosen)}, {min(chosen['beside_ratios']):.3f} to "
            f"{max(chosen['beside_ratios']):.3f}, {rounds}{others}",
        )


def _ran_right(peer: Row) -> bool:
    """Whether a peer's point counts; draws of eager's random numbers only show what is wrong."""
    return right(peer) and not shows_randomness(peer)


def is_open(ratios: list[float]) -> bool:
    """Whether noise may decide on which side of the bar the median is.

    It does not where all are on one side and their median is far from the bar, nor by the sign
    test of the median.

    Args:
        ratios: One of each round.
    """
    above = sum(ratio > TIME_BAR for ratio in ratios)
    fewer = min(above, len(ratios) - above)
    if fewer == 0 and abs(statistics.median(ratios) - TIME_BAR) >= NEAR:
        return False
    tail = sum(math.comb(len(ratios), count) for count in range(fewer + 1))
    return 2 * tail / 2 ** len(ratios) > CHANCE


def lowest_peaks(model: str, rows: list[Row]) -> Iterable[Verdict]:
    """The lowest peak above parameters, buffers and optimizer state, against the best peer's."""
    best = min(
        (row for row in rows if not is_ours(row) and _ran_right(row)),
        key=_above_floor,
        default=None,
    )
    least = {
        name: min((_above_floor(row) for row in rows if right(row) and choose(row)), default=None)
        for name, choose in (
            ("any", is_ours),
            ("exact", exact),
            ("exact, optimizer apart", lambda row: exact(row) and apart(row)),
        )
    }
    lowest = least["any"]
    if best is None or lowest is None:
        yield Verdict("lowest peak", model, "", None, FLOOR_BAR, met=False, note="no points")
        return
    ratio = lowest / _above_floor(best)
    figures = [f"{name} {count / 2**20:.1f} MiB" for name, count in least.items() if count]
    note = f"{_above_floor(best) / 2**20:.1f} MiB; memfit {', '.join(figures)}"
    yield Verdict(
        "lowest peak", model, label(best), ratio, FLOOR_BAR, met=ratio <= FLOOR_BAR, note=note
    )


def _above_floor(row: Row) -> int:
    return int(row["peak_bytes"] - row["floor_bytes"])


def budgets_kept(model: str, rows: list[Row]) -> Iterable[Verdict]:
    """The measured peak of every plan against its budget; the worst one is named."""
    planned = [row for row in rows if is_ours(row) and "peak_bytes" in row]
    if planned:
        worst = max(planned, key=lambda row: row["peak_bytes"] / row["budget_bytes"])
        ratio = worst["peak_bytes"] / worst["budget_bytes"]
        yield Verdict("peak within budget", model, label(worst), ratio, 1.0, met=ratio <= 1.0)


def predicted_times(model: str, rows: list[Row]) -> Iterable[Verdict]:
    """Predicted over measured step time, op times from a profiled step; the worst one is named.

    Eager's is held against steps right after the profile; a plan's against steps in turn with
    eager's, at the speed that these show the machine to have by then.
    """
    predicted = [row for row in rows if row.get("predicted_seconds") and "step_ratio" in row]
    if predicted:
        worst = max(predicted, key=lambda row: abs(_time_error(row)))
        error = _time_error(worst)
        expected, measured = worst["predicted_seconds"], measured_seconds(worst)
        yield Verdict(
            "predicted step time",
            model,
            label(worst),
            abs(error),
            PREDICTED_BAR,
            met=abs(error) <= PREDICTED_BAR,
            note=f"{expected:.2f} of {measured:.2f} s, {error:+.0%}",
        )


def measured_seconds(row: Row) -> float:
    """What a step took of what was predicted for it, at the speed the profile was made at."""
    if is_ours(row):
        return float(row["step_ratio"] * row["predicted_eager_seconds"])
    return float(row["profiled_step_seconds"])


def _time_error(row: Row) -> float:
    return float(row["predicted_seconds"] / measured_seconds(row) - 1)
