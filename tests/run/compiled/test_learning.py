"""What a compiled plan learns from the step that is measured, by steps that claim to take a lot."""

import gc

import pytest
import torch
from graphs import Layers
from torch import nn

import memfit
from memfit.errors import NotCompiledWarning
from memfit.run.compiled import fit as fitting
from memfit.run.compiled import toolchain
from memfit.run.compiled.fitted import MAX_CORRECTIONS, CompiledFitted

pytestmark = pytest.mark.skipif(
    toolchain.missing("cpu") is not None, reason="compiled plans need a compiler"
)


def workload():
    torch.manual_seed(0)
    return memfit.Workload(
        nn.Sequential(Layers(), Layers()),
        torch.randn(2048, 32),
        lambda model, batch: model(batch).square().mean(),
    )


@pytest.fixture(scope="module")
def graphs():
    """The joint graphs of the step, which plans only read."""
    return fitting._graphs(workload())


@pytest.fixture
def fit(graphs, monkeypatch):
    """Fits whose steps run eager and are measured at what `takes` says of a plan."""
    adopt = CompiledFitted._adopt

    def adopt_eager(self, plan):
        adopt(self, plan)
        self._compiled = self.workload.loss

    def made(budget, takes=None):
        fitted = memfit.fit(workload(), budget, compile=True)
        assert isinstance(fitted, CompiledFitted)

        def claim():
            fitted._measured_bytes = takes(fitted._compiled_plan)
            return False

        if takes is not None:
            monkeypatch.setattr(fitted, "_counts", claim)
        return fitted

    monkeypatch.setattr(CompiledFitted, "_adopt", adopt_eager)
    monkeypatch.setattr(fitting, "_graphs", lambda _: graphs)
    return made


def settle(fitted, most=20):
    for _ in range(most):
        if fitted.has_settled:
            return fitted.report()
        fitted.step()
    raise AssertionError("it goes on cutting")


def test_a_step_far_below_its_budget_is_cut_again_for_more(fit):
    fitted = fit("70%", lambda plan: plan.told_bytes * 3 // 4)
    first = fitted._compiled_plan
    assert first.added_seconds > 0
    report = settle(fitted)
    second = fitted._compiled_plan
    assert report.loosened
    assert report.corrections == 0
    assert second.added_seconds < first.added_seconds
    budget = fitted.plan.budget_bytes
    assert first.budget_bytes == budget
    assert report.measured_peak_bytes <= budget
    # What was learned is in the prediction: it is less than what is told of the graphs.
    assert fitted.plan.planned.predicted_peak_bytes <= budget < second.told_bytes


def test_garbage_that_a_step_collects_does_not_hide_its_peak(fit):
    tidy, untidy = fit("100%"), fit("100%")
    loss = untidy.workload.loss

    def collecting(model, batch):
        gc.collect()
        return loss(model, batch)

    untidy._compiled = collecting
    for fitted in (tidy, untidy):
        fitted.step()
    cycle = [torch.empty(16 << 20)]
    cycle.append(cycle)
    del cycle
    untidy.step()
    tidy.step()
    assert untidy.report().measured_peak_bytes == tidy.report().measured_peak_bytes > 0


def test_a_step_just_below_its_budget_is_left_alone(fit):
    fitted = fit("70%", lambda plan: plan.budget_bytes - 1024)
    plan = fitted._compiled_plan
    report = settle(fitted)
    assert not report.loosened
    assert fitted._compiled_plan is plan
    assert report.steps == 2


def test_what_was_cut_for_more_and_takes_too_much_goes_back(fit):
    tight = []

    def takes(plan):
        tight.append(plan)
        return plan.budget_bytes // 2 if plan is tight[0] else plan.budget_bytes * 2

    fitted = fit("70%", takes)
    report = settle(fitted)
    assert len(set(map(id, tight))) == 2
    assert fitted._compiled_plan is tight[0]
    assert not report.loosened
    assert report.measured_peak_bytes <= fitted.plan.budget_bytes
    assert report.not_compiled == ""


def test_one_correction_is_enough_where_graphs_take_the_same_beyond_what_is_told(fit):
    fitted = fit("70%", lambda plan: plan.told_bytes + plan.budget_bytes // 10)
    report = settle(fitted)
    assert report.corrections == 1
    assert report.not_compiled == ""
    assert report.measured_peak_bytes <= fitted.plan.budget_bytes
    assert fitted.plan.planned.predicted_peak_bytes == report.measured_peak_bytes


def test_each_correction_after_the_first_leaves_more_free_than_was_measured(fit, monkeypatch):
    cuts = []

    def takes(plan):
        if all(plan is not cut for cut in cuts):
            cuts.append(plan)
        return plan.budget_bytes + 4096

    fitted = fit("70%", takes)
    asked = []
    cut_for = fitted._cut_for

    def note(beyond_bytes):
        asked.append(beyond_bytes)
        return cut_for(beyond_bytes)

    monkeypatch.setattr(fitted, "_cut_for", note)
    with pytest.warns(NotCompiledWarning):
        settle(fitted)
    budget = fitted._compiled_plan.budget_bytes
    learned = [budget + 4096 - cut.told_bytes for cut in cuts[:MAX_CORRECTIONS]]
    more = [so - beyond for so, beyond in zip(asked, learned, strict=True)]
    assert more == [0, budget // 100, budget // 50]


def test_after_corrections_that_do_not_help_the_step_runs_eager(fit):
    fitted = fit("70%", lambda plan: plan.budget_bytes + 4096)
    with pytest.warns(NotCompiledWarning, match=r"4\.0 KiB above its budget"):
        report = settle(fitted)
    assert report.corrections == MAX_CORRECTIONS
    assert "above its budget" in report.not_compiled


def test_before_it_gives_up_it_tries_the_partition_of_least_peak(fit):
    plans = []

    def takes(plan):
        if all(plan is not one for one in plans):
            plans.append(plan)
        return plan.budget_bytes * (2 if plan is plans[0] else 1)

    fitted = fit("70%", takes)
    report = settle(fitted)
    assert report.corrections == 1
    assert report.not_compiled == ""
    first, least = plans
    assert least.told_bytes < first.told_bytes
    # However much more is asked for, nothing less is found.
    assert fitted._cut_for(first.budget_bytes).told_bytes == least.told_bytes


def test_where_that_does_not_keep_the_budget_either_the_step_runs_eager(fit):
    fitted = fit("70%", lambda plan: plan.budget_bytes * 2)
    with pytest.warns(NotCompiledWarning, match="no tighter partition"):
        report = settle(fitted)
    assert report.corrections == 1
