"""Models that do unusual things are captured all the same, or refused with a reason."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from memfit.capture import record, record_pair
from memfit.errors import UsageError, WorkloadError
from memfit.workload import Workload


def training(model, x=None, loss=None, optimizer=torch.optim.AdamW, **settings):
    return Workload(
        model=model,
        batch={"x": torch.randn(4, 8) if x is None else x},
        loss=loss or (lambda model, batch: model(batch["x"]).float().pow(2).mean()),
        optimizer=optimizer,
        **settings,
    )


def names(trace, phase=None):
    return [trace["strings"][op["name"]] for op in trace["ops"] if phase in {None, op["phase"]}]


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 8))
        self.outer = nn.Linear(8, 8)
        self.reentrant = reentrant

    def forward(self, x):
        return self.outer(checkpoint(self.inner, self.outer(x), use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [False, True])
def test_user_checkpointing_shows_as_recomputation_in_backward(reentrant):
    trace = record(training(Checkpointed(reentrant)))
    assert names(trace, "forward").count("aten.gelu.default") == 1
    assert names(trace, "backward").count("aten.gelu.default") == 1
    modules = {trace["strings"][region["module"]] for region in trace["regions"]}
    assert "inner.1" in modules
    recomputed = next(
        op
        for op in trace["ops"]
        if op["phase"] == "backward" and trace["strings"][op["name"]] == "aten.gelu.default"
    )
    assert trace["strings"][recomputed["module"]] == "inner.1"


def test_a_checkpoint_computes_again_once_for_a_gpu_too():
    """Whatever of its tensors backward asks for first: it asks for six."""
    trace = record(training(Checkpointed(reentrant=False)), device="cuda")
    assert names(trace, "backward").count("aten.gelu.default") == 1


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return (x * weight).sin()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        scaled = (x * weight).cos() * gradient
        return scaled * weight, (scaled * x).sum(0)


class WithFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        y = Doubling.apply(self.linear(x), self.weight)
        y.add_(1).mul_(2)
        return y


def test_custom_functions_save_and_release():
    trace = record(training(WithFunction()))
    sine = names(trace).index("aten.sin.default")
    node = next(op["node"] for op in trace["ops"][sine - 1 :: -1] if op["node"] is not None)
    saves = [save for save in trace["saved"] if save["node"] == node]
    assert len(saves) == 2
    assert all(save["pack"] <= save["unpack"] <= save["release"] for save in saves)


def test_in_place_writes_make_versions():
    trace = record(training(WithFunction()))
    written = [op for op in trace["ops"] if op["writes"] and op["phase"] == "forward"]
    assert [trace["values"][op["writes"][0]]["version"] for op in written] == [1, 2]
    assert all(op["reads"][0] != op["writes"][0] for op in written)


def test_batch_normalisation_is_replayable_and_writes_nothing():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True))
    trace = record(training(model))
    norm = trace["ops"][names(trace).index("aten.native_batch_norm.default")]
    assert norm["replayable"]
    assert norm["writes"] == []


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(self.first(x)))


def test_shared_parameters_and_repeated_modules():
    trace = record(training(Shared()))
    strings = trace["strings"]
    parameters = [a for a in trace["allocations"] if a["category"] == "parameter"]
    assert sorted(strings[a["name"]] for a in parameters) == [
        "first.bias",
        "first.weight",
        "second.bias",
    ]
    calls = [(strings[r["module"]], r["call"]) for r in trace["regions"]]
    assert calls == [("", 0), ("first", 0), ("first", 1), ("second", 0)]
    assert len(trace["updates"]) == 3


def test_gradient_penalty_keeps_the_graph():
    def loss(model, batch):
        x = batch["x"].clone().requires_grad_()
        y = model(x).sum()
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        return y + gradient.pow(2).sum()

    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    trace = record(training(model, loss=loss))
    assert "aten.tanh_backward.default" in names(trace, "forward")


def test_autocast_casts_inside_the_step():
    trace = record(training(nn.Linear(8, 8), autocast=torch.bfloat16))
    dtypes = {trace["strings"][value["dtype"]] for value in trace["values"]}
    assert "bfloat16" in dtypes


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, mask):
        if bool((mask == 1).all()):
            return self.linear(x)
        kept = int(mask.sum())
        return self.linear(x)[mask.bool()].tanh()[:kept]


@pytest.mark.parametrize(("mask", "rows"), [([1, 0, 1, 0], 2), ([1, 1, 1, 1], 4)])
def test_control_flow_on_the_batch_is_followed_on_fakes(mask, rows):
    workload = Workload(
        model=Masked(),
        batch={"x": torch.randn(4, 8), "mask": torch.tensor(mask)},
        loss=lambda model, batch: model(**batch).sum(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )
    trace = record(workload)
    assert trace["meta"]["captured"] == "fake"
    assert ("aten.tanh.default" in names(trace)) == (rows == 2)
    loss = next(
        op
        for op in trace["ops"]
        if trace["strings"][op["name"]] == "aten.sum.default"
        and trace["strings"][trace["values"][op["reads"][0]]["dtype"]] == "float32"
    )
    assert trace["values"][loss["reads"][0]]["shape"] == [rows, 8]
    assert workload.batch["mask"].tolist() == mask


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        y = self.linear(x)
        return y if y.sum().item() > 1e9 else y.tanh()


def test_control_flow_on_parameters_takes_one_real_step():
    workload = training(Branching())
    first, second = record_pair(workload)
    assert first["meta"]["captured"] == "real"
    assert first["meta"]["batch"] == 1
    assert second is not None
    assert second["meta"]["batch"] == 2
    assert "one real step" in first["meta"]["notes"][-1]
    assert "aten.tanh.default" in names(first)


def test_inference_has_one_phase_and_saves_nothing():
    trace = record(Workload(model=nn.Linear(8, 8), batch=(torch.randn(4, 8),)))
    assert not trace["meta"]["training"]
    assert {op["phase"] for op in trace["ops"]} == {"forward"}
    assert trace["saved"] == []


def test_training_without_an_optimizer_lets_gradients_go():
    trace = record(training(nn.Linear(8, 8), optimizer=None))
    end = len(trace["ops"])
    gradients = [a for a in trace["allocations"] if a["category"] == "gradient"]
    assert len(gradients) == 2
    assert all(a["natural"][-1][1] == end for a in gradients)
    assert trace["meta"]["fused_optimizer_refusal"] == "the workload has no optimizer"


def test_an_optimizer_over_the_users_parameters_is_rebuilt():
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(
        [{"params": [model.weight], "weight_decay": 0.1}, {"params": [model.bias], "lr": 1e-2}]
    )
    workload = training(model)
    workload.optimizer = optimizer
    trace = record(workload)
    assert trace["meta"]["optimizer"] == "AdamW"
    assert not optimizer.state
    assert [a["category"] for a in trace["allocations"]].count("optimizer_state") == 6


def test_tensors_from_outside_count_as_inputs():
    weight = torch.rand(8)
    labels = [1, 2, 3, 4]
    workload = training(
        nn.Linear(8, 8),
        loss=lambda model, batch: functional.cross_entropy(
            model(batch["x"]), torch.tensor(labels), weight=weight
        ),
    )
    trace = record(workload)
    inputs = [a for a in trace["allocations"] if a["category"] == "input"]
    assert [a["bytes"] for a in inputs] == [4 * 8 * 4, 8 * 4]


def test_a_loss_that_uses_another_model_is_refused():
    model = nn.Linear(8, 8)
    workload = training(model, loss=lambda _model, batch: model(batch["x"]).mean())
    with pytest.raises(UsageError, match="uses the parameter `weight` of the model itself"):
        record(workload)


def test_a_loss_that_is_no_number_is_refused():
    with pytest.raises(UsageError, match=r"shape \(4, 8\)"):
        record(training(nn.Linear(8, 8), loss=lambda model, batch: model(batch["x"])))


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer", "build"])
def test_a_failure_of_the_users_code_says_where(phase):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise KeyError("mine")

    class Optimizer(torch.optim.SGD):
        def step(self, closure=None):
            raise KeyError("mine")

    def forward_fails(model, batch):
        raise KeyError("mine")

    def build_fails(params):
        raise KeyError("mine")

    workload = training(nn.Linear(8, 8))
    if phase == "forward":
        workload.loss = forward_fails
    elif phase == "backward":
        workload.loss = lambda model, batch: Fails.apply(model(batch["x"])).mean()
    elif phase == "optimizer":
        workload.optimizer = lambda params: Optimizer(params, lr=0.1)
    else:
        workload.optimizer = build_fails
    with pytest.raises(WorkloadError) as caught:
        record(workload)
    assert caught.value.phase == phase
    assert isinstance(caught.value.__cause__, KeyError)


def test_wrong_shapes_fail_with_the_models_own_error():
    with pytest.raises(WorkloadError) as caught:
        record(training(nn.Linear(8, 8), x=torch.randn(4, 7)))
    assert caught.value.phase == "forward"
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_step_tied_to_its_batch_size_is_captured_at_that_size():
    labels = [1, 2, 3, 4]
    workload = training(
        nn.Linear(8, 8),
        loss=lambda model, batch: functional.cross_entropy(model(batch["x"]), torch.tensor(labels)),
    )
    first, second = record_pair(workload)
    assert second is None
    assert "fails at 2" in first["meta"]["notes"][-1]
