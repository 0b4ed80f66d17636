"""Copies between a GPU and pinned memory of the host, on a stream of their own.

Responsible for every call of CUDA that offloading makes. Nothing here is used, nor any memory or
stream taken, before the first tensor of a GPU is sent.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from memfit._native import bytes_text
from memfit.errors import OffloadError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True, frozen=True)
class CopyEnd:
    """The end of a copy.

    Attributes:
        event: It.
        device: The device whose computation waits for it.
    """

    event: torch.cuda.Event
    device: torch.device


class CudaCopies:
    """Copies on one stream per device."""

    def __init__(self) -> None:
        """Create nothing yet."""
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def refusal(self, device: torch.device) -> str | None:
        """Why ``device`` is none to copy from; ``None`` when it is one."""
        if device.type == "cuda":
            return None
        return f"is on `{device.type}`: only what is on a GPU can go to the host's memory"

    def pin(self, size_bytes: int) -> RegisteredMemory:
        """Host memory of exactly this size, which CUDA knows."""
        return RegisteredMemory(size_bytes)

    def begin(self, target: Tensor, source: Tensor) -> CopyEnd:
        """Begin to copy bytes, after all that the current stream has been told to do."""
        outwards = source.device.type == "cuda"
        device = source.device if outwards else target.device
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
        if not outwards:
            target.record_stream(stream)  # it may be let go before anyone has asked for it
        return CopyEnd(event, device)

    def order_after(self, end: CopyEnd) -> None:
        """Let the device's current stream wait for ``end``."""
        torch.cuda.current_stream(end.device).wait_event(end.event)

    def is_over(self, end: CopyEnd) -> bool:
        """Whether ``end`` has come."""
        return bool(end.event.query())  # type: ignore[no-untyped-call]

    def wait(self, end: CopyEnd) -> None:
        """Wait for ``end`` on the host."""
        end.event.synchronize()


class RegisteredMemory:
    """An anonymous mapping that CUDA has page-locked.

    Attributes:
        bytes: All of it; must not outlive this.
    """

    def __init__(self, size_bytes: int) -> None:
        """Map and pin.

        Raises:
            OffloadError: CUDA refuses to pin that much.
        """
        self._registered = False
        self._mapping = mmap.mmap(-1, size_bytes)
        self.bytes = torch.frombuffer(self._mapping, dtype=torch.uint8)
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        error = int(runtime.cudaHostRegister(self.bytes.data_ptr(), size_bytes, 0))
        if error != 0:
            message = (
                f"CUDA cannot pin {bytes_text(size_bytes)} of the host's memory: error {error}\n"
                "hint: offload to a disk instead, or raise the limit on locked memory"
            )
            raise OffloadError(message)
        self._registered = True

    def __del__(self) -> None:
        """Unpin it, before it is unmapped."""
        if self._registered:
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            runtime.cudaHostUnregister(self.bytes.data_ptr())
