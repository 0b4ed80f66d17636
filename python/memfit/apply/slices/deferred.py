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
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from memfit.apply.slices.sliced_loss import LossOptions, sliced_cross_entropy
from memfit.apply.slices.weight_copies import Linear, WeightsBefore

Told = Callable[[str], None]
"""Told what happened, as a word or two."""


@dataclass(frozen=True, slots=True)
class Autocast:
    """The autocast state that a linear layer was called under.

    Attributes:
        device: Kind of device.
        dtype: What it computes in; ``None`` where autocast is off.
    """

    device: str
    dtype: torch.dtype | None

    @staticmethod
    def of(tensor: Tensor) -> Autocast:
        """The state now, on the device of a tensor."""
        kind = tensor.device.type
        if not torch.is_autocast_enabled(kind) or tensor.dtype is torch.float64:
            return Autocast(kind, None)
        return Autocast(kind, torch.get_autocast_dtype(kind))

    def again(self) -> torch.autocast:
        """A context with that state."""
        return torch.autocast(self.device, self.dtype, enabled=self.dtype is not None)


class Whole:
    """The whole logits of one call of the head, computed at most once.

    Attributes:
        slices: Into how many slices a loss is cut; 0 where no loss is, and who looks at some rows
            gets those alone.
        sliced: Told about each loss that is computed in slices, and of rows that are alone.
        in_script: As of :class:`memfit.apply.slices.chunk.ChunkedLoss`.
    """

    def __init__(
        self,
        linear: Linear,
        slices: int,
        sliced: Told,
        whole: Told,
        *,
        in_script: bool = False,
    ) -> None:
        """Put off a call of ``F.linear``.

        Args:
            linear: Its input, weight and bias.
            slices: As the attribute.
            sliced: As the attribute.
            whole: Told who needs the logits whole, once.
            in_script: As the attribute.
        """
        self.slices, self.in_script = slices, in_script
        self.sliced = sliced
        self._given = WeightsBefore(linear, copies=in_script)
        self._autocast = Autocast.of(linear[0])
        self._grad = torch.is_grad_enabled()
        self._dtype = self._autocast.dtype or linear[0].dtype
        tensors = [it for it in linear if it is not None]
        self._requires_grad = self._grad and any(it.requires_grad for it in tensors)
        self._whole = whole
        self._computed: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the logits."""
        return self._dtype

    @property
    def requires_grad(self) -> bool:
        """Whether the logits have a graph."""
        return self._requires_grad

    def parts(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """What the loss in slices is computed from, hidden values in the type of the logits."""
        _, weight, bias = self._given.linear()
        return hidden.to(self.dtype), weight, bias

    def rows(self, hidden: Tensor) -> Tensor | None:
        """Logits of some rows; ``None`` where they are all, or not to be computed alone.

        Args:
            hidden: Their features, in the last dimension.
        """
        if self.slices or self._computed is not None:
            return None
        given, weight, bias = self._given.linear()
        if hidden.numel() >= given.numel():
            return None
        self.sliced("rows")
        with torch.set_grad_enabled(self._grad), self._autocast.again():
            return F.linear(hidden, weight, bias)

    def computed(self, who: str) -> Tensor:
        """The logits as the model would have had them."""
        if self._computed is None:
            self._whole(who)
            with torch.set_grad_enabled(self._grad), self._autocast.again():
                self._computed = F.linear(*self._given.linear())
        return self._computed


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
    """

    whole: Whole
    hidden: Tensor
    classes: int
    dim: int
    dtype: torch.dtype
    is_log: bool = False
    before: tuple[DeferredLogits, Callable[[Tensor], Tensor]] | None = None

    @property
    def shape(self) -> list[int]:
        shape = list(self.hidden.shape)
        shape[self.dim] = self.classes
        return shape

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

    @staticmethod
    def of(view: _View) -> DeferredLogits:
        """Make one."""
        needs_grad = view.whole.requires_grad
        made: DeferredLogits = Tensor._make_wrapper_subclass(
            DeferredLogits,
            view.shape,
            dtype=view.dtype,
            device=view.hidden.device,
            requires_grad=needs_grad,
        )
        made._view, made._real = view, None
        if needs_grad:
            with torch._C.DisableTorchFunctionSubclass():
                made.register_post_accumulate_grad_hook(_go_on)  # type: ignore[no-untyped-call]
        return made

    @staticmethod
    def put_off(whole: Whole, hidden: Tensor, classes: int) -> DeferredLogits:
        """Deferred logits of a call of the head."""
        dim = hidden.dim() - 1
        return DeferredLogits.of(_View(whole, hidden, classes, dim, whole.dtype))

    def _computed(self, who: str) -> Tensor:
        """The logits that it stands for."""
        if self._real is None:
            view = self._view
            made = None if self._follows_real() else view.rows()
            if made is None and view.before is None:
                made = view.whole.computed(who)
            elif made is None and view.before is not None:
                before, step = view.before
                given = before._computed(who)
                with torch.set_grad_enabled(view.whole.requires_grad):
                    made = step(given)
            self._real = made
        assert self._real is not None, "rows, all logits, or what is made from others"
        return self._real

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
        kwargs = kwargs or {}
        if func in _ABOUT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        follow = _FOLLOWED.get(func)
        given = args[0] if args else None
        if follow and isinstance(given, DeferredLogits) and not given._follows_real():
            found = follow(given._view, func, args, kwargs)
            if found is not NotImplemented:
                return found
        name = getattr(func, "__name__", str(func))
        args, kwargs = _real((args, kwargs), name)
        return func(*args, **kwargs)

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
            return repr(self._computed("repr"))
        return f"DeferredLogits(shape={tuple(self._view.shape)}, dtype={self._view.dtype})"


