"""Parameters elsewhere: the same bits, within their room, nothing lost where a transfer fails."""

from __future__ import annotations

import copy
import dataclasses
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from handmade import record
from test_offload import _overwrite_stored_files
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import memfit
from memfit.apply.executor import Executor, Subject
from memfit.apply.offload.activations import Outgoing
from memfit.apply.offload.parameters import bring_parameters_home, is_offloaded
from memfit.apply.offload.tiers import DiskTier
from memfit.errors import OffloadError, UsageError
from memfit.measure import measure_peak, static_tensors
from memfit.measure.peak import storage_bytes
from memfit.run.fitted import Fitted
from memfit.tensors.barrier import owner_of, without_barrier
from memfit.tensors.storage import is_fixed
from memfit.track import cpu
from memfit.verify.eager import verify
from memfit.workload import Workload

pytestmark = pytest.mark.offloads_parameters

WIDTH, LAYERS = 64, 6
WEIGHT = 4 * WIDTH * WIDTH
NOTHING = {"actions": []}


class Block(nn.Module):
    """Uses a parameter of a child without calling it, and one matrix twice."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.outer = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        y = torch.tanh(nn.functional.linear(x, self.inner.weight, self.inner.bias))
        return x + self.drop(self.outer(y)) @ self.inner.weight.t()


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def build(make=adam, **options):
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(LAYERS)])
    return Workload(model, torch.randn(8, WIDTH), square, make, **options)


def square(model, batch):
    return model(batch).pow(2).mean()


def inference():
    workload = build()
    return Workload(workload.model.eval(), workload.batch, optimizer=None)


def names(workload):
    named = workload.model.named_parameters()
    return [name for name, parameter in named if parameter.ndim > 1]


def plan(workload, *, room=3 * WEIGHT, ahead=WEIGHT, fuse=False, state=False, pieces=1, **more):
    going = names(workload)
    forward = list(range(len(going)))
    parameters = {
        "tier": "disk",
        "room_bytes": room,
        "ahead_bytes": ahead,
        "names": going,
        "order": [*forward, *reversed(forward)] * pieces,
        **more,
    }
    actions = [{"kind": "offload_parameters", "offload_parameters": parameters}]
    if state:
        order = [name for name, _ in workload.model.named_parameters()][::-1]
        directions = {"tier": "disk", "window_bytes": 0, "least_bytes": 16, "order": order}
        actions.append({"kind": "offload_optimizer", "offload_optimizer": directions})
    if fuse:
        actions.append({"kind": "fuse_optimizer"})
    return {"actions": [{**action, "promise": "exact"} for action in [*actions, *cut(pieces)]]}


def cut(pieces):
    return [{"kind": "micro_batch", "count": pieces}] if pieces > 1 else []


@pytest.fixture(autouse=True)
def _any_folder(monkeypatch):
    """Tests may write to a folder in memory."""

    def tier(window_bytes, folder=""):
        return DiskTier(window_bytes, folder, allow_memory=True)

    monkeypatch.setattr("memfit.apply.offload.tiers.DiskTier", tier)


@pytest.fixture
def uses(monkeypatch):
    """Which parameters are used, one after another, by their places among those that go."""
    used = []

    class Observed:
        def __init__(self, *arguments):
            self._room = memfit._native.Room(*arguments)

        def need(self, numbers):
            for number in dict.fromkeys(numbers):
                if used[-1:] != [number]:
                    used.append(number)
            return self._room.need(numbers)

        def __getattr__(self, name):
            return getattr(self._room, name)

    native = SimpleNamespace(Room=Observed)
    monkeypatch.setattr("memfit.apply.offload.parameters._native", native)
    return used


def in_memory(model):
    """Bytes of matrices that are there."""
    return storage_bytes(p for p in model.parameters() if p.ndim > 1)


class Highest(TorchDispatchMode):
    """The most bytes of matrices that were there during any op."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.bytes = 0

    def __torch_dispatch__(self, func, _types, args=(), kwargs=None):
        self.bytes = max(self.bytes, in_memory(self.model))
        return func(*args, **(kwargs or {}))


def run(workload, made, steps=3):
    """Losses, and what the model is after so many steps."""
    with Fitted(workload, made, loss_reduction="mean") as fitted:
        losses = []
        for step in range(steps):
            torch.manual_seed(step)
            losses.append(fitted.step())
    return losses, [p.detach().clone() for p in workload.model.parameters()]


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# The same bits, within the room


