"""Whether autograd records the forward of inference.

Responsible for the mode in which such a forward runs, also against its own wish. Not responsible
for what the two modes are compared for (:mod:`memfit.capture.kept_graph`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal

import torch

Gradients = Literal["on", "off"]
"""Whether autograd records a forward."""


@contextlib.contextmanager
def gradient_mode(gradients: Gradients | None) -> Iterator[None]:
    """Run a forward with autograd's recording on or off.

    Args:
        gradients: ``None`` for ``torch.no_grad()``, in which the forward may turn recording on
            again; ``on`` for a forward that nobody put under it; ``off`` for one that cannot turn
            it on.
    """
    if gradients != "off":
        with torch.set_grad_enabled(gradients == "on"):
            yield
        return
    original = torch._C._set_grad_enabled
    with torch.no_grad():
        # All of torch's ways to turn it on call this function by its name.
        torch._C._set_grad_enabled = _stay_off  # type: ignore[assignment]
        try:
            yield
        finally:
            torch._C._set_grad_enabled = original


def _stay_off(_on: object) -> None:
    """Stand for the function that turns recording on or off."""
