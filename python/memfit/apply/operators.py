"""What an operator's schema says, and what it leaves out, about running it again.

Responsible for facts that belong to the operator alone: which arguments it writes to, whether it
draws random numbers, why it cannot be replayed. Facts about one call are found where it is
recorded (:mod:`memfit.apply.watch`). Looked up once per operator and kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch._ops import OpOverload

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


@dataclass(slots=True, frozen=True)
class Operator:
    """Facts about one operator overload.

    Attributes:
        func: The overload.
        name: Its name as a trace writes it, ``aten.addmm.default``.
        counted: Whether it has an index in forward.
        writes: Whether it may write to an argument, announced or hidden.
        random: Whether it draws random numbers, or may (an op memfit does not know).
        shape_only: Whether it reads no element of its first argument.
        gradient_mode: Whether what it returns depends on gradients being on.
        refusal: Why it cannot be run again; ``None`` when it can.
    """

    func: OpOverload
    name: str
    counted: bool
    writes: bool
    random: bool
    shape_only: bool
    gradient_mode: bool
    refusal: str | None
    _written: tuple[tuple[int, str], ...]
    _hidden: tuple[int, ...]
    _hidden_if: int | None

    def announced_writes(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
        """Tensors this call writes to, as the schema says."""
        for position, name in self._written:
            value = args[position] if position < len(args) else kwargs.get(name)
            if isinstance(value, Tensor):
                yield value
            elif isinstance(value, (list, tuple)):
                yield from (item for item in value if isinstance(item, Tensor))

    def hidden_positions(self, args: Sequence[Any]) -> tuple[int, ...]:
        """Positions of arguments this call writes to without saying so."""
        if self._hidden_if is not None and not (
            self._hidden_if < len(args) and args[self._hidden_if]
        ):
            return ()
        return tuple(p for p in self._hidden if p < len(args) and isinstance(args[p], Tensor))


_known: dict[OpOverload, Operator] = {}


def operator_of(func: OpOverload) -> Operator:
    """The facts about ``func``, found on first sight."""
    operator = _known.get(func)
    if operator is None:
        operator = _known[func] = _examine(func)
    return operator


def _examine(func: OpOverload) -> Operator:
    namespace = func.namespace
    base = func._schema.name.partition("::")[2]
    native = namespace == "aten"
    written = tuple(
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    hidden, hidden_if = HIDDEN_WRITES.get(base, ((), None)) if native else ((), None)
    refusal = None
    if namespace in COLLECTIVE_NAMESPACES:
        refusal = "talks to other processes"
    elif native and base in UNTRACKABLE:
        refusal = "changes a storage itself"
    return Operator(
        func=func,
        name=str(func),
        counted=namespace not in UNCOUNTED_NAMESPACES,
        writes=bool(written or hidden),
        random=torch.Tag.nondeterministic_seeded in func.tags or not native,
        shape_only=native and base in SHAPE_ONLY,
        gradient_mode=native and base in GRADIENT_MODE,
        refusal=refusal,
        _written=written,
        _hidden=hidden,
        _hidden_if=hidden_if,
    )
