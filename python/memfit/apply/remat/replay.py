"""Answering autograd's requests in backward: computing dropped tensors again, fetching stored ones.

Responsible for the order of replays and fetches, for what lives while they run, and for handing
autograd the tensor it saved. Not responsible for deciding what is recorded
(:mod:`memfit.apply.remat.watch`) nor for moving bytes (:mod:`memfit.apply.offload.activations`).

Invariants: a record runs once, and once more for each request that it lets pass; within a request,
records run in the order of forward; a replay sees neither autograd nor autocast nor a dispatch
mode, since a record holds an op from below all three.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from memfit.apply.offload.activations import ask_for, fetch_now
from memfit.apply.offload.parameters import UseWatch
from memfit.apply.remat.records import (
    Fetch,
    Geometry,
    Kept,
    Pin,
    Record,
    Ref,
    ShapeOnly,
    State,
    Token,
    require_unchanged,
)
from memfit.errors import ReplayError
from memfit.tensors.storage import shared_digest
from memfit.tensors.versions import version_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from memfit.apply.offload.activations import Ahead


class Replayer:
    """Answers autograd's unpack calls of one forward.

    Attributes:
        replayed: Ops run so far.
    """

    def __init__(self, ahead: Ahead | None = None) -> None:
        """Create a replayer that has run nothing.

        Args:
            ahead: Fetches stored allocations ahead; ``None`` when none are stored.
        """
        self.replayed = 0
        self._ahead = ahead
        self._lock = threading.RLock()

    def unpack(self, saved: Token | Kept) -> Tensor:
        """The tensor that autograd saved.

        Args:
            saved: What the pack hook returned for it.

        Returns:
            A tensor with the bits that autograd would have found there.

        Raises:
            RuntimeError: The tensor has been changed in place since, as autograd itself would say.
            ReplayError: A tensor cannot be computed again with the value it had.
            OffloadError: A tensor did not come back from where it was stored.
        """
        if isinstance(saved, Kept):
            if saved.tensor is None:
                raise ReplayError("a saved tensor was asked for again that its node had let go of")
            require_unchanged(saved.tensor, saved.version, list(saved.tensor.shape))
            return saved.tensor
        saved.require_unchanged()
        if saved.shape_save is not None and saved.shape_save.is_asked_for():
            return saved.blank()
        if saved.written is not None:
            return saved.geometry.over(saved.written)
        with self._lock, torch.no_grad():
            if saved.state.anchor is None or isinstance(saved.state.producer, Fetch):
                self._serve(saved.state)
            anchor = saved.state.anchor
            if anchor is None:
                raise ReplayError("a dropped tensor was not produced by the op recorded for it")
            return saved.geometry.over(anchor)

    def _serve(self, wanted: State) -> None:
        """Make a state be there, and with it what near requests will want too."""
        with _bare_dispatch():
            request = _Request(wanted)
            self.replayed += request.run()
            if request.asked and self._ahead is not None:
                self._ahead.look_ahead()


class _Request:
    """One unpack being served: the records and fetches it needs, and what only passes.

    Attributes:
        asked: Whether a stored allocation was asked for.
    """

    def __init__(self, wanted: State) -> None:
        """Find what must run, and say of stored allocations that they are asked for."""
        self.asked = False
        self._for = wanted.made_at
        self._wanted = wanted
        # To come, the next one last; what ran is let go of at once, as memory depends on it.
        self._to_come: list[Record | State] = []
        self._collect(wanted)
        self._to_come.sort(key=_place, reverse=True)
        # How many records to come read a state that only passes.
        self._readers: dict[State, int] = {}
        passing = {
            state
            for errand in self._to_come
            if self._passes(errand)
            for state in _states_of(errand)
            if state is not wanted
        }
        for errand in self._to_come:
            for state in errand.states if isinstance(errand, Record) else ():
                if state in passing:
                    self._readers[state] = self._readers.get(state, 0) + 1

    def run(self) -> int:
        """Run it all, in the order of forward; returns how many ops ran."""
        replayed = 0
        while self._to_come:
            errand = self._to_come.pop()
            if isinstance(errand, State):
                fetch = errand.producer
                assert isinstance(fetch, Fetch)
                fetch_now(errand, fetch, stays=errand not in self._readers)
                continue
            read = [state for state in errand.states if state in self._readers]
            _run(errand, passes=self._passes(errand), needed=self._is_needed)
            replayed += 1
            while read:
                self._was_read(read.pop())
        return replayed

    def _collect(self, wanted: State) -> None:
        found: set[Record | State] = set()
        stack = [wanted]
        while stack:
            state = stack.pop()
            producer = state.producer
            if isinstance(producer, Fetch):
                self.asked |= producer.goal == "offload"
                ask_for(state, producer)
                if state.anchor is None and state not in found:
                    found.add(state)
                    self._to_come.append(state)
            elif state.anchor is None and producer is not None and producer not in found:
                found.add(producer)
                self._to_come.append(producer)
                stack.extend(producer.states)

    def _passes(self, errand: Record | State) -> bool:
        producer = errand.producer if isinstance(errand, State) else errand
        return producer is not None and producer.home <= self._for

    def _is_needed(self, state: State) -> bool:
        """Whether what a record that passes made is read in this request."""
        return state is self._wanted or state in self._readers

    def _was_read(self, state: State) -> None:
        self._readers[state] -= 1
        if self._readers[state] == 0:
            del self._readers[state]
            state.anchor = None


def _place(errand: Record | State) -> tuple[int, bool, int]:
    """Where an errand comes: in the order of forward, fetches before the replay of the same op."""
    if isinstance(errand, Record):
        return errand.turn, True, 0
    assert isinstance(errand.producer, Fetch)
    return errand.turn, False, errand.producer.ordinal


def _states_of(errand: Record | State) -> list[State]:
    """The states that an errand makes and that anyone refers to."""
    if isinstance(errand, State):
        return [errand]
    made = (output.state() for output in errand.outputs)
    return [state for state in made if state is not None]


@contextlib.contextmanager
def _bare_dispatch() -> Iterator[None]:
    """Switch autocast off, and dispatch modes if any is on.

    But for those that have what ops are about to use: ops that run again use parameters too.
    """
    if all(isinstance(mode, UseWatch) for mode in _get_current_dispatch_mode_stack()):
        with torch._C._DisableAutocast():
            yield
        return
    with contextlib.ExitStack() as stack:
        for mode in stack.enter_context(_disable_current_modes()):
            if isinstance(mode, UseWatch):
                stack.enter_context(mode)
        stack.enter_context(torch._C._DisableAutocast())
        yield


def _run(record: Record, *, passes: bool, needed: Callable[[State], bool]) -> None:
    """Run one record, fill its outputs, and let go of its arguments unless it will run again.

    Args:
        record: The record.
        passes: Whether it will.
        needed: Says of an output of one that will whether this request reads it.
    """
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
    result = _unfilled(record, kwargs)
    if result is None:
        with (
            record.generator.restored() if record.generator else contextlib.nullcontext(),
            # A record's tensors require no gradient, so no graph is made.
            torch.enable_grad() if record.operator.gradient_mode else contextlib.nullcontext(),
        ):
            result = record.operator.func(*args, **kwargs)
    tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    for output in record.outputs:
        state = output.state()
        if state is None or (passes and not needed(state)):
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
        if not passes:
            state.producer = None
    if not passes:
        record.consume()


def _unfilled(record: Record, kwargs: dict[str, Any]) -> Tensor | None:
    """What an op makes that only makes memory as a tensor of which the shape is known.

    Torch computes the shape in Python where that tensor is on the meta device, and imports sympy
    to do so.
    """
    operator = record.operator
    if not (operator.uninitialised and operator.shape_only) or len(record.outputs) != 1:
        return None
    geometry = record.outputs[0].geometry
    if not isinstance(record.args[0], ShapeOnly) or kwargs.get("pin_memory") or geometry.offset:
        return None
    return torch.empty_strided(
        geometry.shape, geometry.stride, dtype=geometry.dtype, device=kwargs["device"]
    )


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
        if value.digest is not None and value.digest != shared_digest(value.tensor):
            message = (
                f"an argument of `{record.operator.name}`, forward op {record.index}, is shared "
                "between processes, and one has written to it between forward and backward; its "
                "output was dropped and cannot be computed again\n"
                "hint: give the model a copy of it (`.clone()`)"
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
