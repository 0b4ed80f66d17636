"""Gradients of logits that are asked for once their loss has been computed in slices.

``logits.register_hook`` and ``logits.retain_grad()`` after ``F.cross_entropy`` find a loss that was
never computed from those logits, and so does ``torch.autograd.grad(loss, logits)``. Responsible for
what a loss in slices remembers of the way from the head's logits to it, and for its gradients by
that way, over the logits themselves, so that what looks at them sees them. Not responsible for the
loss in slices (:mod:`memfit.apply.slices.sliced_loss`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from memfit.apply.slices.weight_copies import Linear

Step = Callable[[Tensor], Tensor]


@dataclass(slots=True, eq=False)
class Looks:
    """Who looks at the gradients of what follows from one call of the head.

    Attributes:
        logits: Makes the logits at each place that is looked at: those of the head, or what follows
            from them.
        linear: Tells what the head was called with; ``None`` where nothing looks.
    """

    logits: dict[object, Callable[[], Tensor]] = field(default_factory=dict)
    linear: Callable[[], Linear] | None = None


@dataclass(frozen=True, slots=True)
class Way:
    """How a loss follows from the head's logits; it holds none of them.

    Attributes:
        looks: Who looks at gradients.
        steps: Each step, with the place that it leads to; first that of the head's logits.
        loss: The loss of the last.
    """

    looks: Looks
    steps: tuple[tuple[object, Step | None], ...]
    loss: Step

    @property
    def is_looked_at(self) -> bool:
        """Whether gradients have to be those of the logits themselves."""
        return any(place in self.looks.logits for place, _ in self.steps)

    def gradients(
        self, gradient: Tensor, needs: tuple[bool, ...], *, creates_graph: bool
    ) -> tuple[Tensor | None, ...]:
        """Gradients of what the head was called with: input, weight and bias.

        Args:
            gradient: That of the loss.
            needs: Which of them are wanted.
            creates_graph: Whether these are differentiated.
        """
        assert self.looks.linear is not None, "somebody looks"
        linear = self.looks.linear()
        wanted = [it for it, need in zip(linear, needs, strict=True) if need and it is not None]
        with torch.enable_grad():
            loss = self.loss(self._last())
        made = iter(
            torch.autograd.grad(
                loss,
                wanted,
                gradient,
                retain_graph=True,
                create_graph=creates_graph,
                allow_unused=True,
            )
        )
        return tuple(
            next(made) if need and it is not None else None
            for it, need in zip(linear, needs, strict=True)
        )

    def _last(self) -> Tensor:
        """The logits that the loss is of, through all that are looked at."""
        logits: Tensor | None = None
        for place, step in self.steps:
            seen = self.looks.logits.get(place)
            if seen is not None:
                logits = seen()
            elif logits is not None and step is not None:
                logits = step(logits)
        assert logits is not None, "one of them is looked at"
        return logits
