"""The loss of one loop, its wide layers and messages, in slices of rows, where no other plan fits.

Logits over many classes are often the largest tensor of a language model, and are there three
times: as they are, as logarithms of probabilities, and as their gradient. In slices they never
exist whole. Responsible for whether that may be done to a script, for having a step recorded so,
and for whether it stays. Not responsible for the action (:mod:`memfit.apply.slices.in_slices`), for
what is worth it (the engine's ``plan/technique/chunk``), nor for the plan.

Which ops run is then another matter, so nothing is derived: a step of the script is recorded with
its loss in slices, and planned from as any other. A first step whose whole logits would clearly
not fit, even recorded, is recorded in slices at once, if they are those of the widest layer; so is
one whose messages along edges would not. A script that looks at its logits gets them whole, and its
steps are recorded as they are from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from memfit.apply.slices.chunk import ChunkedLoss
from memfit.apply.slices.edges import SlicedEdges
from memfit.run.script.observed import Observation
from memfit.run.script.pieces import CLEARLY
from memfit.run.script.plain_code import keeps_from_calls, more_than_computing
from memfit.run.script.planned_step import PlannedStep
from memfit.run.script.request import FitRequest
from memfit.run.script.step_updates import live_bytes
from memfit.tensors.gradient_hooks import another_forward

KIND = "chunk"
"""The kind of the action."""

_SLICES = (32, 8)
"""Slice counts of a first step, as the engine's ``candidates.rs`` has them."""

_LEAST_ROWS = 16
"""Fewer rows in a slice are not worth its ops."""

_TOKENS = (torch.int64, torch.int32)

_COPIES = 3
"""How often whole logits are there: as they are, as logarithms, and as their gradient; in 32 bits,
which a loss is often computed in."""

_EDGE_SLICES = 16
"""Slices of edges of a first step, as the engine's ``candidates.rs`` has them."""

_EDGE_COPIES = 4
"""How often there is what is gathered: as it is, as messages, and as the gradients of both."""

_LEAST_PART = 50
"""Gathered rows that are a smaller part of the budget are not put off in a first step."""

Inside: TypeAlias = AbstractContextManager[None]


