"""One training loop of the script: its model, and the plans for its steps.

Responsible for choosing, at each call of the model, whether the pass is observed, planned or left
alone, and for planning again when the loop leaves its plan or the script holds more besides. Not
responsible for seeing the script (:mod:`memfit.run.script.signals`) nor for where passes begin and
end (:mod:`memfit.run.script.script`).

A *pass* is one forward with the backward after it. A loop is known by the model that begins its
passes. The model is the script's: it is held weakly, and the plans' executors, which hold it
strongly, go when another loop begins.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, get_args

import torch
from torch import nn
from torch.optim import Optimizer

from memfit.answers import Plan
from memfit.apply.executor import Executor
from memfit.apply.slices.forward_mode import take_off_ended
from memfit.errors import MemfitError, UsageError, first_line
from memfit.run.script.checkpoints import ScriptCheckpoints
from memfit.run.script.contexts import occupied
from memfit.run.script.evaluations import Evaluations
from memfit.run.script.forbidden import ForbiddenTechniques
from memfit.run.script.lean_backward import LeanBackward
from memfit.run.script.lean_ops import LeanWay
from memfit.run.script.lease import Room
from memfit.run.script.loop_budget import LoopBudget
from memfit.run.script.model_refusals import are_lent, model_refusal
from memfit.run.script.need import NeedOfRoom
from memfit.run.script.observed import Observation
from memfit.run.script.outside import Outside
from memfit.run.script.overflow import may_hold
from memfit.run.script.passes import Count, Kind, ObservedPass, Pass, PlannedPass
from memfit.run.script.place import chosen, strays_to
from memfit.run.script.placing import Placing, updated_by
from memfit.run.script.planned_step import WORTH_A_PLAN, Call, Key, PlannedStep, comes_nearer
from memfit.run.script.recorded_step import RecordedStep
from memfit.run.script.recorder_steps import AsRecordedPass, recorded_peak_bytes, said_of
from memfit.run.script.recordings import MAX_RECORDINGS, Recordings
from memfit.run.script.remedies import offers, remedies, why_over
from memfit.run.script.request import FitRequest
from memfit.run.script.roots import class_names
from memfit.run.script.shrinking import GivingWay
from memfit.run.script.similar_models import are_named, make_of
from memfit.run.script.step_plans import LEAST_BUDGET, Planning, StepPlans
from memfit.run.script.step_updates import StepUpdates, live_bytes
from memfit.run.script.strict import Strict
from memfit.run.script.turns import take_turns
from memfit.run.script.ways import PIECES, Ways, action_kind
from memfit.tensors.garbage import no_collection
from memfit.track.steps import STEPS

MAX_OBSERVED = 8
"""Steps of one loop that are observed; whatever comes then runs by the nearest plan."""

_RESERVE = 1 / 64
"""Part of the budget that is left for sizes that depend on values, once steps are known to."""

MAX_REPLANS = 3
"""Times a step is planned again because the script holds more besides."""

_IN_STEP = "the optimizer calls the model in its step (a closure)"


class Loop:
    """One training loop.

    Attributes:
        device: Where the model is.
        parameters: Elements of its parameters.
        models: Class names of the models called in a pass, in order.
        partners: Other models that its passes call.
        optimizers: Class names of the optimizers that step for it.
        has_optimizer: Whether any optimizer updates the model; ``None`` before anybody looked.
        refusal: Why nothing is planned; empty while it may be.
        plans: The plans, one for each key.
        counts: What became of its steps, by how they ran.
        divergence: Where a pass first left its plan; empty while none did.
        replans: Plans made after the first.
        notes: Things to say at the end.
        in_the_way: Why the latest pass runs unplanned, where the script stands under something of
            its own; else empty.
        differentiates_more: Whether gradients are asked for on the way, or backwards run that no
            result of a model leads to, as from what a model keeps.
        undoes: Whether the latest plan is one without the script's own checkpoints.
        has_rival: Whether an optimizer that has never stepped may be the one that steps next.
        went_in_step: Whether the script has let go of the model in the middle of a step.
        beginning_uses: Parameters, by ``id``, and names of ops on them, by which steps began that
            no module's call does.
        budget: What its steps may take.
        ran_by: Kinds of action of the plans that its steps ran by.
        ways: The ways of its steps in other ops than the script's.
        evaluations: What is known of calls without gradients that have parameters elsewhere.
        placing: Where its parameters and the optimizer's state are.
        need: Whether its passes need room that others take.
        recordings: What became of its passes.
    """

    def __init__(
        self,
        root: nn.Module,
        request: FitRequest,
        room: Room,
        on_plan: Callable[[Loop, Plan], None],
        on_gone: Callable[[Loop], None],
        say: Callable[[str], None],
        checkpoints: ScriptCheckpoints,
        strict: Strict | None = None,
    ) -> None:
        """Know a model whose first pass is about to begin.

        Args:
            root: The model.
            request: The budget, and which plans are allowed.
            room: What was leased for the script.
            on_plan: Told of every new plan.
            on_gone: Told when the script has let go of the model.
            say: Shows a line to the user.
            checkpoints: Those of the script.
            strict: Ends the script before a step that no plan fits; ``None`` to let it run.
        """
        trained = (p for p in root.parameters() if p.requires_grad)
        self.device = next(chain(trained, root.parameters())).device
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.parameters = sum(p.numel() for p in root.parameters())
        self.models: dict[str, None] = dict.fromkeys(class_names(root))
        self.optimizers: dict[str, None] = {}
        self.has_optimizer: bool | None = None
        self.refusal = model_refusal(root, self.device)
        self.plans = StepPlans()
        self.counts: dict[Kind, Count] = {kind: Count() for kind in get_args(Kind)}
        self.divergence = ""
        self.replans = 0
        self.notes: dict[str, None] = {}
        self.in_the_way = ""
        self.differentiates_more = False
        self.undoes = self.has_rival = self.went_in_step = False
        self.ran_by: set[str] = set()
        self.beginning_uses: set[tuple[int, str]] = set()
        self.ways = Ways(request, self.device)
        self.cut_ops = LeanWay()
        self.budget = LoopBudget(request.budget, room, self.device)
        self.lean_backward = LeanBackward(self.budget.bytes, self.notes)
        self.evaluations = Evaluations(request, self.device, self._choose_place)
        self._on_gone = on_gone
        self._root = weakref.ref(root, lambda _: on_gone(self))
        self._make = make_of(root)
        self._request = request
        self._room = room
        self._giving_way = GivingWay(room)
        self._on_plan = on_plan
        self._say = say
        self._strict = strict
        self._checkpoints = checkpoints
        self._undoes = False
        self._looks_again = self._has_offered = self._in_step = False
        self._kept: tuple[Key, Observation] | None = None
        self._pending: tuple[Key, Observation] | None = None
        self.recordings = Recordings()
        self._forbidden = ForbiddenTechniques(
            self.plans, self._plan_changed, are_parameters_lent=are_lent(root)
        )
        self._latest: PlannedStep | None = None
        self.partners = weakref.WeakSet[nn.Module]()
        self._outside = Outside(self.device)
        self._updates = StepUpdates(
            request, self.budget.within, self._choose_place, self._note_aloud
        )
        observed, is_refused = self.counts["observed"], lambda: bool(self.refusal)
        self.placing = Placing(self._root, self.device, request, self._updates, is_refused)
        self.need = NeedOfRoom(self.device, self.plans, self._updates, observed, is_refused)

    def why_over(self, ended: Pass, peak_bytes: int) -> tuple[str, str]:
        """Why a pass was over the budget, if it was, and what would keep the budget.

        Args:
            ended: The pass.
            peak_bytes: Most bytes live at once in it.
        """
        departure = ended.departure or (self.refusal if ended.kind == "unplanned" else "")
        updates = self.placing.update_bytes
        return why_over(ended.kind, peak_bytes, self._latest, departure, updates)

    def is_of(self, root: nn.Module) -> bool:
        """Whether this is the loop of a model."""
        return self._root() is root

    def goes_on_with(self, root: nn.Module, made: Iterable[Optimizer]) -> bool:
        """Train another model from here on, if it is like the one before, which is gone.

        Args:
            root: The other model.
            made: The optimizers that the script has made.

        Returns:
            Whether it does.
        """
        is_over = self.root is None and self.placing.held is None and not self.went_in_step
        if not is_over or self.refusal or not self.plans.may_be_anothers():
            return False
        own = updated_by(root, made)
        if make_of(root) != self._make or not are_named(self.optimizers, own):
            return False
        self.rest()
        self._root = weakref.ref(root, lambda _: self._on_gone(self))
        self.placing.another_comes(self._root)
        self.plans.another_comes()
        self._updates.another_comes()
        self._outside.another_comes(root)
        self.ways.pieces.another_comes()
        return True

    def was_for_one_step(self, root: nn.Module) -> bool:
        """Whether the model is gone after one step, which was recorded, and one like it comes.

        Args:
            root: The other model.
        """
        is_recorded = self.counts["observed"].steps == 1 and self._pending is not None
        return self.root is None and is_recorded and not self.plans and make_of(root) == self._make

    def takes_in(self, other: nn.Module, running: Pass) -> bool:
        """Whether the call of another model, in the forward of a pass, belongs to that pass.

        A layer's last forward may have no backward, and the next layer, of the same class, is
        trained then: what no recorded step called begins a step of its own.

        Args:
            other: The other model.
            running: The pass.
        """
        if running.kind == "planned" and other not in self.partners:
            root = self._root()
            return root is None or class_names(other) != class_names(root)
        self.partners.add(other)
        self.models.update(dict.fromkeys(class_names(other)))
        return True

    @property
    def has_stepped(self) -> bool:
        """Whether a step came to its end."""
        return any(count.steps for count in self.counts.values())

    @property
    def may_train(self) -> bool:
        """Whether steps update the model, or it is not known yet that they do not."""
        return self.has_stepped or not self.recordings.some_are_given_up

    def rest(self) -> None:
        """Let go of the model until the next pass."""
        for planned in self.plans:
            planned.executor = None
        self.placing.rest()
        self.evaluations.rest()

    def evaluation(self, call: Call, *, in_step: bool) -> contextlib.AbstractContextManager[None]:
        """What a call of the model without gradients, outside passes, runs inside.

        Args:
            call: The call.
            in_step: Whether an optimizer is still to step for the pass before.
        """
        if self.refusal or occupied():
            return contextlib.nullcontext()
        key, budget, live = call.key, self.budget.bytes(), live_bytes(self.device)
        if self._request.options.promise != "exact":
            return self.ways.evaluation(call, self._model(), live, budget)
        is_tight = not self.plans or any(planned.plan.actions for planned in self.plans)
        if not budget or in_step or not is_tight or not self._forbidden.may_offload_parameters:
            return contextlib.nullcontext()
        placed = self.placing.for_evaluation(key, self.evaluations)
        return self.evaluations.running(key, placed, budget)

    def backward_begins(self, running: Pass) -> None:
        """Backward is about to run, the first time in a pass or again.

        Args:
            running: The pass.

        Raises:
            UpdatesMadeError: The updates of the backward before were made without a step.
        """
        planned = self.placing.executor if isinstance(running, PlannedPass) else None
        left = self._updates.backward_begins(planned)
        if left:
            self._forbidden.keep_updates_out_of_backward(left)

    def backward_ended(self) -> None:
        """Backward has run."""
        self._updates.backward_ended()

    def end(self) -> None:
        """No pass is planned any more."""
        self._updates.rest()
        self.rest()

    def step_begins(self, optimizer: Optimizer, running: Pass | None) -> None:
        """The optimizer is about to step: make its updates, if the plan wants them otherwise.

        Args:
            optimizer: The optimizer.
            running: The pass of this loop that is under way, if there is one.

        Raises:
            OffloadError: State or a parameter did not come back as it went.
        """
        take_off_ended()
        if isinstance(running, ObservedPass) and self.root is None:
            running.leave_out_updates()  # nothing is learnt of a model that is gone
        elif isinstance(running, ObservedPass) and self.placing.is_loose:
            if self.placing.updated_by([optimizer]):
                running.leave_out_updates()
        elif isinstance(running, ObservedPass):
            self.placing.executor = self._updates.recorded_step_begins(
                running, self._model(), optimizer, self.placing.executor
            )
        else:
            self._updates.step_begins(optimizer, self.placing.held)

    def step_ended(self) -> None:
        """An optimizer has stepped."""
        self._updates.step_ended()

    def refuse(self, reason: str) -> None:
        """Plan nothing from here on; nothing that uses parameters is under way."""
        self.refusal = self.refusal or reason
        self._room.whole()  # nobody knows what its steps take
        self._pending = None
        self.end()
        self.placing.bring_home()

    def compiled_runs(self) -> None:
        """Something compiled runs in the script, in this loop or elsewhere."""
        if self._updates.compiled_runs():
            self._forbidden.keep_updates_out_of_backward()

    def begin(
        self, call: Call, optimizers: Iterable[Optimizer], *, in_closure: bool = False
    ) -> Pass:
        """Begin a pass; the model, or a module in it, is about to be called.

        Args:
            call: The call.
            optimizers: The optimizers seen so far.
            in_closure: Whether an optimizer calls it, in its step.
        """
        self._in_step = self._in_step or in_closure
        if in_closure and not STEPS.closure_is_first:
            self.placing.in_closure = True
        self._checkpoints.begin_pass(undoes=False)
        waiting, self.placing.waiting = self.placing.waiting, None
        if self.refusal or (under := self._under_others()):
            return Pass(self.device, "" if self.refusal else under)
        own = self.placing.planned_with(optimizers)
        self._updates.require_none_waiting()
        try:
            self._forbidden.pass_begins(has_rival=self.has_rival)
            if self._must_plan_first(call.key):
                with no_collection():  # a large trace is many objects, and nothing of it a cycle
                    self._plan_pending(self._outside_bytes(call, own), call)
            if self._must_observe(call.key):
                return self._observe(call.key, call, own)
            return self._run(call, own, waiting)
        except MemfitError as error:
            if isinstance(error, UsageError) and self._forbidden.plans_offload_parameters:
                # As where the script has an array of a parameter's memory by now.
                self._forbidden.keep_parameters(first_line(error))
                return self.begin(call, optimizers, in_closure=in_closure)
            self.refuse(f"it cannot be planned: {error}")
            return Pass(self.device)

    def _run(self, call: Call, own: list[Optimizer], waiting: Executor | None) -> Pass:
        """Begin a pass by a plan, or as it was recorded."""
        key = call.key
        # Before memory is counted: what is offloaded takes none.
        self._forbidden.views_live_on(self.placing.pass_begins(own, waiting))
        outside = self._outside_bytes(call, own)

        def place(plan: Plan) -> Executor:
            return self.placing.for_plan(plan, own, None, call.module)

        self._giving_way.between_steps(self.plans.all, outside, place)
        self.need.pass_begins()
        diverged = self.recordings.has_left_plan(key)
        planned = self.plans.chosen(key, outside, self._planning(outside), diverged=diverged)
        outside = planned.besides(outside)
        self._make_room(planned, outside, call)
        if self.ways.asks_for_more(key) and self._must_observe(key):
            return self._observe(key, call, own)
        self._require_fits(planned, outside)
        is_safe = self.recordings.is_again(key) and planned.is_safe_as_recorded
        gives_way = self.need.is_of_others and planned.may_run_as_recorded
        varies = self.recordings.has_taken_more(key) or self.recordings.ends_no_step(key)
        varies = varies or self.plans.tell_nothing_of(key) or planned.tells_little_of(key)
        tells_little = varies and planned.may_run_as_recorded
        if planned.runs_as_recorded or is_safe or gives_way or tells_little:
            self._latest = planned
            return self._run_as_recorded(planned, call, own, outside - planned.outside_bytes)
        planned = self.plans.fitting(planned, outside, self._planning(outside))
        how = (planned.executor, call.module, planned.step.not_called(self._model()))
        planned.executor = self.placing.for_plan(planned.plan, own, *how)
        if not self.placing.in_closure:  # there the optimizer's own history grows meanwhile
            planned.pass_begins(self._outside.held_bytes)
        self._latest = planned
        return self._run_planned(key, planned, planned.executor, call.inputs)

    def _under_others(self) -> str:
        """What of the script's own the pass stands on, as a clause, which is noted; else empty."""
        under = occupied()
        clause, is_noted = f"the script {under}" if under else "", bool(under)
        if under and self._checkpoints.inside_kept:
            clause, is_noted = self._checkpoints.around()
        self.in_the_way = f"some steps run unplanned: {clause}" if is_noted else ""
        if is_noted:
            self.notes[self.in_the_way] = None
        return clause

    def _require_fits(self, planned: PlannedStep, outside: int) -> None:
        """End a script that is held to its budget before a step that would not keep it."""
        if self._strict is None or may_hold(self._request, self.device):
            return
        if not (planned.left or planned.keeps_as_recorded):
            ways = remedies(self._request, planned, self.budget.within(), outside)
            self._strict.require(planned.plan, ways)

    def _observe(self, key: Key, call: Call, optimizers: list[Optimizer]) -> Pass:
        if self.recordings.is_given_up(key):
            return Pass(self.device, "calls like it, with gradients on, got no backward")
        self.recordings.begins(key)
        if self.recordings.are_too_many:
            self.refuse(f"no step came to its end in {MAX_RECORDINGS} passes")
            return Pass(self.device)
        self._room.whole()
        self.placing.for_recording(optimizers, self.counts["observed"])
        self._looks_again = False
        budget = self.budget.bytes()
        is_whole = self._checkpoints.around_model or call.is_use
        if not (is_whole or self.ways.are_slices(call, budget)):
            live = live_bytes(self.device)
            with self._checkpoints.unseen():
                self.ways.pieces.begin(key, call.module, call.inputs, live, budget)
        way = None if call.is_use else self.ways.wanted(key)
        self.cut_ops.always |= way is not None  # which rounds
        begins = self.ways.begins_again or not self.plans
        model, first = self._model(), way is None and begins and not call.is_use
        inside = self.ways.first(model, budget) if first else None
        what = (model, call, optimizers, way, self.budget.least_bytes())
        running = ObservedPass(self.device, *what, inside=inside)
        running.follows(self._pending or self._kept)
        running.undoes = self._undoes or self._checkpoints.around_model
        self._checkpoints.begin_pass(undoes=running.undoes, recorder=running.recorder)
        return running

    def _run_as_recorded(
        self, planned: PlannedStep, call: Call, own: list[Optimizer], more: int
    ) -> Pass:
        """Begin a pass that keeps in memory what its recording did, and what there is room for."""
        self.notes[said_of(planned)] = None
        self.placing.for_recording(own, self.counts["observed"], self.budget.bytes())
        self._choose_place(strays_to(self._request, self.device.type))
        whole = (self._model(), call, own)
        running = AsRecordedPass.of(planned, *whole, self._request, self.budget.bytes(), more)
        self._checkpoints.begin_pass(undoes=planned.undoes, recorder=running.recorder)
        return running

    def _run_planned(self, key: Key, planned: PlannedStep, executor: Executor, inputs: Any) -> Pass:
        left = planned.left_besides(inputs)
        self.cut_ops.pass_begins(is_planned_without=not planned.step.may_round)
        self.lean_backward.in_two_above = planned.step.in_two_above

        def forward_ended(where: str, is_given_up: bool) -> None:  # noqa: FBT001
            if executor.remat is not None and executor.remat.overflow:
                self.notes[executor.remat.overflow] = None
            if where:
                if not is_given_up:  # else it was no step, which memfit cannot know before
                    self.divergence = self.divergence or where
                    self.recordings.left_plan(key)
                self._choose_place(executor.subject.strays_to)
            elif left:
                planned.left = []
                planned.passing_bytes = sum(size for ref, size in left.items() if ref() is None)

        running = PlannedPass(self.device, executor, planned.root_calls, forward_ended)
        running.fits = planned.plan.fits
        running.undoes = planned.undoes
        self._checkpoints.begin_pass(undoes=planned.undoes)
        if executor.remat is not None and planned.tells_little_of(key):
            executor.remat.leave("it is called in another mode than any step that was recorded")
        return running

    def _plan_changed(self, changed: Iterable[PlannedStep], note: str) -> None:
        """Plan steps again whose plans have a technique that is forbidden now."""
        self.placing.leave_plan()
        if note:
            self.notes[note] = None
        for planned in changed:
            within = self.budget.within()
            planned.plan = planned.step.plan(within, planned.outside_bytes, planned.goes)
            planned.wider = planned.executor = None
            self._on_plan(self, planned.plan)
        self.replans += 1

    def finish(self, running: ObservedPass, inputs_key: Key, optimizers: list[Optimizer]) -> None:
        """Take over what an observed pass recorded; planned when the next one begins.

        Args:
            running: The pass, complete.
            inputs_key: Its key.
            optimizers: The optimizers that update the model.
        """
        observation = running.finish(optimizers)
        if observation is None:
            return
        self.recordings.ended(inputs_key)
        if self.placing.in_closure:
            observation.state_stays = _IN_STEP
        if observation.spill_problem:
            problem = observation.spill_problem
            self.notes[f"an observed step kept its saved tensors in memory: {problem}"] = None
        if observation.recorder.problem:
            self.refuse(observation.recorder.problem)
            return
        observation.fusing_refusal = _IN_STEP if self._in_step else self._updates.fusing_refusal()
        observation.may_round = self.cut_ops.has_run
        observation.in_two_above, is_mixed = self.lean_backward.is_recorded()
        if not self.ways.recorded(observation):
            self._looks_again |= action_kind(observation.way) != PIECES  # which may do
            return  # it is recorded whole next
        if self._checkpoints.may_be_undone(observation.recorder, observation.roles.inputs):
            self._undoes = self._looks_again = True
            if not running.undoes:
                self._kept = (inputs_key, observation)
        else:
            is_open = self._checkpoints.unsettled() and not self.plans
            self._looks_again = self.cut_ops.was_mixed() or is_mixed or is_open
            self._pending = (inputs_key, observation)
            self.ways.pieces.recorded(inputs_key, observation)
            self._outside.recorded(inputs_key, observation)

    def passed(self, kind: Kind, peak_bytes: int, *, is_step: bool) -> None:
        """A pass is over; what took more than was foreseen is not trusted any more.

        Args:
            kind: How it ran.
            peak_bytes: Most bytes live at once in it.
            is_step: Whether it came to the end of a step.
        """
        for recorded in (self._pending, self._kept) if kind == "observed" else ():
            if recorded is not None and not recorded[1].peak_bytes:
                recorded[1].peak_bytes = peak_bytes
        planned = self._latest if kind == "planned" else None
        if planned is not None:
            planned.has_run = True
            if is_step:
                planned.step_ended()
            self.ran_by.update(planned.kinds)
        if planned is not None and planned.took_more(peak_bytes):
            if planned.is_foreseen:
                self.plans.distrust()
            else:
                self.recordings.left_plan(planned.key)  # it is recorded of this model
        elif planned is not None and planned.is_over(peak_bytes):
            self.recordings.took_more(planned.key)

    def _choose_place(self, place: str) -> None:
        if place and self._request.may_choose_place:
            self._note_aloud(chosen(place))

    def _note_aloud(self, note: str) -> None:
        if note not in self.notes:
            self.notes[note] = None
            self._say(note)

    def _must_plan_first(self, key: Key) -> bool:
        """Whether a recorded step waits for its plan.

        Gradients live on into this forward: only a step that begins with them shows for how long.
        Later steps are taken to begin as this one does, but for those of another optimizer's turn.
        """
        is_last = self.counts["observed"].steps >= MAX_OBSERVED
        if is_last and not self.plans:
            self._pending = self._pending or self._kept
        if self._pending is None or (self._looks_again and not is_last):
            return False
        is_first = not self.plans and self.counts["observed"].steps == 1
        if is_first and self._pending[1].asks_for_another(self.budget.bytes()):
            return False
        if is_last or take_turns(key, self._pending[0]):
            return True
        held = {id(p) for p in self._model().parameters() if p.is_leaf and p.grad is not None}
        return held <= self._pending[1].gradients_before

    def _must_observe(self, key: Key) -> bool:
        if self.counts["observed"].steps >= MAX_OBSERVED:
            return False
        if self.recordings.is_given_up(key) and self.plans:
            return False  # an evaluation with gradients on: the nearest plan keeps least of it
        if self.recordings.ends_no_step(key) and self.plans and self._pending is None:
            return False  # the nearest plan is all that there will be
        if self._looks_again or self._pending is not None:
            return True
        if self.recordings.asks_for_another(key) or self.ways.asks_for_more(key):
            return True
        return self.plans.must_record(key) and not self.plans.tell_nothing_of(key)

    @property
    def root(self) -> nn.Module | None:
        """The model; ``None`` once the script has let go of it."""
        return self._root()

    def _model(self) -> nn.Module:
        return self.placing.model()

    def _plan_again(
        self, planned: PlannedStep, observation: Observation, outside: int, call: Call
    ) -> None:
        """Plan a step once more, recorded in another way than before."""
        step = self._recorded(observation)
        within = self.budget.within()
        made = step.plan(within, outside, observation.passing)
        nearer = comes_nearer(made, planned.plan)
        if self.ways.planned(step, nearer=nearer):
            planned.whole_peak_bytes = planned.unplanned_peak_bytes
            planned.step, planned.plan, planned.outside_bytes = step, made, outside
            planned.wider = planned.executor = planned.lowest = None
            least = recorded_peak_bytes(observation, self._request, self.device)
            planned.is_as(observation, least)
            if step.place:
                self._choose_place(step.place)
        self._consider_ways(planned, made, step.pieces, call)
        if not self.ways.asks_for_more(planned.key):
            self._on_plan(self, planned.plan)

    def _recorded(self, observation: Observation) -> RecordedStep:
        step = RecordedStep(observation, next(iter(self.models)), self._request)
        self._forbidden.apply_to(step)
        return step

    def _consider_ways(self, planned: PlannedStep, made: Plan, pieces: int, call: Call) -> None:
        """Have a step that does not fit recorded in another way, where one may help."""
        if call.is_use:
            return  # of a call, which there is not
        with self._checkpoints.unseen():
            self.ways.consider(planned, made, pieces, call)
        if not planned.plan.fits:
            self.notes.update(dict.fromkeys(self.ways.notes()))

    def _plan_pending(self, outside: int, call: Call) -> None:
        assert self._pending is not None
        (key, observation), self._pending = self._pending, None
        outside += int(self.budget.bytes() * _RESERVE) if self.recordings.is_again(key) else 0
        outside += observation.remains.graph_bytes
        self._outside.is_planned(observation)
        again = next((it for it in self.plans if it.key == key), None)
        if again is not None and (observation.way or again.step.way):
            self._plan_again(again, observation, outside, call)
            return
        step = self._recorded(observation)
        self.notes.update(dict.fromkeys(step.notes()))
        kept, self._kept = self._kept, None
        own = self._recorded(kept[1]) if kept is not None and kept[0] == key else None
        by_own: Plan | None = None
        if own is not None and self.budget.is_share:
            by_own = own.plan(self.budget.of_step(own, outside), outside)
            self.budget.written = by_own.budget_bytes  # a share of what the script's own step takes
        within = self.budget.of_step(step, outside, observation.passing)
        made = step.plan(within, outside, observation.passing)
        if own is not None and kept is not None and not made.fits:
            # The script's own checkpoints may reach what no plan without them does.
            by_own = by_own or own.plan(self.budget.within(), outside)
            if comes_nearer(by_own, made):
                step, made, observation, self._undoes = own, by_own, kept[1], False
        if step.place:
            self._choose_place(step.place)
        self.undoes = observation.undoes
        self.notes.update(dict.fromkeys(self._checkpoints.notes(undoes=observation.undoes)))
        # Where it is a percentage: the same bytes from now on.
        self.budget.written = made.budget_bytes
        self.replans += bool(self.plans)
        calls, undoes = observation.root_calls, observation.undoes
        planned = PlannedStep(key, step, made, calls, undoes, outside)
        planned.is_as(observation, recorded_peak_bytes(observation, self._request, self.device))
        self.plans.add(planned)
        self._consider_ways(planned, made, step.pieces, call)
        helps = self.lean_backward.may_help(planned.lacking_bytes)  # the exact way comes first
        self._looks_again |= helps or self.cut_ops.may_help(fits=made.fits)
        little = observation.remains.left_bytes < made.budget_bytes * WORTH_A_PLAN
        is_kept = made.fits or planned.keeps_as_recorded
        if not (is_kept or self._has_offered):  # each way takes as long as a plan
            what = planned, self.budget.within(), outside, self.ways.impossible(call)
            self.notes.update(dict.fromkeys(offers(self._request, *what)))
            self._has_offered = True
        if made.fits or (little and not (self._looks_again or self.ways.asks_for_more(key))):
            self._on_plan(self, made)  # else there is a better one to tell of after this step

    def _planning(self, outside: int) -> Planning:
        def planning(step: RecordedStep, least: bool) -> Plan:  # noqa: FBT001
            budget = LEAST_BUDGET if least else self.budget.within()
            return step.plan(budget, outside)

        return planning

    def _make_room(self, planned: PlannedStep, outside: int, call: Call) -> None:
        """Plan a step again where the script holds so much more, or less, that it matters.

        And once, where that helps, when it is known how much of what a step leaves behind (its
        loss, the model's output) goes during the next forward. What then does not fit may be
        recorded in another way.
        """
        helps = planned.learns_what_passes()
        if not (helps or planned.asks_for_another(outside)) or self.replans >= MAX_REPLANS:
            return
        self.replans += 1
        asked = self._request.budget if helps else None
        within = self.budget.of_step(planned.step, outside, planned.goes, written=asked)
        made = planned.step.plan(within, outside, planned.goes)
        planned.take(made, outside)
        self.budget.written = made.budget_bytes
        if not made.fits:
            self._consider_ways(planned, made, planned.step.pieces, call)
        if not self._must_observe(call.key):  # else a better one may follow
            self._on_plan(self, made)

    def _outside_bytes(self, call: Call, optimizers: Iterable[Optimizer]) -> int:
        """What is live on the device and not of the step."""
        is_new = self._pending is not None or not self.plans
        return self._outside.bytes_besides(self._model(), call, optimizers, is_new=is_new)
