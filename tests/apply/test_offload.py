"""Stored tensors: what user code may do around them, how it can fail, and what is left behind."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from pathlib import Path

import pytest
import torch
from dropout_blocks import Stack, compare, once
from handmade import chain, record
from torch import nn
from torch.utils.checkpoint import checkpoint

from memfit.apply import executor
from memfit.apply.offload.tiers import DiskTier
from memfit.apply.remat import records
from memfit.apply.remat.remat import Rematerialiser
from memfit.errors import DivergenceWarning, OffloadError, UsageError
from memfit.measure import measure_peak
from memfit.run.fitted import Fitted
from memfit.track import cpu
from memfit.workload import Workload

ROWS, WIDTH = 64, 256
MATRIX = ROWS * WIDTH * 4
"""Bytes of one activation of the chain below."""


@pytest.fixture
def x():
    torch.manual_seed(1)
    return torch.randn(5, 8)


@pytest.fixture
def tier(tmp_path):
    return DiskTier(1 << 20, tmp_path, allow_memory=True)


@pytest.fixture
def store_all(tier):
    """Makes what stores everything storable of a forward."""

    def make(model, forward, window_bytes=1000, regions=None):
        ops = record(model, forward, backward=True)
        offload = ops.offload(window_bytes=window_bytes, regions=regions)
        assert offload["stores"]
        return Rematerialiser(model, None, offload, tier)

    return make


def peak_of(forward, x, planned):
    def step():
        with planned.forward():
            loss = forward(x)
        loss.backward()
        x.grad = None

    step()
    return measure_peak(step, [x])


@pytest.mark.parametrize("window_bytes", [0, 100, 10**6])
def test_a_module_called_twice(x, store_all, window_bytes):
    model = Stack()
    outcome = compare(model, lambda: model(x), store_all(model, lambda: model(x), window_bytes))
    assert outcome.offloaded > 10
    assert outcome.observations.offloaded_saves >= outcome.offloaded
    assert outcome.observations.divergence == ""
    assert outcome.observations.kept_drops == []


@pytest.mark.parametrize("rows", [1024, 128])
def test_what_was_made_once_the_plan_was_left_goes_where_a_region_follows_it_again(tier, rows):
    """Small as it is: a recurrent network that left its plan saves thousands of them."""

    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.other = False

        def forward(self, x):
            return self.layer(x).sin() if self.other else self.layer(x).cos()

    assert cpu.start() is None
    model = nn.Sequential(First(), nn.Linear(8, 8))
    wide = torch.randn(rows, 8)  # of 4 KiB at least
    ops = record(model, lambda: model(wide).sum(), backward=True)
    remat = ops.remat(regions=[("0", 0), ("1", 0)])
    planned = Rematerialiser(model, remat, warn=False, strays=lambda: tier)
    assert compare(model, lambda: model(wide).sum(), planned).offloaded == 0
    model[0].other = True
    outcome = compare(model, lambda: model(wide).sum(), planned)
    assert planned.diverged
    assert outcome.offloaded == 1


def test_some_module_calls_only(x, store_all):
    model = Stack()
    planned = store_all(model, lambda: model(x), regions=[("blocks.1", 1), ("blocks.2", 0)])
    outcome = compare(model, lambda: model(x), planned)
    assert 0 < outcome.offloaded < 15
    assert outcome.observations.divergence == ""


# What memory is there, worked out by hand


@pytest.mark.parametrize("window", [0, 1, 2, 3])
def test_a_stored_chain_holds_what_is_on_its_way(tier, window):
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    forward = chain(6)
    ops = record(nn.Module(), lambda: forward(x))
    offload = ops.offload(window_bytes=window * MATRIX)
    # Every sigmoid, in the order of backward.
    offload["order"] = list(reversed(range(6)))
    assert len(offload["stores"]) == 6
    planned = Rematerialiser(nn.Module(), None, offload, tier)
    measured = peak_of(forward, x, planned)
    # Forward: during a sigmoid its input, its output and the old output that the name `x` still
    # holds, which is the newest on its way; during the sum `x + 1` the same without the input.
    # Older ones on their way add up to the window.
    forward_peak = 3 + max(0, window - 1)
    # Backward of a sigmoid: its output, the gradients before and after it, and what is ahead. The
    # gradient of the last is expanded and takes no memory: at the other five it does.
    backward_peak = 3 + min(window, 4)
    assert measured.peak_bytes - MATRIX - max(forward_peak, backward_peak) * MATRIX in (0, 4, 8)
    assert measured.left_bytes == 0


def test_the_measured_peak_falls_with_everything_stored(tier):
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    forward = chain(30)
    ops = record(nn.Module(), lambda: forward(x))
    measured = peak_of(forward, x, Rematerialiser(nn.Module(), None, ops.offload(), tier))
    assert measured.peak_bytes - MATRIX == 3 * MATRIX + 2 * 4


def test_homes_let_a_chain_be_computed_in_pieces(tier):
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    forward = chain(16)
    ops = record(nn.Module(), lambda: forward(x))
    made = [m for m in ops.made if m.name.startswith(("aten.add", "aten.sigmoid"))]
    piece = 4  # sigmoids
    ends = {
        id(m): made[min((k // (2 * piece) + 1) * 2 * piece, len(made)) - 1].op
        for k, m in enumerate(made)
    }
    boundary = {id(made[k]) for k in range(2 * piece - 1, len(made), 2 * piece)}

    def run(home):
        remat = ops.remat(home=home)
        planned = Rematerialiser(nn.Module(), remat)
        return peak_of(forward, x, planned).peak_bytes // MATRIX, planned.outcome().replayed_ops

    plain = run(lambda _: None)
    assert plain == (1 + 17, 32)

    def home(m):
        # The insides of a piece pass for whoever asks from a later piece; boundaries stay.
        return None if id(m) in boundary else ends[id(m)] + 1

    peak, replayed = run(home)
    # Boundaries that are not there yet (4), a piece's insides, and the gradient.
    assert peak <= 1 + 4 + 4 + 2
    # The way to the last piece passes three pieces, and each computes its own insides anew.
    assert 32 < replayed <= 32 + 3 * 8


def test_a_stored_state_with_a_home_is_fetched_once_more(tier):
    x = torch.randn(ROWS, WIDTH, requires_grad=True)

    def forward(x):
        a = x.sigmoid()  # stored, with a home
        b = (a + 1.0).sin()  # dropped; its replay reads `a`
        return (b * b).sum() + a.exp().sum()

    ops = record(nn.Module(), lambda: forward(x))
    expected = torch.autograd.grad(forward(x), x)[0]
    stored = [m for m in ops.made if "sigmoid" in m.name]
    homes = {"near": None, "far": stored[0].op + 1}
    reads = {}
    for name, home in homes.items():
        offload = ops.offload(lambda m: "sigmoid" in m.name, home=lambda _, h=home: h)
        remat = ops.remat(lambda m: "sigmoid" not in m.name)
        planned = Rematerialiser(nn.Module(), remat, offload, tier)
        before = tier.moved().bytes_read
        with planned.forward():
            loss = forward(x)
        assert torch.equal(torch.autograd.grad(loss, x)[0], expected)
        reads[name] = (tier.moved().bytes_read - before) // MATRIX
    assert reads["near"] == 1
    assert reads["far"] > 1


# User code


def test_retain_graph_and_a_second_backward(x, store_all):
    model = Stack()

    def twice(loss):
        loss.backward(retain_graph=True)
        loss.backward()

    compare(model, lambda: model(x), store_all(model, lambda: model(x)), twice)


@pytest.mark.filterwarnings("ignore::memfit.errors.DivergenceWarning")
@pytest.mark.parametrize("window_bytes", [200, 1 << 20])
def test_a_gradient_taken_inside_forward_of_what_is_on_its_way(x, store_all, window_bytes):
    """It comes back for good before its write has been waited for; more goes out after it."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())

    def forward():
        inputs = x.clone().requires_grad_()
        (force,) = torch.autograd.grad(model(inputs).sum(), inputs)
        return model(x + force).pow(2).sum()

    compare(model, forward, store_all(model, forward, window_bytes))


