"""Memory older than a forward that the forward writes to, as a buffer that each call updates.

The next call will write to it again, perhaps before this one's backward and where nothing watches:
in a forward that is planned by itself, or that nothing plans. Responsible for telling such memory
apart. Not responsible for what is done about it (:mod:`memfit.apply.remat.watch`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from memfit import _native
from memfit.tensors.storage import address


class Rewritten:
    """What one forward wrote to so far, of what was there before it."""

    def __init__(self, outlasts: Callable[[torch.UntypedStorage], bool]) -> None:
        """Begin with the forward.

        Args:
            outlasts: Whether a storage is older than the forward, where its memory does not tell.
        """
        self._since = _native.last_event()
        self._outlasts = outlasts
        self._storages: dict[int, weakref.ref[Any]] = {}

    def __contains__(self, tensor: Tensor) -> bool:
        """Whether it wrote to the memory of a strided tensor."""
        if not self._storages:
            return False
        storage = tensor.untyped_storage()
        known = self._storages.get(storage._cdata)
        return known is not None and known() is storage

    def writes(self, tensors: Iterable[Tensor]) -> None:
        """An op writes to tensors.

        Args:
            tensors: They.
        """
        for tensor in tensors:
            if tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                if storage._cdata not in self._storages and self._is_older(storage):
                    self._storages[storage._cdata] = weakref.ref(storage)

    def _is_older(self, storage: torch.UntypedStorage) -> bool:
        place = address(storage) if storage.device.type == "cpu" else None
        # Only of counted memory is it known when it was allocated.
        if place is not None and _native.is_counted(place):
            came = _native.block_event(place)
            return came <= self._since or self._outlasts(storage)
        return self._outlasts(storage)
