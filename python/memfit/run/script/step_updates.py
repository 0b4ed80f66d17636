"""How the updates of one loop's steps are made: by the script's optimizer, or by memfit for it.

Responsible for making them where a plan wants them made otherwise, for the state that a recorded
step would make beyond the budget, and for the proof that updates may run inside backward. Not
responsible for making one (:mod:`memfit.apply`) nor for which plan a step runs by
(:mod:`memfit.run.script.loop`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from memfit import _native
from memfit.answers import Plan
from memfit.apply.executor import NARROW_STATE, Executor, Subject
from memfit.apply.optimizer_in_backward import held_parameters
from memfit.errors import MemfitError
from memfit.options import HOST
from memfit.run.script.adjacent import Site, adjacent_refusal, calling_site, gradients_looked_at
from memfit.run.script.fused import FusedUpdates
from memfit.run.script.passes import ObservedPass
from memfit.run.script.percentage import least_bytes
from memfit.run.script.place import LEAST_STATE_BYTES, state_elsewhere
from memfit.run.script.request import FitRequest
from memfit.run.script.stand_in import StandIn
from memfit.run.script.update_needs import UpdateNeeds, update_needs
from memfit.run.script.updates import refusal
from memfit.tensors.barrier import without_barrier
from memfit.tensors.moments import LEAST_NUMBERS, eight_bit_refusal
from memfit.tensors.optimizers import gradients_reduced_later, in_memory, step_of_others
from memfit.tensors.sliced_update import state_slices

ONE_BY_ONE = {"actions": [{"kind": "one_by_one"}]}
"""A plan that only makes updates one by one, before any other is known."""


_NARROW = "recorded steps have no room for the optimizer's state, so it is held in 8 bits"

_CLEARLY = 0.9
"""Part of the budget up to which state stays while a step is recorded: one of another size may take
more than those before."""


class StepUpdates:
    """The updates of one loop."""

    def __init__(
        self,
        request: FitRequest,
        within: Callable[[], str | int],
        on_place: Callable[[str], None],
        on_note: Callable[[str], None],
    ) -> None:
        """Make none yet.

        Args:
            request: Which plans are allowed.
            within: The budget as it is now.
            on_place: Told of a place that memfit chose.
            on_note: Told of what else is done before there is a plan.
        """
        self._request = request
        self._within = within
        self._on_place = on_place
        self._on_note = on_note
        self._stand_in = StandIn()
        self._fused = FusedUpdates()
        self._needs: UpdateNeeds | None = None
        self._backward: Site | None = None
        self._backwards = 0
        self._not_fused = ""
        self._may_fuse = "fuse_optimizer" not in request.options.forbid

    def require_none_waiting(self) -> None:
        """Let a pass begin.

        Raises:
            UpdatesMadeError: The last one was updated, and the script did not call its optimizer.
        """
        self._fused.require_none_waiting()

    def record(self) -> None:
        """A recorded pass begins."""
        self._backwards = 0
        self._backward = None
        self._not_fused = "the optimizer was not called as usual"
        if self._may_fuse:
            self._fused.watch()

    def rest(self) -> None:
        """Nothing is planned any more."""
        self._fused.rest()

    def another_comes(self) -> None:
        """Another model comes in the place of one that is gone, with an optimizer of its own."""
        self._needs = None

    def compiled_runs(self) -> bool:
        """Something compiled runs, which must see gradients as torch has them.

        Returns:
            Whether updates may have been made inside backward until now.
        """
        could, self._may_fuse = self._may_fuse, False
        self._fused.rest()
        return could

    # Backward

    def backward_begins(self, executor: Executor | None) -> str:
        """Backward is about to run.

        Args:
            executor: Carries out the plan of the pass; ``None`` without one.

        Returns:
            Why updates that the plan wants inside backward cannot be there; empty where they can.

        Raises:
            UpdatesMadeError: Another backward has made them already.
        """
        self._fused.require_none_waiting()
        self._backwards += 1
        self._backward = calling_site()
        fuses = executor is not None and executor.fuse
        self._fused.looks.on_look = None
        left = self._fused.begin(executor) if executor is not None and fuses else ""
        self._fused.looks.begin()  # from here to the next one
        return left

    def backward_ended(self) -> None:
        """Backward has run."""
        self._fused.backward_ended()

    # The optimizer

    def step_begins(self, optimizer: Optimizer, executor: Executor | None) -> None:
        """The optimizer is about to step: make its updates, if the plan wants them otherwise.

        Args:
            optimizer: The optimizer.
            executor: Carries out the plan of the pass; ``None`` without one.

        Raises:
            OffloadError: State or a parameter did not come back as it went.
        """
        if self._fused.step_begins(optimizer):
            return
        if executor is None or executor.subject.optimizer is not optimizer:
            return
        if executor.updates_one_by_one and not step_of_others(optimizer):
            self._stand_in.step_begins(executor)

    def step_ended(self) -> None:
        """An optimizer has stepped."""
        self._stand_in.step_ended()
        self._fused.step_ended()

    # A recorded step

    def recording_begins(
        self, model: nn.Module, optimizers: list[Optimizer], peak_bytes: int, *, is_second: bool
    ) -> Executor | None:
        """A pass is about to be recorded: take the state elsewhere that it has no room for.

        What the first one takes is not known: as much again as is live, perhaps.

        Args:
            model: The model.
            optimizers: Those that update it.
            peak_bytes: Most bytes live at once in the passes recorded before; 0 before the first.
            is_second: Whether that was one, in which the state came to be.

        Returns:
            What keeps the state elsewhere; ``None`` where it stays.
        """
        device = _device_of(model)
        budget_bytes = least_bytes(self._within(), live_bytes(device))
        if not budget_bytes or len(optimizers) != 1 or refusal(model, optimizers) is not None:
            return None
        held_bytes = state_bytes(optimizers[0])
        before = peak_bytes or 2 * live_bytes(device)
        needed = before + (held_bytes if is_second else 0)
        if not held_bytes or needed <= _CLEARLY * budget_bytes:
            return None
        return self._elsewhere(model, optimizers[0], held_bytes, device.type)

    def is_tight(self, device: torch.device, peak_bytes: int) -> bool:
        """Whether a recorded pass may take more than there is.

        Args:
            device: Where it runs.
            peak_bytes: Most bytes live at once in those before; 0 before the first.
        """
        budget_bytes = least_bytes(self._within(), live_bytes(device))
        before = peak_bytes or 2 * live_bytes(device)
        return budget_bytes > 0 and before > _CLEARLY * budget_bytes

    def foreseen_bytes(self, live_bytes: int, needs: UpdateNeeds) -> int:
        """What updates make at once whose state is in memory, as they are going to be made.

        Args:
            live_bytes: What is live when they begin.
            needs: What they take.
        """
        within, together = str(self._within()), needs.together_bytes
        alone = max((took for took, _ in needs.alone.values()), default=0)
        if "%" in within or "one_by_one" in self._request.options.forbid:
            return together
        room_bytes = _native.parse_budget(within, 0) - live_bytes
        return alone if alone <= room_bytes < together else together

    def idle(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        device: torch.device,
        held: Executor | None = None,
    ) -> Executor | None:
        """What keeps the state of an optimizer elsewhere that no pass under way is updated by.

        Args:
            model: The model that it updates.
            optimizer: The optimizer.
            device: Where its state is.
            held: What carried a plan out in the last pass; parameters that are elsewhere stay so.

        Returns:
            It; ``None`` where there is no state in memory, or it stays.
        """
        held_bytes = state_bytes(optimizer)
        if held_bytes < LEAST_STATE_BYTES or refusal(model, [optimizer]) is not None:
            return None
        return self._elsewhere(model, optimizer, held_bytes, device.type, held)

    def waiting(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        device: torch.device,
        held: Executor | None,
    ) -> Executor | None:
        """What keeps state elsewhere while the script runs between steps; parameters stay put.

        Args:
            model: The model that it updates.
            optimizer: The optimizer.
            device: Where its state is.
            held: What keeps parameters elsewhere, if anything does.

        Returns:
            It; ``None`` where the state stays.
        """
        held_bytes = state_bytes(optimizer)
        with without_barrier():  # sizes of parameters are asked for, which stay where they are
            if held_bytes < LEAST_STATE_BYTES or refusal(model, [optimizer]) is not None:
                return None
            order = _turns(model, optimizer)
            directions = state_elsewhere(self._request, held_bytes, device.type, order)
            if directions is None or (held is not None and _actions(held, (NARROW_STATE,))):
                return None
            subject, kept = Subject(weakref.ref(model), optimizer, warn=False), []
            if held is not None and held.parameters is not None:
                if held.subject.optimizer is not optimizer:
                    return None
                subject, kept = held.subject, _actions(held, ("offload_parameters",))
            try:
                both = {"actions": [*kept, *directions["actions"]]}
                executor = Executor(both, subject, after=held)
                if executor.state is not None:
                    executor.state.place()
            except MemfitError:
                return None
        return executor

    def _elsewhere(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        state_bytes: int,
        device_kind: str,
        held: Executor | None = None,
    ) -> Executor | None:
        """What keeps an optimizer's state in a place, else in 8 bits; ``None`` where it stays."""
        order = _turns(model, optimizer)
        directions = state_elsewhere(self._request, state_bytes, device_kind, order)
        narrow = None if directions is not None else self._in_eight_bits(model, optimizer)
        if directions is None and narrow is None:
            return None
        try:
            actions = [
                *(directions or narrow or {})["actions"],
                *_actions(held, ("offload_parameters",)),
            ]
            whole = {"actions": actions}
            executor = Executor(
                whole, Subject(weakref.ref(model), optimizer, warn=False), after=held
            )
            executor.place()
        except MemfitError:
            return None
        if narrow is not None:
            self._on_note(_NARROW)
        elif directions is not None and self._request.may_choose_place:
            self._on_place(directions["actions"][0]["offload_optimizer"]["folder"] or HOST)
        return executor

    def _in_eight_bits(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Any] | None:
        """A plan that holds an optimizer's state in 8 bits; ``None`` where that is not allowed."""
        options = self._request.options
        may = options.promise == "approximate" or NARROW_STATE in options.allow_kinds
        if not may or NARROW_STATE in options.forbid or eight_bit_refusal(optimizer) is not None:
            return None
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        names = [
            name
            for name, parameter in model.named_parameters()
            if id(parameter) in held
            and parameter.dtype is torch.float32
            and parameter.numel() >= LEAST_NUMBERS
        ]
        return {"actions": [{"kind": NARROW_STATE, NARROW_STATE: {"names": names}}]}

    def recorded_step_begins(
        self,
        running: ObservedPass,
        model: nn.Module,
        optimizer: Optimizer,
        executor: Executor | None,
    ) -> Executor | None:
        """The optimizer is about to step in a recorded pass.

        Where its state and temporaries would exceed the budget, memfit makes the updates one by
        one, with state that goes elsewhere if need be.

        Args:
            running: The pass.
            model: The model.
            optimizer: The optimizer.
            executor: What makes its updates otherwise already; ``None`` where nothing does.

        Returns:
            What makes them from now on.

        Raises:
            OffloadError: State did not come back as it went.
        """
        if executor is not None and executor.subject.optimizer is not optimizer:
            return executor  # another model's, in whose step this one's gradients are not complete
        if lists_nothing(optimizer) or refusal(model, [optimizer]) is not None:
            return executor
        self._not_fused = self._fusing_refusal(model, optimizer)
        if executor is None or self._needs is None:
            try:
                self._needs = update_needs(optimizer, self._needs)
            except Exception:  # noqa: BLE001 - said where the step is noted
                return executor
        running.updates_begin(self._needs)
        away = running.recorder.gradients_away() if running.recorder else (0, 0)
        peak_bytes = running.peak_so_far()
        executor = executor or self._otherwise(model, optimizer, self._needs, away, peak_bytes)
        if executor is not None:
            running.leave_out_updates()
            self._stand_in.step_begins(executor)
        return executor

    def fusing_refusal(self) -> str:
        """Why the updates of the recorded step cannot run inside backward; empty where they can."""
        return self._not_fused

    def _fusing_refusal(self, model: nn.Module, optimizer: Optimizer) -> str:
        if not self._may_fuse:
            return "it is forbidden, or something compiled runs in the script"
        if not all(issubclass(type(it), nn.Parameter) for it in held_parameters(optimizer)):
            return "who looks at the gradient of a tensor that is no `nn.Parameter` is not seen"
        if self._backwards != 1:
            return f"{self._backwards} backwards run before the optimizer"
        if self._fused.looks.by_others:
            return "gradients are looked at between backward and the optimizer"
        return (
            adjacent_refusal(self._backward, calling_site())
            or gradients_reduced_later(model)
            or gradients_looked_at()
        )

    def unplanned_step_begins(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        executor: Executor | None,
        gradients_away: tuple[int, int] = (0, 0),
    ) -> Executor | None:
        """An optimizer is about to step whose updates are in no plan.

        Args:
            model: What it updates.
            optimizer: The optimizer.
            executor: What makes its updates otherwise already; ``None`` where nothing does.
            gradients_away: Bytes of all gradients that have no memory now, and of the largest.

        Returns:
            What makes them from now on.

        Raises:
            OffloadError: State did not come back as it went.
        """
        if lists_nothing(optimizer) or refusal(model, [optimizer]) is not None:
            return executor
        if executor is None:
            try:
                self._needs = update_needs(optimizer, self._needs)
            except Exception:  # noqa: BLE001 - the script's own step tells of it, if it is one
                return None
            executor = self._otherwise(model, optimizer, self._needs, gradients_away, 0)
        if executor is not None:
            self._stand_in.step_begins(executor)
        return executor

    def _otherwise(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        needs: UpdateNeeds,
        gradients_away: tuple[int, int],
        peak_bytes: int,
    ) -> Executor | None:
        """What makes the updates otherwise, where the budget asks for it at once.

        State that would leave the next pass, which is recorded too at worst, without room goes
        elsewhere from the beginning.
        """
        device, within = _device_of(model), self._within()
        budget_bytes = least_bytes(within, live_bytes(device))
        if not budget_bytes:
            return None
        away, largest_away = gradients_away
        room_bytes = budget_bytes - live_bytes(device)
        if needs.first_bytes <= room_bytes - away:
            return None
        fits_one_by_one = False
        if "one_by_one" not in self._request.options.forbid:
            try:
                took = needs.one_by_one_bytes(optimizer)
            except Exception:  # noqa: BLE001 - the script's own step tells of it, if it is one
                return None
            fits_one_by_one = took <= room_bytes - largest_away
        leaves_room = peak_bytes + needs.new_state_bytes <= budget_bytes
        if not (fits_one_by_one and leaves_room):
            size = needs.all_state_bytes
            elsewhere = self._elsewhere(model, optimizer, size, device.type)
            if elsewhere is not None:
                return elsewhere
        one_by_one = Executor(ONE_BY_ONE, Subject(weakref.ref(model), optimizer, warn=False))
        may_fit = fits_one_by_one or "%" in str(within)
        return one_by_one if may_fit and "one_by_one" not in self._request.options.forbid else None