def test_gradients_of_gradients(x, store_all):
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def twice(loss):
        first = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        sum(g.pow(2).sum() for g in first).backward()

    def forward():
        return model(x).pow(2).mean()

    compare(model, forward, store_all(model, forward), twice)


def test_backward_in_another_thread(x, store_all):
    model = Stack()

    def elsewhere(loss):
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()

    compare(model, lambda: model(x), store_all(model, lambda: model(x)), elsewhere)


@pytest.mark.parametrize("reentrant", [False, True])
def test_user_checkpointing_inside(x, store_all, reentrant):
    model = Stack(lambda block, x: checkpoint(block, x, use_reentrant=reentrant))
    x.requires_grad_()
    compare(model, lambda: model(x), store_all(model, lambda: model(x)))


def test_the_users_own_saved_tensor_hooks_win(x, store_all):
    model = Stack()
    seen = []

    def pack(t):
        seen.append(t)
        return t.clone()

    def wrap(block, x):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            return block(x)

    model.wrap = wrap
    compare(model, lambda: model(x), store_all(model, lambda: model(x)))
    assert seen


def test_a_custom_function_that_asks_twice(x, store_all):
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t):
            y = t * t
            ctx.save_for_backward(t, y)
            return y * t

        @staticmethod
        def backward(ctx, gradient):
            first, _ = ctx.saved_tensors
            t, y = ctx.saved_tensors
            assert torch.equal(t * t, y)
            assert torch.equal(first, t)
            return gradient * 3 * y

    model = nn.Linear(8, 8)

    def forward():
        return Cube.apply(model(x).sin()).sum()

    assert compare(model, forward, store_all(model, forward)).offloaded >= 2


