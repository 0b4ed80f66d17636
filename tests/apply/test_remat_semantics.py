"""What user code may do inside a planned forward: results stay right, nothing is left behind."""

from __future__ import annotations

import contextlib
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from dropout_blocks import Block, Stack, compare
from handmade import record
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from memfit.apply.offload.tiers import DiskTier
from memfit.apply.remat.remat import Rematerialiser
from memfit.errors import DivergenceWarning, UsageError


@pytest.fixture
def x():
    torch.manual_seed(1)
    return torch.randn(5, 8)


def test_a_module_called_twice(x):
    model = Stack()
    assert compare(model, lambda: model(x)).observations.dropped_saves > 10


def test_one_call_of_a_module_called_twice(x):
    model = Stack()
    ops = record(model, lambda: model(x))
    remat = Rematerialiser(model, ops.remat(regions=[("blocks.1", 1)]))
    outcome = compare(model, lambda: model(x), remat)
    assert 0 < outcome.observations.dropped_saves < 10
    assert outcome.observations.divergence == ""


@pytest.mark.parametrize("is_stored", [False, True])
def test_modules_that_run_in_another_order_than_planned(x, is_stored, tmp_path):
    """Ops run again in the order in which they ran: what an op reads is there by then."""
    model = nn.Sequential(*(Block() for _ in range(3)))
    turned = nn.Sequential(*reversed(model))
    ops = record(model, lambda: model(x).mean(), backward=True)
    regions = {"regions": [(str(index), 0) for index in range(3)]}
    tier = DiskTier(1 << 20, tmp_path, allow_memory=True) if is_stored else None
    adds = [made for made in ops.made if made.name == "aten.add.Tensor"]
    store = ops.offload(lambda m: m in adds, **regions) if is_stored else None
    planned = Rematerialiser(
        model, ops.remat(lambda m: not store or m not in adds, **regions), store, tier
    )
    seen = compare(model, lambda: turned(x).mean(), planned).observations
    assert seen.dropped_saves > 10


def test_shared_parameters(x):
    model = Stack()
    model.blocks[2].up.weight = model.blocks[0].up.weight
    compare(model, lambda: model(x))


def test_retain_graph_and_a_second_backward(x):
    model = Stack()

    def twice(loss):
        loss.backward(retain_graph=True)
        loss.backward()

    outcome = compare(model, lambda: model(x), backward=twice)
    assert outcome.replayed_ops == outcome.observations.recorded_ops or outcome.replayed_ops > 0


def test_backward_of_two_losses_that_share_a_graph(x):
    model = nn.Linear(8, 8)

    def forward():
        h = model(x).sin()
        forward.second = h.tanh().sum()
        return h.exp().sum()

    def both(loss):
        loss.backward(retain_graph=True)
        forward.second.backward()

    compare(model, forward, backward=both)


def test_gradients_of_gradients(x):
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def twice(loss):
        first = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        sum(g.pow(2).sum() for g in first).backward()

    compare(model, lambda: model(x).pow(2).mean(), backward=twice)


def test_a_gradient_taken_inside_forward(x):
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward():
        inputs = x.clone().requires_grad_()
        energy = model(inputs).sum()
        (force,) = torch.autograd.grad(energy, inputs, create_graph=True)
        return force.pow(2).sum() + energy

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DivergenceWarning)
        compare(model, forward)


@pytest.mark.parametrize("reentrant", [False, True])
def test_user_checkpointing_inside(x, reentrant):
    model = Stack(lambda block, x: checkpoint(block, x, use_reentrant=reentrant))
    x.requires_grad_()
    outcome = compare(model, lambda: model(x))
    assert outcome.observations.divergence == ""


