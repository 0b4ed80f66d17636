"""A plan taken apart, for every driver alike.

Responsible for turning the actions of a plan into parts (:mod:`memfit.apply.part`) that fit a model
and an optimizer, and for what a step asks of them: its forward, the optimizer's updates, where
things lie between steps, and having all of it home again. Not responsible for who calls forward,
backward and optimizer: that is a driver (:mod:`memfit.run`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from memfit.answers import Plan
from memfit.apply.allocator_settings import set_up
from memfit.apply.borrowed import borrowed
from memfit.apply.checkpoints_undone import CheckpointsUndone
from memfit.apply.interrupts import interrupts_wait
from memfit.apply.micro_batch import MicroBatches
from memfit.apply.no_graph import NoGraph
from memfit.apply.offload.optimizer_state import StateDirections, StateElsewhere
from memfit.apply.offload.parameters import (
    ParameterDirections,
    ParametersElsewhere,
    bring_parameters_home,
    is_offloaded,
)
from memfit.apply.offload.sliced_state import SlicedState
from memfit.apply.offload.state_view import AwayState, bring_home
from memfit.apply.offload.tiers import open_tier
from memfit.apply.optimizer_in_backward import (
    OneByOne,
    OptimizerInBackward,
    UpdatesOneByOne,
    require_step_of_torch,
)
from memfit.apply.part import Part
from memfit.apply.pieces.in_pieces import InPieces
from memfit.apply.precision.autocast import UnderAutocast
from memfit.apply.precision.eight_bit_state import EightBitState
from memfit.apply.precision.half_parameters import HalfParameters
from memfit.apply.precision.int8_weights import Int8Weights
from memfit.apply.precision.optimizer_bits import UpdatesInEightBits
from memfit.apply.remat.remat import Rematerialiser
from memfit.apply.slices.in_slices import InSlices
from memfit.errors import OffloadError, UsageError
from memfit.options import HOST
from memfit.tensors.narrow_parameters import NARROW, widen
from memfit.tensors.optimizers import gradients_reduced_later
from memfit.weights.in_eight_bits import restore

if TYPE_CHECKING:
    from memfit.apply.offload.tiers import Tier

Actions = Mapping[str, Mapping[str, Any]]
"""The actions of a plan by their kinds."""

_FLOAT16 = "autocast_fp16"
_AUTOCAST = ("autocast", _FLOAT16)
_OF_ACTIVATIONS = ("remat", "unneeded_saves", "offload", "shrink")
BETWEEN_STEPS = ("offload_optimizer", "offload_parameters")
"""Kinds of action that keep something elsewhere between steps."""

NARROW_STATE = "optimizer_bits"
"""The kind of action that holds the optimizer's state in 8 bits."""

NARROW_PARAMETERS = "half_parameters"
"""The kind of action that holds parameters in 16 bits."""

INT8_WEIGHTS = ("int8_weights", "int8_dynamic")
"""Kinds of action that hold weights of linear layers in 8 bits."""

_WEIGHTS = (NARROW_PARAMETERS, *INT8_WEIGHTS)
"""Kinds of action that do all that an inference needs before its first forward."""

OF_OPTIMIZER = (*BETWEEN_STEPS, NARROW_STATE, "one_by_one", "fuse_optimizer")
"""Kinds of action that need the optimizer of a step."""


