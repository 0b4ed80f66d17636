"""The passes of one loop under autocast, where no other plan fits and the user gave leave.

Responsible for whether that may be done to a script, for having a step recorded so, and for whether
it stays. Not responsible for the action (:mod:`memfit.apply.precision.autocast`) nor for the plan.

Which ops run is then another matter, so nothing is derived: a step of the script is recorded with
its forward and loss under autocast, without the weight cache, and planned from as any other. Who
autocasts by himself is left alone, and so is float16: a scaler is the script's own.
"""

from __future__ import annotations

from typing import Any

import torch

from memfit.answers import Plan
from memfit.run.script.request import FitRequest

ACTION = {
    "kind": "autocast",
    "promise": "approximate",
    "count": 1,
    "bytes": 0,
    "autocast": {"dtype": "bfloat16", "cache": False},
}


class Casting:
    """What is known of one loop's steps under autocast.

    Attributes:
        asks: Whether a step is to be recorded once more, under autocast.
        refusal: Why none runs so although it was allowed; empty while one may.
    """

    def __init__(self, request: FitRequest) -> None:
        """Know what is allowed.

        Args:
            request: Which plans are.
        """
        options = request.options
        is_asked = options.promise == "approximate" or "autocast" in options.allow_kinds
        self._is_asked = is_asked and "autocast" not in options.forbid
        self._is_used = False
        self.asks = False
        self.refusal = ""

    def wants(self, device: torch.device) -> dict[str, Any] | None:
        """The action by which the step that begins is recorded; ``None`` for as it is.

        Args:
            device: Where the model is.
        """
        if self._is_asked and torch.is_autocast_enabled(device.type):
            self._refuse("the script autocasts by itself")
        is_wanted = (self.asks or self._is_used) and not self.refusal
        return ACTION if is_wanted else None

    def notes(self) -> list[str]:
        """Why none runs so, where that was asked for."""
        return [f"the model does not run under autocast: {self.refusal}"] if self.refusal else []

    def consider(self, made: Plan, device: torch.device) -> bool:
        """A step as it is was planned; have it recorded under autocast, if it does not fit.

        Args:
            made: The plan.
            device: Where the model is.

        Returns:
            Whether it is to be.
        """
        if self._is_asked and not made.fits and not self._is_used and not self.refusal:
            if device.type == "cuda" and not torch.cuda.is_bf16_supported(
                including_emulation=False
            ):
                self._refuse(f"{torch.cuda.get_device_name(device)} does not compute in bfloat16")
            self.asks = not self.refusal
        return self.asks

    def planned(self, *, nearer: bool) -> None:
        """A step under autocast was planned.

        Args:
            nearer: Whether that comes nearer to the budget than before.
        """
        self.asks, self._is_used = False, nearer
        if not nearer:
            self._refuse("the step takes no less under it")

    def _refuse(self, reason: str) -> None:
        self.asks = self._is_used = False
        self.refusal = self.refusal or reason
