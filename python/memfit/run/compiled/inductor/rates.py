"""How fast a device runs ops, as the choice for compiled graphs sees it.

Responsible for rates that change with no noise: those of a plain core where recomputations are
ranked among themselves, those of the device, rounded, where they are held against transfers to the
place that saved tensors of compiled graphs may go to (:class:`Place`). Not
responsible for measuring a device (:mod:`memfit.plan.cost_source`) or for what an op costs
(:mod:`memfit.run.compiled.inductor.op_costs`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

OP_SECONDS = 1e-6
"""Time of an op besides what it computes and moves: compiled code has no executor between them."""


def rounded(rate: float) -> float:
    """A rate, to a power of two.

    Rates are measured anew in every process; decisions, and with them what is found in the caches
    of compiled code, should not change with noise.

    Args:
        rate: Something per second; positive.
    """
    return 2.0 ** round(math.log2(rate))


@dataclass(slots=True, frozen=True)
class Rates:
    """How fast a device is.

    Attributes:
        flops_per_second: Floating-point operations, by the name of the type; never empty.
        bytes_per_second: Bytes read from memory or written to it.
    """

    flops_per_second: tuple[tuple[str, float], ...]
    bytes_per_second: float

    @staticmethod
    def of(profile: Mapping[str, Any]) -> Rates:
        """The rates of a profile, rounded; not below those of a plain core.

        Where other work ran, far less may have been measured, and transfers would seem to hide
        behind anything.

        Args:
            profile: A ``DeviceProfile`` of the engine.
        """
        core = dict(NOMINAL.flops_per_second)
        flops = sorted(profile["flops_per_second"].items())
        return Rates(
            tuple((name, rounded(max(rate, core.get(name, rate)))) for name, rate in flops),
            rounded(max(profile["bytes_per_second"], NOMINAL.bytes_per_second)),
        )

    def flops(self, dtype: str) -> float:
        """Operations a second in a type; in one that is not known, as the engine has it."""
        known = dict(self.flops_per_second)
        return known.get(dtype) or known.get("float32") or max(known.values())

    def cost_source(self) -> dict[str, Any]:
        """The rates as a cost source of the engine."""
        profile = {
            "name": "nominal",
            "flops_per_second": dict(self.flops_per_second),
            "bytes_per_second": self.bytes_per_second,
            "op_overhead_seconds": OP_SECONDS,
        }
        return {"kind": "roofline", "profile": profile}


NOMINAL = Rates((("float32", 1e11),), 2e10)
"""A plain core: fixed, so that a plan does not depend on when a machine was measured."""


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
