"""What calls of a model take at other sizes than its example's: the law of its activations.

Responsible for learning the law from recordings of the example at three sizes, none of which runs
the model, and for saying which calls it holds for. Not responsible for the law of a single tensor
(the engine's, ``trace/sizes.rs``), nor for what follows from the bytes
(:mod:`memfit.share.pool.calls`).

Dimensions of the inputs that are equally large are taken to be one size, but that the first is told
from the others: of ``input_ids`` and ``attention_mask``, both ``[2, 128]``, the batch is one size
and the length another. A size that the model does not let vary is fixed.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from memfit import _native
from memfit.errors import MemfitError
from memfit.share.pool.activations import (
    Inputs,
    beside_model,
    inputs_of,
    recorded_call,
    run_call,
)
from memfit.share.pool.device import HOST

_Size = tuple[bool, int]
"""Whether it is of a first dimension, and how large it is in the example."""

_ONE_ITEM: _Size = (True, 1)

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""Constants that are the same call where they are equal."""

_SMALL = 64
"""Up to here a size is recorded at multiples of itself, where libraries do as with large ones."""

_PARTS = 4
"""Above it, at fewer of as many parts, each a power of two: models halve sizes, and patch them."""


class Unforeseen(Exception):  # noqa: N818 - nothing is wrong where it is raised
    """Why the law says nothing of a call."""


class CallLaw:
    """What calls of one model take beside it, by the sizes of their inputs.

    Attributes:
        declared_bytes: What a call with the example takes.
        device_type: ``cpu`` or ``cuda``.
        refusal: Why nothing is known about other sizes; empty where something is.
    """

    def __init__(self, model: nn.Module, example: Any, device: str) -> None:
        """Record calls with the example and with inputs of other sizes.

        Args:
            model: The model, awake.
            example: A tensor, or a tuple or dict of arguments.
            device: Where the model runs, as the broker names it.

        Raises:
            WorkloadError: The model fails with the example.
            CaptureError: The call cannot be recorded.
        """
        inputs = inputs_of(example)
        self.refusal = ""
        self._device = device
        self.device_type = "cpu" if device == HOST else "cuda"
        self._training = model.training
        self._leaves, self._structure = _arguments(model, inputs)
        self._sizes = list(
            dict.fromkeys(
                _size(leaf, dim)
                for leaf in self._leaves
                if isinstance(leaf, Tensor)
                for dim in range(leaf.dim())
            )
        )
        self._learnt: list[_Learnt] = []
        own = recorded_call(model, inputs, device)
        if own is None:
            own = run_call(model, inputs, device)
            self.refusal = "its calls can only be recorded by running them"
        self.declared_bytes = beside_model(own)[1]
        if not self.refusal:
            self._learn(model, inputs, own)
        # What the example looks like is kept, and not the example.
        self._leaves = [_Form(leaf) if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]

    def sizes_of(self, model: nn.Module, inputs: Inputs) -> Sizes:
        """The sizes of a call.

        Args:
            model: The model.
            inputs: What it is about to be called with.

        Raises:
            Unforeseen: The law does not hold for such a call.
        """
        if self.refusal:
            raise Unforeseen(self.refusal)
        if model.training != self._training:
            raise Unforeseen("the model has changed between training and evaluation")
        if torch.is_autocast_enabled(self.device_type):
            raise Unforeseen("it was called under autocast")
        leaves, structure = _arguments(model, inputs)
        if structure != self._structure:
            raise Unforeseen("it was called with other arguments than the example")
        found: dict[_Size, int] = {}
        for form, leaf in zip(self._leaves, leaves, strict=True):
            if isinstance(form, _Form):
                form.match(leaf, found)
            elif type(leaf) is not type(form) or type(leaf) not in _PLAIN or leaf != form:
                raise Unforeseen("an argument that is no tensor is not as in the example")
        for learnt in self._learnt:
            if all(found[size] == own for size, own in learnt.fixed.items()):
                return Sizes(learnt, [found[size] for size in learnt.varies])
        fixed = self._learnt[0].fixed.items()
        said = " and ".join(f"{own} was {found[size]}" for size, own in fixed if found[size] != own)
        raise Unforeseen(f"a size of {said}, and its example does not tell what follows")

    def bytes_at(self, sizes: Sizes) -> tuple[int, int]:
        """What a call takes beside the model.

        Args:
            sizes: Its sizes.

        Returns:
            Bytes at its peak, inputs included: as predicted, and the upper end of the interval.

        Raises:
            Unforeseen: No law explains how some tensor grows.
        """
        return sizes.learnt.bytes_at(sizes.wanted)

    def recorded_bytes(self, model: nn.Module, inputs: Inputs) -> int:
        """What a call takes beside the model, by a recording of just this call.

        Scratch memory of single ops is left out, as measuring it would take it.

        Args:
            model: The model, awake.
            inputs: What it is about to be called with.

        Raises:
            Unforeseen: It cannot be recorded.
        """
        try:
            with torch.inference_mode(mode=False):
                recorded = recorded_call(model, inputs, self._device, probe=False)
        except MemfitError as error:
            raise Unforeseen(str(error).partition("\n")[0]) from error
        if recorded is None:
            raise Unforeseen("the call can only be recorded by running it")
        return beside_model(recorded)[0]

    def _learn(self, model: nn.Module, inputs: Inputs, own: _native.Trace) -> None:
        """Learn the law, and where models do other things with one item than with more, both."""
        base = {size: size[1] for size in self._sizes}
        learnt, refusal = _learnt(model, inputs, self._device, own, base)
        if learnt.varies:
            self._learnt.append(learnt)
        if _ONE_ITEM in learnt.fixed:
            base[_ONE_ITEM] = 2
            with suppress(MemfitError):
                two = recorded_call(model, _resized(inputs, base), self._device)
                if two is not None:
                    learnt, _ = _learnt(model, inputs, self._device, two, base)
                    if _ONE_ITEM in learnt.varies:
                        self._learnt.append(learnt)
        if not self._learnt:
            self.refusal = f"no size of the example can vary: {refusal}"


