"""Parameters and their gradients in 16 bits.

Responsible for a plan's ``half_parameters`` action: which parameters are narrow while the plan is
followed, and from when on. Forward runs under autocast, which the same plan asks for
(:mod:`memfit.apply.precision.autocast`). Where they train they are in ``bfloat16``, and updates are
memfit's (:mod:`memfit.apply.precision.eight_bit_state`). Not responsible for the conversion
(:mod:`memfit.tensors.narrow_parameters`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from memfit.apply.part import Part
from memfit.errors import UsageError
from memfit.tensors.narrow_parameters import NARROW, alias_refusal, narrow, range_refusal, widen
from memfit.tensors.optimizers import gradients_reduced_later


class HalfParameters(Part):
    """Holds parameters of a model in 16 bits."""

    def __init__(
        self,
        model: nn.Module,
        said: Mapping[str, Any],
        updated: Collection[str],
        dtype: torch.dtype = NARROW,
        *,
        trains: bool = True,
        keeps_lower: bool = False,
    ) -> None:
        """Prepare; nothing is narrowed before :meth:`place`.

        Args:
            model: Whose parameters the plan names.
            said: ``HalfParameters`` of the plan as parsed JSON.
            updated: Names of the parameters whose state the plan holds in 8 bits: those that
                memfit updates.
            dtype: The type of 16 bits, that of the autocast beside it.
            trains: Whether the model trains at all.
            keeps_lower: Whether lower halves of those that memfit updates are kept.

        Raises:
            UsageError: It is no such thing, or a parameter cannot be narrowed.
        """
        names = said.get("names")
        if not isinstance(names, list):
            message = "what the plan says of `half_parameters` is malformed: it has no `names`"
            raise UsageError(message)
        reason = alias_refusal(model, names) or gradients_reduced_later(model)
        reason = reason or range_refusal(model, names, dtype)
        if reason is not None:
            message = (
                f"the plan holds parameters in 16 bits, but {reason}\n"
                "hint: plan again with `half_parameters` forbidden"
            )
            raise UsageError(message)
        named = dict(model.named_parameters(remove_duplicate=False))
        self._model, self._dtype = model, dtype
        self._parameters = [named[name] for name in names]
        self._whole = {id(named[name]) for name in names if keeps_lower and name in updated}
        frozen = {name: named[name] for name in names if name not in updated}
        self._frozen = frozen if trains else {}
        self._require_frozen()

    def _require_frozen(self) -> None:
        """Refuse to train what torch would update: in so few bits its updates are lost.

        Raises:
            UsageError: A parameter trains whose state the plan does not hold in 8 bits.
        """
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                message = (
                    f"the plan holds `{name}` in bfloat16 as one that does not train, and it does\n"
                    "hint: plan again for this workload"
                )
                raise UsageError(message)

    def place(self) -> None:
        """Have these parameters narrow, and no others.

        Raises:
            UsageError: One of them trains by now that did not when the step was planned.
        """
        self._require_frozen()
        chosen = {id(parameter) for parameter in self._parameters}
        widen(p for p in self._model.parameters() if id(p) not in chosen)
        for parameter in self._parameters:
            narrow(parameter, self._dtype, keeps_lower=id(parameter) in self._whole)
