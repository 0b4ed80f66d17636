"""Fewer bits: what they bring, predicted beside measured, and how far gradients are off.

`kernel` times each form both ways against a copy of the same numbers, in turn, on one thread. Each
row of the other pieces is one run of `memfit verify` in a process of its own, at the smallest peak
that a plan reaches with the kinds of action that it may use, plus the plan's own margin; those of
`autocast` at 60 % of the unplanned peak and those of `half` at 30 %, or at the smallest where that
is more.

    .venv/bin/python benchmarks/precision.py kernel           # the forms, beside a copy
    .venv/bin/python benchmarks/precision.py alone            # small models, by shrinking alone
    .venv/bin/python benchmarks/precision.py kinds vit        # the examples: each kind by itself
    .venv/bin/python benchmarks/precision.py least vit llama  # the examples: exact, with leave
    .venv/bin/python benchmarks/precision.py autocast vit     # at 60 % of the peak: exact, autocast
    .venv/bin/python benchmarks/precision.py half vit         # at 30 %: parameters in bfloat16
    .venv/bin/python benchmarks/precision.py peaks vit        # peaks alone, of each and autocast

`peaks` compares peaks and nothing else, of plans as above, each in a process of its own; and of
steps that autocast without a plan, with torch's cache of cast weights and without.

Results go to benchmarks/results/DATE-precision-PIECE.json and .md, with the rows of the same day
that are not run again. Exits with 1 where a measured
peak is above its budget, a prediction is off by more than 0.5 % (of autocast 0.1 %), or a plan does
not hold.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from memfit.apply.precision.narrow import NarrowTier
from memfit.measure import cpu_seconds_in_turn, measure_peak, static_tensors
from record import RESULTS, ROOT, Machine, gib, verified_at_least, write_results

if TYPE_CHECKING:
    from memfit import Workload

HEADER = (
    "| model | plan | peak: unplanned | predicted | measured | of the unplanned | above parameters "
    "| step CPU time | gradients off by | of the batch's noise |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)
OTHERS = ("remat", "unneeded_saves", "fuse_optimizer", "one_by_one", "micro_batch", "chunk")
ALONE = {"shrink": ("--allow", "shrink", *(word for kind in OTHERS for word in ("--forbid", kind)))}
LEAST = {
    "exact": ("--forbid", "micro_batch", "--forbid", "chunk"),
    "with leave": ("--forbid", "micro_batch", "--forbid", "chunk", "--allow", "approximate"),
}
AUTOCAST = {
    "exact": LEAST["exact"],
    "autocast": ("--forbid", "micro_batch", "--forbid", "chunk", "--allow", "autocast"),
}
HALF = {
    "half parameters": (
        "--forbid",
        "micro_batch",
        "--forbid",
        "chunk",
        "--allow",
        "half_parameters",
    )
}
NOTHING_ELSE = tuple(word for kind in OTHERS for word in ("--forbid", kind))
KINDS = {
    "shrink": ALONE["shrink"],
    "state in 8 bits": ("--allow", "optimizer_bits", *NOTHING_ELSE),
}
PIECES = {"alone": ALONE, "kinds": KINDS, "least": LEAST, "autocast": AUTOCAST, "half": HALF}
BUDGETS = {"autocast": "60%", "half": "30%"}
MOST_OFF = 0.005


def gpt2() -> Workload:
    """GPT-2 of four layers with dropout, 4 x 256 tokens, without an optimizer."""
    import transformers

    from memfit import Workload

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=8000, n_layer=4, n_embd=256, n_head=4, n_positions=256
    )
    ids = torch.randint(0, 8000, (4, 256))
    batch = {"input_ids": ids, "labels": ids}
    return Workload(transformers.GPT2LMHeadModel(config), batch, lambda m, x: m(**x).loss)


def vit() -> Workload:
    """A tiny ViT on 8 images, without an optimizer."""
    return _images("vit_tiny_patch16_224")


def convnext() -> Workload:
    """The smallest ConvNeXt on 8 images, without an optimizer."""
    return _images("convnext_atto")


def resnet() -> Workload:
    """ResNet-18 on 8 images, without an optimizer."""
    return _images("resnet18")


def _images(name: str) -> Workload:
    import timm

    from memfit import Workload

    torch.manual_seed(0)
    batch = (torch.randn(8, 3, 224, 224), torch.randint(0, 100, (8,)))
    model = timm.create_model(name, num_classes=100)
    return Workload(model, batch, lambda m, x: torch.nn.functional.cross_entropy(m(x[0]), x[1]))


SMALL = ("gpt2", "vit", "convnext", "resnet")


NUMBERS = 8 << 20
"""Numbers that the forms are timed on: 32 MiB, which no cache holds."""
TIMES = 15


def kernel() -> int:
    """CPU time of each form, both ways, beside a copy."""
    torch.set_num_threads(1)
    numbers = torch.randn(NUMBERS)
    target = torch.empty(numbers.nbytes, dtype=torch.uint8)
    copied = target.view(torch.float32)
    rows = []
    for form in ("half", "eight_bit"):
        tier = NarrowTier(form)
        parcel = tier.send(numbers)
        ways = {
            "copy": lambda: copied.copy_(numbers),
            "shrink": lambda tier=tier: tier.send(numbers),
            "expand": lambda parcel=parcel: parcel.fetch(target),
        }
        nothing = [lambda: None] * len(ways)
        seconds = cpu_seconds_in_turn(list(ways.values()), TIMES, nothing)
        copy, *both = seconds
        for way, took in zip(("shrink", "expand"), both, strict=True):
            rows.append({"form": form, "way": way, "seconds": took, "copies": took / copy})
    cells = [f"| {it['form']} | {it['way']} | {it['copies']:.2f} |" for it in rows]
    table = "\n".join(["| form | way | CPU time, in copies of 32 MiB |", "|---|---|---|", *cells])
    print(table)
    write_results("precision-kernel", Machine.here(), rows, table)
    return 0


PEAKS: dict[str, dict[str, Any]] = {
    "shrink": {"allow": "shrink", "budget": "60%", "only": True},
    "state in 8 bits": {"allow": "optimizer_bits", "budget": "1%", "only": True},
    "autocast": {"allow": "autocast", "budget": "60%"},
    "half parameters": {"allow": "half_parameters", "budget": "30%"},
    "own autocast, with the cache": {"cache": True},
    "own autocast, without it": {"cache": False},
}
"""What each is planned by, or that torch's autocast runs without a plan. What does not fit is
planned for the smallest budget that does."""
MOST_OFF_AUTOCAST = 0.001


def peaks(names: list[str]) -> int:
    """Peaks of each way, predicted and measured."""
    rows = []
    for name in names:
        for way in PEAKS:
            words = [sys.executable, __file__, "peak", name, way]
            done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT)
            if done.returncode:
                raise RuntimeError(done.stderr)
            rows.append(json.loads(done.stdout.splitlines()[-1]))
            print(peak_row(rows[-1]), flush=True)
    machine = Machine.here()
    all_rows = with_known("peaks", machine, rows)
    head = "| model | way | budget | predicted | measured | off by | actions |"
    table = "\n".join([head, "|---|---|---|---|---|---|---|", *map(peak_row, all_rows)])
    write_results("precision-peaks", machine, all_rows, table)
    bad = [(row["model"], row["way"]) for row in rows if not is_near(row)]
    print(json.dumps(bad) if bad else "all hold")
    return 1 if bad else 0


def peak(name: str, way: str) -> int:
    """The peak of one way, in this process."""
    import importlib.util

    import memfit
    from memfit.run.fitted import Fitted

    specification = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    torch.manual_seed(0)
    workload = module.build()
    asked = PEAKS[way]
    row: dict[str, Any] = {"model": name, "way": way, "budget_bytes": None, "actions": []}
    plan: dict[str, Any] = {"actions": []}
    if "cache" in asked:
        cache = asked["cache"]
        workload = replace(workload, autocast=torch.bfloat16, autocast_cache=cache)
        predicted = memfit.predict(workload).predicted_peak_bytes
    else:
        forbid = OTHERS if asked.get("only") else ("micro_batch", "chunk")
        options = {"allow": asked["allow"], "forbid": forbid}
        made = memfit.plan(workload, asked["budget"], **options)
        if not made.fits:
            made = memfit.plan(workload, made.minimum_budget_bytes, **options)
        predicted, plan = made.planned.predicted_peak_bytes, dict(made.as_dict())
        row["budget_bytes"] = made.budget_bytes
        row["actions"] = [action.kind for action in made.actions]
    with Fitted(workload, plan) as fitted:
        fitted.step()
        static = static_tensors(workload, fitted.optimizer)
        measured = measure_peak(fitted.step, static).peak_bytes
    print(json.dumps({**row, "predicted_bytes": predicted, "measured_bytes": measured}))
    return 0


def is_near(row: dict[str, Any]) -> bool:
    """Whether a peak is as predicted, and within its budget."""
    predicted, measured = row["predicted_bytes"], row["measured_bytes"]
    most = MOST_OFF_AUTOCAST if "autocast" in row["way"] else MOST_OFF
    budget = row["budget_bytes"]
    return abs(predicted - measured) <= most * measured and (budget is None or measured <= budget)


def peak_row(row: dict[str, Any]) -> str:
    """One line of the table of peaks."""
    predicted, measured, budget = (
        row[it] for it in ("predicted_bytes", "measured_bytes", "budget_bytes")
    )
    cells = [
        row["model"],
        row["way"],
        "-" if budget is None else gib(budget),
        gib(predicted),
        gib(measured),
        f"{100 * (predicted / measured - 1):+.3f} %",
        ", ".join(row["actions"]) or "-",
    ]
    return f"| {' | '.join(cells)} |"


def with_known(piece: str, machine: Machine, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a piece, with those of the same day that were not run again."""
    before = RESULTS / f"{machine.date}-precision-{piece}.json"
    known = json.loads(before.read_text())["rows"] if before.exists() else []
    return list({(row["model"], row["way"]): row for row in (*known, *rows)}.values())


