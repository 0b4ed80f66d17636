"""What can be pruned, tried: the step of a pruned copy is the one that was meant.

Responsible for the trials, on copies without weights: a trace does not show which sizes are written
in the user's code (``reshape(n, 3, 12, 64)``). Where the copy fails, or does something else, the
channels at that line stay. Not responsible for finding groups nor for comparing steps (the engine).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memfit import _native
from memfit.capture import record
from memfit.capture.record.source_line import SourceLines
from memfit.errors import CaptureError, WorkloadError
from memfit.prune.cut import cut
from memfit.prune.groups import Group, Removed, kept, tensors_of
from memfit.prune.sizes import mended
from memfit.weights.weightless import WeightsNeededError, fake_mode_of
from memfit.workload import Workload

_MOST_TRIALS = 32
"""Lines of code that may turn out to say a size before memfit gives up."""


class _AnotherStepError(CaptureError):
    """The pruned step is another than meant, and what is to blame is not known."""


@dataclass(frozen=True, slots=True)
class Separable:
    """What of a model can be pruned.

    Attributes:
        workload: The step.
        groups: Channels that can go.
        stays: What stays and why, as the engine says it.
        through_norms: Whether channels may go that a norm takes its mean over.
        trials: How many copies were recorded to find out.
        native: The engine's half.
    """

    workload: Workload
    groups: tuple[Group, ...]
    stays: tuple[Mapping[str, Any], ...]
    through_norms: bool
    trials: int
    native: _native.Separation

    def without(self, removed: Removed, *, weights: bool) -> Workload:
        """The step of a copy of the model without some channels.

        Args:
            removed: For each group, the channels that go.
            weights: Whether the copy has weights, and takes memory for them.
        """
        fakes = None if weights else fake_mode_of(self.workload.model) or FakeTensorMode()
        return without(self.workload, self.groups, removed, fakes)

    def require_as_meant(self, removed: Removed, pruned: Workload) -> None:
        """Record a pruned step and refuse one that does something else.

        Args:
            removed: For each group, the channels that went.
            pruned: The step of the pruned copy.

        Raises:
            CaptureError: It does something else.
        """
        again = _recorded(pruned)
        if self.native.deviation([list(channels) for channels in removed], again) is not None:
            raise CaptureError(
                "the pruned model's step is another than it should be: its code chooses by sizes"
            )


def without(
    workload: Workload, groups: Sequence[Group], removed: Removed, fakes: FakeTensorMode | None
) -> Workload:
    """The step of a copy of the model without some channels.

    Args:
        workload: The step.
        groups: The groups.
        removed: For each, the channels that go.
        fakes: As in :func:`memfit.prune.cut.cut`.
    """
    shapes = {name: tensor.shape for name, tensor in tensors_of(workload.model).items()}
    pruned = cut(workload, kept(groups, removed, shapes), fakes)
    mended(workload.model, pruned.model, groups, removed)
    return pruned


def separable(workload: Workload, *, through_norms: bool) -> Separable:
    """Find out what of a model can be pruned.

    Args:
        workload: The step; it stays as it is.
        through_norms: Whether channels may go that a norm takes its mean over.

    Raises:
        WorkloadError: The model fails by itself.
        CaptureError: The step cannot be recorded, or pruned ones differ and no line is to blame.
    """
    trace = _recorded(workload)
    ops = _Ops(trace)
    stays: list[int] = []
    for trial in range(_MOST_TRIALS):
        request = {"through_norms": through_norms, "stays": stays}
        native = _native.Separation.of(trace, request)
        groups = tuple(Group.of(value) for value in native.groups())
        stay = tuple(native.stays())
        found = Separable(workload, groups, stay, through_norms, trial, native)
        if not groups:
            return found
        blamed = _tried(found, ops)
        if not blamed:
            return replace(found, trials=trial + 1)
        if set(blamed) <= set(stays):
            break
        stays.extend(blamed)
    raise _AnotherStepError(
        "the step of a pruned copy is another than it should be, and no line could be found that "
        "makes it so"
    )


def _tried(found: Separable, ops: _Ops) -> list[int]:
    """Prune half of every group, and say which ops are to blame for what differs."""
    removed = tuple(
        tuple(range(group.channels - group.channels // 2, group.channels)) for group in found.groups
    )
    progress = _Progress()
    try:
        try:
            again = _recorded(found.without(removed, weights=False), progress)
        except WeightsNeededError:
            again = _recorded(found.without(removed, weights=True), progress)
    except WorkloadError as error:
        blamed = ops.blamed(error, progress.ops)
        if not blamed:
            raise
        return blamed
    deviation = found.native.deviation([list(channels) for channels in removed], again)
    return [] if deviation is None else [deviation]


class _Ops:
    """The ops of a step by the lines that call them."""

    def __init__(self, trace: _native.Trace) -> None:
        document = json.loads(trace.json())
        strings = document["strings"]
        self._lines: list[str] = []
        self._at: dict[str, dict[int, int]] = {}
        for index, op in enumerate(document["ops"]):
            if op["phase"] == "forward":
                self._lines.append(strings[op["source"]])
                self._at.setdefault(strings[op["source"]], {}).setdefault(op["name"], index)

    def blamed(self, error: WorkloadError, ran: int) -> list[int]:
        """One op of each kind at the line of an error, or the op that would have come next.

        Args:
            error: What the forward of a pruned copy raised.
            ran: Ops that ran before.
        """
        lines = SourceLines().raised_at(error.__cause__)
        is_known = error.phase == "forward" and ran < len(self._lines)
        if is_known and self._lines[ran] in lines:
            return [ran]
        if lines and lines[0] in self._at:
            return list(self._at[lines[0]].values())
        return [ran] if is_known else []


class _Progress(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts ops.

    Attributes:
        ops: How many have run.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops = 0

    def __enter__(self) -> Self:
        self.ops = 0
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.ops += func.namespace == "aten"  # others ask for a device, or begin a region
        return result


def _recorded(workload: Workload, progress: _Progress | None = None) -> _native.Trace:
    """Record a step; what inference returns is read by an op that no channel gets through."""
    if not workload.training:
        workload = replace(workload, forward=_reading(workload))
    if progress is not None:
        workload = _watched(workload, progress)
    document = record(workload, probe=False)
    return _native.Trace.from_json(json.dumps(document).encode())


def _watched(workload: Workload, progress: _Progress) -> Workload:
    """The same step, its forward under the count."""

    def loss(model: Any, batch: Any) -> Tensor:
        assert workload.loss is not None
        with progress:
            return workload.loss(model, batch)

    def forward(model: Any, batch: Any) -> Any:
        with progress:
            return workload.infer(model, batch)

    if workload.training:
        return replace(workload, loss=loss)
    return replace(workload, forward=forward)


def _reading(workload: Workload) -> Any:
    """The forward of inference, and a look at each tensor that it returns."""

    def forward(model: Any, batch: Any) -> Any:
        returned = workload.infer(model, batch)
        for tensor in _tensors(returned):
            torch.count_nonzero(tensor)
        return returned

    return forward


def _tensors(returned: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(returned):
        if isinstance(leaf, Tensor):
            yield leaf
        elif hasattr(leaf, "__dict__"):
            yield from (it for it in tree_leaves(vars(leaf)) if isinstance(it, Tensor))
