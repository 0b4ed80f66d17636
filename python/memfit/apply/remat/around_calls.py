"""What runs before and after each call of a module, unseen by torch's own layers.

An encoder layer and attention compute by one op in evaluation, unless a module in them has a hook:
then they run others, which round otherwise. There, the module's ``forward`` is replaced.
Responsible for the choice between both. Not responsible for what runs
(:mod:`memfit.apply.remat.remat`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakSet

from torch import nn

from memfit.apply.replaced import replaced

_BY_ONE_OP = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


class Handle(Protocol):
    """Ends what runs around the calls of a module."""

    def remove(self) -> None:
        """End it."""


def looking_for_hooks(model: nn.Module) -> WeakSet[nn.Module]:
    """Modules at whose hooks a layer of torch's looks that computes by one op.

    Args:
        model: The model.
    """
    layers = (it for it in model.modules() if isinstance(it, _BY_ONE_OP))
    return WeakSet(inner for layer in layers for inner in layer.modules())


def around_calls(
    module: nn.Module,
    before: Callable[[nn.Module, Any], None],
    after: Callable[[nn.Module, Any, Any], None],
    *,
    by_hooks: bool,
) -> list[Handle]:
    """Run something before and after each call of a module, whether it returns or raises.

    Args:
        module: The module.
        before: Told of the module and its arguments.
        after: Told of them, and of a result, which means nothing.
        by_hooks: Whether hooks may be on it.
    """
    if by_hooks:
        return [
            module.register_forward_pre_hook(before, prepend=True),
            module.register_forward_hook(after, prepend=True, always_call=True),
        ]
    return [_Replaced(module, before, after)]


class _Replaced:
    """A ``forward`` that stands in for a module's."""

    def __init__(
        self,
        module: nn.Module,
        before: Callable[[nn.Module, Any], None],
        after: Callable[[nn.Module, Any, Any], None],
    ) -> None:
        whole = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            before(module, args)
            try:
                return whole(*args, **kwargs)
            finally:
                after(module, args, None)

        self._standing = contextlib.ExitStack()
        self._standing.enter_context(replaced(module, forward))

    def remove(self) -> None:
        self._standing.close()
