"""Logits that are not computed until somebody needs more of them than a loss in slices does.

Responsible for :class:`DeferredLogits`, which stands for ``linear(hidden, weight, bias)``: it
follows what a model does to the shape of its logits, hands a cross entropy over to
:mod:`memfit.apply.slices.sliced_loss`, and turns into the real logits for everything else, so that
results are right whatever the model does. Not responsible for which linear layer is put off
(:mod:`memfit.apply.slices.chunk`).

The classes of the logits correspond to the features of the hidden values, and all other dimensions
are the same. So whatever leaves the dimension of the classes alone is done to the hidden values
instead, by autograd as always, and the deferred logits only remember where that dimension is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from memfit.apply.slices.gradient_looks import Step, Way
from memfit.apply.slices.made_of import made_of
from memfit.apply.slices.sliced_loss import LossOptions, sliced_cross_entropy
from memfit.apply.slices.whole_logits import Whole
from memfit.tensors.function_modes import torchs_own
from memfit.tensors.versions import version_of


@dataclass(frozen=True, slots=True)
class _View:
    """How deferred logits follow from those of the head.

    Attributes:
        whole: The call that was put off.
        hidden: The hidden values, shaped as the logits are but for the dimension of classes.
        classes: How many classes there are.
        dim: Where their dimension is.
        dtype: Element type of the logits.
        is_log: Whether these are logarithms of probabilities.
        before: The deferred logits that these are made from, and how; ``None`` for the head's.
        place: Stands for the place on the way from the head's logits to a loss.
    """

    whole: Whole
    hidden: Tensor
    classes: int
    dim: int
    dtype: torch.dtype
    is_log: bool = False
    before: tuple[DeferredLogits, Step] | None = None
    place: object = field(default_factory=object)

    @property
    def shape(self) -> list[int]:
        shape = list(self.hidden.shape)
        shape[self.dim] = self.classes
        return shape

    def way(self) -> tuple[tuple[object, Step | None], ...]:
        """The steps from the head's logits to these."""
        if self.before is None:
            return ((self.place, None),)
        return (*self.before[0]._view.way(), (self.place, self.before[1]))

    def rows(self) -> Tensor | None:
        """Logits of some rows, as :meth:`Whole.rows`."""
        is_last = self.dim == self.hidden.dim() - 1
        few = self.whole.rows(self.hidden if is_last else self.hidden.movedim(self.dim, -1))
        if few is None:
            return None
        few = (few if is_last else few.movedim(-1, self.dim)).to(self.dtype)
        return few.log_softmax(self.dim) if self.is_log else few


