"""A stand-in for the CUDA driver: built, loaded, filled, broken and asked by tests."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from memfit.guard import cuda_limit
from memfit.share.park import parked
from memfit.share.park.cuda_memory import CudaMemory
from memfit.share.pool import device as pool_device

SOURCE = Path(__file__).parents[2] / "crates" / "memfit-memory" / "stand-in" / "driver.c"
OUT_OF_MEMORY = 2


HELD = (
    "handles",
    "mappings",
    "reservations",
    "used_bytes",
    "pinned_bytes",
    "contexts",
    "misuses",
)


class Counts(ctypes.Structure):
    """What it holds, as the C file has it."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("calls", *HELD)]

    def held(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in HELD if getattr(self, name)}


class StandIn:
    """One driver with a state of its own."""

    def __init__(self, folder: Path, *flags: str) -> None:
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("needs a C compiler to build the stand-in for CUDA's driver")
        self.path = str(folder / "libstandin.so")
        command = [compiler, "-O1", "-shared", "-fPIC", *flags, "-o", self.path, str(SOURCE)]
        subprocess.run(command, check=True)
        self.library = ctypes.CDLL(self.path)
        self.library.stand_in_set.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
        self.library.stand_in_fail.argtypes = [ctypes.c_uint64, ctypes.c_int, ctypes.c_int]

    def has(self, total_bytes: int) -> None:
        self.library.stand_in_set(total_bytes, 2**63, 0)

    def fail(self, at: int, code: int = 700) -> None:
        self.library.stand_in_fail(at, 0, code)

    def put_in(self, patch: pytest.MonkeyPatch) -> None:
        """Let models on the CPU be parked, and be in pools, as if they were on ``cuda:0``."""
        made_as_ever = parked._memory_for

        def memory_for(device, laid, spill, source, host_bytes, *, allow_memory):
            if source is not None:
                return made_as_ever(
                    torch.device("cuda:0"),
                    laid,
                    spill,
                    source,
                    host_bytes,
                    allow_memory=allow_memory,
                )
            return CudaMemory(
                laid[-1].end,
                device,
                spill,
                host_bytes=host_bytes,
                allow_memory=True,
                driver=self.path,
            )

        patch.setattr(parked, "_memory_for", memory_for)
        patch.setattr(pool_device, "place_of", lambda _: "cuda:0")
        patch.setattr(cuda_limit, "existing", lambda _: torch.device("cuda:0"))

    def peaks(self) -> tuple[int, int]:
        """The most bytes used of the device and pinned of the host since this was last asked."""
        peaks = ctypes.c_uint64(), ctypes.c_uint64()
        self.library.stand_in_peaks(*map(ctypes.byref, peaks))
        return peaks[0].value, peaks[1].value

    @property
    def counts(self) -> Counts:
        counts = Counts()
        self.library.stand_in_count(ctypes.byref(counts))
        return counts