def _go_on(logits: Any) -> None:
    """Take a gradient on to the real logits: a function of autograd's own does not ask for them."""
    with torch._C.DisableTorchFunctionSubclass():
        gradient, logits.grad = logits.grad, None
    real = logits._computed("an autograd function")
    torch.autograd.backward(real, gradient, retain_graph=True)


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
        return value._computed(who)
    if isinstance(value, (tuple, list)) and type(value) in {tuple, list}:
        return type(value)(_real(item, who) for item in value)
    if isinstance(value, dict):
        return {key: _real(item, who) for key, item in value.items()}
    return value


# What is known without the logits

_ABOUT = frozenset(
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


# What changes only the shape

_Follow = Callable[[_View, Any, tuple[Any, ...], dict[str, Any]], Any]


def _next(
    view: _View, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], **changed: Any
) -> DeferredLogits:
    """Deferred logits one step on; the same call leads real logits there."""

    def step(logits: Tensor) -> Tensor:
        result: Tensor = func(logits, *args[1:], **kwargs)
        return result

    return DeferredLogits.of(replace(view, before=(args[0], step), **changed))


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
    if view.is_log != (func is F.nll_loss) or not isinstance(target, Tensor):
        return NotImplemented
    if target.is_floating_point() or isinstance(target, DeferredLogits):
        return NotImplemented
    if given.get("size_average") is not None or given.get("reduce") is not None:
        return NotImplemented
    rank = view.hidden.dim()
    shape = [*view.hidden.shape[: view.dim], *view.hidden.shape[view.dim + 1 :]]
    if view.dim != (1 if rank > 1 else 0) or list(target.shape) != shape:
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
    view.whole.sliced(func.__name__)
    hidden, weight, bias = view.whole.parts(view.hidden.movedim(view.dim, -1))
    losses = sliced_cross_entropy(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        bias,
        target.reshape(-1),
        given.get("weight"),
        options,
    )
    return losses.reshape(target.shape) if options.reduction == "none" else losses


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
