"""Messages along the edges of a graph that never exist as a whole: a plan's slices of edges.

A layer of message passing gathers a row for each edge, computes messages of them and adds those up
for each node; what there is for each edge takes most of the memory. Here gathered rows are put off,
and so is what follows from them row by row, until a call adds it up: that goes in slices of edges.

Responsible for the life of one forward and for :class:`EdgeTensor`, which stands for what is put
off and turns into it for everything that is not known to treat rows one by one, so that results
are right whatever the model does. Not responsible for what is known
(:mod:`memfit.apply.slices.edge_rules`), nor for sums (:mod:`memfit.apply.slices.edge_sums`).
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._pytree import tree_flatten, tree_unflatten

from memfit.apply.proven_ops import LeftProof
from memfit.apply.slices.deferred import ABOUT
from memfit.apply.slices.edge_program import Gathered, Program, Rows
from memfit.apply.slices.edge_rules import INDICES, Step, Sum, on_meta, parts_of, step_of, sum_of
from memfit.apply.slices.edge_sums import Taken, edge_sums
from memfit.apply.slices.forward_mode import ForwardMode
from memfit.apply.slices.made_of import made_of
from memfit.apply.slices.writes import WATCHED, make_what_is_written
from memfit.errors import DivergenceWarning, UsageError
from memfit.tensors.function_modes import torchs_own

_LEAST_ROWS = 2
"""Edges in a slice, at least."""

_MOST_STEPS = 64
"""Steps from what is gathered to a value, at most; they are one recursion."""

_NARROWER = 2
"""So many times narrower than what it is made of is what is computed in slices and then kept."""


class SlicedEdges:
    """Carries out the slices of edges of a ``chunk`` action.

    Attributes:
        sums: Sums that the last forward computed in slices.
        whole: Who needed rows whole in it, each once.
        whole_gathers: Numbers of the gathers that those were made of.
    """

    def __init__(self, edges: Mapping[str, Any], *, warn: bool = True) -> None:
        """Prepare; nothing is installed before :meth:`forward`.

        Args:
            edges: ``Edges`` of the plan as parsed JSON.
            warn: Whether to warn, once, when rows are needed whole.

        Raises:
            UsageError: It is no such thing.
        """
        try:
            self.slices, self.least_bytes = int(edges["slices"]), int(edges["least_bytes"])
            self.kept = frozenset(int(it) for it in edges.get("kept", ()))
        except (KeyError, TypeError, ValueError) as error:
            message = f"the plan's `chunk` action is malformed: {error!r}"
            raise UsageError(message) from error
        if self.slices < 1:
            message = f"the plan computes messages in `{self.slices}` slices"
            raise UsageError(message)
        self._warns = warn
        self._gathers = 0
        self._alive: WeakSet[_Standing] = WeakSet()
        self.sums = 0
        self.whole: list[str] = []
        self.whole_gathers: set[int] = set()

    @property
    def divergence(self) -> str:
        """What needed rows whole, as a sentence; empty if nothing did."""
        return f"it used rows of edges whole, in `{self.whole[0]}`" if self.whole else ""

    @property
    def to_be_kept(self) -> list[int]:
        """Numbers of gathers that are better not put off, as far as is known."""
        return sorted(self.kept | self.whole_gathers)

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Run one forward inside this; what it leaves of its rows is made whole."""
        self._gathers = self.sums = 0
        self.whole, self.whole_gathers = [], set()
        self._alive.clear()
        with _Gathering(self).entered():
            yield
            for standing in list(self._alive):
                standing.make("the end of the forward")

    def number(self) -> int:
        """The number of a gather of enough rows."""
        self._gathers += 1
        return self._gathers - 1

    def stands(self, standing: _Standing) -> None:
        """Know of what stands for rows."""
        self._alive.add(standing)
        WATCHED.add(standing)

    def stands_no_longer(self, standing: _Standing) -> None:
        """Know that they are there."""
        self._alive.discard(standing)
        WATCHED.discard(standing)

    def needed_whole(self, who: str, rows: Rows) -> None:
        """Know that somebody looks at all rows."""
        self.whole.append(who)
        self.whole_gathers |= rows.gathers
        if self._warns:
            self._warns = False
            message = (
                f"`{who}` needs rows of all edges, which the plan computes in slices. Results stay "
                "right; the step may take more memory than planned"
            )
            warnings.warn(message, DivergenceWarning, stacklevel=2)


