"""What Inductor makes of a sequence of calls: which results exist, and from when to when.

Responsible for a model of Inductor's lowering and scheduling, as far as memory goes: elementwise
results that nobody needs whole are computed inside their readers, what one loop makes and reads
alone is never allocated, an output takes the place of an input of its size that dies with it. Not
responsible for what runs in which order (:mod:`memfit.run.compiled.schedule`).

It is a model: which loops Inductor fuses depends on strides and scores that are not looked at here.
So it serves where the step is measured afterwards, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import torch
from torch import fx
from torch._functorch.partitioners import get_default_op_list

_READS_OF_SHARED = 4
"""Tensors that an elementwise result may read and still be computed anew by each of its readers."""

_READS = 12
"""Tensors that it may read before it is written to memory for its only reader."""

_OPS = 40
"""Elementwise ops that are computed inside one reader."""

_LARGEST_ELEMENT = 8
"""Bytes of an element of the widest usual type."""

_HEAVY = frozenset({"exp", "log", "log10", "log1p", "log2", "sigmoid", "tanh", "silu", "expm1"})
"""Elementwise ops that Inductor does not compute twice on a CPU."""

_REDUCTIONS = frozenset(
    [
        "sum",
        "mean",
        "amax",
        "amin",
        "argmax",
        "argmin",
        "max",
        "min",
        "var",
        "std",
        "var_mean",
        "prod",
        "any",
        "all",
        "logsumexp",
        "prepare_softmax_online",
        "norm",
        "cumsum",
    ]
)

_ELEMENTWISE = frozenset(
    [
        "full",
        "full_like",
        "zeros",
        "zeros_like",
        "ones",
        "ones_like",
        "new_zeros",
        "new_full",
        "iota",
        "arange",
        "clone",
        "cat",
        "convert_element_type",
        "_to_copy",
        "constant_pad_nd",
        "embedding",
        "index",
        "gather",
        "where",
        "select_scatter",
        "slice_scatter",
        "as_strided_scatter",
        "diagonal_scatter",
        "scalar_tensor",
        "copy",
        "copy_",
        "repeat",
        "flip",
        "roll",
        "inductor_random",
        "inductor_randint",
        "inductor_lookup_seed",
        "inductor_force_stride_order",
        "_low_memory_max_pool_offsets_to_indices",
        "upsample_nearest2d",
        "_unsafe_index",
        "avg_pool2d",
        "triu",
        "tril",
        "empty",
        "empty_like",
    ]
)
"""Elementwise for Inductor, though torch does not tag them so."""

_WHOLE = frozenset(
    [
        "cat",
        "inductor_random",
        "inductor_randint",
        "index_put",
        "_unsafe_index_put",
        "scatter",
        "scatter_add",
        "scatter_reduce",
        "_low_memory_max_pool_with_offsets",
        "max_pool2d_with_indices_backward",
    ]
)
"""Loops whose result always stands in memory, at least for the loop that it is fused into."""

_APART = frozenset({"cat", "index_put", "_unsafe_index_put", "scatter", "scatter_add"})
"""Loops that write somewhere else than they go: nothing is fused with them."""


class Kind(Enum):
    """How Inductor runs an op."""

    VIEW = auto()
    ELEMENTWISE = auto()
    HEAVY = auto()
    """Elementwise, and not computed twice."""
    WHOLE = auto()
    """A loop whose result is written."""
    APART = auto()
    """The same, and nothing is fused with it."""
    REDUCTION = auto()
    OUTER_REDUCTION = auto()
    """Over leading dimensions: its loop runs across that of elementwise ops."""
    EXTERN = auto()
    """A kernel of a library, which reads and writes memory."""


@dataclass(slots=True, frozen=True)
class Loop:
    """How Inductor runs an op, and over how many elements.

    Attributes:
        kind: Which way.
        extent: Elements that its loop visits.
    """

    kind: Kind
    extent: int


def loop_of(node: fx.Node, *, view: bool, numel: Any) -> Loop:
    """How Inductor runs an op.

    Args:
        node: The call.
        view: Whether all it returns are views.
        numel: Gives the elements of a tensor.
    """
    if view and not _writes(node):
        return Loop(Kind.VIEW, 0)
    name = op_name(node)
    extent = max((numel(value) for value in _values(node)), default=0)
    if name in _REDUCTIONS and not _is_elementwise_pair(node, name):
        sources = [v for n in node.all_input_nodes for v in _values(n)]
        extent = max([extent, *(numel(value) for value in sources)])
        outer = bool(sources) and _keeps_last(node, sources[0])
        return Loop(Kind.OUTER_REDUCTION if outer else Kind.REDUCTION, extent)
    return Loop(_kind(node, name), extent)


def _kind(node: fx.Node, name: str) -> Kind:
    for kind, names in ((Kind.APART, _APART), (Kind.WHOLE, _WHOLE), (Kind.HEAVY, _HEAVY)):
        if name in names:
            return kind
    tags = getattr(node.target, "tags", ())
    elementwise = name in _ELEMENTWISE or torch.Tag.pointwise in tags or _fusible(node)
    return Kind.ELEMENTWISE if elementwise else Kind.EXTERN


def op_name(node: fx.Node) -> str:
    """The name of the op that a node calls, without its namespace and overload.

    Args:
        node: The call.
    """
    schema = getattr(node.target, "_schema", None)
    name = schema.name.partition("::")[2] if schema is not None else ""
    return name or getattr(node.target, "__name__", "")


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _fusible(node: fx.Node) -> bool:
    packet = getattr(node.target, "overloadpacket", node.target)
    return packet in get_default_op_list().fusible_ops


def _is_elementwise_pair(node: fx.Node, name: str) -> bool:
    """`max` and `min` of two tensors."""
    return name in {"max", "min"} and len(node.all_input_nodes) > 1


def _keeps_last(node: fx.Node, source: Any) -> bool:
    """Whether a reduction leaves the last dimension alone."""
    dims = node.args[1] if len(node.args) > 1 else None
    if isinstance(dims, int):
        dims = [dims]
    if not isinstance(dims, list | tuple) or not dims or source.dim() == 0:
        return False
    last = source.dim() - 1
    return all(isinstance(d, int) and d % source.dim() != last for d in dims)


def _values(node: fx.Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    found = value if isinstance(value, tuple | list) else [value]
    return [v for v in found if isinstance(v, torch.Tensor)]


@dataclass(slots=True)
class Result:
    """A result of a call, or something handed in.

    Attributes:
        bytes: Its size.
        call: The call that makes it; ``None`` if it is handed in.
        fixed: Whether it is there all along, and counted elsewhere.
        returned: Whether it outlives the calls.
        readers: Calls that read it, views looked through.
    """

    bytes: int
    call: int | None
    fixed: bool = False
    returned: bool = False
    readers: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Running:
    """One call as it runs.

    Attributes:
        loop: How.
        reads: Results it reads.
        makes: Results it makes.
    """

    loop: Loop
    reads: list[int]
    makes: list[int]


@dataclass(slots=True)
class _Kernel:
    extents: set[tuple[bool, int]]
    reads: set[int] = field(default_factory=set)
    open: bool = True


def lives(
    calls: Sequence[Running], results: Sequence[Result]
) -> tuple[list[tuple[int, int, int]], int]:
    """When what of the results is in memory.

    Args:
        calls: The calls in order.
        results: What they make and read.

    Returns:
        For each result that is allocated, the first and last kernel that it is there for, and its
        bytes; and how many kernels there are.
    """
    inlined = _Inlined(calls, results)
    kernels = _Kernels(calls, results, inlined)
    return kernels.lives(), len(kernels.kernels)


def moved_bytes(calls: Sequence[Running], results: Sequence[Result]) -> list[int]:
    """What each call reads from memory and writes to it; nothing where its readers compute it.

    Args:
        calls: The calls in order.
        results: What they make and read.
    """
    inlined = _Inlined(calls, results)
    moved = []
    for call, reads in zip(calls, inlined.reads, strict=True):
        if call.loop.kind is Kind.VIEW or (call.makes and set(call.makes) <= inlined.inside):
            moved.append(0)
            continue
        # A loop reads an element at a time, of a table perhaps few of its rows.
        most_of_one = call.loop.extent * _LARGEST_ELEMENT
        read = sum(min(results[index].bytes, most_of_one) for index in reads)
        moved.append(read + sum(results[index].bytes for index in call.makes))
    return moved


class _Inlined:
    """Which results are computed inside their readers, and what each call thereby reads."""

    def __init__(self, calls: Sequence[Running], results: Sequence[Result]) -> None:
        self._calls, self._results = calls, results
        self.inside: set[int] = set()
        """Results that are never written: their readers compute them."""
        self.reads: list[frozenset[int]] = []
        """What each call reads from memory, once it has such results inside."""
        self._ops: list[int] = []
        self._heavy: list[bool] = []
        for index in range(len(calls)):
            self._add(index)

    def _add(self, index: int) -> None:
        call = self._calls[index]
        reads: set[int] = set()
        ops, heavy = 1, call.loop.kind is Kind.HEAVY
        for read in call.reads:
            if read in self.inside:
                made = self._results[read].call
                assert made is not None, "what is inside a reader was made by a call"
                reads |= self.reads[made]
                ops += self._ops[made]
                heavy |= self._heavy[made]
            else:
                reads.add(read)
        self.reads.append(frozenset(reads))
        self._ops.append(ops)
        self._heavy.append(heavy)
        if call.loop.kind in {Kind.ELEMENTWISE, Kind.HEAVY} and len(call.makes) == 1:
            result = self._results[call.makes[0]]
            if not self._written(result, len(reads), ops, heavy=heavy):
                self.inside.add(call.makes[0])

    def _written(self, result: Result, reads: int, ops: int, *, heavy: bool) -> bool:
        if result.returned or reads > _READS or ops > _OPS:
            return True
        kinds = {self._calls[reader].loop.kind for reader in result.readers}
        if Kind.EXTERN in kinds:
            return True
        return len(result.readers) > 1 and (heavy or reads > _READS_OF_SHARED)


class _Kernels:
    """Calls that write, gathered into kernels that run one after another."""

    def __init__(
        self, calls: Sequence[Running], results: Sequence[Result], inlined: _Inlined
    ) -> None:
        self._calls, self._results, self._inlined = calls, results, inlined
        self.kernels: list[_Kernel] = []
        self._of_call: dict[int, int] = {}
        for index, call in enumerate(calls):
            alone = call.loop.kind is Kind.VIEW
            if not alone and not (call.makes and set(call.makes) <= inlined.inside):
                self._place(index, call)

    def _place(self, index: int, call: Running) -> None:
        reads = self._inlined.reads[index]
        makers = (self._results[read].call for read in reads)
        latest = max((self._of_call[m] for m in makers if m is not None), default=-1)
        found = self._joined(call.loop, reads, latest)
        if found is None:
            found = len(self.kernels)
            kind = call.loop.kind
            self.kernels.append(_Kernel(set(), open=kind not in {Kind.EXTERN, Kind.APART}))
        kernel = self.kernels[found]
        kernel.extents.add(_extent(call.loop))
        kernel.reads |= reads
        self._of_call[index] = found

    def _joined(self, loop: Loop, reads: frozenset[int], latest: int) -> int | None:
        """The kernel that a call becomes part of: that of its latest source, or the last one."""
        if loop.kind in {Kind.EXTERN, Kind.APART}:
            return None
        last = len(self.kernels) - 1
        for index in dict.fromkeys((latest, last)):
            if index < 0:
                continue
            kernel = self.kernels[index]
            shares = index == latest or bool(kernel.reads & reads)
            if kernel.open and shares and _extent(loop) in kernel.extents:
                return index
        return None

    def lives(self) -> list[tuple[int, int, int]]:
        """Lives in the order in which Inductor runs the kernels: it tries one that needs less."""
        makes, reads, fixed = self._allocated()
        graph = _Graph(makes, reads, [r.bytes for r in self._results], fixed)
        order = graph.least_first()
        plain = graph.lives(range(len(self.kernels)))
        other = graph.lives(order)
        end = len(self.kernels)
        if most(other.values(), end) < most(plain.values(), end):
            position = {kernel: at for at, kernel in enumerate(order)}
            return self._in_place(other, position)
        return self._in_place(plain, {k: k for k in range(end)})

    def _allocated(self) -> tuple[list[list[int]], list[set[int]], set[int]]:
        """What each kernel makes and reads of what is allocated; and what is never let go."""
        makes: list[list[int]] = [[] for _ in self.kernels]
        reads: list[set[int]] = [set() for _ in self.kernels]
        readers: dict[int, set[int]] = {}
        for index, kernel in self._of_call.items():
            for read in self._inlined.reads[index]:
                readers.setdefault(read, set()).add(kernel)
        for index, kernel in self._of_call.items():
            for made in self._calls[index].makes:
                alone = readers.get(made) == {kernel} and self.kernels[kernel].open
                if made not in self._inlined.inside and (self._results[made].returned or not alone):
                    makes[kernel].append(made)
        written = {made for row in makes for made in row}
        for read, kernels in readers.items():
            result = self._results[read]
            if read in written or (result.call is None and not result.fixed):
                for kernel in kernels:
                    reads[kernel].add(read)
        return makes, reads, {i for i, r in enumerate(self._results) if r.returned}

    def _in_place(
        self, rows: dict[int, tuple[int, int, int]], position: dict[int, int]
    ) -> list[tuple[int, int, int]]:
        """Let outputs of loops take the place of inputs that die with them."""
        dying: dict[tuple[int, int], list[int]] = {}
        for index, (birth, death, size) in rows.items():
            if birth < death or self._results[index].call is None:
                dying.setdefault((death, size), []).append(index)
        for call, kernel in self._of_call.items():
            at = position[kernel]
            for made in self._calls[call].makes:
                if made not in rows or not self.kernels[kernel].open:
                    continue
                size = rows[made][2]
                waiting = dying.get((at, size), [])
                taken = next((i for i in waiting if i in self.kernels[kernel].reads), None)
                if taken is not None:
                    waiting.remove(taken)
                    rows[taken] = (rows[taken][0], at - 1, size)
        return [row for row in rows.values() if row[0] <= row[1]]


class _Graph:
    """Kernels and what passes between them, for orders of them."""

    def __init__(
        self,
        makes: list[list[int]],
        reads: list[set[int]],
        sizes: list[int],
        returned: set[int],
    ) -> None:
        self._makes, self._sizes, self._returned = makes, sizes, returned
        made = {m for row in makes for m in row}
        self._given = {r for row in reads for r in row} - made
        self._reads = reads
        self._readers: dict[int, list[int]] = {}
        for kernel, row in enumerate(reads):
            for read in row:
                self._readers.setdefault(read, []).append(kernel)

    def lives(self, order: Iterable[int]) -> dict[int, tuple[int, int, int]]:
        """First and last position of everything, by an order of the kernels."""
        births = dict.fromkeys(self._given, 0)
        deaths: dict[int, int] = {}
        end = len(self._makes)
        for at, kernel in enumerate(order):
            for made in self._makes[kernel]:
                births[made] = deaths[made] = at
            for read in self._reads[kernel]:
                deaths[read] = at
        return {
            i: (birth, end if i in self._returned else deaths[i], self._sizes[i])
            for i, birth in births.items()
        }

    def least_first(self) -> list[int]:
        """The order of Inductor's `topological_sort_lpmf`: least memory first."""
        makers = {m: kernel for kernel, row in enumerate(self._makes) for m in row}
        waits = [
            len({makers[r] for r in row if r in makers} - {k}) for k, row in enumerate(self._reads)
        ]
        uses = {
            i: len(self._readers.get(i, ())) + (i in self._returned)
            for i in (*makers, *self._given)
        }
        sizes = [sum(self._sizes[m] for m in row) for row in self._makes]
        frees = [
            sum(self._sizes[r] for r in row if uses[r] == 1)
            + sum(self._sizes[m] for m in self._makes[k] if uses[m] == 0)
            for k, row in enumerate(self._reads)
        ]
        live = sum(self._sizes[i] for i in self._given)
        highest = max(live, sum(self._sizes[i] for i in self._returned))
        ready = {k for k, count in enumerate(waits) if count == 0}
        order: list[int] = []
        while ready:
            gap = highest - live
            chosen = min(
                ready, key=lambda k: (sizes[k] if sizes[k] > gap else 0, sizes[k] - frees[k], k)
            )
            ready.remove(chosen)
            order.append(chosen)
            live += sizes[chosen]
            highest = max(highest, live)
            live -= frees[chosen]
            for after in {k for m in self._makes[chosen] for k in self._readers.get(m, ())}:
                waits[after] -= 1
                if waits[after] == 0:
                    ready.add(after)
            for read in self._reads[chosen]:
                uses[read] -= 1
                if uses[read] == 1:
                    for other in self._readers[read]:
                        frees[other] += self._sizes[read]
        return order


def _extent(loop: Loop) -> tuple[bool, int]:
    return loop.kind is Kind.OUTER_REDUCTION, loop.extent


def most(rows: Iterable[tuple[int, int, int]], end: int) -> int:
    """Most bytes alive at once; a life includes its first and its last position.

    Args:
        rows: Lives: first position, last position, bytes.
        end: The last position.
    """
    change = [0] * (end + 2)
    for birth, death, size in rows:
        change[birth] += size
        change[death + 1] -= size
    alive = peak = 0
    for step in change:
        alive += step
        peak = max(peak, alive)
    return peak
