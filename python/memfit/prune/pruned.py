"""A pruned model: from a workload and what is asked for to a smaller one.

Responsible for putting the parts together: what can go, what it is worth, how much of it goes, the
copy, and the proof that its step is the one meant.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from memfit import _native
from memfit.answers import Pruning
from memfit.capture import capture
from memfit.errors import DoesNotFit, UsageError
from memfit.prune.cut import bytes_of
from memfit.prune.groups import Removed, elements, kept, tensors_of
from memfit.prune.saved import Recipe, write
from memfit.prune.scores import Scores, require_scores, scored
from memfit.prune.search import Found, least_for_elements, least_for_peak
from memfit.prune.sizes import mended
from memfit.prune.trial import Separable, separable
from memfit.weights.weightless import require_weights
from memfit.workload import Workload


@dataclass(frozen=True, slots=True)
class Pruned:
    """A smaller model.

    Attributes:
        workload: The step of the smaller model, which ``predict``, ``plan`` and ``fit`` take as any
            other. An optimizer that was given as one was copied, its state cut as the parameters.
        report: What went, what stays and why; ``print`` shows it.
    """

    workload: Workload
    report: Pruning
    _recipe: Recipe

    @property
    def model(self) -> nn.Module:
        """The smaller model; the one that was given is as before."""
        return self.workload.model

    def state_dict(self) -> dict[str, Tensor]:
        """The smaller model's state."""
        state: dict[str, Tensor] = self.model.state_dict()
        return state

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model to a file that :func:`memfit.load_pruned` reads, whole or not at all.

        Args:
            path: The file.

        Raises:
            UsageError: The file cannot be written.
        """
        write(path, self._recipe, self.state_dict())


@dataclass(frozen=True, slots=True)
class Wanted:
    """How small the model shall be; one of the two is given.

    Attributes:
        budget: Most that the step may take, as the engine reads it.
        parameters: Elements that may be left, or a part of them: ``"50%"``.
        scores: What channels are worth.
        through_norms: Whether channels may go that a norm takes its mean over.
    """

    budget: str | None
    parameters: str | int | None
    scores: Scores
    through_norms: bool


def pruned(workload: Workload, wanted: Wanted) -> Pruned:
    """Make a smaller model of a workload's.

    Args:
        workload: The step; it stays as it is.
        wanted: How small.

    Raises:
        UsageError: What is wanted cannot be read.
        DoesNotFit: Nothing can be pruned, or not enough.
        WorkloadError: The model fails by itself.
        CaptureError: The step cannot be recorded.
    """
    require_scores(workload, wanted.scores)
    require_weights(workload, "pruning needs the values of weights")
    whole = elements(workload.model, {})
    most_elements = _most_elements(wanted.parameters, whole)
    peak = _peak(workload)
    budget = None if wanted.budget is None else _native.parse_budget(wanted.budget, peak)
    found = separable(workload, through_norms=wanted.through_norms)
    if not found.groups:
        raise DoesNotFit(_nothing(found))
    scores = scored(workload, found.groups, wanted.scores)
    none = tuple(() for _ in found.groups)

    def peak_without(removed: Removed) -> int:
        return _peak(found.without(removed, weights=False))

    if budget is None:
        chosen = Found(0.0, none, whole)
        if whole > most_elements:
            chosen = least_for_elements(found, scores, most_elements)
            _require(chosen.amount, most_elements, _in_elements, found)
    else:
        chosen = Found(0.0, none, peak)
        if peak > budget:
            chosen = least_for_peak(found, scores, budget, peak_without)
            _require(chosen.amount, budget, _native.bytes_text, found)
    return _made(found, chosen, wanted, budget, peak)


def _made(
    found: Separable, chosen: Found, wanted: Wanted, budget: int | None, peak_before: int
) -> Pruned:
    before = found.workload
    shapes = {name: tensor.shape for name, tensor in tensors_of(before.model).items()}
    left = kept(found.groups, chosen.removed, shapes)
    after = found.without(chosen.removed, weights=True)
    found.require_as_meant(chosen.removed, after)
    peak = _peak(after)
    document, text = _native.pruning(
        {
            "budget_bytes": budget,
            "scores": wanted.scores,
            "share": chosen.share,
            "before": _facts(before.model, peak_before),
            "after": _facts(after.model, peak),
            "groups": _groups(found, chosen.removed),
            "stays": list(found.stays),
            "trials": found.trials,
        }
    )
    noted = mended(before.model, after.model, found.groups, chosen.removed)
    return Pruned(after, Pruning.told(document, text), Recipe.of(before.model, left, noted))


def _facts(model: nn.Module, peak: int) -> dict[str, int]:
    return {
        "predicted_peak_bytes": peak,
        "parameters": elements(model, {}),
        "parameter_bytes": bytes_of(model.parameters()),
    }


def _groups(found: Separable, removed: Removed) -> list[dict[str, Any]]:
    return [
        {
            "channels": group.channels,
            "kept": group.channels - len(gone),
            "parameters": list(dict.fromkeys(member.name for member in group.members)),
        }
        for group, gone in zip(found.groups, removed, strict=True)
    ]


def _peak(workload: Workload) -> int:
    trace = _native.Trace.decode(capture(workload))
    request = {"batch": None, "budget": None, "gpu": None}
    return int(_native.predict(trace, request)["predicted_peak_bytes"])


def _most_elements(parameters: str | int | None, whole: int) -> int:
    """Elements that may be left.

    Raises:
        UsageError: What is wanted cannot be read.
    """
    if parameters is None:
        return whole
    text = str(parameters).strip()
    try:
        part = float(text.removesuffix("%")) / 100 if text.endswith("%") else int(text) / whole
    except (ValueError, ZeroDivisionError):
        part = 0.0
    if not 0 < part <= 1:
        message = (
            f"cannot prune to `{parameters}` parameters: write a part of them, `50%`, or how many, "
            f"up to {whole:,}"
        )
        raise UsageError(message)
    return int(part * whole + 0.5) if text.endswith("%") else int(text)


def _in_elements(count: int) -> str:
    return f"{count:,} parameters"


def _require(least: int, most: int, words: Callable[[int], str], found: Separable) -> None:
    """Refuse what the most pruning does not reach.

    Raises:
        DoesNotFit: It does not.
    """
    if least > most:
        asked = words(most)
        message = f"pruned as far as it goes the model takes {words(least)}: {asked} is too little"
        if found.stays:
            message += f"\nhint: {_largest_stay(found)}"
            if not found.through_norms:
                message += "; with `--through-norms` (`through_norms=True`) more can go"
        raise DoesNotFit(message, minimum_peak_bytes=least if words is _native.bytes_text else 0)


def _nothing(found: Separable) -> str:
    message = "nothing of the model can be pruned"
    return f"{message}: {_largest_stay(found)}" if found.stays else message


def _largest_stay(found: Separable) -> str:
    stay = max(found.stays, key=lambda stay: len(stay["parameters"]))
    names = stay["parameters"]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"`{names[0]}`{more} stays, because {stay['why']}"
