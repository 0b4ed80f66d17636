"""Functions that treat rows of edges one by one, and those that sum rows into nodes.

Responsible for telling from a call of torch's that each row of its result follows from the rows of
the same edge alone, so that some of them can be computed by the same call; and for what a call adds
up where. Whatever is not told so here is computed of whole rows. Not responsible for when
(:mod:`memfit.apply.slices.edges`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from memfit.apply.slices.edge_program import Cut, Kept, Make, Rows

Args = tuple[Any, ...]
Named = dict[str, Any]
Input = Rows | Cut | Kept
RowsOf = Callable[[Tensor], Rows | None]
"""The rows that a tensor stands for; ``None`` for an ordinary tensor."""


@dataclass(frozen=True, slots=True)
class Step:
    """A call that treats rows one by one.

    Attributes:
        make: Makes rows of its result.
        inputs: What of.
        like: The whole result, without memory.
        is_view: Whether the result shows the memory of the first input.
    """

    make: Make
    inputs: tuple[Input, ...]
    like: Tensor
    is_view: bool = False


@dataclass(frozen=True, slots=True)
class Sum:
    """A call that adds rows up.

    Attributes:
        sums: What they are added to.
        target: Which row of that each is added to.
        rows: The rows.
        in_place: Whether the sums are written over what they are added to.
        mean: Whether they are divided by how many there are; with a one for what they are added to
            where that is ``"with"``.
    """

    sums: Tensor
    target: Tensor
    rows: Tensor
    in_place: bool
    mean: str = ""


Rule = Callable[[Any, Args, Named, int, RowsOf], Step | None]


def step_of(func: Any, args: Args, kwargs: Named, edges: int, rows_of: RowsOf) -> Step | None:
    """A call as a step of rows; ``None`` where it is not known to be one.

    Args:
        func: A function of torch's.
        args: Its arguments, some of which are put off.
        kwargs: The same by name.
        edges: How many rows there are.
        rows_of: Tells what stands for a tensor.
    """
    rule = _RULES.get(func)
    if rule is None or kwargs.get("out") is not None or kwargs.get("inplace"):
        return None
    try:
        step = rule(func, args, kwargs, edges, rows_of)
    except (RuntimeError, TypeError, ValueError, LookupError):
        return None  # torch says what is wrong, as the call is made of whole rows
    is_of_rows = step is not None and step.like.dim() > 0 and step.like.shape[0] == edges
    return step if is_of_rows else None


def parts_of(func: Any, args: Args, kwargs: Named, rows_of: RowsOf) -> list[Step]:
    """A call that cuts rows into parts as a step for each; none where it is not known to.

    Args:
        func: As of :func:`step_of`.
        args: The same.
        kwargs: The same.
        rows_of: The same.
    """
    given = {**dict(zip(("tensor", "size", "dim"), args, strict=False)), **kwargs}
    rows = rows_of(given["tensor"]) if func in _CUTS and "tensor" in given else None
    if rows is None:
        return []
    dim = given.get("dim", 0) % given["tensor"].dim()
    if dim == 0:
        return []
    steps, start = [], 0
    for like in on_meta(func, args, kwargs):
        width = like.shape[dim]

        def make(pieces: list[Tensor], start: int = start, width: int = width) -> Tensor:
            return pieces[0].narrow(dim, start, width)

        steps.append(Step(make, (rows,), like, is_view=True))
        start += width
    return steps


def on_meta(func: Any, args: Args, kwargs: Named) -> Any:
    """What a call returns, without memory."""

    def empty(tensor: Tensor) -> Tensor:
        return torch.empty_strided(
            tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="meta"
        )

    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch(), torch.no_grad():
        args, kwargs = tree_map_only(Tensor, empty, (args, kwargs))
        return func(*args, **kwargs)


def _elementwise(func: Any, args: Args, kwargs: Named, edges: int, rows_of: RowsOf) -> Step | None:
    """Each element follows from those at its place, as tensors are broadcast."""
    if any(isinstance(it, (Tensor, list, tuple)) for it in kwargs.values()):
        return None
    if any(isinstance(it, (list, tuple)) for it in args):
        return None
    like = on_meta(func, args, kwargs)
    if not isinstance(like, Tensor):
        return None
    inputs: list[Input] = []
    for arg in args:
        if not isinstance(arg, Tensor):
            continue
        rows = rows_of(arg)
        if arg.dim() == like.dim() and arg.dim() and arg.shape[0] == edges:
            inputs.append(rows or Cut(arg))
        elif rows is None and (arg.dim() < like.dim() or arg.shape[0] == 1):
            inputs.append(Kept(arg))
        else:
            return None
    tensors = [isinstance(arg, Tensor) for arg in args]
    others = [None if isinstance(arg, Tensor) else arg for arg in args]

    def make(pieces: list[Tensor]) -> Tensor:
        left = iter(pieces)
        given = [
            next(left) if is_tensor else other
            for is_tensor, other in zip(tensors, others, strict=True)
        ]
        made: Tensor = func(*given, **kwargs)
        return made

    return Step(make, tuple(inputs), like)


def _activation(func: Any, args: Args, kwargs: Named, edges: int, rows_of: RowsOf) -> Step | None:
    """A function of ``torch.nn.functional``'s, which may be told to write over its input."""
    names = {F.relu: 1, F.elu: 2, F.selu: 1, F.celu: 2, F.silu: 1, F.mish: 1, F.leaky_relu: 2}
    place = names.get(func)
    if place is not None and len(args) > place and args[place]:
        return None
    return _elementwise(func, args, kwargs, edges, rows_of)