class _Standing:
    """What stands for rows, as those who watch writes know it."""

    def __init__(self, tensor: EdgeTensor) -> None:
        self._tensor = ref(tensor)

    def made_of(self) -> Iterator[Tensor]:
        """What the rows are made of."""
        tensor = self._tensor()
        if tensor is not None:
            yield from Program.of(tensor._rows).given()

    def make(self, who: str) -> None:
        """Make them now, if there is still somebody to look at them."""
        tensor = self._tensor()
        if tensor is not None:
            tensor.become_real(who)


class EdgeTensor(Tensor):
    """Stands for rows of edges; see the module."""

    _rows: Rows
    _owner: SlicedEdges
    _grad_is_on: bool
    _standing: _Standing

    @staticmethod
    def of(rows: Rows, owner: SlicedEdges, device: torch.device) -> EdgeTensor:
        """Make one.

        Args:
            rows: The rows.
            owner: Whose they are.
            device: Where they would be.
        """
        given = Program.of(rows).given() if rows.like.is_floating_point() else []

        def make() -> Tensor:
            return Tensor._make_wrapper_subclass(
                EdgeTensor, tuple(rows.like.shape), dtype=rows.like.dtype, device=device
            )

        made: EdgeTensor = made_of(make, lambda: rows.real, given)
        made._rows, made._owner, made._grad_is_on = rows, owner, torch.is_grad_enabled()
        made._standing = _Standing(made)
        owner.stands(made._standing)
        return made

    def become_real(self, who: str) -> Tensor:
        """The rows that it stands for.

        Args:
            who: Who needs them.
        """
        for rows in self._rows.behind():
            if rows.real is None:
                with torch._C.DisableTorchFunction(), torch.set_grad_enabled(self._grad_is_on):
                    self._make(rows, who)
        self._owner.stands_no_longer(self._standing)
        assert self._rows.real is not None, "they are there"
        return self._rows.real

    def _make(self, rows: Rows, who: str) -> None:
        behind = rows.inputs[0] if rows.is_view else None
        if isinstance(behind, Rows) and behind.real is not None:
            rows.real = rows.make([behind.real])
            return
        program, owner = Program.of(rows), self._owner
        if program.width_bytes >= _NARROWER * rows.row_bytes:
            with torch._C.DisableTorchFunctionSubclass():
                device = self.device
            _make_in_slices(rows, program, owner, device)
        else:
            owner.needed_whole(who, rows)
            rows.real = program.rows(program.pieces(program.given(), 0, len(rows.like)))

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Put off what treats rows one by one, add up in slices, and be real otherwise."""
        kwargs, func = kwargs or {}, torchs_own(func)
        if func in ABOUT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        found = _followed(func, args, kwargs)
        if found is not NotImplemented:
            return found
        name = getattr(func, "__name__", str(func))
        if func in _LOOKING or name in {"grad", "backward"}:
            _require_untaken((args, kwargs), name)
        args, kwargs = _real((args, kwargs), name)
        make_what_is_written(func, args, kwargs)
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """An op below autograd; only kernels that torch functions do not announce come here."""
        args, kwargs = _real((args, kwargs or {}), str(func))
        return func(*args, **kwargs)

    def __repr__(self, **_kwargs: Any) -> str:  # type: ignore[override]
        """The rows' own: they are computed to be printed."""
        return repr(self.become_real("repr"))


