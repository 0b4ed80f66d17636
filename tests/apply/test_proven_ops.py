"""A step that is not the one whose batch, or whose rows, may be cut runs whole, and says so."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memfit
from memfit.apply.micro_batch import cut
from memfit.apply.proven_ops import LeftProof, Proof, ProvenOps
from memfit.errors import DivergenceWarning, UsageError
from memfit.run.fitted import Fitted

TOLERANCE = 2e-5
OTHERS = ("remat", "fuse_optimizer", "offload", "offload_optimizer", "offload_parameters")


class Net(nn.Module):
    """Rows apart, until ``mode`` says otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.norm = nn.BatchNorm1d(64).eval()
        self.last = nn.Linear(64, 8)
        self.mode = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.mode == "caught":
            try:
                return self.last(self.norm(self.first(x)).softmax(0))
            except Exception:  # noqa: BLE001 - what some user code does
                return self.last(x.new_zeros(len(x), 64))
        h = F.gelu(self.norm(self.first(x)))
        if self.mode == "couples":
            h = h - h.mean(0)
        h = h.softmax(0 if self.mode == "dimension" else 1)
        if self.mode == "draws":
            h = F.dropout(h)
        return h if self.mode == "shorter" else self.last(h)


def loss_of(model: Net, batch: dict[str, Tensor]) -> Tensor:
    rows = model(batch["x"])[:, :8] - batch["y"]
    reduction = "sum" if model.mode == "sum" else "mean"
    return F.mse_loss(rows * batch["table"].mean(), torch.zeros_like(rows), reduction=reduction)


def batch_of(rows: int, seed: int = 0) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(seed)
    x, y = torch.randn(rows, 16, generator=made), torch.randn(rows, 8, generator=made)
    return {"x": x, "y": y, "table": torch.arange(16.0)}


def workload() -> memfit.Workload:
    torch.manual_seed(5)
    return memfit.Workload(Net(), batch_of(32), loss_of, lambda ps: torch.optim.SGD(ps, lr=0.1))


def in_pieces(**more: object) -> Fitted:
    subject = workload()
    forbid = (*OTHERS, "chunk")
    least = memfit.plan(subject, "1B", forbid=forbid, allow="equivalent").minimum_budget_bytes
    fitted = memfit.fit(subject, least, forbid=forbid, allow="equivalent", **more)
    assert fitted.plan.actions[0].kind == "micro_batch"
    return fitted


def as_without(fitted: Fitted, change: Callable[[Net], None], *batches: dict[str, Tensor]) -> None:
    """Two steps, one as planned and those after a change, as without a plan."""
    plain = workload()
    optimizer = plain.optimizer(plain.model.parameters())
    for step, batch in enumerate((plain.batch, *(batches or (plain.batch,)))):
        if step:
            change(plain.model)
            change(fitted.workload.model)
        torch.manual_seed(step)
        loss = plain.loss(plain.model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        drawn = torch.rand(())
        torch.manual_seed(step)
        torch.testing.assert_close(fitted.step(batch), loss.detach(), rtol=TOLERANCE, atol=0)
        assert torch.rand(()) == drawn, "the random state is that of one whole step"
    state = fitted.workload.model.state_dict()
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=TOLERANCE, atol=1e-6)


@pytest.mark.parametrize("mode", ["couples", "dimension", "shorter", "draws", "sum", "caught"])
def test_a_model_that_changed_runs_whole(mode: str) -> None:
    fitted = in_pieces()
    with pytest.warns(DivergenceWarning, match="so it runs whole"):
        as_without(fitted, lambda model: setattr(model, "mode", mode))
    assert fitted.report().diverged


def test_normalisation_that_begins_to_train_runs_whole_and_counts_once() -> None:
    fitted = in_pieces()
    with pytest.warns(DivergenceWarning, match="so it runs whole"):
        as_without(fitted, lambda model: model.norm.train())
    assert fitted.workload.model.norm.num_batches_tracked == 1


def test_it_is_planned_again_and_said_once() -> None:
    fitted = in_pieces()
    fitted.workload.model.mode = "sum"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            fitted.step()
    assert [type(each.message) for each in said].count(DivergenceWarning) == 1
    assert fitted.report().replans == 1
    assert not fitted.report().diverged


