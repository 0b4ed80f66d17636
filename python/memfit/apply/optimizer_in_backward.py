"""The optimizer step inside backward: each parameter is updated when its gradient is complete.

Responsible for running any ``torch.optim.Optimizer`` one parameter at a time, with the result the
ordinary step has, bit for bit, and for leaving the optimizer as it was: parameter groups, learning
rate schedulers and step hooks see one ordinary step. Not responsible for deciding whether an
optimizer allows it (capture does).

How it works: while one parameter is updated, every group lists that parameter or none. What an
optimizer keeps in its groups per step (a step count) is put back after each parameter and moves on
once at the end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from memfit.apply.offload.sliced_state import updated_in_slices
from memfit.apply.part import Part
from memfit.apply.precision.eight_bit_updates import EightBitUpdates
from memfit.errors import UsageError
from memfit.tensors.optimizers import step_of_others
from memfit.tensors.sliced_update import slices_of, update_in_slices

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor, nn
    from torch.optim import Optimizer


Around = Callable[[Any], contextlib.AbstractContextManager[Any]]
"""Of a parameter, what its update runs inside."""


class UpdatesOneByOne(Part):
    """Updates one parameter at a time, after backward."""

    def __init__(self, optimizer: Optimizer) -> None:
        """Prepare.

        Args:
            optimizer: The optimizer of the step.

        Raises:
            UsageError: Code that is not torch's belongs to its step.
        """
        self._optimizer = optimizer
        require_step_of_torch(optimizer, "one_by_one")

    def update_all(self, around: Around = contextlib.nullcontext) -> OneByOne:
        """All updates of one step, which is still to be finished.

        Args:
            around: Of a parameter, what its update runs inside.
        """
        one_by_one = OneByOne(self._optimizer)
        for parameter in held_parameters(self._optimizer):
            if parameter.grad is not None:
                with around(parameter):
                    one_by_one.update(parameter)
        return one_by_one


class OptimizerInBackward(Part):
    """Runs an optimizer parameter by parameter inside backward."""

    def __init__(self, optimizer: Optimizer) -> None:
        """Prepare; nothing is installed before :meth:`attached`.

        Args:
            optimizer: The optimizer of the step.

        Raises:
            UsageError: Code that is not torch's belongs to its step, as hooks do: it expects every
                gradient to be there at once.
        """
        self._optimizer = optimizer
        require_step_of_torch(optimizer, "fuse_optimizer")

    @contextlib.contextmanager
    def attached(self, around: Around = contextlib.nullcontext) -> Iterator[None]:
        """Run the (last) backward of a step inside this; the optimizer step is done on leaving.

        Args:
            around: What each update of a parameter runs inside.

        Raises:
            UsageError: As in the constructor, or the gradient of a parameter became complete more
                than once.
        """
        require_step_of_torch(self._optimizer, "fuse_optimizer")
        one_by_one = OneByOne(self._optimizer)
        update = UpdateWhenReady(one_by_one, around)
        parameters = held_parameters(self._optimizer)
        needing = [p for p in parameters if p.requires_grad]
        handles = [p.register_post_accumulate_grad_hook(update) for p in needing]  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        for parameter in parameters:
            # Of a gradient that came in another way than backward, no hook has told.
            if parameter.grad is not None:
                update(parameter)
        one_by_one.finish()


class UpdateWhenReady:
    """Updates a parameter when its gradient is complete, and frees that."""

    def __init__(self, one_by_one: OneByOne, around: Around) -> None:
        """Update nothing yet.

        Args:
            one_by_one: The step under way.
            around: Of a parameter, what its update runs inside.
        """
        self._one_by_one = one_by_one
        self._around = around
        self._done: set[int] = set()

    def __call__(self, parameter: nn.Parameter | Tensor) -> None:
        """Update one parameter and free its gradient."""
        if id(parameter) in self._done:
            message = (
                f"the gradient of a parameter of shape {list(parameter.shape)} became complete "
                "twice in one step (reentrant checkpointing?), so the optimizer step cannot run "
                "inside backward\nhint: plan again with `fuse_optimizer` forbidden"
            )
            raise UsageError(message)
        self._done.add(id(parameter))
        with self._around(parameter):
            self._one_by_one.update(parameter)
        parameter.grad = None


def held_parameters(optimizer: Optimizer) -> list[Tensor]:
    """The parameters that an optimizer updates by now, each once, though two groups may list it."""
    held = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    return list(held.values())


class OneByOne:
    """One step of an optimizer, taken parameter by parameter.

    Attributes:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        """Begin a step.

        Args:
            optimizer: The optimizer.
        """
        self.optimizer = optimizer
        self._step = plain_step(optimizer)
        self._in_eight_bits = EightBitUpdates(optimizer)
        self._moved_on: list[dict[str, Any]] | None = None
        self._places = _places(optimizer)

    def update(self, parameter: nn.Parameter | Tensor, *, most_slices: int | None = None) -> float:
        """Update one parameter by its gradient.

        Args:
            parameter: One that was not updated in this step.
            most_slices: How many slices to update where it is cut; all by default.

        Returns:
            The part of it that was updated.
        """
        places = self._places_of(id(parameter))  # of two groups that list it, the first counts
        group = self.optimizer.param_groups[places[0][0]] if places else {}
        if self._in_eight_bits.update(group, parameter):
            return 1.0

        def step(updated: list[Tensor]) -> None:
            self._step_over({id(parameter): updated})

        if updated_in_slices(self.optimizer, group, parameter, step):
            return 1.0
        count = slices_of(self.optimizer, group, parameter)
        if count > 1:
            done = update_in_slices(self.optimizer, parameter, count, step, most=most_slices)
            return done / parameter.numel()
        step([parameter])
        return 1.0

    def update_at_once(self, parameters: list[Tensor]) -> None:
        """Update parameters by one ordinary step, where that takes no more memory than one by one.

        Args:
            parameters: Parameters not yet updated in this step, with all of their state in memory.
        """
        if parameters:
            self._step_over({id(parameter): [parameter] for parameter in parameters})

    def _step_over(self, updated: Mapping[int, list[Tensor]]) -> None:
        """One step over some parameters, or slices of them; groups are as before afterwards."""
        groups = self.optimizer.param_groups
        before = [_settings(group) for group in groups]
        with self._only(updated):
            self._step(self.optimizer)
        self._moved_on = [_settings(group) for group in groups]
        for group, settings in zip(groups, before, strict=True):
            group.update(settings)

    def finish(self) -> None:
        """One ordinary step over no parameter: schedulers and step hooks see it."""
        with self.over_nothing():
            self.optimizer.step()

    @contextlib.contextmanager
    def over_nothing(self) -> Iterator[None]:
        """Run one ordinary step inside this, once: it finds no parameter to update."""
        with self._only({}):
            yield
        if self._moved_on is not None:
            for group, settings in zip(self.optimizer.param_groups, self._moved_on, strict=True):
                group.update(settings)

    @contextlib.contextmanager
    def _only(self, updated: Mapping[int, list[Tensor]]) -> Iterator[None]:
        """Groups list what is updated of parameters, where they listed these, and nothing else."""
        groups = self.optimizer.param_groups
        listed = sorted((place, it) for it in updated for place in self._places_of(it))
        lists = [group["params"] for group in groups]
        try:
            for group in groups:
                group["params"] = []
            for (number, _), it in listed:
                groups[number]["params"] += updated[it]
            yield
        finally:
            for group, parameters in zip(groups, lists, strict=True):
                group["params"] = parameters

    def _places_of(self, parameter: int) -> list[tuple[int, int]]:
        """Where groups list a parameter now: groups may change within a step."""
        lists = [group["params"] for group in self.optimizer.param_groups]
        places = self._places.get(parameter)
        if places is None or not all(
            number < len(lists)
            and position < len(lists[number])
            and id(lists[number][position]) == parameter
            for number, position in places
        ):
            self._places = _places(self.optimizer)
            places = self._places.get(parameter, [])
        return places


def require_step_of_torch(optimizer: Optimizer, action: str) -> None:
    """Refuse an optimizer whose step others expect to see as a whole.

    Args:
        optimizer: The optimizer.
        action: What to forbid instead.

    Raises:
        UsageError: Code that is not torch's belongs to its step.
    """
    if others := step_of_others(optimizer, before_only=True):
        message = (
            f"{others}, so the optimizer cannot run parameter by parameter\n"
            f"hint: plan again with `{action}` forbidden"
        )
        raise UsageError(message)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _places(optimizer: Optimizer) -> dict[int, list[tuple[int, int]]]:
    """By id, where groups list a parameter: in which, and where there.

    Looked up for each update: a look through all groups takes longer than many an update.
    """
    places: dict[int, list[tuple[int, int]]] = {}
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            places.setdefault(id(parameter), []).append((number, position))
    return places


def plain_step(optimizer: Optimizer) -> Callable[[Any], Any]:
    """The step of the optimizer's class, without the hooks that torch wraps around it."""
    step: Any = type(optimizer).step
    plain: Callable[[Any], Any] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return plain
