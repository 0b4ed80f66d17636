"""How much scratch an op takes inside, measured by running it once.

Responsible for probing distinct calls, one at a time, under the profiler. Not responsible for
knowing which ops are worth it (:mod:`memfit.capture.probe.scratch_ops`).

Scratch is the highest number of bytes alive inside an op, above the larger of what is alive when it
starts and when it ends. It depends on the number of threads, which the trace therefore states, and
on how far oneDNN may round floats of 32 bits.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import record_function

from memfit.capture.stage.call_shape import Call
from memfit.torch_versions import profiled_memory

LARGEST_SHARE = 0.25
"""A probe is skipped when its tensors take more than this share of the available memory."""

_MARK = "memfit_probe_"
_RNN_BACKWARD = torch.ops.aten.mkldnn_rnn_layer_backward.default
_NORM_BACKWARD = torch.ops.aten.native_batch_norm_backward.default
_CACHE: dict[tuple[str, tuple[object, ...]], tuple[int, tuple[int, ...]]] = {}
"""Scratch and sizes of results, by call and settings."""


@dataclass(slots=True)
class Scratch:
    """What the probes found.

    Attributes:
        threads: Number of threads they ran with; 0 when some could not run.
        bytes: Scratch by op index.
        results: Sizes of the storages that an op returned, by op index; fakes do not know those of
            opaque workspaces.
        notes: One sentence per kind of op that could not be probed.
    """

    threads: int = 0
    bytes: dict[int, int] = field(default_factory=dict)
    results: dict[int, tuple[int, ...]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def probe_scratch(calls: dict[int, Call], result_bytes: dict[int, int]) -> Scratch:
    """Measure the scratch of every call, running each distinct one once, with gradients as now.

    Args:
        calls: Calls by op index, on the CPU.
        result_bytes: Bytes of what each op returns, by op index.

    Returns:
        The scratch by op index.
    """
    threads = torch.get_num_threads()
    if not calls:
        return Scratch(threads=threads)
    found = Scratch(threads=threads)
    limit = int(available_bytes() * LARGEST_SHARE)
    settings = _settings()
    pending: dict[str, Call] = {}
    skipped: dict[str, int] = {}
    for index, call in calls.items():
        if (call.key, settings) in _CACHE or call.key in pending:
            continue
        # Gradients of a convolution and its layout copies may need as much again as it is given.
        if 2 * (call.argument_bytes + result_bytes.get(index, 0)) > limit:
            skipped[str(call.func)] = skipped.get(str(call.func), 0) + 1
        else:
            pending[call.key] = call
    failed = _measure(list(pending.values()), settings)
    for index, call in calls.items():
        size, results = _CACHE.get((call.key, settings), (0, ()))
        if size > 0:
            found.bytes[index] = size
        if results:
            found.results[index] = results
    if skipped or failed:
        found.threads = 0  # what is not known is allowed for
    found.notes.extend(
        f"scratch of `{name}` was not probed: too little memory is free" for name in sorted(skipped)
    )
    found.notes.extend(f"scratch of `{name}` could not be probed" for name in sorted(failed))
    return found


def available_bytes() -> int:
    """Memory that can be taken without swapping, in bytes."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _settings() -> tuple[object, ...]:
    """What decides about scratch beside the call."""
    onednn: Any = torch.backends.mkldnn  # a module in name alone: types do not know its parts
    roundings = (onednn.matmul, onednn.conv, onednn.rnn)
    precisions = (setting.fp32_precision for setting in roundings)
    # An RNN leaves the state for its backward where gradients are on, and nowhere else.
    return (torch.get_num_threads(), torch.is_grad_enabled(), *precisions)


def _measure(calls: list[Call], settings: tuple[object, ...]) -> set[str]:
    """Run calls under the profiler and remember their scratch; returns the names that failed."""
    failed: set[str] = set()
    ran: dict[int, tuple[Call, tuple[int, ...]]] = {}
    if not calls:
        return failed
    with profiled_memory() as profiled:
        for number, call in enumerate(calls):
            try:
                ran[number] = (call, _run(call, f"{_MARK}{number}"))
            except (RuntimeError, NotImplementedError, ValueError, IndexError, TypeError):
                failed.add(str(call.func))
    marks, times, alive = _timeline(profiled.profiler.kineto_results.events())
    for number, (call, results) in ran.items():
        start, end = marks[f"{_MARK}{number}"]
        first = bisect.bisect_left(times, start)
        last = bisect.bisect_right(times, end)
        inside = alive[first : last + 1]
        scratch = max(max(inside) - max(inside[0], inside[-1]), 0)
        _CACHE[call.key, settings] = (scratch, results)
    return failed


def _run(call: Call, mark: str) -> tuple[int, ...]:
    """Run a call between marks; returns the sizes of the storages it returned."""
    args, kwargs = call.build()
    if call.func is _RNN_BACKWARD:
        args = _with_forward_state(args)
    elif call.func is _NORM_BACKWARD:
        args = _with_float_statistics(args)
    with record_function(mark):
        result = call.func(*args, **kwargs)
    return storage_sizes(result)


def _with_forward_state(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments of an RNN's backward, with the state that its forward leaves."""
    reverse, mode, hidden, layers, biases, train, bidirectional, sizes, batch_first = args[13:22]
    state = torch.ops.aten.mkldnn_rnn_layer.default(
        *args[:7], reverse, sizes, mode, hidden, layers, biases, bidirectional, batch_first, train
    )
    return (*args[:-1], state[3])


def _with_float_statistics(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments of a normalisation's backward with the statistics in the type its weight has.

    Fakes give the saved mean and deviation of a mixed-precision call the type of the input.
    """
    weight = args[2]
    if weight is None:
        return args
    statistics = [s if s is None else s.to(weight.dtype) for s in args[5:7]]
    return (*args[:5], *statistics, *args[7:])


def storage_sizes(result: Any) -> tuple[int, ...]:
    """Size of the storage behind each tensor of a result."""
    if isinstance(result, torch.Tensor):
        return (result.untyped_storage().nbytes(),)
    if isinstance(result, (list, tuple)):
        return tuple(size for item in result for size in storage_sizes(item))
    return ()


def _timeline(
    events: Iterable[Any],
) -> tuple[dict[str, tuple[int, int]], list[int], list[int]]:
    """Spans of the marks, times of memory events, and bytes alive before, between and after."""
    marks: dict[str, tuple[int, int]] = {}
    changes: list[tuple[int, int]] = []
    for event in events:
        name = event.name()
        if name == "[memory]":
            changes.append((event.start_ns(), event.nbytes()))
        elif name.startswith(_MARK):
            marks[name] = (event.start_ns(), event.start_ns() + event.duration_ns())
    changes.sort(key=lambda change: change[0])
    alive = [0, *itertools.accumulate(size for _, size in changes)]
    return marks, [time for time, _ in changes], alive
