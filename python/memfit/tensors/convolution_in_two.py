"""The gradients of a convolution one after the other, with its input let go of in between.

Torch computes the gradients of weight and input in one call: the saved input, the gradient of what
the convolution made and that of its input are all there, each as large as a layer. But each is
computed by itself, and that of the input reads of the saved input only how it lies. In two calls,
weight and bias first, these are the same numbers, and the saved input may go before the gradient of
its size is made. Responsible for where that may be, and for letting go of what the node has saved.
Not responsible for which kinds of convolution give the same bits
(:mod:`memfit.tensors.convolution_kinds`) nor for when it is worth it
(:mod:`memfit.run.script.lean_backward`).

It goes only where it is not asked for again: the graph is not retained nor differentiated, and the
node holds the tensor itself, which nothing else does, or something of memfit's that stands for it
and knows who else needs the memory.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from memfit.tensors.convolution_kinds import BACKWARD, gives_the_same
from memfit.tensors.divisor_gradient import Run
from memfit.tensors.layouts import PLAIN
from memfit.tensors.shape_saves import blank_like
from memfit.tensors.stand_ins import StandIn

NODE = "ConvolutionBackward"

_FORWARD = torch.ops.aten.convolution.default
_KINDS = (Tensor, nn.Parameter)
_LEAF = "torch::autograd::AccumulateGrad"
_WEIGHT_PART = 1 / 4
"""Part of the saved input that the weight's gradient may be, which is there in its place."""


@dataclass(frozen=True, slots=True)
class InTwo:
    """What to run in the place of one call.

    Attributes:
        node: The node of autograd that runs.
        args: Arguments of the call, which nothing else has.
    """

    node: Any
    args: tuple[Any, ...]
    is_decided = False

    @property
    def spared_bytes(self) -> int:
        """As much as the saved input."""
        return int(self.args[1].nbytes)

    @property
    def taken_bytes(self) -> int:
        """What one call would take: the result, and copies in an order of the kernel's own."""
        return 2 * self.spared_bytes + int(self.args[0].nbytes)

    def run(self, run: Run) -> Any:
        """The same results.

        Args:
            run: Runs an op.
        """
        mask = self.args[10]
        _, of_weight, of_bias = run(BACKWARD, (*self.args[:10], [False, *mask[1:]]), {})
        blank = _let_go(self.node, self.args)
        batch = self.args[1] if blank is None else blank
        changed = (self.args[0], batch, *self.args[2:10], [True, False, False])
        of_input, _, _ = run(BACKWARD, changed, {})
        return of_input, of_weight, of_bias


def in_two(node: Any, args: tuple[Any, ...]) -> InTwo | None:
    """A convolution's backward in two calls; to be asked in ``__torch_dispatch__`` itself.

    Args:
        node: The node that runs.
        args: Arguments of the op, which nothing else has.

    Returns:
        ``None`` where one call would do as well, or two were not seen to give the same bits.
    """
    *_, mask = args
    if not (mask[0] and mask[1]) or torch._C._autograd._get_current_graph_task_keep_graph():
        return None
    if not all(_is_plain(it, args[1].dtype) for it in args[:3]):
        return None
    if args[2].nbytes > _WEIGHT_PART * args[1].nbytes:
        return None
    before = node.next_functions[0][0]
    if before is None or before.name() == _LEAF:
        return None  # the script has it
    saved = node._raw_saved_input
    if saved.unpack_hook is not None and not isinstance(saved.data, StandIn):
        return None
    return InTwo(node, args) if gives_the_same(args) else None


def _is_plain(tensor: Any, dtype: torch.dtype) -> bool:
    return (
        type(tensor) in _KINDS
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.dtype is dtype
        and dtype in PLAIN
    )


def _let_go(node: Any, args: tuple[Any, ...]) -> Tensor | None:
    """Let go of the saved input of a node; what looks like it, or ``None`` where it stays."""
    saved = node._raw_saved_input
    blank: Tensor | None
    if saved.unpack_hook is not None:
        blank = saved.data.let_go()
    else:
        blank = blank_like(args[1])
        saved.register_hooks(_forget, _gone)
    if blank is not None and _owners(args) == _owners_alone():
        # Its own variable of the node's, which lives as long as the node runs.
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            args[1].data = torch.empty(0, dtype=args[1].dtype)
    return blank


def _forget(_tensor: Tensor) -> None:
    return None


def _gone(_nothing: None) -> Tensor:
    raise RuntimeError("a convolution's input was asked for again, which memfit has let go of")


def _owners(args: tuple[Any, ...]) -> tuple[int, int]:
    """How many have the saved input as the node unpacked it, as torch counts and as Python does."""
    return args[1]._use_count(), sys.getrefcount(args[1])


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the owners of a convolution's saved input that only the node has."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = (0, 0)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is BACKWARD:
            self.found = _owners(args)
        return func(*args, **(kwargs or {}))


@cache
def _owners_alone() -> tuple[int, int]:
    """What :func:`_owners` counts of an input that only the node has.

    To be asked first where no op is being dispatched.
    """
    engine = torch.autograd.Variable._execution_engine
    hooks = torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda it: it.view_as(it))
    with (
        torch.inference_mode(mode=False),
        torch.enable_grad(),
        _disable_current_modes(),
        torch._C.DisableTorchFunction(),
        hooks,
    ):
        batch, weight = (torch.ones(1, 1, 2, 2, requires_grad=True) for _ in range(2))
        made = _FORWARD(batch.cos(), weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)  # noqa: FBT003
        leaves = (batch, weight)
        with _Counting() as counting:
            ones = torch.ones_like(made)
            engine.run_backward((made,), (ones,), False, False, leaves, False, False)  # noqa: FBT003
    found: tuple[int, int] = counting.found
    return found


def is_ready() -> bool:
    """Whether owners can be counted; to be asked first where no op is being dispatched."""
    try:
        return _owners_alone() != (0, 0)
    except (AttributeError, RuntimeError):  # of a torch that counts otherwise, or forbids hooks
        return False
