"""Which dispatch modes see what a replay does."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
)

from memfit.apply.offload.parameters import UseWatch
from memfit.apply.remat.records import Geometry
from memfit.apply.remat.replay import _bare_dispatch


class Seen(TorchDispatchMode):
    """Writes down the ops that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def watch() -> UseWatch:
    return UseWatch(lambda _storages, *, is_written: None)


def test_a_tensor_over_memory_that_is_there_is_no_op_of_the_step():
    whole = torch.arange(6.0).reshape(2, 3)
    part = whole[:, 1:]
    with Seen() as seen:
        again = Geometry.of(part).over(whole)
        assert Geometry.of(part).over(again) is again
    assert seen.ops == []
    assert torch.equal(again, part)
    assert again.data_ptr() == part.data_ptr()


def test_only_what_has_parameters_ready_sees_ops_that_run_again():
    with watch() as used:
        with _bare_dispatch():
            assert _get_current_dispatch_mode_stack() == [used]
        with Seen() as seen:
            with _bare_dispatch():
                assert _get_current_dispatch_mode_stack() == [used]
            assert _get_current_dispatch_mode_stack() == [used, seen]
    with torch.autocast("cpu", torch.bfloat16), _bare_dispatch():
        assert _get_current_dispatch_mode_stack() == []
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
