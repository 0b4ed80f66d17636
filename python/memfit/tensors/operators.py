"""What an operator's schema says, and what it leaves out: the one place that knows torch's ops.

Responsible for facts that belong to the operator alone: which arguments it writes to, whether it
draws random numbers, whether it can run again. Facts about one call are found where the call is
recorded (:mod:`memfit.capture.record.recorder`, :mod:`memfit.apply.remat.watch`). Looked up once
for each operator and kept.

Batch normalisation in training writes its running statistics with or without saying so, depending
on the overload. Either way these writes are hidden writes here: a replay gives the op copies of
them, so it can run again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memfit.torch_versions import flop_formulas

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch._ops import OpOverload

_FLOPS = flop_formulas()

UNCOUNTED_NAMESPACES = frozenset({"prim", "profiler"})
"""Namespaces whose ops are no part of a step: queries and markers."""

COLLECTIVE_NAMESPACES = frozenset({"c10d", "c10d_functional", "_c10d_functional", "symm_mem"})
"""Namespaces whose ops talk to other processes."""

SHAPE_ONLY = frozenset(
    {
        "empty_like",
        "full_like",
        "new_empty",
        "new_empty_strided",
        "new_full",
        "new_ones",
        "new_zeros",
        "ones_like",
        "rand_like",
        "randint_like",
        "randn_like",
        "zeros_like",
    }
)
"""aten ops that read their first argument's shape, strides and type, but none of its elements."""

UNTRACKABLE = frozenset({"resize_", "resize_as_", "set_", "set_data", "_resize_output_"})
"""aten ops that change what a storage is rather than what it holds."""

GRADIENT_MODE = frozenset({"mkldnn_rnn_layer"})
"""aten ops that return their backward's workspace only while gradients are on."""

HIDDEN_WRITES: dict[str, tuple[tuple[int, ...], int | None]] = {
    "native_batch_norm": ((3, 4), 5),
    "cudnn_batch_norm": ((3, 4), 5),
    "miopen_batch_norm": ((3, 4), 5),
    "batch_norm_update_stats": ((1, 2), None),
    "batch_norm_gather_stats": ((3, 4), None),
    "batch_norm_gather_stats_with_counts": ((3, 4), None),
}
"""aten ops that move running statistics without saying so: positions, and that of ``training``."""

_RUNNING_STATISTICS = frozenset(
    {
        "native_batch_norm",
        "_native_batch_norm_legit",
        "_batch_norm_with_update",
        "cudnn_batch_norm",
        "miopen_batch_norm",
    }
)
"""aten ops whose announced writes are running statistics, in the overloads without a suffix."""

OWN_RANDOM_STATES = frozenset({"_cudnn_rnn", "miopen_rnn"})
"""aten ops whose dropout draws from a state on the GPU that moves with every call, whatever torch's
generators hold: run again, they give other numbers."""

OWN_VERSIONS = frozenset({"unsafe_split", "unsafe_split_with_sizes"})
"""aten ops whose results are parts of one tensor, each with a version counter of its own: torch's
cells of recurrent networks write to such parts in place."""

LIFTS = frozenset({"lift_fresh", "lift", "lift_fresh_copy"})
"""aten ops through which a tensor built from Python numbers enters the dispatcher."""

UNINITIALISED = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
)
"""Ops that make memory and move none of it."""

RESIZING = frozenset({"resize_", "resize_as_", "set_"})
"""Ops that may change the size of a storage."""


_GIVES_MEMORY_AWAY = frozenset(
    {"alias", "detach", "format", "get", *(name.strip("_") for name in RESIZING)}
)
"""Names of aten ops, of TorchScript's as well, that functions have from which Python may get the
tensor itself outside of autograd: attributes, ``detach``, what prints."""

_COMPUTES = frozenset({"getitem", "interpolate", "multi_head_attention_forward", "truediv"})
"""Functions of torch that compute, without underscores, and are no aten op by that name."""

_TRANSPOSED = frozenset(getattr(Tensor, name).__get__ for name in ("H", "T", "mH", "mT"))
"""Attributes that are views for autograd as well."""


