"""Steps of several graphs: who holds what passes from one to the next while backward runs."""

import functools
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memfit
from memfit.run.compiled import toolchain
from memfit.run.compiled.fitted import CompiledFitted
from memfit.run.compiled.recording import record

# Dynamo looks at it of what crosses a break.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")

ROWS, WIDTH = 2048, 512
PASSED_BYTES = ROWS * WIDTH * 4


class Broken(nn.Module):
    """Passes one large tensor over a graph break, and may keep it."""

    def __init__(self, *, keeps: bool = False) -> None:
        super().__init__()
        self.up, self.mix = nn.Linear(16, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.keeps = keeps
        self.kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        passed = self.mix(F.layer_norm(self.up(x).sin(), (WIDTH,)).cos())
        torch._dynamo.graph_break()
        if self.keeps:
            self.kept = passed
        return passed.square().mean()


def workload(*, keeps: bool = False) -> memfit.Workload:
    torch.manual_seed(0)
    torch._dynamo.reset()
    return memfit.Workload(
        Broken(keeps=keeps),
        torch.randn(ROWS, 16),
        lambda model, batch: model(batch),
        lambda p: torch.optim.SGD(p, lr=1e-3),
    )


def graphs_of(work: memfit.Workload):
    assert work.loss is not None
    return record(work.model, work.loss, work.batch, torch.enable_grad)


def released_bytes(joint):
    return sum(joint.storages[s].bytes for s in joint.released)


def test_what_only_a_later_graph_read_is_not_held_while_backward_runs():
    first, second = graphs_of(workload())
    assert released_bytes(first.joint) == PASSED_BYTES
    assert 0 in second.sources
    assert set(first.sources) == {None}


def test_what_the_model_keeps_is_held():
    first, _ = graphs_of(workload(keeps=True))
    assert released_bytes(first.joint) == 0


@pytest.mark.skipif(toolchain.missing("cpu") is not None, reason="needs a compiler")
@pytest.mark.usefixtures("kernels_that_do_nothing")
def test_a_step_of_two_graphs_takes_what_is_told_of_it():
    work = workload()
    fitted = memfit.fit(work, "200%", compile=True)
    assert isinstance(fitted, CompiledFitted)
    for _ in range(3):
        fitted.step()
    report = fitted.report()
    assert len(report.graphs) == 2
    told = max(graph.predicted_peak_bytes for graph in report.graphs)
    # Holding the result throughout backward, or counting its gradient twice, would tell as much
    # again; scalars and what a kernel asks for on the side are far less.
    assert abs(report.measured_peak_bytes - told) < PASSED_BYTES // 64


LOGGER = logging.getLogger("talking")


@functools.cache
def warning_once(self, message):
    """As Hugging Face's transformers gives it to every logger."""
    self.warning(message)


class Talking(nn.Module):
    """Says something amid its forward, with random numbers before and after."""

    def __init__(self, say: str) -> None:
        super().__init__()
        self.up, self.say = nn.Linear(16, 64), say

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.up(x), 0.5)
        getattr(LOGGER, self.say)("look here")
        return F.dropout(x.sin(), 0.5).square().mean()


def talking(say: str) -> memfit.Workload:
    torch.manual_seed(0)
    torch._dynamo.reset()
    return memfit.Workload(Talking(say), torch.randn(8, 16), lambda model, batch: model(batch))


def test_what_is_said_once_breaks_no_graph_and_what_is_said_always_does(monkeypatch):
    monkeypatch.setattr(logging.Logger, "warning_once", warning_once, raising=False)
    assert len(graphs_of(talking("warning_once"))) == 1
    assert len(graphs_of(talking("warning"))) == 2
