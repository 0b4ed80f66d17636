"""Module calls that treat rows one by one: found, run in slices, and measured as predicted."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memfit
from memfit.apply.slices.sliced_calls import SlicedCalls
from memfit.errors import DivergenceWarning, UsageError
from memfit.verify.eager import EQUIVALENT, verify

WIDTH = 16


class FeedForward(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.both = nn.Linear(WIDTH, 8 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        gate, value = self.both(self.norm(x)).chunk(2, -1)
        return self.down(F.silu(gate) * value).softmax(-1) + x.mean(-1, keepdim=True)


class Experts(nn.Module):
    """Every row through every expert, by a batch of products."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, WIDTH, 4 * WIDTH) * 0.1)
        self.down = nn.Linear(16 * WIDTH, WIDTH)

    def forward(self, x):
        rows = x.reshape(-1, WIDTH)
        wide = torch.cat([F.relu(rows @ weight) for weight in self.weight], -1)
        return self.down(wide).view(x.shape)


class Viewing(nn.Module):
    """Takes rows together by a view, as the layers of GPT-2 do: only what is contiguous has one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(F.gelu(self.up(x.view(-1, WIDTH)))).view(x.shape)


class Mixing(nn.Module):
    """Wide, and rows see each other."""

    def __init__(self, how) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)
        self.how = how

    def forward(self, x):
        return self.down(self.how(self.up(x)))


class Model(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def _workload(*layers: nn.Module, shape=(2, 48)) -> memfit.Workload:
    torch.manual_seed(7)
    model = Model(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(*shape, WIDTH)
    return memfit.Workload(model, batch, loss=lambda m, b: m(b).pow(2).mean(), optimizer=optimizer)


def _calls(workload: memfit.Workload) -> list[dict]:
    chunks = [way["chunk"] for way in memfit.trace(workload).native.ways()]
    return chunks[-1]["calls"] if chunks else []


@pytest.mark.parametrize("layer", [FeedForward, Gated, Experts, Viewing])
@pytest.mark.parametrize(("shape", "dim"), [((2, 48), 1), ((8, 12), 0), ((96,), 0)])
def test_layers_that_treat_rows_one_by_one_are_found_and_give_the_same(layer, shape, dim) -> None:
    workload = _workload(nn.Linear(WIDTH, WIDTH), layer(), layer(), shape=shape)
    calls = _calls(workload)
    assert [call["module"] for call in calls] == ["layers.1", "layers.2"]
    assert {call["dim"] for call in calls} == {dim}
    assert not any(call["draws"] for call in calls)
    model, batch = workload.model, workload.batch.requires_grad_()
    whole = model(batch)
    wanted = torch.autograd.grad(whole.pow(2).sum(), [batch, *model.parameters()])
    seen = []
    model.layers[1].register_forward_pre_hook(lambda _m, args: seen.append(args[0].shape))
    inner = next(module for module in model.layers[1].modules() if isinstance(module, nn.Linear))
    inner.register_forward_pre_hook(lambda _m, args: seen.append(args[0].shape))
    with SlicedCalls(model, calls).forward():
        sliced = model(batch)
    assert seen[0] == batch.shape, "hooks of the module see whole tensors"
    assert len(seen) == 1 + calls[0]["slices"]
    torch.testing.assert_close(sliced, whole)
    got = torch.autograd.grad(sliced.pow(2).sum(), [batch, *model.parameters()])
    torch.testing.assert_close(got, wanted)
    assert "forward" not in model.layers[1].__dict__


@pytest.mark.parametrize(
    "how",
    [
        lambda x: x - x.mean(1, keepdim=True),
        lambda x: x.softmax(1),
        lambda x: x.cumsum(1),
        lambda x: x.flip(1),
        lambda x: x.roll(1, 1),
        lambda x: x + x.sum(),
        lambda x: x * x.amax((0, 1)),
        lambda x: x.transpose(0, 1).reshape(x.shape),
        lambda x: (x @ x.transpose(1, 2)) @ x,
        lambda x: x + torch.arange(48.0).unsqueeze(-1),
        lambda x: x[:, torch.arange(47, -1, -1)],
        lambda x: torch.cat([x[:, 1:], x[:, :1]], 1),
        lambda x: F.layer_norm(x, x.shape[1:]),
        lambda x: F.batch_norm(x.transpose(1, 2), None, None, training=True).transpose(1, 2),
        lambda x: x.reshape(x.shape[0], -1).softmax(-1).view(x.shape),
        lambda x: x * float(x.detach().sum() > 0),
        lambda x: F.pad(x, (0, 0, 1, 0))[:, :-1],
    ],
)
def test_layers_whose_rows_see_each_other_are_not_cut(how) -> None:
    assert _calls(_workload(Mixing(how))) == []


def _lowest(workload: memfit.Workload, *forbid: str) -> memfit.Plan:
    """The plan with the smallest peak."""
    recorded = memfit.trace(workload, slices=True)
    forbid = ("micro_batch", "fuse_optimizer", *forbid)
    tried = memfit.plan(recorded, "1B", forbid=forbid)
    budget = tried.minimum_budget_bytes
    made = memfit.plan(recorded, budget, forbid=forbid)
    assert made.fits
    return made


def _deep(dropout: float = 0.0) -> memfit.Workload:
    return _workload(*[FeedForward(dropout) for _ in range(3)], shape=(4, 256))


def test_the_same_layer_without_that_is_cut() -> None:
    assert [call["module"] for call in _calls(_workload(Mixing(F.gelu)))] == ["layers.0"]


def test_a_plan_with_slices_is_measured_as_predicted_and_right() -> None:
    least = _lowest(_deep()).as_dict()
    chunk = next(it for it in least["actions"] if it["kind"] == "chunk")["chunk"]
    assert [call["module"] for call in chunk["calls"]] == ["layers.0", "layers.1", "layers.2"]
    assert any("`layers.0` and 2 more in 4" in note for note in least["notes"])
    found = verify(_deep, least, steps=2)
    planned = found["planned"]["measured_peak_bytes"]
    assert planned <= least["budget_bytes"]
    assert abs(planned - least["planned"]["predicted_peak_bytes"]) <= 64
    assert found["gradients"]["max_relative_error"] <= EQUIVALENT
    assert found["divergence"] == ""
    whole = _lowest(_deep(), "chunk").as_dict()["planned"]["predicted_peak_bytes"]
    assert least["planned"]["predicted_peak_bytes"] < 0.8 * whole


def test_draws_of_dropout_are_announced() -> None:
    assert all(call["draws"] for call in _calls(_deep(0.5)))
    notes = _lowest(_deep(0.5)).as_dict()["notes"]
    assert any("each slice draws its own" in note for note in notes)


def test_a_call_with_other_arguments_runs_whole_and_says_so() -> None:
    workload = _workload(FeedForward(), shape=(4, 16))
    calls = _calls(_workload(FeedForward(), shape=(4, 64)))
    model = workload.model
    sliced = SlicedCalls(model, calls)
    one = torch.randn(1, 5, WIDTH)
    with pytest.warns(DivergenceWarning, match="layers.0"), sliced.forward():
        result = model(one)
    assert torch.equal(result, model(one))
    assert sliced.diverged
    assert "layers.0" in sliced.divergence


def test_an_error_inside_leaves_the_module_as_it_was() -> None:
    model = _workload(FeedForward(), shape=(4, 64)).model
    own = model.layers[0].forward = model.layers[0].forward
    calls = [{"module": "layers.0", "dim": 0, "slices": 2}]
    with pytest.raises(RuntimeError, match="shape"), SlicedCalls(model, calls).forward():
        model(torch.randn(4, 3, WIDTH + 1))
    assert model.layers[0].__dict__["forward"] is own


@pytest.mark.parametrize(
    "call",
    [{}, {"module": "layers.9", "dim": 0, "slices": 2}, {"module": "", "dim": 0, "slices": 0}],
)
def test_a_plan_that_does_not_suit_the_model_is_refused(call) -> None:
    with pytest.raises(UsageError, match=r"malformed|does not have|slices"):
        SlicedCalls(_workload(FeedForward()).model, [call])
