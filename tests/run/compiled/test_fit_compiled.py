"""`memfit.fit(..., compile=True)`: graphs, shares, caches, and the way back to eager."""

import json
import pickle
from dataclasses import replace

import pytest
import torch
from forks import FORKS
from graphs import Layers, Transformer, tokens
from torch import nn
from torch._inductor import config as inductor

import memfit
from memfit.apply.offload.tiers import DiskTier
from memfit.errors import NotCompiledWarning
from memfit.measure import measure_peak, static_tensors
from memfit.run.compiled import toolchain
from memfit.run.compiled.budget_shares import divide
from memfit.run.compiled.fitted import CompiledFitted
from memfit.run.compiled.outside_graphs import beside_graphs
from memfit.run.compiled.partitioner import Partitioner
from memfit.run.compiled.recording import record
from memfit.verify.eager import State

needs_compiler = pytest.mark.skipif(
    toolchain.missing("cpu") is not None, reason=f"{toolchain.missing('cpu')}"
)


def layers():
    torch.manual_seed(0)
    return memfit.Workload(
        model=Layers(),
        batch=torch.randn(256, 32),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda p: torch.optim.Adam(p, lr=1e-3),
    )


def losses(workload, step, steps=3):
    found = []
    for index in range(steps):
        torch.manual_seed(index)
        found.append(float(step()))
    return found, [p.detach().clone() for p in workload.model.parameters()]


@needs_compiler
@pytest.mark.filterwarnings("default::UserWarning")
def test_compiled_steps_with_dropout_are_those_compiled_without_memfit():
    plain = layers()
    compiled_loss = torch.compile(plain.loss)
    ordinary = memfit.Fitted(
        memfit.Workload(plain.model, plain.batch, compiled_loss, plain.optimizer),
        {"actions": []},
    )
    expected, expected_parameters = losses(plain, ordinary.step)
    planned = layers()
    peak = memfit.predict(planned).predicted_peak_bytes
    budget = peak * 6 // 10
    fitted = memfit.fit(planned, budget, compile=True)
    got, parameters = losses(planned, fitted.step)
    report = fitted.report()
    assert report.not_compiled == ""
    assert report.graphs[0].recomputed_ops > 0
    assert report.graphs[0].predicted_peak_bytes <= budget < report.graphs[0].unplanned_peak_bytes
    assert 0 < report.measured_peak_bytes <= budget
    assert got == pytest.approx(expected, rel=1e-5)
    for ours, theirs in zip(parameters, expected_parameters, strict=True):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()
    assert fitted.plan.actions[0].promise == "equivalent"


def encoder():
    torch.manual_seed(0)
    blocks = [nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True) for _ in range(2)]
    return memfit.Workload(
        model=nn.Sequential(*blocks),
        batch=torch.randn(2, 16, 64),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda p: torch.optim.Adam(p, lr=1e-3),
    )


@pytest.fixture
def _any_folder(monkeypatch):
    """Tests may write to a folder in memory."""

    def tier(window_bytes, folder=""):
        return DiskTier(window_bytes, folder, allow_memory=True)

    monkeypatch.setattr("memfit.apply.offload.tiers.DiskTier", tier)


@needs_compiler
@pytest.mark.usefixtures("_any_folder")
@pytest.mark.filterwarnings("default::UserWarning")
def test_a_budget_below_the_optimizers_own_peak_is_met_with_its_state_elsewhere(tmp_path):
    workload = encoder()
    in_memory = beside_graphs(json.loads(memfit.trace(workload).json()))
    budget = in_memory.optimizer_peak_bytes * 7 // 10
    stays = ["offload_optimizer", "offload_parameters"]
    with pytest.raises(memfit.DoesNotFit, match="the optimizer step takes"):
        memfit.fit(encoder(), budget, compile=True, offload=tmp_path, forbid=stays)
    fitted = memfit.fit(workload, budget, compile=True, offload=tmp_path)
    assert isinstance(fitted, CompiledFitted)
    assert "offload_optimizer" in {action.kind for action in fitted.plan.actions}
    before = State.of(replace(workload, optimizer=fitted.optimizer))
    got, parameters = losses(workload, fitted.step)
    predicted = fitted.plan.planned.predicted_peak_bytes
    measured = measure_peak(fitted.step, static_tensors(workload, fitted.optimizer))
    report = fitted.report()
    assert report.not_compiled == ""
    assert report.corrections == 0
    assert 0 < report.measured_peak_bytes <= budget
    assert measured.peak_bytes <= budget
    # The optimizer's step is the peak; numbers that autograd keeps as tensors are not predicted.
    assert abs(measured.peak_bytes - predicted) <= 16
    assert measured.left_bytes == 0
    assert report.offloaded_bytes_read > 0
    fitted.close()
    # The same compiled code with the state in memory.
    within = replace(workload, loss=fitted._compiled, optimizer=fitted.optimizer)
    before.restore(within)
    expected, expected_parameters = losses(within, memfit.Fitted(within, {"actions": []}).step)
    assert got == expected
    assert all(map(torch.equal, parameters, expected_parameters))


