"""Warnings about loops that keep more and more."""

from __future__ import annotations

import gc
import warnings
from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import memfit
from memfit import _native
from memfit.apply.offload.mapped import to_file, to_memory
from memfit.track import cpu, growth
from memfit.track.growth import GrowthWatch
from memfit.track.retained import Growth

MODEL = nn.Linear(64, 64)


def loss() -> torch.Tensor:
    return MODEL(torch.randn(32, 64)).square().mean()


def caught(loop) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        loop()
    return [w for w in found if w.category is memfit.MemoryGrowthWarning]


def test_a_summed_validation_loss_is_named():
    def loop() -> None:
        total_loss = 0
        for _ in range(20):
            with memfit.track("summed loss"):
                total_loss = total_loss + loss()

    found = caught(loop)
    assert len(found) == 1, "once"
    text = str(found[0].message)
    assert "`summed loss` keeps" in text
    assert "more after every iteration, on average of 4 iterations" in text
    assert "`total_loss` (test_growth.py:" in text
    assert "loss.item()" in text
    assert found[0].filename == __file__


@pytest.fixture
def eager_looks(monkeypatch):
    """A loop is looked at however short it is."""
    monkeypatch.setattr(growth, "LOOK_SHARE", 0)


def test_a_summed_training_loss_is_found_though_backward_frees_its_activations(eager_looks):
    def loop() -> None:
        total = 0
        for _ in range(20):
            with memfit.track("summed training loss"):
                found = loss()
                found.backward()
                MODEL.zero_grad()
                total += found

    found = caught(loop)
    assert len(found) == 1
    assert "keeps a longer autograd graph after every iteration: `total`" in str(found[0].message)


def test_a_running_average_of_weights_is_found_though_its_graph_has_no_bytes(eager_looks):
    average = [parameter.clone() for parameter in MODEL.parameters()]

    def loop() -> None:
        for _ in range(20):
            with memfit.track("averaged weights"):
                for place, parameter in enumerate(MODEL.parameters()):
                    average[place] = 0.9 * average[place] + 0.1 * parameter

    found = caught(loop)
    assert len(found) == 1
    text = str(found[0].message)
    assert "keeps a longer autograd graph after every iteration: `average` (test_growth.py:" in text


def test_what_is_joined_is_not_said_to_be_summed():
    queue = torch.zeros(0)

    def loop(_: int) -> None:
        nonlocal queue
        queue = torch.cat([queue, loss()[None]])

    found = cause(loop)
    assert found.message.startswith("`queue` (test_growth.py:")
    assert " joins " in found.message
    assert found.advice == "join `tensor.detach()` there instead"


def test_collected_losses_are_named():
    class Trainer:
        def __init__(self) -> None:
            self.losses: list[torch.Tensor] = []

        def loop(self) -> None:
            for _ in range(20):
                with memfit.track("collected losses"):
                    self.losses.append(loss())

    trainer = Trainer()
    found = caught(trainer.loop)
    assert len(found) == 1
    text = str(found[0].message)
    assert "`Trainer.losses` (test_growth.py:" in text or "`trainer.losses`" in text
    assert "keeps the autograd graphs of earlier iterations alive" in text
    assert "tensor.detach()" in text


def test_kept_tensors_are_named():
    kept = []
    # Neither this loop's doing nor growing.
    constant = loss() + loss() + loss() + loss() + loss() + loss()

    def loop() -> None:
        for _ in range(8):
            with memfit.track("kept batches"):
                kept.append(torch.randn(100))

    found = caught(loop)
    assert len(found) == 1
    assert "`kept` (test_growth.py:" in str(found[0].message)
    assert constant.grad_fn is not None


