"""The training loops of an unmodified script, found and fitted while it runs.

Responsible for where passes begin and end, for saying what was found and done, and for the record
at the end. Not responsible for how a pass runs (:mod:`memfit.run.script.loop`), nor for what waits
in files between two (:mod:`memfit.run.script.between_passes`).

A pass begins when a model is called that has trainable parameters, or with something that is
trained, by no other model and with gradients on; or with an op on what an optimizer updates. Where
that is only a part of what an optimizer updates, as in a method of the model's own, the pass is of
the whole. It goes on through whatever the script computes, calls of other models included, to the
first ``backward()``; it ends when an optimizer has updated the model, at the end of a backward in
which optimizers stepped, or with the next pass. That may begin before any backward, once nothing
can be differentiated through what the models of this one returned. A step without an optimizer (the
script updates parameters itself) ends with the next call of a model.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memfit import _native
from memfit.answers import Plan
from memfit.apply.allocator_settings import keep_in_one_piece
from memfit.apply.offload.mapped import Moves
from memfit.apply.offload.parameters import BEFORE_RETURN
from memfit.apply.slices.weight_copies import keep_weights
from memfit.run.script.between_passes import BetweenPasses
from memfit.run.script.checkpoints import ScriptCheckpoints
from memfit.run.script.contexts import in_node, transform
from memfit.run.script.current_pass import KEEPS_GRAPH, CurrentPass, recorder_of
from memfit.run.script.foreign_optimizers import ForeignOptimizers
from memfit.run.script.frozen import FrozenAway
from memfit.run.script.fused import USED_GRADIENTS
from memfit.run.script.gone_models import GoneModels
from memfit.run.script.lean_ops import LeanOps
from memfit.run.script.lease import Room
from memfit.run.script.loop import Loop
from memfit.run.script.loop_report import found, of_one_step, record, recorded_slowly, unplanned
from memfit.run.script.loose_updates import LOOSE_STATE, LooseUpdates
from memfit.run.script.overflow import Overflow, may_hold
from memfit.run.script.parameter_uses import ParameterUses
from memfit.run.script.passes import ObservedPass
from memfit.run.script.place import folder_of_files
from memfit.run.script.placing import updated_by
from memfit.run.script.planned_step import Call
from memfit.run.script.request import FitRequest
from memfit.run.script.roots import Roots, Together, makes_graph
from memfit.run.script.signals import Signals
from memfit.run.script.step_updates import StepUpdates
from memfit.run.script.strict import Strict
from memfit.run.script.trained_by_hand import ARE_OTHERS, TrainedByHand
from memfit.run.script.turns import Turns
from memfit.run.script.untrained import UntrainedModels
from memfit.run.script.uses import Uses
from memfit.run.script.verdict import BudgetKept, Over
from memfit.track.live_objects import instances
from memfit.track.steps import STEPS

_WORTH_A_LOOK = 3
"""What the script takes between steps is seen where this part of the budget is live, and above."""


class AdoptedScript:
    """What ``memfit run --budget`` does to a script."""

    def __init__(self, request: FitRequest, room: Room, say: Callable[[str], None]) -> None:
        """Wait for the script.

        Args:
            request: The budget, and which plans are allowed.
            room: What was leased for the script.
            say: Shows a line to the user.
        """
        self._request = request
        self._room = room
        self._say = say
        self._kept = BudgetKept(request.budget, say)
        self._strict = Strict(say) if request.is_strict else None
        self._checkpoints = ScriptCheckpoints()
        self._has_compiled = False
        self._loops: list[Loop] = []
        self._current: CurrentPass | None = None
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._made: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._roots = Roots()
        self._by_hand = TrainedByHand()
        self._uses = Uses()
        self._turns = Turns()
        self._parameter_uses = ParameterUses(
            self._may_begin,
            lambda *of: self._signals.tell(self._is_used, *of),
            lambda *of: self._signals.tell(self._files.takes, *of),
        )
        self._files = BetweenPasses(
            request,
            self._loops,
            self._optimizers,
            lambda: self._kept.budget_bytes,
            lambda: self._current is not None,
            lambda: self._of_others.let_state_wait(),  # noqa: PLW0108 - it comes later
            say,
        )
        self._signals = Signals(self, self._files)
        self._loose = LooseUpdates(
            StepUpdates(
                request,
                lambda: room.within(self._kept.budget_bytes or request.budget),
                lambda place: self._files.goes_to(place, LOOSE_STATE),
                self._say,
            )
        )
        self._of_others = ForeignOptimizers(
            self._loops,
            lambda: (self._files.place_of_state(), self._kept.budget_bytes),
            self._leave_out_updates,
            self._files.step_went_to,
            self._files.note,
        )
        self._frozen = FrozenAway()
        self._lean_ops = LeanOps(request)
        self._overflow = Overflow(request)
        self._in_pieces, self._in_place = contextlib.ExitStack(), contextlib.ExitStack()
        self._in_update = contextlib.ExitStack()
        self._said: set[str] = set()
        self._evaluation = contextlib.ExitStack()
        self._untrained = UntrainedModels(request)
        self._gone = GoneModels()
        self._stepping = 0
        self._steps_inside = False
        self._thread = threading.get_ident()
        self._refusal = ""

    def begin(self) -> None:
        """Watch the script; torch has just been imported."""
        keep_in_one_piece()
        self._signals.install()
        self._kept.pass_ended(torch.device("cpu"))
        self._hold(torch.device("cpu"))
        self._overflow.begin(self._kept.budget_bytes)
        self._checkpoints.install()
        BEFORE_RETURN.append(self._files.parameter_returns)
        self._watch_uses()

    # What the script does

    def called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a pass, or go on with one; until it returns, what is elsewhere is in use."""
        self._of_others.pause()
        self._pass_of(module, args, kwargs)
        self._uses.begin(self._loops)

    def gave(self, result: Any) -> None:
        """Watch what may be differentiated through."""
        if self._current is not None and self._current.running.in_forward:
            self._current.wanted.returned(result)

    def returned(self) -> None:
        """The model has returned, or raised."""
        self._evaluation.close()
        self._uses.end()

    def _pass_of(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch._C._current_autograd_node() is not None or torch._C._is_tracing():
            return  # a user's checkpoint, or TorchScript looking at the model
        if next(module.parameters(), None) is None:
            return
        current = self._current
        if current is not None and not current.running.in_forward:
            self._complete_without_optimizer(current)
            current = self._current
        evaluates = not torch.is_grad_enabled()
        if not evaluates and not makes_graph(module, args, kwargs):
            if under := transform():  # what it batches asks for no gradient, as of an ensemble
                self._say_once(f"`{type(module).__name__}` runs unplanned: the script {under}")
            return
        root, path = self._roots.of(module, self._made)
        call = Call(module, (args, kwargs), path)
        if evaluates:
            self._evaluate(root, call)
        elif current is None or not current.goes_on_with(root, module):
            self._begin_pass(root, call)

    def _watch_uses(self) -> None:
        """Have a step begin with the use of a parameter, where one did or may do.

        Before the first step models are made, and between steps weights are looked at: what that
        takes is seen as well.
        """
        budget_bytes = self._kept.budget_bytes
        steps = not self._made <= self._optimizers or any(it.beginning_uses for it in self._loops)
        steps = steps or self._by_hand.is_found
        makes = not self._loops and budget_bytes > 0
        is_tight = _native.counted_bytes() > budget_bytes / _WORTH_A_LOOK > 0
        looks = is_tight and self._loops and self._current is None
        if (steps or makes or looks) and not (self._has_compiled or self._refusal):
            self._parameter_uses.watch(begin=steps or makes)
        else:
            self._parameter_uses.leave()

    def _may_begin(self) -> bool:
        """Whether an op of the script may begin a pass."""
        in_forward = self._current is not None and self._current.running.in_forward
        return not (in_forward or self._signals.are_ops_own)

    def _is_used(self, used: Tensor, op: str, given: Any) -> None:
        """An op is about to run on a parameter, and no forward is under way."""
        if torch._C._current_autograd_node() is not None or torch._C._is_tracing():
            return
        current, use = self._current, (id(used), op)
        if not torch.is_grad_enabled():
            if current is not None and use in current.loop.beginning_uses:
                self._complete_without_optimizer(current)  # an evaluation begins
            return
        root = self._by_hand.of(used) or self._roots.of_parameter(used, self._made)
        if root is None:
            return
        if current is not None:
            loop = current.loop
            if not loop.is_of(root) or use not in loop.beginning_uses:
                return  # a look at what a step is about to update
            self._complete_without_optimizer(current)
        self._begin_pass(root, Call.of_use(root, given))
        assert self._current is not None, "it has just begun"
        self._current.loop.beginning_uses.add(use)

    def _begin_pass(self, root: nn.Module, call: Call) -> None:
        self._end_pass()
        self._parameter_uses.leave()  # first: it would see all that memfit looks at
        self._gone.pass_begins()
        call = self._turns.told_apart(call, root)
        self._files.gradients.pass_begins()
        loop = self._loop_of(root)
        was_refused = bool(loop.refusal)
        known = self._known(loop)
        unused = self._made.difference(self._optimizers)
        loop.has_rival = bool(unused and updated_by(root, unused))
        if loop.need.is_of_state():
            idle = self._optimizers.difference(loop.placing.planned_with(known))
            for other in self._loops:
                if other is not loop:
                    other.placing.let_state_go(idle)
                    other.need.is_of_others = not loop.need.keeps()
            if self._loose.let_state_go(idle, self._loops):
                loop.notes[LOOSE_STATE] = None
        self._files.place_held(loop, call.inputs)
        if loop.budget.is_share:
            others = self._optimizers.difference(loop.placing.planned_with(known))
            loop.budget.in_files_bytes = self._files.in_files_bytes(loop, others)
        self._in_pieces.enter_context(self._lean_ops_of(loop))
        in_closure = self._stepping > 0
        running = loop.begin(call, known, in_closure=in_closure)
        self._kept.resolve(loop.budget.bytes())
        self._kept.pass_begins()  # by now, state and parameters are where the pass wants them
        if loop.in_the_way or (loop.refusal and not was_refused):
            self._say_unplanned(loop)
        self._current = CurrentPass(loop, root, call, running, in_closure=in_closure)
        recorder = recorder_of(self._current)
        if recorder is not None:
            recorder.lean = loop.lean_backward
            recorder.is_slow = lambda: self._say_once(recorded_slowly(loop))
        self._overflow.pass_begins(self._kept.budget_bytes, loop.device, fits=running.fits)
        self._files.gradients_wait(loop, running, recorder)
        self._uses.forward_begins(self._loops)

    def _known(self, loop: Loop) -> Iterable[Optimizer]:
        """Those that may step for a loop: until a step of its is over, all that were made.

        Their state may be there, read from a file.
        """
        is_known = loop.has_stepped and loop.placing.updated_by(self._optimizers)
        return self._optimizers if is_known else self._made

    def _lean_ops_of(self, loop: Loop | None) -> contextlib.AbstractContextManager[None]:
        """What a pass, or another call of a model, runs inside."""
        if loop is None or loop.refusal or loop.device.type != "cpu":
            return contextlib.nullcontext()
        loop.cut_ops.pass_begins()
        loop.lean_backward.pass_begins()
        return self._lean_ops.in_pieces(loop.budget.bytes(), loop.notes, loop.cut_ops)

    def _evaluate(self, root: nn.Module, call: Call) -> None:
        """A model is about to be called without gradients."""
        # Torch's layers run other ops where a function mode is on.
        self._evaluation.enter_context(self._parameter_uses.aside())
        if self._current is not None and self._current.running.in_forward:
            return
        loop = next((loop for loop in self._loops if loop.is_of(root)), None)
        if self._current is None:
            if loop is None and self._untrained.is_new(root):
                self._files.held.look_anew()  # at a teacher, say, that was made just now
            self._give_room_between(call.inputs)
        if loop is not None:
            if self._current is None:
                self._evaluation.enter_context(self._lean_ops_of(loop))
            in_step = self._current is not None
            self._evaluation.enter_context(loop.evaluation(call, in_step=in_step))
            self._files.gradients.parameters_went()
        elif self._current is None and not self._refusal:
            self._evaluation.enter_context(self._untrained.forward(call, self._kept.budget_bytes))

    def _give_room_between(self, inputs: Any) -> None:
        """Have elsewhere what a call between passes does not need, where a loop lacks room."""
        self._files.evaluation_begins(inputs)
        if any(loop.need.is_of_state() for loop in self._loops):
            for loop in self._loops:
                loop.placing.let_state_go(self._optimizers)
            self._loose.let_state_go(self._optimizers, self._loops)

    def failed(self) -> None:
        """The model raised: its pass is over."""
        self._end_pass()

    def copies(self) -> None:
        """Leave nothing on a module that is copied: what watches a forward stands on its calls."""
        running = None if self._current is None else self._current.running
        if running is not None and running.in_forward and not running.leaves_modules():
            self._end_pass()

    def traces(self) -> None:
        """Have all parameters in memory."""
        if self._current is not None and self._current.running.in_forward:
            self._end_pass()
        for loop in self._loops:
            loop.placing.leave_plan()

    def forbids_watching(self, why: tuple[str, str]) -> None:
        """End a forward that stands on modes and on hooks of saved tensors."""
        current = self._current
        if current is None or not current.running.in_forward or current.running.leaves_hooks():
            return
        self._end_pass()
        self._leave_alone(current.loop, why)

    def backward_begins(
        self,
        results: tuple[Tensor, ...],
        *,
        accumulates: bool,
        creates_graph: bool,
        inputs: tuple[Any, ...],
    ) -> None:
        """End the forward of the pass; until backward has run, what is elsewhere is in use.

        Gradients asked for on the way, as a penalty on them is computed from, are part of forward.
        Those of the model's parameters are a backward, with updates by hand or by an optimizer.
        """
        keep_weights(lambda: folder_of_files(self._request))
        self._of_others.pause()
        if accumulates and not inputs:
            self._look_for_training_by_hand(results)
        model = None if self._current is None or not inputs else self._current.loop.root
        own = set() if model is None else set(map(id, model.parameters()))
        of_parameters = any(id(it) in own for it in inputs)
        if accumulates:
            recorder = recorder_of(self._current)
            if recorder is None or recorder.gradients is None:
                self._files.gradients.backward_begins(None)
            else:
                self._files.gradients.backward_begins(recorder.moves, recorder.gradients.adding)
        if (accumulates or of_parameters) and not creates_graph:
            self._forward_ended()
        elif self._current is not None:
            self._current.running.asks_for_gradients()
            self._current.loop.differentiates_more = True
            self._current.keeps_graph = accumulates or self._current.keeps_graph
        self._uses.begin(self._loops)
        current = self._current
        if current is not None and not current.running.in_forward:
            lean = current.loop.lean_backward
            lean.ops.begins()
            if recorder_of(current) is None:
                # On top: it counts who has a gradient where torch's engine calls.
                self._in_place.enter_context(lean.planned())

    def _look_for_training_by_hand(self, results: tuple[Tensor, ...]) -> None:
        """See what a backward is of that no model leads to, where no optimizer was made."""
        current = self._current
        if self._made or any(not isinstance(it.root, Together | None) for it in self._loops):
            return
        if current is not None:
            if current.running.in_forward or self._by_hand.is_again(results):
                return
            self._complete_without_optimizer(current)
        self._kept.backward_by_hand()
        self._by_hand.differentiated(results)
        if self._by_hand.are_others:
            self._say_once(ARE_OTHERS)
        self._watch_uses()

    def _forward_ended(self) -> None:
        current = self._current
        if current is None:
            return
        if current.running.in_forward and current.wanted.is_nothing():
            current.loop.differentiates_more = True
        self._checkpoints.backward_begins()
        if current.running.in_forward:
            self._uses.end()
        current.running.backward_begins()
        current.loop.backward_begins(current.running)
        recorder, model = recorder_of(current), current.loop.root
        if recorder is not None and model is not None:
            place = self._files.place
            least = current.loop.budget.least_bytes()
            self._frozen.backward_begins(model, least, place, recorder.moves)

    def backward_ended(self) -> None:
        """Go on with the pass."""
        self._in_place.close()
        recorder = recorder_of(self._current)
        self._frozen.backward_ended(None if recorder is None else recorder.moves)
        if self._current is not None and not self._current.running.in_forward:
            self._current.loop.backward_ended()
            self._current.running.backward_ended()
            self._in_pieces.close()
            self._watch_uses()
        self._uses.end()
        self.optimizer_works()  # in a closure
        if self._steps_inside and not in_node():
            self._steps_inside = False
            if self._current is not None:
                self._complete(self._current, None)

    def optimizer_made(self, optimizer: Optimizer) -> None:
        """Know it, and let go of models that the script may have let go of: others may come."""
        self._made.add(optimizer)
        self._files.held.optimizer_made(optimizer)
        self._roots.forget()
        self._watch_uses()
        if self._current is None:
            self._loose.rest()
            for loop in self._loops:
                loop.rest()
            self._gone.collect(self._loops)

    def optimizer_begins(self, optimizer: Optimizer) -> None:
        """Know the optimizer, which is about to step."""
        if not STEPS.closure_is_first:  # else once it has run: it may clear gradients
            USED_GRADIENTS.require_cleared(optimizer)
        self._optimizers.add(optimizer)
        self._stepping += 1
        self._of_others.is_called(optimizer, "step")

    def updates(self, optimizer: Optimizer) -> None:
        """Make the updates of a step whose state is elsewhere."""
        if STEPS.closure_is_first:
            USED_GRADIENTS.require_cleared(optimizer)
        current = None if in_node() else self._current  # a hook's step is part of backward
        running = None if current is None else current.running
        self._in_update.enter_context(self._kept.update_of(optimizer))
        for loop in self._loops:
            own = running if current is not None and current.loop is loop else None
            loop.step_begins(optimizer, own)
        recorder = recorder_of(current)
        away = (0, 0) if recorder is None else recorder.gradients_away()
        ended = None if current is None else current.loop
        is_of_step = recorder is not None and running is not None and not running.in_forward
        if (ended is None or is_of_step) and not self._of_others.is_under_way:
            self._loose.recorded_step_begins(optimizer, ended, self._loops, away[0])
        if self._loose.step_begins(optimizer, self._loops, away):
            for loop in self._loops:
                loop.notes[LOOSE_STATE] = None

    def optimizer_works(self) -> None:
        """It goes on to its updates, unless they were made."""
        if not self._has_compiled:
            self._of_others.works()

    def method_begins(self, optimizer: Optimizer, name: str) -> None:
        """A method of the optimizer's own may use as much as a step."""
        self._of_others.is_called(optimizer, name)
        self.optimizer_works()

    def method_ended(self, optimizer: Optimizer, name: str) -> None:
        """It is over."""
        self._of_others.returned(optimizer, name)

    def _leave_out_updates(self) -> Moves | None:
        """Record nothing of the step that is about to begin, whose memory comes and goes."""
        running = None if self._current is None else self._current.running
        recorder = recorder_of(self._current)
        if recorder is None or not isinstance(running, ObservedPass) or running.in_forward:
            return None
        running.leave_out_updates()
        if recorder.gradients is not None:
            recorder.gradients.close()
        return recorder.moves

    def optimizer_ended(self, optimizer: Optimizer) -> None:
        """End the pass; of models trained in turn, another one may have been updated."""
        self._in_update.close()
        self._of_others.returned(optimizer, "step")
        self._loose.step_ended()
        for loop in self._loops:
            loop.step_ended()
        self._stepping = max(self._stepping - 1, 0)
        current = self._current
        self._steps_inside = in_node()
        if self._steps_inside:  # the pass goes on, to the end of backward
            if current is not None:
                current.loop.placing.is_loose = True
            return
        if current is None:
            return
        if not current.running.in_forward:
            self._complete(current, optimizer)
            if self._current is None:
                self._files.begins("step")
        elif current.keeps_graph and current.loop.placing.updated_by([optimizer]):
            self._end_pass()
            self._leave_alone(current.loop, KEEPS_GRAPH)

    def compiled_runs(self) -> None:
        """Leave a step alone in which something compiled runs, but for its optimizer's own."""
        self._has_compiled = True
        self._parameter_uses.leave()  # the compiler looks into modes
        self._of_others.pause()
        for loop in self._loops:
            loop.compiled_runs()
        current = self._current
        if current is not None and self._stepping and not current.running.in_forward:
            if isinstance(current.running, ObservedPass):
                current.running.leave_out_updates()
            return
        if current is None or (
            current.running.kind != "observed" and not current.running.in_forward
        ):
            return
        self._end_pass()
        self._refuse(current.loop, "something that `torch.compile` compiled runs in it")

    def broke(self, error: Exception) -> None:
        """Leave the script alone after a failure of memfit."""
        self._give_up(f"memfit failed ({type(error).__name__}: {error})")

    def end(self, error: BaseException | None) -> dict[str, Any]:
        """The script is over.

        Args:
            error: What ended it, if anything did.

        Returns:
            What was found and done, in the program's words.
        """
        stopped = self._strict is not None and self._strict.ended(error)
        if self._current is not None and not self._current.running.in_forward:
            self._complete_without_optimizer(self._current)
        self._signals.remove()
        self._of_others.give_up()
        self._checkpoints.remove()
        BEFORE_RETURN.remove(self._files.parameter_returns)
        self._end_pass()
        self._parameter_uses.leave()
        for loop in self._loops:
            loop.end()
        for note in (*self._untrained.notes(), *self._overflow.end()):
            if self._loops:
                self._loops[0].notes[note] = None
            else:
                self._say(note)
        return record(
            self._request, self._loops, self._kept, stopped=stopped, refusal=self._refusal
        )

    # Passes

    def _loop_of(self, root: nn.Module) -> Loop:
        for loop in self._loops:
            if loop.is_of(root):
                return loop
        for other in self._loops:
            other.placing.bring_home()  # graphs that it made may be used by the new one
            other.rest()
        again = next((it for it in self._loops if it.goes_on_with(root, self._made)), None)
        if again is not None:
            self._files.held.look_anew()
            return again
        if self._loops and self._loops[-1].was_for_one_step(root):
            self._say_once(of_one_step(root))
        loop = Loop(
            root,
            self._request,
            self._room,
            self._planned,
            lambda loop: self._signals.tell(self._model_went, loop),
            self._say_once,
            self._checkpoints,
            self._strict,
        )
        self._loops.append(loop)
        self._files.held.look_anew()
        loop.notes.update(self._files.before_steps)
        if self._has_compiled:
            loop.compiled_runs()
        if loop.refusal:
            self._room.whole()  # nobody knows what its steps take
            self._say_unplanned(loop)
        return loop

    def _model_went(self, loop: Loop) -> None:
        """The script has let go of a model: so does memfit, and its optimizer goes with it.

        Not while backward may come, which needs what the pass has put elsewhere.
        """
        current = self._current
        if current is not None and current.loop is loop:
            is_over = current.running.in_forward and current.is_given_up()
            is_here = threading.get_ident() == self._thread and current.running.is_at_rest
            if not (is_over and is_here):
                return  # its step, or the next pass, ends it
            self._end_pass()
        if loop.placing.has_parameters_elsewhere:
            return  # the script may hold some of them, in a graph as well
        loop.rest()
        self._loose.rest()

    def _complete(self, current: CurrentPass, stepped: Optimizer | None) -> None:
        """A step is complete: an optimizer has stepped, or there is none."""
        loop, running = current.loop, current.running
        if loop.root is None:  # the script has let go of the model since forward
            loop.went_in_step = True
            self._end_pass()
            self._model_went(loop)
            return
        optimizers = loop.placing.updated_by(self._optimizers)
        if stepped is not None:
            self._turns.ended(current.key, stepped, loop.root)
            if stepped not in optimizers:
                optimizers.append(stepped)
        was_refused = bool(loop.refusal)
        self._learn(current, optimizers, stepped)
        loop.counts[running.kind].steps += 1
        self._end_pass(is_step=True)
        if loop.refusal and not was_refused:
            self._say_unplanned(loop)

    def _learn(
        self, current: CurrentPass, optimizers: list[Optimizer], stepped: Optimizer | None
    ) -> None:
        """Know who updates the model, and take over what was recorded, if the pass was."""
        loop, running = current.loop, current.running
        loop.optimizers.update((type(optimizer).__name__, None) for optimizer in optimizers)
        if isinstance(running, ObservedPass) and running.kind == "observed":
            own = loop.placing.planned_with(self._known(loop))
            if own and stepped is not None and stepped not in own:
                # As a generator's pass in which its discriminator is trained, and it is not.
                loop.placing.is_loose, own = True, []
            loop.finish(running, current.key, own)

    def _complete_without_optimizer(self, current: CurrentPass) -> None:
        """Backward is over and a model is called: a step, if there is no optimizer to wait for.

        In the step of one that calls its closure over and over, as LBFGS does, each call is like
        the next: the second runs by a plan.
        """
        loop = current.loop
        if loop.has_optimizer is None and loop.root is not None:
            loop.has_optimizer = bool(loop.placing.updated_by(instances(Optimizer)))
        if not loop.has_optimizer:
            self._complete(current, None)
        elif current.in_closure and self._stepping and loop.root is not None:
            self._learn(current, loop.placing.updated_by(self._optimizers), None)

    def _end_pass(self, *, is_step: bool = False) -> None:
        current, self._current = self._current, None
        if current is not None:
            self._checkpoints.end_pass()
            if current.running.in_forward:
                self._uses.end()
            loop, kind = current.loop, current.running.kind
            if not current.running.in_forward:
                loop.recordings.forward_was(current.key, given_up=False)
            elif current.is_given_up():
                might_train = loop.may_train
                loop.recordings.forward_was(current.key, given_up=True)
                if might_train and not loop.may_train:
                    self._files.held.look_anew()  # at a teacher, say
            peak = current.running.end()
            self._files.pass_ended(is_observed=isinstance(current.running, ObservedPass))
            self._in_pieces.close()
            loop.counts[kind].passed(peak, is_step=is_step)
            loop.passed(kind, max(peak, self._overflow.pass_ended()), is_step=is_step)
            self._kept.ended(Over(kind, peak, *loop.why_over(current.running, peak)))
            self._kept.pass_ended(loop.device)
            self._watch_uses()

    def _say_unplanned(self, loop: Loop) -> None:
        self._say_once(unplanned(loop))

    def _say_once(self, line: str) -> None:
        """Say something of however many loops, or models that are made one after another."""
        if line not in self._said:
            self._said.add(line)
            self._say(line)

    def _leave_alone(self, loop: Loop, why: tuple[str, str]) -> None:
        """Plan nothing of a loop, unless its steps are others, as where a test differentiates."""
        note, reason = why
        if loop.has_stepped:
            loop.notes[note] = None
        else:
            self._refuse(loop, reason)

    def _refuse(self, loop: Loop, reason: str) -> None:
        if not loop.refusal:
            loop.refuse(reason)
            self._say_unplanned(loop)

    def _give_up(self, reason: str) -> None:
        if not self._refusal:
            self._refusal = reason
            self._say(f"the script runs unplanned: {reason}")
            self._parameter_uses.leave()
            self._of_others.give_up()
            self._uses.end_all()
            self._checkpoints.remove()
            self._end_pass()
            self._kept.pass_ended(self._loops[-1].device if self._loops else torch.device("cpu"))
            for loop in self._loops:
                loop.end()
                loop.placing.bring_home()

    def _hold(self, device: torch.device) -> None:
        if self._strict is not None and self._kept.budget_bytes:
            self._strict.hold(self._kept.budget_bytes, device)

    def _planned(self, loop: Loop, plan: Plan) -> None:
        self._kept.resolve(plan.budget_bytes)
        self._hold(loop.device)
        self._loose.foresee(loop)
        in_files = may_hold(self._request, loop.device)
        self._say_once(found(loop, plan, in_files=in_files))
        peaks = [step.plan.planned.predicted_peak_bytes for of in self._loops for step in of.plans]
        # What several models need together nobody has planned.
        gives_way = len(self._loops) == 1
        self._room.keep(max(peaks, default=0), loop.device, gives_way=gives_way)
