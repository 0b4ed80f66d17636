"""The tables of a run: every point, and every bar.

Responsible for Markdown only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.planners.judgement import Verdict, measured_seconds, redraws, right
from benchmarks.planners.points import Row, label

POINTS_HEADER = (
    "| point | peak | above parameters and optimizer state | step, of eager's | gradients "
    "| predicted peak | predicted step | planning |\n|---|---|---|---|---|---|---|---|"
)
BARS_HEADER = "| bar | model | point | measured | at most | met | |\n|---|---|---|---|---|---|---|"


def document(rows: Sequence[Row], verdicts: Sequence[Verdict]) -> str:
    """The whole page below its title."""
    parts = [_overview(verdicts)]
    for model in dict.fromkeys(row["model"] for row in rows):
        of_model = [row for row in rows if row["model"] == model]
        parts += [f"## {model}", _rounding(of_model[0])]
        parts.append("\n".join([POINTS_HEADER, *map(point_line, of_model)]))
        judged = [verdict for verdict in verdicts if verdict.model == model]
        parts.append("\n".join([BARS_HEADER, *map(verdict_line, judged)]))
    return "\n\n".join(parts)


def _overview(verdicts: Iterable[Verdict]) -> str:
    lines = ["| bar | met |", "|---|---|"]
    bars: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        bars.setdefault(verdict.bar, []).append(verdict)
    lines += [
        f"| {bar} | {sum(verdict.met for verdict in found)} of {len(found)} |"
        for bar, found in bars.items()
    ]
    return "\n".join(lines)


def _rounding(row: Row) -> str:
    """What else than a mistake may set a gradient apart from eager's."""
    if "rounding_error" not in row:
        return "How far eager's gradients are from those in float64 was not measured."
    error = row["rounding_error"]
    return f"Gradients of eager are {error:.0e} from those of the same step in float64."


def point_line(row: Row) -> str:
    """One point."""
    for outcome in ("refused", "failed"):
        if outcome in row:
            text = row[outcome].replace("|", "/")[:200]
            return f"| {label(row)} | {outcome}: {text} | | | | | | |"
    return f"| {' | '.join([label(row), *_figures(row)])} |"


def _figures(row: Row) -> list[str]:
    peak, predicted_peak = row["peak_bytes"], row.get("predicted_peak_bytes")
    predicted = row.get("predicted_seconds")
    planning = row.get("plan_seconds")
    return [
        mib(peak),
        mib(peak - row["floor_bytes"]),
        f"{row['step_ratio']:.3f} x",
        gradients(row),
        ""
        if predicted_peak is None
        else f"{mib(predicted_peak)} ({predicted_peak / peak - 1:+.1%})",
        "" if predicted is None else f"{predicted:.2f} of {measured_seconds(row):.2f} s",
        _compiling(row) if planning is None else f"{planning:.2f} s",
    ]


def _compiling(row: Row) -> str:
    """Seconds of the first step where it compiles."""
    if row["method"] != "torch.compile":
        return ""
    return f"{row['first_step_wall_seconds']:.0f} s with compiling"


def gradients(row: Row) -> str:
    """How the gradients compare."""
    if row["bitwise"]:
        return "bitwise"
    error = f"{row['gradient_error']:.0e}"
    if redraws(row):
        return "other draws of dropout"
    return error if right(row) else f"**wrong**: {error}"


def verdict_line(verdict: Verdict) -> str:
    """One bar at one place."""
    value = "" if verdict.value is None else f"{verdict.value:.3f}"
    cells = [verdict.bar, verdict.model, verdict.subject, value, f"{verdict.limit:.2f}"]
    return f"| {' | '.join([*cells, 'yes' if verdict.met else '**no**', verdict.note])} |"


def mib(count: int) -> str:
    """Bytes in MiB."""
    return f"{count / 2**20:.1f} MiB"
