"""One budget for several graphs.

Responsible for what each joint graph of a step may take: forward runs them one after another,
backward in reverse, and while one runs, what earlier ones saved and the gradients of later ones are
there besides. Not responsible for the choice inside a graph (:mod:`memfit.run.compiled.search`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memfit.run.compiled.inductor.rates import Place
from memfit.run.compiled.recording import Recorded
from memfit.run.compiled.search import Chosen, choose

_NO_LIMIT = 1 << 62
_HALVINGS = 6
"""Steps to the largest common fraction of every graph's room that the budget allows."""


@dataclass(slots=True, frozen=True)
class Share:
    """What one graph of a step may take, and what it does with it.

    Attributes:
        recorded: The graph.
        chosen: The decision; ``None`` where memfit does not partition the graph.
        target_bytes: Most bytes of its forward and backward.
        outside_bytes: Bytes besides while it runs.
    """

    recorded: Recorded
    chosen: Chosen | None
    target_bytes: int
    outside_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of the step while this graph runs."""
        inside = self.chosen.peak_bytes if self.chosen else self.recorded.handed_bytes
        return self.outside_bytes + inside


def divide(
    graphs: Sequence[Recorded],
    static_bytes: int,
    budget_bytes: int,
    *,
    fused: bool = False,
    place: Place | None = None,
) -> list[Share]:
    """Give each graph its share.

    Args:
        graphs: The graphs in the order of forward.
        static_bytes: Parameters, module buffers, optimizer state and batch.
        budget_bytes: Most bytes of the step.
        fused: How peaks are told; see :func:`memfit.run.compiled.search.choose`.
        place: Where saved tensors may go.

    Returns:
        The shares. Where no division fits, those of the least peaks.
    """
    if len([g for g in graphs if g.joint is not None]) <= 1:
        return _single(graphs, static_bytes, budget_bytes, fused=fused, place=place)
    known: dict[tuple[int, int], Chosen] = {}

    def pick(graph: Recorded, target: int) -> Chosen | None:
        """The choice for a graph, made once however often the graph runs."""
        if graph.joint is None:
            return None
        key = (id(graph.joint), target)
        if key not in known:
            known[key] = choose(graph.joint, target, fused=fused, place=place)
        return known[key]

    full = [pick(graph, _NO_LIMIT) for graph in graphs]
    least = [pick(graph, 0) for graph in graphs]
    everything = _shares(graphs, full, static_bytes)
    if _fits(everything, budget_bytes):
        return everything
    best = _shares(graphs, least, static_bytes)
    if not _fits(best, budget_bytes):
        return best
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        chosen = [
            pick(g, b.peak_bytes + int(middle * (a.peak_bytes - b.peak_bytes))) if a and b else None
            for g, a, b in zip(graphs, full, least, strict=True)
        ]
        shares = _shares(graphs, chosen, static_bytes)
        if _fits(shares, budget_bytes):
            low, best = middle, shares
        else:
            high = middle
    return best


def _single(
    graphs: Sequence[Recorded],
    static_bytes: int,
    budget_bytes: int,
    *,
    fused: bool,
    place: Place | None,
) -> list[Share]:
    outside = _outside(graphs, [None] * len(graphs), static_bytes)
    chosen = [
        choose(g.joint, budget_bytes - besides, fused=fused, place=place) if g.joint else None
        for g, besides in zip(graphs, outside, strict=True)
    ]
    return _shares(graphs, chosen, static_bytes, budget_bytes)


def _fits(shares: Sequence[Share], budget_bytes: int) -> bool:
    return all(share.peak_bytes <= budget_bytes for share in shares)


def _shares(
    graphs: Sequence[Recorded],
    chosen: Sequence[Chosen | None],
    static_bytes: int,
    budget_bytes: int | None = None,
) -> list[Share]:
    outside = _outside(graphs, chosen, static_bytes)
    shares = []
    for graph, one, besides in zip(graphs, chosen, outside, strict=True):
        target = one.peak_bytes if one else 0
        if budget_bytes is not None:
            target = max(target, budget_bytes - besides)
        shares.append(Share(graph, one, target, besides))
    return shares


def _outside(
    graphs: Sequence[Recorded], chosen: Sequence[Chosen | None], static_bytes: int
) -> list[int]:
    """Bytes besides each graph's own: what is static and no input of it, saved or gradients."""
    held = [_handed(g, c) for g, c in zip(graphs, chosen, strict=True)]
    outside = []
    for index, graph in enumerate(graphs):
        inputs = graph.joint.input_bytes if graph.joint else 0
        gradients = sum(_gradients_waiting(later, index) for later in graphs[index + 1 :])
        besides = static_bytes + sum(held[:index]) + gradients - inputs
        outside.append(max(besides, 0))
    return outside


def _handed(graph: Recorded, chosen: Chosen | None) -> int:
    """What a graph's forward leaves behind: saved tensors and outputs."""
    if graph.joint is None:
        return graph.handed_bytes
    joint = graph.joint
    away = {at.tensor for at in chosen.schedule.settled} if chosen else set()
    saved = [t for t in chosen.schedule.saved if t not in away] if chosen else []
    tensors = {joint.tensors[t].storage for t in (*saved, *joint.forward_outputs)}
    return sum(joint.storages[s].bytes for s in tensors if joint.storages[s].op >= 0)


def _gradients_waiting(graph: Recorded, running: int) -> int:
    """Bytes of gradients that a graph returned and that are there besides when another runs.

    Those of what the running graph returned are its tangents, which it counts itself; those of what
    came after it went where they were for.
    """
    joint = graph.joint
    if joint is None:
        return 0
    storages = set()
    for tensor, position in zip(joint.backward_outputs, joint.gradient_of, strict=True):
        source = graph.sources[position] if position < len(graph.sources) else None
        if source is None or source < running:
            storages.add(joint.tensors[tensor].storage)
    return sum(joint.storages[s].bytes for s in storages)