@pytest.mark.parametrize("pieces", [1, 4])
@pytest.mark.parametrize(
    ("fuse", "state", "room", "ahead"),
    [
        (True, False, 2 * WEIGHT, 0),
        (True, True, 3 * WEIGHT, WEIGHT),
        (False, False, 5 * WEIGHT, 2 * WEIGHT),
        (False, True, 2 * WEIGHT, 0),
    ],
)
def test_parameters_are_bitwise_after_three_steps_in_their_room(fuse, state, room, ahead, pieces):
    expected = run(build(), {"actions": cut(pieces)})
    workload = build()
    made = plan(workload, fuse=fuse, state=state, room=room, ahead=ahead, pieces=pieces)
    with Fitted(workload, made, loss_reduction="mean") as fitted:
        losses = []
        for step in range(3):
            torch.manual_seed(step)
            fitted.place_state()
            with Highest(workload.model) as highest:
                losses.append(fitted.step())
            assert 0 < highest.bytes <= room
            assert in_memory(workload.model) <= room
        assert fitted.report().offloaded_bytes_read > 0
    assert same(expected[0], losses)
    assert same(expected[1], [p.detach() for p in workload.model.parameters()])
    assert not any(owner_of(p) for p in workload.model.parameters())


def test_inference_writes_once_and_reads_what_its_room_does_not_hold():
    expected = Fitted(inference(), NOTHING).step()
    workload = inference()
    everything = in_memory(workload.model)
    with Fitted(workload, plan(workload)) as fitted:
        assert torch.equal(fitted.step(), expected)
        written = fitted.report().offloaded_bytes_written
        assert torch.equal(fitted.step(), expected)
        assert in_memory(workload.model) <= 3 * WEIGHT
        report = fitted.report()
    # What stayed at first goes once too, when its turn comes.
    assert written <= report.offloaded_bytes_written <= everything
    assert report.offloaded_bytes_read > 0


def test_what_the_plan_does_not_expect_is_there_too():
    """An order of uses that is wrong costs time, never a bit or the room."""
    expected = run(build(), NOTHING)
    workload = build()
    wrong = plan(workload, order=[3, 1, 1, 0], fuse=True)
    assert same(expected[1], run(workload, wrong)[1])


def test_tied_and_frozen_parameters():
    def tied(make=adam):
        workload = build(make)
        workload.model[3].outer.weight = workload.model[0].inner.weight
        workload.model[1].outer.weight.requires_grad_(requires_grad=False)
        return workload

    expected = run(tied(), NOTHING)
    workload = tied()
    assert same(expected[1], run(workload, plan(workload, room=2 * WEIGHT, ahead=0))[1])


# Whoever uses parameters between steps


def test_who_looks_between_steps_finds_parameters_and_may_change_them():
    workloads = build(), build()
    plans = NOTHING, plan(workloads[1], fuse=True, room=2 * WEIGHT)
    results = []
    for workload, made in zip(workloads, plans, strict=True):
        with Fitted(workload, made) as fitted:
            torch.manual_seed(0)
            fitted.step()
            saved = copy.deepcopy(workload.model.state_dict())
            with torch.no_grad():
                workload.model[4].inner.weight.mul_(0.5)
            norm = torch.stack([p.norm() for p in workload.model.parameters()]).sum()
            workload.model.load_state_dict(saved)
            workload.model[2].outer.weight.data = torch.ones(WIDTH, WIDTH)
            with torch.no_grad():
                outside = workload.model.eval()(workload.batch)
            workload.model.train()
            fitted.step()
        results.append([norm, outside, *saved.values(), *workload.model.state_dict().values()])
    assert same(*results)


