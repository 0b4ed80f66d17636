"""A forward of inference whose large tensors are made a strip of rows at a time.

Between two convolutions of an image stand norms, activations, sums and upsamplings, each of which
writes a tensor as large as the image; in attention, scores and probabilities are as large as the
square of the length. All of these are put off (:mod:`memfit.apply.slices.lazy_rows`), and the
convolution or product that takes them takes a strip at a time, with the rows around it that a
kernel reaches. Its result is one tensor as ever: a new one, or the memory of its input, where
nothing else holds that.

Responsible for the life of one forward: what is put off, what takes strips, whose memory is written
over, and that a value is there when it is read. Not responsible for the rules of single ops.

Sums are rounded as in another order of the same sums; nothing else changes.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from memfit.apply.borrowed import borrowed
from memfit.apply.proven_ops import LeftProof
from memfit.apply.replaced import replaced
from memfit.apply.slices.lazy_rows import (
    MOST_STEPS,
    ROWS,
    Value,
    aten,
    of_functional,
    on_meta,
    rule_of,
)
from memfit.errors import UsageError

LEAST_ROWS = 8
"""Rows of a strip, at least: what a kernel reaches beyond them is computed twice."""


class Strips:
    """Carries out a forward in strips.

    Attributes:
        calls: Convolutions and products that took strips in the last forward.
        asked_again: Those of them, by number, after which somebody asked for what they had written
            over; only while recording, since a forward that computes stops there.
        divergence: Why the last forward had to stop, as a sentence; empty if it did not.
    """

    def __init__(self, model: nn.Module, strips: Mapping[str, Any], *, records: bool) -> None:
        """Prepare; nothing is installed before :meth:`forward`.

        Args:
            model: The model.
            strips: ``Strips`` of the plan as parsed JSON.
            records: Whether the forward only records, on fake tensors.

        Raises:
            UsageError: It is no such thing.
        """
        try:
            self.most, self.least_bytes = int(strips["strips"]), int(strips["least_bytes"])
            self.kept = frozenset(int(call) for call in strips.get("kept", ()))
        except (KeyError, TypeError, ValueError) as error:
            message = f"the plan's `chunk` action is malformed: {error!r}"
            raise UsageError(message) from error
        if self.most < 1:
            message = f"the plan computes images in `{self.most}` strips"
            raise UsageError(message)
        self._held = weakref.ref(model)
        self._records = records
        self.calls = 0
        self.asked_again: set[int] = set()
        self.divergence = ""

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Run one forward inside this.

        Raises:
            LeftProof: The forward asked for what was written over, as it did not when it was
                recorded; its results so far are of no use.
        """
        self.calls, self.asked_again, self.divergence = 0, set(), ""
        grad = torch.is_grad_enabled()
        run = borrowed(self._held).forward

        def whole(*args: Any, **kwargs: Any) -> Any:
            return materialized(run(*args, **kwargs))

        # In inference mode other ops are seen than in the recording.
        with (
            torch.inference_mode(mode=False),
            torch.set_grad_enabled(grad),
            replaced(borrowed(self._held), whole),
        ):
            mode = _InStrips(self)
            with mode:
                try:
                    yield
                except BaseException:
                    mode.forget()
                    raise
                mode.finish()

    def asked(self, call: int) -> None:
        """Somebody asks for what a call has written over."""
        if not self._records:
            self.divergence = "it uses again what its plan has written over"
            raise LeftProof(self.divergence)
        self.asked_again.add(call)


