"""Micro-batches: loss and gradients equal the whole batch's up to rounding."""

from __future__ import annotations

import warnings

import handmade
import models
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memfit
from memfit.apply.micro_batch import cut
from memfit.errors import DivergenceWarning, UsageError
from memfit.run.fitted import Fitted
from memfit.workload import Workload


def pieces(count, **more):
    actions = [{"kind": "micro_batch", "promise": "equivalent", "count": count, "bytes": 0}]
    if more.get("fuse"):
        actions.insert(0, {"kind": "fuse_optimizer", "promise": "exact", "count": 1, "bytes": 0})
    return {"actions": actions}


def whole_and_cut(build, count, reduction="", **workload):
    """Loss and gradients of the whole batch and of its pieces."""
    results = []
    for plan in ({"actions": []}, pieces(count)):
        torch.manual_seed(0)
        model, batch, loss = build()
        model.eval()
        gradients = {}
        for name, p in model.named_parameters():
            p.register_post_accumulate_grad_hook(
                lambda p, name=name, kept=gradients: kept.__setitem__(name, p.grad.clone())
            )
        fitted = Fitted(Workload(model, batch, loss, **workload), plan, loss_reduction=reduction)
        results.append((fitted.step(), gradients))
    return results


def assert_close(results, tolerance=1e-5):
    (loss, gradients), (cut_loss, cut_gradients) = results
    assert abs(loss - cut_loss) <= tolerance * abs(loss)
    assert gradients.keys() == cut_gradients.keys()
    largest = max(g.abs().max() for g in gradients.values())
    for name, gradient in gradients.items():
        scale = max(gradient.abs().max(), 1e-3 * largest)
        assert (gradient - cut_gradients[name]).abs().max() <= tolerance * scale, name


def classifier(rows=12, **loss_options):
    def build():
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
        batch = {"x": torch.randn(rows, 6), "y": torch.randint(0, 5, (rows,))}
        return model, batch, lambda m, b: F.cross_entropy(m(b["x"]), b["y"], **loss_options)

    return build


@pytest.mark.parametrize("count", [2, 3, 4, 12])
def test_a_mean_over_rows(count):
    assert_close(whole_and_cut(classifier(), count))
    assert_close(whole_and_cut(classifier(), count, "mean"))


def test_pieces_of_unequal_size():
    assert_close(whole_and_cut(classifier(11), 4))


def test_a_sum():
    assert_close(whole_and_cut(classifier(reduction="sum"), 3, "sum"))


def test_class_weights():
    weight = torch.tensor([1.0, 0.2, 3.0, 0.5, 2.0])
    assert_close(whole_and_cut(classifier(weight=weight), 4, "token_mean"))


def test_targets_that_are_probabilities():
    def build():
        model = nn.Linear(6, 5)
        batch = {"x": torch.randn(10, 6), "y": torch.rand(10, 5).softmax(1)}
        return model, batch, lambda m, b: F.cross_entropy(m(b["x"]), b["y"])

    assert_close(whole_and_cut(build, 5))


@pytest.mark.parametrize(
    ("build", "reduction"),
    [(models.gpt2, ""), (models.bert, "token_mean")],
    ids=["gpt2", "bert"],
)
def test_language_models_with_unequal_label_counts(build, reduction):
    def uneven():
        model, batch, loss = build()
        ids = torch.randint(0, 97, (4, 16))
        labels = ids.clone()
        labels[0, 3:] = -100
        labels[2, :9] = -100
        labels[3, 1:3] = -100
        return model, {**batch, "input_ids": ids, "labels": labels}, loss

    assert_close(whole_and_cut(uneven, 4, reduction))


@pytest.mark.parametrize(
    "targets",
    [[1, 2, -100, -100, 0, 3], [-100, -100, 1, 2, 0, -100], [1, -100, 2, 3, -100, -100]],
)
def test_a_piece_without_any_target_counts_nothing(targets):
    def build():
        model = nn.Linear(6, 5)
        batch = {"x": torch.randn(6, 6), "y": torch.tensor(targets)}
        return model, batch, lambda m, b: F.cross_entropy(m(b["x"]), b["y"])

    whole, parts = whole_and_cut(build, 3)
    assert torch.isfinite(whole[0])
    assert_close([whole, parts])


