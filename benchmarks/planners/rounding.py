"""How far eager itself is from the step computed in float64: what rounding alone does to gradients.

Responsible for the figure that tells a wrong gradient from a rounded one. Where it is large (batch
statistics of random weights), code that adds in another order is as far from eager as eager is
from the truth.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from benchmarks.planners.measurement import Gradients, largest_error
from torch import Tensor
from torch.utils._pytree import tree_map

from memfit import Workload


def rounding(workload: Workload) -> dict[str, Any]:
    """Compare one eager step with the same step in float64.

    Args:
        workload: The workload, without dropout: its draws differ between types.

    Returns:
        ``rounding_error``: as ``gradient_error``, of eager against float64.
    """
    precise = dataclasses.replace(
        workload,
        model=copy.deepcopy(workload.model).double(),
        batch=tree_map(_precise, workload.batch),
    )
    rounded = _gradients(workload)
    return {"rounding_error": largest_error(_gradients(precise), rounded)}


def _precise(leaf: Any) -> Any:
    is_real = isinstance(leaf, Tensor) and leaf.is_floating_point()
    return leaf.to(torch.float64) if is_real else leaf


def _gradients(workload: Workload) -> Gradients:
    assert workload.loss is not None
    workload.loss(workload.model, workload.batch).backward()
    named = workload.model.named_parameters()
    return {name: p.grad for name, p in named if p.grad is not None}
