"""One job of the comparison in :mod:`benchmarks.sharing.jobs`, in a process of its own.

A training job runs phases of steps with pauses between, as one that waits for data or for an
evaluation; an inference job serves bursts of requests to several models, with pauses between.
With memfit a job leases what it is predicted to take for each phase, and steps aside in the pauses.
Plainly it holds what it holds.

Prints ``ready`` when all is imported and warm, begins when a line comes on standard input, and
prints its results as JSON.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import memfit

PHASES, PAUSE_SECONDS = 3, 3.0
LAYERS, WIDTH, BATCH, STEPS = 12, 1024, 256, 5
SERVED_MODELS, SERVED_LAYERS, SERVED_BATCH, REQUESTS, ROOM = 6, 8, 64, 24, 3
SERVED_BYTES = SERVED_LAYERS * WIDTH * WIDTH * 4
BESIDES_BYTES = 24 << 20
"""What libraries may take besides tensors, of which a prediction knows nothing."""


def build(layers: int = LAYERS, width: int = WIDTH) -> nn.Sequential:
    """A model of linear layers."""
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width, bias=False), nn.GELU()]
    return nn.Sequential(*parts)


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    """What a step minimises."""
    result: Tensor = (model(batch) - batch).square().mean()
    return result


def workload() -> memfit.Workload:
    """The training step, for its prediction."""
    return memfit.Workload(
        model=build(),
        batch=torch.empty(BATCH, WIDTH),
        loss=loss_of,
        optimizer=torch.optim.AdamW,
    )


def train_need() -> int:
    """Bytes that a training job takes at its peak."""
    return int(memfit.predict(workload()).predicted_peak_bytes) + BESIDES_BYTES


def serve_need() -> int:
    """Bytes that an inference job takes within its pool's budget, while a model is being added."""
    return (ROOM + 1) * SERVED_BYTES + BESIDES_BYTES


def plain_need() -> int:
    """Bytes that an inference job takes with all of its models in memory."""
    return SERVED_MODELS * SERVED_BYTES + BESIDES_BYTES


@dataclass
class Training:
    """A training job.

    Attributes:
        seed: What its weights and data come from.
        spill: Folder to park in; ``None`` stays in memory.
    """

    seed: int
    spill: str | None
    parked: memfit.ParkedModel | None = None
    model: nn.Sequential | None = None
    optimizer: torch.optim.Optimizer | None = None
    digest: str = ""

    def phase(self, number: int) -> None:
        """Some steps."""
        if self.parked is not None:
            self.parked.wake()
        if self.model is None or self.optimizer is None:
            torch.manual_seed(self.seed)
            self.model = build()
            self.optimizer = torch.optim.AdamW(self.model.parameters())
        generator = torch.Generator().manual_seed(1000 * self.seed + number)
        for _ in range(STEPS):
            batch = torch.randn(BATCH, WIDTH, generator=generator)
            loss_of(self.model, batch).backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.optimizer.zero_grad()
        if number == PHASES - 1:
            self.digest = digest(self.model.state_dict())
        if self.spill is not None:
            self.parked = memfit.park(self.model, self.spill, optimizer=self.optimizer)


@dataclass
class Serving:
    """An inference job.

    Attributes:
        seed: What its weights and requests come from.
        spill: Folder to park in; ``None`` keeps all models in memory.
    """

    seed: int
    spill: str | None
    models: dict[str, nn.Module] = field(default_factory=dict)
    pool: memfit.Pool | None = None
    outputs: list[Tensor] = field(default_factory=list)

    def phase(self, number: int) -> None:
        """A burst of requests, some models wanted more than others."""
        if number == 0:
            self.load()
        draw = random.Random(1000 * self.seed + number)  # noqa: S311 - a fixed draw
        weights = [1 / (rank + 1) for rank in range(SERVED_MODELS)]
        inputs = torch.ones(SERVED_BATCH, WIDTH)
        for wanted in draw.choices(range(SERVED_MODELS), weights, k=REQUESTS):
            with self.use(str(wanted)) as model, torch.no_grad():
                self.outputs.append(model(inputs)[0].clone())
        if self.pool is not None:
            self.pool.shrink()

    def load(self) -> None:
        """All models."""
        if self.spill is not None:
            self.pool = memfit.Pool(ROOM * SERVED_BYTES, self.spill)
        for number in range(SERVED_MODELS):
            torch.manual_seed(100 * self.seed + number)
            model = build(SERVED_LAYERS)
            if self.pool is None:
                self.models[str(number)] = model
            else:
                self.pool.add(str(number), model)

    def use(self, name: str) -> contextlib.AbstractContextManager[nn.Module]:
        """A model."""
        if self.pool is None:
            return contextlib.nullcontext(self.models[name])
        return self.pool.use(name)

    @property
    def digest(self) -> str:
        """Of all outputs."""
        return digest(dict(enumerate(self.outputs)))


def digest(tensors: dict[Any, Tensor]) -> str:
    """Bits as text."""
    found = hashlib.sha256()
    for tensor in tensors.values():
        found.update(tensor.numpy().tobytes())
    return found.hexdigest()


def warm(spill: str | None) -> None:
    """Load what libraries load when they are first used."""
    model = build(2, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(model, torch.ones(4, 64)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    if spill is not None:
        pool = memfit.Pool("1MiB", spill)
        pool.add("small", build(1, 64))
        with (
            memfit.guard("64MiB"),
            memfit.park(model, spill, optimizer=optimizer),
            pool.use("small"),
        ):
            pass
        pool.shrink()


def run(job: Training | Serving, need_bytes: int | None) -> float:
    """All phases; returns the seconds that it waited for leases."""
    waited = 0.0
    for number in range(PHASES):
        asked = time.monotonic()
        with contextlib.ExitStack() as held:
            if need_bytes is not None:
                held.enter_context(memfit.lease(need_bytes, wait=None))
                held.enter_context(memfit.guard(need_bytes))
            waited += time.monotonic() - asked
            job.phase(number)
        if number < PHASES - 1:
            time.sleep(PAUSE_SECONDS)
    return waited


def main(kind: str, seed: int, need_bytes: int | None, spill: str | None) -> None:
    """Wait for the word, work, say how it went."""
    warm(spill)
    job = Training(seed, spill) if kind == "train" else Serving(seed, spill)
    print("ready", flush=True)
    sys.stdin.readline()
    waited = run(job, need_bytes)
    print(json.dumps({"digest": job.digest, "waited_seconds": waited}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) or None, sys.argv[4] or None)