def test_steady_loops_and_deep_but_constant_sums_are_quiet(eager_looks):
    def loop() -> None:
        for _ in range(17):
            with memfit.track("steady"):
                # Kept past the end of the span, as long in each iteration as in the one before.
                total = loss() + loss() + loss() + loss() + loss() + loss()
            del total
        for i in range(17):
            with memfit.track("up and down"):
                held = [loss() for _ in range(i % 4)]
            assert len(held) == i % 4
        running = 0.0
        for _ in range(20):
            with memfit.track("detached"):
                running += loss().item()

    assert caught(loop) == []


def test_sums_of_several_lengths_in_each_iteration_are_quiet(eager_looks):
    """As the returns of an imagined future: each is as long as the ones of the iteration before."""

    def loop() -> None:
        for _ in range(17):
            with memfit.track("returns"):
                back, sums = loss(), []
                for _ in range(12):
                    back = loss() + 0.9 * back
                    sums.append(back)
                returns = torch.stack(sums[::-1])
        assert returns.numel() == 12

    assert caught(loop) == []


@pytest.mark.parametrize(
    "made",
    [
        lambda: loss() + loss() + loss() + loss() + loss(),
        lambda: torch.stack([loss() + loss() + loss() + loss(), loss()]),
    ],
)
def test_collected_sums_are_no_sum_of_all_iterations(made: Callable[[], torch.Tensor]):
    kept: list[torch.Tensor] = []
    found = cause(lambda _: kept.append(made()))
    assert found.message.startswith("`kept` (test_growth.py:")
    assert found.message.endswith("keeps the autograd graphs of earlier iterations alive")


def test_looking_for_the_cause_keeps_nothing_alive():
    """The search passes by every local variable; none may live longer for it."""
    import gc
    import weakref

    class Big:
        pass

    gone: list[weakref.ref[Big]] = []

    def loop() -> None:
        total, big = 0, Big()
        gone.append(weakref.ref(big))
        for _ in range(9):
            with memfit.track("looking"):
                total = total + loss()
        del big
        assert gone[0]() is None

    gc.disable()
    try:
        assert len(caught(loop)) == 1
    finally:
        gc.enable()


def test_the_programs_own_copy_of_its_locals_stays():
    def loop() -> None:
        width = 3
        settings = locals()
        total = 0
        for _ in range(9):
            with memfit.track("locals"):
                total = total + loss()
        assert settings["width"] == width

    assert len(caught(loop)) == 1


def run(loop: Callable[[int], object], iterations: int = 24) -> GrowthWatch:
    """A watch that has seen a loop."""
    assert cpu.start() is None
    watch = GrowthWatch()
    for step in range(iterations):
        loop(step)
        watch.observe()
    return watch


@pytest.mark.parametrize("every", [1, 2, 3, 5])
def test_what_is_kept_every_few_iterations_is_growth(every: int):
    kept = []

    def loop(step: int) -> None:
        if step % every == 0:
            kept.append(torch.ones(256))

    growth = run(loop, 12 * every).growth
    assert growth is not None
    assert growth.bytes == 1024 * sum(step % every == 0 for step in range(1, growth.iterations + 1))


def test_larger_batches_a_full_queue_and_a_cache_are_no_growth():
    latest: list[torch.Tensor] = []
    queue: deque[torch.Tensor] = deque(maxlen=3)
    cache: dict[int, torch.Tensor] = {}

    def loop(step: int) -> None:
        latest[:] = [torch.ones(256 * step + 1)]
        queue.append(torch.ones(256))
        cache.setdefault(step % 4, torch.ones(256))

    assert run(loop).growth is None


@pytest.mark.parametrize("every", [1, 3])
def test_a_tensor_that_is_made_anew_and_longer_is_growth(every: int):
    assert cpu.start() is None
    bank, watch, causes = torch.randn(64, 512), GrowthWatch(), []
    for step in range(12 * every):
        if step % every == 0:
            bank = torch.cat((bank, torch.randn(16, 512)))
        causes.append(watch.observe())
    found = watch.growth
    assert found is not None
    assert found.is_longer
    assert found.bytes % (16 * 512 * 4) == 0
    assert 6 * every <= found.iterations < 12 * every
    (why,) = [it for it in causes if it is not None]
    assert why.kind == "longer_tensor"
    assert why.message.startswith("`bank` (test_growth.py:")


