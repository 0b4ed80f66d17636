"""Places for tensors that are not needed for a while: a file, or the host's memory.

Responsible for one interface to both, for choosing by a plan, and for the file of tensors on the
CPU. What is on a GPU goes through :mod:`memfit.apply.offload.pinned`. Not responsible for when a
tensor goes or comes (:mod:`memfit.apply.offload.activations`).
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from memfit import _native
from memfit.apply.offload.cuda_copies import CudaCopies
from memfit.apply.offload.pinned import PinnedTier, StagedTier
from memfit.errors import OffloadError, UsageError

if TYPE_CHECKING:
    from os import PathLike

    import torch
    from torch import Tensor


@dataclass(slots=True, frozen=True)
class Moved:
    """What a tier did so far.

    Attributes:
        bytes_written: Bytes that went out.
        bytes_read: Bytes that came back.
        seconds_waited: What the step waited for either.
    """

    bytes_written: int = 0
    bytes_read: int = 0
    seconds_waited: float = 0.0


class Parcel(Protocol):
    """An allocation that is elsewhere; letting go of it forgets it."""

    def settle(self) -> None:
        """Wait until its source may be let go.

        Raises:
            OffloadError: It could not be written.
        """

    def fetch(self, target: Tensor) -> None:
        """Fill ``target``, bytes on the allocation's device, before anything reads it.

        Raises:
            OffloadError: The bytes did not come back as they went.
        """

    def prefetch(self, target: Tensor) -> None:
        """Begin to fill ``target``, which is held meanwhile; what was begun before has ended then.

        Raises:
            OffloadError: It was not written.
        """

    def wait(self) -> None:
        """Wait until what was begun is done.

        Raises:
            OffloadError: The bytes did not come back as they went.
        """


class Tier(Protocol):
    """A place for allocations.

    Attributes:
        folder: Where tensors of the CPU may have mapped files; empty for nowhere.
    """

    folder: str

    def refusal(self, device: torch.device) -> str | None:
        """Why allocations on ``device`` cannot go here; ``None`` when they can."""

    def send(self, source: Tensor) -> Parcel:
        """Begin to copy the storage of ``source``, which must stay as it is until it settled.

        Raises:
            OffloadError: No more can be sent.
        """

    def moved(self) -> Moved:
        """What it did so far."""


def open_tier(kind: str, window_bytes: int, folder: str | PathLike[str]) -> Tier:
    """Make the place that a plan names ready.

    Args:
        kind: ``disk`` or ``host``.
        window_bytes: Most bytes on their way out at a time.
        folder: For files; empty for the system's folder for temporary ones.

    Raises:
        UsageError: There is no such tier.
        OffloadError: The folder cannot be used.
    """
    if kind == "host":
        return HostTier()
    if kind != "disk":
        message = f"the plan offloads to `{kind}`, which this memfit does not know"
        raise UsageError(message)
    return DiskTier(window_bytes, folder)


class DiskTier:
    """A file without a name: gone when the process ends, however it ends.

    Attributes:
        folder: Where it is.
    """

    def __init__(
        self,
        window_bytes: int,
        folder: str | PathLike[str] = "",
        *,
        drop_cache: bool = False,
        allow_memory: bool = False,
    ) -> None:
        """Open the file.

        Args:
            window_bytes: Most bytes on their way out at a time.
            folder: Where; empty for the system's folder for temporary files.
            drop_cache: Let the system's copies in memory go at once.
            allow_memory: Accept a folder whose files are kept in memory.

        Raises:
            OffloadError: The folder cannot be used.
        """
        self.folder = str(folder) or tempfile.gettempdir()
        self._store = _native.Store(
            self.folder, window_bytes, drop_cache=drop_cache, allow_memory=allow_memory
        )
        self._staged = StagedTier(CudaCopies(), self._store)

    def refusal(self, device: torch.device) -> str | None:
        """Why allocations on ``device`` cannot go here; ``None`` when they can."""
        if device.type in {"cpu", "cuda"}:
            return None
        return f"is on `{device.type}`, from where memfit cannot write to a disk"

    def send(self, source: Tensor) -> Parcel:
        """Begin to write the storage of ``source``."""
        if source.device.type == "cuda":
            return self._staged.send(source)
        storage = source.untyped_storage()
        return _Written(self._store.write((storage.data_ptr(), storage.nbytes()), storage))

    def moved(self) -> Moved:
        """What it did so far."""
        known = self._store.statistics()
        waited = known["seconds_waited"] + self._staged.count.seconds_waited
        return Moved(known["bytes_written"], known["bytes_read"], waited)


class HostTier(PinnedTier):
    """The host's memory, for tensors on a GPU."""

    def __init__(self) -> None:
        """Take nothing before something is sent."""
        super().__init__(CudaCopies())

    def moved(self) -> Moved:
        """What it did so far; waits of the device are not known."""
        return Moved(self.count.written, self.count.read, self.count.seconds_waited)


class _Written:
    """A block of the file, for memory of the CPU."""

    __slots__ = ("_block", "_coming")

    def __init__(self, block: _native.StoredBlock) -> None:
        self._block = block
        self._coming: tuple[tuple[int, int], Tensor] | None = None

    def settle(self) -> None:
        self._block.settle()

    def fetch(self, target: Tensor) -> None:
        self._block.fetch((target.data_ptr(), target.nbytes))

    def prefetch(self, target: Tensor) -> None:
        if self._coming is not None:  # who began that was interrupted
            self.wait()
        self._coming = ((target.data_ptr(), target.nbytes), target)
        try:
            self._block.prefetch(*self._coming)
        except OffloadError:
            self._coming = None
            raise

    def wait(self) -> None:
        if self._coming is None:
            return
        memory, _ = self._coming
        try:
            self._block.wait()
        except OffloadError:
            self._fetch_again(memory)
        self._coming = None

    def _fetch_again(self, memory: tuple[int, int]) -> None:
        """An interrupt may have come before the transfer began, or after it had ended."""
        try:
            self._block.fetch(memory)
        except OffloadError:
            self._coming = None  # its memory is the caller's again
            raise
