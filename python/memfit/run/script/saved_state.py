"""Copies of optimizer state that a script makes to save it, in mapped files.

State that is elsewhere is copied for ``optimizer.state_dict()``: all of it at once, beside all
parameters, is more than any step holds. Responsible for having each copy in a mapped file before
the next one is made. Not responsible for when there is no room for them
(:mod:`memfit.run.script.between_passes`), nor for the mapping
(:mod:`memfit.run.script.held_in_files`).
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from torch import Tensor

from memfit.apply.offload.mapped import may_go, to_file
from memfit.apply.offload.state_view import AwayState

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

SAVED_IN_FILES = "copies that `optimizer.state_dict()` makes of offloaded state are in mapped files"
"""What is said at the end where that was done."""


def copies_in_files(optimizer: Optimizer, place: str) -> RemovableHandle:
    """Have copies that ``state_dict()`` makes in files until the handle is removed.

    Args:
        optimizer: The optimizer.
        place: Where the files are.
    """

    def move(_optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        held = state_dict.get("state", {})
        for key, state in list(held.items()):
            if not isinstance(state, AwayState) or not state:
                continue
            own = set(map(id, state.in_memory().values()))
            held[key] = state.plain()
            for value in held[key].values():
                if isinstance(value, Tensor) and id(value) not in own and may_go(value):
                    with contextlib.suppress(OSError, RuntimeError):  # it stays in memory
                        to_file(value, place)

    return optimizer.register_state_dict_post_hook(move, prepend=True)
