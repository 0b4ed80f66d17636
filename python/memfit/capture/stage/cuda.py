"""Recording a step for CUDA on a machine that has none.

Responsible for moving a fake stage to a fake GPU, for the attention kernel and the optimizer
variant a GPU would choose, and for autocast, which switches itself off where there is no GPU. Not
responsible for the autograd engine (:mod:`memfit.capture.stage.backward_engine`) or for recording.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Adafactor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from memfit.capture.record.step import StepRunner
from memfit.capture.stage.backward_engine import BackwardEngine
from memfit.capture.stage.stage import Stage
from memfit.tensors.storage import is_wrapper
from memfit.weights.absent_gpu import is_pretended
from memfit.workload import Workload

DEVICE = "cuda"

_HALF = frozenset({torch.float16, torch.bfloat16})
_LARGEST_FLASH_HEAD = 256
_ATTENTION_RANK = 4


def move_model(model: nn.Module) -> None:
    """Move a fake model to a fake GPU; parameters that are one stay one.

    Args:
        model: A fake copy; its parameters and buffers are replaced.
    """
    moved: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in moved:
                twin = nn.Parameter(_twin(parameter), parameter.requires_grad)
                moved[id(parameter)] = (twin, parameter)
            module._parameters[name] = moved[id(parameter)][0]
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            if id(buffer) not in moved:
                moved[id(buffer)] = (_twin(buffer), buffer)
            module._buffers[name] = moved[id(buffer)][0]


def _twin(tensor: Tensor) -> Any:
    """A tensor like another on the fake GPU; of one that wraps others, those are made."""
    if not is_wrapper(type(tensor)):
        return torch.empty_like(tensor, device=DEVICE)
    kind: Any = type(tensor)
    attributes, context = kind.__tensor_flatten__(tensor)
    parts = {name: _twin(getattr(tensor, name)) for name in attributes}
    return kind.__tensor_unflatten__(parts, context, tensor.size(), tensor.stride())


def move_batch(batch: Any) -> Any:
    """Fakes on a fake GPU in place of the fakes of a batch; one tensor stays one tensor."""
    moved: dict[int, tuple[Tensor, Tensor]] = {}

    def move(tensor: Tensor) -> Tensor:
        if id(tensor) not in moved:
            twin = torch.empty_strided(
                tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device=DEVICE
            )
            moved[id(tensor)] = (twin.requires_grad_(tensor.requires_grad), tensor)
        return moved[id(tensor)][0]

    return tree_map_only(Tensor, move, batch)


def choose_foreach(optimizer: torch.optim.Optimizer | None) -> None:
    """Let an optimizer take all parameters at once where a GPU would be given that by default.

    Args:
        optimizer: An optimizer over fake parameters; its groups are changed.
    """
    if optimizer is None or isinstance(optimizer, Adafactor):
        return
    for group in [optimizer.defaults, *optimizer.param_groups]:
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True


class CudaRunner(StepRunner):
    """Runs the step of a stage on a fake GPU."""

    def __init__(self, stage: Stage, recorder: Any) -> None:
        """Create a runner.

        Args:
            stage: A fake stage on a fake GPU.
            recorder: What to write to.
        """
        super().__init__(stage, recorder)
        self._attention = AttentionChoice() if is_pretended() else None
        recorder.saved.file_by_node()

    def forward_context(self) -> contextlib.AbstractContextManager[Any]:
        """Autocast around the forward, and the choice of attention kernels without a GPU.

        Where there is one, torch asks it for the kernel, on fakes too.
        """
        stack = contextlib.ExitStack()
        stack.enter_context(_autocast(self.stage.workload))
        if self._attention is not None:
            stack.enter_context(self._attention)
        return stack

    def backward(self, loss: Tensor) -> None:
        """Differentiate the loss by the engine in Python."""
        recorder = self.recorder

        def started(node: tuple[int, str] | None) -> None:
            recorder.running_node = node

        BackwardEngine(started, recorder.saved.release_node).run(loss)
        for kernel in sorted(self._attention.kernels if self._attention is not None else ()):
            recorder.notes[f"attention was taken to run as {kernel} attention"] = None

    def clip_gradients(self, norm: float) -> None:
        """Clip gradients as a GPU does: all at once."""
        nn.utils.clip_grad_norm_(self.stage.model.parameters(), norm, foreach=True)


class AttentionChoice(TorchFunctionMode):
    """Replaces scaled dot-product attention by the kernel a GPU would run.

    Without a GPU torch falls back to plain matrix products, which take far more memory. The rules
    are those of `aten/src/ATen/native/transformers/cuda/sdp_utils.cpp` that depend on no GPU.

    Attributes:
        kernels: Names of the kernels chosen so far.
    """

    def __init__(self) -> None:
        """Create the mode."""
        super().__init__()
        self.kernels: set[str] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a function, attention by the chosen kernel."""
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        return func(*args, **kwargs)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,  # noqa: FBT001, FBT002 - torch's own signature
        scale: float | None = None,
        enable_gqa: bool = False,  # noqa: FBT001, FBT002 - torch's own signature
    ) -> Tensor:
        if torch.is_autocast_enabled(DEVICE):
            dtype = torch.get_autocast_dtype(DEVICE)
            query, key, value = (t.to(dtype) for t in (query, key, value))
            if attn_mask is not None and attn_mask.is_floating_point():
                attn_mask = attn_mask.to(dtype)
        is_grouped = enable_gqa and key.shape[-3] != query.shape[-3]
        is_plain = query.dim() == _ATTENTION_RANK and query.shape[-1] == value.shape[-1]
        rows_lie_together = all(map(_rows_lie_together, (query, key, value)))
        head = query.shape[-1]
        is_half = query.dtype in _HALF
        if (
            is_plain
            and rows_lie_together
            and attn_mask is None
            and is_half
            and head <= _LARGEST_FLASH_HEAD
        ):
            self.kernels.add("flash")
            flash = torch.ops.aten._scaled_dot_product_flash_attention.default
            return flash(query, key, value, dropout_p, is_causal, scale=scale)[0]  # type: ignore[no-any-return]
        fits = is_plain and rows_lie_together and not is_grouped
        if not fits or (attn_mask is not None and not _rows_lie_together(attn_mask)):
            self.kernels.add("math")
            return functional.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask,
                dropout_p,
                is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
            )
        self.kernels.add("memory-efficient")
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention.default
        bias = _additive(attn_mask, query, key)
        return efficient(  # type: ignore[no-any-return]
            query, key, value, bias, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
        )[0]


