"""Whether autograd records the forward of inference.

Responsible for the mode in which such a forward runs, also against its own wish. Not responsible
for what the two modes are compared for (:mod:`memfit.capture.retained_graph`).
"""

from __future__ import annotations

import contextlib
import threading
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
    original, own = torch._C._set_grad_enabled, threading.get_ident()

    def stay_off(enabled: bool) -> None:  # noqa: FBT001 - stands for torch's
        if threading.get_ident() != own:  # another thread may train meanwhile
            original(enabled)

    with torch.no_grad():
        # All of torch's ways to turn it on call this function by its name.
        torch._C._set_grad_enabled = stay_off
        try:
            yield
        finally:
            torch._C._set_grad_enabled = original