@dataclass(slots=True, frozen=True)
class Operator:
    """What is true of every call of one operator overload.

    Attributes:
        func: The overload.
        name: Its name as a trace writes it, ``aten.addmm.default``.
        counted: Whether it is part of a step, rather than a query or a marker.
        lift: Brings a tensor built from Python numbers into the dispatcher.
        written: Positions (or names, for keyword-only arguments) of arguments that it says it
            writes to; without running statistics.
        writes: Whether it may write to an argument, announced or hidden.
        argument_names: Names of its arguments, in order.
        keyword_defaults: Defaults of its arguments, by name.
        random: Draws random numbers, by its tag.
        unknown: Not one of torch's own ops: it may draw random numbers without saying so.
        dropout_argument: Position of ``dropout_p``, or -1: where it is zero, nothing is drawn.
        repeatable: May run again from its inputs, as far as a trace needs to know.
        refusal: Why a running step cannot run it again; ``None`` when it can.
        resizes: May change the size of a storage.
        dynamic_shape: The shape of its result depends on values.
        uninitialised: Makes memory and moves none of it.
        shape_only: Reads no element of its first argument, only its shape, strides and type.
        own_versions: Its results share memory with its argument, but no version counter.
        gradient_mode: What it returns depends on gradients being on.
        flops: Counts the floating-point operations of a call, or ``None``.
    """

    func: OpOverload
    name: str
    counted: bool
    lift: bool
    written: tuple[int | str, ...]
    writes: bool
    argument_names: tuple[str, ...]
    keyword_defaults: dict[str, Any]
    random: bool
    unknown: bool
    dropout_argument: int
    repeatable: bool
    refusal: str | None
    resizes: bool
    dynamic_shape: bool
    uninitialised: bool
    shape_only: bool
    own_versions: bool
    gradient_mode: bool
    flops: Callable[..., Any] | None
    _announced: tuple[tuple[int, str], ...]
    _hidden: tuple[int, ...]
    _hidden_if: int | None

    def announced_writes(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
        """Tensors this call writes to, as the schema says."""
        for position, name in self._announced:
            value = args[position] if position < len(args) else kwargs.get(name)
            if isinstance(value, Tensor):
                yield value
            elif isinstance(value, (list, tuple)):
                yield from (item for item in value if isinstance(item, Tensor))

    def hidden_positions(self, args: Sequence[Any]) -> tuple[int, ...]:
        """Positions of arguments this call writes to without saying so."""
        if not self._hidden or (
            self._hidden_if is not None
            and not (self._hidden_if < len(args) and args[self._hidden_if])
        ):
            return ()
        return tuple(p for p in self._hidden if p < len(args) and isinstance(args[p], Tensor))


_known: dict[OpOverload, Operator] = {}


def operator_of(func: OpOverload) -> Operator:
    """The facts about an operator, found on first sight.

    Args:
        func: The overload.
    """
    operator = _known.get(func)
    if operator is None:
        operator = _known[func] = _examine(func)
    return operator


def draws_random_numbers(
    operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bool:
    """Whether a call draws random numbers.

    Args:
        operator: The op.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.

    Returns:
        Whether it does; attention without dropout does not, whatever its tag says.
    """
    position = operator.dropout_argument
    if not operator.random or position < 0:
        return operator.random
    given = args[position] if position < len(args) else kwargs.get("dropout_p", 0.0)
    return bool(given != 0.0)


def _examine(func: OpOverload) -> Operator:
    schema, namespace = func._schema, func.namespace
    base = schema.name.partition("::")[2]
    native = namespace == "aten"
    names = tuple(argument.name for argument in schema.arguments)
    announced = tuple(
        (position, argument)
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    hidden, hidden_if = HIDDEN_WRITES.get(base, ((), None)) if native else ((), None)
    statistics = native and base in _RUNNING_STATISTICS and not schema.overload_name
    written = () if statistics else announced
    lift = native and base in LIFTS and not schema.overload_name
    returns_tensor = any("Tensor" in str(returned.type) for returned in schema.returns)
    refusal = None
    if namespace in COLLECTIVE_NAMESPACES:
        refusal = "talks to other processes"
    elif native and base in UNTRACKABLE:
        refusal = "changes a storage itself"
    return Operator(
        func=func,
        name=str(func),
        counted=namespace not in UNCOUNTED_NAMESPACES,
        lift=lift,
        written=tuple(a.name if a.kwarg_only else position for position, a in written),
        writes=bool(announced or hidden),
        argument_names=names,
        keyword_defaults={
            argument.name: argument.default_value
            for argument in schema.arguments
            if argument.has_default_value()
        },
        random=torch.Tag.nondeterministic_seeded in func.tags,
        unknown=not native,
        dropout_argument=names.index("dropout_p") if "dropout_p" in names else -1,
        repeatable=(
            namespace not in COLLECTIVE_NAMESPACES
            and returns_tensor
            and len(written) <= 1
            and not lift
            and not (native and base in OWN_RANDOM_STATES)
        ),
        refusal=refusal,
        resizes=base in RESIZING,
        dynamic_shape=torch.Tag.dynamic_output_shape in func.tags,
        uninitialised=base in UNINITIALISED,
        shape_only=native and base in SHAPE_ONLY,
        own_versions=native and base in OWN_VERSIONS,
        gradient_mode=native and base in GRADIENT_MODE,
        flops=_FLOPS.get(func.overloadpacket),
        _announced=tuple((position, argument.name) for position, argument in announced),
        _hidden=hidden,
        _hidden_if=hidden_if,
    )


def only_computes(function: Callable[..., Any]) -> bool:
    """Whether a function of torch's that Python calls runs ops, and gives no memory away.

    Args:
        function: As ``__torch_function__`` is told.
    """
    return function in _TRANSPOSED or _names_op(getattr(function, "__name__", ""))


@cache
def _names_op(name: str) -> bool:
    plain = name.strip("_")
    if plain in _COMPUTES:
        return True
    names = {plain, plain.removeprefix("r")} - _GIVES_MEMORY_AWAY  # `__rmul__` is `mul`
    return any(hasattr(torch.ops.aten, it) for it in names if it)
