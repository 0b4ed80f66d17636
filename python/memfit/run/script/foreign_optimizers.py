"""Steps of optimizers that are not torch's own: a script's LARS, a library's Lion.

Plans know nothing of their updates, which nobody may make for them. Responsible for having their
state in mapped files from one step to the next where there is no room for it, and for which of
their steps run with only what each op touches in memory (:mod:`memfit.run.script.demand_paging`).
Not responsible for the mapping (:mod:`memfit.run.script.held_in_files`): what has gone is there
for whoever reads it, and who writes it has pages of his own. So nothing depends on what is taken
for state: whatever tensor an optimizer holds, in ``state`` or elsewhere, may go.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from memfit import _native
from memfit.apply.offload.mapped import (
    OF_GRADIENT,
    Moves,
    bytes_sampled,
    is_alone,
    is_lent,
    may_go,
    to_file,
    to_memory,
)
from memfit.run.script.demand_paging import DemandPaging
from memfit.run.script.place import free_bytes
from memfit.run.script.step_updates import lists_nothing
from memfit.tensors.optimizers import (
    in_memory,
    shared_state,
    state_tensors,
    step_of_others,
    unknown_optimizer,
)
from memfit.tensors.storage import gradient_of
from memfit.torch_versions import offloaded_parameters_refusal
from memfit.track.variables import is_memfit, local_variables

if TYPE_CHECKING:
    from memfit.run.script.loop import Loop

TOUCHED_ONLY = "updates of `{}`, in no prediction, have in memory what each of their ops touches"
"""What is said at the end of steps that ran so."""

STATE_OF_OTHERS = "state of `{}` waits in mapped files between its steps"
"""What is said at the end where that was done."""

_FIRST_TAKES = 3
"""A first step may make so many times what the parameters take: state, and temporaries of all."""

_MARGIN = 1 / 64
"""Part of the budget that stays free: ops take a little inside."""

_DEPTH = 6
"""How deep tensors are looked for in what an optimizer holds."""


@dataclass(slots=True)
class _Known:
    """What is known of a method of an optimizer.

    Attributes:
        took_bytes: Most that it made above what was there; ``None`` before the first time.
        has_shown: Whether it has shown that it writes parameters by torch's ops.
        refusal: Why it runs as it is; empty while it need not.
    """

    took_bytes: int | None = None
    has_shown: bool = False
    refusal: str = ""


@dataclass(slots=True)
class _Step:
    """A step under way, or another method."""

    optimizer: Optimizer
    known: _Known
    live_bytes: int
    window: _native.AllocationWindow = field(default_factory=_native.AllocationWindow)
    touched: DemandPaging | None = None
    moves: Moves | None = None
    was: dict[int, tuple[int, bytes]] = field(default_factory=dict)


class ForeignOptimizers:
    """The steps of all optimizers that memfit makes no updates for."""

    def __init__(
        self,
        loops: Sequence[Loop],
        room: Callable[[], tuple[str, int]],
        leave_out: Callable[[], Moves | None],
        on_done: Callable[[str, str], None],
        on_refusal: Callable[[str], None],
    ) -> None:
        """Know of none yet.

        Args:
            loops: The loops, those to come as well.
            room: Gives the place where files may be, empty for nowhere, and the budget, 0 where
                that is not known.
            leave_out: Called before anything goes; says who is told of tensors that get other
                memory.
            on_done: Told of a place, and of what went there, as a sentence.
            on_refusal: Told why steps run as they are, as a sentence.
        """
        self._loops = loops
        self._room = room
        self._leave_out = leave_out
        self._on_done = on_done
        self._on_refusal = on_refusal
        self._known: weakref.WeakKeyDictionary[Optimizer, dict[str, _Known]] = (
            weakref.WeakKeyDictionary()
        )
        self._under_way: list[tuple[weakref.ref[Optimizer], str]] = []
        self._step: _Step | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether only what ops touch is in memory now."""
        return self._step is not None and self._step.touched is not None

    def is_called(self, optimizer: Optimizer, method: str) -> None:
        """A step has been called, or another method of an optimizer's own.

        Args:
            optimizer: The optimizer.
            method: Name of the method.
        """
        if method == "step":
            self._forget((weakref.ref(optimizer), method))  # has raised, and nobody told of that
        self._under_way.append((weakref.ref(optimizer), method))

    def returned(self, optimizer: Optimizer, method: str) -> None:
        """It is over.

        Args:
            optimizer: The optimizer.
            method: Name of the method.
        """
        self._forget((weakref.ref(optimizer), method))
        if not self._under_way:
            self.pause()

    def _forget(self, called: tuple[weakref.ref[Optimizer], str]) -> None:
        """Take what was called to be over, with all that it has called."""
        places = [place for place, it in enumerate(self._under_way) if it == called]
        if places:
            del self._under_way[places[-1] :]

    def works(self) -> None:
        """What is under way goes on to its updates: its gradients are there."""
        if self._step is not None or not self._under_way:
            return
        of, method = self._under_way[0]
        optimizer = of()
        if optimizer is None or lists_nothing(optimizer) or not _is_of_others(optimizer):
            return
        known = self._known.setdefault(optimizer, {}).setdefault(method, _Known())
        self._step = _Step(optimizer, known, _native.counted_bytes())
        if not self._begin(self._step):
            for tensor in _state(optimizer):
                if _is_in_file(tensor):
                    to_memory(tensor)

    def _begin(self, step: _Step) -> bool:
        """Have only what ops touch in memory from here on, where there is no room for all."""
        place, budget_bytes = self._room()
        if step.known.refusal or not place or not budget_bytes or not is_alone():
            return False
        if offloaded_parameters_refusal() is not None:
            return False
        parameters, gradients = _listed(step.optimizer)
        if any(it.device.type != "cpu" for it in parameters):
            return False
        state = list(_state(step.optimizer))
        mapped = list(filter(_is_in_file, state))
        if not mapped and not _lacks_room(step, parameters, gradients, budget_bytes):
            return False
        if 2 * _bytes((*parameters, *gradients, *state)) > free_bytes(place):
            return False
        for loop in self._loops:
            if loop.placing.has_parameters_elsewhere:
                loop.placing.bring_home()
        moves = step.moves = self._leave_out()
        mapped += [it for it in gradients if _is_in_file(it, OF_GRADIENT)]
        most = budget_bytes - int(budget_bytes * _MARGIN)
        touched = step.touched = DemandPaging(place, most, type(step.optimizer).__name__)
        has_shown = step.known.has_shown
        if not has_shown:
            step.was = {id(it): _as_it_is(it) for it in (*parameters, *state)}
        for tensor in mapped if has_shown else ():
            touched.begin_in_file(tensor, moves)
        touched.manage(gradients, at_once=has_shown, owners=OF_GRADIENT)
        touched.manage((*parameters, *state), at_once=has_shown, once_written=True)
        touched.begin()
        return True

    def let_state_wait(self) -> None:
        """Have state in mapped files until the next step: what runs before lacks room for it."""
        place, _ = self._room()
        for optimizer in list(self._known) if self._step is None and is_alone() else ():
            if self._go(((it, 1) for it in _state(optimizer)), place, None):
                self._on_done(place, STATE_OF_OTHERS.format(type(optimizer).__name__))

    def give_up(self) -> None:
        """The step under way has raised, or nobody plans any more: have all in memory."""
        step, self._step = self._step, None
        self._under_way.clear()
        if step is not None:
            step.window.close()
            if step.touched is not None:
                step.touched.leave()
                step.touched.bring_back()

    def pause(self) -> None:
        """The step under way is over, or calls a model: have all where it is between steps."""
        step, self._step = self._step, None
        if step is None:
            return
        peak_bytes = step.window.peak()[0]
        step.window.close()
        if step.touched is not None:
            step.touched.leave()
            self._end(step, step.touched)
        else:
            took_bytes = peak_bytes - step.live_bytes
            step.known.took_bytes = max(step.known.took_bytes or 0, took_bytes)
            if self._under_way and _have_no_room(self._loops, _bytes(_state(step.optimizer))):
                self.let_state_wait()  # as of LBFGS, whose history grows from closure to closure

    def _end(self, step: _Step, touched: DemandPaging) -> None:
        name = type(step.optimizer).__name__
        place, budget_bytes = self._room()
        parameters, gradients = _listed(step.optimizer)
        pairs = [(it, OF_GRADIENT) for it in gradients]
        state = list(_state(step.optimizer))
        _look_at_writes(step, touched, (*parameters, *state))
        if step.known.refusal:
            touched.bring_back()
            self._on_refusal(f"updates of `{name}` run as they are: `{name}` {step.known.refusal}")
            return
        done = [TOUCHED_ONLY]
        if _have_no_room(self._loops, _bytes(state)):
            touched.stay_in_files([*pairs, *((it, 1) for it in state)], step.moves)
            self._go(((it, 1) for it in state), place, step.moves)
            done.append(STATE_OF_OTHERS)
        touched.stay_in_files(pairs, step.moves)
        if _native.counted_bytes() + touched.away_bytes > budget_bytes:
            self._go(pairs, place, step.moves)
        touched.bring_back()
        for what in done:
            self._on_done(place, what.format(name))

    def _go(self, tensors: Iterable[tuple[Tensor, int]], place: str, moves: Moves | None) -> bool:
        """Have tensors, given with their owners, in mapped files; whether any has gone."""
        has_gone = False
        with contextlib.suppress(OSError, RuntimeError):  # the others stay
            for tensor, owners in tensors if place else ():
                if may_go(tensor) and not is_lent(tensor, owners):
                    to_file(tensor, place, moves)
                    has_gone = True
        return has_gone