def test_what_gets_longer_and_begins_anew_is_no_growth():
    batch, zeros, bank = torch.randn(1), torch.zeros(1), torch.zeros(0)

    def loop(step: int) -> None:
        nonlocal batch, zeros, bank
        batch, zeros = torch.randn(64 + step, 512), torch.zeros(64 + step, 512)
        bank = torch.cat((bank, torch.randn(1 << 15))) if step % 4 else torch.randn(1 << 15)

    assert run(loop).growth is None
    assert batch.shape == zeros.shape


def test_the_cause_is_what_grows_on_after_something_else_has_stopped():
    assert cpu.start() is None
    watch, causes = GrowthWatch(asks_again=True), []
    cache, history = {}, []
    for step in range(40):
        if step < 8:
            cache[step] = torch.ones(1024)
        else:
            history.append(torch.ones(1024))
        causes.append(watch.observe())
    found = [it.message for it in causes if it is not None]
    assert found[0].startswith("`cache`")
    assert found[-1].startswith("`history`")
    assert len(found) <= 4, "once each time that twice as much is kept"


def test_state_that_an_optimizer_makes_is_not_to_be_made_numbers():
    assert cpu.start() is None
    watch, causes = GrowthWatch(), []
    model = nn.Linear(64, 64)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2, history_size=100)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        result = model(torch.ones(4, 64)).cos().square().sum()
        result.backward()
        return result

    for _ in range(12):
        optimizer.step(closure)
        causes.append(watch.observe())
    (found,) = [it for it in causes if it is not None]
    assert found.kind == "optimizer_state"
    assert found.message.startswith("`optimizer`")
    assert "history_size" in found.advice


@pytest.mark.parametrize("again", [False, True])
def test_what_comes_back_from_files_one_by_one_is_no_growth(tmp_path: Path, again: bool):  # noqa: FBT001
    """A memory bank that was there before, of which each iteration fills a part."""
    assert cpu.start() is None
    bank = [torch.zeros(1 << 14) for _ in range(24)]
    for part in bank:
        to_file(part, str(tmp_path))

    def loop(step: int) -> None:
        to_memory(bank[step])
        bank[step].fill_(step)
        if again:
            to_file(bank[step], str(tmp_path))

    assert run(loop).growth is None


def test_what_is_kept_in_files_is_growth(tmp_path: Path):
    assert cpu.start() is None
    kept = []

    def loop(_: int) -> None:
        kept.append(torch.zeros(1 << 14))
        to_file(kept[-1], str(tmp_path))

    growth = run(loop).growth
    assert growth is not None
    assert growth.bytes_per_iteration == kept[0].nbytes


