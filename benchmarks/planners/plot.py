"""The picture of a run: step time over peak, a panel for each model and a mark for each method.

Responsible for the PNG only. Needs `matplotlib`. Colours are Okabe and Ito's, which people with any
colour vision tell apart; every method has a mark of its own besides.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("agg")
import matplotlib.pyplot as plt
from benchmarks.planners.judgement import apart, is_ours, redraws, right
from benchmarks.planners.points import Row, method_of, peer_of, shows_randomness
from matplotlib.lines import Line2D

INK, QUIET, GRID = "#222222", "#666666", "#e3e3e3"


@dataclass(frozen=True)
class Style:
    """How a series is drawn."""

    name: str
    colour: str
    mark: str
    line: str = "none"
    filled: bool = True


STYLES = (
    Style("eager", "#000000", "*"),
    Style("checkpoint every block", "#E69F00", "s"),
    Style("checkpoint every second block", "#E69F00", "D"),
    Style("selective, matmuls kept", "#CC79A7", "^"),
    Style("SAC MILP of torch.distributed", "#D55E00", "P"),
    Style("torch.compile, budgets, dropout off", "#56B4E9", "v", ":"),
    Style("torch.compile, budgets, dropout on", "#56B4E9", "<"),
    Style("memfit, exact", "#0072B2", "o", "-"),
    Style("memfit, exact, optimizer apart", "#0072B2", "o", "--", filled=False),
    Style("memfit, equivalent", "#009E73", "h", "-"),
    Style("memfit compiled, dropout off", "#0072B2", "X", "-."),
    Style("memfit compiled, dropout on", "#0072B2", "X"),
)
_NAMES = {
    "every block": "checkpoint every block",
    "every second block": "checkpoint every second block",
    "selective": "selective, matmuls kept",
    "sac_milp": "SAC MILP of torch.distributed",
}


def draw(rows: Sequence[Row], path: Path, caption: str) -> None:
    """Draw all models and write the file.

    Args:
        rows: The rows of a run.
        path: The PNG.
        caption: One line below the panels.
    """
    rows = measured_in_turn(rows)
    models = list(dict.fromkeys(row["model"] for row in rows))
    columns = min(3, len(models) + 1)
    lines = -(-(len(models) + 1) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(5.2 * columns, 4.3 * lines), squeeze=False, layout="constrained"
    )
    panels = list(axes.flat)
    for panel, model in zip(panels, models, strict=False):
        _panel(panel, model, [row for row in rows if row["model"] == model and _drawn(row)])
    _legend(panels[len(models)])
    for panel in panels[len(models) + 1 :]:
        panel.axis("off")
    figure.suptitle(
        "Step time against peak memory: left and down is better", fontsize=15, color=INK
    )
    figure.supxlabel(caption, fontsize=9, color=QUIET)
    figure.savefig(path, dpi=150, facecolor="white")
    plt.close(figure)


def measured_in_turn(rows: Sequence[Row]) -> list[Row]:
    """The rows, each peer's step time as it was in turn with memfit's, where it was.

    Args:
        rows: The rows of a run, the peers' perhaps from another day and processor.
    """
    times = {
        _name(peer_of(row)): row["step_ratio"] / row["beside_ratio"]
        for row in rows
        if "beside_ratio" in row
    }
    return [
        {**row, "step_ratio": times.get(_name(row), row["step_ratio"])}
        if "step_ratio" in row
        else row
        for row in rows
    ]


def _name(row: Row) -> str:
    return json.dumps({"model": row["model"], **method_of(row)}, sort_keys=True)


def _drawn(row: Row) -> bool:
    return "peak_bytes" in row and not shows_randomness(row) and not redraws(row)


def _series(row: Row) -> str:
    """Name of the style that a row is drawn in."""
    if row["method"] in {"torch.compile", "memfit compiled"}:
        name = "torch.compile, budgets" if row["method"] == "torch.compile" else row["method"]
        return f"{name}, dropout {'on' if row.get('dropout', True) else 'off'}"
    if row["method"] != "memfit":
        return _NAMES.get(row["method"], str(row["method"]))
    if row["options"]["allow"] != "exact":
        return "memfit, equivalent"
    return "memfit, exact, optimizer apart" if apart(row) else "memfit, exact"


def _panel(axes: Any, model: str, rows: list[Row]) -> None:
    axes.set_title(model, loc="left", fontsize=13, color=INK)
    for style in STYLES:
        mine = [row for row in rows if _series(row) == style.name]
        sound = sorted((row["peak_bytes"] / 2**20, row["step_ratio"]) for row in mine if right(row))
        if sound:
            ours = is_ours(next(row for row in mine if right(row)))
            axes.plot(*zip(*sound, strict=True), zorder=4 if ours else 3, **_look(style))
        for row in mine:
            if not right(row):
                _crossed_out(axes, row["peak_bytes"] / 2**20, row["step_ratio"], style)
    floor = next((row["floor_bytes"] / 2**20 for row in rows), None)
    if floor is not None:
        axes.axvline(floor, color=QUIET, linewidth=1, linestyle=(0, (1, 2)), zorder=1)
        axes.annotate(
            "parameters and\noptimizer state",
            (floor, 0.02),
            xycoords=("data", "axes fraction"),
            xytext=(4, 0),
            textcoords="offset points",
            va="bottom",
            fontsize=8,
            color=QUIET,
        )
    axes.set_xlabel("peak, MiB", color=INK)
    axes.set_ylabel("step CPU time, of eager's", color=INK)
    axes.grid(color=GRID, linewidth=0.8, zorder=0)
    axes.set_axisbelow(True)
    axes.tick_params(colors=QUIET)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(GRID)


def _look(style: Style) -> dict[str, Any]:
    return {
        "color": style.colour,
        "marker": style.mark,
        "linestyle": style.line,
        "linewidth": 1.6,
        "markersize": 11 if style.mark == "*" else 7,
        "markerfacecolor": style.colour if style.filled else "white",
        "markeredgecolor": "white" if style.filled else style.colour,
        "markeredgewidth": 0.7 if style.filled else 1.4,
    }


def _crossed_out(axes: Any, peak: float, ratio: float, style: Style) -> None:
    """A point whose gradients are wrong."""
    axes.plot(
        peak, ratio, marker=style.mark, color=style.colour, alpha=0.35, markersize=7, zorder=2
    )
    axes.plot(peak, ratio, marker="x", color=INK, markersize=9, markeredgewidth=1.4, zorder=2)


def _legend(axes: Any) -> None:
    axes.axis("off")
    handles = [Line2D([], [], label=style.name, **_look(style)) for style in STYLES]
    handles.append(
        Line2D(
            [],
            [],
            marker="x",
            color=INK,
            linestyle="none",
            markersize=9,
            markeredgewidth=1.4,
            label="gradients are wrong",
        )
    )
    axes.legend(handles=handles, loc="center left", frameon=False, fontsize=11, labelcolor=INK)
