"""What is no workload, batch, loss or budget is refused in one sentence before anything runs."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

import memfit
from memfit import BudgetError, UsageError

BATCH = torch.randn(4, 8)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


class Own(nn.Module):
    """A loss as a module, as a workload takes it."""

    def forward(self, net, batch):
        return net(batch).mean()


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (nn.MSELoss(), "MSELoss"),
        (nn.CrossEntropyLoss(label_smoothing=0.1), "CrossEntropyLoss"),
        (nn.MSELoss, "MSELoss"),
        (functional.cross_entropy, "cross_entropy"),
        (partial(functional.mse_loss, reduction="sum"), "mse_loss"),
    ],
)
def test_a_criterion_is_no_loss(loss, name):
    with pytest.raises(UsageError, match=f"`{name}` takes predictions\\nhint: write `loss=lambda"):
        memfit.Workload(model(), (BATCH, BATCH), loss=loss)


def compiled_by_itself() -> nn.Module:
    net = model()
    net.compile(backend="eager")
    return net


@pytest.mark.parametrize(
    ("net", "said"),
    [
        (lambda: torch.compile(model(), backend="eager"), "`model` is compiled already"),
        (lambda: nn.Sequential(compiled_by_itself()), "`0` of the model is compiled already"),
        (lambda: torch.jit.trace(model(), BATCH), "`model` is run by TorchScript"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_model_whose_ops_cannot_be_followed(net, said):
    with pytest.raises(UsageError, match=f"^{said}\nhint: give "):
        memfit.Workload(net(), BATCH)


@pytest.mark.filterwarnings("ignore")
def test_a_scripted_part_without_parameters_can_be_followed():
    load = memfit.Workload(nn.Sequential(nn.Linear(8, 8), torch.jit.script(nn.GELU())), BATCH)
    assert memfit.predict(load).predicted_peak_bytes > 0


@pytest.mark.parametrize("loss", [lambda outputs: outputs.mean(), lambda a, b, c: a, "mse"])
def test_a_loss_that_cannot_be_called(loss):
    with pytest.raises(UsageError, match=r"^`loss` (is called with|must be callable)"):
        memfit.Workload(model(), BATCH, loss=loss)


@pytest.mark.parametrize(
    "loss",
    [Own(), lambda *parts: parts[0](parts[1]).mean(), partial(lambda s, m, b: s * m(b).sum(), 2)],
)
def test_losses_that_can_be_called(loss):
    memfit.Workload(model(), BATCH, loss=loss)


def test_what_yields_batches_is_no_batch():
    data = torch.utils.data.TensorDataset(BATCH)
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    for given, how in (
        (loader, "next(iter(loader))"),
        (iter(loader), "next(batches)"),
        ((one for one in loader), "next(batches)"),
        (data, "next(iter(DataLoader(dataset"),
    ):
        with pytest.raises(UsageError) as refused:
            memfit.Workload(model(), given)
        assert str(refused.value).startswith(f"`batch` is a `{type(given).__name__}`, not a batch")
        assert how in str(refused.value)


@pytest.mark.parametrize("ask", ["fit", "plan", "predict", "trace", "verify"])
def test_a_model_is_no_workload(ask):
    words = {} if ask in {"predict", "trace"} else {"budget": "1GiB"}
    with pytest.raises(UsageError) as refused:
        getattr(memfit, ask)(model(), **words)
    assert str(refused.value).startswith("expected a `memfit.Workload`, got `Sequential`\nhint:")


@pytest.mark.parametrize(
    ("budget", "said"),
    [(0.6, "`60%`"), ("3G", "`3GiB`"), (50, "`50%`"), ("1e9", "`1000000000`"), (-5, "above 0")],
)
def test_budgets_that_mean_something_else(budget, said):
    workload = memfit.Workload(model(), BATCH, loss=Own())
    for ask in (memfit.plan, memfit.fit, memfit.verify):
        with pytest.raises(BudgetError, match=said) as refused:
            ask(workload, budget)
        assert not hasattr(refused.value, "__notes__")
    with pytest.raises(UsageError, match="whole bytes"):
        memfit.guard(0.6)


def without_gradients(net, batch):
    with torch.no_grad():
        return net(batch).mean()


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (without_gradients, ": the forward ran under `torch.no_grad` or `torch.inference_mode`"),
        (torch.inference_mode()(lambda net, batch: net(batch).mean()), ": the forward ran under"),
        (lambda net, batch: net(batch).mean().detach(), ""),
        (lambda net, batch: net(batch).argmax().float(), ""),
    ],
)
def test_a_loss_without_gradient_says_why_where_that_was_seen(loss, why):
    with pytest.raises(UsageError) as refused:
        memfit.trace(memfit.Workload(model(), BATCH, loss=loss))
    said = str(refused.value)
    assert said.startswith(f"the loss does not depend on the parameters{why}")
    assert why or said.endswith("parameters")


def test_a_frozen_model_and_a_loss_of_many_numbers():
    frozen = memfit.Workload(model().eval().requires_grad_(requires_grad=False), BATCH, loss=Own())
    with pytest.raises(UsageError, match="parameters: none of them requires a gradient"):
        memfit.trace(frozen)
    with pytest.raises(UsageError, match=r"one number, got shape \(4, 8\)\nhint: reduce it"):
        memfit.trace(memfit.Workload(model(), BATCH, loss=lambda net, batch: net(batch)))
