"""Frozen parameters of a recorded step, in mapped files while backward runs.

What is never written goes for good (:mod:`memfit.run.script.held_in_files`). A momentum encoder is
written in every forward, so it is in memory then; backward does not need it. Responsible for having
such parameters in files from the beginning of backward to its end. Not responsible for what else a
recorded step keeps elsewhere (:mod:`memfit.run.script.script_recorder`,
:mod:`memfit.run.script.stash`).
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING

from memfit import _native
from memfit.apply.offload.mapped import is_alone, is_lent, may_go, to_file, to_memory

if TYPE_CHECKING:
    from torch import Tensor, nn

    from memfit.apply.offload.mapped import Moves

_WORTH = 1 / 64
"""Part of the budget that is worth moving."""


class FrozenAway:
    """Frozen parameters of the pass under way."""

    def __init__(self) -> None:
        """Move none yet."""
        self._mapped: list[weakref.ref[Tensor]] = []

    def backward_begins(
        self, model: nn.Module, budget_bytes: int, place: str, moves: Moves
    ) -> None:
        """Have them in files, where backward may lack room: it may double what is live.

        Args:
            model: The model.
            budget_bytes: The budget; 0 where that is not known.
            place: Where files may be; empty for nowhere.
            moves: Told of each before it has other memory.
        """
        if not place or 2 * _native.counted_bytes() <= budget_bytes or not budget_bytes:
            return
        if not is_alone():
            return  # another thread may be reading
        # None that is trained may go.
        frozen = [it for it in model.parameters() if may_go(it) and not is_lent(it)]
        if sum(it.nbytes for it in frozen) < budget_bytes * _WORTH:
            return
        with contextlib.suppress(OSError, RuntimeError):  # the others stay
            for parameter in frozen:
                to_file(parameter, place, moves)
                self._mapped.append(weakref.ref(parameter))

    def backward_ended(self, moves: Moves | None) -> None:
        """Have them in memory again.

        Args:
            moves: As above; ``None`` where nobody records any more.
        """
        mapped, self._mapped = self._mapped, []
        for parameter in (it for of in mapped if (it := of()) is not None):
            if may_go(parameter, is_mapped=True):
                to_memory(parameter, moves)
