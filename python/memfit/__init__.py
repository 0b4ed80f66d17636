"""Fit PyTorch training and inference into the memory you have.

    prediction = memfit.predict(workload)
    plan = memfit.plan(workload, budget="3GiB")
    fitted = memfit.fit(workload, budget="3GiB")
    loss = fitted.step(batch)

What needs torch is imported at its first use, so that the ``memfit`` command and saved traces do
not wait for it; so are the answers, whose types are many.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from memfit.errors import (
    BudgetError,
    CaptureError,
    CheckpointError,
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
    PoolWarning,
    RecoveryWarning,
    ReplayError,
    SnapshotError,
    TorchVersionWarning,
    TraceFileError,
    UsageError,
    WorkloadError,
)
from memfit.share.lease import Lease, lease
from memfit.torch_required import require_torch

if TYPE_CHECKING:
    from memfit.answers import (
        Calibration,
        CompiledPlan,
        Explanation,
        Front,
        OomMessages,
        Plan,
        Prediction,
        Pruning,
        Replay,
        Trace,
        Verification,
        load,
    )
    from memfit.api.calibrate import calibrate
    from memfit.api.device import device
    from memfit.api.distil import distil
    from memfit.api.explain import explain, replay
    from memfit.api.fit import fit
    from memfit.api.place import Placement, place
    from memfit.api.plan import pareto, plan
    from memfit.api.predict import predict, trace
    from memfit.api.prune import load_pruned, prune
    from memfit.api.verify import verify
    from memfit.guard.guard import guard
    from memfit.options import Options
    from memfit.prune.pruned import Pruned
    from memfit.run.fitted import Fitted
    from memfit.share.park.parked import ParkedModel, park
    from memfit.share.pool.pool import Pool
    from memfit.track.track import track
    from memfit.weights.load_quantized import QuantizedModel, load_quantized
    from memfit.weights.weightless import weightless
    from memfit.workload import Workload

__all__ = [
    "BudgetError",
    "Calibration",
    "CaptureError",
    "CheckpointError",
    "CompiledPlan",
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
    "OomMessages",
    "Options",
    "OutOfBudget",
    "ParkError",
    "ParkedModel",
    "Placement",
    "Plan",
    "Pool",
    "PoolError",
    "PoolWarning",
    "Prediction",
    "Pruned",
    "Pruning",
    "QuantizedModel",
    "RecoveryWarning",
    "Replay",
    "ReplayError",
    "SnapshotError",
    "TorchVersionWarning",
    "Trace",
    "TraceFileError",
    "UsageError",
    "Verification",
    "Workload",
    "WorkloadError",
    "calibrate",
    "device",
    "distil",
    "explain",
    "fit",
    "guard",
    "lease",
    "load",
    "load_pruned",
    "load_quantized",
    "pareto",
    "park",
    "place",
    "plan",
    "predict",
    "prune",
    "replay",
    "trace",
    "track",
    "verify",
    "weightless",
]

_HOMES = {
    "Calibration": "memfit.answers",
    "CompiledPlan": "memfit.answers",
    "Explanation": "memfit.answers",
    "Fitted": "memfit.run.fitted",
    "Front": "memfit.answers",
    "OomMessages": "memfit.answers",
    "Options": "memfit.options",
    "ParkedModel": "memfit.share.park.parked",
    "Placement": "memfit.api.place",
    "Plan": "memfit.answers",
    "Pool": "memfit.share.pool.pool",
    "Prediction": "memfit.answers",
    "Pruned": "memfit.prune.pruned",
    "Pruning": "memfit.answers",
    "QuantizedModel": "memfit.weights.load_quantized",
    "Replay": "memfit.answers",
    "Trace": "memfit.answers",
    "Verification": "memfit.answers",
    "Workload": "memfit.workload",
    "calibrate": "memfit.api.calibrate",
    "device": "memfit.api.device",
    "distil": "memfit.api.distil",
    "explain": "memfit.api.explain",
    "fit": "memfit.api.fit",
    "guard": "memfit.guard.guard",
    "load": "memfit.answers",
    "load_pruned": "memfit.api.prune",
    "load_quantized": "memfit.weights.load_quantized",
    "pareto": "memfit.api.plan",
    "park": "memfit.share.park.parked",
    "place": "memfit.api.place",
    "plan": "memfit.api.plan",
    "predict": "memfit.api.predict",
    "prune": "memfit.api.prune",
    "replay": "memfit.api.explain",
    "trace": "memfit.api.predict",
    "track": "memfit.track.track",
    "verify": "memfit.api.verify",
    "weightless": "memfit.weights.weightless",
}

_WITHOUT_TORCH = frozenset(
    {"memfit.answers", "memfit.api.explain", "memfit.api.place", "memfit.options"}
)


class _Module(ModuleType):
    """The package itself, in which a function keeps its name where a folder bears the same.

    To import ``memfit.guard.limit`` sets the attribute ``guard`` of ``memfit`` to a package, which
    would hide the function :func:`memfit.guard` (``importlib._bootstrap._find_and_load_unlocked``).
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Module
for _name in _HOMES.keys() & globals().keys():
    del globals()[_name]  # the imports above set it to a package


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
