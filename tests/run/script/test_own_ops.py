"""What memfit looks up by computing, once in a process, is no op of the script's step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.apply.offload import mapped
from memfit.apply.pieces import whole_draws
from memfit.run.script import gradients_between
from memfit.tensors import backward_in_place, storage, versions
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