def test_an_in_place_op_before_the_first_save_goes_out_as_it_is(x, store_all):
    model = nn.Linear(8, 8)

    def forward():
        return model(x).mul_(2.0).add_(1.0).sigmoid_().exp().sum()

    outcome = compare(model, forward, store_all(model, forward))
    assert outcome.offloaded >= 1
    assert outcome.observations.kept_drops == []


@pytest.mark.parametrize("window_bytes", [0, 10**6])
def test_a_write_after_the_save_is_refused_as_without_a_plan(x, tier, window_bytes):
    """Autograd refuses this, also where the saved value is offloaded already."""
    first, last = nn.Linear(8, 8), nn.Linear(8, 1)
    model = nn.Sequential(first, last)

    def forward(write):
        h = first(x).sigmoid()
        y = h * h.detach()  # saves `h`
        return last(y).sum() + write(h).sum()

    ops = record(model, lambda: forward(lambda h: h), backward=True)
    planned = Rematerialiser(model, None, ops.offload(window_bytes=window_bytes), tier)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        once(model, lambda: forward(lambda h: h.mul_(3.0)), contextlib.nullcontext())
    with (
        pytest.warns(DivergenceWarning, match=r"aten\.mul_"),
        pytest.raises(RuntimeError, match="modified by an inplace operation"),
    ):
        once(model, lambda: forward(lambda h: h.mul_(3.0)), planned.forward())