@pytest.mark.parametrize("transform", ["jvp", "vmap", "grad", "of parameters", "of one"])
def test_transforms_between_steps_find_parameters(transform):
    def transformed(model, batch):
        parameters = dict(model.named_parameters())
        weight = parameters["5.outer.weight"]
        if transform == "of parameters":

            def of_parameters(values):
                return torch.func.functional_call(model, values, (batch,)).square().mean()

            gradients = torch.func.grad(of_parameters)(parameters)
            return torch.cat([g.flatten() for g in gradients.values()])
        if transform == "of one":
            rows = torch.func.vmap(lambda row: row.flip(0).sin())(weight)
            return torch.func.functionalize(lambda w, r: w.t() @ r)(weight, rows)
        if transform == "jvp":
            return torch.func.jvp(model, (batch,), (batch,))[1]
        if transform == "vmap":
            return torch.func.vmap(model)(batch)
        return torch.func.grad(lambda x: model(x).sum())(batch)

    results = []
    for made in (lambda _: NOTHING, lambda w: plan(w, room=2 * WEIGHT)):
        workload = build()
        workload.model.eval()
        with Fitted(workload, made(workload)) as fitted:
            fitted.step()
            results.append([transformed(workload.model, workload.batch).detach()])
    assert same(*results)


def test_a_copy_made_between_steps_is_an_ordinary_model():
    workload = build()
    with Fitted(workload, plan(workload)) as fitted:
        fitted.step()
        assert sum(owner_of(p) is not None for p in workload.model.parameters()) > LAYERS
        twin = copy.deepcopy(workload.model)
        assert {type(parameter) for parameter in twin.parameters()} == {nn.Parameter}
        assert same(list(twin.parameters()), list(workload.model.parameters()))


def test_to_ask_whether_memory_can_be_let_go_brings_nothing_home():
    workload = build()
    with Fitted(workload, plan(workload)) as fitted:
        fitted.step()
        parameters = list(workload.model.parameters())
        with without_barrier():
            there = storage_bytes(parameters)
        assert not any(is_fixed(parameter) for parameter in parameters)
        with without_barrier():
            assert storage_bytes(parameters) == there
        assert sum(owner_of(parameter) is not None for parameter in parameters) > LAYERS


def test_two_plans_for_one_model_take_turns():
    expected = run(build(), NOTHING, steps=4)
    workload = build()
    optimizer = adam(workload.model.parameters())
    workload = Workload(workload.model, workload.batch, square, optimizer)
    with Fitted(workload, plan(workload)) as first, Fitted(workload, plan(workload)) as second:
        for step in range(4):
            torch.manual_seed(step)
            turn = first if step % 2 else second
            read = turn.report().offloaded_bytes_read
            turn.place_state()
            # Nothing came home in between but by the step's own uses.
            assert step == 0 or in_memory(workload.model) <= 3 * WEIGHT
            assert turn.report().offloaded_bytes_read == read
            turn.step()
    assert same(expected[1], [p.detach() for p in workload.model.parameters()])


# Failures


class FullDisk(DiskTier):
    """Takes so many more blocks."""

    left = 1000

    def send(self, source):
        if FullDisk.left == 0:
            message = "no space left"
            raise OffloadError(message)
        FullDisk.left -= 1
        return super().send(source)


def test_a_full_disk_costs_memory_and_the_next_step_does_not_begin(monkeypatch):
    def tier(window_bytes, folder=""):
        return FullDisk(window_bytes, folder, allow_memory=True)

    monkeypatch.setattr("memfit.apply.offload.tiers.DiskTier", tier)
    monkeypatch.setattr(FullDisk, "left", 1000)
    expected = run(build(), NOTHING, steps=2)
    workload = build()
    with Fitted(workload, plan(workload, fuse=True, room=2 * WEIGHT)) as fitted:
        torch.manual_seed(0)
        fitted.step()
        FullDisk.left = 3
        torch.manual_seed(1)
        fitted.step()  # whole, in more memory
        assert in_memory(workload.model) > 2 * WEIGHT
        with pytest.raises(OffloadError, match="no step has begun"):
            fitted.step()
        FullDisk.left = 1000
        fitted.place_state()
        assert in_memory(workload.model) <= 2 * WEIGHT
    assert same(expected[1], [p.detach() for p in workload.model.parameters()])


def test_bytes_that_changed_on_the_disk_are_named(tmp_path):
    workload = build()
    fitted = Fitted(workload, plan(workload, fuse=True, room=2 * WEIGHT), offload_dir=tmp_path)
    fitted.step()
    _overwrite_stored_files()
    with pytest.raises(OffloadError, match=r"the parameter `.*weight` is lost"):
        fitted.step()