class LazyTensor(Tensor):
    """Stands for a tensor that is put off; reading it computes the tensor."""

    _value: Value
    _mode: _InStrips

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(value: Value, device: torch.device, mode: _InStrips) -> LazyTensor:
        """Make one."""
        made: LazyTensor = Tensor._make_wrapper_subclass(
            LazyTensor, value.shape, value.strides, dtype=value.dtype, device=device
        )
        made._value = value
        made._mode = mode
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """An op outside the forward."""
        args, kwargs = materialized((args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, **_kwargs: Any) -> str:  # type: ignore[override]
        """Say what this is without computing it."""
        return f"LazyTensor(shape={tuple(self.shape)}, dtype={self.dtype})"


def _of_tensor(name: str) -> Any:
    """A method of the tensor that is stood for: they look at memory without an op."""

    def method(self: LazyTensor, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._mode.real(self), name)(*args, **kwargs)

    return method


for _name in ("numpy", "tolist", "data_ptr", "untyped_storage", "__array__", "__dlpack__"):
    setattr(LazyTensor, _name, _of_tensor(_name))


def materialized(result: Any) -> Any:
    """The same nest of values with tensors in place of what stands for them."""
    return tree_map_only(LazyTensor, lambda it: it._mode.real(it), result)


class _InStrips(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Puts ops off while entered."""

    def __init__(self, strips: Strips) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._strips = strips
        self._live: dict[int, weakref.ref[LazyTensor]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Put an op off, run it in strips, or run it on what there is by then."""
        kwargs = kwargs or {}
        if not torch.is_grad_enabled():
            if func._schema.is_mutable:
                if self._in_place(func, args, kwargs):
                    return args[0]
            else:
                taken = self._in_strips(func, args, kwargs)
                if taken is not None:
                    return taken
                made = self._put_off(func, args, kwargs)
                if made is not None:
                    return made
        args, kwargs = tree_map_only(LazyTensor, self.real, (args, kwargs))
        return func(*args, **kwargs)

    # What is put off

    def _put_off(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What stands for the result of an op; ``None`` where it is not put off."""
        rule = rule_of(func)
        tensors = [it for it in tree_leaves((args, kwargs)) if isinstance(it, Tensor)]
        if rule is None or not tensors or not self._may_be_large(tensors):
            return None
        device = max(tensors, key=lambda it: it.dim()).device
        if func is aten.native_group_norm.default:
            if not self._is_worth(tuple(args[0].shape), args[0].dtype):
                return None
            args = (materialized(args[0]), *args[1:])
        made = rule(func, args, kwargs, self._value)
        if made is None:
            return None
        value, others = made
        if value.depth > MOST_STEPS or not self._is_worth(value.shape, value.dtype):
            return None
        stand_in = self._stand_in(value, device)
        return (stand_in, *others) if others else stand_in

    def _may_be_large(self, tensors: list[Tensor]) -> bool:
        """Whether what an op makes may be worth it; products make more than they take."""
        most = max(t.numel() // _items(t.shape) for t in tensors)
        rows = max((t.shape[ROWS] for t in tensors if t.dim() > 1), default=0)
        return rows >= 2 * LEAST_ROWS and most * most >= self._strips.least_bytes

    def _is_worth(self, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        size = torch.Size(shape).numel() * dtype.itemsize
        least = self._strips.least_bytes * _items(shape)
        return shape[ROWS] >= 2 * LEAST_ROWS and size >= least

    def _stand_in(self, value: Value, device: torch.device) -> LazyTensor:
        made = LazyTensor.of(value, device, self)
        key = id(made)
        self._live[key] = weakref.ref(made, lambda _: self._live.pop(key, None))
        return made

    def _value(self, tensor: Tensor) -> Value:
        if not isinstance(tensor, LazyTensor):
            return Value.of(tensor)
        value = tensor._value
        if value.overwritten is not None:
            self._strips.asked(value.overwritten)
            # Recording goes on, and whatever is computed: in the next one it is not written over.
            value.tensor, value.overwritten = torch.empty_like(tensor), None
        return value

    def _in_place(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a write was put off: to a value that is, and that nothing else is made of."""
        written = [
            tensor
            for argument, tensor in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        first, plain = args[0] if args else None, of_functional(func)
        if isinstance(first, LazyTensor) and first._value.step is not None and plain is not None:
            value = self._value(first)
            base = value.base()
            is_shared = base.tensor is not None or any(
                _is_made_of(other, base) for other in self._others(value)
            )
            rule = rule_of(plain)
            if len(written) == 1 and rule is not None and not is_shared:
                made = rule(plain, args, kwargs, self._value)
                same = made is not None and (made[0].shape, made[0].dtype) == (
                    value.shape,
                    value.dtype,
                )
                if made is not None and same and made[0].depth <= MOST_STEPS:
                    first._value = made[0]
                    return True
        self._before_write([*tree_leaves(written), *kwargs.values()])
        return False

    def _before_write(self, written: list[Any]) -> None:
        """Make what is made of memory that is about to be written to."""
        stored = {
            tensor.untyped_storage()._cdata
            for tensor in map(materialized, written)
            if isinstance(tensor, Tensor)
        }
        for stand_in in self._alive():
            leaves = stand_in._value.leaves()
            storages = (
                it.tensor.untyped_storage()._cdata for it in leaves if it.tensor is not None
            )
            if stand_in._value.step is not None and not stored.isdisjoint(storages):
                self.real(stand_in)

    # What takes strips

    def _in_strips(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """The result of an op on a value that is put off; ``None`` where it takes no strips."""
        first = args[0] if args else None
        if not isinstance(first, LazyTensor) or first._value.step is None:
            return None
        if func is aten.convolution.default:
            return self._convolution(first, args)
        if func in {aten.bmm.default, aten.mm.default}:
            made = on_meta(func, args, kwargs, self._value)
            if made.shape[-1] <= first.shape[-1] and not isinstance(args[1], LazyTensor):
                value = self._value(first)
                return self._taken(
                    value, made, lambda start, stop: func(value.rows(start, stop), args[1])
                )
        return None

    def _convolution(self, first: LazyTensor, args: tuple[Any, ...]) -> Tensor | None:
        _, weight, bias, stride, padding, dilation, transposed, output_padding, groups = args
        value = self._value(first)
        if transposed or len(value.shape) != 4 or padding[0] > LEAST_ROWS:  # noqa: PLR2004 - an image
            return None
        made = on_meta(aten.convolution.default, args, {}, self._value)
        if made.shape[ROWS] < 2 * LEAST_ROWS:
            return None
        reach = dilation[0] * (weight.shape[2] - 1) + 1
        height = value.shape[ROWS]

        def take(start: int, stop: int) -> Tensor:
            low = start * stride[0] - padding[0]
            high = (stop - 1) * stride[0] - padding[0] + reach
            above, below = max(-low, 0), max(high - height, 0)
            piece = value.rows(max(low, 0), min(high, height))
            if above or below:
                piece = aten.constant_pad_nd.default(piece, [0, 0, above, below], 0.0)
            return piece

        def convolve(piece: Tensor) -> Tensor:
            sides = [0, padding[1]]
            result: Tensor = aten.convolution.default(
                piece, weight, bias, stride, sides, dilation, transposed, output_padding, groups
            )
            return result

        is_aligned = stride[0] == 1 and made.shape[ROWS] == height
        return self._taken(value, made, take, convolve, may_overwrite=is_aligned)

    def _taken(
        self,
        value: Value,
        made: Tensor,
        take: Any,
        compute: Any = None,
        *,
        may_overwrite: bool = False,
    ) -> Tensor:
        """The result of a call that takes strips, each before the one above it is written.

        Args:
            value: What it takes.
            made: Its result, without memory, but for its memory format.
            take: What it takes for a range of rows of the result.
            compute: What it makes of that; ``None`` for that itself.
            may_overwrite: Whether rows of the result need rows of the value around them alone.
        """
        call = self._strips.calls
        self._strips.calls += 1
        ranges = self._ranges(made.shape[ROWS])
        compute = compute or (lambda piece: piece)
        piece = take(*ranges[0])
        # What comes first may be of another memory format than anybody knew before.
        strip = compute(piece)
        like = _as_large(strip, tuple(made.shape))
        target = None
        if may_overwrite and call not in self._strips.kept:
            target = self._free(value, like)
        out = like.empty(strip.device) if target is None else target
        for index, (start, stop) in enumerate(ranges):
            if index:
                strip = compute(piece)
            del piece
            # The next strip reaches into rows that this one may be written over.
            nearest = ranges[index + 1] if index + 1 < len(ranges) else None
            piece = take(*nearest) if nearest and target is not None else None
            out.narrow(ROWS, start, stop - start).copy_(strip)
            del strip
            piece = take(*nearest) if nearest and target is None else piece
        if target is not None:
            value.overwritten, value.step = call, None
        return out

    def _ranges(self, rows: int) -> list[tuple[int, int]]:
        """Strips of so many rows."""
        each = max(-(-rows // self._strips.most), LEAST_ROWS)
        return [(start, min(start + each, rows)) for start in range(0, rows, each)]

    # Values that are read

    def real(self, stand_in: LazyTensor) -> Tensor:
        """The tensor that one stands for, made now if it is not there."""
        return self._made(self._value(stand_in), stand_in.device)

    def _made(self, value: Value, device: torch.device) -> Tensor:
        if value.tensor is not None:
            return value.tensor
        step = value.step
        assert step is not None, "a value is there or can be made"
        if step.view is not None:
            value.tensor = step.view(self._made(step.inputs[0], device))
        else:
            out = self._free(value, value) if _is_aligned(value) else None
            if out is None:
                out = value.empty(device)
            for start, stop in self._ranges(value.shape[ROWS]):
                out.narrow(ROWS, start, stop - start).copy_(value.rows(start, stop))
            value.tensor = out
        value.step, value.depth = None, 0
        return value.tensor

    def finish(self) -> None:
        """Make all that is still put off and that somebody holds."""
        for stand_in in self._alive():
            if stand_in._value.overwritten is None:
                self.real(stand_in)

    def forget(self) -> None:
        """Let go of everything, after an error."""
        self._live.clear()

    # Whose memory is free

    def _alive(self) -> list[LazyTensor]:
        held = (reference() for reference in list(self._live.values()))
        return [stand_in for stand_in in held if stand_in is not None]

    def _others(self, value: Value) -> Iterator[Value]:
        """Values that others hold."""
        for stand_in in self._alive():
            if stand_in._value is not value and stand_in._value.overwritten is None:
                yield stand_in._value

    def _free(self, value: Value, like: Value) -> Tensor | None:
        """Memory that a value is made of, that nothing else holds, and that a result fits."""
        leaves = {id(leaf): leaf for leaf in value.leaves()}
        for leaf in leaves.values():
            kind = (leaf.shape, leaf.strides, leaf.dtype)
            if kind != (like.shape, like.strides, like.dtype):
                continue
            number = sum(other.tensor is leaf.tensor for other in leaves.values())
            if any(_has_leaf(other, leaf) for other in self._others(value)):
                continue
            if _is_held_by(leaf, number):
                return leaf.tensor
        return None


def _items(shape: Sequence[int]) -> int:
    """Items of a batch of images; of anything else, which may count heads too, one."""
    return max(shape[0], 1) if len(shape) == 4 else 1  # noqa: PLR2004 - an image


def _holders(leaf: Value) -> tuple[int, int, int]:
    """How many hold a leaf's tensor in Python and beneath, and its memory."""
    tensor = leaf.tensor
    assert tensor is not None
    storage = tensor.untyped_storage()
    memory = torch._C._storage_Use_Count(storage._cdata)
    return sys.getrefcount(tensor), tensor._use_count(), memory


_ALONE = _holders(Value.of(torch.empty(1)))
"""What they are where one value alone holds the tensor."""


def _is_held_by(leaf: Value, values: int) -> bool:
    """Whether so many values alone hold a leaf's tensor, and it alone its memory."""
    tensor = leaf.tensor
    assert tensor is not None
    own = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    objects, references, memory = _ALONE
    del tensor
    return own and _holders(leaf) == (objects + values - 1, references, memory)


def _has_leaf(value: Value, leaf: Value) -> bool:
    return any(other.tensor is leaf.tensor for other in value.leaves())


def _is_made_of(value: Value, other: Value) -> bool:
    """Whether a value is made of another, or is it."""
    if value is other:
        return True
    return value.step is not None and any(_is_made_of(it, other) for it in value.step.inputs)


def _as_large(strip: Tensor, shape: tuple[int, ...]) -> Value:
    """A value in the memory format of a strip."""
    is_last = strip.dim() == 4 and not strip.is_contiguous()  # noqa: PLR2004 - an image
    with torch._C._DisableTorchDispatch():
        form = torch.channels_last if is_last else torch.contiguous_format
        return Value.of(torch.empty(shape, dtype=strip.dtype, device="meta", memory_format=form))


def _is_aligned(value: Value) -> bool:
    """Whether each row of a value is made of the same rows of what exists, and no others."""
    step = value.step
    return step is None or (step.reach is None and all(_is_aligned(it) for it in step.inputs))
