"""A workload of a student and its teacher within one budget: :func:`memfit.distil`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal

from torch import Tensor, nn

from memfit.answers import Plan
from memfit.api.fit import does_not_fit
from memfit.api.plan import plan
from memfit.distillation import (
    Distillation,
    DistillationLoss,
    in_half,
    logits_of,
    teacher_forward,
)
from memfit.errors import DoesNotFit, UsageError
from memfit.options import Allowance, Options
from memfit.weights.narrowed import FORMS, Form, narrow
from memfit.workload import Workload, workload_of

TeacherForm = Literal["half_teacher", "int8_teacher"]
"""A teacher in fewer bits, by name: in bfloat16, or its linear layers in 8 bits."""


def distil(
    teacher: Workload,
    student: Workload,
    budget: str | int | None = None,
    options: Options | None = None,
    *,
    temperature: float = 2.0,
    alpha: float = 0.5,
    logits: Callable[[Any], Tensor] | None = None,
    allow: Allowance | TeacherForm | Sequence[Allowance | TeacherForm] | None = None,
    **keywords: Any,
) -> Workload:
    """Make one step of a student that learns from a teacher, and see that it fits a budget.

    The loss is ``alpha`` parts of the student's own, and for the rest the divergence of the
    student's softened outputs from the teacher's (Kullback-Leibler, times the temperature's
    square). The teacher runs first, frozen, in evaluation and without a graph; its parameters are
    planned for with the student's, so ``offload`` may take them elsewhere.

    Args:
        teacher: The teacher: its ``model``, and its ``forward`` or its ``batch``, which says what
            of the student's batch it gets (the same names, or as many first entries). The model
            becomes part of the workload: it is frozen and stays in evaluation.
        student: The student's own step, with a loss that calls the model once.
        budget: What the step must fit into by some plan, as in :func:`memfit.plan`; ``None`` not to
            look. A percentage is one of the unplanned peak with the teacher as it is.
        options: How it may be planned, as in :func:`memfit.plan`; ``fit`` takes the same.
        temperature: What logits are divided by before the divergence.
        alpha: Part of the student's own loss, from 0 to below 1.
        logits: Finds logits, classes last, in what either model returns; by default the tensor
            itself or its ``logits``.
        allow: As in :func:`memfit.plan`, and beside that ``"half_teacher"`` and ``"int8_teacher"``:
            where no plan fits, hold the teacher in bfloat16, or the weights of its linear layers in
            8 bits (torchao). ``"approximate"`` allows both. The teacher is changed in place then.
        **keywords: As in :func:`memfit.plan`.

    Returns:
        A workload like any other. Its model has the parts ``student`` and ``teacher``.

    Raises:
        UsageError: The student has no loss, both share parameters, a setting cannot be; as in
            :func:`memfit.plan`.
        DoesNotFit: No allowed plan fits the budget; the teacher is as before.
        BudgetError: The budget cannot be read.
        WorkloadError: A model fails by itself.
        CaptureError: The step cannot be recorded.
    """
    _refuse(teacher, student, temperature, alpha)
    forms, chosen = _allowed(options, allow, keywords)
    with _as_before_on_failure(teacher.model):
        step = _step(teacher, student, temperature, alpha, logits or logits_of)
        return step if budget is None else _within(step, budget, chosen, forms)


def _refuse(teacher: Workload, student: Workload, temperature: float, alpha: float) -> None:
    workload_of(teacher)
    workload_of(student)
    if student.loss is None:
        raise UsageError("the student's workload has no `loss`: there is nothing to train")
    taught = {id(parameter) for parameter in student.model.parameters()}
    shared = [name for name, p in teacher.model.named_parameters() if id(p) in taught]
    if shared:
        raise UsageError(f"the teacher shares `{shared[0]}` with the student: give it a copy")
    if next(teacher.model.parameters(), None) is None:
        raise UsageError("the teacher has no parameters")
    if not 0 < temperature < float("inf"):
        raise UsageError(f"`temperature={temperature}`: it must be above 0")
    if not 0 <= alpha < 1:
        raise UsageError(f"`alpha={alpha}`: it must be from 0 to below 1")


def _allowed(
    options: Options | None, allow: Any, keywords: dict[str, Any]
) -> tuple[list[Form], Options]:
    """Forms of the teacher that are allowed besides its own, and how a step may be planned."""
    words = [] if allow is None else [allow] if isinstance(allow, str) else list(allow)
    named = [form for form in FORMS if f"{form}_teacher" in words]
    others = [word for word in words if word not in {f"{form}_teacher" for form in FORMS}]
    if others:
        keywords = {**keywords, "allow": others}
    chosen = Options.of(options, **keywords)
    if chosen.promise == "approximate":
        named = [form for form in FORMS if form != "int8" or form in named or _has_torchao()]
    return named, chosen


def _has_torchao() -> bool:
    return find_spec("torchao") is not None


@contextmanager
def _as_before_on_failure(teacher: nn.Module) -> Iterator[None]:
    """Give a teacher its flags back where nothing came of it."""
    trained = [(parameter, parameter.requires_grad) for parameter in teacher.parameters()]
    modes = [(module, module.training) for module in teacher.modules()]
    try:
        yield
    except BaseException:
        for parameter, flag in trained:
            parameter.requires_grad_(flag)
        for module, is_training in modes:
            module.training = is_training
        raise


def _step(
    teacher: Workload,
    student: Workload,
    temperature: float,
    alpha: float,
    logits: Callable[[Any], Tensor],
) -> Workload:
    assert student.loss is not None
    loss = DistillationLoss(
        teacher_forward=teacher_forward(teacher),
        student_loss=student.loss,
        temperature=temperature,
        alpha=alpha,
        logits=logits,
        autocast=teacher.autocast,
    )
    optimizer = student.optimizer
    if callable(optimizer):
        optimizer = partial(_of_trained, optimizer)
    model = Distillation(student.model, teacher.model)
    return replace(student, model=model, loss=loss, optimizer=optimizer, forward=None)


def _of_trained(make: Any, parameters: Any) -> Any:
    """An optimizer over what is trained, which the teacher's parameters are not."""
    return make([parameter for parameter in parameters if parameter.requires_grad])


@dataclass
class _Tried:
    """The least peak that was found so far."""

    plan: Plan | None = None

    def add(self, made: Plan) -> None:
        if self.plan is None or made.minimum_peak_bytes < self.plan.minimum_peak_bytes:
            self.plan = made


def _within(step: Workload, budget: str | int, options: Options, forms: list[Form]) -> Workload:
    """The step with the widest teacher with which some plan fits."""
    tried = _Tried()
    made = plan(step, budget, options)
    if made.fits:
        return step
    tried.add(made)
    model, loss = step.model, step.loss
    assert isinstance(model, Distillation)
    assert isinstance(loss, DistillationLoss)
    for form in forms:
        put_back = narrow(model.teacher, form)
        narrower = step
        if form == "half":
            forward = in_half(loss.teacher_forward)
            narrower = replace(step, loss=replace(loss, teacher_forward=forward))
        try:
            again = plan(narrower, made.budget_bytes, options)
        except BaseException:
            put_back()
            raise
        if again.fits:
            return narrower
        put_back()
        tried.add(again)
    assert tried.plan is not None
    raise _none_fits(tried.plan, forms)


def _none_fits(best: Plan, forms: list[Form]) -> DoesNotFit:
    error = does_not_fit(best)
    if not forms:
        error.add_note('`allow="approximate"` may hold the teacher in fewer bits')
    return error