def test_memory_that_is_not_the_tensors_own_is_refused():
    workload = build()
    workload.model[0].inner.weight.data = torch.from_numpy(torch.ones(WIDTH, WIDTH).numpy())
    with pytest.raises(UsageError, match=r"`0\.inner\.weight` lies in memory that cannot"):
        Fitted(workload, plan(workload))
    workload = build()
    with pytest.raises(UsageError, match="which the model does not have"):
        Fitted(workload, plan(workload, names=["gone"], order=[0]))
    with pytest.raises(UsageError, match="malformed"):
        Fitted(workload, plan(workload, room="much"))


# From the plan on


def wide():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(8)]
    return Workload(nn.Sequential(*layers), torch.randn(4, 256), square, adam)


def test_a_step_that_fits_only_without_its_parameters_is_planned_measured_and_bitwise(tmp_path):
    trace = memfit.trace(wide())
    budget = memfit.plan(trace, budget="100%").unplanned.predicted_peak_bytes * 3 // 10
    forbid = ("offload_parameters",)
    without = memfit.plan(trace, budget=budget, offload=tmp_path, forbid=forbid, allow="equivalent")
    assert without.verdict == "does_not_fit"
    made = memfit.plan(trace, budget=budget, offload=tmp_path)
    assert made.verdict == "fits"
    assert "offload_parameters" in [action.kind for action in made.actions]
    verified = verify(wide, made.as_dict(), loss_reduction="mean", steps=2)
    kinds = [verified[what]["agreement"] for what in ("loss", "gradients", "parameters")]
    assert kinds == ["bitwise"] * 3
    planned = verified["planned"]
    assert planned["measured_peak_bytes"] <= budget
    predicted = made.planned.predicted_peak_bytes
    assert abs(planned["measured_peak_bytes"] - predicted) <= 0.01 * predicted


def tall():
    """Activations and parameters are both too many."""
    return dataclasses.replace(wide(), batch=torch.randn(2048, 256))


@pytest.mark.parametrize(
    ("forbid", "beside"),
    [
        ((), "micro_batch"),
        (("micro_batch", "offload"), "remat"),
        (("micro_batch", "remat"), "offload"),
    ],
)
def test_a_step_that_fits_only_without_its_parameters_and_by_another_action(
    forbid, beside, tmp_path, uses
):
    trace = memfit.trace(tall())

    def made(budget, *also):
        kinds = (*forbid, *also)
        options = {"offload": tmp_path, "allow": "equivalent", "forbid": kinds}
        return memfit.plan(trace, budget=budget, **options)

    least = [made("1MiB", kind).minimum_peak_bytes for kind in ("offload_parameters", beside)]
    found = made(int(0.9 * min(least)))
    assert found.verdict == "fits"
    kinds = {action.kind for action in found.actions}
    assert {"offload_parameters", beside} <= kinds
    verified = verify(tall, found.as_dict(), loss_reduction="mean", steps=2)
    same = {"bitwise"} if "micro_batch" in forbid else {"bitwise", "equivalent"}
    assert {verified[what]["agreement"] for what in ("loss", "gradients", "parameters")} <= same
    measured = verified["planned"]["measured_peak_bytes"]
    assert measured <= found.budget_bytes
    predicted = found.planned.predicted_peak_bytes
    assert abs(measured - predicted) <= 0.01 * predicted
    with Fitted(tall(), found.as_dict(), loss_reduction="mean") as fitted:
        fitted.step()
        uses.clear()
        fitted.step()
    actions = [action.get("offload_parameters") for action in found.as_dict()["actions"]]
    (directions,) = filter(None, actions)
    assert uses == directions["order"], "what runs again and every piece of the batch included"


