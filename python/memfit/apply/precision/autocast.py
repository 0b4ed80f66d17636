"""Forward in fewer bits: ``torch.autocast``.

Responsible for a plan's ``autocast`` and ``autocast_fp16`` actions: which types a forward computes
in, and whether the narrow copies of parameters are kept for further uses. Which ops are cast is
torch's choice (``aten/src/ATen/autocast_mode.h``). Not responsible for the scale of a loss, which
float16 needs and bfloat16 does not (:mod:`memfit.apply.precision.loss_scale`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from memfit.apply.part import Part
from memfit.errors import UsageError

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
"""Element types that autocast computes in, by their names in plans."""


class UnderAutocast(Part):
    """Carries out an ``autocast`` or ``autocast_fp16`` action on a model.

    Attributes:
        scales_loss: Whether the loss has to be scaled.
    """

    def __init__(self, model: nn.Module, said: Mapping[str, Any]) -> None:
        """Prepare; nothing is switched on before :meth:`forward`.

        Args:
            model: The model the plan was made for; its first parameter says on which device.
            said: ``Autocast`` of the plan as parsed JSON.

        Raises:
            UsageError: It is no such thing.
        """
        dtype, cache = said.get("dtype"), said.get("cache")
        if dtype not in DTYPES or not isinstance(cache, bool):
            message = "what the plan says of `autocast` is malformed: it needs `dtype` and `cache`"
            raise UsageError(message)
        self._dtype, self._cache = DTYPES[dtype], cache
        self.scales_loss = self._dtype is torch.float16
        self._device = next((p.device.type for p in model.parameters()), "cpu")
        self._is_left = False

    @property
    def diverged(self) -> bool:
        """Whether the last forward was under autocast already."""
        return self._is_left

    @property
    def divergence(self) -> str:
        """Why the plan's autocast was not used, as a sentence; empty if it was."""
        return "the forward autocasts by itself" if self._is_left else ""

    def forward(self) -> contextlib.AbstractContextManager[None]:
        """What a forward runs inside, the loss included; backward needs no more.

        A block of the caller's own stays as it is: a script's ends before this does, and the state
        that this would then restore is that of the block, which would stay on for good.
        """
        self._is_left = torch.is_autocast_enabled(self._device)
        if self._is_left:
            return contextlib.nullcontext()
        return torch.autocast(self._device, self._dtype, cache_enabled=self._cache)
