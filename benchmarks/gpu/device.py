"""The device that is measured: every call of CUDA that the pieces make, each in a line or two.

Responsible for the same questions on a GPU and, for rehearsals, on the CPU. Not responsible for
what is measured with the answers. Calls that torch has no public name for say where they are from.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

Kind = Literal["cpu", "cuda"]

_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class Peaks:
    """The most bytes of a call.

    Attributes:
        allocated_bytes: In live tensors.
        reserved_bytes: Taken from the device by torch's allocator; ``None`` on a CPU.
    """

    allocated_bytes: int
    reserved_bytes: int | None


@dataclass(frozen=True, slots=True)
class Setting:
    """Where figures come from; results that differ here are never put on one page.

    Attributes:
        device: Its name.
        device_bytes: Its memory.
        driver: The driver's version; empty on a CPU.
        torch: Version.
        cuda: Version of CUDA that torch was built for; empty where none.
        cudnn: Version; 0 where there is none.
        memfit: Version.
        python: Version.
        processor: Of the host.
        cores: That this process may use.
        is_small: Whether models are of rehearsal size.
    """

    device: str
    device_bytes: int
    driver: str
    torch: str
    cuda: str
    cudnn: int
    memfit: str
    python: str
    processor: str
    cores: int
    is_small: bool

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


class Device:
    """A CPU or the current GPU.

    Attributes:
        kind: ``cpu`` or ``cuda``.
        place: The device for torch.
    """

    def __init__(self, kind: Kind) -> None:
        """Name it; nothing of CUDA is called before something is asked."""
        self.kind: Kind = kind
        self.place = torch.device(kind)

    @property
    def is_gpu(self) -> bool:
        """Whether it is a GPU."""
        return self.kind == "cuda"

    @property
    def name(self) -> str:
        """Its name, as its driver or the system says."""
        return str(torch.cuda.get_device_name(self.place)) if self.is_gpu else processor()

    def synchronize(self) -> None:
        """Wait for all that it was told to do."""
        if self.is_gpu:
            torch.cuda.synchronize()

    def give_back_free(self) -> None:
        """Let torch's allocator return what it keeps for later."""
        if self.is_gpu:
            torch.cuda.empty_cache()

    def memory(self) -> tuple[int, int]:
        """Free and total bytes, all processes counted."""
        if self.is_gpu:
            free_bytes, total_bytes = torch.cuda.mem_get_info()
            return int(free_bytes), int(total_bytes)
        page = os.sysconf("SC_PAGE_SIZE")
        return page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")

    def forget_peaks(self) -> None:
        """Begin the allocator's peaks anew."""
        if self.is_gpu:
            torch.cuda.reset_peak_memory_stats()

    def peaks(self) -> Peaks:
        """The allocator's peaks since then; of a GPU only."""
        return Peaks(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())

    def retries(self) -> int:
        """Times that the allocator gave its cache back to find room; of a GPU only."""
        return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))

    def library_bytes(self) -> int:
        """What cuBLAS holds of torch's allocator as workspace; it takes it again when it needs it.

        It is allocated as tensors are, lives as long as the process, and belongs to no step.
        """
        if not self.is_gpu:
            return 0
        before = torch.cuda.memory_allocated()
        torch._C._cuda_clearCublasWorkspaces()  # torch/csrc/cuda/Module.cpp; no public way
        return int(before - torch.cuda.memory_allocated())

    def hold_to(self, share: float) -> None:
        """Let torch's allocator reserve at most a share of the GPU; 1 for all."""
        torch.cuda.set_per_process_memory_fraction(share)

    def start_recording(self) -> None:
        """Record what torch's allocator is asked for, with Python's stacks; of a GPU only."""
        torch.cuda.memory._record_memory_history(stacks="python", max_entries=1_000_000)

    def stop_recording(self) -> dict[str, Any]:
        """End that, and return what was recorded."""
        recorded: dict[str, Any] = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(enabled=None)
        return recorded


def clock(device: Device) -> Callable[[], Callable[[], float]]:
    """A clock of the device: a call starts it, a call of what that returns gives the seconds."""
    return _events if device.is_gpu else _wall


def _events() -> Callable[[], float]:
    """The GPU's own time between two points of the current stream."""
    began = torch.cuda.Event(enable_timing=True)
    ended = torch.cuda.Event(enable_timing=True)
    began.record()

    def stop() -> float:
        ended.record()
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1e3  # milliseconds

    return stop


def _wall() -> Callable[[], float]:
    from time import perf_counter

    began = perf_counter()
    return lambda: perf_counter() - began


def setting(device: Device, *, small: bool) -> Setting:
    """Where figures of this process come from."""
    from importlib import metadata

    cudnn: Any = torch.backends.cudnn
    return Setting(
        device=device.name,
        device_bytes=device.memory()[1],
        driver=driver() if device.is_gpu else "",
        torch=str(torch.__version__),
        cuda=str(torch.version.cuda or ""),
        cudnn=int(cudnn.version() or 0) if device.is_gpu else 0,
        memfit=metadata.version("memfit"),
        python=platform.python_version(),
        processor=processor(),
        cores=len(os.sched_getaffinity(0)),
        is_small=small,
    )


def processor() -> str:
    """The host's processor by its own name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def driver() -> str:
    """Version of the NVIDIA driver: of its kernel module, else as ``nvidia-smi`` says."""
    import re
    import shutil
    import subprocess

    if _DRIVER.exists():
        found = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", _DRIVER.read_text(errors="replace"))
        if found:
            return found.group(1)
    program = shutil.which("nvidia-smi")
    if program is None:
        return "unknown"
    asked = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=30)
    return (done.stdout.strip().splitlines() or ["unknown"])[0]