class Keeper(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.result = x.exp()
        return ctx.result

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.result


class Filer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.kept = {"input": x, "made": [x.exp()]}
        return ctx.kept["made"][0]

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.kept["made"][0]


class Closer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.derive = lambda gradient: gradient * y
        return y

    @staticmethod
    def backward(ctx, gradient):
        return ctx.derive(gradient)


class Slots:
    __slots__ = ("y",)

    def __init__(self, y: torch.Tensor) -> None:
        self.y = y


class Slotter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.saved = Slots(x.exp())
        return ctx.saved.y

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved.y


CTX = [
    (Keeper, "result"),
    (Filer, "kept['made'][0]"),
    (Closer, "derive.y"),
    (Slotter, "saved.y"),
]


def cause(loop: Callable[[int], object]) -> growth.Cause:
    """Why a loop grows."""
    found = run(loop).growth
    assert found is not None
    return growth.cause_of(found)


@pytest.fixture
def no_collection():
    """The collector frees cycles, and when it runs depends on how many objects there are."""
    gc.disable()
    yield
    gc.enable()
    gc.collect()


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize(("kind", "place"), CTX)
def test_an_output_kept_on_ctx_is_a_cycle(kind: type[torch.autograd.Function], place: str):
    def loop(_: int) -> None:
        kind.apply(MODEL(torch.randn(32, 64))).sum().backward()
        MODEL.zero_grad()

    found = cause(loop)
    assert found.kind == "ctx_cycle"
    assert f"`{kind.__name__}` keeps its own output as `ctx.{place}`" in found.message


@pytest.mark.usefixtures("no_collection")
def test_gradients_with_graphs_are_a_cycle():
    def loop(_: int) -> None:
        model = nn.Linear(64, 64)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model(torch.randn(32, 64)).square().mean().backward(create_graph=True)

    assert cause(loop).kind == "gradient_cycle"


@pytest.mark.usefixtures("no_collection")
def test_a_hook_that_holds_its_tensor_is_a_cycle_which_detaching_breaks():
    def loop(_: int, *, detached: bool = False) -> None:
        hidden = MODEL(torch.randn(32, 64))
        mask = hidden.detach() if detached else hidden
        hidden.register_hook(lambda gradient: gradient * (mask > 0))
        hidden.sum().backward()
        MODEL.zero_grad()

    found = cause(loop)
    assert found.kind == "hook_cycle"
    assert "loop.<locals>.<lambda>` holds the tensor that it is registered on" in found.message
    before = _native.counted_bytes()
    gc.collect()
    assert _native.counted_bytes() == before, "nothing frees them"
    assert run(lambda step: loop(step, detached=True)).growth is None


def test_exceptions_hold_what_their_functions_had_and_the_advice_frees_it():
    errors: list[Exception] = []

    def fail() -> None:
        hidden = MODEL(torch.randn(32, 64))
        raise ValueError(hidden.shape)

    def loop(_: int) -> None:
        try:
            fail()
        except ValueError as error:
            errors.append(error)

    found = cause(loop)
    assert found.kind == "exceptions"
    assert found.message.startswith("`errors` (test_growth.py:")
    before = _native.counted_bytes()
    errors[:] = [error.with_traceback(None) for error in errors]
    assert _native.counted_bytes() < before - 24 * 32 * 64 * 4


def test_parameters_that_a_loop_makes_are_no_state_that_ends():
    layers = nn.ModuleList()
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(1))])

    def loop(_: int) -> None:
        layers.append(nn.Linear(64, 64))
        optimizer.add_param_group({"params": layers[-1].parameters()})
        layers[-1](torch.randn(4, 64)).sum().backward()
        optimizer.step()

    found = cause(loop)
    assert found.kind == "new_parameters"
    assert "no more" not in found.advice


def test_what_was_not_found_is_in_no_graph():
    assert cpu.start() is None
    kept, hidden, first = [], np.empty(24, dtype=object), _native.last_event() + 1
    for step in range(24):
        kept.append(torch.ones(100))
        hidden[step] = torch.ones(400)
    blocks = _native.survivors(first, _native.last_event() + 1, with_models=False)
    sizes = tuple((address, size) for address, size, _ in blocks)
    found = growth.collection_of(Growth(sum(size for _, size in sizes), 24, sizes))
    assert found is not None
    assert (found.kind, found.message[:6]) == ("kept_tensors", "`kept`")


def test_the_advice_frees_what_it_says():
    average = torch.zeros(())

    def loop(_: int) -> None:
        nonlocal average
        average = 0.9 * average + 0.1 * loss()

    found = cause(loop)
    assert found.kind == "kept_graphs"
    assert found.message.startswith("`average` (test_growth.py:")
    before = _native.counted_bytes()
    average = average.detach()
    assert _native.counted_bytes() < before - 24 * 32 * 64 * 4


def test_a_sum_that_is_collected_has_its_tensors_kept():
    kept = []
    found = cause(lambda _: kept.append(torch.ones(100)))
    assert (found.kind, found.message[:6]) == ("kept_tensors", "`kept`")
