"""Sums of gradients that meet in torch's engine.

Where two gradients of one tensor meet, torch's engine adds the second into the first if nothing
else has that, and makes a third tensor if anything has, or if a dispatch mode is on the stack
(``InputBuffer::accumulate`` in ``torch/csrc/autograd/input_buffer.cpp``). Responsible for telling,
under a mode, the sums that are made in place without one, and for counting who has a gradient.
Not responsible for what else may be written over (:mod:`memfit.tensors.backward_in_place`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from memfit.tensors.layouts import decides_layout

SUM, IN_PLACE = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor
"""The sum under a mode, and without one."""

Owners = tuple[int, int, int, int, int]
_NO_OWNERS: Owners = (0, 0, 0, 0, 0)

WITHOUT_SUMS = frozenset(
    (
        "AdaptiveAvgPool2DBackward",
        "AddBackward",
        "AddmmBackward",
        "AvgPool2DBackward",
        "BmmBackward",
        "CatBackward",
        "CloneBackward",
        "ConstantPadNdBackward",
        "ConvolutionBackward",
        "CosBackward",
        "DivBackward",
        "EluBackward",
        "EmbeddingBackward",
        "ExpBackward",
        "ExpandBackward",
        "FlipBackward",
        "GatherBackward",
        "GeluBackward",
        "HardtanhBackward",
        "IndexBackward",
        "IndexSelectBackward",
        "LeakyReluBackward",
        "LogBackward",
        "LogSoftmaxBackward",
        "MaskedFillBackward",
        "MaxPool2DWithIndicesBackward",
        "MeanBackward",
        "MmBackward",
        "MulBackward",
        "NativeBatchNormBackward",
        "NativeDropoutBackward",
        "NativeLayerNormBackward",
        "NegBackward",
        "PermuteBackward",
        "ReluBackward",
        "RepeatBackward",
        "ReshapeAliasBackward",
        "RollBackward",
        "ScaledDotProductFlashAttentionForCpuBackward",
        "SelectBackward",
        "SigmoidBackward",
        "SiluBackward",
        "SinBackward",
        "SliceBackward",
        "SoftmaxBackward",
        "SoftplusBackward",
        "SplitBackward",
        "SplitWithSizesBackward",
        "SqrtBackward",
        "SqueezeBackward",
        "StackBackward",
        "SubBackward",
        "SumBackward",
        "TBackward",
        "TanhBackward",
        "ToCopyBackward",
        "TransposeBackward",
        "UnbindBackward",
        "UnsafeViewBackward",
        "UnsqueezeBackward",
        "UpsampleBilinear2DBackward",
        "UpsampleNearest2DBackward",
        "ViewBackward",
        "WhereBackward",
    )
)
"""Nodes in whose formulas no two tensors are added: a sum that torch's engine calls meanwhile is of
two gradients that meet (``tools/autograd/derivatives.yaml``)."""


def owners(gradient: Any) -> Owners:
    """How many have a gradient.

    Args:
        gradient: The first argument of an op, where ``__torch_dispatch__`` has just been called.

    Returns:
        Owners that torch counts, that Python counts, those of the memory, and both kinds of the
        tensor that it is a view of; 0 of the last where it is none.
    """
    if not isinstance(gradient, Tensor):
        return _NO_OWNERS
    with torch._C.DisableTorchFunction():
        storage = gradient.untyped_storage()
        seen = torch._C._storage_Use_Count(storage._cdata)
        base = gradient._base
        of_base = (0, 0) if base is None else (base._use_count(), sys.getrefcount(base))
        return gradient._use_count(), sys.getrefcount(gradient), seen, *of_base


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the owners of a gradient that only autograd holds, on its way from node to node."""

    def __init__(self, name: str, op: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._op, self._name = op, name
        self.found = _NO_OWNERS

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """As in the recorder: what is counted is what that would count."""
        return False

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        node = torch._C._current_autograd_node()
        if func is self._op and node is not None and node.name().startswith(self._name):
            self.found = self._count(args)
        return func(*args, **(kwargs or {}))

    def _count(self, args: tuple[Any, ...]) -> Owners:
        return owners(args[0])  # as many calls away as where it is asked for later


def counted(
    name: str, op: Any, example: Callable[[Tensor], Tensor], *, fakes: bool = False
) -> Owners:
    """What :func:`owners` counts for a gradient that only a node of an example has.

    Torch tells: its engine counts owners too. To be asked where no op is being dispatched.

    Args:
        name: The node, without its number.
        op: Its op that reads the gradient as its first argument.
        example: What makes such a node run last.
        fakes: Whether to count those of tensors without values.

    Raises:
        AttributeError, RuntimeError: Torch counts otherwise, or forbids hooks, as under a transform
            of functions.
    """
    engine = torch.autograd.Variable._execution_engine
    # Hooks of the script's for what autograd saves, as of a checkpoint, do not see the inner ones'.
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda it: it, lambda it: it)
    with (
        torch.inference_mode(mode=False),
        torch.enable_grad(),
        _disable_current_modes(),
        torch._C.DisableTorchFunction(),
        hooks,
        FakeTensorMode() if fakes else torch.enable_grad(),
    ):
        leaf = torch.ones(2, 2, device="cpu", dtype=torch.float32, requires_grad=True)
        made = example(leaf.cos()).sin()
        with _Counting(name, op) as counting:
            gradient = torch.ones_like(made)
            engine.run_backward((made,), (gradient,), False, False, (leaf,), False, False)  # noqa: FBT003
    found: Owners = counting.found
    return found


def alone(*, fakes: bool) -> frozenset[Owners]:
    """Owners of the first of two gradients that meet, where only the engine has it; none: unknown.

    Args:
        fakes: Whether of tensors without values.
    """
    try:
        return _alone(fakes)
    except (AttributeError, RuntimeError):
        return frozenset()


@cache
def _alone(fakes: bool) -> frozenset[Owners]:  # noqa: FBT001 - of a cache
    examples = (lambda x: x.exp() + x.sin(), lambda x: x.exp() + x.t().sin().t())
    return frozenset(counted("ExpBackward", SUM, example, fakes=fakes) for example in examples)


class GradientSums:
    """Tells the sums of two gradients that are made in place where no mode is on."""

    def __init__(self, *, fakes: bool = False) -> None:
        """Know who has a gradient that nothing else has; no op may be under way.

        Args:
            fakes: Whether tensors will have no values.
        """
        self._alone = alone(fakes=fakes)
        self._kind = FakeTensor if fakes else Tensor

    def is_in_place(self, name: str, func: Any, args: Sequence[Any]) -> bool:
        """Whether torch would write an op's result over its first argument.

        To be asked in a function that ``__torch_dispatch__`` calls with its arguments.

        Args:
            name: The node that has just run, without its number.
            func: The op.
            args: Its arguments: the tuple that torch has handed over.
        """
        return (
            func is SUM
            and name in WITHOUT_SUMS
            and len(args) == 2  # noqa: PLR2004 - both gradients
            and not torch.is_grad_enabled()
            and owners(args[0]) in self._alone
            and all(type(it) is self._kind and it.layout is torch.strided for it in args)
            and args[0].shape == args[1].shape
            and decides_layout(*args)
        )
