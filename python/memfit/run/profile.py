"""Seconds of every op of a recorded step, from running the real step.

Responsible for timing ops as the dispatcher sees them, in the very order in which a trace numbers
them, and for matching the two. Not responsible for the trace.

A step takes longer than its ops: there is Python between them, and memory that is let go is handed
back to the system, which takes the longer the more it was. What an untimed step takes beyond its
ops is theirs too: a little each, the rest by the bytes that they make.

A step that does not fit the memory there is runs on fewer examples; times then grow with the bytes
an op moves, or with the examples where an op mostly computes.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memfit._native import Trace
from memfit.errors import UsageError
from memfit.run.fitted import Fitted
from memfit.tensors.operators import operator_of
from memfit.tensors.storage import is_wrapper
from memfit.workload import Workload, batch_size, slice_batch

TIMED_STEPS = 2
"""Steps that are timed, after one that warms up."""

_BETWEEN_SECONDS = 1e-5
"""Most that an op is taken to cost in Python and in autograd beside what it runs for itself."""

_DETACH = "aten.detach.default"

Key = tuple[str, tuple[tuple[int, ...], ...]]


@dataclass(slots=True)
class _Timed:
    """One op that ran."""

    key: Key
    seconds: float
    moved_bytes: int


class _Stopwatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Times every op while it is entered."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[_Timed] = []
        self._events: list[tuple[Any, Any]] = []
        self._cuda = device.type == "cuda"

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Not to wrap every call for a compiler that never sees this mode."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run and time one op."""
        kwargs = kwargs or {}
        operator = operator_of(func)
        if any(map(is_wrapper, types)):
            return NotImplemented  # as in the recording
        if not operator.counted:
            return func(*args, **kwargs)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if self._cuda:
            began = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            began.record()
            out = func(*args, **kwargs)
            ended.record()
            self._events.append((began, ended))
            seconds = 0.0
        else:
            # This thread's own clock: it does its part of every op, other programs do not count.
            start = time.thread_time()
            out = func(*args, **kwargs)
            seconds = time.thread_time() - start
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        moved = sum(t.numel() * t.element_size() for t in (*given, *made))
        key = (operator.name, tuple(tuple(t.shape) for t in given))
        self.ops.append(_Timed(key, seconds, moved))
        return out

    def finish(self) -> None:
        """Read the device's clock, where there is one."""
        if not self._cuda:
            return
        torch.cuda.synchronize()
        for timed, (began, ended) in zip(self.ops, self._events, strict=True):
            timed.seconds = began.elapsed_time(ended) / 1e3


def profile_ops(
    workload: Workload, trace: Mapping[str, Any], *, available_bytes: int | None = None
) -> list[float]:
    """Time every op of a trace by running the real step.

    Parameters, buffers, optimizer state and random state are as before when this returns.

    Args:
        workload: The workload the trace was captured from.
        trace: The trace as parsed JSON.
        available_bytes: Memory the step may take; the machine's free memory by default.

    Returns:
        Seconds for each op of the trace.

    Raises:
        UsageError: The step does not fit even with one example.
    """
    fraction, batch = _affordable_batch(workload, trace, available_bytes)
    runs, step_seconds = _timed_steps(replace(workload, batch=batch))
    of_ops = _match(trace, runs, 1 / fraction)
    inside = statistics.median(sum(timed.seconds for timed in run) for run in runs)
    return _with_rest(trace, of_ops, max(step_seconds - inside, 0.0) / fraction)


def _affordable_batch(
    workload: Workload, trace: Mapping[str, Any], available_bytes: int | None
) -> tuple[float, Any]:
    """The largest part of the batch whose step fits, and what fraction of the batch it is."""
    if available_bytes is None:
        available_bytes = _free_bytes(workload)
    by_category = {"parameter": 0, "module_buffer": 0, "gradient": 0, "optimizer_state": 0}
    there = 0
    for allocation in trace["allocations"]:
        category = allocation["category"]
        if category in by_category:
            by_category[category] += allocation["bytes"]
        if category in {"parameter", "module_buffer", "input"}:
            there += allocation["bytes"]
    held = by_category["parameter"] + by_category["module_buffer"]
    fixed = held + by_category["gradient"] + by_category["optimizer_state"]
    needed = held + _predicted_peak_bytes(trace) - there
    size = batch_size(workload.batch, workload.batch_dim)
    if needed <= available_bytes or size == 0:
        return 1.0, workload.batch
    rows = int(size * (available_bytes - fixed) / max(needed - fixed, 1))
    if rows < 1:
        message = (
            f"timing the ops needs {needed} bytes for one step and {available_bytes} are free\n"
            "hint: leave `--profile` out; costs then come from the measured speed of this machine"
        )
        raise UsageError(message)
    return rows / size, slice_batch(workload.batch, 0, rows, size, workload.batch_dim)


def _free_bytes(workload: Workload) -> int:
    device = next((p.device for p in workload.model.parameters()), torch.device("cpu"))
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    with open("/proc/meminfo", encoding="ascii") as lines:  # noqa: PTH123 - not a path of the user's
        for line in lines:
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    raise UsageError("the free memory of this machine is unknown: `/proc/meminfo` does not say")


def _predicted_peak_bytes(trace: Mapping[str, Any]) -> int:
    """The peak of the trace's own step: live bytes at the worst op."""
    change = [0] * (len(trace["ops"]) + 1)
    alive: list[list[tuple[int, int]]] = [
        [(start, end) for start, end in allocation["natural"]]
        for allocation in trace["allocations"]
    ]
    for saved in trace["saved"]:
        alive[trace["values"][saved["value"]]["allocation"]].append(
            (saved["pack"], saved["release"])
        )
    for allocation, ranges in zip(trace["allocations"], alive, strict=True):
        until = 0
        for start, end in sorted(ranges):
            first = max(start, until)
            if first < end:
                change[first] += allocation["bytes"]
                change[end] -= allocation["bytes"]
                until = end
    current = peak = 0
    for step in change:
        current += step
        peak = max(peak, current)
    return peak


