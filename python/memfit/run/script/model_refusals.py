"""Why the steps of a script's model cannot be planned, as far as the model tells.

Responsible for what is refused before a step is recorded. Not responsible for what a recorded step
shows (:mod:`memfit.run.script.loop`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from memfit.tensors.barrier import owner_of
from memfit.track import cpu


def model_refusal(root: nn.Module, device: torch.device) -> str:
    """Why the steps of a model cannot be planned; empty when they can, as far as is known.

    Args:
        root: The model.
        device: Where it is.
    """
    if device.type not in ("cpu", "cuda"):
        return f"its parameters are on `{device.type}`; memfit plans for the CPU and CUDA"
    problem = cpu.start() if device.type == "cpu" else None
    if problem is not None:
        return f"its memory cannot be counted: {problem}"
    known = torch.distributed.is_available() and torch.distributed.is_initialized()
    if known and torch.distributed.get_world_size() > 1:
        return "it trains in several processes"
    reasons = (
        *(_module_refusal(module) for module in root.modules()),
        *(_parameter_refusal(name, p, device) for name, p in root.named_parameters()),
    )
    return next(filter(None, reasons), "")


def _module_refusal(module: nn.Module) -> str:
    kind = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        return f"it contains `{kind}`, which TorchScript runs"
    if isinstance(module, nn.DataParallel) and len(module.device_ids) > 1:
        return f"`{kind}` runs it in several threads"
    return ""


def are_lent(root: nn.Module) -> bool:
    """Whether some parameters of a model are tensors of `torch.func.functional_call`.

    Args:
        root: The model.
    """
    return any(type(parameter) is Tensor for parameter in root.parameters())


def _parameter_refusal(name: str, parameter: Tensor, device: torch.device) -> str:
    # Plain tensors are lent for a call; those of a transform go with the transform.
    if type(parameter) not in (nn.Parameter, Tensor) and owner_of(parameter) is None:
        return f"its parameter `{name}` is a `{type(parameter).__name__}`"
    if parameter.device != device:
        return f"its parameters are on `{device}` and on `{parameter.device}`"
    return ""