@pytest.mark.parametrize("reentrant", [False, True])
def test_user_checkpointing_inside_watched_modules(x, reentrant):
    model = Stack(lambda block, x: checkpoint(block, x, use_reentrant=reentrant))
    x.requires_grad_()
    ops = record(model, lambda: model(x))
    regions = [("blocks.0", 0), ("blocks.1", 0), ("blocks.1", 1)]
    remat = Rematerialiser(model, ops.remat(regions=regions), warn=False)
    divergence = compare(model, lambda: model(x), remat).observations.divergence
    # A checkpoint that is not reentrant has hooks of its own, which a reentrant one has not.
    assert divergence.startswith("" if reentrant else "it runs under other hooks")
    assert bool(divergence) != reentrant


def test_checkpointing_beside_dropped_values(x):
    model = Stack()
    model.wrap = lambda block, x: (
        checkpoint(block, x, use_reentrant=False) if block is model.blocks[1] else block(x)
    )
    outcome = compare(model, lambda: model(x))
    assert outcome.observations.dropped_saves > 5


def test_custom_autograd_functions(x):
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t):
            y = t * t
            ctx.save_for_backward(t, y)
            return y * t

        @staticmethod
        def backward(ctx, gradient):
            t, y = ctx.saved_tensors
            assert torch.equal(t * t, y)
            return gradient * 3 * y

    model = nn.Linear(8, 8)
    outcome = compare(model, lambda: Cube.apply(model(x).sin()).sum())
    assert outcome.observations.dropped_saves >= 2


def test_the_users_own_saved_tensor_hooks_win(x):
    model = Stack()
    seen = []

    def pack(t):
        seen.append(t)
        return t.clone()

    def wrap(block, x):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            return block(x)

    model.wrap = wrap
    compare(model, lambda: model(x))
    assert seen


def test_the_users_own_dispatch_mode_around_backward(x):
    class Counts(TorchDispatchMode):
        ops = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Counts.ops += 1
            return func(*args, **(kwargs or {}))

    def counted(loss):
        with Counts():
            loss.backward()

    model = Stack()
    compare(model, lambda: model(x), backward=counted)
    planned = Counts.ops
    assert planned > 0


def test_hooks_on_modules_stay_in_order(x):
    model = Stack()
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _m, args: (args[0] * 1.01,))
        block.register_forward_hook(lambda _m, _a, out: out.tanh())
    ops = record(model, lambda: model(x))
    remat = Rematerialiser(model, ops.remat(regions=[("blocks.0", 0), ("blocks.2", 0)]))
    assert compare(model, lambda: model(x), remat).observations.divergence == ""


def test_autocast_around_backward_does_not_touch_replays(x):
    model = Stack()

    def forward():
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    def under_autocast(loss):
        with torch.autocast("cpu", torch.bfloat16):
            loss.backward()

    compare(model, forward, backward=under_autocast)


def test_an_exception_in_forward_leaves_nothing_installed(x):
    model = Stack()
    ops = record(model, lambda: model(x))
    regions = [("blocks.0", 0), ("blocks.1", 1)]
    for plan in (ops.remat(), ops.remat(regions=regions)):
        for error in (ValueError("mine"), KeyboardInterrupt()):
            remat = Rematerialiser(model, plan)

            def fail(_module, _args, error=error):
                raise error

            handle = model.blocks[1].up.register_forward_pre_hook(fail)
            with pytest.raises(type(error)), remat.forward():
                model(x)
            handle.remove()
            assert torch._C._len_torch_dispatch_stack() == 0
            assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
            assert not torch._C._autograd._top_saved_tensors_default_hooks(False)  # noqa: FBT003
            compare(model, lambda: model(x), remat)


