"""What an executor asks of each technique that it carries out.

Each room of :mod:`memfit.apply` has a class that says what its technique does around a forward,
around the whole step, around the update of one parameter, and between steps. What a class does not
say, it does not do. The executor (:mod:`memfit.apply.executor`) asks all parts of a plan in turn.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from memfit.apply.offload.tiers import Tier


class Part:
    """One technique of a plan, ready to be carried out.

    Attributes:
        diverged: Whether the last forward left the plan.
        divergence: Where, as a sentence; empty if it did not, or if nobody asked.
        tier: Where it sends bytes to; ``None`` where it sends none.
    """

    tier: Tier | None = None

    @property
    def diverged(self) -> bool:
        """Whether the last forward left the plan."""
        return False

    @property
    def divergence(self) -> str:
        """Where the last forward left the plan, as a sentence; empty if it did not."""
        return ""

    def forward(self) -> contextlib.AbstractContextManager[None]:
        """What a forward runs inside, the loss included."""
        return contextlib.nullcontext()

    def running(self) -> contextlib.AbstractContextManager[None]:
        """What a whole step runs inside."""
        return contextlib.nullcontext()

    def in_forward(self) -> contextlib.AbstractContextManager[None]:
        """What code of the user's runs inside between the calls of a forward, until backward."""
        return contextlib.nullcontext()

    def update_of(self, parameter: Tensor) -> contextlib.AbstractContextManager[None]:
        """What the update of one parameter runs inside.

        Args:
            parameter: The parameter.
        """
        del parameter
        return contextlib.nullcontext()

    def place(self) -> None:
        """Have everything where the plan wants it between steps."""
