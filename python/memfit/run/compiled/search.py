"""What to compute again in a joint graph so that it stays under its share of the budget.

Responsible for the choice: the engine's planner decides first, on the graph as a trace; where it
reaches no further, decisions from kept boundaries do (:mod:`memfit.run.compiled.block_boundaries`),
and what room they leave is given back to whatever saves the most time. Where a place is named,
saved tensors go there instead, or some of them, where that is quicker or nothing else reaches the
target. Every decision is judged by the peak of the schedule it leads to, never by bytes saved. Not
responsible for what a decision means (:mod:`memfit.run.compiled.schedule`).

No clock and no random number enters: the same graph and target give the same decision, in every
process.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from memfit.run.compiled import as_trace, block_boundaries, transfer_nodes
from memfit.run.compiled.inductor.op_costs import costs
from memfit.run.compiled.inductor.rates import NOMINAL, Place
from memfit.run.compiled.joint import Joint, Op
from memfit.run.compiled.schedule import (
    KEEP_ALL,
    Decision,
    Schedule,
    fused_peak_bytes,
    schedule,
)
from memfit.run.compiled.transfer_time import lost_seconds

_CORRECTIONS = 5
"""Times the engine is asked again for less, where its answer is above the target."""

_CORRECTIONS_WITH_PLACE = 2
"""The same where it may also have tensors elsewhere, which it answers more slowly."""

_FEW = 1 / 16
"""Part of a result's bytes that its sources may take more, as statistics of a softmax do."""

_POLISHED = 3
"""Decisions from boundaries whose room is given back."""


@dataclass(slots=True, frozen=True)
class Chosen:
    """A decision and what it takes.

    Attributes:
        decision: What is computed again.
        schedule: The order that follows, with its peaks.
        recomputed_ops: Calls of forward that run again, views not among them.
        seconds: Nominal time of what runs again, and what transfers add.
        graph_seconds: Nominal time of forward and backward with everything kept.
        peak_bytes: Peak of the schedule.
        unplanned_peak_bytes: Peak with everything kept.
    """

    decision: Decision
    schedule: Schedule
    recomputed_ops: int
    seconds: float
    graph_seconds: float
    peak_bytes: int
    unplanned_peak_bytes: int


def choose(
    joint: Joint, target_bytes: int, *, fused: bool = False, place: Place | None = None
) -> Chosen:
    """Decide what to compute again.

    Args:
        joint: The graph.
        target_bytes: Most bytes at once in its forward and backward, inputs and outputs included.
        fused: Whether peaks are those of the model of Inductor rather than node by node. The model
            can be too low: it is for steps that are measured. A graph with convolutions is told
            node by node all the same: the model does not know what they take for themselves.
        place: Where saved tensors may go.

    Returns:
        The cheapest decision found under the target; without one, that of least peak.
    """
    search = _Search(joint, target_bytes, fused=fused, place=place)
    best = search.judge(KEEP_ALL)
    if best.peak_bytes <= target_bytes:
        return best
    best = search.keeping_sources(best)
    if best.peak_bytes <= target_bytes:
        return best
    found = [best, search.keeping_sources(search.by_engine())]
    if found[-1].peak_bytes <= target_bytes:
        found.append(search.give_back(found[-1]))
    if found[-1].peak_bytes > target_bytes:
        found += search.by_boundaries()
    best = _best(found, target_bytes)
    return _best([best, *search.elsewhere(found[0], best)], target_bytes)


def _best(found: Sequence[Chosen], target_bytes: int) -> Chosen:
    fitting = [one for one in found if one.peak_bytes <= target_bytes]
    if fitting:
        return min(fitting, key=lambda one: (one.seconds, one.peak_bytes))
    return min(found, key=lambda one: (one.peak_bytes, one.seconds))


