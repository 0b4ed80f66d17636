"""How much scratch an op takes inside on the GPU that is here, measured by running it once.

Responsible for the ops that libraries of the GPU give memory to (a convolution's depends on the
algorithm that cuDNN takes) and for probing distinct calls of them, one at a time, by the caching
allocator's own peak. Not responsible for the CPU (:mod:`memfit.capture.probe.workspace`).

Only ops are run that cannot fail on a GPU with made-up values: an assertion there ends CUDA for the
whole process.
"""

from __future__ import annotations

from typing import Any

import torch

from memfit.capture.probe.workspace import LARGEST_SHARE, Scratch, storage_sizes
from memfit.capture.stage.call_shape import Call
from memfit.track.cuda import Window

_PROBED = frozenset(
    {
        "_fused_rms_norm_backward",
        "convolution",
        "convolution_backward",
        "cudnn_batch_norm",
        "embedding_dense_backward",
        "native_group_norm_backward",
        "native_layer_norm_backward",
    }
)

_CACHE: dict[tuple[str, tuple[object, ...]], tuple[int, tuple[int, ...]]] = {}
"""Scratch and sizes of results, by call and settings."""


def takes_gpu_scratch(name: str) -> bool:
    """Whether calls of an op are probed.

    Args:
        name: Overload name, ``aten.convolution.default``.
    """
    return name.split(".")[1] in _PROBED


def probe_gpu_scratch(calls: dict[int, Call], result_bytes: dict[int, int]) -> Scratch:
    """Measure the scratch of calls on the current GPU, running each distinct one once.

    Args:
        calls: Calls by op index.
        result_bytes: Bytes of what each op returns, by op index.

    Returns:
        The scratch by op index.
    """
    found = Scratch()
    settings = _settings()
    limit = int(_free_bytes() * LARGEST_SHARE)
    skipped: set[str] = set()
    failed: set[str] = set()
    for index, call in calls.items():
        name = str(call.func)
        key = (call.key, settings)
        if key not in _CACHE and name not in failed:
            # Gradients of a convolution and its layout copies may need as much again.
            if 2 * (call.argument_bytes + result_bytes.get(index, 0)) > limit:
                skipped.add(name)
                continue
            try:
                _CACHE[key] = _measured(call)
            except (RuntimeError, NotImplementedError, ValueError, IndexError, TypeError):
                failed.add(name)
        size, results = _CACHE.get(key, (0, ()))
        if size > 0:
            found.bytes[index] = size
        if results:
            found.results[index] = results
    torch.cuda.empty_cache()
    found.notes.extend(
        f"scratch of `{name}` was not probed: too little memory is free" for name in sorted(skipped)
    )
    found.notes.extend(f"scratch of `{name}` could not be probed" for name in sorted(failed))
    return found


def _measured(call: Call) -> tuple[int, tuple[int, ...]]:
    """The most bytes inside a call beyond those before and after it; sizes of its results."""
    with torch.device("cuda"), torch.enable_grad():
        args, kwargs = call.build()
    window = Window()
    try:
        result: Any = call.func(*args, **kwargs)
    finally:
        seen = window.close()[torch.cuda.current_device()]
    kept = max(seen.before["allocated"], seen.current["allocated"])
    return max(seen.peak["allocated"] - kept, 0), storage_sizes(result)


def _free_bytes() -> int:
    """What the device has left, with what torch's allocator keeps for later."""
    free_bytes, _ = torch.cuda.mem_get_info()
    kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return int(free_bytes) + int(kept)


def _settings() -> tuple[object, ...]:
    """What decides about cuDNN's algorithms beside the call."""
    cudnn: Any = torch.backends.cudnn  # a module in name alone: types do not know its parts
    return (
        torch.cuda.current_device(),
        cudnn.enabled,
        cudnn.benchmark,
        cudnn.deterministic,
        cudnn.allow_tf32,
        torch.are_deterministic_algorithms_enabled(),
    )
