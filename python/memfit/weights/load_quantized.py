"""A model that is quantised while it is loaded: :func:`memfit.load_quantized`.

Responsible for building it without weights, for reading each tensor from the mapped file, having it
quantised or copied, and going on to the next, so that the whole model is never there; and for
saying what stayed as it was. Not responsible for the file (:mod:`memfit.weights.checkpoint`) nor
for the arithmetic, which is torchao's (:mod:`memfit.weights.by_rows`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves

from memfit import _native
from memfit.errors import CheckpointError, UsageError, first_line
from memfit.tensors.heap import trim
from memfit.tensors.storage import plain_tensors
from memfit.weights.by_rows import COMPUTED_IN, quantize_by_rows, require_torchao
from memfit.weights.checkpoint import Checkpoint, open_checkpoint
from memfit.weights.eight_bit_products import require_products, set_products
from memfit.weights.slots import Slot, slots_of
from memfit.weights.weightless import weightless

_SHOWN = 3
"""Names that an error shows of many."""

_TRIMMED_FROM = 1 << 18
"""Elements of a tensor after which the heap is trimmed."""


@dataclass(frozen=True)
class Kept:
    """Tensors that were not quantised, of one kind of module and for one reason.

    Attributes:
        module: Class of the modules that have them.
        reason: Why, as a clause.
        tensors: How many.
        bytes: What they take.
    """

    module: str
    reason: str
    tensors: int
    bytes: int


@dataclass(frozen=True)
class QuantizedModel:
    """A loaded model, and what became of its tensors; ``print`` shows it.

    Attributes:
        model: The model.
        quantized: How many weights were quantised.
        quantized_bytes: What they take.
        unquantized_bytes: What they would take as they were.
        kept: What was not quantised, the largest first.
    """

    model: nn.Module
    quantized: int
    quantized_bytes: int
    unquantized_bytes: int
    kept: tuple[Kept, ...]

    @property
    def kept_bytes(self) -> int:
        """Bytes of all that was not quantised."""
        return sum(one.bytes for one in self.kept)

    @property
    def bytes(self) -> int:
        """Bytes of the model's parameters and module buffers."""
        return self.quantized_bytes + self.kept_bytes

    def __str__(self) -> str:
        """The report."""
        text = _native.bytes_text
        before = text(self.unquantized_bytes + self.kept_bytes)
        sizes = f"{text(self.unquantized_bytes)} -> {text(self.quantized_bytes)}"
        lines = [
            f"{type(self.model).__name__}: {text(self.bytes)}, unquantised {before}",
            f"  quantised  {_count(self.quantized, 'weight')}: {sizes}",
            f"  kept       {text(self.kept_bytes)}",
        ]
        for one in self.kept:
            which = f"{_count(one.tensors, 'tensor')} of `{one.module}`"
            lines.append(f"    {text(one.bytes):>9}  {which}: {one.reason}")
        return "\n".join(lines)


