"""Which checkpoints of the script are undone, so that the plan decides about what they drop.

Responsible for looking at the body of each, run as the script has it, before any is run as an
ordinary forward, and for saying why one is not. Not responsible for running it either way
(:mod:`memfit.capture.record.checkpoints`).

Plain Python runs a body twice, in forward and in backward. An ordinary forward runs it once, so
whatever it does besides computing (a counter, running statistics, a line that it prints) must be
nothing. That is looked at in the first steps, and again where a module trains that did not.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from memfit.apply.remat.randomness import GeneratorState
from memfit.capture.record.checkpoints import Checkpoint, Checkpoints
from memfit.capture.record.effects import Look, Shows, modules_behind
from memfit.capture.record.recorder import FORWARD, Recorder
from memfit.run.script.script_recorder import ScriptRecorder

MOST_LOOKS = 2
"""Times that a body is looked at: what only its first call does happens once anyway."""

MOST_BODIES = 4096
"""Bodies that are remembered; a script with more makes them anew for each step."""

Body = tuple[Any, ...]
"""What tells a body from another: its code, and its modules with their modes."""


@dataclass(slots=True)
class _Known:
    """What is known of a body.

    Attributes:
        looks: How often it was looked at.
        effect: What it does besides computing, as a clause; empty for nothing.
    """

    looks: int = 0
    effect: str = ""


class _Meeting:
    """A checkpoint that is met."""

    def __init__(self, *, undone: bool, ended: Callable[[], None]) -> None:
        self.undone = undone
        self.ended = ended


class ScriptCheckpoints:
    """The checkpoints of a script.

    Attributes:
        undoes: Whether they are undone in the pass under way.
        around_model: Whether the script checkpoints the call of a model that may be planned.
        inside_kept: How many that stay are around what runs now.
    """

    def __init__(self) -> None:
        """See nothing yet."""
        self.undoes = False
        self.around_model = False
        self.inside_kept = 0
        self._problems: dict[str, None] = {}
        self._is_off = False
        self._standing = Checkpoints(self._met)
        self._thread = threading.get_ident()
        self._bodies: dict[Body, _Known] = {}
        self._pass: set[Body] = set()
        self._recorder: ScriptRecorder | None = None
        self._reentrant: list[tuple[int, int, Body]] = []
        self._read: list[tuple[weakref.ref[Tensor], int, Body]] = []
        self._shows: Shows | None = None

    def install(self) -> None:
        """Stand in for torch's checkpoints."""
        self._standing.install()

    def remove(self) -> None:
        """Put torch's back."""
        self._standing.remove()

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        """Leave those alone that are met inside this: what runs there is no step of the script."""
        self._is_off = True
        try:
            yield
        finally:
            self._is_off = False

    # Passes

    def begin_pass(self, *, undoes: bool, recorder: ScriptRecorder | None = None) -> None:
        """A pass begins.

        Args:
            undoes: Whether those that can be are undone.
            recorder: Records it; ``None`` where nothing does.
        """
        self.end_pass()
        self.undoes = undoes
        self._recorder = recorder
        self._standing.hooks = recorder

    def backward_begins(self) -> None:
        """What the bodies of this pass read is as it was, or they compute something else now."""
        for reference, version, body in self._read:
            tensor = reference()
            if tensor is not None and tensor._version != version:
                self._leave(body, "what it reads is written to before backward")
        self._read.clear()

    def end_pass(self) -> None:
        """It is over."""
        self.undoes = False
        self._recorder = self._standing.hooks = None
        self._pass.clear()
        self._reentrant.clear()
        self._read.clear()

    def may_be_undone(self, recorder: Recorder, inputs: set[int]) -> bool:
        """Whether some that stayed in the pass that ends now can be undone in the next.

        Args:
            recorder: The recording of that pass.
            inputs: Allocations of what the model was called with.
        """
        self._keep_shared(recorder, inputs)
        return any(not known.effect for body in self._pass if (known := self._bodies.get(body)))

    def unsettled(self) -> bool:
        """Whether some of the pass that ends now are to be looked at once more."""
        known = [self._bodies[body] for body in self._pass if body in self._bodies]
        return any(one.effect and one.looks < MOST_LOOKS for one in known)

    def notes(self, *, undoes: bool) -> list[str]:
        """What becomes of the checkpoints that the script has itself.

        Args:
            undoes: Whether the plan undoes them.
        """
        undone = ["checkpoints of the script are undone: the plan recomputes instead"]
        stays = [f"a checkpoint of the script stays as it is: {why}" for why in self.reasons()]
        return [*(undone if undoes else ()), *stays]

    def reasons(self) -> list[str]:
        """Why some stay as they are."""
        return list(
            dict.fromkeys(
                [*(it.effect for it in self._bodies.values() if it.effect), *self._problems]
            )
        )

    def around(self) -> tuple[str, bool]:
        """Why a step runs unplanned whose model is called in a checkpoint.

        Returns:
            A clause, and whether it is worth a note: not where the checkpoint is only looked at.
        """
        self.around_model = True
        clause, why = "the script checkpoints the call of a model", self.reasons()
        return f"{clause}, and the checkpoint stays as it is: {why[0]}" if why else clause, bool(
            why
        )

    def _keep_shared(self, recorder: Recorder, inputs: set[int]) -> None:
        """Have those stay whose parameters are used elsewhere too.

        With reentrance each body adds its gradient to a parameter's by itself; an ordinary forward
        adds them up first.
        """
        places: dict[int, set[int]] = {}
        for index, op in enumerate(recorder.ops):
            if op.phase is not FORWARD:
                continue
            inside = (
                i for i, (start, end, _) in enumerate(self._reentrant) if start <= index < end
            )
            place = next(inside, -1)
            for value in op.reads:
                allocation = recorder.ledger.values[value][0]
                if recorder.ledger.static[allocation] and allocation not in inputs:
                    places.setdefault(allocation, set()).add(place)
        shared = {place for found in places.values() if len(found) > 1 for place in found}
        for place, (_, _, body) in enumerate(self._reentrant):
            if place in shared:
                self._leave(body, "it has a graph of its own and shares a tensor with other parts")

    # Checkpoints

    def _met(self, seen: Checkpoint) -> _Meeting | None:
        if self._is_off or threading.get_ident() != self._thread:
            return None
        try:
            return self._meeting(seen)
        except Exception as error:  # noqa: BLE001 - the script must run as it would without memfit
            self._problems[f"it cannot be looked at ({type(error).__name__}: {error})"] = None
            return None

    def _meeting(self, seen: Checkpoint) -> _Meeting:
        body = _body(seen)
        known = self._bodies.get(body)
        if known is None:
            if len(self._bodies) >= MOST_BODIES:
                self._bodies.clear()
            known = self._bodies[body] = _Known()
        if seen.refusal:
            known.looks, known.effect = MOST_LOOKS, seen.refusal
        if known.looks == 0 or (known.effect and known.looks < MOST_LOOKS):
            return self._look(seen, body)
        around = self.around_model and self._recorder is None and not seen.reentrant
        if not known.effect and (self.undoes or around) and not self.inside_kept:
            return _Meeting(undone=True, ended=lambda: None)
        return self._keep(body, seen)

    def _keep(
        self, body: Body, seen: Checkpoint, then: Callable[[], None] | None = None
    ) -> _Meeting:
        """Leave one as it is."""
        self._pass.add(body)
        recorder = self._recorder
        start = recorder.ledger.now if recorder is not None else 0
        regions = recorder is not None and recorder.modules.recording
        if recorder is not None:
            # No module call in there is one to watch: what is saved is not memfit's.
            recorder.modules.recording = False
        self.inside_kept += 1

        def ended() -> None:
            self.inside_kept -= 1
            if recorder is not None:
                recorder.modules.recording = regions and recorder.phase is FORWARD
                if seen.reentrant:
                    self._reentrant.append((start, recorder.ledger.now, body))
            if then is not None:
                then()

        return _Meeting(undone=False, ended=ended)

    def _look(self, seen: Checkpoint, body: Body) -> _Meeting:
        """Leave one as it is, and look what its body does."""
        given = (seen.args, seen.kwargs)
        drawn = _generators(given)
        before = Look(seen.body, given)
        own = Shows() if self._shows is None else None  # of one inside another the outer one looks
        self._shows = shows = self._shows or own

        def ended() -> None:
            if own is not None:
                own.end()
                self._shows = None
            assert shows is not None
            after = Look(seen.body, given)
            effect = shows.found or before.difference(after)
            if not effect and not seen.keeps_random_state and drawn != _generators(given):
                effect = "it draws other random numbers in backward"
            if not effect and seen.reentrant and before.graphs:
                effect = "it uses a tensor with a graph that is not among its arguments"
            known = self._bodies.setdefault(body, _Known())
            known.looks, known.effect = known.looks + 1, effect
            self._read += [(weakref.ref(t), version, body) for t, version in after.tensors()]

        return self._keep(body, seen, _quietly(ended, self._problems))

    def _leave(self, body: Body, reason: str) -> None:
        """Have a body stay for good."""
        known = self._bodies.get(body)
        if known is not None:
            known.looks, known.effect = MOST_LOOKS, reason


def _quietly(told: Callable[[], None], problems: dict[str, None]) -> Callable[[], None]:
    """A function that never raises: it is called inside the script's forward."""

    def tell() -> None:
        try:
            told()
        except Exception as error:  # noqa: BLE001 - see above
            problems[f"it cannot be looked at ({type(error).__name__}: {error})"] = None

    return tell


def _body(seen: Checkpoint) -> Body:
    modules = modules_behind(seen.body, (seen.args, seen.kwargs))
    function: Any = seen.body
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(function, "__code__", type(function))
    return id(code), seen.reentrant, *((id(module), module.training) for module in modules)


def _generators(given: Any) -> list[GeneratorState]:
    """States of the random generators that a body may draw from."""
    devices: Iterable[torch.device] = {
        torch.device("cpu"): None,
        **{leaf.device: None for leaf in tree_leaves(given) if isinstance(leaf, Tensor)},
    }
    return [GeneratorState.of(device) for device in devices if device.type != "meta"]