@dataclass(slots=True, frozen=True)
class Subject:
    """What a plan is carried out on.

    The reference to the model is weak: once the script drops the model, its memory is free.

    Attributes:
        held: The model; it is left unmodified.
        optimizer: The optimizer that updates it; ``None`` without one.
        trains: Whether the step has a loss and a backward.
        clips_gradients: Whether the step clips, and so needs all gradients at once.
        offload_dir: Where files for what is offloaded go, instead of where the plan says.
        strays_to: Where all goes that is saved after the running model has left the plan, also a
            plan without any action: a folder, or ``host``; empty for nowhere.
        cut: Of inference that is one call of the model: which of the tensors that it is given have
            an entry for each item of the batch, by their places.
        warn: Whether to warn, once, when the running model leaves the plan.
        called: The module in it whose calls run in pieces of the batch; ``None`` for the model.
        in_script: Whether it runs in a script of the user's, which may differentiate gradients, and
            look at any result after its updates, though it never did so far.
        not_called: Paths of modules that the recorded step did not call: a forward that calls one
            has left the plan. Empty to take no notice.
    """

    held: weakref.ref[nn.Module]
    optimizer: Optimizer | None = None
    trains: bool = True
    clips_gradients: bool = False
    offload_dir: str | PathLike[str] = ""
    strays_to: str = ""
    cut: tuple[int, ...] = ()
    warn: bool = True
    called: weakref.ref[nn.Module] | None = None
    in_script: bool = False
    not_called: tuple[str, ...] = ()

    @property
    def model(self) -> nn.Module:
        """The model."""
        return borrowed(self.held)


def _said(actions: Actions, kind: str) -> Mapping[str, Any] | None:
    """What an action says to the executor; ``None`` without that action."""
    return actions[kind].get(kind) or {} if kind in actions else None


def _allocator(_subject: Subject, actions: Actions) -> None:
    set_up(str(actions["allocator_settings"].get("settings", "")))


def _optimizer_in_backward(subject: Subject, _actions: Actions) -> Part | None:
    if subject.optimizer is None:
        return None
    if subject.clips_gradients:
        raise UsageError(
            "the plan runs the optimizer inside backward, and `clip_grad_norm` needs all "
            "gradients at once\nhint: plan again for this workload"
        )
    if reduced := gradients_reduced_later(subject.model):
        raise UsageError(
            f"the plan runs the optimizer inside backward, and {reduced}\n"
            "hint: plan again with `fuse_optimizer` forbidden"
        )
    return OptimizerInBackward(subject.optimizer)


def _one_by_one(subject: Subject, _actions: Actions) -> Part | None:
    return None if subject.optimizer is None else UpdatesOneByOne(subject.optimizer)


def _narrow_state(subject: Subject, actions: Actions) -> Part | None:
    if subject.optimizer is None:
        return None
    said = _said(actions, NARROW_STATE) or {}
    tier, offloads = None, _said(actions, "offload_optimizer")
    if offloads is not None:
        if NARROW_PARAMETERS in actions and not said.get("lower_halves"):
            raise UsageError(
                "the plan offloads optimizer state in 8 bits and rounds updates of parameters in "
                "bfloat16: it has to keep their lower halves"
            )
        folder = subject.offload_dir or str(offloads.get("folder", ""))
        tier = open_tier(str(offloads.get("tier")), 0, folder)
    return UpdatesInEightBits(subject.optimizer, subject.model, said, tier)


def _state(subject: Subject, actions: Actions) -> Part | None:
    said = _said(actions, "offload_optimizer")
    if said is None or subject.optimizer is None:
        return None
    directions = StateDirections.read(said)
    return StateElsewhere(subject.optimizer, subject.model, directions, subject.offload_dir)


def _activations(subject: Subject, actions: Actions) -> Part:
    """Dropped, offloaded and shrunk activations, which one part watches for."""
    offload = _said(actions, "offload")
    tier: Tier | None = None
    if offload is not None:
        folder = subject.offload_dir or offload.get("folder", "")
        tier = open_tier(str(offload.get("tier")), int(offload.get("window_bytes", 0)), folder)
    remat, unneeded = _said(actions, "remat"), _said(actions, "unneeded_saves")
    return Rematerialiser(
        subject.model,
        remat,
        offload,
        tier,
        unneeded_saves=unneeded,
        shrink=_said(actions, "shrink"),
        warn=subject.warn,
        strays=lambda: _strays(subject, tier),
        outlasts=is_offloaded,
        not_called=subject.not_called,
    )


