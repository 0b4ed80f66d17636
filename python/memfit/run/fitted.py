"""A workload that runs by a plan.

Responsible for :class:`Fitted`: one planned step, or a planned forward for people who keep their
own loop, and for planning again when the model leaves its plan. Not responsible for any single
technique (:mod:`memfit.apply`) or for making plans (the engine).

Constructing a :class:`Fitted` touches neither parameters nor random state. Hooks exist only while a
step or forward runs, and only for actions that are in the plan.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from threading import get_ident
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from memfit.answers import CompiledPlan, Plan
from memfit.apply.executor import Executor, Subject
from memfit.apply.interrupts import interrupts_wait
from memfit.apply.micro_batch import REDUCTIONS, MicroBatches, Weights, cut
from memfit.apply.pieces.results import WholeResult
from memfit.apply.precision.loss_scale import LossScale
from memfit.apply.proven_ops import LeftProof
from memfit.apply.slices.in_slices import as_real
from memfit.errors import CaptureError, DivergenceWarning, UsageError, WorkloadError
from memfit.run.elastic import Elastic
from memfit.run.step_backup import Buffers, Generators
from memfit.weights.weightless import require_weights
from memfit.workload import Workload, batch_size

if TYPE_CHECKING:
    from memfit.run.recovery import Recovery

Replan = Callable[[Any], Plan | None]
"""Captures and plans again for a batch; ``None`` to go on as before."""

MAX_REPLANS = 2
"""Times the step is planned again for batches of one shape; then its divergence is lived with."""


@dataclass(slots=True, frozen=True)
class Report:
    """What the steps so far did.

    Attributes:
        steps: Steps, or forwards of an own loop, that ran to their end.
        dropped_saves: Tensors dropped in the last forward.
        replayed_ops: Ops run again for it.
        offloaded_tensors: Tensors kept elsewhere in the last forward.
        shrunk_tensors: Tensors held in fewer bits in the last forward.
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
        loss_scale: What the loss is multiplied by for backward; 1 where it is not scaled.
        skipped_steps: Steps that updated nothing, as a scaled gradient was not finite.
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
    shrunk_tensors: int = 0
    loss_scale: float = 1.0
    skipped_steps: int = 0


