"""The place that saved tensors of compiled graphs may go to, as the choice sees it.

Responsible for how fast it is beside the device that computes. Not responsible for where the place
is (:mod:`memfit.options`), for measuring it (:mod:`memfit.plan.cost_source`), or for
what transfers cost a step (:mod:`memfit.run.compiled.transfer_time`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memfit.run.compiled.inductor.rates import NOMINAL, Rates, rounded


@dataclass(slots=True, frozen=True)
class Place:
    """Where saved tensors may go.

    Attributes:
        write_bytes_per_second: How fast they go.
        read_bytes_per_second: How fast they come back.
        rates: How fast the device computes meanwhile.
    """

    write_bytes_per_second: float
    read_bytes_per_second: float
    rates: Rates = NOMINAL

    @staticmethod
    def of(offer: Mapping[str, Any], profile: Mapping[str, Any]) -> Place:
        """A place by its rates, rounded to powers of two.

        Args:
            offer: An ``Offer`` of the engine.
            profile: A ``DeviceProfile`` of the engine; empty where only op times are known.
        """
        return Place(
            rounded(offer["write_bytes_per_second"]),
            rounded(offer["read_bytes_per_second"]),
            Rates.of(profile) if profile.get("flops_per_second") else NOMINAL,
        )

    def offer(self) -> dict[str, Any]:
        """The place as an ``Offer`` of the engine, which plans by its rates alone."""
        return {
            "tier": "disk",
            "folder": "",
            "write_bytes_per_second": self.write_bytes_per_second,
            "read_bytes_per_second": self.read_bytes_per_second,
        }