class InSlicesOfRows:
    """What is known of one loop's steps in slices.

    Attributes:
        asks: Whether a step is to be recorded once more, in slices or in another number of them.
        begins_again: Whether that is to be recorded as a first step is.
        refusal: Why none runs so although it was allowed; empty while one may.
    """

    def __init__(self, request: FitRequest) -> None:
        """Know what is allowed.

        Args:
            request: Which plans are.
        """
        options = request.options
        self._may = options.promise != "exact" and KIND not in options.forbid
        self._untried: list[dict[str, Any]] | None = None
        self._tried: dict[str, Any] | None = None
        self._used: dict[str, Any] | None = None
        self._first: _First | None = None
        self._needed_whole: dict[str, str] = {}
        self._kept_gathers: frozenset[int] = frozenset()
        self.asks = self.begins_again = self._has_begun_again = False
        self.refusal = ""

    def wants(self) -> dict[str, Any] | None:
        """The action by which the step that begins is recorded; ``None`` for whole."""
        return self._tried if self.asks else self._used

    def first(self, model: nn.Module, device: torch.device, budget_bytes: int) -> Inside:
        """What a step runs inside that is recorded as it is: in slices, where it lacks room.

        Args:
            model: The model.
            device: Where it is.
            budget_bytes: The budget; 0 while it is a percentage of a step that has not run.
        """
        self._first = None
        if not self._may or not budget_bytes or self.refusal:
            return nullcontext()
        name, kept = self._may_begin(model, budget_bytes), self._kept_gathers
        self._first = _First(model, name, kept, device, budget_bytes)
        return self._first.inside()

    def comes_first(
        self, model: nn.Module, inputs: Any, device: torch.device, budget_bytes: int
    ) -> bool:
        """Whether it is the logits that lack room, as far as can be told before a step has run.

        So it is where a linear layer has a feature for each word that the model embeds, and there
        is a row of them for each token. Then nothing need run in pieces of the batch.

        Args:
            model: The model.
            inputs: What it is called with.
            device: As of :meth:`first`.
            budget_bytes: The same.
        """
        if self._used is not None:
            return True
        name = self._may_begin(model, budget_bytes)
        if not name or isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Embedding):
            return False
        classes = len(model.get_parameter(name))
        embeddings = (it for it in model.modules() if isinstance(it, nn.Embedding))
        if all(it.num_embeddings != classes for it in embeddings):
            return False
        given = (it for it in tree_leaves(inputs) if isinstance(it, Tensor))
        rows = max((it.numel() for it in given if it.dtype in _TOKENS), default=0)
        return bool(_slices(rows)) and _taken(rows, classes) > _room(device, budget_bytes)

    def _may_begin(self, model: nn.Module, budget_bytes: int) -> str:
        """The weight whose logits may be sliced in a first step; empty for none."""
        name = widest_layer(model) if self._may and budget_bytes and not self.refusal else ""
        return "" if name in self._needed_whole else name

    def first_ended(self, observation: Observation) -> bool:
        """Learn how that step ran.

        Args:
            observation: Its recording, which is told of the action by which it ran.

        Returns:
            Whether it can be planned from: not where its logits were made whole after all, in
            another place than those of the next steps will be.
        """
        first, self._first = self._first, None
        if first is None:
            return True
        if first.loss is not None and first.loss.last.whole:
            self._needed_whole[first.said["weight"]] = first.loss.divergence
            return False
        if first.edges.whole:
            self._kept_gathers = frozenset(first.edges.to_be_kept)
            return False
        if chunk := first.ran():
            observation.way = self._used = _action(chunk)
        return True

    def evaluation(self, model: nn.Module) -> Inside | None:
        """What a call without gradients runs inside; ``None`` where steps run whole.

        Nothing is foreseen of it: who looks at its logits has them made then.

        Args:
            model: The model.
        """
        used: dict[str, Any] = {} if self._used is None else self._used[KIND]
        loss, edges = used.get("loss"), used.get("edges")
        if loss is None and edges is None:
            return None
        return _evaluation(model, loss, edges)

    def notes(self) -> list[str]:
        """Why nothing runs in slices, where that might have helped."""
        return [f"the loss is not computed in slices: {self.refusal}"] if self.refusal else []

    def consider(self, planned: PlannedStep, model: nn.Module) -> bool:
        """A step was planned; have it recorded in slices, if it does not fit.

        Args:
            planned: The step, by the best plan so far.
            model: The model.

        Returns:
            Whether it is to be.
        """
        if not self._may or self.refusal or planned.plan.fits:
            return False
        if self._untried is None and planned.step.way is None:
            self._untried = self._worth_a_step(planned.step.ways(), model)
        if self._untried and not self.asks:
            self._tried, self.asks = _action(self._untried.pop(0)), True
        return self.asks

    def _worth_a_step(self, ways: list[dict[str, Any]], model: nn.Module) -> list[dict[str, Any]]:
        """What is recorded, but for a loss whose logits a step is known to have needed whole."""
        found = _worth_a_step(ways, model)
        why = (self._needed_whole.get(it["loss"]["weight"]) for it in found if it.get("loss"))
        self.refusal = next(filter(None, why), "")
        return [] if self.refusal else found

    def begin_again(self, planned: PlannedStep, model: nn.Module) -> None:
        """Have a step recorded as a first one, which ran on pieces of its batch and does not fit.

        Args:
            planned: The step, by the best plan so far.
            model: What is called in it.
        """
        may = self._may and not (self.refusal or self._has_begun_again or planned.plan.fits)
        if may and planned.step.pieces > 1 and widest_layer(model):
            self.asks = self.begins_again = self._has_begun_again = True
            self._tried = None

    def planned(self, *, nearer: bool) -> None:
        """A step in slices was planned.

        Args:
            nearer: Whether that comes nearer to the budget than before.
        """
        if nearer and not self.begins_again:
            self._used = self._tried
        elif self.begins_again and not nearer:
            self._used = None
        self.asks = self.begins_again = False

    def ran_whole(self, reason: str, less: dict[str, Any] | None) -> None:
        """A step did not run in all the slices that it was recorded for.

        Args:
            reason: Why, as a clause.
            less: What of them it may yet run in; ``None`` for nothing.
        """
        if less is None or not self.asks:
            self.refuse(reason)
        else:
            self._tried = _action(less)

    def refuse(self, reason: str) -> None:
        """Compute nothing in slices from here on.

        Args:
            reason: Why, as a clause.
        """
        self.asks, self._used, self._untried = False, None, []
        self.begins_again = False
        self.refusal = self.refusal or reason


@contextmanager
def _evaluation(
    model: nn.Module, loss: dict[str, Any] | None, edges: dict[str, Any] | None
) -> Iterator[None]:
    """A call without gradients, its logits and messages in slices."""
    whole: Inside = nullcontext()
    if loss is not None:
        whole = ChunkedLoss(model, loss, warn=False, in_script=True).forward(watches=True)
    messages = SlicedEdges(edges, warn=False).forward() if edges is not None else nullcontext()
    with whole, messages:
        yield


