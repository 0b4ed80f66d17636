"""A budget for all that the process takes of the host, held where torch allocates.

Responsible for what the tensors may take of a lease: the lease less what the process takes besides
tensors. Not responsible for refusing (:mod:`memfit.guarding.cpu_limit`).

What is taken besides is resident private memory less tensors, measured when the limit is first set
and at every change, after the allocators have given back what they only keep. It is not followed in
between: blocks that are kept for the next step are resident and no tensors, and letting go of them
to look would cost each step its pages. Pages of tensors that were never touched are not resident,
so they make it smaller. A woken model's pages are those of its parked file until they are written,
and are not counted; written ones are taken besides.
"""

from __future__ import annotations

from memfit import _native, besides
from memfit.errors import BudgetError
from memfit.guarding.cpu_limit import CpuLimit


class HostLimit(CpuLimit):
    """A lease on the host, for all tensors of the process."""

    def __init__(self, leased_bytes: int) -> None:
        """Prepare it; nothing is measured, counted or refused before it is set.

        Args:
            leased_bytes: What the process may take, tensors and all else.
        """
        super().__init__(leased_bytes)
        self._leased_bytes = leased_bytes
        self._besides_bytes: int | None = None

    @property
    def budget_bytes(self) -> int:
        """What the process may take, tensors and all else."""
        return self._leased_bytes

    def set(self) -> None:
        """See :class:`~memfit.guarding.limit.Limit`."""
        if self._besides_bytes is None:
            self.start_counting()
            besides_bytes = _besides()
            self._budget_bytes = _part(self._leased_bytes, besides_bytes)
            self._besides_bytes = besides_bytes
        super().set()

    def change(self, budget_bytes: int) -> None:
        """See :class:`~memfit.guarding.limit.Limit`."""
        if self._besides_bytes is not None:
            besides_bytes = _besides()
            super().change(_part(budget_bytes, besides_bytes))
            self._besides_bytes = besides_bytes
        self._leased_bytes = budget_bytes

    def in_use_bytes(self) -> int:
        """Tensors, and what was taken besides them when that was last measured."""
        return super().in_use_bytes() + (self._besides_bytes or 0)


def _besides() -> int:
    """What the process takes now besides the tensors that are counted."""
    besides.release("host")
    return max(besides.resident() - _native.taken_bytes(), 0)


def _part(leased_bytes: int, besides_bytes: int) -> int:
    """What tensors may take of a lease."""
    tensor_bytes = _native.taken_bytes()
    if tensor_bytes + besides_bytes > leased_bytes:
        message = (
            f"tensors take {tensor_bytes} bytes of `host` and this process {besides_bytes} "
            f"besides, which is more than {leased_bytes} bytes"
        )
        raise BudgetError(message)
    return leased_bytes - besides_bytes
