"""Fit PyTorch training and inference into the memory that is there.

    prediction = memfit.predict(workload)
    plan = memfit.plan(workload, budget="3GiB")
    fitted = memfit.fit(workload, budget="3GiB")
    loss = fitted.step(batch)

What needs torch is imported at its first use, so that the ``memfit`` command and saved traces do
not wait for it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from memfit.answers import Explanation, Front, Plan, Prediction, Trace, load
from memfit.errors import (
    BudgetError,
    CaptureError,
    DivergenceWarning,
    DoesNotFit,
    LeaseError,
    MemfitError,
    MemoryGrowthWarning,
    NoBrokerWarning,
    NotCompiledWarning,
    OffloadError,
    OutOfBudget,
    ParkError,
    PoolError,
    RecoveryWarning,
    SnapshotError,
    TorchVersionWarning,
    TraceFileError,
    UsageError,
    WorkloadError,
)
from memfit.leases import Lease, lease
from memfit.snapshots import explain
from memfit.torch_required import require_torch

if TYPE_CHECKING:
    from memfit.capture.weightless import weightless
    from memfit.devices import device
    from memfit.fitted import Fitted
    from memfit.guarding.guard import guard
    from memfit.parking.parked import ParkedModel, park
    from memfit.placement import Placement, place
    from memfit.pool.pool import Pool
    from memfit.questions import fit, pareto, plan, predict, trace
    from memfit.tracking.track import track
    from memfit.workload import Workload

__all__ = [
    "BudgetError",
    "CaptureError",
    "DivergenceWarning",
    "DoesNotFit",
    "Explanation",
    "Fitted",
    "Front",
    "Lease",
    "LeaseError",
    "MemfitError",
    "MemoryGrowthWarning",
    "NoBrokerWarning",
    "NotCompiledWarning",
    "OffloadError",
    "OutOfBudget",
    "ParkError",
    "ParkedModel",
    "Placement",
    "Plan",
    "Pool",
    "PoolError",
    "Prediction",
    "RecoveryWarning",
    "SnapshotError",
    "TorchVersionWarning",
    "Trace",
    "TraceFileError",
    "UsageError",
    "Workload",
    "WorkloadError",
    "device",
    "explain",
    "fit",
    "guard",
    "lease",
    "load",
    "pareto",
    "park",
    "place",
    "plan",
    "predict",
    "trace",
    "track",
    "weightless",
]

_HOMES = {
    "Fitted": "memfit.fitted",
    "ParkedModel": "memfit.parking.parked",
    "Placement": "memfit.placement",
    "Pool": "memfit.pool.pool",
    "Workload": "memfit.workload",
    "device": "memfit.devices",
    "fit": "memfit.questions",
    "guard": "memfit.guarding.guard",
    "pareto": "memfit.questions",
    "park": "memfit.parking.parked",
    "place": "memfit.placement",
    "plan": "memfit.questions",
    "predict": "memfit.questions",
    "trace": "memfit.questions",
    "track": "memfit.tracking.track",
    "weightless": "memfit.capture.weightless",
}

_WITHOUT_TORCH = frozenset({"memfit.placement"})


def __getattr__(name: str) -> Any:
    """Import what needs torch at its first use."""
    home = _HOMES.get(name)
    if home is None:
        message = f"module `memfit` has no attribute `{name}`"
        raise AttributeError(message)
    if home not in _WITHOUT_TORCH:
        require_torch()
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    """The public names."""
    return __all__
