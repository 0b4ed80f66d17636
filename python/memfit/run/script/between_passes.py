"""What goes to files while no pass runs, and what the script holds, saves and loads.

Responsible for choosing, at what happens between two passes of a script, which memory waits in
files: gradients, optimizer state, what the script only reads, copies for a checkpoint, what
``torch.load`` reads; and for saying so, once. Not responsible for how each goes
(:mod:`memfit.run.script.gradients_between`, :mod:`memfit.run.script.held_in_files`,
:mod:`memfit.run.script.saved_state`, :mod:`memfit.run.script.loaded`), nor for where passes begin
and end (:mod:`memfit.run.script.script`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from memfit import _native
from memfit.apply.offload.state_view import away_bytes
from memfit.run.script.gradients_between import (
    GRADIENTS_IN_FILES,
    STATE_IN_FILES,
    Begin,
    GradientsBetween,
)
from memfit.run.script.held_in_files import HELD_IN_FILES, MADE_IN_FILES, HeldInFiles
from memfit.run.script.loaded import LOADED_IN_FILES, LoadCall, loadable_bytes
from memfit.run.script.loop import Loop
from memfit.run.script.outside import in_files_bytes
from memfit.run.script.passes import Pass
from memfit.run.script.request import FitRequest
from memfit.run.script.saved_state import SAVED_IN_FILES, copies_in_files
from memfit.run.script.script_recorder import ScriptRecorder
from memfit.tensors.optimizers import gradients_reduced_later


class BetweenPasses:
    """What waits in files between the passes of all loops.

    Attributes:
        gradients: The gradients of all models.
        held: What the script holds and never writes.
        before_steps: What is said at the end of every loop, those to come as well.
    """

    def __init__(
        self,
        request: FitRequest,
        loops: Sequence[Loop],
        optimizers: Iterable[Optimizer],
        budget_bytes: Callable[[], int],
        in_pass: Callable[[], bool],
        let_others_wait: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        """Move nothing yet.

        Args:
            request: Where tensors may go.
            loops: The loops, those to come as well.
            optimizers: The optimizers that have stepped, those to come as well.
            budget_bytes: Tells the budget; 0 while it is not known.
            in_pass: Tells whether a pass is under way.
            let_others_wait: Has the state of optimizers that are not torch's own in files.
            say: Shows a line to the user.
        """
        self._request = request
        self._loops = loops
        self._optimizers = optimizers
        self._budget_bytes = budget_bytes
        self._in_pass = in_pass
        self._let_others_wait = let_others_wait
        self._say = say
        self._copies: RemovableHandle | None = None
        self.gradients = GradientsBetween(request)
        self.held = HeldInFiles(request)
        self.before_steps: dict[str, None] = {}

    @property
    def place(self) -> str:
        """Where what goes may go; empty for nowhere."""
        return self.gradients.place()

    def place_of_state(self) -> str:
        """Where state in no plan may go; empty for nowhere."""
        return "" if "offload_optimizer" in self._request.options.forbid else self.place

    def models(self) -> Iterator[nn.Module]:
        """The models of all loops that the script still has."""
        return (root for loop in self._loops if (root := loop.root) is not None)

    def _trained(self) -> Iterator[nn.Module]:
        """Models that steps may update, with or without an optimizer that memfit knows."""
        return (root for loop in self._loops if loop.may_train and (root := loop.root) is not None)

    # Passes

    def gradients_wait(self, loop: Loop, running: Pass, recorder: ScriptRecorder | None) -> None:
        """Have gradients in files in a pass that counts on it, or that has no plan for them.

        Args:
            loop: Whose pass begins.
            running: The pass.
            recorder: What records it, if anything does.
        """
        moves, budget_bytes = None, self._budget_bytes() or loop.budget.least_bytes()
        if recorder is not None and recorder.gradients is not None:
            recorder.gradients.place, moves = self.place, recorder.moves
            if recorder.gradients.adding:  # it watches those of its own model
                recorder.gradients.watch_others(self._parameters_of_others(loop))
        counts_on_it = any(it.step.gradients_wait for it in loop.plans)
        lacks_plan = recorder is not None and budget_bytes > 0
        if lacks_plan or (running.kind == "planned" and counts_on_it):
            self._gradients_went(self.gradients.go(budget_bytes, self.models(), moves))

    def _parameters_of_others(self, loop: Loop) -> Iterator[Tensor]:
        """Parameters of models that other loops train, or call in their passes."""
        others = (it for it in self._loops if it is not loop)
        models = (model for it in others for model in (it.root, *it.partners))
        for model in models:
            if model is not None and gradients_reduced_later(model) is None:
                yield from model.parameters()

    def pass_ended(self, *, is_observed: bool) -> None:
        """Know of gradients that went in the pass.

        Args:
            is_observed: Whether it was recorded.
        """
        if is_observed and self.gradients.adopt(self.models()):
            self.goes_to(self.place, GRADIENTS_IN_FILES)

    def place_held(self, loop: Loop, inputs: Any) -> None:
        """Have what the script holds in files, if a loop lacks room for its next pass.

        Args:
            loop: Whose pass is about to begin.
            inputs: What its model is called with.
        """
        if not (self.held.count or loop.need.is_of_held()):
            return
        place = self.held.place(loop.budget.least_bytes(), self.models(), inputs, self._trained())
        if place and self._request.may_choose_place and not self.held.is_said:
            self.held.is_said = True
            self._say(f"{HELD_IN_FILES}; they lie in `{place}`; `--no-offload` forbids it")
        if place:
            loop.notes[HELD_IN_FILES] = None

    def in_files_bytes(self, loop: Loop, optimizers: Iterable[Optimizer]) -> int:
        """What is in files beside the step of a loop, which would have it in memory.

        Args:
            loop: The loop.
            optimizers: Those that no plan for its steps knows.
        """
        others = (it for it in self.models() if it is not loop.root)
        return self.held.unwritten_bytes() + in_files_bytes(others, optimizers)

    # Between them

    def evaluation_begins(self, inputs: Any) -> None:
        """Have in files what a call without gradients does not need.

        Args:
            inputs: What the model is called with.
        """
        if self.held.count:
            trained = self._trained()
            self.held.place(self._budget_bytes(), self.models(), inputs, trained, is_pass=False)
        self.begins("evaluation")

    def begins(self, what: Begin, *, least_bytes: int = 0) -> None:
        """Have gradients in files where what begins between steps lacks room, then state.

        Args:
            what: What begins.
            least_bytes: What it is known to take at least.
        """
        models, budget_bytes = self.models(), self._budget_bytes()
        self._gradients_went(
            self.gradients.begins(what, budget_bytes, models, least_bytes=least_bytes)
        )
        if what != "saving":  # of which state is what is copied
            self._state_waits()

    def parameter_returns(self, size_bytes: int) -> bool:
        """Have room for a parameter that comes back to memory.

        Args:
            size_bytes: Its size.

        Returns:
            Whether it lacks room still, with as much above it as was once taken in what runs.
        """
        budget_bytes, more_bytes = self._budget_bytes(), size_bytes
        if not self._in_pass():
            self._gradients_and_state_wait(size_bytes)
            more_bytes += self.gradients.taken_bytes()
        return budget_bytes > 0 and self._has_no_room(more_bytes, budget_bytes)

    def _gradients_and_state_wait(self, more_bytes: int) -> None:
        """Have them in files where what is about to be in memory lacks room."""
        budget_bytes = self._budget_bytes()
        self._gradients_went(self.gradients.make_room(more_bytes, budget_bytes, self.models()))
        self._state_waits(more_bytes)

    def _state_waits(self, more_bytes: int = 0) -> None:
        """Have optimizer state in files where what runs between steps lacks room for it."""
        place = self.place
        if place and self.gradients.lacks_room(self._budget_bytes(), more_bytes):
            live = _native.counted_bytes()
            for loop in self._loops:
                loop.placing.let_state_wait(self._optimizers)
            self._let_others_wait()
            freed = live - _native.counted_bytes()
            self.gradients.others_went(freed)
            if freed > 0:
                self.goes_to(place, STATE_IN_FILES)

    def takes(self, size_bytes: int, makes: bool) -> None:  # noqa: FBT001 - a callback
        """Have in files what need not be in memory where what is made lacks room.

        Args:
            size_bytes: How much is about to be made.
            makes: Whether that may be a model: then those go, too, that no step has used yet.
        """
        budget_bytes = self._budget_bytes()
        if self._in_pass() or not self._has_no_room(size_bytes, budget_bytes):
            return
        self._gradients_and_state_wait(size_bytes)
        if not makes or not self._has_no_room(size_bytes, budget_bytes):
            return
        place = self.held.make_room(budget_bytes)
        if place:
            self.before_steps[MADE_IN_FILES] = None
            self.goes_to(place, MADE_IN_FILES)

    def _has_no_room(self, more_bytes: int, budget_bytes: int) -> bool:
        return _native.counted_bytes() + self.held.written_bytes() + more_bytes > budget_bytes

    # What the script saves, loads and shares

    def saves(self, optimizer: Optimizer) -> None:
        """Have room for copies of the state that is offloaded, or those in files.

        Who saves keeps them, perhaps, in a checkpoint that lives on: then the next step has them.
        """
        copied, budget_bytes, place = away_bytes(optimizer), self._budget_bytes(), self.place
        if not self._in_pass():
            self.begins("saving", least_bytes=copied)
        if copied and place and self._lacks_room(copied, budget_bytes):
            self._copies = copies_in_files(optimizer, place)
            self.goes_to(place, SAVED_IN_FILES)

    def saved(self) -> None:
        """It has been saved."""
        copies, self._copies = self._copies, None
        if copies is not None:
            copies.remove()

    def state_loaded(self, optimizer: Optimizer) -> None:
        """Have the state in memory that was loaded to files."""
        self.held.state_loaded(optimizer)

    def loads(self, call: LoadCall) -> None:
        """Have what is read in files where it, or the next step beside it, lacks room."""
        budget_bytes, place = self._budget_bytes(), self.place
        if self._in_pass() or not (place and budget_bytes):
            return
        size = loadable_bytes(call.file, call.map_location, mmap=call.mmap)
        if size and self._lacks_room(size, budget_bytes):
            call.place = place

    def loaded(self, call: LoadCall) -> None:
        """Know of what was read to files."""
        self.held.loaded(call.mapped)
        if call.mapped:
            self.before_steps[LOADED_IN_FILES] = None
            self.goes_to(call.place, LOADED_IN_FILES)

    def shares(self, tensor: Tensor) -> None:
        """Have in memory what other processes are to write to."""
        self.held.shares(tensor)

    def _lacks_room(self, more_bytes: int, budget_bytes: int) -> bool:
        """Whether so much more is over the budget now, or beside the next step of a loop."""
        is_over = _native.counted_bytes() + more_bytes > budget_bytes > 0
        return is_over or any(loop.need.fails_with(more_bytes) for loop in self._loops)

    # What is said

    def step_went_to(self, place: str, what: str) -> None:
        """Know what a step of another's optimizer left in files.

        Args:
            place: Where.
            what: What is said of it.
        """
        self.gradients.adopt(self.models())
        self.goes_to(place, what)

    def goes_to(self, place: str, what: str) -> None:
        """Say what goes to files, once where memfit chose the place.

        Args:
            place: Where.
            what: What is said of it, here and at the end.
        """
        if self._request.may_choose_place and not self.gradients.is_said:
            self.gradients.is_said = True
            self._say(f"{what}; they lie in `{place}`; `--no-offload` forbids it")
        self.note(what)

    def note(self, what: str) -> None:
        """Say something at the end, of every loop.

        Args:
            what: What.
        """
        for loop in self._loops:
            loop.notes[what] = None

    def _gradients_went(self, place: str) -> None:
        if place:
            self.goes_to(place, GRADIENTS_IN_FILES)
