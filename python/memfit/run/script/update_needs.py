"""What the updates of a script's optimizer take, learnt without memory.

Responsible for running the optimizer's step on twins of its parameters, gradients and state that
have no memory: all parameters at once, and each alone. Not responsible for which optimizers may
update parameters one by one (:mod:`memfit.tensors.optimizers`) nor for doing so
(:mod:`memfit.apply`).
"""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from memfit.apply.optimizer_in_backward import OneByOne, plain_step
from memfit.capture.probe.meta_tensors import MetaTensors
from memfit.capture.probe.optimizer_updates import SLICES_TOLD, Temporaries
from memfit.run.script.sparse_updates import (
    SparseUpdate,
    is_sparse,
    sparse_update,
    values_of,
)
from memfit.tensors.optimizers import with_room
from memfit.tensors.sliced_update import state_slices
from memfit.tensors.storage import gradient_of

_Tensors = MetaTensors | FakeTensorMode
Learnt = TypeVar("Learnt")


@dataclass(frozen=True, slots=True)
class UpdateNeeds:
    """What a step of an optimizer takes besides parameters and gradients.

    Attributes:
        first_bytes: Most bytes that the next step makes at once, new state included.
        together_bytes: Most bytes of temporaries of a later step that updates all at once.
        state_bytes: Sizes of the state of each parameter, by its ``id``.
        alone: Temporaries and traffic of the update of each parameter alone, by its ``id``.
        kind: What decides about all of that but whether there is state.
        by_rows: Parameters with sparse gradients, by ``id``: their state comes whole.
    """

    first_bytes: int
    together_bytes: int
    state_bytes: dict[int, list[int]]
    alone: dict[int, tuple[int, int]]
    kind: tuple[Any, ...]
    by_rows: frozenset[int] = frozenset()

    def one_by_one_bytes(self, optimizer: Optimizer) -> int:
        """Most bytes that the next step makes where updates come one by one.

        Args:
            optimizer: The optimizer, as it was when the rest was learnt; it stays as it is.
        """
        later = max((took for took, _ in self.alone.values()), default=0)
        first = _first_alone_bytes(optimizer, self.state_bytes) if self.new_state_bytes else 0
        return self.new_state_bytes + max(later, first)

    @property
    def new_state_bytes(self) -> int:
        """The state that the next step makes."""
        return self.first_bytes - self.together_bytes

    def largest_bytes(self, optimizer: Optimizer) -> int:
        """Most bytes of an update by itself, with the state that comes for it.

        Args:
            optimizer: The optimizer.
        """
        most = 0
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in self.alone:
                    of_slice = sum(self.state_bytes[id(parameter)])
                    if id(parameter) not in self.by_rows:  # its gradient may be gone by now
                        of_slice //= state_slices(optimizer, group, parameter)
                    most = max(most, of_slice + self.alone[id(parameter)][0])
        return most

    @property
    def all_state_bytes(self) -> int:
        """The state of all parameters."""
        return sum(map(sum, self.state_bytes.values()))


def update_needs(optimizer: Optimizer, before: UpdateNeeds | None = None) -> UpdateNeeds:
    """What the updates of an optimizer take, whose gradients are there.

    Args:
        optimizer: The optimizer; it stays as it is.
        before: What they took when this was asked before.

    Raises:
        Exception: Whatever its step raises on fakes.
    """
    kind = _kind(optimizer)
    if before is not None and before.kind == kind and _has_all_state(optimizer):
        return replace(before, first_bytes=before.together_bytes)
    return _without_memory(optimizer, lambda tensors: _learnt(optimizer, kind, tensors))


def _without_memory(optimizer: Optimizer, learn: Callable[[_Tensors], Learnt]) -> Learnt:
    """What is learnt on tensors of the meta device, or on fakes where those cannot tell."""
    listed = (p for group in optimizer.param_groups for p in group["params"])
    if all(p.device.type == "cpu" for p in listed):
        with contextlib.suppress(RuntimeError, TypeError):
            return learn(MetaTensors())
    return learn(FakeTensorMode())


