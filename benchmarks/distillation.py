"""A student and its teacher in one budget: predicted beside measured, against the same by hand.

Llama 6x384 teaches Llama 2x256, 4 x 128 tokens, AdamW. `naive` is the step as many write it: the
teacher runs with a graph and gets gradients that nobody uses. Each row is a run of `memfit verify`
in a process of its own; those with a budget are held to 35 % of the naive peak and to the least.

    .venv/bin/python benchmarks/distillation.py

Results go to benchmarks/results/DATE-distillation.json and .md. Exits with 1 where a measured peak
is above its budget, a plan does not hold, or a plan is not exact.
"""

from __future__ import annotations

import sys
import tempfile
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

from record import ROOT, Machine, gib, memfit_json, write_results

if TYPE_CHECKING:
    from memfit import Workload

HEADER = (
    "| step | budget | peak: predicted | measured | of the naive | step CPU time "
    "| loss, gradients |\n|---|---|---|---|---|---|---|"
)
SHARE = 0.35
UNPLANNED = ("remat", "unneeded_saves", "fuse_optimizer", "one_by_one", "micro_batch", "chunk")


def teacher_and_student() -> tuple[Workload, Workload]:
    """Both workloads of `examples/distil.py`."""
    import memfit

    sys.path.insert(0, str(ROOT / "examples"))
    from distil import llama

    torch.manual_seed(0)
    ids = torch.randint(0, 4000, (4, 128))
    student = memfit.Workload(
        llama(2, 256),
        {"input_ids": ids, "labels": ids},
        lambda model, batch: model(**batch).loss,
        lambda parameters: torch.optim.AdamW(parameters, lr=3e-4),
    )
    return memfit.Workload(llama(6, 384), {"input_ids": ids}), student


def naive() -> Workload:
    """The step with a graph of the teacher, and gradients of its parameters."""
    import memfit

    teacher, student = teacher_and_student()
    trained = len(list(student.model.parameters()))
    model = nn.ModuleDict({"student": student.model, "teacher": teacher.model})

    def loss(model: Any, batch: Any) -> torch.Tensor:
        aim = model["teacher"](batch["input_ids"]).logits
        out = model["student"](**batch)
        soft, target = ((one / 2).flatten(0, -2).log_softmax(-1) for one in (out.logits, aim))
        divergence = F.kl_div(soft, target, reduction="batchmean", log_target=True)
        return 0.5 * out.loss + 0.5 * 4 * divergence

    return memfit.Workload(
        model,
        student.batch,
        loss,
        lambda parameters: torch.optim.AdamW(list(parameters)[:trained], lr=3e-4),
    )


def as_it_is() -> Workload:
    """The step by `memfit.distil`."""
    import memfit

    return memfit.distil(*teacher_and_student())


def half() -> Workload:
    """The same with the teacher in bfloat16, for a budget that it cannot meet otherwise."""
    import memfit

    return memfit.distil(*teacher_and_student(), "88%", allow="half_teacher", forbid=UNPLANNED)


def int8() -> Workload:
    """The same with the teacher's linear layers in 8 bits."""
    import memfit

    return memfit.distil(*teacher_and_student(), "88%", allow="int8_teacher", forbid=UNPLANNED)


def main() -> int:
    """Run the rows, print them as they come, write the results."""
    rows: list[dict[str, Any]] = []
    print(HEADER)
    unaided = memfit_json("predict", "benchmarks/distillation.py:naive")["predicted_peak_bytes"]
    with tempfile.TemporaryDirectory() as place:
        for step in ("naive", "as_it_is", "half", "int8"):
            target = f"benchmarks/distillation.py:{step}"
            budgets = {"none": "110%"}
            if step != "naive":
                least = memfit_json("plan", target, "--budget", "1%", "--offload", place)
                budgets["35 % of the naive"] = str(int(SHARE * unaided))
                budgets["the least"] = str(least["minimum_peak_bytes"] + least["margin_bytes"])
            for label, budget in budgets.items():
                found = memfit_json("verify", target, "--budget", budget, "--offload", place)
                rows.append({"step": step, "label": label, "naive_bytes": unaided, **found})
                print(table_row(rows[-1]), flush=True)
    table = "\n".join([HEADER, *map(table_row, rows)])
    write_results("distillation", Machine.here(), rows, table)
    bad = [(row["step"], row["label"]) for row in rows if not is_fine(row)]
    print(bad or "all hold")
    return 1 if bad else 0


def is_fine(row: dict[str, Any]) -> bool:
    """Whether a row kept its promises."""
    measured = row["planned"]["measured_peak_bytes"]
    exact = row["loss"]["agreement"] == row["gradients"]["agreement"] == "bitwise"
    return bool(row["holds"]) and exact and measured <= row["budget_bytes"]


def table_row(row: dict[str, Any]) -> str:
    """One line of the table."""
    planned, unplanned = row["planned"], row["unplanned"]
    measured = planned["measured_peak_bytes"]
    cells = [
        row["step"].replace("_", " "),
        row["label"] if row["label"] == "none" else f"{row['label']}: {gib(row['budget_bytes'])}",
        gib(planned["predicted_peak_bytes"]),
        gib(measured),
        f"{measured / row['naive_bytes']:.2f} x",
        f"{planned['step_cpu_seconds'] / unplanned['step_cpu_seconds']:.2f} x",
        f"{row['loss']['agreement']}, {row['gradients']['agreement']}",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