_CACHED = """
import sys, warnings
warnings.simplefilter("ignore")
import torch, memfit
from torch._dynamo.utils import counters
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
workload = memfit.Workload(model, torch.randn(512, 64), lambda m, b: m(b).square().mean())
peak = memfit.predict(workload).predicted_peak_bytes
fitted = memfit.fit(workload, peak * int(sys.argv[1]) // 100, compile=True)
fitted.step()
assert not fitted.report().not_compiled, fitted.report()
counts = counters["aot_autograd"]
print(counts["autograd_cache_hit"], counts["autograd_cache_miss"])
"""


@needs_compiler
def test_another_process_finds_the_compiled_graphs_and_another_budget_does_not(tmp_path):
    def hits_and_misses(percent):
        cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        done = FORKS.run("-c", _CACHED, str(percent), **cache)
        assert done.code == 0, done.stderr
        return tuple(map(int, done.stdout.split()[-2:]))

    assert hits_and_misses(110) == (0, 1)
    assert hits_and_misses(110) == (1, 0)
    assert hits_and_misses(150) == (0, 1)


def test_a_partitioner_survives_pickling_and_differs_by_its_shares():
    one = Partitioner({"a": 100}, 100)
    again = pickle.loads(pickle.dumps(one))  # noqa: S301 - made one line above
    assert again == one
    assert again.uuid() == one.uuid()
    assert Partitioner({"a": 99}, 100).uuid() != one.uuid()
    assert Partitioner({"a": 100}, 99) != one


def test_without_a_compiler_the_step_runs_eager_and_says_so():
    toolchain_cache_clear()
    try:
        with (
            inductor.patch({"cpp.cxx": ("/nowhere/g++",)}),
            pytest.warns(memfit.NotCompiledWarning, match=r"C\+\+ compiler"),
        ):
            fitted = memfit.fit(layers(), "4MiB", compile=True)
    finally:
        toolchain_cache_clear()
    fitted.step()
    assert "C++ compiler" in fitted.report().not_compiled


def toolchain_cache_clear():
    from torch._inductor import cpp_builder

    clear = getattr(cpp_builder.cpp_compiler_search, "cache_clear", None)
    if clear is not None:
        clear()


@needs_compiler
def test_a_step_that_cannot_be_compiled_as_asked_runs_eager_and_says_why():
    with pytest.warns(memfit.NotCompiledWarning, match="whole steps"):
        fitted = memfit.fit(layers(), "4MiB", compile=True, own_loop=True)
    assert "own_loop" in fitted.report().not_compiled
    inference = memfit.Workload(model=Layers().eval(), batch=torch.randn(4, 32))
    with pytest.warns(memfit.NotCompiledWarning, match="inference"):
        memfit.fit(inference, "4MiB", compile=True)


def recorded_with_breaks():
    torch.manual_seed(0)
    model = Transformer(2, 0.2, broken=True)
    torch._dynamo.reset()
    return model, record(model, lambda m, b: m(*b), tokens(8), torch.enable_grad)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at what crosses a break
def test_a_graph_break_makes_several_graphs_under_one_budget():
    model, graphs = recorded_with_breaks()
    assert len(graphs) > 1
    assert all(graph.joint is not None for graph in graphs)
    static = sum(p.nbytes for p in model.parameters())
    full = max(share.peak_bytes for share in divide(graphs, static, 1 << 60))
    least = max(share.peak_bytes for share in divide(graphs, static, 0))
    assert least < full
    budget = (full + least) // 2
    shares = divide(graphs, static, budget)
    assert max(share.peak_bytes for share in shares) <= budget
    # What an earlier graph saves is there while a later one runs.
    assert shares[-1].outside_bytes > 0


def test_recording_leaves_no_trace_on_the_model_or_the_random_state():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    buffers = [b.clone() for b in model.buffers()]
    batch = torch.randn(4, 8)
    state = torch.get_rng_state()
    torch._dynamo.reset()
    graphs = record(model, lambda m, b: m(b).sum(), batch, torch.enable_grad)
    assert len(graphs) == 1
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, model.buffers(), buffers))
    assert all(p.grad is None for p in model.parameters())


@needs_compiler
def test_where_compiled_code_takes_more_than_the_budget_the_step_runs_eager(monkeypatch):
    workload = layers()
    fitted = memfit.fit(workload, "95%", compile=True)
    assert isinstance(fitted, CompiledFitted)
    # As if Inductor had taken twice the budget, whatever it was cut for; without its compile time.
    monkeypatch.setattr(fitted, "_compiled", workload.loss)
    monkeypatch.setattr(fitted, "_measured_bytes", 2 * fitted.plan.budget_bytes)
    monkeypatch.setattr(fitted, "_counts", lambda: False)
    monkeypatch.setattr(fitted, "_cut_for", lambda _: None)
    fitted.step()
    with pytest.warns(NotCompiledWarning, match="from here on the step runs eager"):
        fitted.step()
    assert "above its budget" in fitted.report().not_compiled
    assert isinstance(fitted.plan, memfit.Plan)
    before = [p.detach().clone() for p in workload.model.parameters()]
    state = fitted.optimizer.state_dict()["state"][0]["step"].clone()
    fitted.step()
    pairs = zip(before, workload.model.parameters(), strict=True)
    assert all(not torch.equal(old, new) for old, new in pairs)
    assert fitted.optimizer.state_dict()["state"][0]["step"] == state + 1
    assert fitted.report().steps == 3
