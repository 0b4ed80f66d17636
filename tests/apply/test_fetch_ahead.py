"""Which stored allocations are fetched ahead of their use, and what finding them costs."""

from __future__ import annotations

import random
import weakref
from typing import Any, cast

import pytest
import torch

from memfit.apply.offload.activations import Ahead, ask_for
from memfit.apply.remat.records import NO_HOME, Fetch, State

SIZES = (64, 64, 192, 448)


class Parcel:
    """Bytes elsewhere that come at once, and are counted."""

    def __init__(self) -> None:
        self.times = 0

    def prefetch(self, target: torch.Tensor) -> None:
        del target
        self.times += 1

    def wait(self) -> None:
        pass


class Naive:
    """Looks at all that the step stores, each time."""

    def __init__(self, states: list[weakref.ref[State] | None], window_bytes: int) -> None:
        self.states = states
        self.window_bytes = window_bytes

    def wanted(self) -> list[int]:
        alive = [(rank, it) for rank, ref in enumerate(self.states) if ref and (it := ref())]
        fetches = [cast("Fetch", it.producer) for _, it in alive]
        there = [it.anchor is not None for _, it in alive]
        ahead = sum(
            f.size_bytes
            for f, is_there in zip(fetches, there, strict=True)
            if is_there and f.is_ahead
        )
        found = []
        for (rank, _), fetch, is_there in zip(alive, fetches, there, strict=True):
            if is_there:
                continue
            ahead += fetch.size_bytes
            if ahead > self.window_bytes:
                break
            if fetch.parcel is not None:
                found.append(rank)
        return found


def stored(size_bytes: int) -> State:
    fetch = Fetch("offload", 0, size_bytes, torch.device("cpu"), NO_HOME)
    fetch.parcel = cast("Any", Parcel())
    return State(fetch, 0, 0)


def asked_for(state: State, *, passes: bool) -> None:
    ask_for(state, cast("Fetch", state.producer))
    state.anchor = None if passes else torch.empty(1)


def ahead_of_use(states: dict[int, State]) -> set[int]:
    there = ((r, cast("Fetch", s.producer)) for r, s in states.items() if s.anchor is not None)
    return {rank for rank, fetch in there if fetch.is_ahead}


@pytest.mark.parametrize("seed", range(60))
def test_the_same_are_fetched_as_by_a_look_at_all(seed: int):
    rng = random.Random(seed)
    count = rng.randint(1, 24)
    order = [(op, 0) for op in range(count)]
    ahead = Ahead(order, rng.choice((64, 256, 640)))
    states: dict[int, State] = {}
    references: list[weakref.ref[State] | None] = [None] * count
    twin = Naive(references, ahead._window_bytes)
    for _ in range(120):
        move = rng.random()
        rank = rng.randrange(count)
        if move < 0.3 and references[rank] is None:
            states[rank] = stored(rng.choice(SIZES))
            references[rank] = weakref.ref(states[rank])
            ahead.expect(order[rank], states[rank])
        elif move < 0.5 and states:
            del states[rng.choice(list(states))]  # its node has run
        elif move < 0.65 and states:
            asked_for(states[rng.choice(list(states))], passes=rng.random() < 0.3)
        else:
            wanted, before = twin.wanted(), ahead_of_use(states)
            ahead.look_ahead()
            assert sorted(ahead_of_use(states) - before) == wanted


def test_a_look_costs_by_what_may_be_fetched_and_not_by_all_that_is_stored():
    class Counted(list[Any]):
        looks = 0

        def __getitem__(self, index: Any) -> Any:
            Counted.looks += 1
            return super().__getitem__(index)

    count = 1000
    ahead = Ahead([(op, 0) for op in range(count)], 4 * 64)
    ahead._states = Counted(ahead._states)
    states = [stored(64) for _ in range(count)]
    for op, state in enumerate(states):
        ahead.expect((op, 0), state)
    while states:
        ahead.look_ahead()
        ask_for(states[0], cast("Fetch", states[0].producer))
        del states[0], state
        state = states[0] if states else None
    assert Counted.looks < 12 * count