def test_the_users_own_weight():
    def build():
        model = nn.Linear(6, 5)
        mask = torch.tensor([1.0, 1, 0, 0, 1, 1])
        batch = {"x": torch.randn(6, 6), "mask": mask}
        return (
            model,
            batch,
            lambda m, b: (m(b["x"]).pow(2).sum(1) * b["mask"]).sum() / b["mask"].sum(),
        )

    def weight(batch):
        return float(batch["mask"].sum())

    assert_close(whole_and_cut(build, 2, loss_weight=weight))


def test_means_over_different_numbers_of_targets_are_refused():
    def build():
        model = nn.Linear(6, 5)
        first = torch.tensor([1, 2, -100, 3, 0, 0])
        batch = {"x": torch.randn(6, 6), "a": first, "b": torch.tensor([1, 2, 3, 4, 0, 1])}
        return (
            model,
            batch,
            lambda m, b: F.cross_entropy(m(b["x"]), b["a"]) + F.cross_entropy(m(b["x"]), b["b"]),
        )

    with pytest.raises(UsageError, match="loss_weight"):
        whole_and_cut(build, 2)


def test_two_means_over_the_same_number_of_targets():
    def build():
        model = nn.Linear(6, 5)
        batch = {"x": torch.randn(6, 6), "a": torch.randint(0, 5, (6,))}
        return (
            model,
            batch,
            lambda m, b: (
                F.cross_entropy(m(b["x"]), b["a"]) + F.cross_entropy(m(b["x"] * 2), b["a"])
            ),
        )

    assert_close(whole_and_cut(build, 3))


@pytest.mark.parametrize("ignored", [slice(0, 5), slice(7, 12)])
def test_with_the_optimizer_inside_the_last_backward(ignored):
    results = []
    for plan in ({"actions": []}, pieces(3, fuse=True)):
        torch.manual_seed(0)
        model, batch, loss = classifier()()
        batch["y"][ignored] = -100
        fitted = Fitted(
            Workload(model, batch, loss, lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9)), plan
        )
        for _ in range(3):
            fitted.step()
        results.append(list(model.parameters()))
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_batch_is_cut_evenly():
    batch = {"x": torch.arange(11), "constant": torch.ones(3), "flag": True}
    assert [p.rows for p in cut(batch, 4, 0)] == [2, 3, 3, 3]
    assert torch.equal(torch.cat([p.batch["x"] for p in cut(batch, 4, 0)]), batch["x"])
    assert [p.rows for p in cut({"x": torch.arange(2)}, 4, 0)] == [1, 1]
    with pytest.raises(UsageError, match="cannot be cut"):
        cut({"flag": True}, 2, 0)


def test_counting_targets_is_no_op_of_the_step():
    build = classifier(rows=12, ignore_index=3)
    torch.manual_seed(0)
    model, batch, loss = build()
    half = {name: values[:6] for name, values in batch.items()}
    ops = handmade.record(model, lambda: loss(model, half))
    plan = {"actions": pieces(2)["actions"] + ops.plan()["actions"]}
    fitted = Fitted(Workload(model, batch, loss), plan, loss_reduction="token_mean")
    with warnings.catch_warnings():
        warnings.simplefilter("error", DivergenceWarning)
        fitted.step()
    report = fitted.report()
    assert not report.diverged
    assert report.dropped_saves > 0


@pytest.mark.parametrize(("knows_size", "is_cut"), [(True, False), (False, True)])
def test_a_forward_that_knows_the_size_of_its_batch_is_not_cut(knows_size, is_cut):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(32, 1024), nn.GELU(), nn.Linear(1024, 10))

        def forward(self, x):
            return self.layers(x) * (len(x) / 100 if knows_size else 2.56)

    workload = Workload(Scaled(), torch.randn(256, 32), lambda m, b: m(b).square().mean())
    made = memfit.plan(workload, "70%", allow="equivalent", forbid=("remat", "chunk"))
    assert ("micro_batch" in {action.kind for action in made.actions}) == is_cut