class DeferredLogits(Tensor):
    """Stands for logits; see the module.

    Once anything needs its logits, they are what it stands for from then on: they may be written
    to, have a hook, or keep their gradient. So may what shows the same memory.
    """

    _view: _View
    _real: Tensor | None
    _made_at: int
    _shared: list[Tensor]

    @staticmethod
    def of(view: _View) -> DeferredLogits:
        """Make one."""
        shared: list[Tensor] = []
        given = [it for it in view.whole.called_with() if it is not None]

        def make() -> Tensor:
            return Tensor._make_wrapper_subclass(
                DeferredLogits, view.shape, dtype=view.dtype, device=view.hidden.device
            )

        with torch.set_grad_enabled(view.whole.requires_grad):
            made: DeferredLogits = made_of(make, lambda: next(iter(shared), None), given)
        made._view, made._real, made._made_at, made._shared = view, None, 0, shared
        return made

    @staticmethod
    def put_off(whole: Whole, hidden: Tensor, classes: int) -> DeferredLogits:
        """Deferred logits of a call of the head."""
        dim = hidden.dim() - 1
        made = DeferredLogits.of(_View(whole, hidden, classes, dim, whole.dtype))
        whole.logits = ref(made)
        return made

    def become_real(self, who: str) -> Tensor:
        """The logits that it stands for."""
        if self._real is None:
            view = self._view
            made = None if self._follows_real() else view.rows()
            if made is None and view.before is None:
                made = view.whole.computed(who)
            elif made is None and view.before is not None:
                made = self._stepped(view.before[0].become_real(who))
                if view.before[0]._is_written() and not _is_alias(made, view.before[0]):
                    made = self._stepped(view.before[0]._unwritten())
            assert made is not None, "rows, all logits, or what is made from others"
            self._real, self._made_at = made, version_of(made)
            self._shared.append(made)
        return self._real

    def _stepped(self, given: Tensor) -> Tensor:
        """What follows from the logits before these."""
        before = self._view.before
        assert before is not None, "the head's logits follow from none"
        graph, modes = self._view.whole.requires_grad, torch._C.DisableTorchFunction()
        with torch.set_grad_enabled(graph), modes:
            return before[1](given)

    def _is_written(self) -> bool:
        """Whether the logits, or those that they are made from, may have been written to."""
        if self._view.whole.is_exposed:
            return True
        if self._real is not None and version_of(self._real) != self._made_at:
            return True
        return self._view.before is not None and self._view.before[0]._is_written()

    def _unwritten(self) -> Tensor:
        """The logits as they were made: what copied them then has those."""
        if self._view.before is None:
            return self._view.whole.anew()
        return self._stepped(self._view.before[0]._unwritten())

    def _follows_real(self) -> bool:
        """Whether logits are there that these are made from, or these themselves."""
        if self._real is not None:
            return True
        return self._view.before is not None and self._view.before[0]._follows_real()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Follow shapes, compute losses in slices, and be the real logits otherwise."""
        kwargs, func = kwargs or {}, torchs_own(func)
        if func in ABOUT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        follow = _FOLLOWED.get(func)
        given = args[0] if args else None
        if follow and isinstance(given, DeferredLogits) and not given._follows_real():
            found = follow(given._view, func, args, kwargs)
            if found is not NotImplemented:
                return found
        name = getattr(func, "__name__", str(func))
        if name == "grad" and len(args) > 1 and func not in _OF_TENSORS:
            return _gradients(func, args, kwargs)
        if isinstance(given, DeferredLogits):
            given._is_seen_by(func)
        args, kwargs = _real((args, kwargs), name)
        return func(*args, **kwargs)

    def _is_seen_by(self, func: Any) -> None:
        """Know of what follows from a function that is called with the logits."""
        whole = self._view.whole
        whole.is_exposed |= func in _EXPOSING
        if func in _LOOKING and whole.requires_grad:
            whole.looks.logits[self._view.place] = lambda: self.become_real("a gradient")
            whole.looks.linear = whole.called_with

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """An op below autograd; only kernels that torch functions do not announce come here."""
        args, kwargs = _real((args, kwargs or {}), str(func))
        return func(*args, **kwargs)

    def __repr__(self, **_kwargs: Any) -> str:  # type: ignore[override]
        """Say what this is without computing it, but to a script: that prints its logits."""
        if self._view.whole.in_script:
            return repr(self.become_real("repr"))
        return f"DeferredLogits(shape={tuple(self._view.shape)}, dtype={self._view.dtype})"


def _gradients(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``torch.autograd.grad`` by logits: hooks take them, as a loss in slices knows no logits.

    What the head was called with is differentiated by in their place, and its gradient let go.
    """
    asked = args[1] if isinstance(args[1], (tuple, list)) else (args[1],)
    kept: dict[int, Tensor] = {}
    instead, hooks = [], []
    for place, it in enumerate(asked):
        if not isinstance(it, DeferredLogits) or not it.requires_grad:
            instead.append(_real(it, "grad"))
            continue
        it._is_seen_by(Tensor.register_hook)

        def keep(gradient: Tensor, place: int = place) -> None:
            kept[place] = kept[place] + gradient if place in kept else gradient

        hooks.append(it.become_real("grad").register_hook(keep))  # type: ignore[no-untyped-call]
        linear = it._view.whole.called_with()
        instead.append(next(part for part in linear if part is not None and part.requires_grad))
    try:
        rest, named = _real((args[2:], kwargs), "grad")
        outputs = _real(args[0], "grad")
        found = func(outputs, instead, *rest, **{**named, "allow_unused": True})
    finally:
        for hook in hooks:
            hook.remove()
    made = [
        kept.get(place) if isinstance(it, DeferredLogits) else gradient
        for place, (it, gradient) in enumerate(zip(asked, found, strict=True))
    ]
    if not kwargs.get("allow_unused") and any(it is None for it in made):
        return func(outputs, _real(list(asked), "grad"), *rest, **named)  # says what is unused
    return tuple(made)