class _Search:
    """Candidates for one graph and target."""

    def __init__(
        self, joint: Joint, target_bytes: int, *, fused: bool, place: Place | None
    ) -> None:
        self._joint = joint
        self._target = target_bytes
        self._place = place
        self.fused = fused and not any(_is_convolution(op) for op in joint.ops)
        self._costs = costs(joint, NOMINAL if place is None else place.rates)
        self._seconds = [cost.seconds for cost in self._costs]
        self._graph_seconds = sum(self._seconds)
        self._unplanned: int | None = None
        self._beside_model = 0
        """How much more the graph takes node by node, with everything kept."""

    def judge(self, decision: Decision) -> Chosen:
        """Lay a decision out and add up what it takes."""
        made = schedule(self._joint, decision)
        peak = fused_peak_bytes(self._joint, made) if self.fused else made.peak_bytes
        if self._unplanned is None:
            self._unplanned, self._beside_model = peak, made.peak_bytes - peak
        seconds = sum(self._seconds[op] for op in made.recomputed)
        if self._place is not None and made.settled:
            seconds += lost_seconds(self._joint, made, self._seconds, self._place)
        ops = sum(not self._joint.ops[op].view for op in made.recomputed)
        return Chosen(decision, made, ops, seconds, self._graph_seconds, peak, self._unplanned)

    def by_engine(self) -> Chosen:
        """The engine's decision; asked again for less while it is above the target here.

        The engine knows the step node by node, where inputs die and outputs wait a little
        differently; so it may have what fusion is expected to leave out besides.
        """
        asked, best = self._target + self._beside_model, None
        for _ in range(_CORRECTIONS):
            one = self.judge(as_trace.plan(self._joint, self._costs, asked))
            if best is None or one.peak_bytes < best.peak_bytes:
                best = one
            if one.peak_bytes <= self._target:
                return one
            asked -= one.peak_bytes - self._target
            if asked <= 0:
                break
        assert best is not None
        return best

    def keeping_sources(self, start: Chosen) -> Chosen:
        """The same, with what Inductor computes inside its readers computed from its sources.

        A result that costs nothing to have again is written only because it is saved. Where saving
        what it is made of takes no more, the memory that both take side by side is spared, and the
        time to write it.
        """
        free = [
            index
            for index in self._joint.droppable()
            if self._seconds[self._joint.storages[index].op] == 0.0
        ]
        dropped = start.decision.dropped.union(free)
        sources = Decision(dropped, start.decision.homes, start.decision.away)
        saved = schedule(self._joint, sources).saved_bytes
        for members in self._groups(set(free) - start.decision.dropped).values():
            results = _without(sources, members)
            saved_so = schedule(self._joint, results).saved_bytes
            size = sum(self._joint.storages[index].bytes for index in members)
            if saved - saved_so > _FEW * size:
                sources, saved = results, saved_so
        best = self.judge(sources)
        return best if best.peak_bytes <= start.peak_bytes else start

    def by_boundaries(self) -> list[Chosen]:
        """Decisions that keep boundaries of blocks; those under the target with their room used."""
        judged = [self.judge(decision) for decision in block_boundaries.decisions(self._joint)]
        judged.sort(key=lambda one: (one.peak_bytes > self._target, one.seconds, one.peak_bytes))
        fitting = [one for one in judged if one.peak_bytes <= self._target]
        return [self.give_back(one) for one in fitting[:_POLISHED]] or judged

    def give_back(self, start: Chosen) -> Chosen:
        """Keep again what saves the most time for its bytes, as long as the target holds.

        Storages are tried in groups of the same op and shape, as repeated blocks make them: first
        the whole group, then as many of its last ones as there is room for.
        """
        best = start
        groups = self._groups(start.decision.dropped)
        gains = {key: self._gain(start, members) for key, members in groups.items()}
        for key in sorted(groups, key=lambda k: (-gains[k], k)):
            if gains[key] > 0:
                best = self._keep_most(best, groups[key])
        return best

    def elsewhere(self, start: Chosen, best: Chosen) -> list[Chosen]:
        """Decisions with some of what they save elsewhere.

        Args:
            start: Above the target, with nothing computed again that takes time.
            best: The best decision with everything at home.
        """
        if self._place is None:
            return []
        found = [self._fewest_away(one) for one in (start, best) if one.peak_bytes > self._target]
        return found + self._by_engine_with_place()

    def _by_engine_with_place(self) -> list[Chosen]:
        """The engine's decisions for both, what is elsewhere as it has it and as few as will do."""
        asked, found = self._target + self._beside_model, []
        for _ in range(_CORRECTIONS_WITH_PLACE):
            made = as_trace.plan(self._joint, self._costs, asked, self._place)
            home = self.keeping_sources(self.judge(Decision(made.dropped, made.homes)))
            order = transfer_nodes.candidates(self._joint, home.schedule)
            leaving = [storage for storage in order if storage in made.away]
            found += [self.judge(_with_away(home.decision, leaving)), self._fewest_away(home)]
            beyond = min(one.peak_bytes for one in found[-2:]) - self._target
            if not 0 < beyond < asked:
                break
            asked -= beyond
        return found

    def _fewest_away(self, start: Chosen) -> Chosen:
        """The decision with the fewest tensors elsewhere that keeps the target, or with all.

        The first that forward makes go first: they have the longest to go and to come back.
        """
        order = transfer_nodes.candidates(self._joint, start.schedule)
        best = self.judge(_with_away(start.decision, order))
        fits, fails = len(order), 0
        while best.peak_bytes <= self._target and fits - fails > 1:
            count = (fits + fails) // 2
            one = self.judge(_with_away(start.decision, order[:count]))
            if one.peak_bytes <= self._target:
                best, fits = one, count
            else:
                fails = count
        return best

    def _groups(self, dropped: Iterable[int]) -> dict[tuple[str, int, int], list[int]]:
        groups: dict[tuple[str, int, int], list[int]] = defaultdict(list)
        for index in sorted(dropped):
            storage = self._joint.storages[index]
            name = str(self._joint.ops[storage.op].node.target)
            groups[name, storage.output, storage.bytes].append(index)
        return groups

    def _gain(self, start: Chosen, members: list[int]) -> float:
        """Seconds saved for each byte kept."""
        kept = self.judge(_without(start.decision, members))
        added = kept.schedule.saved_bytes - start.schedule.saved_bytes
        return (start.seconds - kept.seconds) / max(added, 1)

    def _keep_most(self, best: Chosen, members: list[int]) -> Chosen:
        fits, fails = 0, len(members) + 1
        while fails - fits > 1:
            count = len(members) if fails > len(members) else (fits + fails) // 2
            one = self.judge(_without(best.decision, members[-count:]))
            if one.peak_bytes <= self._target:
                fits, found = count, one
                if count == len(members):
                    return found
            else:
                fails = count
        if fits == 0:
            return best
        one = self.judge(_without(best.decision, members[-fits:]))
        return one if one.seconds < best.seconds else best


def _without(decision: Decision, kept: list[int]) -> Decision:
    return Decision(decision.dropped.difference(kept), decision.homes, decision.away)


def _with_away(decision: Decision, leaving: Iterable[int]) -> Decision:
    return Decision(decision.dropped, decision.homes, frozenset(leaving))


def _is_convolution(op: Op) -> bool:
    """Whether a library runs it with scratch memory of its own, perhaps as much as its result."""
    return "convolution" in str(op.node.target)
