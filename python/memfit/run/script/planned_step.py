"""A recorded step of a script with the plan for it, and the key by which a pass finds it."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, is_grad_enabled, nn
from torch.utils._pytree import tree_leaves

from memfit.answers import Plan
from memfit.apply.executor import Executor
from memfit.run.script.object_sizes import given_sizes, object_sizes
from memfit.run.script.observed import Observation
from memfit.run.script.parameter_uses import trained
from memfit.run.script.recorded_step import RecordedStep
from memfit.run.script.remains import BACKWARD_BEGINS, Passing
from memfit.tensors.storage import plain_tensors

Key = tuple[Any, ...]
"""What decides which ops a pass runs, as far as that is known before: mode, what is trained in what
is called, whose turn it is, which switches are on, which inputs are differentiated, shapes,
types."""


WORTH_A_PLAN = 0.01
"""Share of the budget that makes it worth planning again."""

_FEW_OPS = 4096
"""Writing each of so many down takes some tenths of a second."""

_MOST = 3 / 4
"""Part of the budget that is most of it."""

_FEW_BYTES = 4096

_USE = "(a parameter)"
"""The path of what begins with a parameter's use, which is no module's."""


@dataclass(frozen=True, eq=False)
class Call:
    """A call that begins a pass, or is one without gradients.

    Attributes:
        module: What is called: the model, or a module in it.
        inputs: What it is called with.
        path: The module's path in the model; empty for the model itself.
        is_use: Whether no module is called, but an op with a parameter of the model.
        turn: The number of the optimizer that stepped last, where that tells passes apart that
            begin alike; else 0.
    """

    module: nn.Module
    inputs: Any
    path: str
    is_use: bool = False
    turn: int = 0

    @staticmethod
    def of_use(root: nn.Module, given: Any) -> Call:
        """An op on a parameter of a model.

        Args:
            root: The model.
            given: What the op is called with.
        """
        tensors = (it for it in tree_leaves(given) if isinstance(it, Tensor))
        data = tuple(it for it in tensors if trained(it) is None)
        return Call(root, (data, {}), _USE, is_use=True)

    @cached_property
    def key(self) -> Key:
        """The key of the pass, as it is when it is first asked for."""
        return key_of(self.module, self.inputs, self.path, self.turn)


def key_of(module: nn.Module, inputs: Any, path: str = "", turn: int = 0) -> Key:
    """The key of a pass.

    Args:
        module: What is about to be called first.
        inputs: What with.
        path: Its path in the model.
        turn: As :class:`Call` has it.
    """
    leaves = tree_leaves(inputs)
    tensors = [it for it in leaves if isinstance(it, Tensor)]
    # What generates without gradients has caches that grow: those calls are alike.
    objects = [it for it in leaves if not isinstance(it, Tensor)] if is_grad_enabled() else []
    switches, differentiated = _switches(inputs), _differentiated(tensors)
    mode = path, module.training, _trained(module), turn, switches, *differentiated
    return (mode, *given_sizes(inputs), *object_sizes(objects))


def _differentiated(inputs: list[Tensor]) -> tuple[int, ...]:
    """The places of inputs that require gradients, as where every n-th step penalises them."""
    if not is_grad_enabled():
        return ()
    return tuple(place for place, it in enumerate(inputs) if it.requires_grad)


def _switches(inputs: Any) -> tuple[tuple[str, bool], ...]:
    """The arguments that are true or false, as where every n-th step wants hidden states as well.

    Numbers are none: they count, or are drawn anew in each step.
    """
    if not is_grad_enabled():
        return ()
    given, named = inputs
    arguments = [*((str(place), it) for place, it in enumerate(given)), *named.items()]
    return tuple((name, it) for name, it in arguments if isinstance(it, bool))


def _trained(module: nn.Module) -> int:
    """What tells the parameters of a module apart from others, and from the same ones frozen.

    As they are pruned, parametrized, frozen or thawed from epoch to epoch, the module runs other
    ops. An evaluation may find them as it likes.
    """
    if not is_grad_enabled():
        return 0
    return hash(tuple((name, p.requires_grad) for name, p in module.named_parameters()))


def begin_alike(key: Key, other: Key) -> bool:
    """Whether two passes begin with the call of the same module, and train the same in it.

    Args:
        key: The key of the one.
        other: The key of the other.
    """
    (path, _, *trained), (other_path, _, *other_trained) = key[0], other[0]
    return bool(path == other_path and trained == other_trained)


def elements(key: Key) -> int:
    """Elements of what a pass is called with.

    Args:
        key: Its key.
    """
    return sum(torch.Size(shape).numel() for shape, _ in key[1:])


@dataclass(slots=True, eq=False)
class PlannedStep:
    """A recorded step and the plan for those like it.

    Attributes:
        key: What it was recorded with.
        step: The recording.
        plan: The plan.
        root_calls: Calls of the model in it.
        undoes: Whether the script's checkpoints are undone in it.
        outside_bytes: What the plan takes the script to hold besides, rounded up.
        left: What the recorded step left behind, weakly, until it is known what becomes of it.
        passing_bytes: How much of that was gone when the next backward began; 0 once planned for.
        passes: What of that the plan takes to go in the course of a step.
        graph_bytes: What graphs keep in memory that a step retains, unless it runs as recorded.
        waits_for_graphs: Whether the step before ran as recorded, so that they are not there yet.
        wider: The plan before another process needed memory; ``None`` while there was room.
        executor: Carries the plan out; made when it is needed.
        is_foreseen: Whether its sizes were not recorded but follow from others.
        is_of_another: Whether it was recorded of another model, like this one.
        lowest: The same step by the plan of least peak, for larger ones; made when it is needed.
        whole_peak_bytes: What it takes as it is without a plan, where it was recorded so before it
            was recorded in another way.
        recorded_peak_bytes: What it took when it was recorded; 0 where steps may not run so.
        spare_bytes: What more of it may stay in memory, in the latest pass that ran so.
        observed_peak_bytes: The same, wherever steps may run so.
        held_bytes: The most that the script held besides when a pass by the plan began; ``None``
            before the first.
        step_held_bytes: The same of passes that came to the end of a step.
        has_run: Whether a pass has run by the plan.
    """

    key: Key
    step: RecordedStep
    plan: Plan
    root_calls: int
    undoes: bool
    outside_bytes: int
    left: list[weakref.ref[Any]] = field(default_factory=list)
    passing_bytes: int = 0
    passes: Passing = ()
    graph_bytes: int = 0
    waits_for_graphs: bool = False
    wider: Plan | None = None
    executor: Executor | None = None
    is_foreseen: bool = False
    is_of_another: bool = False
    lowest: PlannedStep | None = None
    whole_peak_bytes: int | None = None
    recorded_peak_bytes: int = 0
    spare_bytes: int = 0
    observed_peak_bytes: int = 0
    held_bytes: int | None = None
    step_held_bytes: int | None = None
    has_run: bool = False
    _began_with: int | None = None

    @property
    def unplanned_peak_bytes(self) -> int | None:
        """What it takes without a plan; ``None`` where it was recorded in another way alone."""
        if self.step.way is not None:
            return self.whole_peak_bytes
        return self.plan.unplanned.predicted_peak_bytes

    @property
    def rounding_bytes(self) -> int:
        """By how much every peak of the plan is higher than those of its steps, or a little less.

        The script may hold a few bytes more by then: a counter, the loss of another step. Where it
        holds so much more that peaks of steps are higher, this is below 0.
        """
        held = self.outside_bytes if self.step_held_bytes is None else self.step_held_bytes
        higher = self.outside_bytes - held
        return max(higher - _FEW_BYTES, 0) if higher > -_FEW_BYTES else higher

    def is_as(self, observation: Observation, recorded_peak_bytes: int) -> None:
        """Know what its recording left behind, and what it took.

        Args:
            observation: The recording.
            recorded_peak_bytes: What steps take that run as it did; 0 where they may not.
        """
        self.recorded_peak_bytes = recorded_peak_bytes
        self.observed_peak_bytes = observation.peak_bytes
        self.left, self.passing_bytes = observation.left, 0
        self.passes = observation.passing
        self.graph_bytes = observation.remains.graph_bytes
        self.waits_for_graphs = True

    def pass_begins(self, held_bytes: int) -> None:
        """Learn what the script holds besides when a pass by the plan begins."""
        outside_bytes = self.besides(held_bytes)
        self._began_with = outside_bytes
        self.held_bytes = max(self.held_bytes or 0, outside_bytes)
        self.waits_for_graphs = False

    def step_ended(self) -> None:
        """The pass that began last came to the end of a step."""
        if self._began_with is not None:  # in closures, an optimizer's history grows meanwhile
            self.step_held_bytes = max(self.step_held_bytes or 0, self._began_with)

    @property
    def goes(self) -> Passing:
        """What goes in the course of a step; none of it where the plan changes what graphs keep."""
        return () if self.graph_bytes and self.plan.actions else self.passes

    def besides(self, outside_bytes: int) -> int:
        """What the script holds besides, with the graphs that it holds from the next step on.

        Args:
            outside_bytes: What it holds now.
        """
        return outside_bytes + (self.graph_bytes if self.waits_for_graphs else 0)

    @property
    def runs_as_recorded(self) -> bool:
        """Whether the recording, which keeps nothing in memory, took less than any plan does."""
        least = self.plan.planned.predicted_peak_bytes
        return not self.plan.fits and 0 < self.recorded_peak_bytes < least

    @property
    def takes_bytes(self) -> int:
        """What it is foreseen to take: by its plan, or as it was recorded."""
        if self.runs_as_recorded:
            return self.recorded_peak_bytes
        return self.plan.planned.predicted_peak_bytes

    @property
    def kinds(self) -> list[str]:
        """The kinds of action that it runs by; as recorded, that of the way in which it was."""
        if self.runs_as_recorded:
            return [] if self.step.way is None else [str(self.step.way["kind"])]
        return [action.kind for action in self.plan.actions]

    def lacks_room(self, more_bytes: int) -> bool:
        """Whether it does not fit, or would not with more held besides.

        Args:
            more_bytes: How much more.
        """
        plan = self.plan
        return not plan.fits or plan.planned.predicted_peak_bytes + more_bytes > plan.budget_bytes

    @property
    def lacking_bytes(self) -> int:
        """What it takes above the budget, by its plan or as recorded; 0 where it keeps that."""
        if self.plan.fits or self.keeps_as_recorded:
            return 0
        least = self.plan.planned.predicted_peak_bytes
        if self.recorded_peak_bytes:
            least = min(least, self.recorded_peak_bytes)
        return max(least - self.plan.budget_bytes, 0)

    @property
    def may_run_as_recorded(self) -> bool:
        """Whether it would keep the budget as it was recorded, whatever a plan does."""
        return 0 < self.recorded_peak_bytes <= self.plan.budget_bytes

    @property
    def is_safe_as_recorded(self) -> bool:
        """Whether a pass that may run other ops had better run as recorded, with files for all.

        It keeps the budget so and needs most of it, of which a plan would give the rest to saved
        tensors; and to write each of its ops down again takes little time.
        """
        needs_most = self.recorded_peak_bytes > self.plan.budget_bytes * _MOST
        return self.may_run_as_recorded and needs_most and self.step.op_count <= _FEW_OPS

    @property
    def keeps_as_recorded(self) -> bool:
        """Whether that keeps the budget."""
        return self.runs_as_recorded and self.recorded_peak_bytes <= self.plan.budget_bytes

    def took_more(self, peak_bytes: int) -> bool:
        """Learn what a pass took; whether that is more than foreseen, where it was not recorded.

        Args:
            peak_bytes: Most bytes live at once in it.
        """
        if self.runs_as_recorded:  # the recording may have been of less
            without = peak_bytes - self.spare_bytes
            self.recorded_peak_bytes = max(self.recorded_peak_bytes, without)
        foreseen = self.plan.planned.predicted_peak_bytes + self.plan.margin_bytes
        is_known = not self.is_foreseen and not (self.is_of_another and self.plan.fits)
        return not is_known and peak_bytes > foreseen

    def is_over(self, peak_bytes: int) -> bool:
        """Whether a pass by the plan took more than was foreseen, and than there is.

        Args:
            peak_bytes: Most bytes live at once in it.
        """
        foreseen = self.plan.planned.predicted_peak_bytes + self.plan.margin_bytes
        return not self.runs_as_recorded and peak_bytes > max(foreseen, self.plan.budget_bytes)

    def holds_more(self, peak_bytes: int) -> bool:
        """Whether a pass took more as the script holds more than is planned for.

        Args:
            peak_bytes: Most bytes live at once in it.
        """
        more = (self.held_bytes or 0) - self.outside_bytes
        foreseen = self.plan.planned.predicted_peak_bytes + self.plan.margin_bytes
        unexplained = peak_bytes - foreseen - max(more, 0)
        return unexplained <= foreseen * WORTH_A_PLAN < more

    def tells_little_of(self, key: Key) -> bool:
        """Whether a pass is in another mode than this, and not much smaller.

        So an evaluation with gradients on is, which saves what no plan knows of, and the graph of
        the call before lives on in a variable, perhaps.

        Args:
            key: Its key.
        """
        return bool(self.key[0] != key[0]) and 2 * elements(key) > elements(self.key)

    def left_besides(self, inputs: Any) -> dict[weakref.ref[Any], int]:
        """Sizes of what the recorded step left, and the script holds besides a pass.

        What the pass is called with, as a memory of earlier ones is, belongs to it.

        Args:
            inputs: What the model is called with.
        """
        given = {
            part.untyped_storage()._cdata
            for leaf in tree_leaves(inputs)
            if isinstance(leaf, Tensor)
            for part in plain_tensors(leaf)
        }
        alive = ((ref, ref()) for ref in self.left)
        return {
            ref: storage.nbytes()
            for ref, storage in alive
            if storage is not None and storage._cdata not in given
        }

    def learns_what_passes(self) -> bool:
        """Know once what goes before backward; whether another plan makes something of it."""
        plan, passing = self.plan, self.passing_bytes - sum(size for size, _ in self.passes)
        self.passing_bytes = 0
        helps = passing >= plan.budget_bytes * WORTH_A_PLAN and (plan.actions or not plan.fits)
        if helps:
            self.passes = (*self.passes, (passing, BACKWARD_BEGINS))
        return bool(helps)

    def asks_for_another(self, outside_bytes: int) -> bool:
        """Whether the plan no longer fits, or another may where this one does not.

        Args:
            outside_bytes: What the script holds besides now.
        """
        less = self.outside_bytes - outside_bytes
        has_shrunk = not self.plan.fits and less >= self.plan.budget_bytes * WORTH_A_PLAN
        return has_shrunk or self.has_outgrown(outside_bytes)

    def take(self, plan: Plan, outside_bytes: int) -> None:
        """Run by another plan from now on.

        Args:
            plan: The plan.
            outside_bytes: What it takes the script to hold besides.
        """
        more = outside_bytes - self.outside_bytes
        if self.recorded_peak_bytes:  # the recording had what was held in memory, too
            self.recorded_peak_bytes = max(self.recorded_peak_bytes + more, 1)
        self.plan, self.outside_bytes = plan, outside_bytes
        self.held_bytes = self.step_held_bytes = None
        self.wider = self.executor = None

    def has_outgrown(self, outside_bytes: int) -> bool:
        """Whether the script holds so much more that the plan no longer fits.

        Args:
            outside_bytes: What it holds besides now.
        """
        plan = self.plan
        room = plan.budget_bytes - plan.planned.predicted_peak_bytes
        return plan.fits and outside_bytes - self.outside_bytes > room


def comes_nearer(plan: Plan, other: Plan) -> bool:
    """Whether a plan fits where another does not, or has a lower peak.

    Args:
        plan: The one.
        other: The other.
    """
    peaks = (it.planned.predicted_peak_bytes for it in (plan, other))
    return plan.fits > other.fits or next(peaks) < next(peaks)
