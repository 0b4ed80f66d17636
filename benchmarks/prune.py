"""Pruned models: what half of the parameters takes, predicted beside measured, and what trains.

    .venv/bin/python benchmarks/prune.py half            # models with half of their parameters
    .venv/bin/python benchmarks/prune.py half resnet50 gpt2
    .venv/bin/python benchmarks/prune.py channels        # half of the channels, beside DepGraph

`half` prunes by magnitude until 50 % of the parameters are left, takes some steps on one batch and
measures one of them. `channels` prunes half of every group. Where it is installed (it is optional:
`pip install torch-pruning`), DepGraph does the same by the same scores: heads whole, the classifier
ignored, and channels that a layer norm takes its mean over let go, as it does; see `depgraph.py`.
memfit keeps those in `half`, as by default.

Results go to benchmarks/results/DATE-prune-PIECE.json and .md. Exits with 1 where a prediction is
off by more than 0.5 %, a model does not train, the half that DepGraph leaves takes less, or
half of its channels leaves another number of parameters.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torchvision
from torch import nn
from torch.nn import functional

import depgraph
import memfit
from memfit.measure import measure_peak, static_tensors
from memfit.prune.groups import removal
from memfit.prune.scores import scored
from memfit.prune.trial import separable
from memfit.run.fitted import Fitted
from record import ROOT, Machine, gib, write_results

MOST_OFF = 0.005
STEPS = 6


def images(model: nn.Module, batch: int = 8, size: int = 224) -> memfit.Workload:
    """A model on images, with AdamW."""
    return memfit.Workload(
        model=model,
        batch=(torch.randn(batch, 3, size, size), torch.randint(0, 10, (batch,))),
        loss=lambda m, b: functional.cross_entropy(m(b[0]), b[1]),
        optimizer=lambda params: torch.optim.AdamW(params, 1e-4),
    )


def example(name: str, **settings: Any) -> memfit.Workload:
    """One of the examples."""
    if str(ROOT / "examples") not in sys.path:
        sys.path.insert(0, str(ROOT / "examples"))
    built: memfit.Workload = importlib.import_module(name).build(**settings)
    return built


def _timm(name: str, **settings: Any) -> nn.Module:
    import timm

    model: nn.Module = timm.create_model(name, **settings)
    return model


HALF: dict[str, Callable[[], memfit.Workload]] = {
    "resnet50": lambda: images(torchvision.models.resnet50()),
    "mobilenet_v2": lambda: images(torchvision.models.mobilenet_v2()),
    "convnext_atto": lambda: images(_timm("convnext_atto")),
    "vit": lambda: example("vit", batch=4),
    "gpt2": lambda: example("gpt2", batch=2, layers=6, sequence=256),
    "llama": lambda: example("llama", batch=2),
}
CHANNELS: dict[str, Callable[[], nn.Module]] = {
    "resnet18": torchvision.models.resnet18,
    "resnet50": torchvision.models.resnet50,
    "vgg11_bn": torchvision.models.vgg11_bn,
    "mobilenet_v2": torchvision.models.mobilenet_v2,
    "densenet121": torchvision.models.densenet121,
    "convnext_atto": lambda: _timm("convnext_atto"),
    "vit_tiny, 6 heads": lambda: _timm("vit_tiny_patch16_224", num_heads=6),
}

HALF_HEADER = (
    "| model | parameters | left | peak: predicted before | predicted after | measured after "
    "| | pruned in | loss over 6 steps | DepGraph: left | measured | memfit's beside it "
    "|\n|---|---|---|---|---|---|---|---|---|---|---|---|"
)
CHANNELS_HEADER = (
    "| model | parameters | groups | left by memfit | left by DepGraph |\n|---|---|---|---|---|"
)


def half(name: str) -> dict[str, Any]:
    """Prune to half of the parameters, train and measure."""
    torch.manual_seed(0)
    workload = HALF[name]()
    began = time.perf_counter()
    pruned = memfit.prune(workload, parameters="50%")
    seconds = time.perf_counter() - began
    losses, measured = trained(pruned.workload)
    report = pruned.report
    other = _half_by_depgraph(workload) if depgraph.is_installed() else None
    most = None if other is None else other["measured_peak_bytes"]
    return {
        "model": name,
        "before": report.as_dict()["before"],
        "after": report.as_dict()["after"],
        "measured_peak_bytes": measured,
        "seconds": seconds,
        "losses": losses,
        "trials": report.trials,
        "by_depgraph": other,
        "holds": abs(measured - report.after.predicted_peak_bytes) <= MOST_OFF * measured
        and losses[-1] < losses[0]
        and (most is None or measured <= most),
    }


def trained(workload: memfit.Workload) -> tuple[list[float], int]:
    """The losses of some steps, and the peak of the next one."""
    fitted = Fitted(workload, {"actions": []})
    losses = [float(fitted.step()) for _ in range(STEPS)]
    static = static_tensors(workload, fitted.optimizer)
    return losses, measure_peak(fitted.step, static).peak_bytes


def _half_by_depgraph(workload: memfit.Workload) -> dict[str, Any]:
    """The same by DepGraph: what it leaves, and the peak of a step of that."""
    most = depgraph.count(workload.model) // 2
    smaller = depgraph.pruned_to(workload.model, workload.batch, most)
    losses, measured = trained(replace(workload, model=smaller))
    left = depgraph.count(smaller)
    return {"parameters": left, "losses": losses, "measured_peak_bytes": measured}


def half_row(row: dict[str, Any]) -> str:
    """One line of the table."""
    before, after = row["before"], row["after"]
    first, last = before["predicted_peak_bytes"], after["predicted_peak_bytes"]
    cells = [
        row["model"],
        f"{before['parameters'] / 1e6:.1f} M",
        f"{after['parameters'] / 1e6:.1f} M",
        gib(first),
        gib(last),
        gib(row["measured_peak_bytes"]),
        f"{row['measured_peak_bytes'] / first:.2f} x",
        f"{row['seconds']:.0f} s",
        f"{row['losses'][0]:.2f} -> {row['losses'][-1]:.2f}",
        *_beside(row),
    ]
    return f"| {' | '.join(cells)} |"


def _beside(row: dict[str, Any]) -> list[str]:
    other = row["by_depgraph"]
    if other is None:
        return ["not installed", "", ""]
    peak = other["measured_peak_bytes"]
    left, ratio = other["parameters"] / 1e6, row["measured_peak_bytes"] / peak
    return [f"{left:.1f} M", gib(peak), f"{ratio:.3f} x"]


def channels(name: str) -> dict[str, Any]:
    """Prune half of every group, by memfit and by DepGraph."""
    torch.manual_seed(0)
    workload = images(CHANNELS[name](), batch=2)
    whole = depgraph.count(workload.model)
    found = separable(workload, through_norms=True)
    removed = removal(found.groups, scored(workload, found.groups, "magnitude"), 0.5)
    left = depgraph.count(found.without(removed, weights=True).model)
    by_depgraph = None
    if depgraph.is_installed():
        by_depgraph = depgraph.count(depgraph.pruned_by(workload.model, workload.batch, 0.5))
    return {
        "model": name,
        "parameters": whole,
        "groups": len(found.groups),
        "left": left,
        "left_by_depgraph": by_depgraph,
        "holds": by_depgraph in {None, left},
    }


def channels_row(row: dict[str, Any]) -> str:
    """One line of the table."""
    other = row["left_by_depgraph"]
    cells = [
        row["model"],
        f"{row['parameters']:,}",
        str(row["groups"]),
        f"{row['left']:,}",
        "not installed" if other is None else f"{other:,}",
    ]
    return f"| {' | '.join(cells)} |"


PIECES: dict[str, tuple[Any, Any, Any, str]] = {
    "half": (HALF, half, half_row, HALF_HEADER),
    "channels": (CHANNELS, channels, channels_row, CHANNELS_HEADER),
}


def main(words: list[str]) -> int:
    """Run the rows of a piece, print them as they come, write the results."""
    piece, names = words[0] if words else "half", words[1:]
    models, run, to_row, header = PIECES[piece]
    torch.set_num_threads(1)
    rows = []
    print(header)
    for name in names or models:
        rows.append(run(name))
        print(to_row(rows[-1]), flush=True)
    table = "\n".join([header, *map(to_row, rows)])
    write_results(f"prune-{piece}", Machine.here(), rows, table)
    bad = [row["model"] for row in rows if not row["holds"]]
    print(json.dumps(bad) if bad else "all hold")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