class _First:
    """A step recorded in slices if whole logits, or messages along edges, lack room.

    Attributes:
        said: What the plan's action says of the loss.
        loss: Computes the loss of a named layer in slices; ``None`` without one.
        edges: Computes messages in slices.
    """

    def __init__(
        self,
        model: nn.Module,
        name: str,
        kept: frozenset[int],
        device: torch.device,
        budget_bytes: int,
    ) -> None:
        self.said: dict[str, Any] = {"weight": name, "slices": 1}
        self._room: Callable[[], int] = lambda: _room(device, budget_bytes)
        self.loss = (
            ChunkedLoss(model, self.said, warn=False, slices_of=self._slices_of, in_script=True)
            if name
            else None
        )
        least = max(self._room() // _EDGE_COPIES, budget_bytes // _LEAST_PART)
        self._said_edges = {"slices": _EDGE_SLICES, "least_bytes": least, "kept": sorted(kept)}
        self.edges = SlicedEdges(self._said_edges, warn=False)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """The step runs inside this."""
        with self.loss.forward() if self.loss is not None else nullcontext(), self.edges.forward():
            yield

    def ran(self) -> dict[str, Any]:
        """What of it ran in slices."""
        loss = {"loss": self.said} if self.loss is not None and self.loss.last.losses else {}
        return {**loss, **({"edges": self._said_edges} if self.edges.sums else {})}

    def _slices_of(self, rows: int, size_bytes: int) -> int | None:
        assert self.loss is not None, "its logits are put off"
        classes = self.loss.classes
        slices = _slices(rows)
        if not slices or _taken(rows, classes, size_bytes) <= self._room():
            return None
        self.said |= {"slices": slices, "rows": rows, "classes": classes, "logit_bytes": size_bytes}
        return slices


def _slices(rows: int) -> int:
    """Into how many slices rows are cut in a first step; 0 where they are too few."""
    return next((it for it in _SLICES if rows // it >= _LEAST_ROWS), 0)


def _taken(rows: int, classes: int, size_bytes: int = 0) -> int:
    """What whole logits take, of so many bytes each time or more."""
    return _COPIES * max(size_bytes, rows * classes * torch.float32.itemsize)


def _room(device: torch.device, budget_bytes: int) -> int:
    return int(CLEARLY * budget_bytes) - live_bytes(device)


def widest_layer(model: nn.Module) -> str:
    """The weight with most rows, which may make logits; empty without one.

    That of a linear layer, or of an embedding, whose weight a model may multiply by itself.

    Args:
        model: The model.
    """
    kinds = (nn.Embedding, nn.Linear)  # of two as wide, the latter
    layers = [
        (len(it.weight), kinds.index(type(it)), path)
        for path, it in model.named_modules()
        if type(it) in kinds
        and isinstance(it._parameters.get("weight"), nn.Parameter)
        and len(it.weight) > it.weight.shape[1]
    ]
    return f"{max(layers)[-1]}.weight".lstrip(".") if layers else ""


def _worth_a_step(ways: list[dict[str, Any]], model: nn.Module) -> list[dict[str, Any]]:
    """What is recorded, in this order: the loss in most slices, and with it wide layers, or edges.

    A layer that draws random numbers would draw others for each slice, and one whose code does more
    than compute would do that once for each.

    Args:
        ways: The ways that are worth a capture, from the least in slices to the most.
        model: The model.
    """

    def may_run(call: dict[str, Any]) -> bool:
        layer = model.get_submodule(call["module"])
        other = another_forward(layer) or more_than_computing(layer) or keeps_from_calls(layer)
        return not (call["draws"] or other)

    chunks = [way[KIND] for way in ways if way.keys() == {KIND}]
    edges = [it for it in chunks if it.get("edges")]
    losses = [it for it in chunks if not (it.get("calls") or it.get("edges"))]
    wide = [
        {**it, "calls": calls}
        for it in chunks
        if (calls := list(filter(may_run, it.get("calls", ()))))
    ]
    return [*losses[-1:], *wide[-1:], *edges[-1:]]


def _action(chunk: dict[str, Any]) -> dict[str, Any]:
    loss, calls = chunk.get("loss"), chunk.get("calls", ())
    others = (it["slices"] for it in (loss, chunk.get("edges")) if it)
    count = max([*others, *(call["slices"] for call in calls)])
    return {"kind": KIND, "promise": "equivalent", "count": count, "bytes": 0, KIND: chunk}
