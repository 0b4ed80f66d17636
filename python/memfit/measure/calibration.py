"""This machine's speed, for the roofline cost model.

Responsible for a device profile measured in under a second: matrix multiplication rates, memory
bandwidth, what an op costs that does nothing, and what new memory costs that large results lie in.
Not responsible for keeping it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from memfit.measure.curves import seconds_here

_MATRIX = 768
_BANDWIDTH_BYTES = 96 << 20
_SMALL_OPS = 500
_SECONDS_EACH = 0.15
"""Time given to each measurement; the fastest run counts."""
_SECONDS_BRIEFLY = 0.02
"""Time given to what few plans ask for."""
_TYPES = {
    torch.float32: _SECONDS_EACH,
    torch.bfloat16: _SECONDS_EACH,
    torch.float16: _SECONDS_BRIEFLY,
}


def calibrate(device: str = "cpu") -> dict[str, Any]:
    """Measure a device.

    Args:
        device: ``cpu`` or a CUDA device.

    Returns:
        A device profile: ``name``, ``flops_per_second`` by element type, ``bytes_per_second`` and
        ``op_overhead_seconds``; on a CPU that maps large results anew also
        ``new_memory_bytes_per_second``.
    """
    place = torch.device(device)
    with torch.no_grad():
        flops = {
            str(dtype).removeprefix("torch."): _matrix_rate(dtype, place, seconds)
            for dtype, seconds in _TYPES.items()
        }
        flops.update(_eight_bit_rate(place))
        return {
            "name": _name(place),
            "flops_per_second": flops,
            "bytes_per_second": _bandwidth(place),
            "op_overhead_seconds": _overhead(place),
            **_new_memory(place),
        }


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"this machine's CPU, {threads} thread{'s' if threads > 1 else ''}"


def _fastest(
    call: Callable[[], Any], device: torch.device, seconds: float = _SECONDS_EACH
) -> float:
    """Seconds of the fastest of as many calls as fit the time given, at least two."""
    best = float("inf")
    start = time.perf_counter()
    runs = 0
    while runs < 2 or time.perf_counter() - start < seconds:  # noqa: PLR2004 - first warms up
        began = seconds_here(device)
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, seconds_here(device) - began)
        runs += 1
    return max(best, 1e-9)


def _matrix_rate(dtype: torch.dtype, device: torch.device, seconds: float) -> float:
    """Floating-point operations per second of a square product; smaller where the type is slow."""
    size = _MATRIX if device.type == "cpu" else 8 * _MATRIX
    trial: Tensor = torch.ones(size // 8, size // 8, dtype=dtype, device=device)
    if _fastest_once(trial, device) * 8**3 > _SECONDS_EACH:
        size //= 4
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    return 2 * size**3 / _fastest(lambda: matrix @ matrix, device, seconds)


def _eight_bit_rate(device: torch.device) -> dict[str, float]:
    """The same of a product in 8 bits, by the name of its type; nothing where there is none."""
    size = _MATRIX if device.type == "cpu" else 8 * _MATRIX
    matrix = torch.ones(size, size, dtype=torch.int8, device=device)
    try:
        seconds = _fastest(lambda: torch._int_mm(matrix, matrix.t()), device, _SECONDS_BRIEFLY)
    except (RuntimeError, NotImplementedError):
        return {}
    return {"int8": 2 * size**3 / seconds}


def _fastest_once(matrix: Tensor, device: torch.device) -> float:
    _ = matrix @ matrix
    began = seconds_here(device)
    _ = matrix @ matrix
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return seconds_here(device) - began


def _bandwidth(device: torch.device) -> float:
    """Bytes read and written per second by a copy that no cache holds."""
    source = torch.ones(_BANDWIDTH_BYTES // 4, device=device)
    target = torch.empty_like(source)
    return 2 * _BANDWIDTH_BYTES / _fastest(lambda: target.copy_(source), device)


def _new_memory(device: torch.device) -> dict[str, float]:
    """Bytes a second at which new memory is touched, beyond filling it; nothing where none is new.

    A C library that keeps what is freed, as glibc may be told to, takes no longer than to fill it.
    """
    if device.type != "cpu":
        return {}
    there = torch.empty(_BANDWIDTH_BYTES // 4)
    filled = _fastest(lambda: there.fill_(1), device, _SECONDS_BRIEFLY)
    made = _fastest(lambda: torch.ones(_BANDWIDTH_BYTES // 4), device, _SECONDS_BRIEFLY)
    if made < 1.5 * filled:
        return {}
    return {"new_memory_bytes_per_second": _BANDWIDTH_BYTES / (made - filled)}


def _overhead(device: torch.device) -> float:
    tiny = torch.ones(1, device=device)

    def many() -> None:
        for _ in range(_SMALL_OPS):
            tiny.add(1)

    return _fastest(many, device) / _SMALL_OPS