def _strays(subject: Subject, tier: Tier | None) -> Tier | None:
    """The place for what is saved after the running model has left the plan; made when needed."""
    place = subject.strays_to
    if not place or tier is not None:
        return tier if place else None
    try:
        return open_tier(HOST if place == HOST else "disk", 0, "" if place == HOST else place)
    except (OffloadError, UsageError):
        return None  # it stays, as without a place


def _micro_batches(subject: Subject, actions: Actions) -> Part:
    action = actions["micro_batch"]
    ops = action.get("micro_batch")
    if ops is not None and ops.get("call") is not None:
        call = {**ops["call"], "cut": ops["call"].get("cut") or subject.cut}
        return InPieces(
            borrowed(subject.called or subject.held), int(action["count"]), {**ops, "call": call}
        )
    return MicroBatches(int(action["count"]), action.get("micro_batch"), warn=subject.warn)


def _autocast(subject: Subject, actions: Actions) -> Part:
    kind = next(kind for kind in _AUTOCAST if kind in actions)
    if kind == _FLOAT16 and "fuse_optimizer" in actions:
        raise UsageError(
            "the plan scales the loss and runs the optimizer inside backward: whether gradients "
            "are finite is known after the last one"
        )
    return UnderAutocast(subject.model, _said(actions, kind) or {}, trains=subject.trains)


def _slices(subject: Subject, actions: Actions) -> Part:
    said = _said(actions, "chunk") or {}
    return InSlices(subject.model, said, warn=subject.warn, in_script=subject.in_script)


def _narrow_parameters(subject: Subject, actions: Actions) -> Part:
    of_state = _said(actions, NARROW_STATE) or {}
    updated, keeps_lower = of_state.get("names", ()), bool(of_state.get("lower_halves"))
    said = _said(actions, NARROW_PARAMETERS) or {}
    dtype = torch.float16 if _FLOAT16 in actions else NARROW
    form = {"trains": subject.trains, "keeps_lower": keeps_lower}
    return HalfParameters(subject.model, said, updated, dtype, **form)


def _int8_weights(subject: Subject, actions: Actions) -> Part:
    kind = next(kind for kind in INT8_WEIGHTS if kind in actions)
    return Int8Weights(subject.model, _said(actions, kind) or {})


def _no_graph(_subject: Subject, _actions: Actions) -> Part:
    return NoGraph()


def _undone_checkpoints(_subject: Subject, _actions: Actions) -> Part:
    return CheckpointsUndone()


def _parameters(subject: Subject, actions: Actions) -> Part:
    directions = ParameterDirections.read(_said(actions, "offload_parameters") or {})
    return ParametersElsewhere(subject.model, directions, subject.offload_dir)


@dataclass(slots=True, frozen=True)
class Technique:
    """How actions of one kind are carried out.

    Attributes:
        make: Makes the part that does it; ``None`` where there is nothing to do in a step.
        needs_whole_step: It does something outside forward, so the step must be memfit's own.
        for_inference: It has something to do in a step that only infers.
    """

    make: Callable[[Subject, Actions], Part | None]
    needs_whole_step: bool = False
    for_inference: bool = False


TECHNIQUES = {
    "allocator_settings": Technique(_allocator, for_inference=True),
    "fuse_optimizer": Technique(_optimizer_in_backward, needs_whole_step=True),
    "one_by_one": Technique(_one_by_one, needs_whole_step=True),
    NARROW_PARAMETERS: Technique(_narrow_parameters, needs_whole_step=True, for_inference=True),
    **dict.fromkeys(
        INT8_WEIGHTS, Technique(_int8_weights, needs_whole_step=True, for_inference=True)
    ),
    NARROW_STATE: Technique(_narrow_state, needs_whole_step=True),
    "offload_optimizer": Technique(_state, needs_whole_step=True),
    "offload_parameters": Technique(_parameters, needs_whole_step=True, for_inference=True),
    "micro_batch": Technique(_micro_batches, needs_whole_step=True, for_inference=True),
    "no_graph": Technique(_no_graph, for_inference=True),
    "undo_checkpoints": Technique(_undone_checkpoints),
    "autocast": Technique(_autocast, for_inference=True),
    _FLOAT16: Technique(_autocast, needs_whole_step=True, for_inference=True),
    "remat": Technique(_activations),
    "unneeded_saves": Technique(_activations),
    "offload": Technique(_activations),
    "shrink": Technique(_activations),
    "chunk": Technique(_slices, for_inference=True),
}
"""How each kind of action is carried out, in the order in which parts are made and asked."""


