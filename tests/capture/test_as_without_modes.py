"""What torch does in place without a mode is recorded as done in place, with the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peaks import measured_peak, predicted_peak
from ran import inline
from torch import Tensor, nn
from torch.nn import functional

from memfit.capture import record
from memfit.workload import Workload


class Of(nn.Module):
    """Computes with one parameter what it is told to."""

    def __init__(self, compute: Callable[[Tensor, Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.compute = compute
        self.weight = nn.Parameter(torch.randn(shape))

    def forward(self, batch: Tensor) -> Tensor:
        return self.compute(self.weight, batch)


ROWS = torch.arange(64) * 7
SIGNS = torch.randn(32, 200, 64)


def weighted(weight: Tensor, batch: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(
        weight * batch, batch.sigmoid(), pos_weight=torch.full((64,), 2.0), reduction="none"
    )


FORMULAS = {
    "index": (lambda weight, rows: weight[rows], (2048, 256), ROWS),
    "mask": (lambda weight, rows: weight.sin()[rows], (2048, 256), torch.arange(2048) % 9 == 0),
    "gather": (
        lambda weight, rows: torch.take_along_dim(weight.sin(), rows.unsqueeze(1), 0),
        (2048, 256),
        ROWS,
    ),
    "topk": (lambda weight, batch: (weight * batch).topk(8, -1)[0], (200, 64), SIGNS),
    "max": (lambda weight, batch: (weight * batch).max(-1)[0], (200, 64), SIGNS),
    "median": (lambda weight, batch: (weight * batch).median(-1)[0], (200, 64), SIGNS),
    "weighted": (weighted, (200, 64), SIGNS),
}


def workload(name: str) -> Workload:
    torch.manual_seed(0)
    compute, shape, batch = FORMULAS[name]
    return Workload(
        Of(compute, *shape),
        batch,
        lambda model, batch: model(batch).square().mean(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )


@pytest.mark.parametrize("name", FORMULAS)
def test_formulas_of_autograd_take_what_they_take_without_a_mode(name):
    assert predicted_peak(record(workload(name))) == measured_peak(workload(name))


INDEXED = """
    import torch
    from torch import nn

    class Memory(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(4096, 512))
            self.inner = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
        def forward(self, rows):
            return self.inner(self.table[rows].tanh())

    torch.manual_seed(0)
    model = Memory()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        loss = model(torch.arange(64) * (step + 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(repr(loss.item()), model.table[7].sum().item().hex())
"""


def test_a_recorded_step_of_a_script_takes_what_it_takes_alone(tmp_path: Path):
    """The table's gradient takes 8 MiB: beside another one the step would not fit."""
    ran = inline(tmp_path, "28MiB", INDEXED, "--no-offload")
    assert ran.loops[0]["plan"]["fits"], ran.stderr
    assert ran.loops[0]["plan"]["actions"] == []
    assert ran.fitting["verdict"]["kept"], ran.stderr


OF_THE_SCRIPT = """
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    rows = torch.arange(64)

    def weigh(gradient):  # while the node of an index runs
        scale = torch.ones(64, 512)
        other = scale.index_put((rows[:32],), torch.full((32, 512), 3.0))
        return gradient * scale + other * 0.01

    def computed_again(table):  # in that node, for its rows
        with torch.no_grad():
            scale = torch.ones(64, 512)
            other = scale.index_put((rows[:32],), torch.full((32, 512), 3.0))
        return ((table[:64] * scale) * other)[rows.clone()]

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(1024, 512))
            self.inner = nn.Linear(512, 512)
        def forward(self, kind):
            if kind == "hook":
                chosen = self.table[rows]
                chosen.register_hook(weigh)
            else:
                chosen = checkpoint(computed_again, self.table.sin(), use_reentrant=False)
            return self.inner(chosen).tanh()

    torch.manual_seed(0)
    import sys
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        loss = model(sys.argv[1]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        print(repr(loss.item()), model.table.grad.sum().item().hex())
        optimizer.step()
"""


@pytest.mark.parametrize("kind", ["hook", "checkpoint"])
def test_what_the_script_computes_while_a_node_runs_stays_as_it_is(kind, tmp_path: Path):
    """It is compared with the script alone."""
    ran = inline(tmp_path, "100MiB", OF_THE_SCRIPT, kind, fitting=["--forbid", "undo_checkpoints"])
    assert ran.loops[0]["observed"]["steps"] > 0, ran.stderr
