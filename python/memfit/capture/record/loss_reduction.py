"""How a call that may be a loss reduces its elements.

Not responsible for which call is the loss (:mod:`memfit.capture.record.step_loss`).
"""

from __future__ import annotations

from typing import Any

from memfit.tensors.operators import Operator

_LOSS_REDUCTIONS: dict[str, int] = {
    "aten.nll_loss_forward.default": 3,
    "aten.nll_loss2d_forward.default": 3,
    "aten.mse_loss.default": 2,
    "aten.smooth_l1_loss.default": 2,
    "aten.huber_loss.default": 2,
    "aten.binary_cross_entropy.default": 3,
    "aten.binary_cross_entropy_with_logits.default": 4,
    "aten.soft_margin_loss.default": 2,
    "aten.multilabel_margin_loss_forward.default": 2,
}

_REDUCTION_WORDS = {0: "", 1: "mean", 2: "sum"}


def reduction_of(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """How a call that may be a loss reduces its elements.

    Args:
        operator: The op.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.

    Returns:
        ``token_mean``, ``mean``, ``sum``, or empty when the call is no such reduction.
    """
    position = _LOSS_REDUCTIONS.get(operator.name)
    if position is not None:
        given = args[position] if position < len(args) else kwargs.get("reduction", 1)
        word = _REDUCTION_WORDS.get(given, "")
        if word == "mean" and "nll_loss" in operator.name:
            weighted = len(args) > 2 and args[2] is not None  # noqa: PLR2004 - (self, target, weight)
            return "" if weighted else "token_mean"
        return word
    packet, _, overload = operator.name.removeprefix("aten.").partition(".")
    if packet not in {"mean", "sum"}:
        return ""
    if overload == "default":
        return packet
    dimensions = args[1] if len(args) > 1 else kwargs.get("dim")
    if overload in {"dim", "dim_IntList"}:
        count = args[0].dim()
        if not dimensions or len({d % max(count, 1) for d in dimensions}) == count:
            return packet
    return ""