class Executor:
    """Carries out one plan on one model.

    Attributes:
        plan: The plan.
        subject: What it is carried out on.
        micro_batches: Cuts the batch; ``None`` where it stays whole.
        fuse: Whether the optimizer runs inside backward.
        one_by_one: Makes the updates after backward one by one, also of state in 8 bits; ``None``
            where it does not matter.
        rounded: Makes updates that are rounded at random; ``None`` where none are.
        state: Keeps the optimizer's state elsewhere; ``None`` where it stays.
        parameters: Keeps parameters elsewhere; ``None`` where they stay.
        scales_loss: Whether the loss has to be scaled for backward, and gradients back after it.
        remat: Drops, offloads and shrinks activations; ``None`` where nothing is to become of any.
    """

    def __init__(
        self, plan: Plan | Mapping[str, Any], subject: Subject, after: Executor | None = None
    ) -> None:
        """Take a plan apart, and check that it can be carried out on this.

        Nothing is installed yet, and nothing goes anywhere before :meth:`place`.

        Args:
            plan: The plan, or a mapping with its ``actions``.
            subject: What it is carried out on.
            after: The executor before this one; what both plans keep elsewhere alike stays there.

        Raises:
            UsageError: It is no plan, or asks for what the subject cannot do.
            OffloadError: The plan offloads, and the folder cannot be used.
        """
        try:
            said = plan.as_dict() if isinstance(plan, Plan) else plan
            actions = {action["kind"]: action for action in said["actions"]}
        except (KeyError, TypeError) as error:
            message = f"this is not a plan: {error!r}"
            raise UsageError(message) from error
        _require_known(actions, subject)
        self.plan = plan
        self.subject = subject
        self._actions = actions
        self._parts: dict[str, Part] = {}
        for kind, technique in TECHNIQUES.items():
            if kind not in actions:
                continue
            if kind in _OF_ACTIVATIONS and not self._parts.keys().isdisjoint(_OF_ACTIVATIONS):
                continue
            part = after._kept(kind, subject, actions) if after is not None else None
            part = part or technique.make(subject, actions)
            if part is not None:
                self._parts[kind] = part
        if subject.strays_to and self._parts.keys().isdisjoint(_OF_ACTIVATIONS):
            self._parts["remat"] = _activations(subject, actions)
        micro = self._parts.get("micro_batch")
        self.micro_batches = micro if isinstance(micro, MicroBatches) else None
        self.fuse = "fuse_optimizer" in actions
        state = self._parts.get("offload_optimizer")
        self.state = state if isinstance(state, StateElsewhere) else None
        updates = self._parts.get(NARROW_STATE, self._parts.get("one_by_one"))
        self.one_by_one = updates if isinstance(updates, UpdatesOneByOne) else None
        keeps_lower = (_said(actions, NARROW_STATE) or {}).get("lower_halves")
        is_random = NARROW_PARAMETERS in self._parts and not keeps_lower
        self.rounded = updates if is_random and isinstance(updates, UpdatesInEightBits) else None
        parameters = self._parts.get("offload_parameters")
        self.parameters = parameters if isinstance(parameters, ParametersElsewhere) else None
        autocast = self._parts.get(_FLOAT16)
        self.scales_loss = isinstance(autocast, UnderAutocast) and autocast.scales_loss
        remat = next((self._parts[kind] for kind in _OF_ACTIVATIONS if kind in self._parts), None)
        self.remat = remat if isinstance(remat, Rematerialiser) else None

    def _kept(self, kind: str, subject: Subject, actions: Actions) -> Part | None:
        """The part of a kind, where another plan wants the same of the same."""
        action = actions[kind]
        same = self.subject == subject and self._actions.get(kind) == action
        part = self._parts.get(kind)
        is_offloaded = part is not None and part.tier is not None
        if kind == NARROW_STATE:
            of_place = "offload_optimizer"
            same = same and is_offloaded and self._actions.get(of_place) == actions.get(of_place)
        return part if same and kind in (*BETWEEN_STEPS, NARROW_STATE) else None

    def without(self, *kinds: str) -> Executor:
        """This without actions of some kinds."""
        plan = self.plan.as_dict() if isinstance(self.plan, Plan) else self.plan
        return Executor(without(plan, kinds), self.subject, after=self)

    # What happened

    @property
    def diverged(self) -> bool:
        """Whether the last forward left the plan."""
        return any(part.diverged for part in self._parts.values())

    @property
    def divergence(self) -> str:
        """Where it did, as a sentence; empty if it did not."""
        return next(filter(None, (part.divergence for part in self._parts.values())), "")

    @property
    def fewer_slices(self) -> dict[str, Any] | None:
        """The slices that the last forward could run in; ``None`` for all or none of the plan's."""
        slices = self._parts.get("chunk")
        return slices.less if isinstance(slices, InSlices) else None

    @property
    def tiers(self) -> list[Tier]:
        """Where bytes go."""
        return [part.tier for part in self._parts.values() if part.tier is not None]

    @property
    def needs_whole_step(self) -> str | None:
        """Kind of an action that does something outside forward; ``None`` without one."""
        kinds = (kind for kind, technique in TECHNIQUES.items() if technique.needs_whole_step)
        in_call = isinstance(self._parts.get("micro_batch"), InPieces)
        there = [kind for kind in kinds if kind in self._actions]
        if not self.subject.trains:
            there = [kind for kind in there if kind not in (*_WEIGHTS, _FLOAT16)]
        return next((kind for kind in there if kind != "micro_batch" or not in_call), None)

    # A step

    def forward(self) -> contextlib.AbstractContextManager[None]:
        """What a forward runs inside, the loss included."""
        return self._inside(lambda part: part.forward())

    def running(self) -> contextlib.AbstractContextManager[None]:
        """What the whole step runs inside, or whatever uses parameters besides."""
        return self._inside(lambda part: part.running())

    def in_forward(self) -> contextlib.AbstractContextManager[None]:
        """What code of the user's runs inside between the calls of a forward, until backward."""
        return self._inside(lambda part: part.in_forward())

    def update_of(self, parameter: Any) -> contextlib.AbstractContextManager[None]:
        """What the update of one parameter runs inside: its state and itself are there.

        Args:
            parameter: The parameter.
        """
        return self._inside(lambda part: part.update_of(parameter))

    @contextlib.contextmanager
    def _inside(
        self, of: Callable[[Part], contextlib.AbstractContextManager[None]]
    ) -> Iterator[None]:
        with contextlib.ExitStack() as entered:
            for part in self._parts.values():
                entered.enter_context(of(part))
            yield

    @contextlib.contextmanager
    def updates_in_backward(self) -> Iterator[None]:
        """What the last backward of a step runs inside: the optimizer's updates, where fused."""
        fused = self._parts.get("fuse_optimizer")
        if not isinstance(fused, OptimizerInBackward):
            yield
            return
        updates = contextlib.nullcontext() if self.state is None else self.state.updates()
        with interrupts_wait(), updates, fused.attached(self.update_of):
            yield

    def update(self) -> None:
        """One step of the optimizer, after backward.

        Raises:
            OffloadError: State or a parameter did not come back as it went.
            UsageError: The optimizer has hooks that need all of the step at once.
        """
        optimizer = self.subject.optimizer
        assert optimizer is not None, "asked for only with one"
        if not self.updates_one_by_one:
            optimizer.step()
            return
        kinds = ("offload_optimizer", "offload_parameters", NARROW_STATE, "one_by_one")
        require_step_of_torch(optimizer, next(kind for kind in kinds if kind in self._parts))
        self.update_all().finish()

    @property
    def updates_one_by_one(self) -> bool:
        """Whether updates after backward come one by one."""
        return not (self.state is None and self.parameters is None and self.one_by_one is None)

    def update_all(self) -> OneByOne:
        """All updates of one step, one by one; the step is still to be finished.

        Raises:
            OffloadError: As :meth:`update`.
        """
        optimizer, parameters = self.subject.optimizer, self.parameters
        assert optimizer is not None, "asked for only with one"
        if self.state is not None:
            around = contextlib.nullcontext if parameters is None else parameters.update_of
            return self.state.update_all(around)
        if parameters is not None:
            return parameters.update_all(optimizer)
        assert self.one_by_one is not None, "asked for only where updates come one by one"
        return self.one_by_one.update_all()

    # Between steps

    def place(self) -> None:
        """Have all state and parameters where the plan wants them between steps.

        Raises:
            OffloadError: Some of it could not be written, or did not come back as it went.
        """
        # What goes makes room for what comes, unless its numbers are to be other ones first.
        parameters = None if NARROW_PARAMETERS in self._parts else self.parameters
        state = None if NARROW_STATE in self._parts else self.state
        if self.parameters is None:
            self._place_state(state)
            bring_parameters_home(self.subject.model)
            self._widen()
        else:
            self._widen()
            if parameters is not None:
                parameters.place()
            self._place_state(state)
        for part in self._parts.values():
            if part is not parameters and part is not state:
                part.place()

    def _place_state(self, going: StateElsewhere | None) -> None:
        """Have the state where the plan wants it.

        Args:
            going: What offloads it; ``None`` where it stays in memory, or is narrowed first.
        """
        if self.subject.optimizer is None:
            return
        away = () if self.state is None else (AwayState, SlicedState)
        stays = (*away, EightBitState) if NARROW_STATE in self._parts else away
        bring_home(self.subject.optimizer, stays)
        if going is not None:
            going.place()

    def _widen(self) -> None:
        """Have parameters in their own types, unless the plan wants others."""
        if NARROW_PARAMETERS not in self._parts:
            widen(self.subject.model.parameters())
        if self._parts.keys().isdisjoint(INT8_WEIGHTS):
            restore(self.subject.model)


def bring_all_home(subject: Subject) -> None:
    """Have all state and parameters in memory, whichever plan sent them out.

    Args:
        subject: Whose they are.

    Raises:
        OffloadError: Some of it did not come back as it went.
    """
    if subject.optimizer is not None:
        bring_home(subject.optimizer)
    bring_parameters_home(subject.model)
    widen(subject.model.parameters())
    restore(subject.model)


def without(plan: Mapping[str, Any], kinds: tuple[str, ...]) -> Mapping[str, Any]:
    """A plan without some of its actions.

    Args:
        plan: The plan as parsed JSON.
        kinds: Kinds of action to leave out.
    """
    return {**plan, "actions": [a for a in plan["actions"] if a["kind"] not in kinds]}


def _require_known(actions: Actions, subject: Subject) -> None:
    unknown = sorted(actions.keys() - TECHNIQUES.keys())
    if unknown:
        message = f"the plan holds `{unknown[0]}`, which this memfit does not know"
        raise UsageError(message)
    trains = [kind for kind in actions if not TECHNIQUES[kind].for_inference]
    if trains and not subject.trains:
        message = f"the plan holds `{trains[0]}`, and the workload has no loss"
        raise UsageError(message)
