"""The iterations of a script that nobody has marked: optimizer steps, backwards, or time alone.

Responsible for telling which of them a script has, and for the growth that was found. Not
responsible for what growth is (:mod:`memfit.track.retained`) nor for its cause
(:mod:`memfit.track.growth`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memfit import _native
from memfit.track.cause import Cause
from memfit.track.growth import GrowthWatch, collection_of
from memfit.track.retained import Growth, growth_over_time

Rhythm = Literal["step", "backward", "time"]
"""What an iteration is: an optimizer's step, a run of autograd's engine, or a part of the run."""

_LEAST_BYTES = 1 << 20
_LEAST_SHARE = 10
"""Where only time is known, what is kept must be one part in so many of what is live."""


@dataclass(slots=True, frozen=True)
class Found:
    """A script that keeps more and more.

    Attributes:
        rhythm: What an iteration is.
        growth: What was kept; ``None`` where only a graph gets longer.
        cause: Why.
    """

    rhythm: Rhythm
    growth: Growth | None
    cause: Cause


class Iterations:
    """The iterations of one script."""

    def __init__(self) -> None:
        """Know none yet."""
        self._watches: dict[Rhythm, GrowthWatch] = {
            "step": GrowthWatch(look_share=0, asks_again=True),
            "backward": GrowthWatch(look_share=0, asks_again=True),
        }
        self._causes: dict[Rhythm, Cause] = {}
        self._over_time: Found | None = None
        self._steps_before = 0

    def stepped(self, cuda_bytes: int) -> None:
        """An optimizer has stepped."""
        self._observe("step", cuda_bytes)

    def backward_ended(self) -> None:
        """Autograd's engine has run; between steps of an optimizer it is no iteration."""
        steps = self._watches["step"].iterations
        if steps == self._steps_before:
            self._observe("backward", 0)
        self._steps_before = steps

    def _observe(self, rhythm: Rhythm, cuda_bytes: int) -> None:
        cause = self._watches[rhythm].observe(cuda_bytes)
        if cause is not None:
            self._causes[rhythm] = cause

    def looked(self) -> None:
        """What is live was looked at: the time to ask, where there are no iterations to count."""
        if any(watch.iterations for watch in self._watches.values()):
            return
        growth = growth_over_time()
        live_bytes = _native.counted_bytes()
        if growth is not None and growth.bytes >= max(_LEAST_BYTES, live_bytes // _LEAST_SHARE):
            cause = collection_of(growth)
            self._over_time = None if cause is None else Found("time", growth, cause)
        else:
            self._over_time = None

    def found(self) -> Found | None:
        """What keeps more and more, if anything does."""
        for rhythm, cause in self._causes.items():
            growth = self._watches[rhythm].growth
            if growth is not None or cause.kind == "summed_graph":
                return Found(rhythm, growth, cause)
        has_iterations = any(watch.iterations for watch in self._watches.values())
        return None if has_iterations else self._over_time
