"""Tensors that a loop makes anew and longer, as ``torch.cat`` does.

No block of theirs lives long, and all that earlier iterations gave is in the latest. Responsible
for telling them from batches that get larger: a longer one begins with the bytes of the one before.
Not responsible for blocks that stay (:mod:`memfit.track.retained`) nor for who holds them
(:mod:`memfit.track.growth`).
"""

from __future__ import annotations

from dataclasses import dataclass

from memfit import _native
from memfit.track.memory import bytes_at
from memfit.track.retained import GROUPS, Growth

_LEAST_BYTES = 1 << 16
_MOST_BLOCKS = 64
_COMPARED = 64
"""Bytes at the begin, in the middle and at the end by which a block is known in a longer one."""

_VARIED = 8
"""Different bytes that its begin has: many blocks begin with zeros."""


@dataclass(slots=True, frozen=True)
class _Tensor:
    """One that gets longer.

    Attributes:
        first_bytes: Its size when it was first seen.
        first_iteration: The iteration then.
        size: Its size now.
        parts: Bytes of it, by where they lie.
        rises: How often it has got longer.
    """

    first_bytes: int
    first_iteration: int
    size: int
    parts: dict[int, bytes | None]
    rises: int = 0

    def goes_on_in(self, address: int, size: int) -> bool:
        """Whether a block begins with it."""
        return size >= self.size and all(
            part == bytes_at(address + offset, _COMPARED) for offset, part in self.parts.items()
        )


class Lengthened:
    """What gets longer in one loop."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self._known: dict[bytes, _Tensor] = {}

    def growth(self, iteration: int) -> Growth | None:
        """Look at the largest blocks that are live; what has got longer again and again.

        Args:
            iteration: How many iterations there were.
        """
        live = _native.survivors(0, _native.last_event() + 1, with_models=False)
        large = sorted((size, address) for address, size, _ in live if size >= _LEAST_BYTES)
        found: dict[bytes, _Tensor] = {}
        longest: Growth | None = None
        for size, address in large[-_MOST_BLOCKS:]:
            begin = bytes_at(address, _COMPARED)
            if begin is None or len(set(begin)) < _VARIED:
                continue
            tensor = found[begin] = self._seen(begin, address, size, iteration)
            kept_bytes = tensor.size - tensor.first_bytes
            if tensor.rises >= GROUPS and (longest is None or kept_bytes > longest.bytes):
                iterations = iteration - tensor.first_iteration
                longest = Growth(kept_bytes, iterations, ((address, size),), is_longer=True)
        self._known = found
        return longest

    def _seen(self, begin: bytes, address: int, size: int, iteration: int) -> _Tensor:
        offsets = (size // 2, size - _COMPARED)
        parts = {offset: bytes_at(address + offset, _COMPARED) for offset in offsets}
        known = self._known.get(begin)
        if known is None or not known.goes_on_in(address, size):
            return _Tensor(size, iteration, size, parts)
        rises = known.rises + (size > known.size)
        return _Tensor(known.first_bytes, known.first_iteration, size, parts, rises)
