"""CPU time of capturing, predicting and planning, and of a fitted step that has nothing to do.

    .venv/bin/python benchmarks/speed.py
    .venv/bin/python benchmarks/speed.py ample     # only steps that have nothing to do

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
AMPLE: dict[str, dict[str, str]] = {
    "gpt2": {"batch": "2", "sequence": "32", "layers": "2", "width": "64"},
    "vit": {"batch": "2", "name": "vit_tiny_patch16_224", "depth": "2"},
    "vit, 4 layers": {"depth": "4"},
    "unet": {"batch": "2", "resolution": "16", "width": "32", "layers": "1"},
}
"""Steps that take little are the ones in which a fixed cost shows."""
AMPLE_NOISE = 0.05
AMPLE_SECONDS = 12.0
BUDGETS = ("75%", "50%", "1%")

HEADER = (
    "| model | ops | capture s | predict s | plan s, worst of 75 %, 50 %, 1 % |\n"
    "|---|---|---|---|---|"
)
AMPLE_HEADER = "| step under an ample budget | plain ms | fitted ms | ratio |\n|---|---|---|---|"


def main(arguments: list[str]) -> int:
    """Time each, print, write."""
    ample = {name: ample_budget(name, settings) for name, settings in AMPLE.items()}
    table = "\n".join([AMPLE_HEADER, *(ample_row(name, row) for name, row in ample.items())])
    is_slower = any(abs(row["ratio"] - 1) > AMPLE_NOISE for row in ample.values())
    if arguments == ["ample"]:
        print(table)
        write_results("speed-ample", Machine.here(), ample, table)
        return int(is_slower)
    rows = [measure(name, settings) for name, settings in TARGETS.items()]
    table = "\n".join([HEADER, *map(table_row, rows), "", table])
    print(table)
    write_results("speed", Machine.here(), {"rows": rows, "ample": ample}, table)
    large = next(row for row in rows if "24" in row["model"])
    missed = large["capture_seconds"] > CAPTURE_BAR
    missed |= any(row["plan_seconds"] > PLAN_BAR for row in rows)
    missed |= any(row["predict_seconds"] > PREDICT_BAR for row in rows)
    return int(missed or is_slower)


def ample_budget(name: str, settings: dict[str, str]) -> dict[str, float]:
    """CPU seconds of a plain loop's step and of a fitted one with nothing to do, paired medians."""
    example = name.partition(",")[0]
    workload = workload_factory(f"examples/{example}.py:build", list(settings.items()))()
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
    _, seconds = timed(plain)
    pairs = max(15, int(AMPLE_SECONDS / (2 * seconds)))
    # Each begins with the heap that a plain step leaves: pages that one lets go of, the next takes.
    before, after = paired_cpu_seconds(plain, fitted.step, pairs, before=(plain, plain))
    return {"plain_seconds": before, "fitted_seconds": after, "ratio": after / before}


def ample_row(name: str, row: dict[str, float]) -> str:
    """One line of the table."""
    milliseconds = (row["plain_seconds"] * 1e3, row["fitted_seconds"] * 1e3)
    return f"| {name} | {milliseconds[0]:.1f} | {milliseconds[1]:.1f} | {row['ratio']:.3f} |"


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
    sys.exit(main(sys.argv[1:]))