def _is_alias(tensor: Tensor, logits: DeferredLogits) -> bool:
    """Whether what follows from logits shows their memory."""
    memory = tensor.untyped_storage()._cdata
    return bool(memory == logits.become_real("an alias").untyped_storage()._cdata)


def without_deferred(result: Any) -> Any:
    """The same result of a forward, with real logits in place of deferred ones.

    Args:
        result: Any pytree.
    """
    leaves, structure = tree_flatten(result)
    if not any(isinstance(leaf, DeferredLogits) for leaf in leaves):
        return result
    with torch._C.DisableTorchFunction():  # or the same product would be put off again
        real = [_real(leaf, "the result") for leaf in leaves]
    return tree_unflatten(real, structure)


def _real(value: Any, who: str) -> Any:
    """The same nest of values with real logits in place of deferred ones."""
    if isinstance(value, DeferredLogits):
        return value.become_real(who)
    if isinstance(value, (tuple, list)) and type(value) in {tuple, list}:
        return type(value)(_real(item, who) for item in value)
    if isinstance(value, dict):
        return {key: _real(item, who) for key, item in value.items()}
    return value


# What is known without the logits

ABOUT = frozenset(
    {
        Tensor.size,
        Tensor.dim,
        Tensor.numel,
        Tensor.element_size,
        Tensor.is_floating_point,
        Tensor.is_complex,
        Tensor.__len__,
        Tensor.ndimension,
        Tensor.get_device,
        Tensor._is_view,
        torch.is_floating_point,
        torch.is_complex,
        torch.is_tensor,
        torch.numel,
    }
    | {
        getattr(Tensor, name).__get__
        for name in (
            "shape",
            "ndim",
            "dtype",
            "device",
            "layout",
            "requires_grad",
            "is_cuda",
            "is_cpu",
            "is_meta",
            "is_sparse",
            "is_quantized",
            "is_nested",
            "is_mps",
            "is_xla",
            "is_mkldnn",
            "itemsize",
        )
    }
)


_OF_TENSORS = frozenset({vars(torch._C.TensorBase)["grad"].__get__})
"""What bears the name of ``torch.autograd.grad``, which a script may have wrapped."""

_GRAD_FN = vars(torch._C.TensorBase)["grad_fn"].__get__

_LOOKING = frozenset({Tensor.register_hook, Tensor.retain_grad, _GRAD_FN})
"""What may look at the gradient from then on; hooks of nodes are put on ``grad_fn``."""

_EXPOSING = frozenset(
    {
        *(Tensor.numpy, Tensor.__array__, Tensor.data_ptr, Tensor.untyped_storage, Tensor.storage),
        *(Tensor.data.__get__, Tensor.__dlpack__),  # type: ignore[attr-defined]
    }
)
"""What leads to writes that no version tells of."""


# What changes only the shape

_Follow = Callable[[_View, Any, tuple[Any, ...], dict[str, Any]], Any]


def _next(
    view: _View, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], **changed: Any
) -> DeferredLogits:
    """Deferred logits one step on; the same call leads real logits there."""
    return DeferredLogits.of(
        replace(view, before=(args[0], _step(func, args, kwargs)), place=object(), **changed)
    )


