"""Gradients of a recorded step are elsewhere until backward is over, and nobody can tell."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from ran import inline
from torch import nn

from memfit import _native
from memfit.run.script.spill import SpillFile
from memfit.run.script.stash import GradientStash
from memfit.tensors.storage import gradient_of
from memfit.track import cpu

SIZE = 1 << 16


def run(parameters, compute):
    """Differentiate with a stash; how many were away when backward was over, and the gradients."""
    spill = SpillFile()
    stash = GradientStash(spill)
    stash.watch(parameters)
    stash.begin()
    handles = [p.register_post_accumulate_grad_hook(stash.complete) for p in parameters]
    compute().backward()
    away = len(stash._away)
    stash.close()
    for handle in handles:
        handle.remove()
    if spill._room is not None:
        spill._room.file.close()
    return away, [p.grad.clone() for p in parameters]


def expected(parameters, compute):
    for parameter in parameters:
        parameter.grad = None
    compute().backward()
    found = [p.grad.clone() for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    return found


def same(found, wanted):
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.fixture
def pair():
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(SIZE)) for _ in range(2)]


def test_gradients_are_away_and_come_back_bit_for_bit(pair):
    def compute():
        return sum((p * p).sum() for p in pair)

    wanted = expected(pair, compute)
    away, found = run(pair, compute)
    assert away == 2
    assert same(found, wanted)


def test_gradients_that_share_memory_stay(pair):
    def compute():
        return torch.cat(pair).square().sum()

    wanted = expected(pair, compute)
    away, found = run(pair, compute)
    assert away == 0
    assert same(found, wanted)


def test_what_is_added_to_is_there(pair):
    class Again(torch.autograd.Function):
        """Runs a backward of its own inside backward, as reentrant checkpoints do."""

        @staticmethod
        def forward(ctx, x, parameter):
            ctx.save_for_backward(parameter)
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            (parameter,) = ctx.saved_tensors
            with torch.enable_grad():
                (parameter * parameter).sum().backward()
            return gradient, None

    def compute():
        # The first gradient of `pair[0]` is complete before the inner backward adds to it.
        x = (pair[0] * pair[0]).sum()
        y = Again.apply(pair[1] * 2, pair[0])
        return x + (y * y).sum()

    wanted = expected(pair, compute)
    _, found = run(pair, compute)
    assert same(found, wanted)


def test_who_looks_sees_the_gradient_and_may_keep_it(pair):
    kept = []
    pair[1].register_post_accumulate_grad_hook(lambda p: kept.append(p.grad))

    def compute():
        # That of `pair[1]` comes first, and is looked at when that of `pair[0]` comes.
        return (pair[0] * 3).sum() + (pair[1] * pair[1]).sum()

    wanted = expected(pair, compute)
    kept.clear()
    _, found = run(pair, compute)
    assert same(found, wanted)
    assert torch.equal(kept[0], wanted[1])


def test_a_gradient_of_before_stays(pair):
    for parameter in pair:
        parameter.grad = torch.ones(SIZE)
    away, found = run(pair, lambda: sum(p.sum() for p in pair))
    assert away == 0
    assert same(found, [torch.full((SIZE,), 2.0)] * 2)


@pytest.fixture
def waiting(pair, tmp_path: Path):
    """A stash whose gradients may wait in files once backward is over, and what they should be."""
    assert cpu.start() is None
    wanted = expected(pair, lambda: sum((p * p).sum() for p in pair))
    spill = SpillFile()
    stash = GradientStash(spill)
    stash.place = str(tmp_path)
    stash.watch(pair)
    stash.begin()
    handles = [p.register_post_accumulate_grad_hook(stash.complete) for p in pair]
    sum((p * p).sum() for p in pair).backward()
    for handle in handles:
        handle.remove()
    stash.backward_ended()
    yield stash, wanted
    stash.close()
    spill._room.file.close()
    assert "grad" not in vars(nn.Parameter)


def is_mapped(parameter) -> bool:
    gradient = gradient_of(parameter)
    return gradient.nbytes == 4 * SIZE and not _native.is_counted(gradient.data_ptr())


def test_gradients_wait_until_someone_asks(pair, waiting):
    stash, wanted = waiting
    assert stash.away_bytes == (8 * SIZE, 4 * SIZE)
    assert torch.equal(pair[0].grad, wanted[0])
    assert stash.away_bytes == (4 * SIZE, 4 * SIZE)
    stash.close()
    assert same([p.grad for p in pair], wanted)
    assert not any(map(is_mapped, pair)), "an optimizer that asks for all has them in memory"


def test_a_gradient_that_waits_is_an_error_to_who_does_not_ask(pair, waiting):
    with pytest.raises(RuntimeError, match="this gradient is offloaded by memfit"):
        gradient_of(pair[0]).sum()


def test_one_gradient_at_a_time_is_in_memory_where_updates_are_made_one_by_one(pair, waiting):
    stash, wanted = waiting
    stash.updates_begin()
    window = _native.AllocationWindow()
    before = _native.counted_bytes()
    for parameter in pair:
        assert parameter.grad is not None
        parameter.grad.mul_(2)
    assert window.peak()[0] - before <= 4 * SIZE + 4096
    assert is_mapped(pair[0])
    stash.close()
    assert all(map(is_mapped, pair))
    assert same([p.grad for p in pair], [2 * it for it in wanted])


LOOKS = [lambda g: g[:5], lambda g: g.numpy()[:5], lambda g: g, lambda g: np.from_dlpack(g)[:5]]


@pytest.mark.parametrize("looks", LOOKS)
def test_who_keeps_a_gradient_of_an_update_sees_what_it_is_later(pair, waiting, looks):
    stash, wanted = waiting
    stash.updates_begin()
    look = looks(pair[0].grad)
    assert torch.equal(pair[1].grad, wanted[1])
    stash.close()
    pair[0].grad.fill_(3)
    assert (look == 3).all()


def test_a_gradient_that_no_file_takes_stays_in_memory(pair, waiting):
    stash, wanted = waiting
    stash.place += "/missing"
    stash.updates_begin()
    assert all(p.grad is not None for p in pair)
    stash.close()
    assert not any(map(is_mapped, pair))
    assert same([p.grad for p in pair], wanted)


SCRIPT = """
    import torch
    from torch import nn
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.AdaptiveAvgPool2d(15)]
    model = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(64 * 225, 128))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    {before}
    for _ in range(4):
        loss = model(torch.randn(16, 3, 32, 32)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        {after}
        print(repr(loss.item()), repr(sum(p.double().sum().item() for p in model.parameters())))
"""


def test_a_recorded_step_takes_less(tmp_path: Path):
    # The large layer's gradient is complete before the backward of the convolutions.
    (loop,) = inline(tmp_path, "26MiB", SCRIPT.format(before="", after="optimizer.step()")).loops
    gradient_bytes = 64 * 225 * 128 * 4
    as_it_is = loop["plan"]["unplanned_peak_bytes"]
    assert as_it_is - loop["observed"]["peak_bytes"] > 0.9 * gradient_bytes


def test_an_optimizer_inside_backward_finds_gradients(tmp_path: Path):
    code = SCRIPT.format(
        before="""
    for p in model.parameters():
        of_p = torch.optim.SGD([p], 0.01)
        def step(p, of_p=of_p):
            of_p.step()
            of_p.zero_grad()
        p.register_post_accumulate_grad_hook(step)
    """.strip(),
        after="",
    )
    ran = inline(tmp_path, "20MiB", code)
    assert ran.code == 0, ran.stderr


def test_nothing_is_taken_that_nobody_watches(pair):
    stash = GradientStash(SpillFile())
    pair[0].grad = torch.ones(SIZE)
    stash.complete(pair[0])
    assert pair[0].grad.untyped_storage().nbytes() == 4 * SIZE


def test_looks_are_seen_in_backward_alone(pair):
    stash = GradientStash(SpillFile())
    stash.watch(pair)
    assert "grad" not in vars(nn.Parameter)
    stash.begin()
    assert "grad" in vars(nn.Parameter)
    stash.bring_back()
    assert "grad" not in vars(nn.Parameter)
    stash.close()


def test_a_gradient_that_cannot_be_read_again_is_an_error(pair):
    spill = SpillFile()
    stash = GradientStash(spill)
    stash.watch(pair)
    stash.begin()
    handle = pair[0].register_post_accumulate_grad_hook(stash.complete)
    (pair[0] * pair[0]).sum().backward()
    spill._room.file.truncate(0)
    with pytest.raises(OSError, match="cut off"):
        _ = pair[0].grad
    with pytest.raises(OSError, match="cut off"):
        stash.bring_back()
    with pytest.raises(OSError, match="cut off"):  # still told: no memory is behind it
        _ = pair[0].grad
    handle.remove()
    stash._away.clear()
    stash.close()
    spill._room.file.close()
    assert "grad" not in vars(nn.Parameter)


def test_a_parameter_where_another_was_that_has_gone_is_nobodys():
    spill = SpillFile()
    stash = GradientStash(spill)
    gone = nn.Parameter(torch.ones(SIZE))
    stash.watch([gone])
    stash.begin()
    gone.register_post_accumulate_grad_hook(stash.complete)
    (gone * gone).sum().backward()
    ((key, away),) = stash._away.items()
    other = nn.Parameter(torch.ones(SIZE))
    other.grad = torch.full((SIZE,), 3.0)
    stash._away = {id(other): away}  # as where `other` has the address of `gone`
    assert torch.equal(other.grad, torch.full((SIZE,), 3.0))
    assert away[0].nbytes() == 0
    stash._away = {key: away}
    assert torch.equal(gone.grad, torch.full((SIZE,), 2.0))
    stash.close()
    spill._room.file.close()
    assert "grad" not in vars(nn.Parameter)


def test_state_that_the_second_recorded_step_has_no_room_for_is_elsewhere(tmp_path: Path):
    # Gradients live on into the next forward, so that two steps are recorded.
    code = """
    import torch
    from torch import nn
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(6)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(6):
        loss = model(torch.randn(2048, 512)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(repr(loss.item()), repr(sum(p.double().sum().item() for p in model.parameters())))
    """
    folder = tmp_path / "offloaded"
    folder.mkdir()
    (loop,) = inline(tmp_path, "31MiB", code, offload=str(folder)).loops
    assert loop["observed"]["steps"] == 2
    assert loop["observed"]["peak_bytes"] <= 31 << 20  # with the state in memory it takes 42 MiB