def _rows_lie_together(tensor: Tensor) -> bool:
    """Whether the elements of a row are neighbours, as the fused kernels want them."""
    return tensor.stride(-1) == 1 or tensor.shape[-1] == 1


def _additive(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """A mask as the kernel takes it: added to the scores, expanded over batch and heads."""
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        allowed = torch.zeros_like(mask, dtype=query.dtype)
        mask = allowed.masked_fill(mask.logical_not(), float("-inf"))
    return mask.expand(*query.shape[:-1], key.shape[-2])


@contextlib.contextmanager
def _autocast(workload: Workload) -> Iterator[None]:
    """Autocast for CUDA, which ``torch.autocast`` refuses without a GPU."""
    dtype = workload.autocast
    if dtype is None:
        yield
        return
    enabled = torch.is_autocast_enabled(DEVICE)
    previous = torch.get_autocast_dtype(DEVICE)
    caching = torch.is_autocast_cache_enabled()
    torch.set_autocast_enabled(DEVICE, enabled=True)
    torch.set_autocast_dtype(DEVICE, dtype)
    torch.set_autocast_cache_enabled(workload.autocast_cache)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled(DEVICE, enabled)
        torch.set_autocast_dtype(DEVICE, previous)
        torch.set_autocast_cache_enabled(caching)
