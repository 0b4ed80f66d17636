"""What plans are, so that a change of the code's shape can be shown to change none of them.

    python tests/golden/golden.py            # compares with what is kept; exit code 1: it differs
    python tests/golden/golden.py --write    # keeps what there is now

The eight examples at full size and six small models, for CUDA (so that no figure depends on the
scratch that this processor's kernels take), at five budgets, exact and equivalent, without a place
to offload to and with the host's memory, under one cost profile that is kept here: the predicted
peak, the predicted ratio of step times, and a digest of the actions. The text of each report that
a trace or a plan has is kept once.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import memfit
from memfit import _native

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
PLANS, REPORTS, PROFILE = FOLDER / "plans.json", FOLDER / "reports.txt", FOLDER / "profile.json"

EXAMPLES = ("bert", "convnext", "gpt2", "llama", "resnet50", "t5", "unet", "vit")
BUDGETS = ("90%", "75%", "60%", "45%", "1")
"""Of the unplanned peak; the last asks for the smallest peak."""

OFFER = {
    "tier": "host",
    "folder": "",
    "write_bytes_per_second": 25e9,
    "read_bytes_per_second": 25e9,
}


class Twice(nn.Module):
    """Uses one layer two times."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(self.inner(x)))


class InPlace(nn.Module):
    """Adds to its result in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.inner(x)).add_(x)


class Words(nn.Module):
    """Words to words, with one matrix at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(2000, 64)
        self.body = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
        self.head = nn.Linear(64, 2000, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.words(x)))


def _square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def _words(model: nn.Module, batch: Tensor) -> Tensor:
    return functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, foreach=True)


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True)


SMALL: dict[str, Callable[[], memfit.Workload]] = {
    "layers": lambda: memfit.Workload(
        nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(64, 64), nn.GELU()))),
        torch.randn(256, 64),
        _square,
        _adam,
    ),
    "twice": lambda: memfit.Workload(
        nn.Sequential(*(Twice() for _ in range(4))), torch.randn(256, 64), _square, _sgd
    ),
    "in place": lambda: memfit.Workload(
        nn.Sequential(*(InPlace() for _ in range(5))), torch.randn(256, 64), _square, _adam
    ),
    "words": lambda: memfit.Workload(Words(), torch.randint(0, 2000, (8, 32)), _words, _adam),
    "convolutions": lambda: memfit.Workload(
        nn.Sequential(
            *(
                m
                for i in range(4)
                for m in (nn.Conv2d(3 if i == 0 else 32, 32, 3), nn.BatchNorm2d(32), nn.ReLU())
            ),
            nn.Flatten(),
            nn.LazyLinear(10),
        ),
        torch.randn(8, 3, 24, 24),
        _square,
        _sgd,
    ),
    "inference": lambda: memfit.Workload(
        nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(64, 256), nn.Linear(256, 64)))),
        torch.randn(256, 64),
    ),
}


def workload(name: str) -> memfit.Workload:
    """A model by its name."""
    torch.manual_seed(0)
    if name in SMALL:
        made = SMALL[name]()
        with torch.no_grad():
            made.model(made.batch)  # lazy layers get their shape
        return made
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with memfit.weightless():
        built: memfit.Workload = module.build()
    return built


def plans(name: str, trace: memfit.Trace) -> Iterator[tuple[str, dict[str, Any]]]:
    """The plans of a model, each with what it is asked for."""
    costs = {"kind": "roofline", "profile": json.loads(PROFILE.read_text())}
    for budget in BUDGETS:
        for allow in ("exact", "equivalent"):
            for offer in (None, OFFER):
                request = {
                    "budget": budget,
                    "allow": allow,
                    "own_loop": False,
                    "forbid": [],
                    "offload": offer,
                }
                made = _native.plan(trace.native, costs, request, None)
                asked = f"{name}, {budget}, {allow}, {'host' if offer else 'nowhere'}"
                yield asked, made


def _done(value: Any) -> Any:
    """What actions do: without the ops that their proofs are about, those of the trace."""
    if isinstance(value, list):
        return [_done(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {k: _done(v) for k, v in value.items() if k not in ("micro_batch", "ops")}


def kept(plan: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a plan, its actions as plans of version 1 said them."""
    said = [{("class" if k == "promise" else k): v for k, v in a.items()} for a in plan["actions"]]
    actions = json.dumps(_done(said), sort_keys=True).encode()
    return {
        "predicted_peak_bytes": plan["planned"]["predicted_peak_bytes"],
        "predicted_step_ratio": plan["predicted_step_ratio"],
        "digest": hashlib.sha256(actions).hexdigest()[:16],
    }


def now(name: str) -> tuple[dict[str, Any], str]:
    """What there is now of a model: its plans, and the texts of reports of the first model."""
    torch.set_num_threads(1)
    trace = memfit.trace(workload(name), target=name, device="cuda", slices=True)
    found = {asked: kept(plan) for asked, plan in plans(name, trace)}
    sys.stderr.write(f"{name}: {len(found)} plans\n")
    return found, "\n".join(_texts(trace)) if name == next(iter(SMALL)) else ""


def _texts(trace: memfit.Trace) -> Iterator[str]:
    """Each report that a trace and its plans have, as it is printed."""
    yield f"{memfit.predict(trace)}\n"
    yield f"{memfit.plan(trace, '75%', gpu='a100-80')}\n"
    yield f"{memfit.plan(trace, '1B', gpu='a100-80', allow='equivalent')}\n"
    yield f"{memfit.pareto(trace, gpu='a100-80')}\n"


def main() -> int:
    """Compare or keep; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="keep what there is now")
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    found: dict[str, Any] = {}
    texts = ""
    with ProcessPoolExecutor(given.processes, get_context("spawn")) as pool:
        for some, text in pool.map(now, [*reversed(EXAMPLES), *SMALL]):
            found |= some
            texts += text
    if given.write:
        PLANS.write_text(json.dumps(found, indent=0, sort_keys=True) + "\n")
        REPORTS.write_text(texts)
        return 0
    before = json.loads(PLANS.read_text())
    changed = [asked for asked in {**before, **found} if before.get(asked) != found.get(asked)]
    for asked in changed:
        print(f"{asked}: {before.get(asked)} -> {found.get(asked)}")
    if REPORTS.read_text() != texts:
        print("the texts of reports differ")
        return 1
    print(f"{len(found)} plans, {len(changed)} changed")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