def _look_at_writes(step: _Step, touched: DemandPaging, tensors: Iterable[Tensor]) -> None:
    """Know whether all that has changed was written by ops, of those that were there before."""
    if touched.gave_address:
        step.known.refusal = "takes addresses of tensors"
    for tensor in tensors if not step.known.has_shown else ():
        key, _ = now = _as_it_is(tensor)
        was = step.was.get(id(tensor), now)
        if was[0] == key and was != now and key not in touched.written:
            step.known.refusal = "writes tensors by other means than torch's ops"
    step.known.has_shown = True


def _lacks_room(
    step: _Step, parameters: list[Tensor], gradients: list[Tensor], budget_bytes: int
) -> bool:
    took = step.known.took_bytes
    if took is None:
        took = _FIRST_TAKES * _bytes(parameters)
    elsewhere = _bytes(it for it in gradients if _is_in_file(it, OF_GRADIENT))
    return step.live_bytes + elsewhere + took > budget_bytes


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(it.nbytes for it in tensors)


def _listed(optimizer: Optimizer) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters that an optimizer lists, and their gradients."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return parameters, [it for p in parameters if (it := gradient_of(p)) is not None]


def _is_of_others(optimizer: Optimizer) -> bool:
    """Whether nobody may make the updates of an optimizer for it."""
    return bool(
        step_of_others(optimizer) or unknown_optimizer(optimizer) or shared_state(optimizer)
    )