def _dropout(_func: Any, args: Args, kwargs: Named, _edges: int, rows_of: RowsOf) -> Step | None:
    """Dropout that drops nothing."""
    given = {**dict(zip(("input", "p", "training", "inplace"), args, strict=False)), **kwargs}
    rows = rows_of(given["input"])
    drops = given.get("training", True) and given.get("p", 0.5)
    if rows is None or drops or given.get("inplace"):
        return None
    like = on_meta(_same, (given["input"],), {})
    return Step(lambda pieces: pieces[0], (rows,), like, is_view=True)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _linear(func: Any, args: Args, kwargs: Named, _edges: int, rows_of: RowsOf) -> Step | None:
    """A linear layer."""
    given = {**dict(zip(("input", "weight", "bias"), args, strict=False)), **kwargs}
    value, others = given["input"], [given["weight"], given.get("bias")]
    rows = rows_of(value)
    tensors = [it for it in others if it is not None]
    if rows is None or value.dim() < 2 or any(map(rows_of, tensors)):  # noqa: PLR2004 - rows
        return None
    like = on_meta(func, (value, *others), {})
    return Step(lambda pieces: F.linear(*pieces), (rows, *map(Kept, tensors)), like)


def _matmul(func: Any, args: Args, kwargs: Named, edges: int, rows_of: RowsOf) -> Step | None:
    """Rows times a matrix, or times one of their own each."""
    if len(args) != 2 or kwargs or not all(isinstance(it, Tensor) for it in args):  # noqa: PLR2004 - factors
        return None
    left, right = args
    rows, others = rows_of(left), rows_of(right)
    is_matrix = left.dim() >= 2 and right.dim() == 2 and others is None  # noqa: PLR2004 - a matrix
    is_each = left.dim() == right.dim() == 3 and left.shape[0] == right.shape[0] == edges  # noqa: PLR2004 - matrices
    if is_matrix and rows is not None:
        inputs: tuple[Input, ...] = (rows, Kept(right))
    elif is_each:
        inputs = (rows or Cut(left), others or Cut(right))
    else:
        return None
    return Step(lambda pieces: func(*pieces), inputs, on_meta(func, args, kwargs))


def _cat(func: Any, args: Args, kwargs: Named, edges: int, rows_of: RowsOf) -> Step | None:
    """Rows side by side."""
    given = {**dict(zip(("tensors", "dim"), args, strict=False)), **kwargs}
    tensors, dim = given.get("tensors"), given.get("dim", 0)
    if not isinstance(tensors, (list, tuple)) or set(given) - {"tensors", "dim"}:
        return None
    rank = tensors[0].dim()
    if any(it.dim() != rank or it.shape[0] != edges for it in tensors) or dim % rank == 0:
        return None
    inputs = tuple(rows_of(it) or Cut(it) for it in tensors)
    like = on_meta(func, (list(tensors), dim), {})
    return Step(lambda pieces: torch.cat(pieces, dim), inputs, like)


def _shaped(func: Any, args: Args, kwargs: Named, edges: int, rows_of: RowsOf) -> Step | None:
    """Other dimensions in rows, in the same order of elements."""
    rows = rows_of(args[0]) if args else None
    if rows is None or any(isinstance(it, torch.dtype) for it in (*args[1:], *kwargs.values())):
        return None
    like = on_meta(func, args, kwargs)
    shape = tuple(like.shape[1:])
    if not like.dim() or like.shape[0] != edges or not like.is_contiguous():
        return None
    return Step(
        lambda pieces: pieces[0].reshape(len(pieces[0]), *shape), (rows,), like, is_view=True
    )