def _learnt(optimizer: Optimizer, kind: tuple[Any, ...], tensors: _Tensors) -> UpdateNeeds:
    alike = _alike(optimizer)
    # One of each kind tells about all of that kind, but for what is done to all at once.
    at_once = any(map(_is_at_once, optimizer.param_groups))
    twins = _Twins(optimizer, tensors, None if at_once else {id(of[0]) for of in alike.values()})
    with _disable_current_modes(), tensors:
        step = plain_step(optimizer)
        with Temporaries() as first:
            step(twins.optimizer)
        with Temporaries() as later:
            step(twins.optimizer)
        state = {
            real: [leaf.untyped_storage().nbytes() for leaf in _tensors(twins.optimizer, twin)]
            for real, twin in twins.pairs.items()
        }
        alone = _each_alone(twins, {id(of[0]) for of in alike.values()})
    sparse = _by_rows(optimizer)
    state_of = {real: it.state_bytes for real, it in sparse.items()}
    alone_of = {real: (it.temporary_bytes, it.moved_bytes) for real, it in sparse.items()}
    for of in alike.values():
        for parameter in of:
            state_of[id(parameter)] = state[id(of[0])]
            alone_of[id(parameter)] = alone[id(of[0])]
    first_bytes = first.peak_bytes
    if not at_once:
        new = [of for of in alike.values() if of[0] not in optimizer.state]
        more = {id(of[0]): len(of) - 1 for of in new}
        first_bytes += sum(count * sum(state[which]) for which, count in more.items())
    # Those by sparse gradients come one after another, and make their state beside the others'.
    most = max((it.temporary_bytes for it in sparse.values()), default=0)
    together_bytes = max(later.peak_bytes, most)
    held = {id(parameter) for parameter in optimizer.state}
    made = sum(sum(it.state_bytes) for real, it in sparse.items() if real not in held)
    first_bytes += together_bytes - later.peak_bytes + made
    return UpdateNeeds(first_bytes, together_bytes, state_of, alone_of, kind, frozenset(sparse))


def _by_rows(optimizer: Optimizer) -> dict[int, SparseUpdate]:
    """What updates by sparse gradients take, by the ``id`` of the parameter."""
    with _disable_current_modes():
        return {
            id(parameter): sparse_update(optimizer, group, parameter)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if is_sparse(parameter)
        }


def _kind(optimizer: Optimizer) -> tuple[Any, ...]:
    """What decides which ops a step runs, on what; rates are numbers to it, whatever they are."""
    return tuple(
        (
            sorted((key, _setting(value)) for key, value in group.items() if key != "params"),
            [_size(p) for p in group["params"] if gradient_of(p) is not None],
        )
        for group in optimizer.param_groups
    )


def _setting(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {value.device} {tuple(value.shape)}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_setting, value))})"  # betas, which a schedule may move
    is_rate = isinstance(value, float) and value > 0.0
    return "a positive number" if is_rate else repr(value)


def _size(parameter: Tensor) -> tuple[Any, ...]:
    gradient = gradient_of(parameter)
    rows = len(values_of(gradient)) if gradient is not None and is_sparse(parameter) else None
    return id(parameter), parameter.dtype, tuple(parameter.shape), parameter.stride(), rows


def _has_all_state(optimizer: Optimizer) -> bool:
    listed = (p for group in optimizer.param_groups for p in group["params"])
    return all(optimizer.state.get(p) for p in listed if gradient_of(p) is not None)


def _alike(optimizer: Optimizer) -> dict[tuple[Any, ...], list[Tensor]]:
    """Parameters with a gradient, those together whose updates are the same ops on equal sizes."""
    found: dict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if gradient_of(parameter) is not None and not is_sparse(parameter):
                shape = (tuple(parameter.shape), parameter.stride(), parameter.dtype)
                key = (index, *shape, parameter in optimizer.state)
                found[key].append(parameter)
    return found


def _is_at_once(group: dict[str, Any]) -> bool:
    return bool(group.get("foreach") or group.get("fused") or _as_on_the_device(group))


