"""Micro-batches: gradients against the whole batch, and models that must be refused.

Dropout is off, so that cutting the batch changes nothing but rounding; BERT's labels count
differently in every piece. Only micro-batches are allowed, at a budget half-way between the lowest
peak they reach and the unplanned one.

    .venv/bin/python benchmarks/micro_batches.py       # about five minutes on two cores

Exits with 1 where a relative error is above 1e-5, a peak above its budget, or a refusal is missing.
"""

from __future__ import annotations

import sys
from typing import Any

from record import Machine, gib, memfit_json, write_results

MODELS = {
    "gpt2": ["layers=4", "sequence=256"],
    "llama": ["layers=4"],
    "bert": ["layers=4"],
    "t5": ["layers=2", "batch=16"],
    "vit": ["depth=4"],
}
REFUSED = {
    "resnet50": "examples/resnet50.py:build",
    "contrastive": "benchmarks/contrastive.py:build",
}
BAR = 1e-5

HEADER = (
    "| model | pieces | peak, measured | budget | loss error | gradient error |\n"
    "|---|---|---|---|---|---|"
)


def main() -> int:
    """Verify, print, write."""
    rows = [verify(name, settings) for name, settings in MODELS.items()]
    refusals = {name: refusal(target) for name, target in REFUSED.items()}
    lines = [HEADER, *map(table_row, rows), ""]
    lines += [f"Refused: {name}, because {reason}." for name, reason in refusals.items()]
    print("\n".join(lines))
    write_results(
        "micro-batches", Machine.here(), {"rows": rows, "refusals": refusals}, "\n".join(lines)
    )
    good = all(
        row["gradients"]["max_relative_error"] <= BAR
        and row["planned"]["measured_peak_bytes"] <= row["budget_bytes"]
        for row in rows
    )
    return 0 if good and all(refusals.values()) else 1


def verify(name: str, settings: list[str]) -> dict[str, Any]:
    """One model, verified with micro-batches alone."""
    chosen = [part for setting in ("dropout=0", *settings) for part in ("--set", setting)]
    forbidden = ("--forbid", "remat", "--forbid", "fuse_optimizer")
    target = f"examples/{name}.py:build"
    lowest = memfit_json("plan", target, "--budget", "1%", *chosen, *forbidden)
    unplanned_bytes = lowest["unplanned"]["predicted_peak_bytes"]
    budget = str((lowest["minimum_peak_bytes"] + unplanned_bytes) // 2)
    return {
        "model": name,
        **memfit_json("verify", target, "--budget", budget, *chosen, *forbidden),
    }


def refusal(target: str) -> str:
    """Why a model's batch cannot be cut."""
    plan = memfit_json("plan", target, "--budget", "50%")
    reasons = [r["reason"] for r in plan["refusals"] if r["kind"] == "micro_batch"]
    return reasons[0] if reasons else ""


def table_row(row: dict[str, Any]) -> str:
    """One line of the table."""
    pieces = [a["count"] for a in row["plan"]["actions"] if a["kind"] == "micro_batch"]
    cells = [
        row["model"],
        str(pieces[0]) if pieces else "none",
        gib(row["planned"]["measured_peak_bytes"]) if pieces else row["verdict"],
        gib(row["budget_bytes"]),
        f"{row['loss']['max_relative_error']:.1e}",
        f"{row['gradients']['max_relative_error']:.1e}",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
