"""Saved tensors of which backward reads the shape alone.

Responsible for telling which they are, from the op that autograd saves an input for to the node
that asks for it, and for what may be handed out instead. Not responsible for what is saved, dropped
or recorded.

Some formulas save an input only for its sizes and its memory format: pooling and padding always,
convolution and evaluated batch normalisation where their weights ask for no gradient (torch's
``tools/autograd/derivatives.yaml``: one formula for several gradients saves what any of them may
read). Such a tensor need not be kept, and nothing need be computed again for it.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

NODES: dict[str, str] = {
    "_adaptive_avg_pool2d": "AdaptiveAvgPool2DBackward0",
    "_adaptive_avg_pool3d": "AdaptiveAvgPool3DBackward0",
    "adaptive_max_pool2d": "AdaptiveMaxPool2DBackward0",
    "adaptive_max_pool3d": "AdaptiveMaxPool3DBackward0",
    "avg_pool2d": "AvgPool2DBackward0",
    "avg_pool3d": "AvgPool3DBackward0",
    "convolution": "ConvolutionBackward0",
    "gather": "GatherBackward0",
    "max_pool2d_with_indices": "MaxPool2DWithIndicesBackward0",
    "max_pool3d_with_indices": "MaxPool3DWithIndicesBackward0",
    "native_batch_norm": "NativeBatchNormBackward0",
    "reflection_pad1d": "ReflectionPad1DBackward0",
    "reflection_pad2d": "ReflectionPad2DBackward0",
    "reflection_pad3d": "ReflectionPad3DBackward0",
    "replication_pad1d": "ReplicationPad1DBackward0",
    "replication_pad2d": "ReplicationPad2DBackward0",
    "replication_pad3d": "ReplicationPad3DBackward0",
}
"""aten ops that may save their first argument for its shape, and the nodes that do."""

_Look = tuple[int, int, tuple[int, ...], tuple[int, ...], torch.dtype]

_WEIGHT = 1
"""Position of the weight among the inputs of a convolution and of a batch normalisation."""


@dataclass(slots=True)
class ShapeSave:
    """A saved tensor that may be needed for its shape alone; the mark on whatever stands for it.

    Attributes:
        node: Name of the node that saved it.
        sequence: Its sequence number.
    """

    node: str
    sequence: int

    def is_asked_for(self) -> bool:
        """Whether the unpack that runs now wants the shape alone.

        Not where backward is differentiated again, which saves the tensor anew, and not for anyone
        but the node that saved it.
        """
        node = torch._C._current_autograd_node()
        if node is None or torch.is_grad_enabled() or node._sequence_nr() != self.sequence:
            return False
        if node.name() != self.node:
            return False
        if self.node == "ConvolutionBackward0":
            return node.next_functions[_WEIGHT][0] is None
        if self.node == "NativeBatchNormBackward0":
            trains: bool = node._saved_training  # type: ignore[attr-defined]
            return not trains and node.next_functions[_WEIGHT][0] is None
        return True


class ShapeSaves:
    """Finds shape saves in a forward: told of each pack, and of each op before it runs.

    A node is made, and saves its op's inputs, before the op is dispatched; so what was packed for
    the newest node looks like the first argument of the op that comes.
    """

    def __init__(self) -> None:
        """Create one that has seen nothing."""
        self._packed: list[tuple[int, _Look, Any]] = []

    def packed(self, tensor: Tensor, token: Any) -> None:
        """Autograd saved a tensor.

        Args:
            tensor: The tensor.
            token: What stands for it; gets its mark as ``shape_save``.
        """
        if tensor.device.type == "cpu":
            self._packed.append((_newest_node(), _look_of(tensor), token))

    def op(self, operator_name: str, args: tuple[Any, ...]) -> None:
        """An op is about to run.

        Args:
            operator_name: As a trace writes it, ``aten.avg_pool2d.default``.
            args: Its positional arguments.
        """
        if not self._packed:
            return
        node = NODES.get(operator_name.split(".")[1])
        if node is not None and args and isinstance(args[0], Tensor):
            newest, argument = _newest_node(), _look_of(args[0])
            for sequence, saved, token in self._packed:
                if sequence == newest and saved == argument:
                    token.shape_save = ShapeSave(node, sequence)
        self._packed.clear()


def blank_storage(size_bytes: int) -> torch.UntypedStorage:
    """Memory on the CPU that nobody has touched and whose contents nobody asks for.

    The system backs it with no page, or with its one page of zeros where a kernel reads on its way.

    Args:
        size_bytes: Its size.
    """
    memory = torch.frombuffer(mmap.mmap(-1, max(size_bytes, 1)), dtype=torch.uint8)
    return memory.untyped_storage()


def blank_like(tensor: Tensor) -> Tensor:
    """A tensor that lies as another one does, over such memory.

    Args:
        tensor: The other one, on the CPU.
    """
    return blank(tensor.dtype, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())


def blank(
    dtype: torch.dtype, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]
) -> Tensor:
    """A tensor over such memory.

    Args:
        dtype: Type of its elements.
        offset: Elements from the start of the memory.
        shape: Its sizes.
        stride: Strides in elements.
    """
    last = sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    elements = 0 if 0 in shape else offset + last + 1
    with torch._C._DisableTorchDispatch():  # no op of the step
        made = torch.empty(0, dtype=dtype, device="cpu")
        made.set_(blank_storage(elements * dtype.itemsize), offset, shape, stride)
    return made


def _newest_node() -> int:
    return int(torch._C._autograd._get_sequence_nr()) - 1


def _look_of(tensor: Tensor) -> _Look:
    """Which view of which storage a tensor is; addresses hold while an op has it as an argument."""
    return (
        int(tensor.untyped_storage()._cdata),
        int(tensor.storage_offset()),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
    )
