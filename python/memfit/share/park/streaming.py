"""Which tensors of a model may come back while it runs already.

Responsible for finding those that may not: they stand in code that looks at a tensor's class, and
would go another way, with other roundings, while a barrier is before it. Not responsible for
bringing tensors in (:mod:`memfit.share.park.parked`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

_LOOKS_AT_CLASSES = (
    # Their fast path is not taken where one of their tensors has a class of its own, or a hook is
    # on one of their modules (`torch/nn/modules/activation.py`, `transformer.py`).
    nn.MultiheadAttention,
    nn.TransformerEncoder,
    nn.TransformerEncoderLayer,
    # TorchScript runs ops without asking a tensor's class.
    torch.jit.ScriptModule,
)


def needed_at_once(model: nn.Module) -> Iterator[Tensor]:
    """Find the tensors that have to be there before a model runs.

    Args:
        model: The model.

    Yields:
        Parameters and module buffers of compiled and scripted modules, and of attention that has
        a fast path; a tensor may come more than once.
    """
    for module in model.modules():
        if isinstance(module, _LOOKS_AT_CLASSES) or _is_compiled(module):
            yield from module.parameters()
            yield from module.buffers()


def _is_compiled(module: nn.Module) -> bool:
    """Whether it was compiled for tensors of a class, and would be compiled again for another."""
    # `module.compile()` sets the first, `torch.compile` of a module or of its forward the second.
    called = module._compiled_call_impl
    return called is not None or hasattr(module.forward, "_torchdynamo_orig_callable")
