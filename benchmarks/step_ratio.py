"""The step time of exact plans, as a ratio of the unplanned step's: predicted and measured.

Each model runs in a process of its own with one thread; a plan for each budget is made from one
profile of its step, as `memfit plan` makes it. All steps run in turn, and the least CPU time of
each counts, as whatever else runs on the machine only adds. The C library keeps what is freed:
by default it gives pages back and takes them again, between 45,000 and 480,000 times in a step of
the scan, the unplanned one as any other. The unplanned step runs twice: what two runs of one step
differ by is what this machine cannot tell.

    .venv/bin/python benchmarks/step_ratio.py              # all models, about fifteen minutes
    .venv/bin/python benchmarks/step_ratio.py vit mamba    # some

Results go to benchmarks/results/DATE-step-ratio.json and .md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

import memfit
from memfit import _native
from memfit.measure.step_time import cpu_seconds
from memfit.plan import cost_source
from memfit.program.target import workload_factory
from memfit.run.fitted import Fitted
from memfit.run.profile import profiled
from record import ROOT, Machine, write_results

MODELS = {
    "gpt2": {"batch": "2", "sequence": "256", "layers": "6"},
    "vit": {"batch": "4"},
    "bert": {"batch": "8", "layers": "4"},
    "resnet50": {"batch": "4"},
    "mamba": {},
}
"""Examples and their arguments, so small that a step takes about a second; and a scan of thousands
of small ops."""

BUDGETS = ("90%", "75%", "50%")
TURNS = 9
BOUND = {name: 0.08 if name == "mamba" else 0.03 for name in MODELS}
"""How far measured ratios may be from predicted ones."""

KEEPS_FREED = {"MALLOC_TRIM_THRESHOLD_": str(1 << 33), "MALLOC_MMAP_THRESHOLD_": str(1 << 30)}
COLUMNS = ("model", "budget", "predicted", "measured", "measured / predicted", "bound", "noise")
HEADER = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"


def main(arguments: list[str]) -> int:
    """Run the models one by one, each in a process of its own; write and print the table."""
    if arguments[:1] == ["--one"]:
        print(json.dumps(one(arguments[1])))
        return 0
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
        **KEEPS_FREED,
    }
    rows: list[dict[str, Any]] = []
    print(HEADER)
    for name in arguments or MODELS:
        program = [sys.executable, __file__, "--one", name]
        done = subprocess.run(
            program, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True
        )
        found = json.loads(done.stdout.splitlines()[-1])
        rows += found
        print("\n".join(map(line, found)), flush=True)
    within = sum(abs(row["measured"] / row["predicted"] - 1) <= BOUND[row["model"]] for row in rows)
    verdict = f"Step time over the unplanned step's, one thread: {within} of {len(rows)} within."
    print(verdict)
    table = "\n".join([HEADER, *map(line, rows), "", verdict])
    write_results("step-ratio", Machine.here(), rows, table)
    return 0


def one(name: str) -> list[dict[str, Any]]:
    """Predicted and measured ratios of one model at each budget."""
    workload = mamba() if name == "mamba" else example(name)
    trace = memfit.trace(workload)
    costs = cost_source.with_rates(profiled(workload, trace.native), "cpu")
    request = {"allow": "exact", "own_loop": False, "forbid": ["micro_batch"]}
    plans = [_native.plan(trace.native, costs, {**request, "budget": each}) for each in BUDGETS]
    steps = [Fitted(workload, made).step for made in ({"actions": []}, {"actions": []}, *plans)]
    for step in steps:
        step()
    unplanned, again, *planned = least_seconds(steps, TURNS)
    return [
        {
            "model": name,
            "budget": budget,
            "fits": plan["verdict"] == "fits",
            "predicted": plan["predicted_step_ratio"],
            "measured": seconds / unplanned,
            "unplanned_seconds": unplanned,
            "noise": abs(again / unplanned - 1),
        }
        for budget, plan, seconds in zip(BUDGETS, plans, planned, strict=True)
    ]


def least_seconds(steps: Sequence[Callable[[], Any]], turns: int) -> list[float]:
    """The least CPU seconds of each step, run in turn; the order is reversed from turn to turn."""
    least = [float("inf")] * len(steps)
    order = range(len(steps))
    for turn in range(turns):
        for which in order if turn % 2 == 0 else reversed(order):
            least[which] = min(least[which], cpu_seconds(steps[which]))
    return least


def example(name: str) -> memfit.Workload:
    """One of the examples."""
    return workload_factory(f"examples/{name}.py:build", list(MODELS[name].items()))()


def mamba() -> memfit.Workload:
    """A language model that scans its sequence element by element."""
    import transformers

    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "vocab_size": 4096}
    model = transformers.MambaForCausalLM(transformers.MambaConfig(**sizes))
    ids = torch.randint(0, 4096, (4, 128))
    return memfit.Workload(
        model=model,
        batch={"input_ids": ids, "labels": ids},
        loss=lambda model, batch: model(**batch).loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
    )


def line(row: dict[str, Any]) -> str:
    """One line of the table."""
    ratio = row["measured"] / row["predicted"]
    cells = [row["model"], row["budget"], f"{row['predicted']:.3f} x", f"{row['measured']:.3f} x"]
    cells += [f"{ratio:.3f}", f"{BOUND[row['model']]:.0%}", f"{row['noise']:.1%}"]
    return f"| {' | '.join(cells)} |{'' if row['fits'] else ' does not fit'}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