class Fitted:
    """A workload that runs by a plan.

    Attributes:
        workload: The workload.
        optimizer: Its optimizer; ``None`` when the workload has none.
        elastic: The lease that it lives within; ``None`` without one.
        has_begun_update: Whether the optimizer has begun, in the last step.
        has_skipped_update: Whether the last step updated nothing, as a gradient of the scaled loss
            was not finite: a scheduler of the learning rate should not count it.
    """

    def __init__(
        self,
        workload: Workload,
        plan: Plan | Mapping[str, Any],
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
            plan: The plan, from :func:`memfit.plan` or :func:`memfit.load`; or its parsed JSON, of
                which the ``actions`` alone will do.
            loss_reduction: How the loss reduces over the batch, as the trace says; one of
                ``mean``, ``sum``, ``token_mean``, or empty for what the plan says of it, or else
                for watching the loss.
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
        if not isinstance(plan, Plan) and "schema_version" in plan:
            plan = Plan.of(plan)
        self.workload = workload
        self.optimizer = _optimizer(workload)
        self._replan = replan
        self._not_compiled = not_compiled
        self._recovery = recovery
        self.has_begun_update = False
        self.has_skipped_update = False
        self._loss_scale = LossScale()
        self._warn = warn
        if loss_reduction not in REDUCTIONS:
            message = f"unknown loss reduction `{loss_reduction}`: one of {REDUCTIONS[1:]}"
            raise UsageError(message)
        self._loss_reduction = loss_reduction
        self._offload_dir = offload_dir
        self._buffers = Buffers(workload.model)
        self._usual = self._read(plan)
        self._by_shape: dict[Any, Executor] = {}
        self._diverged: set[Any] = set()
        self._attempts: dict[Any, int] = {}
        self._shape: Any = None
        self._running = self._usual
        self._plan = plan
        self._steps = 0
        self._replans = 0
        self._closed = False
        self._in_thread: dict[str, int] = {}
        self.elastic: Elastic | None = None

    @property
    def plan(self) -> Plan | CompiledPlan:
        """The plan that the last step ran by, or the next one will if none ran.

        Raises:
            UsageError: It was fitted by actions without a plan.
        """
        if not isinstance(self._plan, Plan):
            raise UsageError("this was fitted by actions alone: it has no plan")
        return self._plan

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
        self._by_shape.clear()
        self._usual = self._running = self._read({"actions": []})
        self._running.place()

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
        if self._in_thread.setdefault("step", get_ident()) != get_ident():
            raise UsageError("this `Fitted` runs a step in another thread: one at a time")
        try:
            self._between_steps()
            if self._recovery is not None:
                return self._recovery.step(self, batch)
            return self.step_once(batch)
        finally:
            self._in_thread.clear()

    def step_once(self, batch: Any) -> Any:
        """Run one whole step by the plan there is; see :meth:`step`.

        Args:
            batch: The batch.

        Returns:
            As :meth:`step`.
        """
        self.has_begun_update = self.has_skipped_update = False
        executor = self._choose(batch)
        if not self.workload.training:
            result = self._infer(executor, batch)
            self._completed(executor)
            return result
        micro_batches = executor.micro_batches
        if micro_batches is None:
            loss = self._train(executor, batch)
        else:
            loss = self._train_in_pieces(executor, micro_batches, batch)
        self._completed(executor)
        return loss

    def _infer(self, executor: Executor, batch: Any) -> Any:
        """A forward; on pieces of the batch where the plan says so and it is as planned."""
        workload, cut_by = self.workload, executor.micro_batches
        executor.place()
        generators = Generators.now()
        if cut_by is None:
            try:
                with executor.running(), self._inferring(executor):
                    return as_real(workload.infer(workload.model, batch))
            except LeftProof:  # the executor knows where
                generators.put_back()
            return self._infer(executor.without("chunk"), batch)
        cut_by.left = ""
        try:
            with executor.running():
                return self._infer_in_pieces(executor, cut_by, batch)
        except LeftProof as left:
            generators.put_back()
            cut_by.run_whole(str(left))
        return self._infer(executor.without("micro_batch"), batch)

    def _infer_in_pieces(self, executor: Executor, cut_by: MicroBatches, batch: Any) -> Any:
        workload = self.workload
        pieces = cut(batch, cut_by.pieces, workload.batch_dim, workload.batch)
        whole = WholeResult(sum(piece.rows for piece in pieces), cut_by.results)
        # In inference mode other ops are seen than in the recording.
        with torch.inference_mode(mode=False):
            for piece in pieces:
                with self._inferring(executor):
                    result = workload.infer(workload.model, piece.batch)
                    result = as_real(result)
                with torch.no_grad():
                    whole.take(result, piece.rows)
                del result
        return whole.result()

    @contextlib.contextmanager
    def _inferring(self, executor: Executor) -> Iterator[None]:
        with torch.no_grad(), self.workload.autocasting(), executor.forward():
            yield

    def _train_in_pieces(self, executor: Executor, cut_by: MicroBatches, batch: Any) -> Tensor:
        """A step on pieces of the batch; on the whole where nobody knows that it may be cut."""
        cut_by.left = ""
        refusal = cut_by.refusal(self.workload.model)
        if refusal is not None:
            cut_by.run_whole(refusal)
            return self._train(executor.without("micro_batch"), batch)
        buffers = self._buffers.before()
        added_to = any(p.grad is not None for p in self.workload.model.parameters())
        try:
            loss = self._train(executor, batch)
        except LeftProof as left:
            # It comes before any update: forward alone is watched.
            why = self._buffers.put_back(buffers)
            if added_to and not why:
                why = "gradients from before the step were added to"
            if why:
                message = f"{left}, so its batch may not be cut, and it cannot run again: {why}"
                raise UsageError(message) from None
            cut_by.run_whole(str(left))
            return self._train(executor.without("micro_batch"), batch)
        self._buffers.after(buffers)
        return loss

    def _train(self, executor: Executor, batch: Any) -> Tensor:
        """Forward, backward, clipping and update; gradients are released whatever happens."""
        generators = Generators.now()
        try:
            executor.place()
            with executor.running():
                loss = self._forward_and_backward(executor, batch)
                self._update(executor)
            self._release_gradients()
        except BaseException:
            self._release_gradients()
            if not self.has_begun_update:
                generators.put_back()
            raise
        return loss

    def _forward_and_backward(self, executor: Executor, batch: Any) -> Tensor:
        micro_batches = executor.micro_batches
        if micro_batches is None:
            loss = self._loss(executor, batch)
            with self._optimizer_inside(executor):
                self._backward(executor, loss)
            return loss.detach()
        workload = self.workload
        pieces = cut(batch, micro_batches.pieces, workload.batch_dim, workload.batch)
        plan = executor.plan
        reduction = plan.loss_reduction if isinstance(plan, Plan) else self._loss_reduction
        weights = Weights(pieces, reduction or self._loss_reduction, workload.loss_weight)
        losses: list[Tensor] = []
        for index, piece in enumerate(pieces):
            with weights.observe():
                loss = self._loss(executor, piece.batch)
            last = index + 1 == len(pieces)
            if last:
                self._scale_gradients(weights.correction())
            self._weighted_backward(executor, loss, weights.of(index), last=last)
            # Some losses lie in the memory of what they sum, which would stay for all pieces.
            losses.append(loss.detach().clone())
            del loss
        return weights.mean(losses)

    def _weighted_backward(
        self, executor: Executor, loss: Tensor, weight: float, *, last: bool
    ) -> None:
        """Add a piece's gradients; one without any target has none, and its mean is no number."""
        inside = self._optimizer_inside(executor) if last else contextlib.nullcontext()
        if weight > 0:
            with inside:
                self._backward(executor, loss, weight)
        elif last and executor.fuse and self.optimizer is not None:
            self.optimizer.step()

    def _backward(self, executor: Executor, loss: Tensor, weight: float | None = None) -> None:
        """Add a loss's gradients, scaled where the plan says so."""
        begin = None if weight is None else torch.full_like(loss, weight)
        if executor.scales_loss:
            begin = self._loss_scale.weight(loss, 1.0 if weight is None else weight)
        loss.backward(begin)  # type: ignore[no-untyped-call]

    def _loss(self, executor: Executor, batch: Any) -> Tensor:
        """The loss of a batch, with its graph."""
        loss_of = self.workload.loss
        if loss_of is None:
            raise UsageError("the workload has no loss: it only infers")
        with self.workload.autocasting(), executor.forward():
            return loss_of(self.workload.model, batch)

    @contextlib.contextmanager
    def _optimizer_inside(self, executor: Executor) -> Iterator[None]:
        with executor.updates_in_backward():
            if executor.fuse and self.optimizer is not None:
                self.has_begun_update = True
            yield

    def _scale_gradients(self, factor: float) -> None:
        if factor != 1.0:
            for parameter in self.workload.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)

    def _update(self, executor: Executor) -> None:
        """Gradients scaled back, clipping, the optimizer: nothing where one is not finite."""
        model = self.workload.model
        if executor.scales_loss:
            finite = self._loss_scale.unscale(p.grad for p in model.parameters())
            self.has_skipped_update = not finite
        if not self.has_skipped_update:
            if self.workload.clip_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), self.workload.clip_grad_norm)
            if self.optimizer is not None and not executor.fuse:
                with interrupts_wait():
                    self.has_begun_update = True
                    executor.update()
        if executor.scales_loss:
            # Last of all: a step that is refused before and runs again is one step.
            self._loss_scale.update(finite=not self.has_skipped_update)

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by for backward; 1 where the plan does not scale it."""
        return self._loss_scale.value if self._running.scales_loss else 1.0

    def scaler_state_dict(self) -> dict[str, Any]:
        """The loss scale, for a checkpoint; ``GradScaler.load_state_dict`` takes it too."""
        return self._loss_scale.state_dict()

    def load_scaler_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with a loss scale.

        Args:
            state: As :meth:`scaler_state_dict` or ``GradScaler.state_dict`` gives it.
        """
        self._loss_scale.load_state_dict(state)

    def draw_roundings(self, draw: int) -> bool:
        """Have updates that are rounded at random draw anew, for state that is made from now on.

        Steps from the same state with the same draw are the same, to the bit.

        Args:
            draw: Number of the draw; 0 by default.

        Returns:
            Whether any updates are rounded at random.
        """
        rounded = self._running.rounded
        if rounded is not None:
            rounded.draw = draw
        return rounded is not None

    def place_state(self) -> None:
        """Have the optimizer's state and the parameters where the plan wants them between steps.

        :meth:`step` begins with it; there is much to do only where something else ran meanwhile.

        Raises:
            OffloadError: Some of it could not be written, or did not come back as it went.
        """
        self._running.place()

    def _release_gradients(self) -> None:
        with interrupts_wait():
            if self.optimizer is not None:
                self.optimizer.zero_grad(set_to_none=True)
            self.workload.model.zero_grad(set_to_none=True)

    # The user's own loop

    @contextlib.contextmanager
    def forward(self, batch: Any = None) -> Iterator[None]:
        """Run your own forward and loss inside this, and ``loss.backward()`` after it.

        Of a workload that only infers, run the forward inside this: it is under ``no_grad``.

        Args:
            batch: The batch about to run, if it differs in shape from the workload's.

        Raises:
            UsageError: The plan holds an action that lives outside forward, or the forward uses
                again what its plan has written over.
        """
        self._between_steps()
        executor = self._choose(self.workload.batch if batch is None else batch)
        if executor.needs_whole_step is not None:
            message = (
                f"the plan holds `{executor.needs_whole_step}`, which needs `Fitted.step`\n"
                "hint: plan with `own_loop=True` to keep your own loop"
            )
            raise UsageError(message)
        try:
            with contextlib.ExitStack() as entered:
                if not self.workload.training:
                    executor.place()
                    entered.enter_context(torch.no_grad())
                    entered.enter_context(executor.running())
                entered.enter_context(executor.forward())
                yield
        except LeftProof as left:
            message = f"the forward left its plan: {left}\nhint: plan again with `chunk` forbidden"
            raise UsageError(message) from None
        self._completed(executor)

    # Plans

    def follow(self, plan: Plan | Mapping[str, Any]) -> None:
        """Run by another plan of the same workload from the next step on.

        Args:
            plan: As in :class:`Fitted`.

        Raises:
            UsageError: The plan asks for what this workload cannot do.
        """
        self._usual = self._running = self._read(plan)
        self._plan = plan
        self._by_shape.clear()
        self._diverged.clear()
        self._attempts.clear()

    def adopt(self, batch: Any, plan: Plan | Mapping[str, Any]) -> None:
        """Run batches of a shape by another plan from now on.

        Args:
            batch: A batch of that shape.
            plan: As in :class:`Fitted`.

        Raises:
            UsageError: The plan asks for what this workload cannot do.
        """
        self._by_shape[shape_of(batch)] = self._read(plan)

    def report(self) -> Report:
        """What the steps so far did."""
        remat = self._running.remat
        outcome = remat.outcome() if remat is not None else None
        seen = outcome.observations if outcome is not None else None
        moved = [tier.moved() for tier in self._running.tiers]
        counts = self._recovery.counts if self._recovery is not None else None
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
            divergence=self._running.divergence,
            replans=self._replans,
            not_compiled=self._not_compiled,
            refused_attempts=counts.refused_attempts if counts else 0,
            recovered_steps=counts.recovered_steps if counts else 0,
            shrunk_tensors=outcome.shrunk if outcome else 0,
            loss_scale=self.loss_scale,
            skipped_steps=self._loss_scale.skipped_steps,
        )

    def _between_steps(self) -> None:
        """Follow the lease, before anything of the next step is remembered or live."""
        if self._closed:
            raise UsageError("this `Fitted` is closed: fit the workload again")
        if self.elastic is not None:
            self.elastic.between_steps()

    def _choose(self, batch: Any) -> Executor:
        """The actions for a batch of this shape, planned again if its last step diverged."""
        shape = shape_of(batch)
        executor = self._by_shape.get(shape, self._usual)
        if self._replan is not None and shape in self._diverged:
            self._diverged.discard(shape)
            plan = self._planned_again(self._replan, batch)
            self._attempts[shape] = self._attempts.get(shape, 0) + 1
            if plan is not None:
                self._replans += 1
                executor = self._by_shape[shape] = self._read(plan)
        self._shape = shape
        self._running = executor
        self._plan = executor.plan
        return executor

    def _planned_again(self, replan: Replan, batch: Any) -> Plan | None:
        try:
            return replan(batch)
        except (WorkloadError, CaptureError) as error:
            # The step runs all the same, by the plan there is; if it fails, then in its own words.
            message = f"a step that left its plan cannot be planned again: {error}"
            warnings.warn(message, DivergenceWarning, stacklevel=2)
            return None

    def _completed(self, executor: Executor) -> None:
        """Count a step, and remember a divergence for the next one of its shape."""
        self._steps += 1
        if not executor.diverged or self._replan is None:
            return
        if self._attempts.get(self._shape, 0) < MAX_REPLANS:
            self._diverged.add(self._shape)

    def _read(self, plan: Plan | Mapping[str, Any]) -> Executor:
        """Take a plan apart and check that this workload can do what it asks."""
        workload = self.workload
        subject = Subject(
            weakref.ref(workload.model),
            self.optimizer,
            trains=workload.training,
            clips_gradients=workload.clip_grad_norm is not None,
            offload_dir=self._offload_dir,
            cut=_cut_places(workload),
            warn=self._warn,
        )
        return Executor(plan, subject)


def _cut_places(workload: Workload) -> tuple[int, ...]:
    """Which tensors that a model's call is given are cut, where inference is nothing but the call.

    Args:
        workload: The workload.
    """
    if workload.training or workload.forward is not None or workload.batch_dim:
        return ()
    size = batch_size(workload.batch)
    tensors = [leaf for leaf in tree_leaves(workload.batch) if isinstance(leaf, Tensor)]
    return tuple(i for i, it in enumerate(tensors) if it.dim() > 0 and it.shape[0] == size > 0)


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


def shape_of(batch: Any) -> Any:
    """What of a batch decides which ops run: shapes and types of its tensors.

    Args:
        batch: The batch.
    """
    return tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else None
        for leaf in tree_leaves(batch)
    )