def main(words: list[str]) -> int:
    """Run the rows of a piece, print them as they come, write the results."""
    piece, names = words[0] if words else "alone", words[1:]
    if piece == "kernel":
        return kernel()
    if piece == "peaks":
        return peaks(names or ["vit", "llama"])
    if piece == "peak":
        return peak(*names)
    alone, ways = piece == "alone", PIECES[piece]
    budget = BUDGETS.get(piece, "1%")
    file = "benchmarks/precision.py:{}" if alone else "examples/{}.py:build"
    rows = []
    print(HEADER)
    for name in names or (SMALL if alone else ("vit", "llama")):
        target = file.format(name)
        for way, options in ways.items():
            row = {
                "model": name,
                "way": way,
                **verified_at_least(target, options, ("parameter",), budget),
            }
            rows.append(row)
            print(table_row(row), flush=True)
    machine = Machine.here()
    all_rows = with_known(piece, machine, rows)
    table = "\n".join([HEADER, *map(table_row, all_rows)])
    write_results(f"precision-{piece}", machine, all_rows, table)
    bad = [row for row in rows if not is_fine(row)]
    print(json.dumps([(row["model"], row["way"]) for row in bad]) if bad else "all hold")
    return 1 if bad else 0


def is_fine(row: dict[str, Any]) -> bool:
    """Whether a row kept its promises."""
    planned = row["planned"]
    measured, predicted = planned["measured_peak_bytes"], planned["predicted_peak_bytes"]
    off = abs(measured - predicted) / measured
    return bool(row["holds"]) and measured <= row["budget_bytes"] and off <= MOST_OFF


def table_row(row: dict[str, Any]) -> str:
    """One line of the table."""
    unplanned, planned = row["unplanned"], row["planned"]
    before, measured = unplanned["measured_peak_bytes"], planned["measured_peak_bytes"]
    changed = row.get("approximation")
    error, noise = (changed["gradient_error"], changed["batch_noise"]) if changed else (None, None)
    cells = [
        row["model"],
        row["way"],
        gib(before),
        gib(planned["predicted_peak_bytes"]),
        gib(measured),
        f"{measured / before:.2f} x",
        gib(measured - row["floor_bytes"]),
        f"{planned['step_cpu_seconds'] / unplanned['step_cpu_seconds']:.2f} x",
        "-" if error is None else f"{100 * error:.2f} %",
        "-" if not error or not noise else f"{100 * error / noise:.2f} %",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
