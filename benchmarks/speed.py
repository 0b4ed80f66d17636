"""CPU time of capturing, predicting and planning, and of a fitted step that has nothing to do.

    .venv/bin/python benchmarks/speed.py

Bars: capturing a 24-layer GPT (both batch sizes) 4 s, a plan 5 s, a prediction from a trace 0.2 s;
a step under an ample budget costs what it costs without memfit. Exits with 1 where one is missed.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import memfit
from memfit.measure import paired_cpu_seconds
from memfit.program.target import workload_factory
from record import Machine, write_results

TARGETS: dict[str, dict[str, str]] = {
    "gpt2": {},
    "gpt2, 24 layers": {"layers": "24", "width": "1024", "batch": "2"},
    "llama": {},
    "bert": {},
    "t5": {},
    "resnet50": {},
    "vit": {},
    "convnext": {},
    "unet": {},
}
CAPTURE_BAR, PLAN_BAR, PREDICT_BAR = 4.0, 5.0, 0.2
AMPLE_NOISE = 0.05
BUDGETS = ("75%", "50%", "1%")

HEADER = (
    "| model | ops | capture s | predict s | plan s, worst of 75 %, 50 %, 1 % |\n"
    "|---|---|---|---|---|"
)


def main() -> int:
    """Time each, print, write."""
    rows = [measure(name, settings) for name, settings in TARGETS.items()]
    ample = ample_budget_ratio()
    table = "\n".join([HEADER, *map(table_row, rows)])
    table += f"\n\nStep under an ample budget, ViT: {ample:.3f} x a plain training loop."
    print(table)
    write_results("speed", Machine.here(), {"rows": rows, "ample_ratio": ample}, table)
    large = next(row for row in rows if "24" in row["model"])
    missed = large["capture_seconds"] > CAPTURE_BAR
    missed |= any(row["plan_seconds"] > PLAN_BAR for row in rows)
    missed |= any(row["predict_seconds"] > PREDICT_BAR for row in rows)
    missed |= abs(ample - 1) > AMPLE_NOISE
    return int(missed)


def ample_budget_ratio() -> float:
    """CPU time of a fitted step with nothing to do over that of a plain loop, paired medians."""
    workload = workload_factory("examples/vit.py:build", [("depth", "4")])()
    fitted = memfit.fit(workload, "200%")
    optimizer = fitted.optimizer
    assert optimizer is not None
    assert workload.loss is not None
    loss = workload.loss

    def plain() -> None:
        loss(workload.model, workload.batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    plain()
    fitted.step()
    before, after = paired_cpu_seconds(plain, fitted.step, pairs=15)
    return after / before


def measure(name: str, settings: dict[str, str]) -> dict[str, Any]:
    """CPU seconds of one model; the second capture counts, the first pays for imports."""
    example = name.partition(",")[0]
    workload = workload_factory(f"examples/{example}.py:build", list(settings.items()))()
    memfit.trace(workload)
    trace, capture_seconds = timed(lambda: memfit.trace(workload))
    _, predict_seconds = timed(lambda: memfit.predict(trace, budget="50%"))
    memfit.plan(trace, "100%")
    plan_seconds = max(timed(lambda b=budget: memfit.plan(trace, b))[1] for budget in BUDGETS)
    print(f"{name}: capture {capture_seconds:.2f}", file=sys.stderr)
    return {
        "model": name,
        "ops": len(json.loads(trace.json())["ops"]),
        "capture_seconds": capture_seconds,
        "predict_seconds": predict_seconds,
        "plan_seconds": plan_seconds,
    }


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """The result and the CPU seconds it took."""
    start = time.process_time()
    result = call()
    return result, time.process_time() - start


def table_row(row: dict[str, Any]) -> str:
    """One line of the table."""
    times = (row["capture_seconds"], row["predict_seconds"], row["plan_seconds"])
    return f"| {row['model']} | {row['ops']} | {' | '.join(f'{t:.2f}' for t in times)} |"


if __name__ == "__main__":
    sys.exit(main())
