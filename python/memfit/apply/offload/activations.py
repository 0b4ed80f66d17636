"""Saved tensors kept elsewhere between forward and backward: when they go out and come back.

Responsible for a plan's ``offload`` action: the stored allocations of one forward, the window in
which they are on their way out, fetching, and fetching ahead. Not responsible for moving bytes
(:mod:`memfit.apply.offload.tiers`), for what autograd is given instead
(:mod:`memfit.apply.remat.watch`), or for the order within a request
(:mod:`memfit.apply.remat.replay`). The rules are those of ``docs/concepts/transformed-trace.md``.

Correctness does not depend on the plan here either: bytes are what they were when autograd saved
the tensor, or an error says that they are not.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from memfit.apply.remat.records import Fetch, State
from memfit.errors import ReplayError
from memfit.tensors.versions import version_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from memfit.apply.offload.tiers import Tier


MOST_FORWARDS = 8
"""Forwards that may have tensors elsewhere at a time.

One whose backward never runs, and whose loss somebody keeps, has them there for as long. So a place
takes what that many forwards store, and those above it keep theirs in memory, as without a plan.
"""


class Stay:
    """That a forward has tensors elsewhere: lives as long as any of them may be asked for."""

    __slots__ = ("__weakref__",)


@dataclass(slots=True)
class Shipment:
    """A stored allocation on its way out.

    Attributes:
        fetch: How it comes back.
        source: An alias of the tensor, which keeps it until the write has settled.
        version: The version its bytes are of.
    """

    fetch: Fetch
    source: Tensor
    version: int


class Outgoing:
    """Stored allocations on their way out in one forward, oldest first.

    Attributes:
        sent: Allocations sent so far.
    """

    def __init__(self, tier: Tier, window_bytes: int) -> None:
        """Create an empty window.

        Args:
            tier: Where they go.
            window_bytes: Most bytes on their way at a time; a larger allocation goes alone.
        """
        self.sent = 0
        self._tier = tier
        self._window_bytes = window_bytes
        self._queue: deque[Shipment] = deque()
        self._bytes = 0

    def send(self, fetch: Fetch, source: Tensor) -> None:
        """Send an allocation out, after as many of the oldest have settled as the window needs.

        Args:
            fetch: How it will come back.
            source: An alias of it that shares storage and version counter.

        Raises:
            OffloadError: An earlier one, or this one, cannot be written.
        """
        size = fetch.size_bytes
        while self._queue and self._bytes + size > self._window_bytes:
            self._settle_oldest()
        fetch.parcel = self._tier.send(source)
        fetch.is_sent = True
        fetch.source = None
        self._queue.append(Shipment(fetch, source, version_of(source)))
        self._bytes += size
        self.sent += 1
        if size > self._window_bytes:
            self._settle_oldest()

    def settle(self, fetch: Fetch | None = None) -> None:
        """Wait until an allocation, and all that went out before it, is written.

        Args:
            fetch: The allocation; all of them by default.

        Raises:
            OffloadError: One of them cannot be written.
        """
        if fetch is not None and all(shipment.fetch is not fetch for shipment in self._queue):
            return
        while self._queue:
            if self._settle_oldest() is fetch:
                return

    def abandon(self) -> None:
        """Let everything go that is still on its way: nobody will ask for it."""
        for shipment in self._queue:
            shipment.fetch.parcel = None  # first, so that the source is there until it has ended
        self._queue.clear()
        self._bytes = 0

    def _settle_oldest(self) -> Fetch:
        oldest = self._queue[0]
        fetch = oldest.fetch
        if fetch.parcel is not None:
            fetch.parcel.settle()
        # Else it has come back for good already, as where forward asks for gradients on the way.
        if fetch.parcel is not None and version_of(oldest.source) != oldest.version:
            fetch.written_to = (
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: shape {list(oldest.source.shape)} is at version "
                f"{version_of(oldest.source)}; expected version {oldest.version} instead"
            )
        self._queue.popleft()
        self._bytes -= fetch.size_bytes
        return fetch


class Ahead:
    """What is fetched before it is asked for, in the order of the plan.

    A look costs by what is there and may be fetched, not by all that the step stores.
    """

    def __init__(self, order: Sequence[tuple[int, int]], window_bytes: int) -> None:
        """Create one for a forward and its backward.

        Args:
            order: Stored allocations in the order of fetching, as op and output.
            window_bytes: Most bytes fetched ahead and not asked for.
        """
        self._ranks = {place: rank for rank, place in enumerate(order)}
        self._states: list[weakref.ref[State] | None] = [None] * len(order)
        self._left = list(range(len(order)))
        self._coming: list[weakref.ref[State]] = []
        self._window_bytes = window_bytes

    def expect(self, place: tuple[int, int], state: State) -> None:
        """Note the allocation that op and output of forward made."""
        rank = self._ranks.get(place)
        if rank is not None:
            self._states[rank] = weakref.ref(state)

    def look_ahead(self) -> None:
        """Fetch the next ones in order that are not there, as long as the window has room.

        Raises:
            OffloadError: One of them cannot be read.
        """
        ahead_bytes = self._coming_bytes()
        seen, alive = 0, []
        try:
            for rank in self._left:
                reference = self._states[rank]
                state = None if reference is None else reference()
                if state is not None and state.anchor is None:
                    fetch = _fetch_of(state)
                    ahead_bytes += fetch.size_bytes
                    if ahead_bytes > self._window_bytes:
                        return
                    fetch_ahead(state, fetch)
                    if fetch.is_ahead:
                        self._coming.append(weakref.ref(state))
                seen += 1
                if reference is None or state is not None:
                    alive.append(rank)
        finally:
            self._left[:seen] = alive

    def _coming_bytes(self) -> int:
        """Bytes fetched ahead that nothing has asked for yet."""
        found = [(it, state) for it in self._coming if (state := it()) is not None]
        coming = [(it, _fetch_of(state)) for it, state in found if state.anchor is not None]
        coming = [(it, fetch) for it, fetch in coming if fetch.is_ahead]
        self._coming = [it for it, _ in coming]
        return sum(fetch.size_bytes for _, fetch in coming)


def _fetch_of(state: State) -> Fetch:
    fetch = state.producer
    assert isinstance(fetch, Fetch), "only what is stored is expected"
    return fetch


class Transit:
    """All that the stored allocations of one forward share.

    Attributes:
        outgoing: Those on their way out.
        ahead: Those fetched ahead.
        stay: What they hold while any of them lives; let go of here when forward ends.
        was_full: Whether an allocation stayed because the place has those of enough forwards.
    """

    def __init__(
        self,
        tier: Tier,
        window_bytes: int,
        order: Sequence[tuple[int, int]],
        *,
        is_full: bool = False,
    ) -> None:
        """Create it for one forward and its backward.

        Args:
            tier: Where they go.
            window_bytes: Most bytes on their way out, and most fetched ahead.
            order: In which order they are fetched ahead, as op and output.
            is_full: Whether the place has those of :data:`MOST_FORWARDS` others.
        """
        self.stay: Stay | None = Stay()
        self.was_full = False
        self._is_full = is_full
        self.outgoing = Outgoing(tier, window_bytes)
        self.ahead = Ahead(order, window_bytes)
        self._tier = tier

    def refusal(self, device: torch.device) -> str | None:
        """Why an allocation on ``device`` stays; ``None`` when it can go."""
        refusal = self._tier.refusal(device)
        if refusal is None and self._is_full:
            self.was_full = True
            return f"{MOST_FORWARDS} forwards without a backward have theirs elsewhere already"
        return refusal

    def preserve(self, fetch: Fetch) -> None:
        """See to it that a write to the allocation, about to happen, changes nothing of what went.

        Raises:
            OffloadError: It, or one that went out before it, cannot be written.
        """
        if fetch.source is not None:
            self.outgoing.send(fetch, fetch.source)
        self.outgoing.settle(fetch)


def fetch_now(state: State, fetch: Fetch, *, stays: bool) -> None:
    """Make a stored allocation be there.

    Args:
        state: Its state, which is not there.
        fetch: How it comes back.
        stays: Whether nobody will fetch it again, so that its bytes elsewhere can be forgotten.

    Raises:
        OffloadError: Its bytes did not come back as they went.
        ReplayError: It has never gone out, and was written to since.
        RuntimeError: It was written to after autograd saved it, as autograd itself would say.
    """
    if fetch.written_to:
        raise RuntimeError(fetch.written_to)
    if fetch.parcel is None:
        state.anchor = _unsent(fetch)
        return
    target = _room(fetch)
    fetch.parcel.fetch(target)
    state.anchor = target
    if stays:
        fetch.parcel = None


def fetch_ahead(state: State, fetch: Fetch) -> None:
    """Begin to fetch a stored allocation; :func:`ask_for` waits for it.

    Raises:
        OffloadError: Its bytes were not written.
    """
    if fetch.written_to or fetch.parcel is None:
        return  # said when it is asked for
    target = _room(fetch)
    fetch.parcel.prefetch(target)
    state.anchor = target
    fetch.is_ahead = fetch.is_coming = True


def ask_for(state: State, fetch: Fetch) -> None:
    """Note that a request asks for a stored allocation; what comes ahead is there afterwards.

    Raises:
        OffloadError: Its bytes did not come back as they went.
    """
    fetch.is_ahead = False
    if not fetch.is_coming:
        return
    assert fetch.parcel is not None
    fetch.is_coming = False
    try:
        fetch.parcel.wait()
    except BaseException:
        state.anchor = None
        raise
    fetch.parcel = None


def _room(fetch: Fetch) -> Tensor:
    return torch.empty(fetch.size_bytes, dtype=torch.uint8, device=fetch.device)


def _unsent(fetch: Fetch) -> Any:
    """The tensor itself, where a record took it and autograd never saved it."""
    source = fetch.source
    if source is None:
        raise ReplayError("a tensor that the plan stores was needed and had not been saved")
    if version_of(source) != fetch.source_version:
        message = (
            "a tensor that the plan stores was written to between forward and backward where memfit"
            " was not watching\nhint: plan again, so that the step is recorded as it runs now"
        )
        raise ReplayError(message)
    return source
