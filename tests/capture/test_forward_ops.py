"""The forward ops of a trace are those of the real forward, one by one."""

from __future__ import annotations

import pytest
import torch
from small_examples import SMALL, small_example
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import memfit
from memfit.capture import record
from memfit.measure import measure_peak, static_tensors


class CountingMode(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names: list[str] = []
        self.strides: list[list[int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace not in {"prim", "profiler"}:
            self.names.append(str(func))
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.strides.append(list(made.stride()))
        return made


def real_forward_ops(workload):
    # With the hooks that an executor needs anyway: without them autograd detaches saved outputs.
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    with hooks, CountingMode() as mode:
        workload.loss(workload.model, workload.batch)
    return mode.names


@pytest.mark.parametrize("name", SMALL)
def test_recorded_forward_is_the_real_forward(name):
    workload = small_example(name)
    trace = record(workload, probe=False)
    recorded = [trace["strings"][op["name"]] for op in trace["ops"] if op["phase"] == "forward"]
    assert recorded == real_forward_ops(workload)
    assert trace["meta"]["captured"] == "fake"


def test_padding_is_seen_by_its_values():
    padded = small_example("bert")
    full = small_example("bert")
    full.batch["attention_mask"].fill_(1)
    for workload in (padded, full):
        trace = record(workload, probe=False)
        recorded = [trace["strings"][op["name"]] for op in trace["ops"] if op["phase"] == "forward"]
        assert recorded == real_forward_ops(workload)
    assert real_forward_ops(padded) != real_forward_ops(full)


def of_an_item(x):
    y = torch.tanh(x).clone()
    y[:, 0] = x[:, 1]
    return y


def of_a_view(x):
    return F.relu_(torch.tanh(x).view(-1, 8))


def of_a_view_of_a_view(x):
    y = torch.tanh(x)
    y.transpose(0, 1).unsqueeze(0)[:, 1:].add_(1)
    return y


def and_then_the_same_view_again(x):
    y = torch.tanh(x)
    y.view(-1, 8).add_(1)
    return y.view(-1, 8)


def without_gradients(x):
    y = torch.tanh(x)
    with torch.no_grad():
        y.detach().view(-1, 8).mul_(1)
    return y.view(-1, 8)


def of_a_constant(x):
    y = torch.zeros(x.shape)
    y.view(-1, 8).copy_(x.view(-1, 8))
    return y


WRITES = [
    of_an_item,
    of_a_view,
    of_a_view_of_a_view,
    and_then_the_same_view_again,
    without_gradients,
    of_a_constant,
]


class Writing(nn.Module):
    """Writes to a view in forward, after a layer."""

    def __init__(self, write):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.write = write

    def forward(self, x):
        y = torch.sigmoid(self.write(self.layer(x))).view(x.shape)
        return torch.tanh(y) * y


def writing(write):
    torch.manual_seed(0)
    model = nn.Sequential(*(Writing(write) for _ in range(4)))
    batch = torch.randn(64, 4, 8)
    return memfit.Workload(model, batch, lambda m, b: m(b).square().mean(), torch.optim.SGD)


@pytest.mark.parametrize("write", WRITES)
def test_a_write_to_a_view_adds_no_op_that_a_real_forward_has_not(write):
    """Autograd runs the view again, for tensor subclasses alone; which left the plan at that op."""
    workload = writing(write)
    trace = record(workload, probe=False)
    recorded = [trace["strings"][op["name"]] for op in trace["ops"] if op["phase"] == "forward"]
    assert recorded == real_forward_ops(workload)


def test_a_model_that_writes_to_views_keeps_its_budget():
    peak = memfit.predict(writing(of_an_item)).predicted_peak_bytes
    plan = memfit.plan(writing(of_an_item), budget=int(0.6 * peak))
    assert plan.fits
    fitted = memfit.Fitted(writing(of_an_item), plan.as_dict())
    fitted.step()  # a warning is an error: the model is where the plan expects it
    measured = measure_peak(fitted.step, static_tensors(fitted.workload, fitted.optimizer))
    assert measured.peak_bytes == plan.planned.predicted_peak_bytes
    assert fitted.report().replayed_ops > 0


class Rows(nn.Module):
    """Which turns rows of features into an image of one item, as the attention of a VAE does."""

    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(4, 16)
        self.mix = nn.Conv2d(16, 48, 3)

    def forward(self, rows):
        image = rows.transpose(1, 2).reshape(1, 16, 32, 32)
        return self.mix(self.norm(image * 2 + image)).flatten(2).amax(-1)


def test_one_item_has_the_strides_and_the_scratch_that_it_really_has():
    model, rows = Rows().eval(), torch.randn(1, 1024, 16)
    workload = memfit.Workload(model, rows)
    trace = record(workload, probe=False)
    recorded = [
        trace["values"][op["outputs"][0]]["stride"]
        for op in trace["ops"]
        if len(op["outputs"]) == 1
    ]
    with torch.no_grad(), CountingMode() as real:
        model(rows)
    with torch.no_grad():
        measured = measure_peak(lambda: model(rows), static_tensors(workload, None)).peak_bytes
    assert recorded == real.strides
    assert memfit.predict(workload).predicted_peak_bytes == measured


def test_a_group_norm_keeps_its_inputs_memory_format():
    """The fakes of torch 2.14 forget it, and convolutions behind it take other scratch."""
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.GroupNorm(4, 32), nn.SiLU(), nn.Conv2d(32, 8, 3))
    model = model.to(memory_format=torch.channels_last)
    trace = record(
        memfit.Workload(model, torch.randn(2, 3, 8, 8), lambda m, b: m(b).mean()), probe=False
    )
    (norm,) = (
        op
        for op in trace["ops"]
        if trace["strings"][op["name"]] == "aten.native_group_norm.default"
    )
    strides = trace["values"][norm["outputs"][0]]["stride"]
    with torch.no_grad():
        assert strides == list(model[:2](torch.randn(2, 3, 8, 8)).stride())