class _Twins:
    """An optimizer over twins of another one's parameters, which have no memory.

    Attributes:
        optimizer: The optimizer.
        pairs: The twin of each parameter that has a gradient, by the ``id`` of that.
    """

    def __init__(self, real: Optimizer, tensors: _Tensors, which: set[int] | None) -> None:
        def takes_part(parameter: Tensor) -> bool:
            if gradient_of(parameter) is None or is_sparse(parameter):
                return False
            return which is None or id(parameter) in which

        self.pairs: dict[int, Tensor] = {}

        def twin_of(parameter: Tensor) -> Tensor:
            known = self.pairs.get(id(parameter))
            if known is None:
                known = nn.Parameter(tensors.from_tensor(parameter.detach()))
                gradient = gradient_of(parameter)
                assert gradient is not None, "others were left out"
                known.grad = _without_values(gradient, tensors)
                self.pairs[id(parameter)] = known
            return known

        with _disable_current_modes():
            twin = copy.copy(real)
            twin.param_groups = [
                {
                    **group,
                    **_as_on_the_device(group),
                    "params": [twin_of(p) for p in group["params"] if takes_part(p)],
                }
                for group in real.param_groups
            ]
            twin.state = defaultdict(dict)
            for parameter in (p for group in real.param_groups for p in group["params"]):
                if takes_part(parameter) and parameter in real.state:
                    with tensors:
                        held = dict(with_room(real.state[parameter]))
                    twin.state[self.pairs[id(parameter)]] = {
                        key: _twin(value, tensors) for key, value in held.items()
                    }
            twin._optimizer_step_pre_hooks = OrderedDict()
            twin._optimizer_step_post_hooks = OrderedDict()
        self.optimizer = twin


def _without_values(gradient: Tensor, tensors: _Tensors) -> Tensor:
    """A twin of a gradient, which may have no memory now."""
    if gradient.layout is not torch.strided or type(gradient) is not Tensor:
        return tensors.from_tensor(gradient.detach())
    sizes = gradient.size(), gradient.stride()
    with tensors:
        return torch.empty_strided(*sizes, dtype=gradient.dtype, device=gradient.device)


def _twin(value: Any, tensors: _Tensors) -> Any:
    is_real = isinstance(value, Tensor) and not isinstance(value, FakeTensor) and not value.is_meta
    return tensors.from_tensor(value.detach()) if is_real else value


def _as_on_the_device(group: dict[str, Any]) -> dict[str, Any]:
    """Fakes are no tensors of a type that torch takes for its fast ways on a GPU."""
    on_cuda = all(p.device.type == "cuda" for p in group["params"]) and group["params"]
    unsaid = group.get("foreach", False) is None and not group.get("fused")
    return {"foreach": True} if on_cuda and unsaid else {}


def _each_alone(twins: _Twins, which: set[int]) -> dict[int, tuple[int, int]]:
    found = {}
    one_by_one = OneByOne(twins.optimizer)
    for real in which:
        with Temporaries() as temporaries:
            share = one_by_one.update(twins.pairs[real], most_slices=SLICES_TOLD)
        found[real] = (temporaries.peak_bytes, round(temporaries.moved_bytes / share))
    return found


def _first_alone_bytes(optimizer: Optimizer, state_bytes: dict[int, list[int]]) -> int:
    """Most temporaries of the update alone of a parameter that has no state yet.

    In slices it makes the state of a slice before it writes that to the whole. Few steps lack the
    room that makes this matter, so it is learnt when it is asked for.
    """
    new = {id(of[0]) for of in _alike(optimizer).values() if of[0] not in optimizer.state}

    def learn(tensors: _Tensors) -> dict[int, tuple[int, int]]:
        twins = _Twins(optimizer, tensors, new)
        with _disable_current_modes(), tensors:
            return _each_alone(twins, new)

    alone = _without_memory(optimizer, learn)
    return max((took - sum(state_bytes[real]) for real, (took, _) in alone.items()), default=0)


def _tensors(optimizer: Optimizer, parameter: Tensor) -> list[Tensor]:
    leaves = tree_leaves(dict(optimizer.state.get(parameter, {})))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]
