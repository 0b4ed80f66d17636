"""Runs one step under a recorder.

Responsible for the order of a step (loss, backward, clipping, optimizer, zeroing), for registering
what exists before it, and for telling the user's own failures from memfit's. Not responsible for
what is written down.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memfit import _native
from memfit.capture.record.gradient_mode import Gradients, gradient_mode
from memfit.capture.record.ledger import Ledger
from memfit.capture.record.recorder import BACKWARD, FORWARD, OPTIMIZER, RealStepNeeded, Recorder
from memfit.capture.record.returned import Returned
from memfit.capture.record.roles import Roles, Update
from memfit.capture.stage.stage import Stage, batch_entries, device_of
from memfit.errors import CaptureError, MemfitError, StepPhase, UsageError, WorkloadError
from memfit.tensors.held import held_tensors
from memfit.tensors.storage import is_fixed, is_wrapper, named_parts, plain_tensors
from memfit.weights.absent_gpu import is_on_absent_gpu


class StepRunner:
    """Runs the step of a stage under a recorder; subclasses change how a device does it."""

    def __init__(self, stage: Stage, recorder: Recorder) -> None:
        """Create a runner.

        Args:
            stage: What to run.
            recorder: What to write to.
        """
        self.stage = stage
        self.gradients: Gradients | None = None  # of inference; see `gradient_mode`
        self.recorder = recorder
        self.roles = Roles()
        self.returned: Returned | None = None  # by a forward of inference
        self.ready: dict[int, tuple[nn.Parameter, int, int]] = {}
        self._own_state: dict[int, list[int]] = {}

    def run(self) -> Roles:
        """Run the step once.

        Returns:
            Which allocation is what.

        Raises:
            WorkloadError: The user's own code failed.
            RealStepNeeded: The step cannot be followed on fakes.
        """
        recorder = self.recorder
        recorder.sources.stop_at(sys._getframe())
        self._register()
        handles = [
            parameter.register_post_accumulate_grad_hook(self._gradient_ready)  # type: ignore[no-untyped-call]
            for parameter in self.stage.trainable()
        ]
        try:
            result = self._run_phases()
            recorder.ledger.close()
            recorder.saved.close(recorder.ledger.now)
            del result
        finally:
            # The recorder may wait for the collector: a frame holds all variables up the stack, and
            # shadows the batch.
            recorder.sources.stop_at(None)
            recorder.shadows.close()
            recorder.ledger.closing = True
            for handle in handles:
                handle.remove()
            for parameter in self.stage.model.parameters():
                parameter.grad = None
        return self.roles

    def forward_context(self) -> contextlib.AbstractContextManager[Any]:
        """What surrounds the forward: autocast, where the workload asks for it."""
        workload = self.stage.workload
        if workload.autocast is None:
            return contextlib.nullcontext()
        cache = workload.autocast_cache
        return torch.autocast(self.stage.device, workload.autocast, cache_enabled=cache)

    def backward(self, loss: Tensor) -> None:
        """Differentiate the loss."""
        loss.backward()  # type: ignore[no-untyped-call]

    def clip_gradients(self, norm: float) -> None:
        """Clip the total gradient norm."""
        nn.utils.clip_grad_norm_(self.stage.model.parameters(), norm)

    def _run_phases(self) -> Any:
        workload = self.stage.workload
        recorder = self.recorder
        with recorder, recorder.modules:
            recorder.phase = FORWARD
            result = self._forward()
            recorder.modules.recording = False
            if workload.training:
                recorder.phase = BACKWARD
                with self._guarded("backward"):
                    self.backward(result)
                self._bind_gradients()
                recorder.phase = OPTIMIZER
                with self._guarded("optimizer"):
                    self._update()
        return result

    def _forward(self) -> Any:
        stage, workload, recorder = self.stage, self.stage.workload, self.recorder
        with self._guarded("forward"), self.forward_context():
            if workload.loss is None:
                with gradient_mode(self.gradients):
                    result = workload.infer(stage.model, stage.batch)
                recorder.modules.refuse_threads()
                self.returned = Returned.of(result, recorder.ledger)
                return result
            with recorder.saved.hooks():
                loss = workload.loss(stage.model, stage.batch)
        recorder.modules.refuse_threads()
        if not isinstance(loss, Tensor):
            message = f"`loss` must return a tensor, got `{type(loss).__name__}`"
            raise UsageError(message)
        if loss.numel() != 1:
            message = f"`loss` must return one number, got shape {tuple(loss.shape)}"
            raise UsageError(f"{message}\nhint: reduce it, as with `.mean()`")
        if not loss.requires_grad:
            message = "the loss does not depend on the parameters" + self._why_independent()
            raise UsageError(message)
        allocation = recorder.ledger.seen(loss)
        self.roles.loss = recorder.ledger.value(loss, allocation)
        return loss

    def _why_independent(self) -> str:
        """Why no gradient of the loss reaches a parameter, where that was seen."""
        if not self.stage.trainable():
            return ": none of them requires a gradient"
        learning = self.recorder.modules.learning
        if learning.count and learning.count == learning.without_gradients:
            return ": the forward ran under `torch.no_grad` or `torch.inference_mode`"
        return ""

    def _update(self) -> None:
        stage, workload = self.stage, self.stage.workload
        if workload.clip_grad_norm is not None:
            self.clip_gradients(workload.clip_grad_norm)
        if stage.optimizer is not None:
            self._leave_out_state(stage.optimizer)
            stage.optimizer.step()
            stage.optimizer.zero_grad(set_to_none=True)
        for parameter in stage.model.parameters():
            parameter.grad = None

    def _leave_out_state(self, optimizer: Optimizer) -> None:
        """Count no state of what got no gradient: it is made with the first one.

        Until backward has run, state was counted for all: which get a gradient was not known.
        """
        idle = [p for p in self.stage.trainable() if p.grad is None] * self.stage.state_is_lazy
        own = [a for p in idle for a in self._own_state.get(id(p), [])]
        sizes = self.recorder.ledger.bytes
        left_out, parameter_bytes = sum(sizes[a] for a in own), sum(p.nbytes for p in idle)
        for allocation in own:
            sizes[allocation] = 0
        if left_out:
            text = _native.bytes_text
            self.recorder.notes[
                f"parameters of {text(parameter_bytes)} get no gradient, so `"
                f"{type(optimizer).__name__}` has no state for them, which would be "
                f"{text(left_out)}"
            ] = None

    def _register(self) -> None:
        """Give everything that exists before the step its allocation, role and name."""
        stage, roles, ledger = self.stage, self.roles, self.recorder.ledger
        self._register_parameters()
        for name, buffer in stage.model.named_buffers():
            allocations = self._register_as(roles.module_buffers, buffer, name)
            if name in stage.real_buffers:
                self._lend(allocations, stage.real_buffers[name])
        entries = zip(batch_entries(stage.batch), batch_entries(stage.real_batch), strict=True)
        for (name, tensor), (_, real) in entries:
            allocations = self._register_as(roles.inputs, tensor, name)
            if stage.fake_mode is not None:
                self._lend(allocations, real)
        for name, held in held_tensors(stage.workload).items():
            self._register_held(name, held)
        if stage.optimizer is not None:
            for state in [*stage.optimizer.state.values(), *stage.optimizer.param_groups]:
                for value in state.values():
                    if isinstance(value, Tensor):
                        roles.optimizer_state.update(map(ledger.seen, plain_tensors(value)))
            self._own_state = _state_by_parameter(stage.optimizer, ledger)

    def _register_held(self, name: str, tensor: Tensor) -> None:
        """Count what the loss holds, such as a teacher, whether the step uses all of it or not."""
        for of_part, part in named_parts(tensor, name):
            device = self._device_of_held(part)
            if device == self.stage.device and part.layout is torch.strided:
                allocation = self.recorder.hold(part, device)
                self.roles.inputs.add(allocation)
                self.roles.names.setdefault(allocation, of_part)

    def _device_of_held(self, tensor: Tensor) -> str:
        """Kind of device on which a step has what its loss holds.

        Of a target that asked for a GPU where there is none, only that goes there which asked; of
        one that was built for the CPU, and is recorded for a GPU, all does, like model and batch.
        """
        wanted, model = self.stage.device, self.stage.workload.model
        if wanted == device_of(model) or tensor.device.type != "cpu":
            return tensor.device.type
        asked = any(map(is_on_absent_gpu, model.parameters()))
        return wanted if not asked or is_on_absent_gpu(tensor) else "cpu"

    def _register_parameters(self) -> None:
        stage, roles = self.stage, self.roles
        originals = dict(stage.workload.model.named_parameters())
        for name, parameter in stage.model.named_parameters():
            allocations = self._register_as(roles.parameters, parameter, name)
            if is_fixed(originals[name]):
                roles.fixed.update(a for a in allocations if a is not None)

    def _register_as(self, members: set[int], tensor: Tensor, name: str) -> list[int | None]:
        """The allocations of a tensor: one, or those of what it wraps."""
        return [
            self._register_part(members, part, of_part)
            for of_part, part in named_parts(tensor, name)
        ]

    def _lend(self, allocations: list[int | None], real: Tensor) -> None:
        """Let a step on fakes look at the values of a real tensor."""
        for allocation, part in zip(allocations, plain_tensors(real), strict=True):
            if allocation is not None and allocation not in self.roles.parameters:
                self.recorder.shadows.lend(allocation, part)

    def _register_part(self, members: set[int], tensor: Tensor, name: str) -> int | None:
        try:
            allocation = self.recorder.ledger.seen(tensor)
        except (RuntimeError, NotImplementedError):
            self.recorder.notes[f"`{name}` has no plain storage; its memory is not counted"] = None
            return None
        members.add(allocation)
        self.roles.names.setdefault(allocation, name)
        return allocation

    def _gradient_ready(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            return
        is_sparse = gradient.layout is not torch.strided
        if is_sparse or is_wrapper(type(gradient)) or is_wrapper(type(parameter)):
            parts = plain_tensors(gradient)
            self.roles.gradients.update(map(self.recorder.ledger.seen, parts))
            return  # not updated alone: see `per_parameter_refusal`
        allocation = self.recorder.ledger.seen(gradient)
        self.ready.pop(id(parameter), None)
        self.ready[id(parameter)] = (
            parameter,  # type: ignore[assignment]
            allocation,
            self.recorder.ledger.now,
        )

    def _bind_gradients(self) -> None:
        ledger = self.recorder.ledger
        for parameter, allocation, ready in self.ready.values():
            self.roles.gradients.add(allocation)
            update = Update(ledger.seen(parameter), allocation, ready)
            update.state = self._own_state.get(id(parameter), [])
            self.roles.updates.append(update)

    def _may_run_for_real(self, error: Exception) -> bool:
        """Whether the GPU may take what its shapes alone were refused.

        torch 2.11 refuses grouped products of 32 bits on fakes, which an H200 computes.
        """
        here = device_of(self.stage.workload.model)
        return self.stage.device == here == "cuda" and _is_of_meta_kernels(error)

    @contextlib.contextmanager
    def _guarded(self, phase: StepPhase) -> Iterator[None]:
        """Turn what the user's code raises into an error that says where."""
        try:
            yield
        except (MemfitError, RealStepNeeded):
            raise
        except Exception as error:
            self.recorder.modules.refuse_threads()  # whatever that led to
            if self.recorder.failure is not None:
                raise RealStepNeeded(self.recorder.failure) from error
            if self.stage.fake_mode is not None and (
                _only_fakes_fail(error) or self._may_run_for_real(error)
            ):
                message = f"the {phase} does not run on fake tensors ({type(error).__name__})"
                raise RealStepNeeded(message) from error
            if self.stage.device == "cuda" and isinstance(error, torch.AcceleratorError):
                message = (
                    f"the {phase} asks for the GPU itself: {str(error).partition(chr(10))[0]}\n"
                    "hint: capture it where the GPU is, or for `cpu`"
                )
                raise CaptureError(message) from error
            message = f"the step failed in {phase}: {type(error).__name__}: {error}"
            raise WorkloadError(message, phase=phase) from error


def _is_of_meta_kernels(error: Exception) -> bool:
    """Whether a kernel of torch's that computes shapes alone raised an error."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_code.co_filename.endswith("_meta_registrations.py") for frame in frames)


def _state_by_parameter(optimizer: Optimizer, ledger: Ledger) -> dict[int, list[int]]:
    """State of each parameter, by its ``id``; what two parameters share is no one's.

    Nor is what a tensor wraps: it cannot be taken elsewhere.
    """
    owners: dict[int, set[int]] = {}
    for parameter, state in optimizer.state.items():
        for value in state.values():
            if isinstance(value, Tensor) and not is_wrapper(type(value)):
                owners.setdefault(ledger.seen(value), set()).add(id(parameter))
    owned: dict[int, list[int]] = {}
    for allocation, parameters in sorted(owners.items()):
        if len(parameters) == 1:
            owned.setdefault(parameters.pop(), []).append(allocation)
    return owned


def _only_fakes_fail(error: Exception) -> bool:
    """Whether an error comes from a tensor having no memory rather than from the user's code."""
    if type(error).__module__.startswith("torch._subclasses"):
        return True
    text = str(error)
    return any(
        word in text for word in ("FakeTensor", "fake tensor", "meta device", "data pointer")
    )