def _step(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step:
    """The same call with other logits; it holds none."""
    rest = args[1:]

    def step(logits: Tensor) -> Tensor:
        result: Tensor = func(logits, *rest, **kwargs)
        return result

    return step


def _view(view: _View, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``view`` and ``reshape`` that keep the classes last."""
    sizes = list(args[1]) if len(args) == 2 and isinstance(args[1], (tuple, list)) else args[1:]  # noqa: PLR2004 - the tensor and its sizes
    sizes = list(kwargs.get("shape", kwargs.get("size", sizes)))
    if not sizes or not all(isinstance(size, int) for size in sizes):
        return NotImplemented
    rows = view.hidden.numel() // max(view.hidden.shape[view.dim], 1)
    if sizes.count(-1) == 1:
        known = 1
        for size in sizes:
            known *= size if size != -1 else 1
        if known <= 0 or (rows * view.classes) % known:
            return NotImplemented
        sizes[sizes.index(-1)] = rows * view.classes // known
    whole = 1
    for size in sizes:
        whole *= size
    if view.dim != view.hidden.dim() - 1 or sizes[-1] != view.classes:
        return NotImplemented
    if whole != rows * view.classes:
        return NotImplemented
    hidden = view.hidden.reshape(*sizes[:-1], view.hidden.shape[-1])
    return _next(view, func, args, kwargs, hidden=hidden, dim=len(sizes) - 1)


def _flatten(view: _View, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = {**dict(zip(("start_dim", "end_dim"), args[1:], strict=False)), **kwargs}
    start = given.get("start_dim", 0) % view.hidden.dim()
    end = given.get("end_dim", -1) % view.hidden.dim()
    if start <= view.dim <= end or end < start:
        return NotImplemented
    hidden = view.hidden.flatten(start, end)
    dim = view.dim if view.dim < start else view.dim - (end - start)
    return _next(view, func, args, kwargs, hidden=hidden, dim=dim)


def _getitem(view: _View, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Indexing that takes all classes."""
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    if any(isinstance(part, Tensor) for part in index):
        return _select_rows(view, func, args, kwargs, index)
    if not all(part is None or part is ... or type(part) in {int, slice} for part in index):
        return NotImplemented
    taken = sum(part is not None and part is not ... for part in index)
    if ... in index:
        at = index.index(...)
        fill = (slice(None),) * (view.hidden.dim() - taken)
        index = (*index[:at], *fill, *index[at + 1 :])
    else:
        index = (*index, *(slice(None),) * (view.hidden.dim() - taken))
    source, made = 0, 0
    dim = None
    for part in index:
        if source == view.dim and part is not None:
            if part != slice(None):
                return NotImplemented
            dim = made
        source += part is not None
        made += type(part) is not int
    if dim is None:
        return NotImplemented
    return _next(view, func, args, kwargs, hidden=view.hidden[index], dim=dim)


def _select_rows(
    view: _View, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], index: tuple[Any, ...]
) -> Any:
    """Indexing by one tensor in front, as in ``logits[labels != -100]``."""
    first, rest = index[0], index[1:]
    if not isinstance(first, Tensor) or any(
        part not in {..., None} and part != slice(None) for part in rest
    ):
        return NotImplemented
    taken = first.dim() if first.dtype in {torch.bool, torch.uint8} else 1
    if view.dim != view.hidden.dim() - 1 or taken > view.dim or None in rest:
        return NotImplemented
    hidden = view.hidden[first]
    return _next(view, func, args, kwargs, hidden=hidden, dim=hidden.dim() - 1)


def _permute(view: _View, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Any reordering of dimensions: where a marker of its place ends up is where it goes."""
    marker = torch.empty(
        [2 if dim == view.dim else 1 for dim in range(view.hidden.dim())], device="meta"
    )
    with torch._C._DisableTorchDispatch():
        dim = list(func(marker, *args[1:], **kwargs).shape).index(2)
    return _next(view, func, args, kwargs, hidden=func(view.hidden, *args[1:], **kwargs), dim=dim)


def _same(view: _View, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What changes how logits lie in memory, and nothing else."""
    return _next(view, func, args, kwargs)


def _cast(view: _View, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Another element type."""
    known = {Tensor.float: torch.float32, Tensor.double: torch.float64}
    dtype = known.get(func)
    if dtype is None:
        given = [*args[1:], *kwargs.values()]
        dtypes = [value for value in given if isinstance(value, torch.dtype)]
        if len(given) != 1 or len(dtypes) != 1:
            return NotImplemented
        dtype = dtypes[0]
    if dtype.itemsize < view.dtype.itemsize or not dtype.is_floating_point:
        return NotImplemented
    return _next(view, func, args, kwargs, dtype=dtype)


# Losses

_INDICES = frozenset({torch.int64, torch.uint8})
"""Types of targets that torch takes for classes."""

_CROSS_ENTROPY = (
    "weight",
    "size_average",
    "ignore_index",
    "reduce",
    "reduction",
    "label_smoothing",
)


def _log_softmax(view: _View, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = ("dim", "_stacklevel", "dtype") if func is F.log_softmax else ("dim", "dtype")
    given = {**dict(zip(names, args[1:], strict=False)), **kwargs}
    dim, dtype = given.get("dim"), given.get("dtype") or view.dtype
    if dim is None or dim % view.hidden.dim() != view.dim or view.is_log:
        return NotImplemented
    if dtype.itemsize < view.dtype.itemsize:
        return NotImplemented
    return _next(view, func, args, kwargs, is_log=True, dtype=dtype)


def _loss(view: _View, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``cross_entropy``, and ``nll_loss`` of logarithms, in slices of rows."""
    given = {**dict(zip(("target", *_CROSS_ENTROPY), args[1:], strict=False)), **kwargs}
    target = given.get("target")
    if not isinstance(target, Tensor) or not _are_classes(view, target):
        return NotImplemented
    if view.is_log != (func is torchs_own(F.nll_loss)):
        return NotImplemented
    if given.get("size_average") is not None or given.get("reduce") is not None:
        return NotImplemented
    options = LossOptions(
        slices=view.whole.slices,
        dtype=_loss_dtype(view, func),
        reduction=given.get("reduction", "mean"),
        ignore_index=given.get("ignore_index", -100),
        label_smoothing=float(given.get("label_smoothing", 0.0)),
        twice=view.whole.in_script,
    )
    if options.reduction not in {"mean", "sum", "none"}:
        return NotImplemented
    hidden, called_with, weight, bias = view.whole.parts(view.hidden.movedim(view.dim, -1))
    try:
        losses = sliced_cross_entropy(
            hidden.reshape(-1, hidden.shape[-1]),
            weight,
            bias,
            target.reshape(-1),
            given.get("weight"),
            options,
            called_with,
            Way(view.whole.looks, view.way(), _step(func, args, kwargs)),
        )
    except RuntimeError as error:
        if "out of bounds" in str(error):
            _require_classes(view.classes, target, options.ignore_index)
        raise
    view.whole.sliced(func.__name__)
    return losses.reshape(target.shape) if options.reduction == "none" else losses


def _are_classes(view: _View, target: Tensor) -> bool:
    """Whether a target has a class for each row of logits, as torch takes it."""
    if isinstance(target, DeferredLogits):
        return False
    rank = view.hidden.dim()
    shape = [*view.hidden.shape[: view.dim], *view.hidden.shape[view.dim + 1 :]]
    is_second = view.dim == (1 if rank > 1 else 0)
    return is_second and list(target.shape) == shape and target.dtype in _INDICES


def _require_classes(classes: int, target: Tensor, ignored: int) -> None:
    """Refuse a target that names no class, as torch's loss does."""
    others = target[((target < 0) | (target >= classes)) & (target != ignored)]
    if others.numel():
        message = f"Target {others.flatten()[0].item()} is out of bounds."
        raise IndexError(message)


def _loss_dtype(view: _View, func: Any) -> torch.dtype:
    """Element type of the loss of real logits, which autocast may widen."""
    if view.dtype.itemsize > 2 or not torch.is_autocast_enabled(view.hidden.device.type):  # noqa: PLR2004 - bytes of a half
        return view.dtype
    sample = torch.zeros(1, 2, dtype=view.dtype, device=view.hidden.device)
    dtype: torch.dtype = func(sample, torch.zeros(1, dtype=torch.long, device=sample.device)).dtype
    return dtype


_FOLLOWED: dict[Any, _Follow] = {
    Tensor.view: _view,
    Tensor.reshape: _view,
    torch.reshape: _view,
    Tensor.flatten: _flatten,
    torch.flatten: _flatten,
    Tensor.__getitem__: _getitem,
    Tensor.transpose: _permute,
    torch.transpose: _permute,
    Tensor.swapaxes: _permute,
    Tensor.permute: _permute,
    torch.permute: _permute,
    Tensor.movedim: _permute,
    torch.movedim: _permute,
    Tensor.mT.__get__: _permute,  # type: ignore[attr-defined]
    Tensor.contiguous: _same,
    Tensor.float: _cast,
    Tensor.double: _cast,
    Tensor.to: _cast,
    Tensor.type: _cast,
    Tensor.log_softmax: _log_softmax,
    torch.log_softmax: _log_softmax,
    F.log_softmax: _log_softmax,
    F.cross_entropy: _loss,
    F.nll_loss: _loss,
}
