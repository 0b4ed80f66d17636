"""The optimizer's state in 8 bits, between updates and during them.

Responsible for a plan's ``optimizer_bits`` action: whose state is held so, from when on, and where
to, if the same plan offloads it. Not
responsible for the form nor for the update (:mod:`memfit.apply.precision.eight_bit_state`), nor
for running an optimizer parameter by parameter (:mod:`memfit.apply.optimizer_in_backward`).
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from memfit._native import bytes_text
from memfit.apply.offload.state_view import save_plainly
from memfit.apply.optimizer_in_backward import (
    OneByOne,
    UpdatesOneByOne,
    held_parameters,
    require_step_of_torch,
)
from memfit.apply.precision.eight_bit_state import EightBitState
from memfit.errors import OffloadError, UsageError
from memfit.tensors.moments import LEAST_NUMBERS, group_refusal, parameter_refusal
from memfit.tensors.optimizers import shared_state

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from memfit.apply.offload.tiers import Tier
    from memfit.apply.optimizer_in_backward import Around


_DRAWS_FROM = 20
"""States that one draw of roundings tells apart, as a power of two."""


class UpdatesInEightBits(UpdatesOneByOne):
    """Holds state in 8 bits, and updates one parameter at a time.

    Attributes:
        tier: Where it goes, slice by slice; ``None`` where it stays.
        draw: Which draw of roundings states begin with, where updates are rounded at random.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        directions: Mapping[str, Any],
        tier: Tier | None = None,
    ) -> None:
        """Nothing is shrunk before :meth:`place`.

        Args:
            optimizer: The optimizer.
            model: Whose parameters the plan names.
            directions: What the plan says.
            tier: Where it goes, slice by slice; ``None`` where it stays.

        Raises:
            UsageError: The plan says something else, or the optimizer's state or a parameter has no
                such form.
        """
        names = directions.get("names")
        if not isinstance(names, list):
            message = "what the plan says of `optimizer_bits` is malformed: it has no `names`"
            raise UsageError(message)
        named = dict(model.named_parameters(remove_duplicate=False))
        parameters = [named[name] for name in names if name in named]
        refusals = (group_refusal(optimizer, group) for group in optimizer.param_groups)
        suit = (parameter_refusal(parameter) for parameter in parameters)
        reason = next(filter(None, (*refusals, shared_state(optimizer), *suit)), None)
        if reason is not None:
            message = (
                f"the plan holds optimizer state in 8 bits, but {reason}\n"
                "hint: plan again for this workload"
            )
            raise UsageError(message)
        require_step_of_torch(optimizer, "optimizer_bits")
        super().__init__(optimizer)
        self.tier = tier
        self.draw = 0
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._parameters = [p for p in parameters if id(p) in held]

    def place(self) -> None:
        """Have all of it in 8 bits that somebody does not keep, where it belongs.

        Raises:
            OffloadError: Some of it cannot be written. It is in memory, and whole.
        """
        optimizer = self._optimizer
        save_plainly(optimizer)
        for number, parameter in enumerate(self._parameters, self.draw << _DRAWS_FROM):
            state = optimizer.state.get(parameter)
            if not isinstance(state, EightBitState):
                state = optimizer.state[parameter] = EightBitState(state or {}, number)
            state.shrink(optimizer, parameter, self.tier)
        self._send_left()

    def update_all(self, around: Around = contextlib.nullcontext) -> OneByOne:
        """As of :class:`UpdatesOneByOne`, but what is left to torch comes at once at the end.

        Args:
            around: As there.
        """
        if around is not contextlib.nullcontext:
            return super().update_all(around)
        one_by_one, last = OneByOne(self._optimizer), []
        # With `foreach`, temporaries of all are there at once.
        may_wait = not any(group.get("foreach") for group in self._optimizer.param_groups)
        for parameter in held_parameters(self._optimizer):
            if parameter.grad is None:
                continue
            if may_wait and self._is_small_and_plain(parameter):
                last.append(parameter)
            else:
                one_by_one.update(parameter)
        one_by_one.update_at_once(last)
        return one_by_one

    def _is_small_and_plain(self, parameter: Tensor) -> bool:
        """Whether a parameter is on a CPU, and torch updates it whole."""
        if parameter.numel() >= LEAST_NUMBERS or not parameter.is_cpu:
            return False
        return type(self._optimizer.state.get(parameter, {})) is dict

    def _send_left(self) -> None:
        states = [self._optimizer.state[parameter] for parameter in self._parameters]
        try:
            for state in states:
                state.send_left()
        except OffloadError as error:
            kept = bytes_text(sum(state.left_bytes() for state in states))
            message = (
                f"optimizer state cannot be offloaded: {error}; {kept} of it stay in memory, "
                "unchanged, and no step has begun"
            )
            raise OffloadError(message) from error
