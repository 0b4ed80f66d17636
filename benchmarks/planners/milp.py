"""The SAC planner of `torch.distributed._tools`, and its answer applied, which torch leaves out.

Responsible for asking `sac_milp` which modules to checkpoint and how much of each to discard, for
its own choice of ops within each module, and for wrapping the modules accordingly. Needs `pulp` and
`pwlf`. The budget is a fraction of the planner's own baseline peak, which holds no optimizer state;
what counts is the peak that is measured.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from benchmarks.planners.checkpointing import Contexts, wrapped
from benchmarks.planners.models import build
from benchmarks.planners.way import CannotRunError, Way
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.ilp_utils import (
    Graph,
    aggregate_stats,
    get_peak_memory_runtime_baseline,
    parse_module_info,
)
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed._tools.runtime_estimator import RuntimeEstimator
from torch.distributed._tools.sac_estimator import OPS_TO_ALWAYS_SKIP, SACEstimator, SACStats
from torch.distributed._tools.sac_ilp import (
    get_optimal_checkpointing_policy_per_module,
    sac_milp,
)
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from memfit import Workload

# Its op times come from datasheets of GPUs alone; shares of a step are what the solver needs.
GPU = "NVIDIA H100"
BISECTIONS = 6
LEAST_RUNTIME = 1e-9
ROUNDS_UP = 21

Decisions = dict[str, float]


def planned(workload: Workload, *, name: str, quick: bool, budget: float | None) -> Way:
    """A step by the planner's answer.

    Args:
        workload: The workload that runs.
        name: Its model, built again from fakes for the planner.
        quick: Whether it is the small version.
        budget: Fraction of the planner's own baseline peak; ``None`` for the least it can solve.

    Returns:
        The way.

    Raises:
        CannotRunError: The planner has no answer.
    """
    start = time.process_time()
    graph, stats = _estimates(name, quick=quick)
    estimated = time.process_time()
    baseline, _ = get_peak_memory_runtime_baseline(graph)
    decisions, predicted, fraction = (
        _least(graph, baseline) if budget is None else (*_solve(graph, baseline, budget), budget)
    )
    if predicted < 0:
        raise CannotRunError(f"sac_milp has no answer at {fraction:.0%} of {baseline} bytes")
    solved = time.process_time()
    chosen = []
    for path, discarded in decisions.items():
        contexts = _contexts(stats[path], 1 - discarded)
        # The planner names modules from the class of the root on.
        chosen.append((workload.model.get_submodule(path.partition(".")[2]), contexts))
    way = wrapped(workload, chosen)
    way.predicted_peak_bytes = predicted
    way.notes = {
        "modules": len(decisions),
        "fraction": fraction,
        "baseline_bytes": baseline,
        "estimate_seconds": estimated - start,
        "plan_seconds": solved - estimated,
    }
    return way


def _estimates(name: str, *, quick: bool) -> tuple[Graph, dict[str, SACStats]]:
    """Memory, times and trade-offs of each module, from steps on fake tensors."""
    available = mock.patch.object(torch.accelerator, "is_available", return_value=True)
    workload = build(name, quick=quick)
    model, loss = workload.model, workload.loss
    assert loss is not None
    fakes = FakeTensorMode()
    _fake_weights(model, fakes)
    batch = tree_map_only(torch.Tensor, fakes.from_tensor, workload.batch)
    with available, fakes:
        optimizer = workload.optimizer(model.parameters())  # type: ignore[misc, operator]
        memory = MemTracker()
        memory.track_external(model, optimizer)
        with memory:
            for step in range(2):
                loss(model, batch).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
                if step == 0:
                    memory.reset_mod_stats()
        times = RuntimeEstimator(gpu_type=GPU)
        with times("operator-level-cost-model"):
            loss(model, batch).backward()  # type: ignore[no-untyped-call]
        estimator = SACEstimator(gpu_type=GPU)
        with estimator("operator-level-cost-model"):
            loss(model, batch)
        _mend(times, estimator)
        described = aggregate_stats(model, memory, times, estimator, torch.device("cpu"))
    return parse_module_info(described), estimator.sac_mod_stats


def _fake_weights(model: nn.Module, fakes: FakeTensorMode) -> None:
    """Replace a model's weights; building it from fakes fails where initialisation reads values."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                fake = fakes.from_tensor(parameter.detach())
                module._parameters[name] = nn.Parameter(fake, parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = fakes.from_tensor(buffer)


def _mend(times: RuntimeEstimator, estimator: SACEstimator) -> None:
    """Spare the planner two crashes: a module called twice, and one that allocates nothing."""
    for order in ("fw_pre_order", "bw_pre_order", "fw_post_order", "bw_post_order"):
        name = f"mod_{order}"
        setattr(times, name, list(dict.fromkeys(getattr(times, name))))
    for path, stats in list(estimator.sac_mod_stats.items()):
        if sum(stats.memory) == 0 or sum(stats.runtimes) == 0:
            del estimator.sac_mod_stats[path]


def _solve(graph: Graph, baseline: int, fraction: float) -> tuple[Decisions, int]:
    decisions, _, peak = sac_milp(graph, memory_budget=fraction * baseline / 2**30)
    return decisions, peak


def _least(graph: Graph, baseline: int) -> tuple[Decisions, int, float]:
    """The answer for the least budget that has one, to a hundredth or so of the baseline."""
    low, high = 0.0, 1.0
    best: tuple[Decisions, int] = _solve(graph, baseline, high)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        answer = _solve(graph, baseline, middle)
        if answer[1] < 0:
            low = middle
        else:
            best, high = answer, middle
    return *best, high


def _contexts(stats: SACStats, saved: float) -> Contexts:
    """Selective checkpointing by the planner's decision on each op of a module."""
    # Its solver never sees an op that takes neither time nor memory, and then fails to read it.
    stats = replace(stats, runtimes=[max(seconds, LEAST_RUNTIME) for seconds in stats.runtimes])
    decisions: list[int] = []
    # Ops in place on what came from outside must be kept, whatever the first solver left for them.
    for attempt in range(ROUNDS_UP):
        kept_share = min(max(saved, 0.0) + attempt / (ROUNDS_UP - 1), 1.0)
        decisions = get_optimal_checkpointing_policy_per_module(stats, kept_share)
        if decisions:
            break
    else:
        raise CannotRunError(f"no choice of ops of a module saves {saved:.4f} of its memory")
    seen: Counter[str] = Counter()
    kept: dict[tuple[str, int], bool] = {}
    for op, decision in zip(stats.func_names, decisions, strict=True):
        kept[op, seen[op]] = bool(decision)
        seen[op] += 1

    def contexts() -> Any:
        policy = partial(_policy, kept, (Counter(), Counter()))
        # Dropout fills its mask in place; the ops on it are kept or run again together.
        return create_selective_checkpoint_contexts(  # type: ignore[no-untyped-call]
            policy, allow_cache_entry_mutation=True
        )

    return contexts


def _policy(
    kept: dict[tuple[str, int], bool],
    seen: tuple[Counter[str], Counter[str]],
    context: Any,
    func: Any,
    *_args: Any,
    **_kwargs: Any,
) -> CheckpointPolicy:
    """Keep or recompute by the op's name and how many of the name went before."""
    if func in OPS_TO_ALWAYS_SKIP:
        return CheckpointPolicy.PREFER_RECOMPUTE
    op = func._overloadpacket.__name__
    counter = seen[int(context.is_recompute)]
    decision = kept.get((op, counter[op]))
    counter[op] += 1
    if decision is None:
        raise CannotRunError(f"the planner did not see `{op}` number {counter[op]} of this module")
    return CheckpointPolicy.MUST_SAVE if decision else CheckpointPolicy.PREFER_RECOMPUTE