def _getitem(func: Any, args: Args, kwargs: Named, _edges: int, rows_of: RowsOf) -> Step | None:
    """Part of every row."""
    rows = rows_of(args[0])
    index = args[1]
    if rows is None or not isinstance(index, tuple) or not index or index[0] is ...:
        return None
    if index[0] is None or index[0] != slice(None):
        return None
    if not all(it is None or it is ... or type(it) in {int, slice} for it in index):
        return None
    like = on_meta(func, args, kwargs)
    return Step(lambda pieces: pieces[0][index], (rows,), like, is_view=True)


def _within(func: Any, args: Args, kwargs: Named, _edges: int, rows_of: RowsOf) -> Step | None:
    """Sums, means and probabilities within rows."""
    rows = rows_of(args[0]) if args else None
    given = kwargs.get("dim", args[1] if len(args) > 1 else None)
    dims = given if isinstance(given, (tuple, list)) else (given,)
    rank = args[0].dim() if rows is not None else 0
    if rows is None or not dims or any(type(dim) is not int or dim % rank == 0 for dim in dims):
        return None
    rest = args[1:]
    like = on_meta(func, args, kwargs)
    return Step(lambda pieces: func(pieces[0], *rest, **kwargs), (rows,), like)


def _layer_norm(_func: Any, args: Args, kwargs: Named, _edges: int, rows_of: RowsOf) -> Step | None:
    """Normalised rows."""
    names = ("input", "normalized_shape", "weight", "bias", "eps")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    rows = rows_of(given["input"])
    shape, eps = given["normalized_shape"], given.get("eps", 1e-5)
    tensors = [given.get("weight"), given.get("bias")]
    there = [it is not None for it in tensors]
    if rows is None or len(shape) >= given["input"].dim():
        return None
    if any(rows_of(it) for it in tensors if it is not None):
        return None

    def make(pieces: list[Tensor]) -> Tensor:
        left = iter(pieces[1:])
        weight, bias = (next(left) if is_there else None for is_there in there)
        return F.layer_norm(pieces[0], shape, weight, bias, eps)

    like = on_meta(_same, (given["input"],), {})
    return Step(make, (rows, *(Kept(it) for it in tensors if it is not None)), like)


def _both(*names: str) -> list[Any]:
    """Functions of these names, and methods of tensors."""
    found = [getattr(place, name, None) for name in names for place in (torch, Tensor)]
    return [it for it in found if it is not None]


_ELEMENTWISE = [
    *_both("add", "sub", "mul", "div", "subtract", "multiply", "divide", "true_divide"),
    *_both("maximum", "minimum", "pow", "neg", "negative", "abs", "square", "sqrt", "rsqrt"),
    *_both("exp", "expm1", "log", "log1p", "sin", "cos", "tanh", "sigmoid", "relu", "erf"),
    *_both("reciprocal", "clamp", "clip", "clamp_min", "clamp_max", "masked_fill", "selu", "celu"),
    *_both("gt", "ge", "lt", "le", "eq", "ne"),
    *(torch.where, torch.addcmul, torch.lerp, F.sigmoid, F.tanh, F.softplus, F.gelu),
    *(F.logsigmoid, F.softsign),
    *(
        getattr(Tensor, f"__{name}__")
        for name in (
            *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow"),
            *("gt", "ge", "lt", "le", "eq", "ne"),
        )
    ),
    *(Tensor.__neg__, Tensor.__abs__),
]

_RULES: dict[Any, Rule] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys(
        (F.relu, F.elu, F.selu, F.celu, F.silu, F.mish, F.leaky_relu),
        _activation,
    ),
    F.dropout: _dropout,
    F.linear: _linear,
    **dict.fromkeys((*_both("matmul", "mm", "bmm"), Tensor.__matmul__), _matmul),
    **dict.fromkeys((torch.cat, torch.concat, torch.concatenate), _cat),
    **dict.fromkeys(
        (*_both("unsqueeze", "squeeze", "reshape", "flatten"), Tensor.view, Tensor.contiguous),
        _shaped,
    ),
    Tensor.__getitem__: _getitem,
    **dict.fromkeys(_both("sum", "mean", "softmax", "log_softmax"), _within),
    **dict.fromkeys((F.softmax, F.log_softmax), _within),
    F.layer_norm: _layer_norm,
}


