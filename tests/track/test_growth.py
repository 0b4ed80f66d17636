"""Warnings about loops that keep more and more."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import memfit
from memfit.track import growth
from memfit.track.growth import GrowthWatch

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
    assert "more after every iteration, 4 times in a row" in text
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
    assert "`Trainer.losses` holds 5 tensors with their autograd graphs" in text
    assert "tensor.detach()" in text


def test_other_growth_is_said_to_be_unexplained():
    kept = []
    # Neither this loop's doing nor growing.
    constant = loss() + loss() + loss() + loss() + loss() + loss()

    def loop() -> None:
        for _ in range(8):
            with memfit.track("kept batches"):
                kept.append(torch.randn(100))

    found = caught(loop)
    assert len(found) == 1
    assert "something else is collected" in str(found[0].message)
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


@pytest.mark.parametrize(
    ("kept", "expected"),
    [
        ([1, 2, 3, 4, 5], 5),
        ([1, 2, 3, 4, 4, 5, 6, 7, 8], 9),
        ([5, 5, 5, 5, 5, 5, 5, 5], None),
        ([9, 8, 7, 6, 5], None),
        ([1, 2, 1, 2, 1, 2, 1, 2, 1], None),
    ],
)
def test_four_growths_in_a_row(kept: list[int], expected: int | None):
    watch = GrowthWatch()
    found = [i + 1 for i, value in enumerate(kept) if watch.observe(value) is not None]
    assert found == ([expected] if expected else [])
