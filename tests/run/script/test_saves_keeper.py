"""Saved tensors of steps that run as recorded: in memory while there is room, else in files."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from memfit import _native
from memfit.capture.record.saves import Token
from memfit.run.script.observed import StepRecording
from memfit.run.script.script_recorder import Saved

MEMORY = 1 << 20

pytestmark = pytest.mark.filterwarnings("ignore:unclosed file")


@pytest.fixture(autouse=True)
def counting() -> Iterator[None]:
    assert _native.count_allocations() is None
    yield
    gc.collect()  # the last contents close their file


class InPlace(nn.Module):
    """Saves outputs of its ops and inputs, views and what it writes to before it is saved."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x).add_(number).relu_()
            x = x * x[:, :1].sigmoid()
            x = x.t().contiguous().t()
        return x.square().mean()


class Through(TorchDispatchMode):
    """Runs each op in a mode of its own, as ops in pieces do."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def gradients(
    model: nn.Module, batch: Tensor, most_bytes: int | None, mode: type | None = None
) -> tuple[list[Tensor], list[Any], int]:
    """Gradients of a step, what stood for its saved tensors, and the most bytes in it."""
    model.zero_grad()
    if most_bytes is None:
        model(batch).backward()
        return [p.grad for p in model.parameters() if p.grad is not None], [], 0
    window = _native.AllocationWindow()
    running = StepRecording(model, batch, [], "cpu", most_bytes=most_bytes)
    held: list[Any] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda it: held.append(running.recorder.pack(it)) or held[-1], running.recorder.unpack
    )
    try:
        with mode() if mode is not None else contextlib.nullcontext():
            with hooks:
                loss = model(batch)
            kept = [it.token for it in held if isinstance(it, Saved)]
            held.clear()
            running.backward_begins()
            loss.backward()
        running.backward_ended()
    finally:
        running.abandon()  # or else its mode stays for whatever comes in this process
    peak = window.peak()[0]
    window.close()
    return [p.grad for p in model.parameters() if p.grad is not None], kept, peak


@pytest.mark.parametrize("mode", [None, Through])
@pytest.mark.parametrize("part", [0.0, 0.6, 0.8, 4.0])
def test_what_was_saved_first_is_in_files_and_gradients_are_the_same(
    part: float, mode: type | None
):
    torch.manual_seed(0)
    model, batch = InPlace(), torch.randn(1024, 64)
    expected, _, _ = gradients(model, batch, None)
    expected = [it.clone() for it in expected]
    model.zero_grad()
    live = _native.counted_bytes()
    room = int(part * 13 * batch.nbytes)
    found, kept, peak = gradients(model, batch, live + room, mode)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    own = [it for it in kept if isinstance(it, Token) or it.data_ptr() != batch.data_ptr()]
    large = [it for it in own if isinstance(it, Token) or it.nbytes >= batch.nbytes]
    in_files = [isinstance(it, Token) and it.contents is not None for it in large]
    if part >= 1:
        assert not any(in_files), "there is room for all"
    else:
        assert any(in_files)
        first_in_memory = in_files.index(False) if part else len(in_files)
        assert all(in_files[:first_in_memory])
        assert peak < live + room + 6 * batch.nbytes, "an op and what it reads come on top"


def test_what_a_node_lets_go_of_is_freed():
    model, batch = InPlace(), torch.randn(1024, 64)
    running = StepRecording(model, batch, [], "cpu", most_bytes=_native.counted_bytes() + MEMORY)
    try:
        made = torch.randn(4096, 64)
        saved = running.recorder.pack(made)
        assert isinstance(saved, Saved)
        live, size = _native.counted_bytes(), made.nbytes
        del made
        blank = saved.let_go()
        assert blank is not None
        assert blank.shape == (4096, 64)
        assert _native.counted_bytes() <= live - size
    finally:
        running.abandon()


def test_a_graph_that_outlives_its_pass_is_in_files():
    """Nobody makes room in passes that follow, which have as much as before."""
    torch.manual_seed(0)
    model, batch = InPlace(), torch.randn(1024, 64)
    expected, _, _ = gradients(model, batch, None)
    expected = [it.clone() for it in expected]
    model.zero_grad(set_to_none=True)
    live = _native.counted_bytes()
    running = StepRecording(model, batch, [], "cpu", most_bytes=live + 64 * MEMORY)
    loss = model(batch)
    assert _native.counted_bytes() > live + 8 * batch.nbytes
    running.abandon()
    gc.collect()
    assert _native.counted_bytes() < live + 2 * batch.nbytes
    loss.backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradient)


@pytest.mark.parametrize("mode", [None, Through])
@pytest.mark.parametrize("room", [0, MEMORY, 64 * MEMORY])
def test_a_saved_tensor_that_is_written_to_is_refused(room: int, mode: type | None):
    weight = nn.Parameter(torch.randn(512, 512))

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: Tensor) -> Tensor:
            saved = (x * 2).mul_(2)  # at version 1
            result = (saved * self.weight).sin().sin().sin()
            saved.add_(1)
            return result.sum()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(Writes(), torch.randn(512, 512), _native.counted_bytes() + room, mode)


@pytest.mark.parametrize("mode", [None, Through])
@pytest.mark.parametrize("room", [0, MEMORY, 64 * MEMORY])
def test_backward_reads_what_a_write_through_data_left(room: int, mode: type | None):
    torch.manual_seed(0)
    weight, batch = nn.Parameter(torch.randn(512, 512)), torch.randn(512, 512)

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: Tensor) -> Tensor:
            saved = (x * 2).mul_(2)
            result = (saved * self.weight).sin().sin().sin()
            saved.data.mul_(1.5)
            return result.sum()

    ((expected,), _, _) = gradients(Writes(), batch, None)
    expected = expected.clone()
    ((found,), _, _) = gradients(Writes(), batch, _native.counted_bytes() + room, mode)
    assert torch.equal(found, expected)