class Shows(nn.Module):
    """Lets everybody hold what its layers return."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.shown: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.shown.clear()
        for layer in self.layers:
            x = torch.tanh(layer(x))
            self.shown.append(x)
        return x.square().sum()


def written(shown: Tensor, how: str) -> None:
    """Write to a tensor that autograd saved, by itself or through a view of it."""
    with torch.no_grad():
        if how == "view":
            shown[0].add_(1.0)
        elif how == "alias":
            shown.detach().mul_(2.0)
        else:
            shown.mul_(2.0)


@pytest.mark.parametrize("how", ["itself", "view", "alias"])
@pytest.mark.parametrize("offloads", [False, True])
def test_a_saved_tensor_that_is_written_to_after_forward_is_refused_as_without_a_plan(
    x, how, offloads, tmp_path
):
    model = Shows()
    loss = model(x)
    written(model.shown[1], how)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    ops = record(model, lambda: model(x), backward=True)
    if offloads:
        remat = Rematerialiser(model, None, ops.offload(window_bytes=0), DiskTier(0, tmp_path))
    else:
        remat = Rematerialiser(model, ops.remat())
    with remat.forward():
        loss = model(x)
    assert remat.outcome().observations.dropped_saves + remat.outcome().offloaded > 0
    written(model.shown[1], how)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_forward_mode_is_left_alone_and_bitwise(x):
    model = nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(8, 8), nn.LayerNorm(8))))
    remat = Rematerialiser(model, record(model, lambda: model(x)).remat())

    def gradients(context):
        model.zero_grad()
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x.detach(), torch.ones_like(x))
            with context:
                out = model(dual)
            tangent = forward_ad.unpack_dual(out).tangent
            (out.square().sum() + tangent.square().sum()).backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = gradients(contextlib.nullcontext())
    with pytest.warns(DivergenceWarning, match="it runs under forward-mode automatic"):
        got = gradients(remat.forward())
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_a_transform_of_torch_func_is_left_alone(x):
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    remat = Rematerialiser(model, record(model, lambda: model(x)).remat(regions=[("0", 0)]))
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(values):
        return torch.func.functional_call(model, values, (x,)).square().sum()

    expected = torch.func.grad(loss)(parameters)
    with (
        pytest.warns(DivergenceWarning, match=r"it runs under a transform of `torch\.func`"),
        remat.forward(),
    ):
        got = torch.func.grad(loss)(parameters)
    assert all(torch.equal(expected[name], got[name]) for name in expected)


def test_modules_inside_a_checkpoint_of_the_loop_are_left_to_it(x):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    regions = [(str(index), 0) for index in range(3)]
    remat = Rematerialiser(model, record(model, lambda: model(x)).remat(regions=regions))

    def checkpointed():
        h = x
        for block in model:
            h = checkpoint(block, h, use_reentrant=False)
        return h

    def gradients(context):
        model.zero_grad()
        with context:
            loss = checkpointed().square().sum()
        loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = gradients(contextlib.nullcontext())
    with pytest.warns(DivergenceWarning, match="it runs under other hooks on saved tensors"):
        got = gradients(remat.forward())
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_hooks_that_are_there_already_are_asked(x):
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    remat = Rematerialiser(model, record(model, lambda: model(x)).remat())
    asked = []

    def pack(tensor):
        asked.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x).sum().backward()
        expected, asked = len(asked), []
        with pytest.warns(DivergenceWarning, match="other hooks"), remat.forward():
            loss = model(x).sum()
    loss.backward()
    assert len(asked) == expected > 0


def test_what_nobody_writes_to_goes_through(x):
    model = Shows()
    remat = Rematerialiser(model, record(model, lambda: model(x)).remat())
    compare(model, lambda: model(x), remat)


def test_an_illegal_in_place_change_is_refused_as_without_a_plan(x):
    model = nn.Linear(8, 8)

    def forward():
        h = model(x).exp()
        y = h * 2.0
        h.add_(1.0)
        return y.sum() + h.sum()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        forward().backward()
    ops = record(model, forward)
    remat = Rematerialiser(model, ops.remat(lambda m: "mul" in m.name))
    with remat.forward():
        loss = forward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_forwards_do_not_nest(x):
    model = Stack()
    remat = Rematerialiser(model, record(model, lambda: model(x)).remat())
    with remat.forward():
        with pytest.raises(UsageError, match="nest"), remat.forward():
            pass
        model(x)


def test_a_recurrent_layer_is_computed_again():
    """Its kernel leaves a workspace for backward only while gradients are on."""

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.LSTM(8, 8, 2, dropout=0.25)

        def forward(self, x):
            return self.layer(x.tanh())[0].pow(2).mean()

    model = Recurrent()
    x = torch.randn(5, 3, 8)
    outcome = compare(model, lambda: model(x))
    assert outcome.replayed_ops > 0
    assert not outcome.observations.kept_drops


def test_a_plan_for_another_model_is_refused():
    remat = {
        "drops": [],
        "names": ["aten.add.Tensor"],
        "forward": [0],
        "active": [{"module": "encoder.0", "call": 0, "start": 0, "end": 1}],
    }
    with pytest.raises(UsageError, match=r"encoder\.0"):
        Rematerialiser(nn.Linear(2, 2), remat)
    with pytest.raises(UsageError, match="malformed"):
        Rematerialiser(nn.Linear(2, 2), {"drops": []})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda(x):
    model = Stack().cuda()
    inputs = x.cuda()
    state = torch.cuda.get_rng_state()

    def forward():
        torch.cuda.set_rng_state(state)
        return model(inputs)

    compare(model, forward)


class Normalised(nn.Module):
    """A region that ends with an op which saves its own results, and may go on after it."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Linear(4, 4)
        self.region = Region()

    def forward(self, x):
        return self.region(self.scale(x)).square().sum()


