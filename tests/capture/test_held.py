"""What a loss holds by itself is predicted, recorded and measured as one and the same."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import memfit
from memfit.capture import record
from memfit.errors import CaptureError
from memfit.measure import measure_peak, static_tensors
from memfit.run.fitted import Fitted
from memfit.tensors.held import held_tensors
from memfit.workload import Workload

WIDTH = 64
GLOBAL = torch.ones(3 * WIDTH, WIDTH)


class Teacher(nn.Module):
    """Knows more than its forward uses."""

    def __init__(self):
        super().__init__()
        self.used = nn.Linear(WIDTH, 4 * WIDTH)
        self.unused = nn.Linear(WIDTH, 8 * WIDTH)
        self.register_buffer("table", torch.zeros(WIDTH))

    def forward(self, x):
        return self.used(x) + self.table.sum()


def distilled(model, batch, teacher):
    with torch.no_grad():
        aim = teacher(batch)
    return (model(batch) - aim).square().mean()


class Trainer:
    def __init__(self, teacher):
        self.teacher = teacher
        self.data = TensorDataset(torch.ones(1000, WIDTH))  # read batch by batch

    def loss(self, model, batch):
        return distilled(model, batch, self.teacher)


@dataclass(slots=True)
class Loss:
    teachers: dict[str, nn.Module]

    def __call__(self, model, batch):
        return distilled(model, batch, self.teachers["only"])


@torch.enable_grad()
def decorated(model, batch, teacher):
    return distilled(model, batch, teacher)


FORMS = {
    "a closure": lambda teacher: lambda model, batch: distilled(model, batch, teacher),
    "a partial": lambda teacher: partial(distilled, teacher=teacher),
    "a bound method": lambda teacher: Trainer(teacher).loss,
    "an object with slots": lambda teacher: Loss({"only": teacher}),
    "a decorated function": lambda teacher: partial(decorated, teacher=teacher),
    "a default": lambda teacher: lambda model, batch, t=teacher: distilled(model, batch, t),
}


def workload(loss):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH))
    return Workload(model, torch.randn(16, WIDTH), loss, lambda p: torch.optim.SGD(p, lr=0.1))


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_a_teacher_is_counted_once_and_whole(form, frozen):
    teacher = Teacher().requires_grad_(not frozen)
    load = workload(FORMS[form](teacher))
    state = [*teacher.parameters(), *teacher.buffers()]
    found = held_tensors(load)
    assert {id(tensor) for tensor in found.values()} == {id(tensor) for tensor in state}
    with Fitted(load, {"actions": []}) as fitted:
        fitted.step()
        measured = measure_peak(fitted.step, static_tensors(load, fitted.optimizer))
    assert memfit.predict(load).predicted_peak_bytes == measured.peak_bytes
    held = sum(tensor.nbytes for tensor in state)
    own = sum(p.nbytes for p in load.model.parameters()) + load.batch.nbytes
    assert measured.static_bytes == held + own


def test_it_is_named_in_the_trace():
    load = workload(FORMS["a closure"](Teacher()))
    trace = record(load, probe=False)
    names = {trace["strings"][a["name"]] for a in trace["allocations"] if a["category"] == "input"}
    assert {"teacher.used.weight", "teacher.unused.bias", "teacher.table"} <= names


def test_a_global_that_the_code_names_is_counted_and_others_are_not():
    load = workload(lambda model, batch: (model(batch)[:, :WIDTH] @ GLOBAL.T).mean())
    assert list(held_tensors(load)) == ["GLOBAL"]
    assert not held_tensors(workload(lambda model, batch: model(batch).mean()))


def test_what_belongs_to_the_workload_is_not_counted_again():
    load = workload(lambda m, b: m(b).mean())
    model, batch = load.model, load.batch
    load.loss = partial(lambda m, b, also: m(b).mean(), also=[model, batch, model[0].weight.data])
    assert not held_tensors(load)


def test_a_teacher_that_would_be_trained_is_refused():
    teacher = Teacher()
    load = workload(lambda model, batch: (model(batch) - teacher(batch)).square().mean())
    with pytest.raises(CaptureError, match="requires grad and is no parameter of the model"):
        memfit.predict(load)


def test_inference_holds_what_its_forward_does():
    teacher = Teacher()
    load = Workload(
        nn.Linear(WIDTH, WIDTH), torch.randn(16, WIDTH), forward=lambda m, b: teacher(m(b))
    )
    with Fitted(load, {"actions": []}) as fitted:
        fitted.step()
        measured = measure_peak(fitted.step, static_tensors(load, None))
    assert memfit.predict(load).predicted_peak_bytes == measured.peak_bytes
