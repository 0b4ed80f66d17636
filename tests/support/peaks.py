"""What a step takes by the profiler's allocator events, and what a trace says it takes."""

from __future__ import annotations

import gc
from typing import Any

from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_flatten

from memfit.workload import Workload


def predicted_peak(trace: dict[str, Any]) -> int:
    """Peak over ops of the bytes alive plus the op's workspace, by plain summing."""
    count = len(trace["ops"])
    held: list[list[tuple[int, int]]] = [
        [(start, end) for start, end in allocation["natural"]]
        for allocation in trace["allocations"]
    ]
    for saved in trace["saved"]:
        allocation = trace["values"][saved["value"]]["allocation"]
        held[allocation].append((saved["pack"], saved["release"]))
    change = [0] * (count + 1)
    for allocation, ranges in zip(trace["allocations"], held, strict=True):
        end_before = -1
        for start, end in sorted(r for r in ranges if r[0] < r[1]):
            first = max(start, end_before)
            if first < end:
                change[first] += allocation["bytes"]
                change[end] -= allocation["bytes"]
                end_before = end
    alive = peak = 0
    for index, op in enumerate(trace["ops"]):
        alive += change[index]
        peak = max(peak, alive + op["workspace_bytes"])
    return peak


def measured_peak(workload: Workload) -> int:
    """Peak of the second real step: static bytes plus the largest running sum of events."""
    assert workload.loss is not None
    assert callable(workload.optimizer)
    model, batch, loss = workload.model, workload.batch, workload.loss
    optimizer: Any = workload.optimizer(model.parameters())  # type: ignore[operator]

    def step() -> Tensor:
        result = loss(model, batch)
        result.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return result

    step()
    gc.collect()
    state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    tensors = [
        *model.parameters(),
        *model.buffers(),
        *state,
        *(leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, Tensor)),
    ]
    static = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            step()
    finally:
        gc.enable()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    alive = peak = 0
    for event in events:
        alive += event.nbytes()
        peak = max(peak, alive)
    return sum(static.values()) + peak
