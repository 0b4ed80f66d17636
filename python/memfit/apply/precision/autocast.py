"""Forward in fewer bits: ``torch.autocast``.

Responsible for a plan's ``autocast`` and ``autocast_fp16`` actions: which types a forward computes
in, and whether the narrow copies of parameters are kept for further uses. Which ops are cast is
torch's choice (``aten/src/ATen/autocast_mode.h``). Not responsible for the scale of a loss, which
float16 needs and bfloat16 does not (:mod:`memfit.apply.precision.loss_scale`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from memfit.apply.borrowed import borrowed
from memfit.apply.part import Part
from memfit.errors import UsageError

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
"""Element types that autocast computes in, by their names in plans."""


def modules_to_keep(model: nn.Module, paths: Sequence[str]) -> list[nn.Module]:
    """Modules that are to compute in their own types.

    Args:
        model: Whose they are.
        paths: Their paths, as ``named_modules()`` has them.

    Raises:
        UsageError: The model has no such module.
    """
    modules = dict(model.named_modules(remove_duplicate=False)) if paths else {}
    for path in paths:
        if path not in modules:
            near = get_close_matches(path, modules, 1)
            hint = f"\nhint: did you mean `{near[0]}`?" if near else ""
            raise UsageError(f"the model has no module `{path}` to keep{hint}")
    return [modules[path] for path in paths]


@contextlib.contextmanager
def kept(model: nn.Module, paths: Sequence[str]) -> Iterator[None]:
    """Have modules compute in their own types where others are under autocast.

    Autocast is off in a call of such a module, and what it is given in 16 bits is made ``float32``.
    It has to last until backward has ended: a checkpoint calls modules again then.

    Args:
        model: The model.
        paths: Which of its modules.

    Raises:
        UsageError: The model has no such module.
    """
    entered: list[contextlib.AbstractContextManager[Any]] = []

    def enter(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        device = next((it.device.type for it in tree_leaves(args) if isinstance(it, Tensor)), "cpu")
        off: contextlib.AbstractContextManager[Any] = torch.autocast(device, enabled=False)
        off.__enter__()
        entered.append(off)
        return tree_map_only(Tensor, _widened, (args, kwargs))

    def leave(_module: nn.Module, _args: Any, _result: Any) -> None:
        entered.pop().__exit__(None, None, None)

    handles = []
    try:
        for module in modules_to_keep(model, paths):
            handles.append(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(leave, always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
        while entered:
            entered.pop().__exit__(None, None, None)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in DTYPES.values() else tensor


class UnderAutocast(Part):
    """Carries out an ``autocast`` or ``autocast_fp16`` action on a model.

    Attributes:
        scales_loss: Whether the loss has to be scaled.
    """

    def __init__(self, model: nn.Module, said: Mapping[str, Any], *, trains: bool = True) -> None:
        """Prepare; nothing is switched on before :meth:`forward`.

        Args:
            model: The model the plan was made for; its first parameter says on which device.
            said: ``Autocast`` of the plan as parsed JSON.
            trains: Whether there is a loss.

        Raises:
            UsageError: It is no such thing.
        """
        dtype, cache, keep = said.get("dtype"), said.get("cache"), said.get("keep", [])
        if dtype not in DTYPES or not isinstance(cache, bool) or not isinstance(keep, list):
            message = "what the plan says of `autocast` is malformed: it needs `dtype` and `cache`"
            raise UsageError(message)
        self._held, self._keep = weakref.ref(model), keep
        self._dtype, self._cache = DTYPES[dtype], cache
        self.scales_loss = trains and self._dtype is torch.float16
        self._device = next((p.device.type for p in model.parameters()), "cpu")
        self._is_left = False

    @property
    def diverged(self) -> bool:
        """Whether the last forward was under autocast already."""
        return self._is_left

    @property
    def divergence(self) -> str:
        """Why the plan's autocast was not used, as a sentence; empty if it was."""
        return "the forward autocasts by itself" if self._is_left else ""

    def running(self) -> contextlib.AbstractContextManager[None]:
        """What a whole step runs inside."""
        return kept(borrowed(self._held), self._keep)

    def forward(self) -> contextlib.AbstractContextManager[None]:
        """What a forward runs inside, the loss included; backward needs no more.

        A block of the caller's own stays as it is: a script's ends before this does, and the state
        that this would then restore is that of the block, which would stay on for good.
        """
        self._is_left = torch.is_autocast_enabled(self._device)
        if self._is_left:
            return contextlib.nullcontext()
        return torch.autocast(self._device, self._dtype, cache_enabled=self._cache)
