"""An optimizer's step that cannot run on tensors without values, by steps on small real ones.

Responsible for measuring what such an optimizer keeps and takes for a parameter, and for a step on
fakes that keeps and takes as much. Some compile their step, which no recorder may watch, others
look at values while they are built. Not responsible for optimizers that run on fakes, nor for
running the real one over the model (the executor).

What is held in blocks grows with a parameter's numbers, and a parameter that is small, or has no
whole number of blocks, is often held in another way. So parameters are told apart by that, and of
each kind two are measured: the largest, cut where it is larger than a MiB or so, and a smaller one.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from memfit.tensors.profiled import profiled_bytes
from memfit.workload import Workload

_MOST_NUMBERS = 1 << 18
"""Numbers of a parameter that is measured."""
_BLOCK = 256
"""Numbers that libraries hold together, or a divisor of that."""
_LEAST_HELD = 4096
"""Numbers from which on libraries hold state in fewer bits."""


class MeasuredUpdates(Optimizer):
    """Takes and keeps the bytes that another optimizer does; updates nothing."""

    def __init__(self, groups: Any, figures: Figures) -> None:
        """Make one over parameters without values.

        Args:
            groups: Their groups, or the parameters.
            figures: What the other takes and keeps for each.
        """
        super().__init__(groups, {})
        self._figures = figures

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step, as far as memory can tell."""
        loss = closure() if closure is not None else None
        taken = []
        parameters = (p for group in self.param_groups for p in group["params"])
        for parameter in (p for p in parameters if p.grad is not None):
            kept, temporary = self._figures.of(parameter)
            state = self.state[parameter]
            if not state:
                state["held"] = torch.zeros(kept, dtype=torch.uint8)
            taken.append(torch.zeros(temporary, dtype=torch.uint8))
            state["held"].zero_()
            parameter.add_(parameter.grad, alpha=0)
            if not self._figures.takes_all_at_once:
                taken.clear()
        return loss


@dataclass(slots=True)
class _Line:
    """Bytes of parameters of one kind: so many of one with so many numbers, and for each more."""

    numbers: int
    kept_bytes: int
    temporary_bytes: int
    kept_for_each: float
    temporary_for_each: float


@dataclass(slots=True)
class Figures:
    """What an optimizer keeps and takes.

    Attributes:
        lines: By kind of parameter.
        takes_all_at_once: Whether temporaries of all parameters are there at once.
    """

    lines: dict[tuple[Any, ...], _Line]
    takes_all_at_once: bool

    def of(self, parameter: Tensor) -> tuple[int, int]:
        """Bytes kept between steps, and bytes taken during one.

        Args:
            parameter: A parameter, whatever it lies in.
        """
        line = self.lines[_kind(parameter)]
        more = parameter.numel() - line.numbers
        kept = line.kept_bytes + line.kept_for_each * more
        temporary = line.temporary_bytes + line.temporary_for_each * more
        return max(0, round(kept)), max(0, round(temporary))


def measured_updates(
    workload: Workload, parameters: list[nn.Parameter], built: Optimizer | None
) -> Optimizer:
    """What stands for a workload's optimizer in a step that is recorded on fakes.

    Args:
        workload: Has the optimizer.
        parameters: Those of the copy on fakes.
        built: The optimizer over them, where it could be built.

    Returns:
        An optimizer whose class has the same name, without state.

    Raises:
        Exception: What the optimizer raises on real tensors, whatever that is.
    """
    groups: Any = parameters
    if built is not None:
        groups = [dict(group) for group in built.param_groups]
        parameters = [p for group in groups for p in group["params"]]
    with _on_real_tensors():
        figures = _measure(workload, [p for p in parameters if p.requires_grad])
        name = type(_over(workload, [nn.Parameter(torch.zeros(1))])).__name__
    kind: type[MeasuredUpdates] = type(name, (MeasuredUpdates,), {})
    return kind(groups, figures)


@contextlib.contextmanager
def _on_real_tensors() -> Iterator[None]:
    with _disable_current_modes(), torch.enable_grad():
        yield


def _kind(parameter: Tensor) -> tuple[Any, ...]:
    """What decides how an optimizer holds the state of a parameter."""
    numbers = parameter.numel()
    return parameter.dtype, numbers >= _LEAST_HELD, numbers % _BLOCK == 0


def _measure(workload: Workload, parameters: list[nn.Parameter]) -> Figures:
    kinds: dict[tuple[Any, ...], list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        kinds[_kind(parameter)].append(parameter)
    lines = {}
    takes_all_at_once = False
    for kind, alike in kinds.items():
        alike.sort(key=torch.numel)
        large, small = tuple(alike[-1].shape), tuple(alike[0].shape)
        if _numbers(large) > _MOST_NUMBERS:
            large, small = _cut(large, _MOST_NUMBERS), _cut(large, _MOST_NUMBERS // 2)
        kept, temporary = _step_bytes(workload, [large], kind[0])
        line = _Line(_numbers(large), kept, temporary, 0.0, 0.0)
        if more := _numbers(large) - _numbers(small):
            less_kept, less_temporary = _step_bytes(workload, [small], kind[0])
            line.kept_for_each = (kept - less_kept) / more
            line.temporary_for_each = (temporary - less_temporary) / more
        lines[kind] = line
        if _numbers(large) >= _LEAST_HELD:
            takes_all_at_once |= _step_bytes(workload, [large] * 2, kind[0])[1] > 1.5 * temporary
    return Figures(lines, takes_all_at_once)


def _numbers(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _cut(shape: tuple[int, ...], most: int) -> tuple[int, ...]:
    """A shape of about so many numbers at most, of the same kind: shorter by whole blocks."""
    sides = list(shape)
    while _numbers(tuple(sides)) > most:
        longest = max(range(len(sides)), key=sides.__getitem__)
        others = _numbers(tuple(sides)) // sides[longest]
        blocks = -(-(sides[longest] - most // max(1, others)) // _BLOCK)
        kept = sides[longest] - blocks * _BLOCK
        if kept <= 0:
            kept = sides[longest] % _BLOCK or min(_BLOCK, sides[longest])
        if kept == sides[longest]:
            break
        sides[longest] = kept
    return tuple(sides)


def _step_bytes(
    workload: Workload, shapes: list[tuple[int, ...]], dtype: torch.dtype
) -> tuple[int, int]:
    """Bytes that a step over parameters leaves at first, and takes from then on."""
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer = _over(workload, parameters)
    _, left = profiled_bytes(optimizer.step)
    taken, _ = profiled_bytes(optimizer.step)
    return left, taken


def _over(workload: Workload, parameters: list[nn.Parameter]) -> Optimizer:
    """The workload's optimizer over other parameters, without state."""
    given = workload.optimizer
    if isinstance(given, Optimizer):
        settings = {k: _copy(v) for k, v in given.param_groups[0].items() if k != "params"}
        return twin_of(given, [{**settings, "params": parameters}])
    assert given is not None, "asked for only with one"
    return given(parameters)


def twin_of(original: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """An optimizer with everything of another but its state, its hooks and its parameters.

    Args:
        original: The other.
        groups: Parameters, with what their groups say.
    """
    twin: Optimizer = object.__new__(type(original))
    twin.__dict__.update({name: _copy(value) for name, value in vars(original).items()})
    for name, value in vars(original).items():
        if name.endswith("_hooks") and isinstance(value, OrderedDict):
            setattr(twin, name, OrderedDict())
    twin.param_groups = groups
    twin.state = defaultdict(dict)
    return twin


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return type(value)(value) if type(value) in {dict, list, set} else value
