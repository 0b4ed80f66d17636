"""Verify every example at 75 %, 50 % and its minimum, and write the table of docs/examples.md.

Each row is one run of `memfit verify` in a process of its own: predicted against measured peaks,
paired step times, loss and gradients compared bitwise. The minimum is the smallest peak any exact
plan reaches, as `memfit plan` states it, plus the plan's own margin.

    .venv/bin/python benchmarks/examples.py            # all, about half an hour on two cores
    .venv/bin/python benchmarks/examples.py vit bert   # some; the table is left alone

Results go to benchmarks/results/DATE-examples.json and .md; the table between the `examples`
markers of docs/examples.md is replaced. Exits with 1 when any measured peak is above its budget.
"""

from __future__ import annotations

import sys
from typing import Any

from record import ROOT, Machine, gib, memfit_json, replace_table, write_results

EXAMPLES = ("gpt2", "llama", "bert", "t5", "resnet50", "vit", "convnext", "unet")
FRACTIONS = ("75%", "50%")

HEADER = (
    "| model | budget | peak: unplanned | planned, predicted | planned, measured "
    "| step CPU time | loss, gradients | plan |\n"
    "|---|---|---|---|---|---|---|---|"
)
SHORT = {"remat": "checkpointing", "fuse_optimizer": "fused optimizer", "micro_batch": "batch in"}


def main(names: list[str]) -> int:
    """Run the rows, print them as they come, write the results."""
    chosen = names or list(EXAMPLES)
    rows: list[dict[str, Any]] = []
    print(HEADER)
    for name in chosen:
        for row in verify_example(name):
            rows.append(row)
            print(table_row(row), flush=True)
    over = [row for row in rows if above_budget(row)]
    if not names:
        machine = Machine.here()
        table = "\n".join([HEADER, *map(table_row, rows)])
        write_results("examples", machine, rows, table)
        sentence = f"{table}\n\n{machine.sentence()}"
        replace_table(ROOT / "docs/examples.md", "examples", sentence)
    return 1 if over else 0


def verify_example(name: str) -> list[dict[str, Any]]:
    """Rows of one example: both fractions, then the minimum."""
    target = f"examples/{name}.py:build"
    exact = ("--forbid", "micro_batch", "--forbid", "chunk")
    plan = memfit_json("plan", target, "--budget", "1%", *exact)
    least = plan["minimum_peak_bytes"] + plan["margin_bytes"]
    rows = []
    for label, budget in [*((f, f) for f in FRACTIONS), ("minimum", str(least))]:
        row = memfit_json("verify", target, "--budget", budget)
        rows.append({"model": name, "label": label, **row})
    return rows


def above_budget(row: dict[str, Any]) -> bool:
    """Whether a plan that claims to fit did not."""
    return row["verdict"] == "fits" and (
        row["planned"]["measured_peak_bytes"] > row["budget_bytes"]
    )


def table_row(row: dict[str, Any]) -> str:
    """One line of the table."""
    unplanned, planned = row["unplanned"], row["planned"]
    budget = f"{row['label']} = {gib(row['budget_bytes'])}"
    if row["verdict"] != "fits":
        least = f"does not fit: minimum {gib(row['minimum_peak_bytes'])}"
        peak = gib(unplanned["predicted_peak_bytes"])
        return f"| {row['model']} | {budget} | {peak} | {least} | | | | |"
    ratio = planned["step_cpu_seconds"] / unplanned["step_cpu_seconds"]
    numerics = f"{row['loss']['agreement']}, {row['gradients']['agreement']}"
    actions = ", ".join(
        SHORT[action["kind"]]
        + (f" of {action['count']}" if action["kind"] == "remat" else "")
        + (f" {action['count']} pieces" if action["kind"] == "micro_batch" else "")
        for action in row["plan"]["actions"]
    )
    cells = [
        row["model"],
        budget,
        gib(unplanned["measured_peak_bytes"]),
        gib(planned["predicted_peak_bytes"]),
        gib(planned["measured_peak_bytes"]),
        f"{ratio:.2f} x",
        numerics,
        actions or "nothing to do",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
