"""The smallest peak with parts of the step in slices, beside the smallest exact one, both measured.

Each row is one run of `memfit verify` in a process of its own, at the smallest peak that a plan
reaches without micro-batches, plus the plan's own margin. Bytes that no plan of these kinds can
touch (parameters, optimizer state, the batch) are the floor.

    .venv/bin/python benchmarks/slices.py                # llama, some minutes
    .venv/bin/python benchmarks/slices.py llama gpt2     # others

Results go to benchmarks/results/DATE-slices.json and .md. Exits with 1 where a measured peak is
above its budget or gradients are not those of the unplanned step up to rounding.
"""

from __future__ import annotations

import sys
from typing import Any

from record import Machine, gib, verified_at_least, write_results

HEADER = (
    "| model | plan | budget | peak: unplanned | predicted | measured | above the floor "
    "| step CPU time | gradients |\n|---|---|---|---|---|---|---|---|---|"
)
WAYS = {
    "exact": ("--forbid", "micro_batch", "--forbid", "chunk"),
    "with slices": ("--forbid", "micro_batch", "--allow", "equivalent"),
}


def main(names: list[str]) -> int:
    """Run the rows, print them as they come, write the results."""
    rows = []
    print(HEADER)
    for name in names or ["llama"]:
        for way, options in WAYS.items():
            row = {
                "model": name,
                "way": way,
                **verified_at_least(f"examples/{name}.py:build", options),
            }
            rows.append(row)
            print(table_row(row), flush=True)
    table = "\n".join([HEADER, *map(table_row, rows)])
    write_results("slices", Machine.here(), rows, table)
    return 0 if all(map(is_fine, rows)) else 1


def is_fine(row: dict[str, Any]) -> bool:
    """Whether a row kept its promises."""
    kept = row["planned"]["measured_peak_bytes"] <= row["budget_bytes"]
    return kept and row["gradients"]["agreement"] in {"bitwise", "equivalent"}


def table_row(row: dict[str, Any]) -> str:
    """One line of the table."""
    unplanned, planned = row["unplanned"], row["planned"]
    measured = planned["measured_peak_bytes"]
    cells = [
        row["model"],
        row["way"],
        gib(row["budget_bytes"]),
        gib(unplanned["measured_peak_bytes"]),
        gib(planned["predicted_peak_bytes"]),
        gib(measured),
        gib(measured - row["floor_bytes"]),
        f"{planned['step_cpu_seconds'] / unplanned['step_cpu_seconds']:.2f} x",
        row["gradients"]["agreement"],
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