def _timed_steps(workload: Workload) -> tuple[list[list[_Timed]], float]:
    """The ops of a few real steps, and seconds of one whose ops were not timed.

    Leaves the workload as it was. On a GPU the ops' own times add up to the step: no seconds.
    """
    model = workload.model
    tensors = [*model.parameters(), *model.buffers()]
    held = [t.detach().clone() for t in tensors]
    gradients = [p.grad for p in model.parameters()]
    device = tensors[0].device if tensors else torch.device("cpu")
    devices = [device] if device.type == "cuda" else []
    if isinstance(workload.optimizer, torch.optim.Optimizer):
        workload = replace(workload, optimizer=_twin(workload.optimizer))
    runs: list[list[_Timed]] = []
    step_seconds = 0.0
    with torch.random.fork_rng(devices):
        fitted = Fitted(workload, {"actions": []})
        try:
            fitted.step()
            for _ in range(TIMED_STEPS):
                with _Stopwatch(device) as stopwatch:
                    fitted.step()
                stopwatch.finish()
                runs.append(stopwatch.ops)
            if device.type == "cpu":
                start = time.thread_time()
                fitted.step()
                step_seconds = time.thread_time() - start
        finally:
            with torch.no_grad():
                for tensor, before in zip(tensors, held, strict=True):
                    tensor.copy_(before)
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient
    return runs, step_seconds


def _twin(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """An optimizer of the same class, settings and parameters, with a state of its own."""
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.state = type(optimizer.state)(optimizer.state.default_factory)
    twin.param_groups = [
        {**group, "params": list(group["params"])} for group in optimizer.param_groups
    ]
    return twin


def _match(
    trace: Mapping[str, Any], runs: list[list[_Timed]], examples_ratio: float
) -> list[float]:
    """Seconds for each op of the trace.

    In order where the real step ran the ops of the trace; else by op and shapes, by op alone, and
    for an op that never ran, by the bytes it moves.
    """
    by_key: dict[Key, list[_Timed]] = {}
    by_name: dict[str, list[_Timed]] = {}
    for timed in (op for run in runs for op in run):
        by_key.setdefault(timed.key, []).append(timed)
        by_name.setdefault(timed.key[0], []).append(timed)
    typical = {key: statistics.median(t.seconds for t in found) for key, found in by_key.items()}
    total_moved = sum(t.moved_bytes for run in runs for t in run)
    rate = sum(t.seconds for run in runs for t in run) / max(total_moved, 1)
    strings = trace["strings"]
    names = [strings[op["name"]] for op in trace["ops"]]
    in_order = _aligned(names, runs[-1])
    result = []
    for index, op in enumerate(trace["ops"]):
        moved = op["moved_bytes"]
        shapes = tuple(tuple(trace["values"][v]["shape"]) for v in op["reads"])
        if in_order is not None:
            timed = in_order[index]
            seconds = typical[timed.key]
            if examples_ratio > 1 and not op["view"]:
                seconds *= _growth(op, timed, examples_ratio)
        elif (names[index], shapes) in typical:
            seconds = typical[names[index], shapes]
        elif names[index] in by_name:
            found = by_name[names[index]]
            per_byte = sum(t.seconds for t in found) / max(sum(t.moved_bytes for t in found), 1)
            seconds = per_byte * moved
        else:
            seconds = rate * moved
        result.append(seconds)
    return result


def _with_rest(trace: Mapping[str, Any], of_ops: list[float], rest: float) -> list[float]:
    """Seconds of the ops with what the step took besides."""
    made = [0] * len(of_ops)
    for allocation in trace["allocations"]:
        if allocation["producer"] is not None:
            made[allocation["producer"]] += allocation["bytes"]
    each = min(rest / max(len(of_ops), 1), _BETWEEN_SECONDS)
    per_byte = (rest - each * len(of_ops)) / max(sum(made), 1)
    return [
        seconds + each + bytes_ * per_byte for seconds, bytes_ in zip(of_ops, made, strict=True)
    ]


def _aligned(names: list[str], run: list[_Timed]) -> list[_Timed] | None:
    """The ops of a run that a trace lists, in order; ``None`` where the two differ.

    Without saved-tensor hooks, which a capture has, autograd detaches the outputs it saves.
    """
    found: list[_Timed] = []
    for timed in run:
        if len(found) < len(names) and timed.key[0] == names[len(found)]:
            found.append(timed)
        elif timed.key[0] != _DETACH:
            return None
    return found if len(found) == len(names) else None


def _growth(op: Mapping[str, Any], timed: _Timed, examples_ratio: float) -> float:
    """How much longer an op takes on the whole batch than on the part that ran."""
    grown = op["moved_bytes"] / max(timed.moved_bytes, 1)
    if grown <= 1:
        return 1.0
    return examples_ratio if op["flops"] > 0 else grown


def profiled(workload: Workload, trace: Trace) -> dict[str, Any]:
    """The cost source of one real, profiled step, as the engine has it.

    Args:
        workload: The workload that the trace is of; its step really runs.
        trace: The trace.

    Returns:
        Seconds of each op of the trace.
    """
    seconds = profile_ops(workload, json.loads(trace.json()))
    return {"kind": "profile", "op_seconds": list(seconds)}