def _have_no_room(loops: Sequence[Loop], state_bytes: int) -> bool:
    """Whether some loop's passes lack room for state."""
    return any(
        loop.refusal
        or (loop.need.fails_with(state_bytes) if loop.plans else loop.need.is_of_state())
        for loop in loops
    )


def _as_it_is(tensor: Tensor) -> tuple[int, bytes]:
    """Which memory a tensor has, and a few of its bytes."""
    return tensor.untyped_storage()._cdata, bytes_sampled(tensor)


def _is_in_file(tensor: Tensor, owners: int = 1) -> bool:
    """Whether a tensor is in a mapped file, and may be in memory again."""
    return may_go(tensor, is_mapped=True) and not is_lent(tensor, owners)


def _state(optimizer: Optimizer) -> Iterator[Tensor]:
    """Tensors that an optimizer holds, in whatever it has, but parameters and gradients."""
    listed = [p for group in optimizer.param_groups for p in group["params"]]
    seen = {id(it) for p in listed for it in (p, gradient_of(p))}
    found: deque[tuple[Any, int]] = deque((it, 0) for it in vars(optimizer).values())
    for state in optimizer.state.values():
        found.extend((it, 0) for it in state_tensors(state))
    found.extend((it, 0) for it in _in_its_step(optimizer))
    while found:
        held, depth = found.popleft()
        if id(held) in seen:
            continue
        seen.add(id(held))
        if isinstance(held, Tensor):
            if not isinstance(held, nn.Parameter):
                yield held
        elif depth < _DEPTH:
            found.extend((it, depth + 1) for it in _inside(held))


def _in_its_step(optimizer: Optimizer) -> list[Any]:
    """What variables of the step under way hold: LBFGS puts its history in its state at the end."""
    found: list[Any] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("self",) and not is_memfit(frame):
            variables = local_variables(frame)
            if variables.get("self") is optimizer:
                found.extend(it for it in variables.values() if it is not optimizer)
        frame = frame.f_back
    return found


def _inside(held: Any) -> list[Any]:
    held = in_memory(held)  # what is offloaded stays so
    if isinstance(held, dict):
        return [*held.keys(), *held.values()]
    if isinstance(held, (list, tuple, set, deque)):
        return list(held)
    if isinstance(held, Optimizer):
        return list(vars(held).values())
    return []