def load_quantized(
    build: Callable[[], nn.Module],
    checkpoint: str | Path,
    *,
    bits: int = 8,
    dtype: torch.dtype | None = None,
    dynamic: bool = False,
) -> QuantizedModel:
    """Load a model whose linear layers have weights in 8 bits, without ever having the whole.

    The model is built without weights. Then each tensor is read from the mapped file, quantised by
    torchao (``Int8WeightOnlyConfig``) where it is the weight of an ``nn.Linear``, copied where it
    is not, and let go. At no time is there more than the result and about one layer; the file's
    own pages are clean, and the system takes them back when it needs them. The model computes what
    it would after ``load_state_dict`` and ``quantize_``, bit for bit, but that weights which layers
    share stay shared: one that an embedding has too is not quantised.

    Args:
        build: Builds the model, on the CPU.
        checkpoint: A file of safetensors or of ``torch.save(model.state_dict())``, the index of
            several, or their folder.
        bits: Bits of a quantised weight: 8.
        dtype: Element type of what is read, before it is quantised; ``None`` for what the file has.
            Module buffers that are not in the file stay as the model builds them.
        dynamic: Whether such layers multiply in 8 bits too: what they are given is quantised at
            each use (``Int8DynamicActivationInt8WeightConfig``).

    Returns:
        The model, and what became of its tensors.

    Raises:
        UsageError: torchao is not installed, there is no such quantisation, this processor
            multiplies 8 bits wrongly, or the model cannot be loaded like this.
        CheckpointError: The file cannot be read, or holds other tensors than the model's.
    """
    _refuse_settings(bits, dtype)
    require_torchao()
    if dynamic:
        require_products("cpu")
    file = open_checkpoint(checkpoint)
    with weightless():
        model = build()
    _refuse_model(model)
    slots = list(slots_of(model))
    _match(slots, file)
    for slot in slots:
        _fill(slot, file, dtype)
        if slot.tensor.numel() >= _TRIMMED_FROM:
            trim()  # what was taken meanwhile lies between what stays
    _refuse_leftovers(model)
    if dynamic:
        for slot in slots:
            if slot.unquantized_bytes:
                set_products(slot.tensor, in_eight_bits=True)
    return _result(model, slots)


def _refuse_settings(bits: int, dtype: torch.dtype | None) -> None:
    if bits == 4:  # noqa: PLR2004 - the other width that people know
        raise UsageError(
            "`bits=4`: none of torchao's packings of 4 bits runs on a CPU; `bits=8` does"
        )
    if bits != 8:  # noqa: PLR2004 - torchao's
        raise UsageError(f"`bits={bits}`: weights are quantised to 8 bits")
    if dtype is not None and dtype not in COMPUTED_IN:
        names = ", ".join(f"`{known}`" for known in COMPUTED_IN)
        raise UsageError(f"`dtype={dtype}`: layers compute in one of {names}")


