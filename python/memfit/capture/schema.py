"""What an op's schema says about it, looked up once per op.

Responsible for the facts that do not depend on a call: name, which arguments are written in place,
whether randomness is drawn, whether the op can be run again. Not responsible for what a call does.

The schema does not tell everything. Batch normalisation in training writes its running statistics
with or without saying so, depending on the overload; either way these writes are *not* treated as
writes here, because a replay gives the op copies of them, and the op stays replayable.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from memfit.torch_versions import flop_formulas

_FLOPS = flop_formulas()

SKIPPED_NAMESPACES = frozenset({"prim", "profiler"})
"""Namespaces that never do work: attribute queries and profiler marks."""

LIFTS = frozenset({"aten.lift_fresh.default", "aten.lift.default", "aten.lift_fresh_copy.default"})
"""Ops through which a tensor built from Python numbers enters the dispatcher."""

_RUNNING_STATISTICS = frozenset(
    {
        "aten.native_batch_norm.default",
        "aten._native_batch_norm_legit.default",
        "aten._batch_norm_with_update.default",
        "aten.cudnn_batch_norm.default",
        "aten.miopen_batch_norm.default",
    }
)

_NOT_REPLAYABLE_NAMESPACES = frozenset({"c10d", "_c10d_functional", "c10d_functional", "symm_mem"})

_UNINITIALISED = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
)

_RESIZING = frozenset({"resize_", "resize_as_", "set_"})

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


@dataclass(frozen=True, slots=True)
class OpFacts:
    """What is true of every call of one op.

    Attributes:
        name: Overload name, ``aten.addmm.default``.
        skipped: Never recorded: a query rather than an op.
        lift: Brings a tensor built from Python numbers into the dispatcher.
        written: Positions (or names, for keyword-only arguments) of arguments written in place.
        argument_names: Argument names in schema order.
        keyword_defaults: Defaults of the arguments, by name.
        random: Draws random numbers by its tag.
        dropout_argument: Position of ``dropout_p``, or -1: no randomness is drawn when it is zero.
        repeatable: May be run again from its inputs, as far as the op alone decides.
        resizes: May change the size of a storage.
        dynamic_shape: The shape of its result depends on values.
        uninitialised: Makes memory and moves none of it.
        reduction_argument: Position of ``reduction`` where the op is a loss, or -1.
        flops: Counts the floating-point operations of a call, or ``None``.
    """

    name: str
    skipped: bool
    lift: bool
    written: tuple[int | str, ...]
    argument_names: tuple[str, ...]
    keyword_defaults: dict[str, Any]
    random: bool
    dropout_argument: int
    repeatable: bool
    resizes: bool
    dynamic_shape: bool
    uninitialised: bool
    reduction_argument: int
    flops: Callable[..., Any] | None


_FACTS: dict[Any, OpFacts] = {}


def facts_of(func: Any) -> OpFacts:
    """Facts about an op overload, computed on first sight.

    Args:
        func: A ``torch._ops.OpOverload``.

    Returns:
        The facts.
    """
    facts = _FACTS.get(func)
    if facts is None:
        facts = _FACTS[func] = _read_schema(func)
    return facts


def _read_schema(func: Any) -> OpFacts:
    schema = func._schema
    name = str(func)
    names = tuple(argument.name for argument in schema.arguments)
    written: list[int | str] = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(argument.name if argument.kwarg_only else position)
    if name in _RUNNING_STATISTICS:
        written = []
    returns_tensor = any("Tensor" in str(returned.type) for returned in schema.returns)
    return OpFacts(
        name=name,
        skipped=func.namespace in SKIPPED_NAMESPACES,
        lift=name in LIFTS,
        written=tuple(written),
        argument_names=names,
        keyword_defaults={
            argument.name: argument.default_value
            for argument in schema.arguments
            if argument.has_default_value()
        },
        random=torch.Tag.nondeterministic_seeded in func.tags,
        dropout_argument=names.index("dropout_p") if "dropout_p" in names else -1,
        repeatable=(
            func.namespace not in _NOT_REPLAYABLE_NAMESPACES
            and returns_tensor
            and len(written) <= 1
            and name not in LIFTS
        ),
        resizes=func.overloadpacket.__name__ in _RESIZING,
        dynamic_shape=torch.Tag.dynamic_output_shape in func.tags,
        uninitialised=func.overloadpacket.__name__ in _UNINITIALISED,
        reduction_argument=_LOSS_REDUCTIONS.get(name, -1),
        flops=_FLOPS.get(func.overloadpacket),
    )


def draws_random_numbers(facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call draws random numbers.

    Args:
        facts: Facts about the op.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.

    Returns:
        Whether it does; attention without dropout does not, whatever its tag says.
    """
    position = facts.dropout_argument
    if not facts.random or position < 0:
        return facts.random
    given = args[position] if position < len(args) else kwargs.get("dropout_p", 0.0)
    return bool(given != 0.0)


def reduction_of(facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """How a call that may be a loss reduces its elements.

    Args:
        facts: Facts about the op.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.

    Returns:
        ``token_mean``, ``mean``, ``sum``, or empty when the call is no such reduction.
    """
    if facts.reduction_argument >= 0:
        position = facts.reduction_argument
        given = args[position] if position < len(args) else kwargs.get("reduction", 1)
        word = _REDUCTION_WORDS.get(given, "")
        if word == "mean" and "nll_loss" in facts.name:
            weighted = len(args) > 2 and args[2] is not None  # noqa: PLR2004 - (self, target, weight)
            return "" if weighted else "token_mean"
        return word
    packet, _, overload = facts.name.removeprefix("aten.").partition(".")
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