def state_alone(executor: Executor | None) -> Executor | None:
    """What keeps of all that a plan does the state elsewhere, or in 8 bits: recordings do without.

    Args:
        executor: What carries a plan out now.
    """
    actions = _actions(executor, ("offload_optimizer", NARROW_STATE))
    if executor is None or not actions:
        return None
    return Executor({"actions": actions}, executor.subject, after=executor)


def _actions(executor: Executor | None, kinds: tuple[str, ...]) -> list[Any]:
    """What a plan that is carried out says of some techniques."""
    if executor is None:
        return []
    said = executor.plan.as_dict() if isinstance(executor.plan, Plan) else executor.plan
    return [action for action in said["actions"] if action["kind"] in kinds]


def _device_of(model: nn.Module) -> torch.device:
    """Where what is trained of a model is."""
    trained = (p for p in model.parameters() if p.requires_grad)
    return next(chain(trained, model.parameters())).device


def lists_nothing(optimizer: Optimizer) -> bool:
    """Whether the updates of a step have been made for it.

    Args:
        optimizer: Whose step has begun.
    """
    return not any(group["params"] for group in optimizer.param_groups)


def _turns(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Names of parameters in the order of their updates, each as often as it has slices."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            count = state_slices(optimizer, group, parameter)
            found += [names[id(parameter)]] * count if id(parameter) in names else []
    return found


def state_bytes(optimizer: Optimizer) -> int:
    """Bytes of an optimizer's state in memory.

    Args:
        optimizer: The optimizer.
    """
    held = [dict(in_memory(state)) for state in optimizer.state.values()]
    return sum(leaf.nbytes for leaf in tree_leaves(held) if isinstance(leaf, Tensor))


def live_bytes(device: torch.device) -> int:
    """Bytes of tensors that are live on a device.

    Args:
        device: The device.
    """
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    return _native.counted_bytes()