def _followed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a call on rows that are put off; ``NotImplemented`` where it needs them."""
    args, kwargs = _mapped((args, kwargs), _there)
    given = [it for it in _leaves((args, kwargs)) if isinstance(it, Tensor)]
    put_off = [it for it in given if isinstance(it, EdgeTensor)]
    if not (put_off and all(map(_is_plain, given)) and _go_together(put_off)):
        return NotImplemented
    first = put_off[0]
    if (plain := _PLAIN_RESULTS.get(func)) is not None:
        return plain(func, args, kwargs)
    edges = len(first._rows.like)
    sum_ = sum_of(func, args, kwargs, edges, _rows_of)
    if sum_ is not None:
        return _summed(sum_)
    if max(it._rows.depth for it in put_off) >= _MOST_STEPS:
        return NotImplemented
    if parts := parts_of(func, args, kwargs, _rows_of):
        return tuple(_put_off(part, first) for part in parts)
    step = step_of(func, args, kwargs, edges, _rows_of)
    return NotImplemented if step is None else _put_off(step, first)


def _put_off(step: Step, first: EdgeTensor) -> EdgeTensor:
    """What stands for the result of a call on rows, of which this is one."""
    made_of = [it for it in step.inputs if isinstance(it, Rows)]
    gathers = frozenset().union(*(it.gathers for it in made_of))
    depth = 1 + max(it.depth for it in made_of)
    rows = Rows(step.make, step.inputs, step.like, gathers, depth, step.is_view)
    return EdgeTensor.of(rows, first._owner, first.device)


def _go_together(put_off: list[EdgeTensor]) -> bool:
    """Whether values are rows of the same edges, and are used as they were gathered."""
    first = put_off[0]
    same = (first._owner, len(first._rows.like), torch.is_grad_enabled())
    are_alike = all((it._owner, len(it._rows.like), it._grad_is_on) == same for it in put_off)
    return are_alike and not torch.is_autocast_enabled(first.device.type)


def _summed(it: Sum) -> Any:
    """Rows added up in slices; ``NotImplemented`` where that is not as whole ones are."""
    rows, sums = it.rows, it.sums
    assert isinstance(rows, EdgeTensor), "they are put off"
    program = Program.of(rows._rows)
    memory = {tensor.untyped_storage()._cdata for tensor in (*program.tensors, it.target)}
    is_written = it.in_place and (
        sums.untyped_storage()._cdata in memory
        or sums._is_view()
        or (sums.requires_grad and sums.is_leaf)
    )
    if is_written:
        return NotImplemented
    _take(rows._rows)
    rows._owner.sums += 1
    edges = len(rows._rows.like)
    with torch._C.DisableTorchFunction():
        if it.mean:
            return _mean(it, program, edges, rows._owner.slices)
        taken = Taken(edges, rows._owner.slices, in_place=it.in_place)
        return edge_sums(program, taken, sums, it.target)


def _mean(it: Sum, program: Program, edges: int, slices: int) -> Tensor:
    """The mean of the rows that belong together; what they are added to where there is none."""
    sums, ones = it.sums, torch.ones(edges, dtype=it.sums.dtype, device=it.sums.device)
    count = torch.zeros(len(sums), dtype=sums.dtype, device=sums.device)
    count = count.index_add_(0, it.target, ones)[(..., *(None for _ in sums.shape[1:]))]
    if it.mean == "with":
        added = edge_sums(program, Taken(edges, slices), sums, it.target)
        made = added / (count + 1)
    else:
        taken = Taken(edges, slices, in_place=True)
        added = edge_sums(program, taken, torch.zeros_like(sums), it.target)
        made = torch.where(count > 0, added / count.clamp(min=1), sums)
    return sums.copy_(made) if it.in_place else made


def _make_in_slices(rows: Rows, program: Program, owner: SlicedEdges, device: torch.device) -> None:
    """Make rows that are narrower than what they are made of, which never is there as a whole."""
    for it in rows.inputs:
        if isinstance(it, Rows):
            _take(it)
    taken = Taken(len(rows.like), owner.slices, like=rows.like, device=device)
    rows.real = edge_sums(program, taken, None, None)
    owner.sums += 1


def _take(rows: Rows) -> None:
    """Know that a gradient of these will not pass through them as a whole."""
    if rows.real is not None or rows.is_taken:
        return
    rows.is_taken = True
    for it in rows.inputs:
        if isinstance(it, Rows):
            _take(it)


def _require_untaken(given: Any, who: str) -> None:
    """Refuse to show the gradient of rows that were added up in slices already.

    Raises:
        LeftProof: One of them is asked for.
    """
    for it in _leaves(given):
        if isinstance(it, EdgeTensor) and it._rows.is_taken:
            message = (
                f"`{who}` looks at the gradient of rows of edges after they were added up in slices"
            )
            raise LeftProof(message)


def _rows_of(tensor: Tensor) -> Rows | None:
    return tensor._rows if isinstance(tensor, EdgeTensor) else None


def _leaves(given: Any) -> list[Any]:
    return tree_flatten(given)[0]


def _mapped(given: Any, of: Callable[[Any], Any]) -> Any:
    leaves, structure = tree_flatten(given)
    return tree_unflatten([of(it) for it in leaves], structure)


def _there(it: Any) -> Any:
    """The rows where they are there by now; anything else itself."""
    return it._rows.real if isinstance(it, EdgeTensor) and it._rows.real is not None else it


def _real(given: Any, who: str) -> Any:
    """The same nest of values with rows in place of what stands for them."""
    return _mapped(given, lambda it: it.become_real(who) if isinstance(it, EdgeTensor) else it)


def with_real_rows(result: Any) -> Any:
    """The result of a forward, with rows in place of what stands for some.

    Args:
        result: Any pytree.
    """
    if not any(isinstance(it, EdgeTensor) for it in _leaves(result)):
        return result
    return _real(result, "the result")


_LOOKING = frozenset(
    {
        *(Tensor.register_hook, Tensor.retain_grad, Tensor.register_post_accumulate_grad_hook),
        vars(torch._C.TensorBase)["grad_fn"].__get__,
        vars(torch._C.TensorBase)["grad"].__get__,
    }
)
"""What looks at gradients, or may from then on."""


# Calls that only take the form of what is put off


def _expanded(_func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An ordinary tensor, expanded to the shape of one that is put off."""
    other = args[1] if args[1:] else kwargs.get("other")
    if not isinstance(other, EdgeTensor) or isinstance(args[0], EdgeTensor):
        return NotImplemented
    return args[0].expand(other._rows.like.shape)


