"""A student that learns from a teacher, in one module and one loss.

Responsible for what a step of distillation computes: the teacher's outputs without a graph, the
student's own loss, and the divergence between both. Not responsible for whether it fits a budget
(:mod:`memfit.api.distil`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from memfit.errors import UsageError
from memfit.workload import Workload


class Distillation(nn.Module):
    """A student and its teacher, whose parameters are planned for together.

    The teacher stays frozen and in evaluation, also where the whole is told to train. Called, it is
    the student.
    """

    def __init__(self, student: nn.Module, teacher: nn.Module) -> None:
        """Freeze the teacher beside the student.

        Args:
            student: What is trained.
            teacher: What it learns from.
        """
        super().__init__()
        self.student = student
        self.teacher = teacher
        teacher.requires_grad_(requires_grad=False)
        self.train(student.training)

    def train(self, mode: bool = True) -> Self:  # noqa: FBT001, FBT002 - torch's own signature
        """Set the student's mode."""
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The student's outputs."""
        return self.student(*args, **kwargs)


@dataclass(frozen=True)
class DistillationLoss:
    """The loss of a step: ``alpha`` parts of the student's own, the rest of the divergence.

    Attributes:
        teacher_forward: Runs the teacher on a batch.
        student_loss: The student's own loss; calls the student once.
        temperature: What both logits are divided by; the divergence is multiplied by its square.
        alpha: Part of the student's own loss, in ``[0, 1)``.
        logits: Finds logits in what a model returns, classes last.
        autocast: Element type of ``torch.autocast`` around the teacher; ``None`` for none.
    """

    teacher_forward: Callable[[nn.Module, Any], Any]
    student_loss: Callable[[Any, Any], Tensor]
    temperature: float
    alpha: float
    logits: Callable[[Any], Tensor]
    autocast: torch.dtype | None

    def __call__(self, pair: Distillation, batch: Any) -> Tensor:
        """The loss.

        Args:
            pair: Student and teacher.
            batch: The student's batch.

        Returns:
            One number.

        Raises:
            UsageError: The student's loss does not call the student once, or logits differ in
                shape.
        """
        aim = self._aim(pair.teacher, batch)
        seen: list[Tensor] = []
        handle = pair.student.register_forward_hook(
            lambda _module, _args, out: seen.append(self.logits(out))
        )
        try:
            own = self.student_loss(pair.student, batch)
        finally:
            handle.remove()
        if len(seen) != 1:
            message = f"the student's `loss` calls the student {len(seen)} times: call it once"
            raise UsageError(message)
        if seen[0].shape != aim.shape:
            message = f"the teacher's logits are {tuple(aim.shape)}, the student's"
            raise UsageError(f"{message} {tuple(seen[0].shape)}: they must be of one shape")
        return self.alpha * own + (1 - self.alpha) * self._divergence(seen.pop(), aim)

    def _aim(self, teacher: nn.Module, batch: Any) -> Tensor:
        """The teacher's logits."""
        device = next(teacher.parameters()).device.type
        context: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self.autocast is not None or torch.is_autocast_enabled(device):
            context = torch.autocast(device, dtype=self.autocast, enabled=self.autocast is not None)
        with torch.no_grad(), context:
            return self.logits(self.teacher_forward(teacher, batch))

    def _divergence(self, logits: Tensor, aim: Tensor) -> Tensor:
        """Kullback-Leibler's of the softened outputs, as a mean over all positions."""
        soft, target = (
            (one.float() / self.temperature).flatten(0, -2).log_softmax(-1) for one in (logits, aim)
        )
        divergence = F.kl_div(soft, target, reduction="none", log_target=True)
        return divergence.sum(-1).mean() * self.temperature**2


def logits_of(output: Any) -> Tensor:
    """The logits in what a model returns: the tensor itself, or its ``logits``.

    Args:
        output: What a model returned.

    Raises:
        UsageError: There are none.
    """
    found = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(found, Tensor):
        message = f"no logits are found in a `{type(output).__name__}`"
        raise UsageError(f"{message}: say where they are, as in `logits=lambda output: output[0]`")
    return found


def teacher_forward(teacher: Workload) -> Callable[[nn.Module, Any], Any]:
    """What runs a teacher on a student's batch.

    Args:
        teacher: Its workload. With a ``forward``, that gets the student's batch whole; otherwise
            the model gets what its own batch has of it: the same names, or as many first entries.
    """
    if teacher.forward is not None:
        return teacher.forward
    names = list(teacher.batch) if isinstance(teacher.batch, Mapping) else None
    is_several = isinstance(teacher.batch, Sequence)
    count = len(teacher.batch) if is_several else 1

    def forward(model: nn.Module, batch: Any) -> Any:
        if names is not None:
            return model(**{name: batch[name] for name in names})
        if isinstance(batch, Sequence):
            return model(*batch[:count])
        return model(batch)

    return forward


def in_half(forward: Callable[[nn.Module, Any], Any]) -> Callable[[nn.Module, Any], Any]:
    """A forward of a model in bfloat16, whose batch has other floating-point numbers.

    Args:
        forward: Runs the model.
    """

    def cast(leaf: Any) -> Any:
        is_wide = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.to(torch.bfloat16) if is_wide else leaf

    return lambda model, batch: forward(model, tree_map(cast, batch))
