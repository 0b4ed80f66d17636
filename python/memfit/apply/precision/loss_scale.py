"""A loss scale: gradients of float16 that are neither nothing nor infinite.

Responsible for the scale and for what happens to it: what backward begins with, gradients scaled
back and looked at once, the scale halved where one was not finite and doubled after a long while
without. As ``torch.amp.GradScaler`` does, by the same ops and with the same numbers
(``torch/amp/grad_scaler.py``); but a plan's updates may come one by one, which a scaler that calls
the optimizer itself cannot know of. Not responsible for skipping an update: that is a driver.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from memfit.errors import UsageError

INITIAL = 2.0**16
GROWTH = 2.0
BACKOFF = 0.5
GROWTH_INTERVAL = 2000
"""As ``torch.amp.GradScaler`` has them."""


class LossScale:
    """The scale of one workload's loss, over all of its steps.

    Attributes:
        skipped_steps: Steps whose gradients were not finite.
    """

    def __init__(self) -> None:
        """Begin with the scale that torch begins with."""
        self._scale = torch.full((), INITIAL)
        self._growth_tracker = torch.zeros((), dtype=torch.int32)
        self.skipped_steps = 0

    @property
    def value(self) -> float:
        """What the loss is multiplied by."""
        return float(self._scale)

    def weight(self, loss: Tensor, weight: float = 1.0) -> Tensor:
        """What backward begins with.

        Args:
            loss: The loss.
            weight: What the loss is weighted by besides.

        Returns:
            A tensor of the loss's shape and type.
        """
        return torch.full_like(loss, self.value * weight)

    def unscale(self, gradients: Iterable[Tensor | None]) -> bool:
        """Scale gradients back, in place, and look at them.

        Args:
            gradients: All gradients of the step.

        Returns:
            Whether all of them are finite.

        Raises:
            UsageError: One is in float16, as its parameter is: what it lost stays lost.
        """
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for gradient in gradients:
            if gradient is None:
                continue
            if gradient.dtype is torch.float16:
                raise UsageError(
                    "the plan scales the loss, and a parameter is in float16: its gradient cannot "
                    "be scaled back\nhint: keep parameters in float32 and plan again"
                )
            values = gradient._values() if gradient.is_sparse else gradient
            groups.setdefault((values.device, values.dtype), []).append(values)
        finite = True
        for (device, _), group in groups.items():
            scale = self._scale.to(device)
            inverse = scale.double().reciprocal().float()
            found = torch.zeros((), device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(group, found, inverse)
            finite &= not bool(found)
        return finite

    def update(self, *, finite: bool) -> None:
        """Take note of a step.

        Args:
            finite: Whether its gradients were.
        """
        found = torch.full((), 0.0 if finite else 1.0)
        torch._amp_update_scale_(
            self._scale, self._growth_tracker, found, GROWTH, BACKOFF, GROWTH_INTERVAL
        )
        self.skipped_steps += not finite

    def state_dict(self) -> dict[str, Any]:
        """The scale and how long it has held, in the words of ``GradScaler.state_dict``."""
        return {
            "scale": self.value,
            "growth_factor": GROWTH,
            "backoff_factor": BACKOFF,
            "growth_interval": GROWTH_INTERVAL,
            "_growth_tracker": int(self._growth_tracker),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with a scale.

        Args:
            state: As :meth:`state_dict` or ``GradScaler.state_dict`` gives it.
        """
        self._scale.fill_(float(state["scale"]))
        self._growth_tracker.fill_(int(state["_growth_tracker"]))