def _made_new(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A tensor of the same type in the same place."""
    first = args[0]
    if (
        not isinstance(first, EdgeTensor)
        or sum(isinstance(it, EdgeTensor) for it in _leaves(args)) > 1
    ):
        return NotImplemented
    with torch._C.DisableTorchFunctionSubclass():
        device = first.device
    empty = torch.empty(0, dtype=first._rows.like.dtype, device=device)
    return func(empty, *args[1:], **kwargs)


_PLAIN_RESULTS: dict[Any, Any] = {
    Tensor.expand_as: _expanded,
    **dict.fromkeys(
        (Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full), _made_new
    ),
}


# Gathers


class _Gathering(ForwardMode):
    """While entered, puts off gathers of many rows."""

    def __init__(self, owner: SlicedEdges) -> None:
        super().__init__()
        self._owner = owner

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call ``func``, or stand in for its result."""
        kwargs, func = kwargs or {}, torchs_own(func)
        make_what_is_written(func, args, kwargs)
        gathered = None if self.is_over else self._gathered(func, args, kwargs)
        if gathered is None:
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            return self._put_off(gathered)

    def _gathered(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Gathered | None:
        """The rows that a call gathers; ``None`` where it does no such thing, or of too few."""
        found = _gather_of(func, args, kwargs)
        if found is None:
            return None
        source, index = found.source, found.index
        edges = len(index)
        row = source.numel() // max(len(source), 1) * source.element_size()
        is_large = edges * row >= self._owner.least_bytes
        if not is_large or edges < _LEAST_ROWS * self._owner.slices or _is_seen_otherwise(source):
            return None
        return found

    def _put_off(self, gathered: Gathered) -> Tensor:
        source, number = gathered.source, self._owner.number()
        if number in self._owner.kept:
            return gathered.gather(source, gathered.index)
        like = on_meta(torch.index_select, (source, 0, gathered.index), {})
        rows = Rows(lambda pieces: pieces[0], (gathered,), like, frozenset({number}))
        return EdgeTensor.of(rows, self._owner, source.device)


def _gather_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Gathered | None:
    """A gather of rows by one index each."""
    if func in _SELECTS:
        given = {**dict(zip(("input", "dim", "index"), args, strict=False)), **kwargs}
        source, index, dim = given.get("input"), given.get("index"), given.get("dim")
        gather, wraps = _selected, False
        if not isinstance(source, Tensor) or dim not in {0, -source.dim()}:
            return None
    elif func is Tensor.__getitem__:
        source, index = args
        index = index[0] if isinstance(index, tuple) and len(index) == 1 else index
        gather, wraps = _indexed, True
    else:
        return None
    if not isinstance(index, Tensor) or index.dim() != 1 or index.dtype not in INDICES:
        return None
    is_plain = _is_plain(source) and _is_plain(index) and source.dim() > 1
    if not is_plain or not source.is_floating_point() or source.device != index.device:
        return None
    return Gathered(source, index, gather, wraps)


def _selected(source: Tensor, index: Tensor) -> Tensor:
    return source.index_select(0, index)


def _indexed(source: Tensor, index: Tensor) -> Tensor:
    return source[index]


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is torch's own, with all its elements in memory."""
    is_own = type(tensor) in {Tensor, nn.Parameter, EdgeTensor}
    return (is_own or type(tensor).__name__ == "FakeTensor") and tensor.layout is torch.strided


def _is_seen_otherwise(source: Tensor) -> bool:
    """Whether something follows the ops of a call that an autograd function is not made for.

    A checkpoint runs them again and counts what they save; transforms and forward gradients ask
    for rules that it does not have.
    """
    if torch.is_autocast_enabled(source.device.type) or forward_ad._current_level >= 0:
        return True
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == _CHECKPOINTS:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


_CHECKPOINTS = torch.utils.checkpoint.checkpoint.__code__.co_filename

_SELECTS = frozenset({torch.index_select, Tensor.index_select})
