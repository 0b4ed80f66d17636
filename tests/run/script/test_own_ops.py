"""What memfit looks up by computing, once in a process, is no op of the script's step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.apply.offload import mapped
from memfit.apply.pieces import whole_draws
from memfit.run.script import gradients_between
from memfit.run.script.signals import Signals
from memfit.tensors import backward_in_place, convolution_in_two, storage, versions
from memfit.track import cpu


class _Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def _nothing_of_the_cpu() -> None:
    versions._nothing(torch.device("cpu"))


@pytest.mark.parametrize(
    ("probe", "of"),
    [
        (storage._freed_by_allocator, storage._freed_by_allocator),
        (storage._alone, storage._alone),
        (backward_in_place._counted, backward_in_place.alone),
        (convolution_in_two._owners_alone, convolution_in_two.is_ready),
        (gradients_between._alone, gradients_between._alone),
        (versions._nothing, _nothing_of_the_cpu),
        (whole_draws._counts_in_32_bits, whole_draws._counts_in_32_bits),
    ],
)
def test_what_is_asked_once_runs_no_op(probe: Any, of: Callable[[], Any]):
    probe.cache_clear()
    with _Ops() as ops:
        of()
    assert probe.cache_info().currsize == 1
    assert ops.seen == []


def test_beginning_to_count_and_moving_to_files_run_no_op(tmp_path: Path):
    tensor = torch.rand(1 << 16)
    with _Ops() as ops:
        assert cpu.start() is None
        assert mapped.may_go(tensor)
        mapped.to_file(tensor, str(tmp_path))
        mapped.to_memory(tensor)
    assert ops.seen == []


def test_a_backward_of_memfits_own_is_none_of_the_scripts():
    """As where it tries a call of the model on pieces, when a pass is about to begin."""
    told: list[str] = []
    model = nn.Linear(2, 2)

    class Listener:
        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *_args, **_more: told.append(name)

        def called(self, *_: Any) -> None:
            torch.ones(2, requires_grad=True).sum().backward()

    listener: Any = Listener()
    signals = Signals(listener, listener)
    signals.install()
    try:
        loss = model(torch.ones(2)).sum()
        assert "backward_begins" not in told
        loss.backward()
    finally:
        signals.remove()
    assert told.count("backward_begins") == told.count("backward_ended") == 1
