"""A step that uses the workload's own tensors instead of the copies it is given."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memfit
from memfit.capture import record, record_pair
from memfit.workload import Workload


class Scaled(nn.Module):
    """A layer, and a table that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        return self.layer(x) * self.scale


class OverItself(nn.Module):
    """Keeps a function that reaches the module it was made in, whatever is copied."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Scaled()
        self.function = lambda x: self.inner.forward(x) + 0

    def forward(self, x):
        return self.function(x)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def without_gradient(model, x):
    with torch.no_grad():
        return model(x).sum()


def over_data(model):
    """A penalty on weights that somebody took out of the model before the step."""
    taken = [parameter.data for parameter in model.parameters()]
    return lambda copy, batch: copy(batch["x"]).sum() + sum(t.sum() for t in taken)


CLOSURES = {
    "the model": (lambda m, _: lambda _m, b: m(b["x"]).sum(), "parameter `layer.weight`"),
    "a teacher": (
        lambda m, _: lambda model, b: model(b["x"]).sum() + without_gradient(m, b["x"]),
        "parameter `layer.weight`",
    ),
    "weights": (lambda m, _: over_data(m), "parameter `layer.weight`"),
    "the batch": (lambda _, x: lambda model, _b: model(x).sum(), "`x` of the batch"),
    "a view of it": (lambda _, x: lambda model, _b: model(x[:2]).sum(), "`x` of the batch"),
}


@pytest.mark.parametrize("case", CLOSURES)
def test_a_closure_over_the_workload_is_refused_by_name(case):
    make, name = CLOSURES[case]
    model, x = Scaled(), torch.randn(4, 8)
    workload = Workload(model, {"x": x}, make(model, x), sgd)
    with pytest.raises(memfit.UsageError, match=name) as raised:
        record(workload, probe=False)
    assert "lambda model, batch" in str(raised.value)


def test_so_it_is_in_a_real_step():
    model = Scaled()

    def forward(_, batch):
        if float(batch["x"].exp().sum()) > 0:  # which only a real step can know
            return model(batch["x"])
        return None

    before = model.scale.clone()
    workload = Workload(model, {"x": torch.randn(4, 8)}, forward=forward)
    with pytest.raises(memfit.UsageError, match=r"parameter `layer\.weight`"):
        record(workload, probe=False)
    assert torch.equal(model.scale, before)


def test_so_it_is_without_weights():
    with memfit.weightless():
        model = Scaled()
    workload = Workload(model, {"x": torch.randn(4, 8)}, forward=lambda _, b: model(b["x"]))
    with pytest.raises(memfit.UsageError, match=r"parameter `layer\.weight`"):
        record(workload, probe=False)


def test_a_function_over_the_module_it_lies_in_is_explained():
    workload = Workload(OverItself(), {"x": torch.randn(4, 8)}, lambda m, b: m(b["x"]).sum(), sgd)
    with pytest.raises(memfit.UsageError, match=r"parameter `inner\.layer\.weight`") as raised:
        record(workload, probe=False)
    assert "a lambda over `self`" in raised.value.__notes__[0]


def total_bytes(trace):
    return sum(allocation["bytes"] for allocation in trace["allocations"])


def test_a_module_buffer_is_taken_for_its_copy():
    model = Scaled()
    batch = {"x": torch.randn(4, 8)}
    given = Workload(model, batch, lambda m, b: (m(b["x"]) + m.scale).sum(), sgd)
    closed = Workload(model, batch, lambda m, b: (m(b["x"]) + model.scale).sum(), sgd)
    for one, other in zip(
        record_pair(given, probe=False), record_pair(closed, probe=False), strict=True
    ):
        assert total_bytes(one) == total_bytes(other)


def test_the_data_set_that_the_batch_was_cut_from_is_counted_once():
    model, data = Scaled(), torch.randn(64, 8)
    loss = lambda m, b: (m(b["x"] - data.mean(0))).sum()  # noqa: E731 - as a user writes it
    trace, _ = record_pair(Workload(model, {"x": data[:4]}, loss, sgd), probe=False)
    inputs = [a["bytes"] for a in trace["allocations"] if a["category"] == "input"]
    assert inputs == [data.nbytes]


def test_a_teacher_outside_is_part_of_the_step():
    teacher, model = Scaled().requires_grad_(requires_grad=False), Scaled()
    loss = lambda m, b: (m(b["x"]) - teacher(b["x"])).square().mean()  # noqa: E731
    trace = record(Workload(model, {"x": torch.randn(4, 8)}, loss, sgd), probe=False)
    inputs = sorted(a["bytes"] for a in trace["allocations"] if a["category"] == "input")
    assert inputs == sorted([4 * 8 * 4, *(t.nbytes for t in teacher.state_dict().values())])
