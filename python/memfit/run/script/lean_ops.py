"""Ops in pieces, where the memory that they take inside is a large part of the budget.

Torch's convolutions on the CPU copy what they read and write into an order of their own: a second
time the input and the output, for the whole batch at once. Normalisation's backward makes its
result twice. Piece by piece it is as much less, in about the same time. Responsible for which ops
run so, and for their results. Not responsible for the batch of a whole model
(:mod:`memfit.run.script.pieces`), which normalisations over the batch forbid.

Whole ops come first: they run in pieces once one has lacked room while a step was recorded, or no
plan of whole ones fits.

Items of a batch do not mix in a convolution, nor channels in a normalisation. A batch of one is cut
in space: a piece of the rows, with those around it that the kernel reaches. But torch may choose
another algorithm for less, and the weights' gradient is summed in another order: the results are
equivalent, not the same.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from memfit import _native
from memfit.run.script.contexts import entered
from memfit.run.script.request import FitRequest
from memfit.tensors.as_without_modes import Formulas
from memfit.tensors.gradient_sums import GradientSums

LEAST_ITEMS = 2
"""A batch of one often gets an algorithm of its own."""

LEAST_ROWS = 4
"""Fewer rows of an image, or planes of a volume, would read mostly what their neighbours do."""

ENOUGH_PASSES = 4
"""After so many without such an op the ops of a model are no longer searched for one, until a step
of it is recorded anew."""

_PART = 1 / 32
"""Part of the budget that a piece may take inside."""

_WEIGHTS_PART = 1 / 4
"""Part of the budget that the copies for the weights' gradient may take, for which all pieces would
have to be summed."""

IN_PIECES = "large convolutions and normalisations run in pieces, which may change rounding"
"""What is said at the end where some did."""

_FORWARD = torch.ops.aten.convolution.default
_BACKWARD = torch.ops.aten.convolution_backward.default
_OF_NORM = torch.ops.aten.native_batch_norm_backward.default
_LARGE = frozenset((_FORWARD, _BACKWARD, _OF_NORM))
_IMAGES = 4
"""Dimensions of a batch of images; volumes have one more."""

_KINDS = (Tensor, nn.Parameter, nn.Buffer)


class LeanWay:
    """Whether large ops of one loop run in a way that takes less.

    Attributes:
        always: All do that are large: as they are, nothing fits.
        is_planned_without: Those of the pass under way are planned as they are.
        has_run: One ran so in it.
        would_run: One is large enough to.
        most_spared_bytes: The most that one would have spared in it that ran as it is.
        passes_without: Passes, and other calls, in a row in which there was none, of any size.
    """

    def __init__(self, *, always: bool = False) -> None:
        """None runs so yet.

        Args:
            always: Whether all do that are large.
        """
        self.always = always
        self.is_planned_without = self.has_run = self.would_run = False
        self.most_spared_bytes = 0
        self.passes_without = 0
        self._looking = contextlib.ExitStack()

    def pass_begins(self, *, is_planned_without: bool = False) -> None:
        """A pass begins; where its ops run as they are planned, none of them is looked at.

        Args:
            is_planned_without: Whether it is planned, from a step whose ops ran as they are.
        """
        self.is_planned_without = is_planned_without
        self.has_run = False
        self.most_spared_bytes = 0
        if is_planned_without:
            self._looking.close()

    @contextlib.contextmanager
    def looked_at(self, mode: TorchDispatchMode) -> Iterator[None]:
        """Have a mode look at all ops inside this, or until a pass begins that needs no look.

        Args:
            mode: The mode.
        """
        with contextlib.ExitStack() as self._looking:
            self._looking.enter_context(entered(mode))
            yield

    def was_mixed(self) -> bool:
        """Whether some ops of a recorded step ran so, others did not: from now on, all do."""
        self.passes_without = 0
        is_mixed = self.has_run and not self.always
        self.always |= is_mixed
        return is_mixed

    def may_help(self, *, fits: bool) -> bool:
        """Whether a step is to be recorded so, where no plan fits.

        Args:
            fits: Whether the plan does.
        """
        helps = not fits and self.would_run and not self.always
        self.always |= helps
        return helps

    def runs(self, spared_bytes: int, taken_bytes: int, budget_bytes: int) -> bool:
        """Whether an op is to run so.

        Args:
            spared_bytes: What it takes less of, or nothing.
            taken_bytes: What it takes at most, with its results.
            budget_bytes: The budget.
        """
        if self.is_planned_without or spared_bytes <= least_bytes(budget_bytes):
            return False
        self.would_run = True
        runs = self.always or _native.counted_bytes() + taken_bytes > budget_bytes
        if not runs:
            self.most_spared_bytes = max(self.most_spared_bytes, spared_bytes)
        return runs


def least_bytes(budget_bytes: int) -> int:
    """What an op is to take less of, at least, to run in another way.

    Args:
        budget_bytes: The budget.
    """
    return int(_PART * budget_bytes)


class LeanOps:
    """The ops of a script that take much inside."""

    def __init__(self, request: FitRequest) -> None:
        """None has run so.

        Args:
            request: Which plans are allowed.
        """
        options = request.options
        self._may = options.promise != "exact" and "micro_batch" not in options.forbid

    @contextlib.contextmanager
    def in_pieces(self, budget_bytes: int, notes: dict[str, None], cut: LeanWay) -> Iterator[None]:
        """Run those inside this on pieces that are large for a budget.

        Args:
            budget_bytes: The budget; 0 while nobody knows it, and nothing is done.
            notes: Said at the end; of those that ran so, too.
            cut: Which of them do.
        """
        if not (self._may and budget_bytes) or cut.passes_without >= ENOUGH_PASSES:
            yield
            return
        mode = _InPieces(budget_bytes, cut)
        try:
            with cut.looked_at(mode):
                yield
        finally:
            if not cut.is_planned_without:
                cut.passes_without = 0 if mode.has_seen else cut.passes_without + 1
            if mode.has_cut:
                notes[IN_PIECES] = None


class _InPieces(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs large ops in pieces."""

    carries_out_ops = True

    def __init__(self, budget_bytes: int, cut: LeanWay) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._budget_bytes = budget_bytes
        self._cut = cut
        self._formulas = Formulas(GradientSums())
        self.has_cut = self.has_seen = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Not wrapped for dynamo: nothing comes between torch's engine and what it calls."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        _types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.has_seen = self.has_seen or func in _LARGE
        if func is _FORWARD and not kwargs:
            return self._forward(args)
        if func is _BACKWARD and not kwargs:
            return self._backward(args)
        if func is _OF_NORM and not kwargs:
            return self._of_norm(args)
        return self._formulas.run(func, args, kwargs or {})

    def _forward(self, args: tuple[Any, ...]) -> Tensor:
        batch, weight = args[0], args[1]
        # What it makes is as large as what it reads, as far as channels alone tell.
        channels = weight.shape[1] * args[8] if args[6] else weight.shape[0]
        grown = batch.nbytes * (1 + channels / max(batch.shape[1], 1))
        pieces = self._pieces(batch, int(grown), int(grown))
        if len(pieces) == 1:
            strips = self._strips(args, int(grown), int(grown))
            whole: Tensor = self._in_strips(args, strips) if strips else _FORWARD(*args)
            return whole
        self._note_cut()
        out: Tensor | None = None
        start = 0
        for piece in batch.split(pieces):
            made = _FORWARD(piece, *args[1:])
            out = _like(made, (len(batch), *made.shape[1:])) if out is None else out
            out[start : start + len(piece)] = made
            start += len(piece)
        assert out is not None, "there are two pieces at least"
        return out

    def _in_strips(self, args: tuple[Any, ...], strips: list[_Strip]) -> Tensor:
        """A convolution, a piece of the rows after the other."""
        self._note_cut()
        out: Tensor | None = None
        for strip in strips:
            made = _FORWARD(strip.read(args[0]), *strip.settings(args[1:]))
            if out is None:
                out = _like(made, (*made.shape[:2], strips[-1].stop, *made.shape[3:]))
            out[:, :, strip.start : strip.stop] = made
        assert out is not None, "there are two pieces at least"
        return out

    def _backward(self, args: tuple[Any, ...]) -> Any:
        gradient, batch = args[0], args[1]
        wants_input, *wants_weights = args[10]
        copies = gradient.nbytes + batch.nbytes
        pieces = self._pieces(batch, copies, 2 * copies)
        of_op = (batch, args[2], None, *args[4:10])
        strips = self._strips(of_op, copies, 2 * copies) if len(pieces) == 1 else []
        if len(pieces) == 1 and not strips:
            return _BACKWARD(*args)
        self._note_cut()
        of_weights: list[Tensor | None] = [None, None]
        inside = max(copies, _columns_bytes(of_op))
        sums = any(wants_weights) and inside > _WEIGHTS_PART * self._budget_bytes
        if any(wants_weights) and not sums:
            of_weights = list(_BACKWARD(*args[:10], [False, *wants_weights])[1:])
        mask = [wants_input, *(sums and wanted for wanted in wants_weights)]
        of_input: Tensor | None = None
        if strips and wants_input:
            of_input = torch.zeros_like(batch)
        for strip in strips if any(mask) else ():
            part = gradient[:, :, strip.start : strip.stop]
            made, *others = _BACKWARD(part, strip.read(batch), *strip.settings(args[2:10]), mask)
            if of_input is not None:
                strip.within(of_input).add_(strip.inner(made))
            _add(of_weights, others if sums else ())
        if strips:
            return of_input, *of_weights
        start = 0
        for part, piece in zip(gradient.split(pieces), batch.split(pieces), strict=True):
            if not any(mask):
                break
            made, *others = _BACKWARD(part, piece, *args[2:10], mask)
            if wants_input:
                of_input = _like(made, batch.shape) if of_input is None else of_input
                of_input[start : start + len(piece)] = made
            start += len(piece)
            _add(of_weights, others if sums else ())
        return of_input, *of_weights

    def _of_norm(self, args: tuple[Any, ...]) -> Any:
        """Of a normalisation, by channels: its gradient's copy, and what it makes twice."""
        gradient, batch, *of_channels = args[:7]
        pieces = self._pieces(batch, 4 * batch.nbytes, 2 * batch.nbytes, batch.shape[1])
        if len(pieces) == 1 or not args[9][0]:
            return _OF_NORM(*args)
        self._note_cut()
        of_input = torch.empty_like(batch, memory_format=torch.contiguous_format)
        of_weights: list[list[Tensor]] = []
        start = 0
        for size in pieces:
            part = slice(start, start + size)
            cut = [it if it is None or not len(it) else it[part] for it in of_channels]
            inputs = (it[:, part].contiguous() for it in (gradient, batch))
            made, *others = _OF_NORM(*inputs, *cut, *args[7:])
            of_input[:, part] = made
            of_weights.append(others)
            start += size
        joined = zip(*of_weights, strict=True)
        return of_input, *(torch.cat(parts) if parts[0] is not None else None for parts in joined)

    def _pieces(self, batch: Any, copies: int, taken: int, along: int = 0) -> list[int]:
        """Sizes of pieces; one piece where it is small, or no batch of plain tensors."""
        items = along or len(batch)
        may = type(batch) in _KINDS and batch.device.type == "cpu"
        count = min(int(copies / (_PART * self._budget_bytes)) + 1, items // LEAST_ITEMS)
        if not may or count <= 1 or not self._cut.runs(copies, taken, self._budget_bytes):
            return [items]
        size, more = divmod(items, count)
        return [size + 1] * more + [size] * (count - more)

    def _note_cut(self) -> None:
        self.has_cut = self._cut.has_run = True

    def _strips(self, args: tuple[Any, ...], copies: int, taken: int) -> list[_Strip]:
        """Pieces of rows where a convolution's batch is too small to be cut; none for the whole."""
        batch, is_transposed = args[0], args[6]
        may = type(batch) in _KINDS and batch.device.type == "cpu" and not is_transposed
        if not may or batch.dim() < _IMAGES:
            return []
        inside = max(copies, _columns_bytes(args))
        if not self._cut.runs(inside, taken + inside - copies, self._budget_bytes):
            return []
        count = min(int(inside / (_PART * self._budget_bytes)) + 1, _made(args)[0] // LEAST_ROWS)
        while count > 1:
            strips = _cut(args, count)
            # Of small images torch may copy more; what is read and made comes beside the copies.
            columns = max(_columns_bytes(strip.of(args)) for strip in strips)
            if max(columns, copies // count) + copies // count < inside:
                return strips
            count //= 2
        return []


@dataclass(frozen=True, slots=True)
class _Strip:
    """Some rows of what a convolution makes, and those that it reads for them.

    Attributes:
        start: The first that is made.
        stop: The first that is not.
        first: The first that is read.
        last: The first that is not.
        above: Rows of zeros before what is read.
        below: Rows of zeros after it.
    """

    start: int
    stop: int
    first: int
    last: int
    above: int
    below: int

    def within(self, tensor: Tensor) -> Tensor:
        """What is read of a batch, or of its gradient."""
        return tensor[:, :, self.first : self.last]

    def read(self, batch: Tensor) -> Tensor:
        """What is read of a batch, with zeros around it."""
        if not (self.above or self.below):
            return self.within(batch)
        others = (0, 0) * (batch.dim() - 3)
        return functional.pad(self.within(batch), (*others, self.above, self.below))

    def inner(self, padded: Tensor) -> Tensor:
        """What :meth:`read` gave, without the zeros around it."""
        return padded[:, :, self.above : padded.shape[2] - self.below]

    def of(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments by which torch takes the op for what it is on what is read."""
        return self.within(args[0]), *args[1:]

    def settings(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The op's other arguments, from the weights on: it pads no rows itself."""
        weight, bias, stride, padding, *others = args
        return weight, bias, stride, [0, *padding[1:]], *others


def _cut(args: tuple[Any, ...], count: int) -> list[_Strip]:
    """Cuts what a convolution makes into pieces of about as many rows each."""
    batch, weight, _, stride, padding, dilation = args[:6]
    rows, reach = batch.shape[2], dilation[0] * (weight.shape[2] - 1) + 1
    made = _made(args)[0]
    strips = []
    for number in range(count):
        start, stop = made * number // count, made * (number + 1) // count
        first = start * stride[0] - padding[0]
        last = (stop - 1) * stride[0] - padding[0] + reach
        above, below = max(-first, 0), max(last - rows, 0)
        strips.append(_Strip(start, stop, first + above, last - below, above, below))
    return strips


def _made(args: tuple[Any, ...]) -> list[int]:
    """Rows, columns and so on of what a convolution makes."""
    batch, weight, _, stride, padding, dilation = args[:6]
    each = zip(batch.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    return [(n + 2 * pad - apart * (k - 1) - 1) // step + 1 for n, k, step, pad, apart in each]


def _columns_bytes(args: tuple[Any, ...]) -> int:
    """What a convolution copies that torch carries out as one product: each row's surroundings.

    As torch's ``ConvolutionMM2d.cpp`` and ``ConvolutionMM3d.cpp`` do, where oneDNN is not used.
    """
    batch, weight = args[:2]
    if torch._C._select_conv_backend(*args).name not in ("Slow2d", "Slow3d"):
        return 0
    channels, kernel = batch.shape[1], math.prod(weight.shape[2:])
    return int(len(batch) * channels * kernel * math.prod(_made(args)) * batch.element_size())


def _add(sums: list[Tensor | None], pieces: Iterable[Tensor | None]) -> None:
    """Adds a piece's gradients of weights to those so far."""
    for place, piece in enumerate(pieces):
        so_far = sums[place]
        sums[place] = piece if so_far is None or piece is None else so_far.add_(piece)


def _like(piece: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Memory for all pieces in the order that a piece's has."""
    is_last = piece.dim() == _IMAGES and piece.is_contiguous(memory_format=torch.channels_last)
    order = torch.channels_last if is_last and not piece.is_contiguous() else None
    kind = order or torch.contiguous_format
    return torch.empty(shape, dtype=piece.dtype, device=piece.device, memory_format=kind)
