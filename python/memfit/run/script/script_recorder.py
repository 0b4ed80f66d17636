"""The script's own ops written down while they run.

Responsible for recording real ops without ever standing in their way, and for what autograd holds
meanwhile in place of what it saves. Not responsible for where a recorded step begins and ends
(:mod:`memfit.run.script.observed`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from memfit import _native
from memfit.apply.remat.records import require_unchanged
from memfit.apply.slices.deferred import DeferredLogits
from memfit.capture.record.recorder import BACKWARD, Recorder
from memfit.capture.record.saves import SavedTensors, Token
from memfit.run.script.lean_backward import LeanBackward
from memfit.run.script.recomputed import Recomputed
from memfit.run.script.spill import SpillFile
from memfit.run.script.stash import GradientStash
from memfit.tensors.backward_in_place import Lean
from memfit.tensors.shape_saves import blank_like
from memfit.tensors.stand_ins import StandIn
from memfit.tensors.storage import address
from memfit.tensors.versions import counter_of, empty, version_of

SLOW_SECONDS = 10
"""A step is recorded so long without a word."""

PLAIN = frozenset({Tensor, nn.Parameter, nn.Buffer})


class Saved(StandIn):
    """A token of the recording, and what tells whether the tensor was written to since."""

    __slots__ = ("__weakref__", "counter", "is_view", "keeper", "shape", "token", "version")

    def __init__(self, tensor: Tensor, token: Token | Tensor, keeper: SavedTensors) -> None:
        """Stand for a tensor.

        Args:
            tensor: What autograd saves.
            token: What the recording has of it; an alias of its own where it stays in memory.
            keeper: The recording's saved tensors.
        """
        self.token: Token | Tensor | None = token
        self.keeper = keeper
        self.is_view = tensor._is_view()
        self.shape = list(tensor.shape)
        self.version = version_of(tensor)
        self.counter = _counter(tensor, token)

    def require_unchanged(self) -> None:
        """Refuse what autograd itself would refuse.

        Raises:
            RuntimeError: The saved tensor was written to since.
        """
        if self.counter is not None:
            require_unchanged(self.counter, self.version, self.shape)

    def let_go(self) -> Tensor | None:
        """Hold the tensor no longer, where a node can that keeps it in a planned step.

        A view there keeps what it is a view of.

        Returns:
            What looks like it and takes no memory; ``None`` where it stays.
        """
        if self.is_view or self.token is None:
            return None
        if isinstance(self.token, Tensor):
            blank: Tensor | None = blank_like(self.token)
            if self.counter is self.token:
                empty(self.token)  # which goes on counting
        else:
            blank = self.keeper.let_go(self.token)
        if blank is not None:
            self.token = None
        return blank

    def goes(self) -> int:
        """Move the tensor out of memory, to where the recording keeps saved tensors.

        Returns:
            Bytes of its storage; 0 where it stays in memory.
        """
        alias = self.token
        if not isinstance(alias, Tensor) or self.counter is None:
            return 0
        size = int(alias.untyped_storage().nbytes())
        with torch.no_grad():
            token = self.keeper.pack(alias)
        if not isinstance(token, Token) or token.contents is None:
            return 0
        # An op may run now, and below autograd nothing else has the counter of what was saved.
        empty(alias)
        token.counter, token.version = alias, version_of(alias)
        self.token = token
        return size

    def held(self, known: set[int]) -> Iterator[Tensor]:  # noqa: ARG002 - there is but one
        """The tensor, where it is not held in files."""
        tensor = self.token.tensor if isinstance(self.token, Token) else self.token
        if tensor is not None:
            yield tensor


def _counter(tensor: Tensor, token: Token | Tensor) -> Tensor | None:
    """What shares the version counter of a tensor, of which a recording has a token."""
    if isinstance(token, Tensor):
        return None if tensor.is_inference() else token  # it is there in any case
    return counter_of(tensor) if token.counter is None else token.counter


class ScriptRecorder(Recorder):  # type: ignore[no-untyped-call]
    """A recorder of real ops that never stands in their way.

    Attributes:
        problem: Why the step could not be recorded to its end; empty while it could.
        seconds: What each op took.
        scratch: Bytes that each op took inside, above what was there before and after it.
        gradients: Where gradients are meanwhile; ``None`` where they stay.
        lean: Has ops of backward write over the gradient that they read; ``None`` for none.
        since: Number of the event of allocation before which everything was there.
        is_slow: Told once, where a recording takes longer than :data:`SLOW_SECONDS`.
    """

    def __init__(self, root: nn.Module, spill: SpillFile) -> None:
        """Create a recorder.

        Args:
            root: The model; paths are from there.
            spill: Keeps what autograd saves.
        """
        super().__init__(root, None, keep=spill.keep)
        self.problem = ""
        self.seconds: list[float] = []
        self.scratch: list[int] = []
        self.gradients: GradientStash | None = None
        self.lean: LeanBackward | None = None
        self.is_slow: Callable[[], None] = lambda: None
        self._slow_from = time.perf_counter() + SLOW_SECONDS
        self._op_is_reached = False
        self._took = (0.0, 0)
        self.since = _native.last_event()
        self.ledger.came_meanwhile = self._came_meanwhile
        # One for all ops: to end one reads every block that it has seen.
        self._window = _native.AllocationWindow()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one op, and write it down as long as that works."""
        kwargs = kwargs or {}
        if DeferredLogits in types:
            return NotImplemented  # the op comes again, with the logits themselves
        if not self.problem and not PLAIN.issuperset(types):
            self.problem = f"it uses a tensor class, `{_first_other(types).__name__}`"
        if self.problem:
            return func(*args, **kwargs)
        self._op_is_reached = False
        try:
            if self.lean is not None and self.phase is BACKWARD:
                call = self.lean.ops.instead(func, args, kwargs)
                if call is not None and self.lean.writes(call):
                    return self._run_lean(call, types)
            return super().__torch_dispatch__(func, types, args, kwargs)
        except Exception as error:
            if self._op_is_reached:
                raise  # the op's own
            self.problem = _broken(error)
            return func(*args, **kwargs)

    def _run_lean(self, call: Lean, types: Any) -> Any:
        """Run what takes less than an op of backward, and write that down."""

        def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self.problem:
                return func(*args, **kwargs)
            self._op_is_reached = False
            try:
                return Recorder.__torch_dispatch__(self, func, types, args, kwargs)
            except Exception as error:
                if self._op_is_reached:
                    raise  # the op's own
                self.problem = _broken(error)  # what it reads may be gone: the rest goes on
                return func(*args, **kwargs)

        return call.run(run)

    def _run(self, func: Any, facts: Any, args: Any, kwargs: Any, read: Any) -> Any:
        self._op_is_reached = True
        self._window.restart()
        before = _native.counted_bytes()
        start, cpu_start = time.perf_counter(), time.process_time()
        if start > self._slow_from:
            self._slow_from = math.inf
            self.is_slow()
        try:
            result = super()._run(func, facts, args, kwargs, read)
        finally:
            # The smaller one: waiting while others run is not the op's, nor is each thread's time.
            # A clock that ticks rarely shows no CPU time for most ops.
            seconds = time.perf_counter() - start
            seconds = min(seconds, time.process_time() - cpu_start or seconds)
            peak = self._window.peak()[0]
        self._took = (seconds, max(peak - max(before, _native.counted_bytes()), 0))
        return result

    def _write_down(self, *args: Any) -> None:
        try:
            super()._write_down(*args)
            self.seconds.append(self._took[0])
            self.scratch.append(self._took[1])
        except Exception as error:  # noqa: BLE001 - the op has run, and the script goes on
            self.problem = _broken(error)

    def _note_scratch(self, *_args: Any) -> None:
        """Nothing: it is measured, of each op."""

    def _came_meanwhile(self, storage: torch.UntypedStorage) -> bool:
        place = address(storage) if storage.device.type == "cpu" else None
        return place is not None and _native.block_event(place) > self.since

    def holds_graph(self) -> bool:
        """Whether anything that autograd saved is still needed."""
        return any(save.release is None for save in self.saved.saves)

    def pass_ended(self) -> None:
        """Nothing more is recorded; a graph may live on."""

    def gradients_away(self) -> tuple[int, int]:
        """Bytes of all gradients without memory now, and of the largest of them."""
        return (0, 0) if self.gradients is None else self.gradients.away_bytes

    def moves(self, tensor: Tensor, storage: torch.UntypedStorage) -> None:
        """Know a tensor in the other memory that it is about to have.

        Args:
            tensor: The tensor.
            storage: The other memory.
        """
        allocation = self.ledger.find(tensor)
        if allocation is not None:
            self.ledger.stand_in(storage, allocation)

    def pack(self, tensor: Tensor) -> Any:
        """What autograd holds instead of a tensor that it saves."""
        if self.problem or not has_memory(tensor):
            return tensor
        with torch.no_grad():
            return Saved(tensor, self.saved.pack(tensor), self.saved)

    def pack_recomputed(self, tensor: Tensor) -> Tensor | Recomputed:
        """What stands for a tensor that a checkpoint of the script saves when it recomputes."""
        if self.problem or not has_memory(tensor):
            return tensor
        allocation = self.ledger.seen(tensor)
        if self.ledger.static[allocation]:
            return tensor
        with torch.no_grad():
            contents = self.saved.contents(tensor.untyped_storage(), allocation)
            return Recomputed(tensor, self.ledger, allocation, contents)

    def unpack_recomputed(self, held: Any) -> Tensor:
        """The tensor that was recomputed.

        Raises:
            RuntimeError: It was written to since, as autograd itself would say.
        """
        tensor: Tensor = held.tensor() if isinstance(held, Recomputed) else held
        self.saved.unpacked = id(tensor)
        return tensor

    def unpack(self, saved: Any) -> Tensor:
        """The tensor that autograd saved.

        Raises:
            RuntimeError: It was written to since, as autograd itself would say.
        """
        if isinstance(saved, Tensor):
            return saved
        saved.require_unchanged()
        if saved.token is None:
            raise RuntimeError("a saved tensor was asked for again that its node had let go of")
        return self.saved.unpack(saved.token)


def has_memory(tensor: Tensor) -> bool:
    """Whether a tensor has memory; one of zeros that were never written has none.

    Such are tangents that do not change, of forward-mode differentiation.
    """
    is_strided = type(tensor) in PLAIN and tensor.layout is torch.strided
    return is_strided and not tensor._is_zerotensor()


def _first_other(types: Iterable[type]) -> type:
    return next(kind for kind in types if kind not in PLAIN)


def _broken(error: Exception) -> str:
    return f"it cannot be recorded ({type(error).__name__}: {error})"
