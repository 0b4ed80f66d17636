"""Tensors that the script is about to share with other processes.

Torch takes every mapped file for shared memory. Those of memfit's are private: ``share_memory_()``
would do nothing, and another process would write to its own copy. Responsible for noticing that a
tensor in such a file is about to be shared. Not responsible for bringing it back to memory
(:mod:`memfit.run.script.held_in_files`).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

from torch import Tensor, nn

from memfit.errors import OffloadError
from memfit.tensors.storage import is_private_mapping
from memfit.track.owners import storage_of

_KINDS = (Tensor, nn.Parameter)


class Sharing:
    """Stands in for what shares tensors, from :meth:`install` to :meth:`remove`."""

    def __init__(self, shares: Callable[[Tensor], None]) -> None:
        """Stand in for nothing yet.

        Args:
            shares: Has a tensor that is in a mapped file in memory.
        """
        self._shares = shares
        self._thread = threading.get_ident()
        self._undo: list[Callable[[], None]] = []

    def install(self, replace: Callable[[Any, str, Any], None]) -> None:
        """See what is shared, and what is sent to other processes.

        Args:
            replace: Sets an attribute until it is put back.
        """
        original: Any = Tensor.share_memory_

        @functools.wraps(original)
        def share(tensor: Tensor) -> Any:
            self._about_to_share(tensor)
            return original(tensor)

        replace(Tensor, "share_memory_", share)
        for kind in _KINDS:
            self._stand_in_for_sending(kind)

    def remove(self) -> None:
        """Send as torch does again."""
        while self._undo:
            self._undo.pop()()

    def _stand_in_for_sending(self, kind: type) -> None:
        known: dict[type, Callable[[Any], Any]] = vars(ForkingPickler)["_extra_reducers"]
        original = known.get(kind)
        if original is None:
            return

        def reduce(tensor: Tensor) -> Any:
            if threading.get_ident() == self._thread:
                self._about_to_share(tensor)
            elif is_in_mapped_file(tensor):  # a queue's thread: the script may be using it
                copied, trains = tensor.detach().clone(), tensor.requires_grad
                is_parameter = kind is nn.Parameter
                tensor = (
                    nn.Parameter(copied, trains) if is_parameter else copied.requires_grad_(trains)
                )
            return original(tensor)

        ForkingPickler.register(kind, reduce)

        def put_back() -> None:
            if known.get(kind) is reduce:
                ForkingPickler.register(kind, original)

        self._undo.append(put_back)

    def _about_to_share(self, tensor: Tensor) -> None:
        """Have a tensor in memory.

        Raises:
            OffloadError: It is in a mapped file still, and would not be shared.
        """
        if not is_in_mapped_file(tensor):
            return
        self._shares(tensor)
        if is_in_mapped_file(tensor):
            raise OffloadError(
                "a tensor that is to be shared with other processes is in a mapped file of "
                "memfit's, and cannot come back\nhint: run the script with `--no-offload`"
            )


def is_in_mapped_file(tensor: Tensor) -> bool:
    """Whether a tensor's memory is a mapped file of memfit's.

    Args:
        tensor: The tensor.
    """
    storage = storage_of(tensor)
    return storage is not None and is_private_mapping(storage)