def test_a_write_nobody_watched_is_refused_as_without_a_plan(x, tier):
    """The window is large: the tensor is still on its way out when it is written to."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), nn.Identity(), nn.Linear(8, 1))
    ops = record(model, lambda: model(x).sum(), backward=True)
    offload = ops.offload(window_bytes=10**6, regions=[("0", 0), ("1", 0)])
    assert len(offload["stores"]) == 1
    planned = Rematerialiser(model, None, offload, tier)
    compare(model, lambda: model(x).sum(), planned)

    def write(_module, _args, output):
        with torch.no_grad():
            output.mul_(2.0)

    model[2].register_forward_hook(write)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        once(model, lambda: model(x).sum(), contextlib.nullcontext())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        once(model, lambda: model(x).sum(), planned.forward())


def test_a_record_that_reads_a_value_from_before_a_later_write(x, tier):
    """Not a valid plan: the record reads an earlier value than the one that autograd saves."""
    model = nn.Linear(8, 8)

    def forward():
        h = model(x)
        y = (h.detach() + 1.0).sin()
        return (y * h.mul_(2.0).exp()).sum()

    expected = once(model, forward, contextlib.nullcontext())
    ops = record(model, forward, backward=True)
    for made in ops.made:
        made.saved |= "addmm" in made.name
    offload = ops.offload(lambda m: "addmm" in m.name)
    planned = Rematerialiser(model, ops.remat(lambda m: "addmm" not in m.name), offload, tier)
    got = once(model, forward, planned.forward())
    assert planned.outcome().offloaded == 1
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


# What is left behind


def _alive():
    kinds = (records.Record, records.State, records.Token, records.Kept, records.Fetch)
    return sum(type(o) in kinds for o in gc.get_objects())


def test_nothing_is_left_after_a_step_or_without_backward(x, store_all, tmp_path):
    model = Stack()
    planned = store_all(model, lambda: model(x))
    once(model, lambda: model(x), planned.forward())
    gc.collect()
    gc.disable()
    try:
        before = _alive()
        with planned.forward():
            loss = model(x)
        assert _alive() > before
        loss.backward()
        del loss
        assert _alive() == before
        with planned.forward():
            loss = model(x)
        del loss  # no backward at all
        assert _alive() == before
    finally:
        gc.enable()
    assert list(tmp_path.iterdir()) == []


def test_an_exception_in_forward_leaves_nothing_on_its_way(x, store_all, tmp_path):
    model = Stack()
    planned = store_all(model, lambda: model(x), 10**6)
    sources = []

    def fail(_module, args):
        sources.append(weakref.ref(args[0].untyped_storage()))
        raise KeyboardInterrupt

    handle = model.blocks[2].up.register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt), planned.forward():
        model(x)
    handle.remove()
    gc.collect()
    assert sources[0]() is None
    compare(model, lambda: model(x), planned)
    assert list(tmp_path.iterdir()) == []


def test_two_at_a_time_do_not_disturb_each_other(x, tmp_path):
    models = [Stack(), Stack()]
    planned = []
    for model in models:
        ops = record(model, lambda model=model: model(x), backward=True)
        tier = DiskTier(1000, tmp_path, allow_memory=True)
        planned.append(Rematerialiser(model, None, ops.offload(window_bytes=1000), tier))
    expected = [once(model, lambda m=model: m(x), contextlib.nullcontext()) for model in models]
    losses = []
    for model, plan in zip(models, planned, strict=True):
        model.zero_grad()
        torch.manual_seed(3)
        with plan.forward():
            losses.append(model(x))
    for loss in losses:
        loss.backward()
    for model, wanted in zip(models, expected, strict=True):
        got = [p.grad for p in model.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(wanted[1:-1], got, strict=True))


# Failures


class Refuses(DiskTier):
    """A disk that fails, or is interrupted, with the `n`-th allocation."""

    def __init__(self, folder, fails, at=4, error=OffloadError):
        super().__init__(1 << 20, folder, allow_memory=True)
        self.left = at
        self.fails = fails
        self.error = error

    def send(self, source):
        parcel = super().send(source)
        self.left -= 1
        if self.left != 0:
            return parcel

        def fail(*_args):
            message = f"no space ({self.fails})"
            raise self.error(message)

        class Broken:
            settle = staticmethod(fail if self.fails == "settle" else parcel.settle)
            fetch = staticmethod(fail if self.fails == "fetch" else parcel.fetch)
            prefetch = staticmethod(parcel.prefetch)
            wait = staticmethod(fail if self.fails == "wait" else parcel.wait)

        return Broken()


@pytest.mark.parametrize(
    ("fails", "window_bytes"), [("settle", 0), ("settle", 10**6), ("fetch", 0), ("wait", 10**6)]
)
def test_a_transfer_that_fails_is_an_error_before_any_gradient_is_wrong(
    x, tmp_path, fails, window_bytes, monkeypatch
):
    torch.manual_seed(0)
    model = Stack()
    ops = record(model, lambda: model(x), backward=True)
    plan = ops.offload(window_bytes=window_bytes)
    load = Workload(model, x, lambda m, b: m(b), lambda p: torch.optim.SGD(p, lr=0.1))
    monkeypatch.setattr(executor, "open_tier", lambda *_: Refuses(tmp_path, fails))
    fitted = Fitted(load, {"actions": [{"kind": "offload", "offload": plan}]})
    planned = fitted._running.remat
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(OffloadError, match="no space"):
        fitted.step()
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    compare(model, lambda: model(x), planned)  # the disk works again


def test_damage_on_the_disk_is_an_error(x, tier):
    model = Stack()
    ops = record(model, lambda: model(x), backward=True)
    planned = Rematerialiser(model, None, ops.offload(), tier)
    with planned.forward():
        loss = model(x)
    _overwrite_stored_files()
    with pytest.raises(OffloadError, match="came back changed"):
        loss.backward()


def _overwrite_stored_files():
    """Damage every file of this process that has no name any more."""
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(descriptor.readlink()).endswith("(deleted)") and descriptor.stat().st_size:
                with descriptor.open("r+b") as file:
                    file.write(b"\xaa" * descriptor.stat().st_size)


@pytest.mark.parametrize(
    ("fails", "window_bytes"), [("settle", 0), ("settle", 10**6), ("fetch", 0), ("wait", 10**6)]
)
def test_ctrl_c_while_a_transfer_is_waited_for_leaves_a_model_that_goes_on(
    tmp_path, fails, window_bytes
):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.Sigmoid()) for _ in range(6)])
    x = torch.randn(512, 256)
    ops = record(model, lambda: model(x).sum(), backward=True)
    expected = once(model, lambda: model(x).sum(), contextlib.nullcontext())
    tier = Refuses(tmp_path, fails, error=KeyboardInterrupt)
    planned = Rematerialiser(model, None, ops.offload(window_bytes=window_bytes), tier)
    with pytest.raises(KeyboardInterrupt):
        once(model, lambda: model(x).sum(), planned.forward())
    assert torch._C._len_torch_dispatch_stack() == 0
    got = once(model, lambda: model(x).sum(), planned.forward())
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert list(tmp_path.iterdir()) == []


# Plans


def _plan(offload, **more):
    action = {"kind": "offload", "promise": "exact", "count": 1, "bytes": 0}
    return {"actions": [{**action, "offload": {**offload, **more}}]}


def test_a_fitted_workload_reports_what_went_and_came(x, tmp_path):
    model = Stack()
    ops = record(model, lambda: model(x), backward=True)
    offload = ops.offload(window_bytes=500)
    load = Workload(model, x, lambda m, b: m(b), lambda p: torch.optim.SGD(p, lr=0.1))
    gc.collect()
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    with Fitted(load, _plan(offload), offload_dir=tmp_path) as fitted:
        fitted.step()
        fitted.step()
        report = fitted.report()
        stored = sum(entry["bytes"] for entry in offload["stores"])
        assert report.offloaded_tensors == len(offload["stores"])
        assert report.offloaded_bytes_written == 2 * stored
        assert report.offloaded_bytes_read == 2 * stored
        assert report.offload_seconds_waited > 0
        assert not report.diverged
    assert list(tmp_path.iterdir()) == []
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


def test_folders_that_cannot_be_used_are_refused_when_the_plan_is_applied(x, tmp_path):
    model = Stack()
    ops = record(model, lambda: model(x), backward=True)
    load = Workload(model, x, lambda m, b: m(b))
    missing = tmp_path / "missing"
    with pytest.raises(OffloadError, match="missing` to write offloaded tensors"):
        Fitted(load, _plan(ops.offload()), offload_dir=missing)
    with pytest.raises(OffloadError, match="missing` to write offloaded tensors"):
        Fitted(load, _plan(ops.offload(), folder=str(missing)))
    Fitted(load, _plan(ops.offload(), folder=str(missing)), offload_dir=tmp_path).step()


def test_plans_that_make_no_sense_are_refused(x, tier):
    model = Stack()
    ops = record(model, lambda: model(x), backward=True)
    offload = ops.offload()
    with pytest.raises(UsageError, match="output 0 of op 0 twice"):
        Rematerialiser(model, ops.remat(), offload, tier)
    with pytest.raises(UsageError, match="different forwards"):
        Rematerialiser(model, ops.remat(lambda _: False, regions=[("blocks.0", 0)]), offload, tier)
    with pytest.raises(UsageError, match="malformed"):
        Rematerialiser(model, None, {**offload, "order": [len(offload["stores"])]}, tier)
    with pytest.raises(UsageError, match="malformed"):
        Rematerialiser(model, None, {"stores": []}, tier)
    load = Workload(model, x, lambda m, b: m(b))
    with pytest.raises(UsageError, match="offloads to `tape`"):
        Fitted(load, _plan(offload, tier="tape"))


def test_what_is_on_the_cpu_does_not_go_to_the_hosts_memory(x):
    model = Stack()
    ops = record(model, lambda: model(x), backward=True)
    load = Workload(model, x, lambda m, b: m(b))
    fitted = Fitted(load, _plan(ops.offload(), tier="host"))
    fitted.step()
    report = fitted.report()
    assert report.offloaded_tensors == 0
    assert "only what is on a GPU" in report.kept_drops[0]
