"""What a person hands to memfit: a model, a batch, and how one step runs.

Responsible for the :class:`Workload` type and for cutting a batch along its batch dimension. Not
responsible for running, recording or planning the step.

A step is ``loss(model, batch)``, ``backward()``, gradient clipping if asked for,
``optimizer.step()`` and ``zero_grad(set_to_none=True)``. Without a loss the step is one forward
under ``torch.no_grad()``; without an optimizer the gradients are let go after backward.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.data import DataLoader, Dataset

from memfit.errors import UsageError
from memfit.libraries import module_name

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
"""Makes an optimizer over the parameters it is given."""


@dataclass
class Workload:
    """One step of training or inference, as a person describes it.

    Attributes:
        model: The model, as built; memfit never changes it while capturing or planning.
        batch: Any pytree of tensors and constants, as ``loss`` or ``forward`` takes it.
        loss: Computes the scalar loss from model and batch; ``None`` for inference.
        optimizer: Makes the optimizer from parameters, or an optimizer over the model's own
            parameters; ``None`` for training without an optimizer phase.
        batch_dim: Dimension of the batch tensors along which examples are stacked.
        clip_grad_norm: Largest total gradient norm; ``None`` for no clipping.
        autocast: Element type of ``torch.autocast`` around the loss; ``None`` for none.
        forward: Runs inference; ``None`` calls ``model(**batch)`` or ``model(batch)``.
        loss_weight: Weight of a piece of the batch in a mean over pieces; ``None`` for a default
            that follows from how the loss reduces.
        autocast_cache: Whether autocast keeps the narrow copies of parameters to the end of forward
            (``cache_enabled`` of ``torch.autocast``).
    """

    model: nn.Module
    batch: Any
    loss: Callable[[Any, Any], Tensor] | None = None
    optimizer: OptimizerFactory | torch.optim.Optimizer | None = None
    batch_dim: int = 0
    clip_grad_norm: float | None = None
    autocast: torch.dtype | None = None
    forward: Callable[[Any, Any], Any] | None = None
    loss_weight: Callable[[Any], float] | None = None
    autocast_cache: bool = True

    def __post_init__(self) -> None:
        """Refuse what cannot be a step.

        Raises:
            UsageError: A field has a type no step can be made of.
        """
        if not isinstance(self.model, nn.Module):
            message = f"`model` must be an `nn.Module`, got `{type(self.model).__name__}`"
            raise UsageError(message)
        _refuse_compiled(self.model)
        if self.loss is not None:
            _refuse_loss(self.loss)
        _refuse_batch(self.batch)
        if self.optimizer is not None and self.loss is None:
            raise UsageError("`optimizer` without `loss`: give a loss, or leave the optimizer out")
        if self.optimizer is not None and not (
            isinstance(self.optimizer, torch.optim.Optimizer) or callable(self.optimizer)
        ):
            message = (
                "`optimizer` must be a function of the parameters or a `torch.optim.Optimizer`, "
                f"got `{type(self.optimizer).__name__}`"
            )
            raise UsageError(message)
        if self.clip_grad_norm is not None and self.clip_grad_norm <= 0:
            message = f"`clip_grad_norm` must be positive, got `{self.clip_grad_norm}`"
            raise UsageError(message)

    @property
    def training(self) -> bool:
        """Whether the step has a backward."""
        return self.loss is not None

    def autocasting(self) -> contextlib.AbstractContextManager[Any]:
        """What the loss runs inside: autocast, where the step asks for it."""
        if self.autocast is None:
            return contextlib.nullcontext()
        device = next((p.device.type for p in self.model.parameters()), "cpu")
        return torch.autocast(device, self.autocast, cache_enabled=self.autocast_cache)

    def infer(self, model: nn.Module, batch: Any) -> Any:
        """Run the forward of an inference step.

        Args:
            model: The model or a copy of it.
            batch: The batch or a copy of it.

        Returns:
            Whatever the model returns.
        """
        if self.forward is not None:
            return self.forward(model, batch)
        if isinstance(batch, Mapping):
            return model(**batch)
        if isinstance(batch, tuple):
            return model(*batch)
        return model(batch)


def workload_of(subject: object) -> Workload:
    """A subject that has to be a workload.

    Args:
        subject: What was given.

    Raises:
        UsageError: It is something else.
    """
    if isinstance(subject, Workload):
        return subject
    name = type(subject).__name__
    message = f"expected a `memfit.Workload`, got `{name}`"
    if isinstance(subject, nn.Module):
        message += "\nhint: write `memfit.Workload(model, batch, loss=..., optimizer=...)`"
    raise UsageError(message)


def _refuse_compiled(model: nn.Module) -> None:
    """Refuse what no op can be followed in."""
    for name, module in model.named_modules():
        what = f"`{name}` of the model" if name else "`model`"
        if isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.parameters()):
            raise UsageError(
                f"{what} is run by TorchScript\n"
                "hint: give the module that it was scripted or traced from"
            )
        # A compiled module has the one it is of; one that compiled itself has what is called.
        if "_orig_mod" in module._modules or module._compiled_call_impl is not None:
            raise UsageError(
                f"{what} is compiled already\n"
                "hint: give it as it was before `torch.compile`; `--compile`, or "
                "`memfit.fit(..., compile=True)`, compiles the step that is planned"
            )


def _refuse_loss(loss: Any) -> None:
    """Refuse what cannot be called with a model and a batch."""
    if not callable(loss):
        raise UsageError(f"`loss` must be callable, got `{type(loss).__name__}`")
    inner = loss
    while isinstance(inner, partial):
        inner = inner.func
    # A module's own module is its class's; torch's functions and classes say where they are from.
    if module_name(inner).partition(".")[0] == "torch":
        name = getattr(inner, "__name__", type(inner).__name__)
        raise UsageError(
            f"`loss` is called with the model and the batch, and `{name}` takes predictions\n"
            f"hint: write `loss=lambda model, batch: criterion(model(batch[0]), batch[1])`"
        )
    try:
        inspect.signature(loss).bind(None, None)
    except TypeError as error:
        message = f"`loss` is called with the model and the batch, and cannot be: {error}"
        raise UsageError(message) from None
    except ValueError:  # it has no signature to look at
        return


def _refuse_batch(batch: Any) -> None:
    """Refuse what yields batches and is none."""
    name = type(batch).__name__
    if isinstance(batch, DataLoader):
        how = "`next(iter(loader))`"
    elif isinstance(batch, Dataset):
        how = "`next(iter(DataLoader(dataset, batch_size=...)))`"
    elif isinstance(batch, Iterator):
        how = "`next(batches)`"
    else:
        return
    raise UsageError(f"`batch` is a `{name}`, not a batch\nhint: give one of its batches: {how}")


def batch_size(batch: Any, dim: int = 0) -> int:
    """Number of examples in a batch: the size along ``dim`` that most of its tensors share.

    Args:
        batch: Any pytree of tensors and constants.
        dim: The batch dimension.

    Returns:
        The size, or 0 when no tensor has that dimension, or one is sparse, as a graph's edges are,
        and cannot be cut. Of two equally common sizes, that of the first tensor wins.
    """
    tensors = [leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, Tensor)]
    sizes = [tensor.shape[dim] for tensor in tensors if -tensor.dim() <= dim < tensor.dim()]
    if not sizes or any(tensor.layout is not torch.strided for tensor in tensors):
        return 0
    return Counter(sizes).most_common(1)[0][0]


def slice_batch(batch: Any, start: int, stop: int, size: int, dim: int = 0) -> Any:
    """Examples ``[start, stop)`` of a batch.

    Args:
        batch: Any pytree of tensors and constants.
        start: First example.
        stop: One past the last example.
        size: Number of examples in the batch; a tensor of another size along ``dim`` is shared by
            all examples and returned as it is.
        dim: The batch dimension.

    Returns:
        The same structure with the batch tensors narrowed; they are views of the originals.
    """

    def narrow(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and -leaf.dim() <= dim < leaf.dim() and leaf.shape[dim] == size:
            return leaf.narrow(dim, start, stop - start)
        return leaf

    return tree_map(narrow, batch)
