"""Values that are put off: what they are, and how some of their rows are computed.

A value's *rows* are what its last dimension but one counts: rows of an image's pixels, queries of
attention. A value that is put off is known by a :class:`Step` from other values, and any range of
its rows follows from a range of theirs. So a convolution, or the product that ends attention, can
take it a strip of rows at a time, and it never exists as a whole.

Responsible for values and for the rules by which ops are put off. Not responsible for when that is
done, for what takes strips, nor for whose memory results are written to
(:mod:`memfit.apply.slices.strips`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten

ROWS = -2
"""The dimension of rows."""

_IMAGE = 4
"""Dimensions of images: items, channels, rows, columns."""

MOST_STEPS = 24
"""Steps from what exists to a value, at most; they are one recursion."""


@dataclass(frozen=True, slots=True)
class Step:
    """How rows of a value follow from rows of others.

    Attributes:
        inputs: The values.
        make: Makes rows of the value from rows of each input.
        reach: Which rows of the inputs a range of rows needs; ``None`` for the same.
        crop: Rows that ``make`` makes before those that are asked for, for a range of rows.
        view: Makes the whole value from the whole first input, where it shows the same memory.
    """

    inputs: tuple[Value, ...]
    make: Callable[[list[Tensor]], Tensor]
    reach: Callable[[int, int], tuple[int, int]] | None = None
    crop: Callable[[int], int] | None = None
    view: Callable[[Tensor], Tensor] | None = None


class Value:
    """A tensor, or what stands for one.

    Attributes:
        shape: Its sizes.
        dtype: Its element type.
        strides: The strides of the tensor.
        tensor: The tensor; ``None`` while it is put off.
        step: How it is made; ``None`` once it is there.
        depth: Steps from tensors that exist.
        overwritten: The call that wrote its result over what this is made of, by its number; then
            it cannot be read again.
    """

    __slots__ = ("depth", "dtype", "overwritten", "shape", "step", "strides", "tensor")

    def __init__(self, like: Tensor, of: Tensor | Step) -> None:
        """Describe one.

        Args:
            like: A tensor of its kind, with or without memory.
            of: The tensor, or how it is made.
        """
        self.shape = tuple(like.shape)
        self.dtype = like.dtype
        self.strides = tuple(like.stride())
        self.overwritten: int | None = None
        self.tensor: Tensor | None = None
        self.step: Step | None = None
        self.depth = 0
        if isinstance(of, Step):
            self.step = of
            self.depth = 1 + max(value.depth for value in of.inputs)
        else:
            self.tensor = of

    @staticmethod
    def of(tensor: Tensor) -> Value:
        """A tensor that exists."""
        return Value(tensor, tensor)

    def rows(self, start: int, stop: int) -> Tensor:
        """Some rows.

        Args:
            start: The first.
            stop: The one after the last.
        """
        if self.tensor is not None:
            return self.tensor.narrow(ROWS, start, stop - start)
        step = self.step
        assert step is not None, "a value is there or can be made"
        low, high = (start, stop) if step.reach is None else step.reach(start, stop)
        made = step.make([value.rows(low, high) for value in step.inputs])
        return made if step.crop is None else made.narrow(ROWS, step.crop(start), stop - start)

    def empty(self, device: torch.device | str) -> Tensor:
        """A tensor of its kind, on a device."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)

    def base(self) -> Value:
        """The value whose memory this shows; itself unless it is a view."""
        is_view = self.step is not None and self.step.view is not None
        return self.step.inputs[0].base() if is_view and self.step else self

    def leaves(self) -> Iterator[Value]:
        """The values that exist and that it is made of, each as often as it is used."""
        if self.step is None:
            yield self
        else:
            for value in self.step.inputs:
                yield from value.leaves()


Made = tuple[Value, tuple[Tensor, ...]]
"""A value that is put off, and what else its op returns."""

Rule = Callable[[Any, tuple[Any, ...], dict[str, Any], Callable[[Tensor], Value]], Made | None]
"""Puts an op off: the op, its arguments, and the value of a tensor; ``None`` where it cannot."""


def rule_of(func: Any) -> Rule | None:
    """The rule for an op; ``None`` where there is none."""
    found = _RULES.get(func.overloadpacket)
    if found is not None:
        return found
    tags, results = func.tags, func._schema.returns
    random = torch.Tag.nondeterministic_seeded in tags
    return _pointwise if torch.Tag.pointwise in tags and not random and len(results) == 1 else None


def of_functional(func: Any) -> Any:
    """The op that computes what an in-place op does; ``None`` where there is none."""
    packet = func.overloadpacket.__name__
    packet = getattr(aten, packet[:-1], None) if packet.endswith("_") else None
    return getattr(packet, func._overloadname, None)


