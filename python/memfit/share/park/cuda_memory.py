"""A model's memory on a CUDA device.

Responsible for tensors in it, and for torch's own caching allocator, which gives free blocks up
where the driver has no room. Not responsible for the driver's calls
(``crates/memfit-memory/src/arena/cuda``), for the copy of what is parked
(``crates/memfit-memory/src/park/cuda``), nor for which tensors are moved
(:mod:`memfit.share.park.layout`).

The memory is the driver's and not torch's: addresses that stay reserved while what is behind them
comes and goes. So ``torch.cuda.memory_allocated`` does not count it, and
``torch.cuda.mem_get_info`` does; a guard's share for torch follows it.
"""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike, fspath
from typing import Any

import torch
from torch import Tensor

from memfit import _native
from memfit.errors import ParkError
from memfit.guard import cuda_limit, overhead
from memfit.share.park.layout import Block

ALIGNMENT = 512
"""What torch's own allocator aligns storages on a GPU to."""


class CudaMemory:
    """Memory of a device that can be given back while its address stays."""

    def __init__(
        self,
        length: int,
        device: torch.device,
        spill: str | PathLike[str],
        *,
        host_bytes: int | None = None,
        allow_memory: bool = False,
        driver: str | None = None,
    ) -> None:
        """Reserve addresses; nothing is behind them yet.

        Args:
            length: How many bytes.
            device: The device.
            spill: Folder for what the host has no room for.
            host_bytes: Most bytes of the host's memory for the parked copy; by default half of
                what is free there when the model is parked.
            allow_memory: Accept a folder whose files are kept in memory.
            driver: A library that stands in for CUDA's driver in tests; its memory is the host's.

        Raises:
            ParkError: The folder cannot be used, or the driver refuses.
        """
        self._device = device
        self._host_bytes = host_bytes
        self._memory = _native.ParkedCudaMemory(
            length, device.index or 0, fspath(spill), allow_memory=allow_memory, driver=driver
        )

    @property
    def length(self) -> int:
        """Its length in bytes, in whole units of the device."""
        return self._memory.length

    @property
    def is_parked(self) -> bool:
        """Whether it is given back."""
        return self._memory.is_parked

    def place(self, block: Block) -> Tensor:
        """Memory for a storage, as bytes.

        Args:
            block: The storage; those before it in the memory have theirs.

        Returns:
            A tensor of its length. The memory lives as long as its last tensor.

        Raises:
            ParkError: The device has no room for it (``no_memory``).
        """
        self._or_without_cache(lambda: self._memory.open_to(block.end))
        capsule = self._memory.tensor(block.start, block.storage.nbytes())
        lent: Tensor = torch.utils.dlpack.from_dlpack(capsule)
        return lent

    @property
    def host_bytes(self) -> int:
        """Bytes of the host's memory that the parked copy takes now."""
        return self._memory.host_bytes

    def park(self, host_bytes: int | None = None) -> None:
        """Keep every byte and give the memory back.

        Args:
            host_bytes: As for the memory itself, for this time.

        Raises:
            ParkError: Nothing has changed.
        """
        self._memory.park(self._host_bytes if host_bytes is None else host_bytes)
        cuda_limit.measure_anew()

    def to_disk(self) -> None:
        """Move what the host's memory keeps to the disk.

        Raises:
            ParkError: Nothing has changed.
        """
        self._memory.to_disk()

    def wake(self) -> None:
        """Have every byte back at its address.

        Raises:
            ParkError: It is still parked.
        """
        self._or_without_cache(self._memory.wake)

    def give_up(self) -> None:
        """Wake it and close its file: it cannot be parked any more.

        Raises:
            ParkError: It is still parked.
        """
        self._or_without_cache(self._memory.give_up)

    def statistics(self) -> dict[str, Any]:
        """What it did so far."""
        # A GPU's memory is never read from a weights file.
        return {"bytes_in_source": 0, **self._memory.statistics()}

    def _or_without_cache(self, action: Callable[[], None]) -> None:
        """Do something; where the device has no room, once more without torch's free blocks."""
        try:
            action()
        except ParkError as error:
            if error.reason != "no_memory":
                raise
            overhead.release(str(self._device))
            action()
        cuda_limit.measure_anew()
