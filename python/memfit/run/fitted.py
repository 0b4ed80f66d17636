"""A workload that runs by a plan.

Responsible for :class:`Fitted`: one planned step, or a planned forward for people who keep their
own loop, and for planning again when the model leaves its plan. Not responsible for any single
technique (:mod:`memfit.apply`) or for making plans (the engine).

Constructing a :class:`Fitted` touches neither parameters nor random state. Hooks exist only while a
step or forward runs, and only for actions that are in the plan.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from memfit.apply.allocator_settings import set_up
from memfit.apply.micro_batch import REDUCTIONS, Weights, cut
from memfit.apply.offload.optimizer_state import StateDirections, StateElsewhere
from memfit.apply.offload.parameters import (
    ParameterDirections,
    ParametersElsewhere,
    bring_parameters_home,
)
from memfit.apply.offload.state_view import bring_home
from memfit.apply.offload.tiers import open_tier
from memfit.apply.optimizer_in_backward import OptimizerInBackward, refuse_pre_hooks
from memfit.apply.remat.remat import Rematerialiser
from memfit.apply.slices.in_slices import InSlices
from memfit.errors import UsageError
from memfit.run.elastic import Elastic
from memfit.weights.weightless import require_weights
from memfit.workload import Workload

if TYPE_CHECKING:
    from memfit.run.recovery import Recovery

Replan = Callable[[Any], Mapping[str, Any] | None]
"""Captures and plans again for a batch; ``None`` to go on as before."""

MAX_REPLANS = 2
"""Times the step is planned again for batches of one shape; then its divergence is lived with."""

_KINDS = frozenset(
    {
        "remat",
        "offload",
        "fuse_optimizer",
        "offload_optimizer",
        "offload_parameters",
        "micro_batch",
        "allocator_settings",
        "chunk",
    }
)


@dataclass(slots=True, frozen=True)
class Report:
    """What the steps so far did.

    Attributes:
        steps: Steps, or forwards of an own loop, that ran to their end.
        dropped_saves: Tensors dropped in the last forward.
        replayed_ops: Ops run again for it.
        offloaded_tensors: Tensors kept elsewhere in the last forward.
        offloaded_bytes_written: Bytes that went elsewhere in all steps by the running plan,
            optimizer state and parameters included.
        offloaded_bytes_read: Bytes that came back.
        offload_seconds_waited: What these steps waited for either.
        kept_drops: Drops and offloads of the plan that were not carried out, with the reason.
        diverged: Whether the last step left its plan.
        divergence: Where, as a sentence; empty if it did not.
        replans: Times the step was planned again.
        not_compiled: Why the step runs eager though it was asked to be compiled; empty otherwise.
        refused_attempts: Attempts at a step that the budget refused.
        recovered_steps: Steps that ran by a tighter plan after that.
    """

    steps: int
    dropped_saves: int
    replayed_ops: int
    offloaded_tensors: int
    offloaded_bytes_written: int
    offloaded_bytes_read: int
    offload_seconds_waited: float
    kept_drops: tuple[str, ...]
    diverged: bool
    divergence: str
    replans: int
    not_compiled: str = ""
    refused_attempts: int = 0
    recovered_steps: int = 0


@dataclass(slots=True, frozen=True)
class _Actions:
    """A plan taken apart.

    Attributes:
        plan: The plan.
        remat: Carries out its rematerialisation and offloading; ``None`` without either.
        in_slices: Runs part of it in slices; ``None`` where all runs whole.
        pieces: Micro-batches; 1 without.
        fuse: Whether the optimizer runs inside backward.
        state: Keeps the optimizer's state elsewhere; ``None`` where it stays.
        parameters: Keeps parameters elsewhere; ``None`` where they stay.
    """

    plan: Mapping[str, Any]
    remat: Rematerialiser | None
    in_slices: InSlices | None
    pieces: int
    fuse: bool
    state: StateElsewhere | None = None
    parameters: ParametersElsewhere | None = None

    def running(self) -> contextlib.AbstractContextManager[None]:
        """What a step runs inside."""
        return contextlib.nullcontext() if self.parameters is None else self.parameters.running()

    @contextlib.contextmanager
    def update_of(self, parameter: Any) -> Iterator[None]:
        """What the update of one parameter runs inside: its state and itself are there."""
        with contextlib.ExitStack() as entered:
            for part in (self.state, self.parameters):
                if part is not None:
                    entered.enter_context(part.update_of(parameter))
            yield

    @property
    def diverged(self) -> bool:
        """Whether the last forward left the plan."""
        return any(part is not None and part.diverged for part in (self.remat, self.in_slices))


class Fitted:
    """A workload that runs by a plan.

    Attributes:
        workload: The workload.
        optimizer: Its optimizer; ``None`` when the workload has none.
        elastic: The lease that it lives within; ``None`` without one.
        has_begun_update: Whether the optimizer has begun, in the last step.
    """

    def __init__(
        self,
        workload: Workload,
        plan: Mapping[str, Any],
        *,
        loss_reduction: str = "",
        replan: Replan | None = None,
        offload_dir: str | PathLike[str] = "",
        not_compiled: str = "",
        recovery: Recovery | None = None,
        warn: bool = True,
    ) -> None:
        """Apply a plan to a workload.

        Args:
            workload: The workload the plan was made for. Its model is left unmodified.
            plan: The plan as parsed JSON.
            loss_reduction: How the loss reduces over the batch, as the trace says; one of
                ``mean``, ``sum``, ``token_mean``, or empty for watching the loss.
            replan: Plans again when the running model leaves the plan; ``None`` for never.
            offload_dir: Where to write tensors that the plan offloads to a disk; by default where
                the plan says, or else the system's folder for temporary files.
            not_compiled: Why the step is not compiled though that was asked for, for the report.
            recovery: Holds steps to a budget and runs refused ones again; ``None`` for no budget.
            warn: Whether to warn, once, when the running model leaves the plan.

        Raises:
            UsageError: The plan asks for what this workload cannot do.
            OffloadError: The plan offloads, and the folder cannot be used.
        """
        require_weights(workload, "a fitted workload runs")
        self.workload = workload
        self.optimizer = _optimizer(workload)
        self._replan = replan
        self._not_compiled = not_compiled
        self._recovery = recovery
        self.has_begun_update = False
        self._warn = warn
        if loss_reduction not in REDUCTIONS:
            message = f"unknown loss reduction `{loss_reduction}`: one of {REDUCTIONS[1:]}"
            raise UsageError(message)
        self._loss_reduction = loss_reduction
        self._offload_dir = offload_dir
        self._actions = self._read(plan)
        self._by_shape: dict[Any, _Actions] = {}
        self._diverged: set[Any] = set()
        self._attempts: dict[Any, int] = {}
        self._shape: Any = None
        self._running = self._actions
        self._steps = 0
        self._replans = 0
        self._closed = False
        self.elastic: Elastic | None = None

    @property
    def plan(self) -> Mapping[str, Any]:
        """The plan that the last step ran by, or the next one will if none ran."""
        return self._running.plan

    def __enter__(self) -> Self:
        """Use the fitted workload inside a ``with``; leaving closes it."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()

    def close(self) -> None:
        """Let go of plans, of files, and of what the last step left to report; no step can follow.

        Optimizer state and parameters that are elsewhere come home. Besides, model and optimizer
        need no undoing: nothing else is installed on them between steps.

        Raises:
            OffloadError: One did not come back as it went.
        """
        self._closed = True
        if self._recovery is not None:
            self._recovery.close()
        if self.optimizer is not None:
            bring_home(self.optimizer)
        bring_parameters_home(self.workload.model)
        self._by_shape.clear()
        self._actions = self._running = self._read({"actions": []})

    # One step

    def step(self, batch: Any = None) -> Any:
        """Run one whole step: forward, backward, clipping, optimizer, gradients released.

        Args:
            batch: The batch; the workload's own by default.

        Returns:
            The loss, detached. For inference, what the forward returns.

        Raises:
            UsageError: The plan cannot be carried out with this batch or loss.
            ReplayError: A dropped tensor was changed behind memfit's back; gradients are gone,
                parameters are as before unless the plan runs the optimizer inside backward.
            OffloadError: A tensor could not be written elsewhere, or did not come back; likewise,
                but for optimizer state that did not come back, where the message says more.
            OutOfBudget: Under a guard: the step was refused and no tighter plan could save it; all
                is as before the step, unless a note says otherwise.
        """
        batch = self.workload.batch if batch is None else batch
        self._between_steps()
        if self._recovery is not None:
            return self._recovery.step(self, batch)
        return self.step_once(batch)

    def step_once(self, batch: Any) -> Any:
        """Run one whole step by the plan there is; see :meth:`step`.

        Args:
            batch: The batch.

        Returns:
            As :meth:`step`.
        """
        self.has_begun_update = False
        actions = self._choose(batch)
        if not self.workload.training:
            self.place_state()
            with torch.no_grad(), self._autocast(), actions.running():
                result = self.workload.infer(self.workload.model, batch)
            self._completed(actions)
            return result
        try:
            self.place_state()
            with actions.running():
                loss = self._forward_and_backward(actions, batch)
                self._update(actions)
        except BaseException:
            self._release_gradients()
            raise
        self._release_gradients()
        self._completed(actions)
        return loss

    def _forward_and_backward(self, actions: _Actions, batch: Any) -> Tensor:
        if actions.pieces == 1:
            loss = self._loss(actions, batch)
            with self._optimizer_inside(actions):
                loss.backward()  # type: ignore[no-untyped-call]
            return loss.detach()
        workload = self.workload
        pieces = cut(batch, actions.pieces, workload.batch_dim)
        weights = Weights(pieces, self._loss_reduction, workload.loss_weight)
        losses: list[Tensor] = []
        for index, piece in enumerate(pieces):
            with weights.observe():
                loss = self._loss(actions, piece.batch)
            last = index + 1 == len(pieces)
            if last:
                self._scale_gradients(weights.correction())
            self._weighted_backward(actions, loss, weights.of(index), last=last)
            # Some losses lie in the memory of what they sum, which would stay for all pieces.
            losses.append(loss.detach().clone())
            del loss
        return weights.mean(losses)

    def _weighted_backward(
        self, actions: _Actions, loss: Tensor, weight: float, *, last: bool
    ) -> None:
        """Add a piece's gradients; one without any target has none, and its mean is no number."""
        inside = self._optimizer_inside(actions) if last else contextlib.nullcontext()
        if weight > 0:
            with inside:
                loss.backward(torch.full_like(loss, weight))  # type: ignore[no-untyped-call]
        elif last and actions.fuse and self.optimizer is not None:
            self.optimizer.step()

    def _loss(self, actions: _Actions, batch: Any) -> Tensor:
        """The loss of a batch, with its graph."""
        loss_of = self.workload.loss
        if loss_of is None:
            raise UsageError("the workload has no loss: it only infers")
        with self._autocast(), _planned_forward(actions):
            return loss_of(self.workload.model, batch)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        dtype = self.workload.autocast
        if dtype is None:
            return contextlib.nullcontext()
        device = next((p.device.type for p in self.workload.model.parameters()), "cpu")
        return torch.autocast(device, dtype)

    @contextlib.contextmanager
    def _optimizer_inside(self, actions: _Actions) -> Iterator[None]:
        if not actions.fuse or self.optimizer is None:
            yield
            return
        self.has_begun_update = True
        inside = OptimizerInBackward(self.optimizer)
        updates = contextlib.nullcontext() if actions.state is None else actions.state.updates()
        with updates, inside.attached(actions.update_of):
            yield

    def _scale_gradients(self, factor: float) -> None:
        if factor != 1.0:
            for parameter in self.workload.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)

    def _update(self, actions: _Actions) -> None:
        if self.workload.clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(
                self.workload.model.parameters(), self.workload.clip_grad_norm
            )
        if self.optimizer is None or actions.fuse:
            return
        self.has_begun_update = True
        if actions.state is not None:
            away = actions.parameters
            actions.state.step(away.update_of if away is not None else contextlib.nullcontext)
        elif actions.parameters is not None:
            refuse_pre_hooks(self.optimizer, "offload_parameters")
            actions.parameters.update_all(self.optimizer).finish()
        else:
            self.optimizer.step()

    def place_state(self) -> None:
        """Have the optimizer's state and the parameters where the plan wants them between steps.

        :meth:`step` begins with it; there is much to do only where something else ran meanwhile.

        Raises:
            OffloadError: Some of it could not be written, or did not come back as it went.
        """
        if self._running.state is not None:
            self._running.state.send_all()
        elif self.optimizer is not None:
            bring_home(self.optimizer)
        if self._running.parameters is not None:
            self._running.parameters.place()
        else:
            bring_parameters_home(self.workload.model)

    def _release_gradients(self) -> None:
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        self.workload.model.zero_grad(set_to_none=True)

    # The user's own loop

    @contextlib.contextmanager
    def forward(self, batch: Any = None) -> Iterator[None]:
        """Run your own forward and loss inside this, and ``loss.backward()`` after it.

        Args:
            batch: The batch about to run, if it differs in shape from the workload's.

        Raises:
            UsageError: The plan holds an action that lives outside forward.
        """
        self._between_steps()
        actions = self._choose(self.workload.batch if batch is None else batch)
        for kind, present in (
            ("fuse_optimizer", actions.fuse),
            ("offload_optimizer", actions.state is not None),
            ("offload_parameters", actions.parameters is not None),
            ("micro_batch", actions.pieces > 1),
        ):
            if present:
                message = (
                    f"the plan holds `{kind}`, which needs `Fitted.step`\n"
                    "hint: plan with `own_loop=True` to keep your own loop"
                )
                raise UsageError(message)
        with _planned_forward(actions):
            yield
        self._completed(actions)

    # Plans

    def follow(self, plan: Mapping[str, Any]) -> None:
        """Run by another plan of the same workload from the next step on.

        Args:
            plan: The plan as parsed JSON.

        Raises:
            UsageError: The plan asks for what this workload cannot do.
        """
        self._actions = self._running = self._read(plan)
        self._by_shape.clear()
        self._diverged.clear()
        self._attempts.clear()

    def adopt(self, batch: Any, plan: Mapping[str, Any]) -> None:
        """Run batches of a shape by another plan from now on.

        Args:
            batch: A batch of that shape.
            plan: The plan as parsed JSON.

        Raises:
            UsageError: The plan asks for what this workload cannot do.
        """
        self._by_shape[_shape(batch)] = self._read(plan)

    def report(self) -> Report:
        """What the steps so far did."""
        remat = self._running.remat
        outcome = remat.outcome() if remat is not None else None
        seen = outcome.observations if outcome is not None else None
        parts = (remat, self._running.state, self._running.parameters)
        tiers = [part.tier for part in parts if part is not None]
        moved = [tier.moved() for tier in tiers if tier is not None]
        counts = self._recovery.counts if self._recovery is not None else None
        divergences = [
            seen.divergence if seen else "",
            self._running.in_slices.divergence if self._running.in_slices else "",
        ]
        return Report(
            steps=self._steps,
            dropped_saves=seen.dropped_saves if seen else 0,
            replayed_ops=outcome.replayed_ops if outcome else 0,
            offloaded_tensors=outcome.offloaded if outcome else 0,
            offloaded_bytes_written=sum(tier.bytes_written for tier in moved),
            offloaded_bytes_read=sum(tier.bytes_read for tier in moved),
            offload_seconds_waited=sum(tier.seconds_waited for tier in moved),
            kept_drops=tuple(seen.kept_drops) if seen else (),
            diverged=self._running.diverged,
            divergence=next(filter(None, divergences), ""),
            replans=self._replans,
            not_compiled=self._not_compiled,
            refused_attempts=counts.refused_attempts if counts else 0,
            recovered_steps=counts.recovered_steps if counts else 0,
        )

    def _between_steps(self) -> None:
        """Follow the lease, before anything of the next step is remembered or live."""
        if self._closed:
            raise UsageError("this `Fitted` is closed: fit the workload again")
        if self.elastic is not None:
            self.elastic.between_steps()

    def _choose(self, batch: Any) -> _Actions:
        """The actions for a batch of this shape, planned again if its last step diverged."""
        shape = _shape(batch)
        actions = self._by_shape.get(shape, self._actions)
        if self._replan is not None and shape in self._diverged:
            self._diverged.discard(shape)
            plan = self._replan(batch)
            self._attempts[shape] = self._attempts.get(shape, 0) + 1
            if plan is not None:
                self._replans += 1
                actions = self._by_shape[shape] = self._read(plan)
        self._shape = shape
        self._running = actions
        return actions

    def _completed(self, actions: _Actions) -> None:
        """Count a step, and remember a divergence for the next one of its shape."""
        self._steps += 1
        if not actions.diverged or self._replan is None:
            return
        if self._attempts.get(self._shape, 0) < MAX_REPLANS:
            self._diverged.add(self._shape)

    def _read(self, plan: Mapping[str, Any]) -> _Actions:
        """Take a plan apart and check that this workload can do what it asks."""
        try:
            actions = {action["kind"]: action for action in plan["actions"]}
        except (KeyError, TypeError) as error:
            message = f"this is not a plan: {error!r}"
            raise UsageError(message) from error
        unknown = sorted(actions.keys() - _KINDS)
        if unknown:
            message = f"the plan holds `{unknown[0]}`, which this memfit does not know"
            raise UsageError(message)
        settings = actions.pop("allocator_settings", None)
        if settings is not None:
            set_up(str(settings.get("settings", "")))
        trains = [kind for kind in actions if kind != "offload_parameters"]
        if trains and not self.workload.training:
            message = f"the plan holds `{trains[0]}`, and the workload has no loss"
            raise UsageError(message)
        fuse = "fuse_optimizer" in actions
        if fuse and self.optimizer is not None:
            if self.workload.clip_grad_norm is not None:
                raise UsageError(
                    "the plan runs the optimizer inside backward, and `clip_grad_norm` needs all "
                    "gradients at once\nhint: plan again for this workload"
                )
            OptimizerInBackward(self.optimizer)
        state = self._state_elsewhere(actions)
        remat = self._planned_forwards(actions)
        pieces = int(actions["micro_batch"]["count"]) if "micro_batch" in actions else 1
        if pieces < 1:
            message = f"the plan cuts the batch into `{pieces}` pieces"
            raise UsageError(message)
        chunk = _part(actions, "chunk")
        in_slices = InSlices(self.workload.model, chunk) if chunk is not None else None
        part = _part(actions, "offload_parameters")
        parameters = None
        if part is not None:
            parameters = ParametersElsewhere(
                self.workload.model, ParameterDirections.read(part), self._offload_dir
            )
        return _Actions(plan, remat, in_slices, pieces, fuse, state, parameters)

    def _state_elsewhere(self, actions: Mapping[str, Mapping[str, Any]]) -> StateElsewhere | None:
        """What keeps the optimizer's state elsewhere; ``None`` where it stays."""
        part = _part(actions, "offload_optimizer")
        if part is None or self.optimizer is None:
            return None
        directions = StateDirections.read(part)
        return StateElsewhere(self.optimizer, self.workload.model, directions, self._offload_dir)

    def _planned_forwards(self, actions: Mapping[str, Mapping[str, Any]]) -> Rematerialiser | None:
        """What carries out the actions that live in forward; ``None`` without any."""
        remat, offload = _part(actions, "remat"), _part(actions, "offload")
        if remat is None and offload is None:
            return None
        tier = None
        if offload is not None:
            folder = self._offload_dir or offload.get("folder", "")
            window_bytes = int(offload.get("window_bytes", 0))
            tier = open_tier(str(offload.get("tier")), window_bytes, folder)
        return Rematerialiser(self.workload.model, remat, offload, tier, warn=self._warn)


def _part(actions: Mapping[str, Mapping[str, Any]], kind: str) -> Mapping[str, Any] | None:
    """What an action says to the executor; ``None`` without that action."""
    return actions[kind].get(kind) or {} if kind in actions else None


@contextlib.contextmanager
def _planned_forward(actions: _Actions) -> Iterator[None]:
    with contextlib.ExitStack() as entered:
        for part in (actions.remat, actions.in_slices):
            if part is not None:
                entered.enter_context(part.forward())
        yield


def _optimizer(workload: Workload) -> Optimizer | None:
    """The workload's optimizer over its model's own parameters."""
    given = workload.optimizer
    if given is None or isinstance(given, Optimizer):
        return given
    optimizer = given(workload.model.parameters())
    if not isinstance(optimizer, Optimizer):
        message = (
            f"`optimizer` must return a `torch.optim.Optimizer`, got `{type(optimizer).__name__}`"
        )
        raise UsageError(message)
    return optimizer


def _shape(batch: Any) -> Any:
    """What of a batch decides which ops run: shapes and types of its tensors."""
    return tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else None
        for leaf in tree_leaves(batch)
    )
