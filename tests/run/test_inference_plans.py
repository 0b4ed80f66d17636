"""Plans of inference on real forwards: the peak that is measured, and what comes out."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import memfit
from memfit.errors import DivergenceWarning
from memfit.measure import measure_peak, static_tensors

VOCABULARY = 3000
WIDTH = 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Sequential(
            nn.Linear(WIDTH, 16 * WIDTH), nn.GELU(), nn.Linear(16 * WIDTH, WIDTH)
        )

    def forward(self, x):
        return x + self.wide(self.mix(x).tanh())


class Net(nn.Module):
    def __init__(self, *, head=True):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, VOCABULARY) if head else nn.Identity()

    def forward(self, tokens, scale=None):
        hidden = self.blocks(self.embedding(tokens))
        return self.head(hidden if scale is None else hidden * scale[:, None, None])


def workload(forward=None, *, head=True, of=lambda tokens: tokens, **more):
    torch.manual_seed(0)
    net = Net(head=head).eval()
    tokens = torch.randint(0, VOCABULARY, (8, 128))
    return memfit.Workload(net, of(tokens), forward=forward, **more)


def last(model, tokens):
    return model(tokens)[:, -1]


def surprise(model, tokens):
    logits = model(tokens)[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def with_gradients(model, tokens):
    with torch.enable_grad():
        return model(tokens).amax(-1)


class Recurrent(nn.Module):
    """Whose forward leaves a large state for a backward, where gradients are on."""

    def __init__(self):
        super().__init__()
        self.cells = nn.LSTM(WIDTH, 128, batch_first=True)

    def forward(self, x):
        return self.cells(x)[0].amax(-1)


def recurrent():
    torch.manual_seed(0)
    return memfit.Workload(Recurrent().eval(), torch.randn(8, 100, WIDTH))


@dataclass
class Scores:
    """A result that torch's pytrees do not know."""

    values: torch.Tensor


def outcome(load, budget, **options):
    """Kinds of action of a plan, its promise, and how far results are off, once peaks agree."""
    fitted = memfit.fit(load, budget, **options)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = load.infer(load.model, load.batch)
        fitted.step()
        peak = measure_peak(fitted.step, static_tensors(load, None)).peak_bytes
        got = fitted.step()
    plan = fitted.plan
    assert abs(peak - plan.planned.predicted_peak_bytes) <= peak / 1000
    assert peak <= plan.budget_bytes
    assert not fitted.report().diverged
    off = 0.0
    for one, other in zip(tree_leaves(expected), tree_leaves(got), strict=True):
        assert one.shape == other.shape
        error = (one.detach() - other).abs().max() / one.detach().abs().max()
        off = max(off, float(error))
    return [action.kind for action in plan.actions], plan.promise, off


@pytest.mark.parametrize(
    ("load", "budget", "kinds", "options"),
    [
        pytest.param(
            lambda: workload(head=False), "50%", ["micro_batch"], {"forbid": ["chunk"]}, id="batch"
        ),
        pytest.param(
            lambda: workload(
                lambda model, batch: {"all": model(**batch), "one": [batch["scale"] * 2]},
                head=False,
                of=lambda it: {"tokens": it, "scale": torch.linspace(0.5, 2.0, 8)},
            ),
            "50%",
            ["micro_batch"],
            {"forbid": ["chunk"]},
            id="dict",
        ),
        pytest.param(
            lambda: workload(
                lambda model, tokens: model(tokens.t()).transpose(0, 1),
                head=False,
                of=lambda it: it.t().contiguous(),
                batch_dim=1,
            ),
            "50%",
            ["micro_batch"],
            {"forbid": ["chunk"]},
            id="second dimension",
        ),
        pytest.param(
            lambda: workload(head=False), "70%", ["chunk"], {"forbid": ["micro_batch"]}, id="calls"
        ),
        pytest.param(
            lambda: workload(last), "60%", ["chunk"], {"forbid": ["micro_batch"]}, id="last"
        ),
        pytest.param(lambda: workload(last), 5_080_000, ["chunk", "micro_batch"], {}, id="both"),
        pytest.param(recurrent, "85%", ["micro_batch"], {}, id="recurrent"),
        pytest.param(
            lambda: workload(head=False, autocast=torch.bfloat16),
            "75%",
            ["micro_batch"],
            {"forbid": ["chunk"]},
            id="autocast",
        ),
        pytest.param(lambda: workload(surprise), "40%", ["chunk"], {}, id="loss"),
        pytest.param(
            lambda: workload(with_gradients), "95%", ["no_graph"], {"forbid": ["chunk"]}, id="graph"
        ),
        pytest.param(
            lambda: workload(with_gradients),
            "20%",
            ["no_graph", "micro_batch"],
            {"forbid": ["chunk"]},
            id="graph in pieces",
        ),
    ],
)
def test_predicted_peaks_are_measured(load, budget, kinds, options):
    subject = load()
    found, promise, off = outcome(subject, budget, **options)
    assert found == kinds
    rounding = 1e-5 if subject.autocast is None else torch.finfo(subject.autocast).eps
    assert off <= (0.0 if promise == "exact" else rounding)
    assert promise == ("exact" if kinds == ["no_graph"] else "equivalent")


