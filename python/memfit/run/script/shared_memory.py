"""Tensors that the script is about to share with other processes.

To torch, memory that is a mapped file is shared already, whoever sees the file: ``share_memory_()``
would do nothing, and another process would write to pages of its own. Responsible for seeing that
something in a mapped file of memfit's is about to be shared. Not responsible for having it in
memory before (:mod:`memfit.run.script.held_in_files`).
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

    def install(self) -> None:
        """See what is shared, and what is sent to other processes."""
        original: Any = Tensor.share_memory_

        @functools.wraps(original)
        def share(tensor: Tensor) -> Tensor:
            self._about_to_share(tensor)
            return original(tensor)  # type: ignore[no-any-return]

        Tensor.share_memory_ = share  # type: ignore[method-assign]

        def put_back() -> None:
            if Tensor.share_memory_ is share:
                Tensor.share_memory_ = original  # type: ignore[method-assign]

        self._undo.append(put_back)
        for kind in _KINDS:
            self._stand_in_for_sending(kind)

    def remove(self) -> None:
        """Put everything back."""
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
            elif _is_mapped(tensor):  # a queue's thread, beside which the script may use it
                tensor = tensor.detach().clone().requires_grad_(tensor.requires_grad)
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
        if not _is_mapped(tensor):
            return
        self._shares(tensor)
        if _is_mapped(tensor):
            raise OffloadError(
                "a tensor that is to be shared with other processes is in a mapped file of "
                "memfit's, and cannot come back\nhint: run the script with `--no-offload`"
            )


def _is_mapped(tensor: Tensor) -> bool:
    storage = storage_of(tensor)
    return storage is not None and is_private_mapping(storage)