def _refuse_model(model: Any) -> None:
    """Refuse what was not built just now, or loads itself in a way of its own."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"`build` must return an `nn.Module`, got `{type(model).__name__}`")
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, FakeTensor):
            message = f"`build` must build the model: `{name}` has been there before"
            raise UsageError(message)
        if parameter.device.type != "cpu":
            message = f"`{name}` is built on `{parameter.device}`: build on the CPU, then move"
            raise UsageError(message)
    for name, module in model.named_modules():
        kind = type(module)
        if (
            module._load_state_dict_pre_hooks
            or kind.get_extra_state is not nn.Module.get_extra_state
            or kind._load_from_state_dict
            not in {nn.Module._load_from_state_dict, _NormBase._load_from_state_dict}
        ):
            message = f"`{name or kind.__name__}` (`{kind.__name__}`) loads its state by code of "
            raise UsageError(message + "its own: load the model in full, then quantise it")


def _match(slots: list[Slot], file: Checkpoint) -> None:
    """Find each tensor's name in the file.

    Raises:
        CheckpointError: The file has other tensors.
    """
    missing = []
    for slot in slots:
        there = [name for name in slot.names if name in file.shapes]
        if not there:
            missing.append(slot.names[0])
            continue
        slot.source = there[0]
        for name in there:
            _refuse_shape(slot, name, file)
    known = {name for slot in slots for name in slot.names}
    unexpected = [name for name in file.shapes if name not in known]
    if missing or unexpected:
        lacks = f"lacks {_listed(missing)}" if missing else ""
        more = f"has {_listed(unexpected)}, which the model has not" if unexpected else ""
        told = " and ".join(part for part in (lacks, more) if part)
        raise CheckpointError(f"`{file.path}` {told}")


def _refuse_shape(slot: Slot, name: str, file: Checkpoint) -> None:
    """Refuse a tensor of another shape, or one that differs from that of the same parameter."""
    shape, wanted = file.shapes[name], tuple(slot.tensor.shape)
    if shape != wanted:
        message = f"`{name}` has shape {shape} in `{file.path}` and {wanted} in the model"
        raise CheckpointError(message)
    if name != slot.source and not torch.equal(file.tensor(name), file.tensor(slot.source)):
        message = f"`{slot.source}` and `{name}` are one tensor of the model and differ in "
        raise CheckpointError(f"{message}`{file.path}`")


def _fill(slot: Slot, file: Checkpoint, dtype: torch.dtype | None) -> None:
    """Read a tensor and put it, quantised or not, where it belongs."""
    read = file.tensor(slot.source)
    if read.is_floating_point() != slot.tensor.is_floating_point():
        message = f"`{slot.source}` is `{read.dtype}` in `{file.path}` and `{slot.tensor.dtype}` in"
        raise CheckpointError(f"{message} the model")
    wanted = dtype if dtype is not None and read.is_floating_point() else read.dtype
    slot.reason = slot.why_kept()
    layer = slot.places[0][0]
    if not slot.reason and isinstance(layer, nn.Linear):
        if wanted not in COMPUTED_IN:
            message = f"`{slot.source}` is `{wanted}`, in which layers do not compute: give `dtype`"
            raise CheckpointError(message)
        try:
            is_quantized = quantize_by_rows(layer, read, wanted)
        except (RuntimeError, NotImplementedError, ValueError) as error:
            message = f"torchao does not quantise `{slot.source}`: {first_line(error)}"
            raise CheckpointError(message) from error
        if is_quantized:
            slot.unquantized_bytes = read.numel() * wanted.itemsize
            slot.put(layer.weight)
            return
        slot.reason = "torchao leaves such layers as they are"
    copied = read.to(wanted, copy=True, memory_format=torch.contiguous_format)
    if isinstance(slot.tensor, nn.Parameter):
        given = vars(slot.tensor)
        copied = nn.Parameter(copied, slot.tensor.requires_grad)
        vars(copied).update(given)
    slot.put(copied)


def _refuse_leftovers(model: nn.Module) -> None:
    """Refuse a model that has kept what it computed from weights that were not there."""
    for path, module in model.named_modules():
        for name, value in (*module._buffers.items(), *vars(module).items()):
            if any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(value)):
                place = f"{path}.{name}" if path else name
                message = f"`{place}` is computed from weights while the model is built"
                raise UsageError(f"{message}: load the model in full, then quantise it")


def _result(model: nn.Module, slots: list[Slot]) -> QuantizedModel:
    quantized = [slot for slot in slots if slot.unquantized_bytes]
    kept: dict[tuple[str, str], list[int]] = {}
    loaded = {id(slot.tensor) for slot in slots}
    for slot in slots:
        if not slot.unquantized_bytes:
            key = type(slot.places[0][0]).__name__, slot.reason
            kept.setdefault(key, []).append(_bytes(slot.tensor))
    built: set[int] = set()
    for module in model.modules():
        for buffer in module._buffers.values():
            if buffer is not None and id(buffer) not in loaded | built:
                built.add(id(buffer))
                key = type(module).__name__, "a module buffer that no file has"
                kept.setdefault(key, []).append(_bytes(buffer))
    groups = [Kept(*key, len(sizes), sum(sizes)) for key, sizes in kept.items()]
    return QuantizedModel(
        model=model,
        quantized=len(quantized),
        quantized_bytes=sum(_bytes(slot.tensor) for slot in quantized),
        unquantized_bytes=sum(slot.unquantized_bytes for slot in quantized),
        kept=tuple(sorted(groups, key=lambda one: (-one.bytes, one.module, one.reason))),
    )


def _bytes(tensor: Tensor) -> int:
    return sum(part.nbytes for part in plain_tensors(tensor))


def _listed(names: list[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:_SHOWN])
    more = len(names) - _SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


def _count(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"