_CUTS = frozenset(_both("split", "chunk"))

# Sums


def sum_of(func: Any, args: Args, kwargs: Named, edges: int, rows_of: RowsOf) -> Sum | None:
    """A call as a sum of rows that are put off; ``None`` where it is not known to be one.

    Args:
        func: As of :func:`step_of`.
        args: The same.
        kwargs: The same.
        edges: The same.
        rows_of: The same.
    """
    found = _SUMS.get(func)
    if found is None:
        return None
    read, names, in_place = found
    if set(kwargs) - set(names) or len(args) > len(names):
        return None
    try:
        made = read({**dict(zip(names, args, strict=False)), **kwargs}, in_place)
    except (RuntimeError, TypeError, LookupError):
        return None
    return made if made is not None and _is_of_rows(made, edges, rows_of) else None


def _is_of_rows(it: Sum, edges: int, rows_of: RowsOf) -> bool:
    """Whether rows are added to what has as wide ones, each as a whole."""
    sums, target, rows = it.sums, it.target, it.rows
    if not all(isinstance(tensor, Tensor) for tensor in (sums, target, rows)):
        return False
    if rows_of(rows) is None or rows_of(sums) or rows_of(target):
        return False
    return (
        sums.dim() == rows.dim()
        and sums.shape[1:] == rows.shape[1:]
        and sums.dtype == rows.dtype
        and tuple(target.shape) == (edges,)
        and target.dtype in INDICES
    )


INDICES = frozenset({torch.int64, torch.int32})
"""Types of indices that are no masks."""


def _index_add(given: Named, in_place: bool) -> Sum | None:  # noqa: FBT001 - read from a table
    if given.get("dim") != 0 and given.get("dim") != -_rank(given.get("source")):
        return None
    if given.get("alpha", 1) != 1:
        return None
    return Sum(given["self"], given["index"], given["source"], in_place)


def _rank(value: Any) -> int:
    return value.dim() if isinstance(value, Tensor) else 0


def _scatter(given: Named, in_place: bool) -> Sum | None:  # noqa: FBT001 - read from a table
    """Rows scattered by one index each, which is there as often as a row has elements."""
    index, rows, dim = given.get("index"), given.get("src"), given.get("dim")
    if not isinstance(index, Tensor) or not isinstance(rows, Tensor):
        return None
    if dim not in {0, -rows.dim()} or index.shape != rows.shape:
        return None
    strides = zip(index.shape[1:], index.stride()[1:], strict=True)
    if any(stride and size > 1 for size, stride in strides) or 0 in index.shape:
        return None
    reduce = given.get("reduce", "sum")
    if reduce not in {"sum", "mean"}:
        return None
    with_self = given.get("include_self", True)
    if reduce == "sum" and not with_self:
        return None
    mean = "" if reduce == "sum" else ("with" if with_self else "without")
    target = index
    for _ in index.shape[1:]:
        target = target.select(1, 0)
    return Sum(given["self"], target, rows, in_place, mean)


def _index_put(given: Named, in_place: bool) -> Sum | None:  # noqa: FBT001 - read from a table
    indices = given.get("indices")
    if not isinstance(indices, (tuple, list)) or len(indices) != 1 or not given.get("accumulate"):
        return None
    sums, index = given["self"], indices[0]
    if not isinstance(index, Tensor) or index.dtype not in INDICES or not len(sums):
        return None
    return Sum(sums, index.remainder(len(sums)), given["values"], in_place)


_ADD = ("self", "dim", "index", "source", "alpha")
_SCATTER = ("self", "dim", "index", "src")
_REDUCE = ("self", "dim", "index", "src", "reduce", "include_self")
_PUT = ("self", "indices", "values", "accumulate")

_SUMS: dict[Any, tuple[Callable[[Named, bool], Sum | None], tuple[str, ...], bool]] = {
    **dict.fromkeys(_both("index_add"), (_index_add, _ADD, False)),
    Tensor.index_add_: (_index_add, _ADD, True),
    **dict.fromkeys(_both("scatter_add"), (_scatter, _SCATTER, False)),
    Tensor.scatter_add_: (_scatter, _SCATTER, True),
    **dict.fromkeys(_both("scatter_reduce"), (_scatter, _REDUCE, False)),
    Tensor.scatter_reduce_: (_scatter, _REDUCE, True),
    **dict.fromkeys(_both("index_put"), (_index_put, _PUT, False)),
    **dict.fromkeys(_both("index_put_"), (_index_put, _PUT, True)),
}
