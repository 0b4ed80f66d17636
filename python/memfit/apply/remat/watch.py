"""The forward side of a plan: what runs is watched, what is dropped recorded, what is stored sent.

Responsible for following the ops of forward inside the regions that a plan names, for recording ops
that make or change a dropped allocation, and for what autograd saves there. Nothing is computed
differently. Not responsible for computing again (:mod:`memfit.apply.remat.replay`), for how stored
allocations go and come (:mod:`memfit.apply.offload.activations`), for which module calls are
watched (:mod:`memfit.apply.remat.remat`), or for what is worth either (the engine).

Correctness does not depend on the plan: a drop that is not what the plan thought is still
recorded from the op that really ran, and whatever cannot be recorded is kept.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memfit import _native
from memfit.apply.remat.randomness import GeneratorState
from memfit.apply.remat.records import (
    NO_HOME,
    Fetch,
    Geometry,
    Kept,
    Output,
    Pin,
    Record,
    Ref,
    ShapeOnly,
    State,
    Token,
    alias_of,
)
from memfit.apply.remat.rewritten import Rewritten
from memfit.apply.remat.saved_memory import SavedMemory
from memfit.tensors.operators import Operator, operator_of
from memfit.tensors.shape_saves import ShapeSaves
from memfit.tensors.storage import (
    address,
    is_wrapper,
    may_change_unseen,
    reach_of,
    shared_digest,
)
from memfit.tensors.versions import version_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from memfit.apply.offload.activations import Transit
    from memfit.apply.remat.directions import Directions, Planned
    from memfit.apply.remat.records import Goal


SMALLEST_STRAY = 1 << 12
"""Bytes of a storage below which what was saved after the plan was left stays."""

LANDMARK_OPS = 6
"""Ops in a row by which a model that left the plan is recognised to be back on it."""


@dataclass(slots=True)
class Tracked:
    """A dropped or stored allocation while its storage lives in forward.

    Attributes:
        state: What it holds now.
        version: The version counter its tensors must show; another one means an unseen write.
        storage: Its storage, weakly; calls back when it dies, since addresses are used again.
        parts: Versions of parts of it that count their own.
    """

    state: State
    version: int
    storage: weakref.ref[Any]
    parts: dict[Geometry, int] = field(default_factory=dict)

    def is_known(self, tensor: Tensor) -> bool:
        """Whether every write to it was seen, as far as the version of ``tensor`` tells."""
        version = version_of(tensor)
        return version == self.version or self.parts.get(Geometry.of(tensor)) == version

    def is_written_to(self, target: Tensor, before: int) -> None:
        """Note a write that was seen; autograd counts it after the op returns.

        Args:
            target: What is written to.
            before: Its version before; -1 for a tensor that counts none.
        """
        geometry = Geometry.of(target)
        if before < 0:
            return
        if geometry in self.parts:
            self.parts[geometry] = before + 1
        else:
            self.version = before + 1


@dataclass(slots=True)
class Observations:
    """What happened while one forward was watched.

    Attributes:
        recorded_ops: Ops recorded.
        dropped_saves: Tensors for which autograd got a token.
        offloaded_saves: Tensors for which autograd got a token on a stored allocation.
        shrunk_saves: Tensors for which autograd got a token on a shrunk allocation.
        kept_drops: What of the plan's drops, stores and shrinks could not be carried out, with the
            reason.
        divergence: Where the running model left the plan; empty while it follows it.
    """

    recorded_ops: int = 0
    dropped_saves: int = 0
    offloaded_saves: int = 0
    shrunk_saves: int = 0
    kept_drops: list[str] = field(default_factory=list)
    divergence: str = ""


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches the ops of one forward while entered; entered and left once per active region.

    Attributes:
        observations: What happened so far.
        index: Index of the next op of forward.
    """

    def __init__(
        self,
        directions: Directions,
        on_divergence: Callable[[str], None],
        transits: Mapping[Goal, Transit] | None = None,
        strays: Callable[[], Transit | None] = lambda: None,
        outlasts: Callable[[torch.UntypedStorage], bool] = lambda _: False,
    ) -> None:
        """Create a watch for one forward.

        Args:
            directions: What to drop and to store, and the ops to expect.
            on_divergence: Told once, with a sentence, when the model leaves the plan.
            transits: By where it goes, what takes what is stored or shrunk; what has none is kept.
            strays: Asked once, when the model has left the plan, for what takes everything that is
                saved from there on; ``None`` for nothing.
            outlasts: Whether a storage is older than the forward though its memory may be newer.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.observations = Observations()
        self.index = 0
        self._turn = 0
        self._end = 0
        self._following = False
        self._lately: deque[str] | None = None
        self._directions = directions
        self._on_divergence = on_divergence
        self._transits = {} if transits is None else transits
        self._ask_strays = strays
        self._outlasts = outlasts
        self._strays: Transit | None = None
        self._since = _native.last_event()
        self._off: int | None = None
        self._gaps: list[tuple[int, int]] = []
        self._tracked: dict[int, Tracked] = {}
        self._pins: dict[int, list[weakref.ref[Record]]] = {}
        self._saved = SavedMemory()
        self._rewritten = Rewritten(outlasts)
        self._shape_saves = ShapeSaves()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Not to wrap every call for a compiler that never sees this mode."""
        return False

    # Regions

    def start_region(self, start: int, end: int) -> None:
        """Expect the ops ``[start, end)`` of forward from here on."""
        self.index = start
        self._end = end
        self._follows()
        self._lately = None

    def end_region(self, *, complete: bool) -> None:
        """Stop watching.

        Args:
            complete: Whether the region ran to its end; ``False`` after an exception.
        """
        if complete and self._following and self.index != self._end:
            self._diverge(f"it ended a region at forward op {self.index} instead of {self._end}")
        self._stray_on()
        self._lately = None

    def leave_alone(self, why: str) -> None:
        """A call that the plan watches runs as it is; the region that is open, if any, goes on.

        Args:
            why: A clause that says so of the model.
        """
        self._say(why)

    def close(self) -> None:
        """Let go of everything that only forward needs; tokens and their records live on."""
        self._tracked.clear()
        self._pins.clear()
        self._saved.settle()
        self._saved.clear()
        # These hold this watch, and with it modules, which are to go with their last reference.
        self._on_divergence, self._ask_strays = _say_nothing, _nowhere

    # Ops

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one op, and record it if the plan needs it again."""
        kwargs = dict(kwargs) if kwargs else {}
        operator = operator_of(func)
        if any(map(is_wrapper, types)):
            return NotImplemented  # as in the recording: its class runs ops on what it wraps
        if not operator.counted:
            return func(*args, **kwargs)
        self._shape_saves.op(operator.name, args)
        self._saved.settle()
        self._turn += 1
        index = self.index
        planned: dict[int, Planned] | None = None
        if self._following and self._expected(index, operator):
            self.index = index + 1
            planned = self._directions.planned.get(index)
        elif self._lately is not None:
            self._find_back(operator)
        if operator.writes:
            self._rewritten.writes(operator.announced_writes(args, kwargs))
            if self._saved:
                self._saved.written(operator.announced_writes(args, kwargs))
        if planned is not None:
            return self._create(index, planned, operator, types, args, kwargs)
        if operator.writes and (self._tracked or self._pins):
            return self._write(index, operator, types, args, kwargs)
        if operator.own_versions and self._tracked:
            return self._take_apart(operator, args, kwargs)
        return func(*args, **kwargs)

    def _expected(self, index: int, operator: Operator) -> bool:
        """Whether the plan expects this op here; past the region's end nothing is expected."""
        if index >= self._end:
            return False
        expected = self._directions.forward[index]
        if operator.name == expected:
            return True
        if torch._C._current_autograd_node() is None:
            self._diverge(f"it ran `{operator.name}` as forward op {index} instead of `{expected}`")
            self._lately = deque(maxlen=LANDMARK_OPS)
        return False

    def _find_back(self, operator: Operator) -> None:
        """Follow the plan again where the last ops that ran are the next ones it lists.

        A wrong guess is harmless: it costs memory or time, never the result.
        """
        lately = self._lately
        if lately is None:
            return
        lately.append(operator.name)
        if len(lately) < LANDMARK_OPS:
            return
        after = self._directions.after(tuple(lately), self.index)
        if after is not None and after <= self._end:
            self.index = after
            self._follows()
            self._lately = None

    def _diverge(self, where: str) -> None:
        self._say(where)
        self._stray_on()

    def _stray_on(self) -> None:
        """Follow the plan no more; of what is made once it was left, it says nothing."""
        self._following = False
        if self._strays is not None and self._off is None:
            self._off = _native.last_event()

    def _follows(self) -> None:
        """The plan is followed from here on."""
        self._following = True
        if self._off is not None:
            self._gaps.append((self._off, _native.last_event()))
            self._off = None

    def _say(self, where: str) -> None:
        if not self.observations.divergence:
            self.observations.divergence = where
            self._on_divergence(where)
            self._strays = self._ask_strays()

    def _create(
        self,
        index: int,
        planned: dict[int, Planned],
        operator: Operator,
        types: Sequence[type],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run an op of whose outputs the plan keeps not all."""
        refusal = operator.refusal or _unfit(types, args, kwargs)
        self._before_writes(operator, args, kwargs, forget=True)
        record = None
        if any(output.goes_to is None for output in planned.values()):
            if refusal is None:
                record = self._record(index, operator, args, kwargs)
                self.observations.recorded_ops += 1
            else:
                self._keep(index, operator, refusal)
        result = operator.func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        given = {
            _storage_key(leaf)
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided
        }
        for ordinal, output in sorted(planned.items()):
            made = tensors[ordinal] if ordinal < len(tensors) else None
            if made is None or type(made) is not Tensor or made.layout is not torch.strided:
                self._keep(index, operator, f"returns no strided tensor {ordinal}")
                continue
            if _storage_key(made) in given or _storage_key(made) in self._tracked:
                self._keep(index, operator, "returns a view instead of a new tensor")
                continue
            if made.numel() > output.elements:
                self._say(
                    f"forward op {index}, `{operator.name}`, made {made.numel()} elements instead "
                    f"of {output.elements}"
                )
            if output.goes_to is not None:
                self._store(index, ordinal, output.goes_to, output.home, operator, made)
            elif record is not None:
                state = State(record, index, self._turn)
                record.makes(Output(ordinal, weakref.ref(state), Geometry.of(made)), output.home)
                self._track(made, state)
        return result

    def _store(
        self, index: int, ordinal: int, goal: Goal, home: int, operator: Operator, made: Tensor
    ) -> None:
        """Note that an output goes elsewhere, or gets fewer bits, when autograd saves it."""
        size = made.untyped_storage().nbytes()
        transit = self._transits.get(goal)
        refusal = transit.refusal(made.device) if transit is not None else "has no tier"
        if refusal is None and goal != "offload" and made.dtype is not torch.float32:
            refusal = f"has numbers of another type than float32: {made.dtype}"
        if refusal is not None:
            self._keep(index, operator, refusal)
        elif size > 0 and transit is not None:
            fetch = Fetch(goal, ordinal, size, made.device, home)
            fetch.stay = transit.stay
            state = State(fetch, index, self._turn)
            transit.ahead.expect((index, ordinal), state)
            self._track(made, state)

    def _write(
        self,
        index: int,
        operator: Operator,
        types: Sequence[type],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run an op that writes to its arguments; one of them may be dropped, stored or pinned."""
        written = list(operator.announced_writes(args, kwargs))
        target = written[0] if len(written) == 1 else None
        tracked = self._find(target) if target is not None else None
        followable = (
            target is not None
            and tracked is not None
            and self._following
            and operator.refusal is None
            and not operator.hidden_positions(args)
        )
        is_stored = tracked is not None and isinstance(tracked.state.producer, Fetch)
        if followable and is_stored and tracked is not None and target is not None:
            return self._write_stored(index, operator, tracked, target, args, kwargs)
        recordable = followable and _unfit(types, args, kwargs) is None
        self._before_writes(operator, args, kwargs, forget=not recordable)
        if not recordable or target is None or tracked is None:
            return operator.func(*args, **kwargs)
        size = target.untyped_storage().nbytes()
        record = self._record(index, operator, args, kwargs)
        record.target = Ref(tracked.state, Geometry.of(target))
        version = version_of(target)
        result = operator.func(*args, **kwargs)
        key = _storage_key(target)
        if target.untyped_storage().nbytes() != size:
            self._tracked.pop(key, None)
            return result
        state = State(record, index, self._turn)
        record.makes(Output(0, weakref.ref(state), Geometry.of(target)), NO_HOME)
        tracked.state = state
        tracked.is_written_to(target, version)
        self.observations.recorded_ops += 1
        return result

    def _take_apart(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op whose results are parts of a tensor that count their versions themselves."""
        tracked = self._find(args[0])
        parts = operator.func(*args, **kwargs)
        if tracked is not None:
            tracked.parts.update((Geometry.of(part), version_of(part)) for part in parts)
        return parts

    def _write_stored(
        self,
        index: int,
        operator: Operator,
        tracked: Tracked,
        target: Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run an op that writes to a stored allocation.

        Before it goes out, and while no record reads it, that changes nothing. Afterwards a plan
        avoids it: what went out stays as it was, and what is saved from here on is kept.
        """
        fetch = tracked.state.producer
        assert isinstance(fetch, Fetch)
        fresh = not fetch.is_sent and fetch.source is None
        self._before_writes(operator, args, kwargs, forget=not fresh)
        version = version_of(target)
        result = operator.func(*args, **kwargs)
        if fresh:
            tracked.state.made_at = index
            tracked.is_written_to(target, version)
        return result

    def _before_writes(
        self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], *, forget: bool
    ) -> None:
        """Make records safe from a write that is about to happen.

        A pinned argument is copied for the records that hold it: a plan avoids this, a model that
        left its plan may not.

        Args:
            operator: The op that writes.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            forget: Keep what is written from here on, since the write will not be recorded.
        """
        if not operator.writes:
            return
        hidden = [args[position] for position in operator.hidden_positions(args)]
        for tensor in (*operator.announced_writes(args, kwargs), *hidden):
            if tensor.layout is not torch.strided:
                continue
            key = _storage_key(tensor)
            holders = self._pins.pop(key, None)
            if holders is not None:
                with torch._C._DisableTorchDispatch():
                    _copy_pins(holders, key)
            tracked = self._tracked.get(key)
            if tracked is None:
                continue
            fetch = tracked.state.producer
            if isinstance(fetch, Fetch):
                self._transits[fetch.goal].preserve(fetch)
            if forget:
                del self._tracked[key]

    def _keep(self, index: int, operator: Operator, reason: str) -> None:
        self.observations.kept_drops.append(f"forward op {index}, `{operator.name}`: {reason}")

    # Recording

    def _record(
        self, index: int, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Record:
        """Record a call that is about to happen."""
        record = Record(index, operator, self._turn)
        if operator.random or operator.unknown:
            record.generator = GeneratorState.before(args, kwargs)
        states: dict[State, None] = {}
        hidden = operator.hidden_positions(args)
        held: list[Any] = []
        for position, value in enumerate(args):
            if position == 0 and operator.shape_only and isinstance(value, Tensor):
                held.append(_shape_only(value))
            elif position in hidden:
                held.append(Pin(alias_of(value), None))
            else:
                held.append(self._hold(value, record, states))
        record.args = tuple(held)
        record.kwargs = {key: self._hold(value, record, states) for key, value in kwargs.items()}
        record.states = tuple(states)
        for state in states:
            state.read_by(record)
        return record

    def _hold(self, value: Any, record: Record, states: dict[State, None]) -> Any:
        if isinstance(value, Tensor):
            tracked = self._find(value)
            if tracked is not None:
                states[tracked.state] = None
                fetch = tracked.state.producer
                if isinstance(fetch, Fetch) and not fetch.is_sent and fetch.source is None:
                    # Autograd saves it later, if the plan is right: until then it lives anyway.
                    fetch.source = alias_of(value)
                    fetch.source_version = tracked.version
                return Ref(tracked.state, Geometry.of(value))
            if may_change_unseen(value) or value in self._rewritten:
                return _copied(value)
            self._pins.setdefault(_storage_key(value), []).append(weakref.ref(record))
            return Pin(alias_of(value), version_of(value), shared_digest(value))
        if isinstance(value, (list, tuple)):
            return type(value)(self._hold(item, record, states) for item in value)
        return value

    def _track(self, tensor: Tensor, state: State) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        tracked_by_key = self._tracked

        def forget(reference: weakref.ref[Any]) -> None:
            known = tracked_by_key.get(key)
            if known is not None and known.storage is reference:
                del tracked_by_key[key]

        tracked_by_key[key] = Tracked(state, version_of(tensor), weakref.ref(storage, forget))

    def _find(self, tensor: Tensor) -> Tracked | None:
        """The dropped allocation behind ``tensor``, unless it was written to unseen."""
        if not self._tracked or tensor.layout is not torch.strided:
            return None
        key = _storage_key(tensor)
        tracked = self._tracked.get(key)
        if tracked is not None and not tracked.is_known(tensor):
            fetch = tracked.state.producer
            if isinstance(fetch, Fetch):
                # The next op may write to it, as to a part with a version of its own.
                self._transits[fetch.goal].outgoing.settle(fetch)
            del self._tracked[key]
            self._diverge("it wrote to a dropped tensor outside the ops that the plan watches")
            return None
        if tracked is not None and tensor.dtype is not torch.float32:
            fetch = tracked.state.producer
            if isinstance(fetch, Fetch) and fetch.goal != "offload":
                return None  # its bits mean something else here
        return tracked

    # Saved tensors

    def pack(self, tensor: Tensor) -> Token | Kept:
        """What autograd holds instead of ``tensor``, which it is about to save.

        Raises:
            OffloadError: A stored tensor cannot be written.
        """
        tracked = self._find(tensor) if type(tensor) is Tensor else None
        if tracked is None and self._is_stray(tensor):
            self._take_stray(tensor)
            tracked = self._find(tensor)
        if tracked is not None:
            fetch = tracked.state.producer
            token = Token(tracked.state, tensor)
            self._saved.add(tensor, token)
            self._shape_saves.packed(tensor, token)
            if not isinstance(fetch, Fetch):
                self.observations.dropped_saves += 1
                return token
            if not fetch.is_sent:
                source = _detached(tensor)
                with torch._C._DisableTorchDispatch(), torch.no_grad():
                    self._transits[fetch.goal].outgoing.send(fetch, source)
            if fetch.goal == "offload":
                self.observations.offloaded_saves += 1
            else:
                self.observations.shrunk_saves += 1
            return token
        if self._following and self.index >= self._end and _is_input(tensor):
            self._diverge(f"it went on after forward op {self._end}, where the plan ends")
        return Kept(_detached(tensor), version_of(tensor))

    def _is_stray(self, tensor: Tensor) -> bool:
        """Whether no plan says what becomes of a tensor that this forward has made."""
        if self._strays is None or type(tensor) is not Tensor:
            return False
        if tensor.layout is not torch.strided or self._strays.refusal(tensor.device) is not None:
            return False
        storage = tensor.untyped_storage()
        place = address(storage) if storage.device.type == "cpu" else None
        if place is None or storage.nbytes() < SMALLEST_STRAY or self._outlasts(storage):
            return False
        if may_change_unseen(tensor):
            return False  # backward reads what is there by then
        made = _native.block_event(place)
        if not self._following:
            return made > self._since
        gap = bisect_left(self._gaps, (made, 0)) - 1  # the last one that began before
        return gap >= 0 and made <= self._gaps[gap][1]

    def _take_stray(self, tensor: Tensor) -> None:
        """Have a tensor go elsewhere, as if the plan said so."""
        assert self._strays is not None
        fetch = Fetch("offload", 0, tensor.untyped_storage().nbytes(), tensor.device, NO_HOME)
        fetch.stay = self._strays.stay
        self._track(tensor, State(fetch, self.index, self._turn))


def _say_nothing(where: str) -> None:
    del where


def _nowhere() -> Transit | None:
    return None


def _is_input(tensor: Tensor) -> bool:
    """Whether an op saves ``tensor``, a result of another op, as its input.

    An op makes its own node before it saves inputs, so the node of an input is not the newest one;
    that of an output is.
    """
    node = tensor.grad_fn
    return node is not None and node._sequence_nr() + 1 != torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]


def _detached(tensor: Tensor) -> Tensor:
    """What autograd saves, without the graph: above autograd, the version counter is shared."""
    if tensor.grad_fn is None or tensor.is_inference():
        return tensor
    with torch._C._DisableTorchDispatch():
        return tensor.detach()


def _storage_key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _unfit(types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Why a call with these arguments cannot be recorded; ``None`` when it can."""
    if any(kind is not Tensor for kind in types):
        return "takes a tensor subclass"
    for value in tree_leaves((args, kwargs)):
        if isinstance(value, Tensor) and value.layout is not torch.strided:
            return f"takes a {value.layout} tensor"
    return None


def _shape_only(tensor: Tensor) -> ShapeOnly:
    with torch._C._DisableTorchDispatch():  # no op of the step, for other modes either
        meta = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta", requires_grad=False
        )
    return ShapeOnly(meta, tensor.device)


def _copied(tensor: Tensor) -> Pin:
    """An argument that others may write to before the record runs again."""
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        flat = tensor.as_strided((reach_of(tensor),), (1,)).clone()
        copy = flat.as_strided(tensor.size(), tensor.stride())
    return Pin(copy, version_of(copy))


def _copy_pins(holders: list[weakref.ref[Record]], key: int) -> None:
    """Give the records that hold the storage ``key`` a copy of it, one for all of them."""
    copies: dict[int, torch.UntypedStorage] = {}

    def moved(value: Any) -> Any:
        if isinstance(value, Pin) and value.version is not None:
            if _storage_key(value.tensor) != key:
                return value
            if key not in copies:
                copies[key] = value.tensor.untyped_storage().clone()  # type: ignore[no-untyped-call]
            anchor = torch.empty(0, dtype=value.tensor.dtype, device=value.tensor.device)
            anchor.set_(copies[key])
            return Pin(Geometry.of(value.tensor).over(anchor), 0)
        if isinstance(value, (list, tuple)):
            return type(value)(moved(item) for item in value)
        return value

    for holder in holders:
        record = holder()
        if record is not None and not record.consumed:
            record.args = tuple(moved(value) for value in record.args)
            record.kwargs = {name: moved(value) for name, value in record.kwargs.items()}