def on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], of: Any) -> Any:
    """What an op returns, without memory."""

    def empty(tensor: Tensor) -> Tensor:
        made: Tensor = of(tensor).empty("meta")
        return made

    with torch._C._DisableTorchDispatch():
        args, kwargs = tree_map_only(Tensor, empty, (args, kwargs))
        return func(*args, **kwargs)


# The rules


def _is_ordinary(made: Any) -> bool:
    """Whether a result is a tensor with rows, in a memory format that strips can be put into."""
    if not isinstance(made, Tensor) or made.dim() < 2:  # noqa: PLR2004 - rows of something
        return False
    return made.is_contiguous() or (
        made.dim() == _IMAGE and made.is_contiguous(memory_format=torch.channels_last)
    )


def _is_image(value: Value) -> bool:
    return len(value.shape) == _IMAGE


def _pointwise(func: Any, args: Any, kwargs: Any, of: Any) -> Made | None:
    """Ops whose elements each follow from those at the same place."""
    made = on_meta(func, args, kwargs, of)
    if not _is_ordinary(made):
        return None
    rows = made.shape[ROWS]
    inputs: list[Value] = []
    places: list[int] = []
    for place, arg in enumerate(args):
        if isinstance(arg, Tensor) and arg.dim() > 1 and arg.shape[ROWS] == rows:
            inputs.append(of(arg))
            places.append(place)
        elif isinstance(arg, (list, tuple)) and any(isinstance(it, Tensor) for it in arg):
            return None
    if not any(value.shape == tuple(made.shape) for value in inputs):
        return None
    if any(of(tensor).tensor is None for tensor in _others(args, places)):
        return None
    # What is broadcast along rows stays as it is; what has rows comes with the strip.
    rest = [None if place in places else arg for place, arg in enumerate(args)]

    def make(pieces: list[Tensor]) -> Tensor:
        given = list(rest)
        for place, piece in zip(places, pieces, strict=True):
            given[place] = piece
        result: Tensor = func(*given, **kwargs)
        return result

    return Value(made, Step(tuple(inputs), make)), ()


def _others(args: Any, places: list[int]) -> Iterator[Tensor]:
    """Tensors at other places."""
    for place, arg in enumerate(args):
        if isinstance(arg, Tensor) and place not in places:
            yield arg


def _copy(func: Any, args: Any, kwargs: Any, of: Any) -> Made | None:
    """A copy in the same order of elements, perhaps in another type."""
    known = {"dtype", "memory_format", "non_blocking"}
    if any(kwargs[key] is not None and key not in known for key in kwargs):
        return None
    return _pointwise(func, args, kwargs, of)


def _view(func: Any, args: Any, kwargs: Any, of: Any) -> Made | None:
    """Other leading dimensions."""
    value = of(args[0])
    made = on_meta(func, args, kwargs, of)
    shape = tuple(made.shape)
    if value.tensor is not None or shape[ROWS:] != value.shape[ROWS:]:
        return None
    if made.numel() != torch.Size(value.shape).numel() or not made.is_contiguous():
        return None

    def make(pieces: list[Tensor]) -> Tensor:
        (piece,) = pieces
        return piece.reshape(*shape[:ROWS], *piece.shape[ROWS:])

    def view(whole: Tensor) -> Tensor:
        result: Tensor = func(whole, *args[1:], **kwargs)
        return result

    return Value(made, Step((value,), make, view=view)), ()


def _cat(func: Any, args: Any, kwargs: Any, of: Any) -> Made | None:
    """Tensors beside each other, with as many rows in each."""
    values = tuple(of(tensor) for tensor in args[0])
    made = on_meta(func, args, kwargs, of)
    if not _is_ordinary(made):
        return None
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0) % made.dim()
    same = {(len(it.shape), it.shape[ROWS:][:1], it.dtype) for it in values}
    if dim == made.dim() + ROWS or len(same) > 1:
        return None
    return Value(made, Step(values, lambda pieces: torch.cat(pieces, dim))), ()


