"""The call of a linear layer that is put off, and computed in whole at most once.

Responsible for what it was called with and under, for its output in whole or some rows of it, and
for telling which of these somebody needed. Not responsible for what stands for the output meanwhile
(:mod:`memfit.apply.slices.deferred`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from memfit.apply.slices.gradient_looks import Looks
from memfit.apply.slices.weight_copies import Linear, WeightsBefore
from memfit.apply.slices.writes import WATCHED

Told = Callable[[str], None]
"""Told what happened, as a word or two."""


class Standing(Protocol):
    """What stands for the whole logits."""

    def become_real(self, who: str) -> Tensor:
        """Be the logits from now on.

        Args:
            who: Who needs them.
        """


@dataclass(frozen=True, slots=True)
class Autocast:
    """The autocast state that a linear layer was called under.

    Attributes:
        device: Kind of device.
        dtype: What it computes in; ``None`` where autocast is off.
    """

    device: str
    dtype: torch.dtype | None

    @staticmethod
    def of(tensor: Tensor) -> Autocast:
        """The state now, on the device of a tensor."""
        kind = tensor.device.type
        if not torch.is_autocast_enabled(kind) or tensor.dtype is torch.float64:
            return Autocast(kind, None)
        return Autocast(kind, torch.get_autocast_dtype(kind))

    def again(self) -> torch.autocast:
        """A context with that state."""
        return torch.autocast(self.device, self.dtype, enabled=self.dtype is not None)


class Whole:
    """The whole logits of one call of the head, computed at most once.

    Attributes:
        slices: Into how many slices a loss is cut; 0 where no loss is, and who looks at some rows
            gets those alone.
        sliced: Told about each loss that is computed in slices, and of rows that are alone.
        in_script: As of :class:`memfit.apply.slices.chunk.ChunkedLoss`.
        looks: Who looks at gradients of the logits.
        logits: What stands for the whole logits.
        is_exposed: Whether their memory is known where no op tells of a write.
    """

    logits: Callable[[], Standing | None]

    def __init__(
        self,
        linear: Linear,
        slices: int,
        sliced: Told,
        whole: Told,
        *,
        in_script: bool = False,
    ) -> None:
        """Put off a call of ``F.linear``.

        Args:
            linear: Its input, weight and bias.
            slices: As the attribute.
            sliced: As the attribute.
            whole: Told who needs the logits whole, once.
            in_script: As the attribute.
        """
        self.slices, self.in_script = slices, in_script
        self.sliced = sliced
        self._given = WeightsBefore(linear, copies=in_script)
        self._autocast = Autocast.of(linear[0])
        self._grad = torch.is_grad_enabled()
        self._dtype = self._autocast.dtype or linear[0].dtype
        tensors = [it for it in linear if it is not None]
        self._requires_grad = self._grad and any(it.requires_grad for it in tensors)
        self._whole = whole
        self._computed: Tensor | None = None
        self.looks, self.is_exposed = Looks(), False
        WATCHED.add(self)

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the logits."""
        return self._dtype

    @property
    def requires_grad(self) -> bool:
        """Whether the logits have a graph."""
        return self._requires_grad

    def made_of(self) -> Iterator[Tensor]:
        """What the logits are made of and may be written to."""
        return self._given.to_be_written()

    def called_with(self) -> Linear:
        """Input, weight and bias of the call that was put off."""
        return self._given.linear()

    def make(self, who: str) -> None:
        """Compute the logits now, if there is still somebody to look at them."""
        logits = self.logits()
        if logits is not None:
            logits.become_real(who)
        WATCHED.discard(self)

    def parts(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """What the loss in slices is computed from; without a graph where the logits have none.

        Args:
            hidden: Hidden values; they are had in the type of the logits.

        Returns:
            Those, and input, weight and bias that the head was called with.
        """
        given, weight, bias = self._given.linear()
        if not self.requires_grad:
            hidden, given, weight = hidden.detach(), given.detach(), weight.detach()
            bias = bias if bias is None else bias.detach()
        return hidden.to(self.dtype), given, weight, bias

    def rows(self, hidden: Tensor) -> Tensor | None:
        """Logits of some rows; ``None`` where they are all, or not to be computed alone.

        Args:
            hidden: Their features, in the last dimension.
        """
        if self.slices or self._computed is not None:
            return None
        given, weight, bias = self._given.linear()
        if hidden.numel() >= given.numel():
            return None
        self.sliced("rows")
        return self._linear((hidden, weight, bias))

    def computed(self, who: str) -> Tensor:
        """The logits as the model would have had them."""
        if self._computed is None:
            self._whole(who)
            self._computed = self.anew()
            WATCHED.discard(self)
        return self._computed

    def anew(self) -> Tensor:
        """The logits before any write to them."""
        return self._linear(self._given.linear())

    def _linear(self, linear: Linear) -> Tensor:
        # Modes have seen the call; they see it once.
        graph, modes = torch.set_grad_enabled(self._grad), torch._C.DisableTorchFunction()
        with graph, self._autocast.again(), modes:
            return F.linear(*linear)