@pytest.mark.parametrize(("forward", "budget"), [(None, "50%"), (last, "60%")])
def test_a_loop_of_ones_own_infers_by_the_plan(forward, budget):
    load = workload(forward, head=forward is not None)
    fitted = memfit.fit(load, budget, own_loop=True)

    def run():
        with fitted.forward():
            return load.infer(load.model, load.batch)

    assert not run().requires_grad
    peak = measure_peak(run, static_tensors(load, None)).peak_bytes
    assert peak == fitted.plan.planned.predicted_peak_bytes
    with torch.no_grad():
        torch.testing.assert_close(run() + 0, load.infer(load.model, load.batch))
    assert not fitted.report().diverged


def test_a_graph_that_is_needed_stays():
    def slope(model, tokens):
        with torch.enable_grad():
            embedded = model.embedding(tokens).detach().requires_grad_()
            total = model.head(model.blocks(embedded)).sum()
            return torch.autograd.grad(total, embedded)[0]

    with pytest.raises(memfit.DoesNotFit) as refused:
        memfit.fit(workload(slope), "5%")
    reasons = {it.kind: it.reason for it in refused.value.plan.refusals}
    assert "without a graph" in reasons["no_graph"]


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (lambda model, tokens: Scores(model(tokens)), "returns a `Scores`"),
        (lambda model, tokens: model(tokens).mean(0), "over the batch"),
        (lambda model, tokens: (model(tokens), model.head.weight), "no entry for each item"),
        (lambda model, tokens: (model(tokens), len(tokens)), "another kind"),
        (lambda model, tokens: model(tokens) + model.seen.add_(1), "writes to `seen`"),
    ],
)
def test_what_cannot_be_put_together_is_not_cut(forward, reason):
    load = workload(forward)
    load.model.register_buffer("seen", torch.zeros(1))
    made = memfit.plan(load, "1%", forbid=["chunk"])
    assert not made.actions
    reasons = {it.kind: it.reason for it in made.refusals}
    assert reason in reasons["micro_batch"]


def test_a_hook_that_would_see_pieces_is_named():
    load = workload(head=False)
    load.model.blocks[0].register_forward_hook(lambda *_: None)
    made = memfit.plan(load, "1%", forbid=["chunk"])
    reasons = {it.kind: it.reason for it in made.refusals}
    assert reasons["micro_batch"] == "`blocks.0` has a forward hook, which would see each piece"


def test_a_model_that_changed_since_infers_whole_and_right():
    load = workload(head=False)
    fitted = memfit.fit(load, "50%", forbid=["chunk"])
    load.model.blocks[1].wide[1] = nn.ReLU()
    with pytest.warns(DivergenceWarning, match="ran `aten.relu.default`"):
        got = fitted.step()
    with torch.no_grad():
        assert torch.equal(got, load.model(load.batch))
    assert fitted.report().diverged


def test_a_model_that_changed_finds_the_random_state_and_parameters_as_they_were(tmp_path):
    load = workload(head=False)
    options = {"forbid": ["chunk"], "offload": str(tmp_path)}
    with memfit.fit(load, "40%", **options) as fitted:
        kinds = [action.kind for action in fitted.plan.actions]
        assert kinds == ["offload_parameters", "micro_batch"]
        fitted.step()
        assert not fitted.report().diverged
        load.model.blocks[1].wide[1] = nn.Sequential(nn.Dropout(0.5).train(), nn.ReLU())
        torch.manual_seed(1)
        with pytest.warns(DivergenceWarning):
            got = fitted.step()
        torch.manual_seed(1)
        with torch.no_grad():
            assert torch.equal(got, load.model(load.batch))


def test_inference_mode_around_it_changes_nothing():
    load = workload(last)
    fitted = memfit.fit(load, 5_080_000)
    with torch.inference_mode():
        got = fitted.step()
        torch.testing.assert_close(got, last(load.model, load.batch))
    assert not fitted.report().diverged


class Convolved(nn.Module):
    """Whose convolutions take scratch that follows no line in the batch."""

    def __init__(self):
        super().__init__()
        layers = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1)]
        self.layers = nn.Sequential(*layers, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def forward(self, x):
        return self.layers(x)


@pytest.mark.parametrize(("batch", "budget"), [(97, "50%"), (97, "10%"), (64, "50%"), (7, "60%")])
def test_scratch_of_pieces_is_that_of_their_size(batch, budget):
    """Whatever the size, pieces that do not divide it included."""
    torch.manual_seed(0)
    load = memfit.Workload(Convolved().eval(), torch.randn(batch, 3, 40, 40))
    fitted = memfit.fit(load, budget, allow="equivalent")
    assert "micro_batch" in [action.kind for action in fitted.plan.actions]
    fitted.step()
    measured = measure_peak(fitted.step, static_tensors(load, None)).peak_bytes
    predicted = fitted.plan.planned.predicted_peak_bytes
    assert abs(predicted - measured) <= measured / 200
    with torch.no_grad():
        expected = load.model(load.batch)
    torch.testing.assert_close(fitted.step(), expected)


def test_other_batches_are_cut_too():
    load = workload(head=False)
    fitted = memfit.fit(load, "50%", forbid=["chunk"])
    for items in (5, 8, 11):
        tokens = torch.randint(0, VOCABULARY, (items, 128))
        with torch.no_grad():
            torch.testing.assert_close(fitted.step(tokens), load.model(tokens))
    assert not fitted.report().diverged