def _nearest(func: Any, args: Any, kwargs: Any, of: Any) -> Made | None:
    """An image whose pixels each become as many."""
    value = of(args[0])
    made = on_meta(func, args, kwargs, of)
    (height, width), size = value.shape[ROWS:], made.shape[ROWS:]
    times = size[0] // height, size[1] // width
    whole = (times[0] * height, times[1] * width) == tuple(size) and min(times) > 0
    scales = [arg for arg in (*args[2:], *kwargs.values()) if arg is not None]
    given = [scale for some in scales for scale in (some if isinstance(some, list) else [some])]
    if not whole or any(scale not in times for scale in given) or not _is_ordinary(made):
        return None

    def make(pieces: list[Tensor]) -> Tensor:
        (piece,) = pieces
        result: Tensor = aten.upsample_nearest2d.default(
            piece, [piece.shape[ROWS] * times[0], width * times[1]]
        )
        return result

    step = Step(
        (value,),
        make,
        reach=lambda start, stop: (start // times[0], -(-stop // times[0])),
        crop=lambda start: start % times[0],
    )
    return Value(made, step), ()


def _group_norm(_func: Any, args: Any, _kwargs: Any, of: Any) -> Made | None:
    """Normalised groups of channels: their means and deviations are of the whole image."""
    given, weight, bias, items, channels, _, groups, eps = args
    value = of(given)
    each = channels // groups
    if value.tensor is None or not _is_image(value) or not _is_ordinary(value.tensor):
        return None
    grouped = value.tensor.view(items, groups, each, *value.shape[ROWS:])
    exact = torch.float64 if value.dtype is torch.float64 else torch.float32
    variance, mean = torch.var_mean(grouped, (2, 3, 4), correction=0)
    variance, mean = variance.to(exact), mean.to(exact)
    deviation = torch.rsqrt(variance + eps)
    scale = deviation.repeat_interleave(each, 1)
    shift = -(mean * deviation).repeat_interleave(each, 1)
    if weight is not None:
        scale, shift = scale * weight, shift * weight
    if bias is not None:
        shift = shift + bias
    return _scaled(value, scale, shift), (mean, deviation)


def _batch_norm(func: Any, args: Any, _kwargs: Any, of: Any) -> Made | None:
    """Normalised channels by means and deviations that are known."""
    given, weight, bias, mean, variance, *more = args
    trains = (
        more[0] if func.overloadpacket is not aten._native_batch_norm_legit_no_training else False
    )
    value = of(given)
    if trains or mean is None or not _is_image(value):
        return None
    if value.tensor is not None and not _is_ordinary(value.tensor):
        return None
    scale = torch.rsqrt(variance + more[-1])
    if weight is not None:
        scale = scale * weight
    shift = -mean * scale
    if bias is not None:
        shift = shift + bias
    none = given.new_empty(0)
    return _scaled(value, scale[None], shift[None]), (none, none)


def _scaled(value: Value, scale: Tensor, shift: Tensor) -> Value:
    """A value times one number for each channel, plus another."""
    scale, shift = scale[..., None, None], shift[..., None, None]

    def make(pieces: list[Tensor]) -> Tensor:
        (piece,) = pieces
        return torch.addcmul(shift, piece.to(shift.dtype), scale).to(value.dtype)

    with torch._C._DisableTorchDispatch():
        like = value.empty("meta")
    return Value(like, Step((value,), make))


def _softmax(func: Any, args: Any, kwargs: Any, of: Any) -> Made | None:
    """A softmax within rows."""
    value = of(args[0])
    if args[1] not in {-1, len(value.shape) - 1}:
        return None
    made = on_meta(func, args, kwargs, of)
    if not _is_ordinary(made):
        return None
    step = Step((value,), lambda pieces: func(pieces[0], *args[1:], **kwargs))
    return Value(made, step), ()


def _product(func: Any, args: Any, kwargs: Any, of: Any) -> Made | None:
    """A product that has more columns than its rows have."""
    left, right = args
    value = of(left)
    made = on_meta(func, args, kwargs, of)
    factor = of(right).tensor
    if made.shape[-1] <= value.shape[-1] or factor is None or not _is_ordinary(made):
        return None
    step = Step((value,), lambda pieces: func(pieces[0], factor))
    return Value(made, step), ()


_RULES: dict[Any, Rule] = {
    # Element-wise, and not tagged so.
    aten.hardswish: _pointwise,
    aten._prelu_kernel: _pointwise,
    aten.masked_fill: _pointwise,
    aten._to_copy: _copy,
    aten.clone: _copy,
    aten.view: _view,
    aten._unsafe_view: _view,
    aten.unsqueeze: _view,
    aten.squeeze: _view,
    aten.expand: _view,
    aten.detach: _view,
    aten.alias: _view,
    aten.cat: _cat,
    aten.upsample_nearest2d: _nearest,
    aten.native_group_norm: _group_norm,
    aten.native_batch_norm: _batch_norm,
    aten.cudnn_batch_norm: _batch_norm,
    aten._native_batch_norm_legit_no_training: _batch_norm,
    aten._softmax: _softmax,
    aten._safe_softmax: _softmax,
    aten.bmm: _product,
    aten.mm: _product,
}