def test_a_step_that_fails_while_it_is_planned_again_fails_in_its_own_words() -> None:
    fitted = in_pieces()
    fitted.workload.model.mode = "couples"
    with pytest.warns(DivergenceWarning, match="so it runs whole"):
        fitted.step()
    head = fitted.workload.model.last
    fitted.workload.model.last = None
    with (
        pytest.warns(DivergenceWarning, match="cannot be planned again"),
        pytest.raises(TypeError, match="'NoneType' object is not callable"),
    ):
        fitted.step()
    fitted.workload.model.last = head
    fitted.step()


def test_a_table_with_as_many_rows_as_another_batch_is_not_cut() -> None:
    fitted = in_pieces()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        as_without(fitted, lambda _: None, batch_of(16, 1))


def test_tensors_of_other_sizes_or_places_are_no_batch_to_cut() -> None:
    planned = {"x": torch.ones(8, 2), "y": torch.ones(8)}
    for batch in ({"x": torch.ones(8, 2)}, {"x": torch.ones(8, 2), "y": torch.ones(4)}):
        with pytest.raises(LeftProof):
            cut(batch, 2, 0, planned)
    with pytest.raises(LeftProof):
        cut({"x": torch.ones(8, 2), "y": torch.tensor(1.0)}, 2, 0, planned)


def test_hooks_on_gradients_see_those_of_the_whole_batch() -> None:
    fitted = in_pieces()
    seen = []
    for model in (fitted.workload.model, workload().model):
        model.last.weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    with pytest.warns(DivergenceWarning, match="`last.weight` has a hook on its gradient"):
        fitted.step()
    model(batch_of(32)["x"]).sum().backward()
    assert len(seen) == 2
    plan = memfit.plan(fitted.workload, "1B", forbid=(*OTHERS, "chunk"), allow="equivalent")
    assert any("`last.weight` has a hook" in refusal.reason for refusal in plan.refusals)


def test_gradients_from_before_the_step_are_not_lost_in_silence() -> None:
    fitted = in_pieces()
    fitted.step()
    for parameter in fitted.workload.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    fitted.workload.model.mode = "couples"
    with pytest.raises(UsageError, match="gradients from before the step"):
        fitted.step()


def test_ops_are_told_apart_by_all_but_sizes() -> None:
    proof = Proof(
        ["aten.view.default size=[2,8]", "aten._softmax.default dim=1, half_to_float=False"]
    )
    x = torch.ones(2, 8)
    with ProvenOps(proof):
        x.view(4, 4).softmax(1)
    with pytest.raises(LeftProof, match=r"dim=0.* instead of \(dim=1"), ProvenOps(proof):
        x.view(4, 4).softmax(0)
    with pytest.raises(LeftProof, match="ended after 1 of 2"), ProvenOps(proof):
        x.view(4, 4)
    with pytest.raises(LeftProof, match=r"went on with `aten.sum.default`"), ProvenOps(proof):
        x.view(4, 4).softmax(1).sum()


class Wide(nn.Module):
    """A layer by rows, until it is not."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 512), nn.Linear(512, 32)
        self.drop = nn.Dropout(0.1)
        self.mode = ""

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(F.gelu(self.up(x)))
        if self.mode == "scales":
            h = h / h.abs().max()
        if self.mode == "counts":
            h = h / h.numel()
        return self.down(h)


def sliced() -> tuple[nn.Module, memfit.Workload]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(32, 32), Wide(), Wide())
    made = memfit.Workload(model, torch.randn(8, 48, 32), lambda m, b: m(b).square().mean())
    return model, made


@pytest.mark.parametrize("mode", ["scales", "counts"])
@pytest.mark.parametrize("draws", [False, True])
def test_a_layer_whose_rows_are_no_longer_apart_runs_whole(mode: str, *, draws: bool) -> None:
    results = []
    for planned in (False, True):
        model, subject = sliced()
        model.train(draws)
        chunks = [way["chunk"] for way in memfit.trace(subject).native.ways()]
        action = {"kind": "chunk", "chunk": chunks[-1]}
        for layer in (1, 2):
            model[layer].mode = mode
        torch.manual_seed(1)
        fitted = Fitted(subject, {"actions": [action]} if planned else {"actions": []})
        if planned:
            with pytest.warns(DivergenceWarning, match=r"`1` cannot run in slices as it is now: "):
                results.append(fitted.step())
            assert fitted.report().diverged
        else:
            results.append(fitted.step())
    assert torch.equal(*results), "whole, and with the numbers drawn that would have been"