class Region(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(2, 8)
        self.further = False

    def forward(self, x):
        x = self.norm(x.tanh())
        return x.sin().cos() if self.further else x


def test_results_that_the_last_op_of_a_region_saves_belong_to_it():
    model, x = Normalised(), torch.randn(3, 8, 4)
    ops = record(model, lambda: model(x))
    remat = Rematerialiser(model, ops.remat(regions=[("region", 0)]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compare(model, lambda: model(x), remat)
    assert not remat.diverged
    model.region.further = True
    with pytest.warns(DivergenceWarning, match="went on after"):
        compare(model, lambda: model(x), remat)


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell])
@pytest.mark.parametrize("stored", [False, True])
def test_cells_write_to_parts_that_count_their_own_versions(cell, stored, tmp_path):
    class Steps(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = cell(8, 8)

        def forward(self, x):
            h, state = torch.zeros(5, 8), torch.zeros(5, 8)
            for _ in range(4):
                if cell is nn.LSTMCell:
                    h, state = self.cell(x, (h, state))
                else:
                    h = self.cell(x, h)
            return (h * state.cos()).sum()

    model, x = Steps(), torch.randn(5, 8)
    ops = record(model, lambda: model(x), backward=stored)
    if stored:
        remat = Rematerialiser(model, None, ops.offload(window_bytes=0), DiskTier(0, tmp_path))
    else:
        remat = Rematerialiser(model, ops.remat())
    outcome = compare(model, lambda: model(x), remat)
    assert outcome.observations.divergence == ""
    assert outcome.observations.dropped_saves + outcome.observations.offloaded_saves > 0


# Threads


class Parts(nn.Module):
    """One part in the thread that calls, and after it two in threads of their own."""

    def __init__(self):
        super().__init__()
        self.before = Block()
        self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.in_threads = True

    def forward(self, x):
        h = self.before(x)
        with ThreadPoolExecutor() as pool:
            each = pool.map if self.in_threads else map
            return sum(each(lambda part: part(h).tanh(), self.parts)).square().mean()


@pytest.mark.parametrize("is_stored", [False, True])
def test_parts_that_run_in_threads_run_as_they_are(x, is_stored, tmp_path):
    model = Parts()
    model.in_threads = False
    ops = record(model, lambda: model(x), backward=True)
    model.in_threads = True
    regions = [("before", 0), ("parts.0", 0), ("parts.1", 0)]
    tier = DiskTier(1 << 20, tmp_path, allow_memory=True)
    if is_stored:
        planned = Rematerialiser(model, None, ops.offload(regions=regions), tier)
    else:
        planned = Rematerialiser(model, ops.remat(regions=regions))
    with pytest.warns(DivergenceWarning, match="it calls modules in other threads"):
        seen = compare(model, lambda: model(x), planned).observations
    assert seen.offloaded_saves + seen.dropped_saves > 3, "of the part before"