def test_inference_fits_into_less_than_its_parameters(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)]).eval()
    workload = Workload(model, torch.randn(4, 256))
    expected = Fitted(workload, NOTHING).step()
    everything = storage_bytes(model.parameters())
    made = memfit.plan(workload, budget=everything // 2, offload=tmp_path)
    assert made.verdict == "fits"
    with Fitted(workload, made.as_dict(), offload_dir=tmp_path) as fitted:
        assert torch.equal(fitted.step(), expected)
        measured = measure_peak(fitted.step, static_tensors(workload, None)).peak_bytes
    assert measured <= everything // 2


def test_parameters_that_cannot_be_let_go_stay_and_the_others_go(tmp_path):
    torch.save(wide().model[:4].state_dict(), tmp_path / "weights.pt")
    folder = tmp_path / "offloaded"
    folder.mkdir()

    def loaded():
        workload = wide()
        state = torch.load(tmp_path / "weights.pt")
        workload.model[:4].load_state_dict(state, assign=True)
        return workload

    made = memfit.plan(loaded(), "50%", offload=folder)
    assert made.verdict == "fits"
    kinds = [action.get("offload_parameters") for action in made.as_dict()["actions"]]
    (directions,) = filter(None, kinds)
    assert sorted(directions["names"]) == [f"{layer}.0.weight" for layer in range(4, 8)]
    verified = verify(loaded, made.as_dict(), loss_reduction="mean", steps=2)
    assert verified["parameters"]["agreement"] == "bitwise"
    measured = verified["planned"]["measured_peak_bytes"]
    assert measured <= made.budget_bytes
    predicted = made.planned.predicted_peak_bytes
    assert abs(measured - predicted) <= 0.01 * predicted


def test_a_model_of_which_nothing_can_be_let_go_keeps_its_parameters(tmp_path):
    workload = wide()
    for parameter in workload.model.parameters():
        parameter.data = torch.from_numpy(parameter.detach().numpy().copy())
    made = memfit.plan(workload, "60%", offload=tmp_path)
    assert "offload_parameters" not in {action.kind for action in made.actions}
    refusals = {refusal.kind: refusal.reason for refusal in made.refusals}
    assert "cannot be let go" in refusals["offload_parameters"]


def test_memory_on_a_gpu_can_be_let_go_though_torch_calls_all_of_it_shared():
    with FakeTensorMode():
        assert not is_fixed(torch.empty(4, device="cuda"))

    class OnGpu:
        """What torch says of a storage on a GPU, which a machine without one has not."""

        device = torch.device("cuda:0")
        is_meta = False

        def __init__(self, resizable):
            self.resizable = lambda: resizable

        def nbytes(self):
            return 16

        def untyped_storage(self):
            return self

        def is_shared(self):
            return True

    assert not is_fixed(OnGpu(resizable=True))
    assert is_fixed(OnGpu(resizable=False)), "it came from another process"


def test_an_own_loop_keeps_its_parameters(tmp_path):
    trace = memfit.trace(wide())
    made = memfit.plan(trace, budget="30%", offload=tmp_path, own_loop=True)
    refusals = {refusal.kind: refusal.reason for refusal in made.refusals}
    assert "own loop" in refusals["offload_parameters"]
    workload = build()
    with Fitted(workload, plan(workload)) as fitted:  # noqa: SIM117
        with pytest.raises(UsageError, match="offload_parameters"), fitted.forward():
            pass


def test_files_are_gone_after_it(tmp_path):
    workload = build()
    with Fitted(workload, plan(workload, fuse=True), offload_dir=tmp_path) as fitted:
        fitted.step()
    assert list(Path(tmp_path).iterdir()) == []


class Chosen(nn.Module):
    """Runs other ops than its plan says where it is told to, between uses of its parameters."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(4))
        self.astray = False

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            x = x.mul(0.5).sigmoid() if self.astray else x.tanh()
        return x


def test_what_is_saved_of_a_parameter_stays_where_the_step_has_left_its_plan(tmp_path, monkeypatch):
    """Its memory is newer than the forward, in which it was fetched, and is let go at any op."""
    assert cpu.start() is None
    torch.manual_seed(0)
    model, batch = Chosen(), torch.randn(64, 128)
    workload = Workload(model, batch, square, None)
    ops = record(model, lambda: square(model, batch), backward=True)
    actions = [
        *plan(workload, room=2 * model.layers[0].weight.nbytes)["actions"],
        {"kind": "remat", "promise": "exact", "remat": ops.remat(lambda _: False)},
    ]
    sent = []
    send = Outgoing.send

    def seen(outgoing, fetch, source):
        sent.append(is_offloaded(source.untyped_storage()))
        send(outgoing, fetch, source)

    monkeypatch.setattr(Outgoing, "send", seen)
    model.astray = True
    square(model, batch).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    subject = Subject(weakref.ref(model), strays_to=str(tmp_path), warn=False)
    executor = Executor({"actions": actions}, subject)
    executor.place()
    with executor.running():
        with executor.forward():
            loss = square(model, batch)
        loss.backward()
    assert executor.diverged
    assert sent
    assert not any(sent)
    bring_parameters_home(model)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)