@dataclass(frozen=True, slots=True)
class _Learnt:
    """The law of calls whose fixed sizes are as they are.

    Attributes:
        own: The recording that others are compared with.
        fixed: Sizes that cannot vary, with what they are.
        varies: Those that can.
        others: Two more recordings.
        seen: What varies, in each of them and, last, in ``own``.
    """

    own: _native.Trace
    fixed: dict[_Size, int]
    varies: list[_Size]
    others: list[_native.Trace]
    seen: list[list[int]]

    def bytes_at(self, wanted: Sequence[int]) -> tuple[int, int]:
        """See :meth:`CallLaw.bytes_at`."""
        try:
            grown = self.own.at_sizes(self.others, self.seen, wanted)
        except MemfitError as error:
            raise Unforeseen(str(error)) from error
        return beside_model(grown)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a call.

    Attributes:
        learnt: The law that holds for it.
        wanted: What varies.
    """

    learnt: _Learnt
    wanted: list[int]

    @property
    def are_within_example(self) -> bool:
        """Whether none is larger than in the example."""
        known = self.learnt.varies
        return all(size <= own for size, (_, own) in zip(self.wanted, known, strict=True))


def _learnt(
    model: nn.Module, inputs: Inputs, device: str, own: _native.Trace, base: dict[_Size, int]
) -> tuple[_Learnt, str]:
    """Let as many sizes vary as the model allows: all at once, else one after the other.

    Args:
        model: The model, awake.
        inputs: Arguments to make others from.
        device: Where the model runs.
        own: The recording to compare with.
        base: Its sizes.

    Returns:
        What was learnt, and why not more, if not all sizes vary.
    """
    best = _Learnt(own, base, [], [], [])
    found = _varied(best, model, inputs, device, base, list(base))
    if isinstance(found, _Learnt):
        return found, ""
    refusal = found
    for size in base if len(base) > 1 else ():
        more = _varied(best, model, inputs, device, base, [*best.varies, size])
        if isinstance(more, _Learnt):
            best = more
    return best, refusal


def _varied(
    of: _Learnt,
    model: nn.Module,
    inputs: Inputs,
    device: str,
    base: dict[_Size, int],
    varies: list[_Size],
) -> _Learnt | str:
    """Learn from calls in which some sizes vary; says why that tells nothing, if it does not."""
    others: list[_native.Trace] = []
    seen: list[list[int]] = []
    own = [base[size] for size in varies]
    try:
        for which in (0, 1):
            there = [_other(it, base[it], at, which) for at, it in enumerate(varies)]
            changed = {**base, **dict(zip(varies, there, strict=True))}
            other = recorded_call(model, _resized(inputs, changed), device)
            if other is None:
                return "it can only be recorded by running it"
            others.append(other)
            seen.append(there)
        of.own.at_sizes(others, [*seen, own], own)
    except MemfitError as error:
        return str(error).partition("\n")[0]
    fixed = {size: it for size, it in base.items() if size not in varies}
    return _Learnt(of.own, fixed, varies, others, [*seen, own])


class _Form:
    """What a tensor of the example looks like."""

    def __init__(self, tensor: Tensor) -> None:
        self._dtype = tensor.dtype
        self._sizes = [_size(tensor, dim) for dim in range(tensor.dim())]

    def match(self, leaf: Any, found: dict[_Size, int]) -> None:
        """Take note of the sizes of a tensor in its place.

        Raises:
            Unforeseen: It differs in more than its sizes, or from others.
        """
        is_like = (
            isinstance(leaf, Tensor)
            and leaf.layout is torch.strided
            and leaf.dtype == self._dtype
            and leaf.dim() == len(self._sizes)
        )
        if not is_like:
            raise Unforeseen("a tensor had another type or number of dimensions than the example's")
        for size, wanted in zip(self._sizes, leaf.shape, strict=True):
            if found.setdefault(size, wanted) != wanted:
                raise Unforeseen("sizes differed that are one in the example")


def _size(tensor: Tensor, dim: int) -> _Size:
    return dim == 0, tensor.shape[dim]


def _other(size: _Size, own: int, place: int, which: int) -> int:
    """A size in the first or second of the other recordings, in no two places alike."""
    at = which if place % 2 == 0 else 1 - which
    if size[0]:
        step = 1 + 2 * at
        return own - step if own > step + 3 else own + step
    if own <= _SMALL:
        return own * (2 + at)
    part = 1
    while own % (2 * part) == 0 and own // (2 * part) >= _PARTS:
        part *= 2
    return own - (1 + at) * part


def _resized(inputs: Inputs, there: dict[_Size, int]) -> Inputs:
    """The same arguments at other sizes, their elements cut off or repeated."""
    leaves, structure = tree_flatten(inputs)
    resized = [_at(leaf, there) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    made: Inputs = tree_unflatten(resized, structure)
    return made


def _at(tensor: Tensor, there: dict[_Size, int]) -> Tensor:
    made = tensor.detach()
    for dim in range(tensor.dim()):
        size = tensor.shape[dim]
        wanted = there.get(_size(tensor, dim), size)
        if wanted != size:
            chosen = torch.arange(wanted, device=tensor.device) % max(size, 1)
            made = made.index_select(dim, chosen)
    return made


def _arguments(model: nn.Module, inputs: Inputs) -> tuple[list[Any], TreeSpec]:
    """The arguments of a call by name, without those that are as they would be anyway."""
    args, kwargs = inputs
    try:
        signature = inspect.signature(model.forward)
        bound = signature.bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return tree_flatten((args, kwargs))
    of = signature.parameters
    return tree_flatten({name: it for name, it in bound.items() if it is not of[name].default})
