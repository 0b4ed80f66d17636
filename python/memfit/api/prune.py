"""A smaller model: :func:`memfit.prune`, :func:`memfit.load_pruned`."""

from __future__ import annotations

import os
from collections.abc import Callable

from torch import nn

from memfit.errors import UsageError
from memfit.prune.pruned import Pruned, Wanted, pruned
from memfit.prune.saved import load
from memfit.prune.scores import Scores
from memfit.sizes import step_budget
from memfit.workload import Workload, workload_of


def prune(
    workload: Workload,
    *,
    budget: str | int | None = None,
    parameters: str | int | None = None,
    scores: Scores = "magnitude",
    through_norms: bool = False,
) -> Pruned:
    """Copy a model without the channels and heads that it misses least.

    Channels that have to go together are found in memfit's own trace of the step; each group gives
    up the same share. What is not understood stays. The smaller model's step is recorded and
    compared with what it should be. It computes what the given model would if all parameters of
    what went were zero, and wants training: that is yours to do.

    Args:
        workload: The step; its model and optimizer stay as they are. The copy takes what is left
            of them.
        budget: ``"3GiB"``, ``"60%"`` of the predicted peak, or bytes: the least pruning whose step
            is predicted to take no more.
        parameters: ``"50%"`` of the model's parameters, or how many may be left.
        scores: ``"magnitude"``, or ``"taylor"`` for parameter times gradient in a step.
        through_norms: Whether channels may go that a layer norm takes its mean over, such as the
            width of a transformer: what is left is then normalised anew, so that the smaller model
            computes something else than the given one with zeros.

    Returns:
        The smaller model, its step and the report.

    Raises:
        UsageError: Not just one of ``budget`` and ``parameters`` is given, or it cannot be read;
            the optimizer has state that cannot be cut; the model was built without weights.
        BudgetError: The budget cannot be read.
        DoesNotFit: Nothing can be pruned, or not enough.
        WorkloadError: The model fails by itself.
        CaptureError: The step cannot be recorded.
    """
    if (budget is None) == (parameters is None):
        raise UsageError("give a `budget` for the step, or how many `parameters` may be left")
    within = None if budget is None else step_budget(budget)
    wanted = Wanted(within, parameters, scores, through_norms)
    return pruned(workload_of(workload), wanted)


def load_pruned(
    subject: nn.Module | Workload | Callable[[], nn.Module | Workload],
    path: str | os.PathLike[str],
) -> nn.Module:
    """Build a pruned model from a file.

    Args:
        subject: The model as it was before pruning, a workload with it, or a function that builds
            either; a given model stays as it is, and its weights do not matter.
        path: A file written by :meth:`memfit.prune` or ``memfit prune --save``.

    Returns:
        The pruned model with the file's weights.

    Raises:
        UsageError: The file cannot be read, is no pruned model, or is of another model.
    """
    if not isinstance(subject, nn.Module | Workload):
        if not callable(subject):
            name = type(subject).__name__
            raise UsageError(f"expected a model or a function that builds it, got `{name}`")
        subject = subject()
    model = subject.model if isinstance(subject, Workload) else subject
    if not isinstance(model, nn.Module):
        raise UsageError(f"expected a model, got `{type(model).__name__}`")
    return load(model, path)
