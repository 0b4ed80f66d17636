"""The place that saved tensors of compiled graphs may go to, as the choice sees it.

Responsible for what transfers cost beside computing again. Not responsible for where the place is
(:mod:`memfit.places`) nor for measuring it (:mod:`memfit.costs`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, frozen=True)
class Place:
    """Where saved tensors may go.

    Attributes:
        write_bytes_per_second: How fast they go.
        read_bytes_per_second: How fast they come back.
    """

    write_bytes_per_second: float
    read_bytes_per_second: float

    @staticmethod
    def of(offer: Mapping[str, Any]) -> Place:
        """A place by its rates, rounded to powers of two.

        They are measured anew in every process; decisions, and with them what is found in the
        caches of compiled code, should not change with noise.

        Args:
            offer: An ``Offer`` of the engine.
        """
        rates = (offer["write_bytes_per_second"], offer["read_bytes_per_second"])
        return Place(*(2.0 ** round(math.log2(rate)) for rate in rates))

    def seconds(self, size_bytes: int) -> float:
        """Time that so many bytes take to go and to come back, if nothing hides it.

        Args:
            size_bytes: The bytes.
        """
        return size_bytes / self.write_bytes_per_second + size_bytes / self.read_bytes_per_second
