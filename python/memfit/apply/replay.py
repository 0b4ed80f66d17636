"""Computing dropped tensors again in backward.

Responsible for the order of replays, for what lives while they run, and for handing autograd the
tensor it saved. Not responsible for deciding what is recorded (:mod:`memfit.apply.watch`).

Invariants: each record runs at most once; records run in the order of forward; a replay sees
neither autograd nor autocast nor a dispatch mode, since a record holds an op from below all three.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from memfit.apply.records import (
    Geometry,
    Kept,
    Pin,
    Record,
    Ref,
    ReplayError,
    ShapeOnly,
    State,
    Token,
    version_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


class Replayer:
    """Answers autograd's unpack calls of one forward.

    Attributes:
        replayed: Ops run so far.
    """

    def __init__(self) -> None:
        """Create a replayer that has run nothing."""
        self.replayed = 0
        self._lock = threading.RLock()

    def unpack(self, saved: Token | Kept) -> Tensor:
        """The tensor that autograd saved.

        Args:
            saved: What the pack hook returned for it.

        Returns:
            A tensor with the bits the saved one had.

        Raises:
            RuntimeError: A tensor that was kept has been changed in place since, as autograd
                itself would say.
            ReplayError: A tensor cannot be computed again with the value it had.
        """
        if isinstance(saved, Kept):
            if saved.version != version_of(saved.tensor):
                message = (
                    "one of the variables needed for gradient computation has been modified by an "
                    f"inplace operation: shape {list(saved.tensor.shape)} is at version "
                    f"{version_of(saved.tensor)}; expected version {saved.version} instead"
                )
                raise RuntimeError(message)
            return saved.tensor
        with self._lock, torch.no_grad():
            if saved.state.anchor is None:
                self._materialise(saved.state)
            anchor = saved.state.anchor
            if anchor is None:
                raise ReplayError("a dropped tensor was not produced by the op recorded for it")
            return saved.geometry.over(anchor)

    def _materialise(self, state: State) -> None:
        with _bare_dispatch():
            for record in _missing_records(state):
                _run(record)
                self.replayed += 1


@contextlib.contextmanager
def _bare_dispatch() -> Iterator[None]:
    """Switch autocast off, and dispatch modes if any is on."""
    with contextlib.ExitStack() as stack:
        if torch._C._len_torch_dispatch_stack() > 0:
            stack.enter_context(_disable_current_modes())
        stack.enter_context(torch._C._DisableAutocast())
        yield


def _missing_records(state: State) -> list[Record]:
    """Records that must run before ``state`` is there, in the order of forward."""
    found: set[Record] = set()
    stack = [state]
    while stack:
        current = stack.pop()
        record = current.producer
        if current.anchor is not None or record is None or record in found:
            continue
        found.add(record)
        stack.extend(record.states)
    return sorted(found, key=lambda record: record.index)


def _run(record: Record) -> None:
    """Run one record, fill its outputs, and let go of its arguments."""
    storage_of_target = _target_storage(record)
    args = [_argument(value, record, storage_of_target) for value in record.args]
    kwargs = {key: _argument(v, record, storage_of_target) for key, v in record.kwargs.items()}
    target = None
    if record.target is not None and storage_of_target is not None:
        target = record.target.geometry.over(storage_of_target)
    if record.operator.shape_only and isinstance(record.args[0], ShapeOnly):
        if kwargs.get("device") is None:
            kwargs["device"] = record.args[0].device
    else:
        _protect_written(record, args, kwargs)
    with record.generator.restored() if record.generator else contextlib.nullcontext():
        result = record.operator.func(*args, **kwargs)
    tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    for output in record.outputs:
        state = output.state()
        if state is None:
            continue
        made = target if target is not None else tensors[output.ordinal]
        if Geometry.of(made) != output.geometry:
            message = (
                f"`{record.operator.name}`, forward op {record.index}, gave "
                f"{list(made.shape)} strides {list(made.stride())} when run again, and "
                f"{list(output.geometry.shape)} strides {list(output.geometry.stride)} in forward"
            )
            raise ReplayError(message)
        state.anchor = made
        state.producer = None
    record.consume()


def _target_storage(record: Record) -> Tensor | None:
    """What an op that writes in place may write to: its input's storage, or a copy of it.

    The storage itself where nothing else refers to the value that the write destroys: no token, no
    other record, and no tensor outside (a custom function may have kept one).
    """
    if record.target is None:
        return None
    state = record.target.state
    anchor = state.anchor
    if anchor is None:
        message = f"the value that `{record.operator.name}` writes to is not there"
        raise ReplayError(message)
    storage = anchor.untyped_storage()
    if state.read_only_by(record) and _use_count(storage) <= _ANCHOR_ONLY:
        state.anchor = None
        return anchor
    copy = torch.empty(0, dtype=anchor.dtype, device=anchor.device)
    geometry = Geometry.of(anchor)
    twin: torch.UntypedStorage = storage.clone()  # type: ignore[no-untyped-call]
    copy.set_(twin, geometry.offset, geometry.shape, geometry.stride)
    return geometry.over(copy)


def _use_count(storage: torch.UntypedStorage) -> int:
    return int(torch._C._storage_Use_Count(storage._cdata))


def _use_count_of_lone_tensor() -> int:
    lone = torch.empty(1)
    storage = lone.untyped_storage()
    return _use_count(storage)


_ANCHOR_ONLY = _use_count_of_lone_tensor()
"""Use count of a storage held by one tensor and a local variable, counted the same way."""


def _argument(value: Any, record: Record, storage_of_target: Tensor | None) -> Any:
    """The argument as the op takes it."""
    if isinstance(value, Ref):
        if record.target is not None and value.state is record.target.state:
            assert storage_of_target is not None
            return value.geometry.over(storage_of_target)
        if value.state.anchor is None:
            message = f"an argument of `{record.operator.name}` is not there"
            raise ReplayError(message)
        return value.geometry.over(value.state.anchor)
    if isinstance(value, Pin):
        if value.version is not None and value.version != version_of(value.tensor):
            message = (
                f"an argument of `{record.operator.name}`, forward op {record.index}, was "
                "written to between forward and backward where memfit was not watching; its "
                "output was dropped and cannot be computed again\n"
                "hint: plan again, so that the step is recorded as it runs now"
            )
            raise ReplayError(message)
        return value.tensor
    if isinstance(value, ShapeOnly):
        return value.meta
    if isinstance(value, (list, tuple)):
        return type(value)(_argument(item, record, storage_of_target) for item in value)
    return value


def _protect_written(record: Record, args: list[Any], kwargs: dict[str, Any]) -> None:
    """Give copies of what the op writes to besides its dropped target: the real ones move once."""
    operator = record.operator
    copied = set(operator.hidden_positions(args))
    for position in copied:
        args[position] = args[position].clone()
    if record.target is not None or not operator.writes:
        return
    for written in list(operator.announced_writes(args, kwargs)):
        for position, value in enumerate(args):
            if value is written and position not in copied:
                args[position] = value.clone()
        for key, value in kwargs.items():
            if value is written:
                kwargs[key] = value.clone()
