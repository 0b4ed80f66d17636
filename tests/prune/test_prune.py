"""A pruned model trains in the memory that the report says, and comes back from a file."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit.measure import measure_peak, static_tensors
from memfit.prune.groups import Group, Member, removal
from memfit.run.fitted import Fitted


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


def loss(model: Any, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def workload(built: nn.Module | None = None, optimizer: Any = None) -> memfit.Workload:
    torch.manual_seed(1)
    batch = {"x": torch.randn(4, 3, 16, 16), "y": torch.randint(0, 10, (4,))}
    made = optimizer or (lambda params: torch.optim.AdamW(params, 1e-3))
    return memfit.Workload(built or model(), batch, loss, made)


def test_the_step_takes_what_the_report_says_and_trains():
    step = workload()
    peak = memfit.predict(step).predicted_peak_bytes
    pruned = memfit.prune(step, budget="60%")
    report = pruned.report
    assert report.before.predicted_peak_bytes == peak
    assert report.after.predicted_peak_bytes <= report.budget_bytes == int(peak * 0.6)
    assert report.after.predicted_peak_bytes > 0.5 * peak  # no more was pruned than needed
    assert report.after.predicted_peak_bytes == memfit.predict(pruned.workload).predicted_peak_bytes
    fitted = Fitted(pruned.workload, {"actions": []})
    losses = [float(fitted.step()) for _ in range(8)]
    assert losses[-1] < losses[0]
    static = static_tensors(pruned.workload, fitted.optimizer)
    measured = measure_peak(fitted.step, static).peak_bytes
    assert abs(measured - report.after.predicted_peak_bytes) <= 0.001 * measured
    assert "Predicted peak" in str(report)


def test_parameters_are_counted_and_the_model_stays_as_it_was():
    step = workload()
    before = copy.deepcopy(step.model.state_dict())
    whole = sum(parameter.numel() for parameter in step.model.parameters())
    pruned = memfit.prune(step, parameters="50%")
    left = sum(parameter.numel() for parameter in pruned.model.parameters())
    assert 0.4 * whole < left <= 0.5 * whole
    assert left == pruned.report.after.parameters
    assert [step.model[0].out_channels, step.model[7].in_features] == [32, 256]
    assert all(torch.equal(value, before[name]) for name, value in step.model.state_dict().items())
    first, norm, last = pruned.model[0], pruned.model[1], pruned.model[7]
    assert first.weight.shape[0] == first.out_channels == norm.num_features == len(norm.running_var)
    assert last.in_features == last.weight.shape[1] == 4 * pruned.model[3].out_channels


def test_small_groups_give_up_no_less_than_their_share():
    groups = [
        Group(channels, (Member("w", 0, unit, channels, tuple((at,) for at in range(channels))),))
        for channels, unit in ((5, 1), (5, 16), (64, 1))
    ]
    scores = [torch.arange(float(group.channels)) for group in groups]

    def counts(share):
        return [len(gone) for gone in removal(groups, scores, share)]

    assert counts(0.3) == [2, 1, 20]
    assert counts(0.4) == [2, 2, 26]
    assert counts(1.0) == [4, 4, 63]
    assert counts(0.0) == [0, 0, 0]


def test_the_weakest_channels_go():
    built = model()
    strong = torch.arange(32) % 2 == 0
    with torch.no_grad():
        built[0].weight[~strong] *= 0.01
        built[3].weight[:, ~strong] *= 0.01
    pruned = memfit.prune(workload(built), parameters="50%")
    kept = [
        channel for channel in range(32) if _has(pruned.model[0].weight, built[0].weight[channel])
    ]
    assert set(kept) <= set(range(0, 32, 2)) or set(range(0, 32, 2)) <= set(kept)


def _has(rows: Tensor, row: Tensor) -> bool:
    return any(torch.equal(one, row) for one in rows)


def test_taylor_scores_see_what_the_loss_needs():
    built = model()
    with torch.no_grad():
        built[7].weight[:, :128] = (
            0.0  # nothing reads the first 32 channels of the second convolution
        )
    pruned = memfit.prune(workload(built), parameters="60%", scores="taylor")
    second = built[3].weight
    gone = [
        at for at in range(64) if not any(_same(row, second[at]) for row in pruned.model[3].weight)
    ]
    assert gone
    assert set(gone) <= set(range(32)) or set(range(32)) <= set(gone)
    assert all(parameter.grad is None for parameter in built.parameters())


def _same(short: Tensor, whole: Tensor) -> bool:
    """Whether one filter is the other without some inputs."""
    return set(short.flatten().tolist()) <= set(whole.flatten().tolist())


def test_an_optimizer_goes_along_with_its_state():
    built = model()
    groups = [
        {"params": list(built[:3].parameters()), "lr": 0.1},
        {"params": list(built[3:].parameters()), "lr": 0.2},
    ]
    optimizer = torch.optim.AdamW(groups)
    step = workload(built, optimizer)
    loss(built, step.batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    pruned = memfit.prune(step, parameters="50%")
    new = pruned.workload.optimizer
    assert isinstance(new, torch.optim.AdamW)
    assert new is not optimizer
    assert [group["lr"] for group in new.param_groups] == [0.1, 0.2]
    assert {id(it) for group in new.param_groups for it in group["params"]} == {
        id(it) for it in pruned.model.parameters()
    }
    for (_, old), (name, parameter) in zip(
        built.named_parameters(), pruned.model.named_parameters(), strict=True
    ):
        state = new.state[parameter]
        assert state["exp_avg"].shape == state["exp_avg_sq"].shape == parameter.shape, name
        values = set(optimizer.state[old]["exp_avg"].flatten().tolist())
        assert set(state["exp_avg"].flatten().tolist()) <= values
    loss(pruned.model, step.batch).backward()
    new.step()
    assert len(optimizer.state[built[0].weight]["exp_avg"]) == 32


def test_state_of_another_shape_is_refused_by_name():
    built = model()
    optimizer = torch.optim.Adafactor(built.parameters())
    step = workload(built, optimizer)
    loss(built, step.batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(memfit.UsageError, match=r"`Adafactor` has state `row_var` of the shape"):
        memfit.prune(step, parameters="50%")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.first = nn.Linear(16, 40)
        self.second = nn.Linear(40, 16, bias=False)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        wide = self.embedding(ids)
        out: Tensor = self.head(self.second(torch.relu(self.first(wide))))
        return out


def test_tied_weights_stay_tied():
    step = memfit.Workload(Tied(), torch.randint(0, 20, (3, 5)))
    pruned = memfit.prune(step, parameters="60%").model
    assert pruned.head.weight is pruned.embedding.weight
    width = pruned.embedding.weight.shape[1]
    assert width == pruned.embedding.embedding_dim == pruned.first.in_features < 16


def test_inference_keeps_what_it_returns():
    step = memfit.Workload(
        nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 24)), torch.randn(2, 8)
    )
    pruned = memfit.prune(step, parameters="30%")
    assert pruned.model(step.batch).shape == (2, 24)
    assert any(stay.why == "the model returns it" for stay in pruned.report.stays)


def test_a_file_brings_the_model_back(tmp_path: Path):
    step = workload()
    pruned = memfit.prune(step, parameters="50%")
    file = tmp_path / "pruned.pt"
    pruned.save(file)
    assert file.stat().st_mode & 0o777 == 0o600
    again = memfit.load_pruned(model, file)
    assert [it.shape for it in again.parameters()] == [it.shape for it in pruned.model.parameters()]
    with torch.no_grad():
        assert torch.equal(again.eval()(step.batch["x"]), pruned.model.eval()(step.batch["x"]))
    assert again[0].out_channels == pruned.model[0].out_channels
    twice = memfit.prune(workload(again), parameters="50%")
    assert twice.report.after.parameters < pruned.report.after.parameters


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (
            lambda: nn.Sequential(nn.Conv2d(3, 16, 3)),
            r"`0\.weight` was \(32, 3, 3, 3\) before pruning",
        ),
        (lambda: nn.Linear(3, 3), r"it has `0\.weight`, and this has not"),
    ],
)
def test_a_file_of_another_model_is_refused_by_name(
    build: Callable[[], nn.Module], said: str, tmp_path: Path
):
    memfit.prune(workload(), parameters="50%").save(tmp_path / "pruned.pt")
    with pytest.raises(memfit.UsageError, match=said):
        memfit.load_pruned(build, tmp_path / "pruned.pt")


def test_files_that_are_none_are_refused(tmp_path: Path):
    (tmp_path / "text").write_text("no")
    torch.save({"weight": torch.ones(1)}, tmp_path / "other.pt")
    memfit.prune(workload(), parameters="50%").save(tmp_path / "good.pt")
    content = torch.load(tmp_path / "good.pt", weights_only=True)
    content["kept"]["0.weight"] = {0: torch.tensor([99])}
    torch.save(content, tmp_path / "bad.pt")
    del content["state_dict"]
    torch.save(content, tmp_path / "half.pt")
    for name, said in [
        ("text", "no file that torch saved"),
        ("other.pt", "is no pruned model"),
        ("missing", "there is no such file"),
        ("half.pt", "it has no `state_dict`"),
        ("bad.pt", "what was kept cannot be read"),
    ]:
        with pytest.raises(memfit.UsageError, match=said):
            memfit.load_pruned(model, tmp_path / name)


@pytest.mark.parametrize(
    ("asked", "error", "said"),
    [
        ({}, memfit.UsageError, "give a `budget`"),
        ({"budget": "50%", "parameters": "50%"}, memfit.UsageError, "give a `budget`"),
        ({"parameters": "0%"}, memfit.UsageError, "cannot prune to `0%` parameters"),
        ({"parameters": "many"}, memfit.UsageError, "cannot prune to `many` parameters"),
        ({"parameters": "50%", "scores": "luck"}, memfit.UsageError, "no scores `luck`"),
        ({"parameters": "0.2%"}, memfit.DoesNotFit, "pruned as far as it goes the model takes"),
        ({"budget": "20KiB"}, memfit.DoesNotFit, "pruned as far as it goes the model takes"),
        ({"budget": "few"}, memfit.BudgetError, "few"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(asked: Any, error: type[Exception], said: str):
    with pytest.raises(error, match=said):
        memfit.prune(workload(), **asked)


def test_a_model_without_channels_is_refused():
    step = memfit.Workload(nn.Linear(8, 4), torch.randn(2, 8))
    with pytest.raises(memfit.DoesNotFit, match="nothing of the model can be pruned"):
        memfit.prune(step, parameters="50%")
    with pytest.raises(memfit.UsageError, match="`taylor` scores need gradients"):
        memfit.prune(step, parameters="50%", scores="taylor")


class Written(nn.Module):
    """Code says the width of one layer, in a line of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 24)
        self.second = nn.Linear(24, 24)
        self.last = nn.Linear(24, 2)

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.relu(self.first(x))
        deep = torch.relu(self.second(wide)).reshape(-1, 24)
        out: Tensor = self.last(deep)
        return out


def test_sizes_that_code_says_stay():
    step = memfit.Workload(Written(), torch.randn(2, 8))
    pruned = memfit.prune(step, parameters="70%")
    assert pruned.model.first.out_features < 24
    assert pruned.model.second.out_features == 24
    assert pruned.report.trials == 2
    assert any(
        stay.why.startswith("code says its size at test_prune.py") for stay in pruned.report.stays
    )


def test_parameters_that_the_step_does_not_read_are_named():
    built = Written()
    built.other = nn.Linear(24, 24)
    pruned = memfit.prune(memfit.Workload(built, torch.randn(2, 8)), parameters="90%")
    (stay,) = (it for it in pruned.report.stays if it.why == "the step does not read it")
    assert stay.parameters == ("other.weight", "other.bias")


def test_weights_are_needed():
    with memfit.weightless():
        built = model()
    with pytest.raises(memfit.CaptureError, match="built without weights"):
        memfit.prune(workload(built), parameters="50%")
