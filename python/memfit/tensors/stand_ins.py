"""What autograd holds in place of a tensor that it saves for backward.

Responsible for what all such objects can be asked, without unpacking one: to forget the tensor, and
what memory they keep. Not responsible for making them (:mod:`memfit.apply.remat.records`,
:mod:`memfit.run.script.script_recorder`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from torch import Tensor


class StandIn(ABC):
    """What stands for a saved tensor, and can forget it before its node ends."""

    __slots__ = ()

    @abstractmethod
    def let_go(self) -> Tensor | None:
        """Hold the memory of the tensor no longer; it is not asked for again.

        Returns:
            One that looks like it, over memory that is never touched; ``None`` where it stays.
        """

    @abstractmethod
    def held(self, known: set[int]) -> Iterator[Tensor]:
        """The tensors that are in memory because of this: the saved one, or what it is made from.

        Args:
            known: What others were asked about by ``id``, and is not asked again; it grows.
        """
