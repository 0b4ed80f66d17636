"""The optimizer's state elsewhere: each parameter's comes for its update and goes again.

Responsible for a plan's ``offload_optimizer`` action: which state comes when, the window in which
it is on its way, and what happens where it cannot be written. Not responsible for state in 8 bits
(:mod:`memfit.apply.precision.optimizer_bits`), for moving bytes
(:mod:`memfit.apply.offload.tiers`), for what others see of the state meanwhile
(:mod:`memfit.apply.offload.state_view`), or for running an optimizer parameter by parameter
(:mod:`memfit.apply.optimizer_in_backward`). The rules are those of
``docs/concepts/transformed-trace.md``.

A write that fails costs memory, never the step: the state stays at home, the step goes on to its
end, and the next one begins by sending it again, which is an error before anything is computed.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memfit._native import bytes_text
from memfit.apply.offload.sliced_state import SlicedState, may_update_in_slices
from memfit.apply.offload.state_view import AwayState, away_state, save_plainly
from memfit.apply.offload.tiers import open_tier
from memfit.apply.optimizer_in_backward import (
    Around,
    OneByOne,
    held_parameters,
    require_step_of_torch,
)
from memfit.apply.part import Part
from memfit.apply.precision.eight_bit_state import EightBitState
from memfit.errors import OffloadError, UsageError
from memfit.tensors.optimizers import shared_state, unknown_optimizer
from memfit.tensors.sliced_update import state_slices

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from os import PathLike

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from memfit.apply.offload.tiers import Tier


@dataclass(slots=True, frozen=True)
class StateDirections:
    """A plan's ``offload_optimizer`` action, read and checked.

    Attributes:
        tier: Kind of the place.
        folder: For files.
        window_bytes: Most bytes fetched ahead of their update, and most on their way out.
        least_bytes: Smallest tensor that goes.
        order: Names of parameters in the order of their updates; one that is named more than once
            is updated in slices, and has the state of one slice in memory at a time.
    """

    tier: str
    folder: str
    window_bytes: int
    least_bytes: int
    order: tuple[str, ...]

    @staticmethod
    def read(action: Mapping[str, Any]) -> StateDirections:
        """Read what a plan says.

        Args:
            action: ``OffloadOptimizer`` of the plan as parsed JSON.

        Raises:
            UsageError: It is no such thing.
        """
        try:
            return StateDirections(
                str(action["tier"]),
                str(action.get("folder", "")),
                int(action["window_bytes"]),
                int(action["least_bytes"]),
                tuple(str(name) for name in action["order"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            message = f"what the plan says of `offload_optimizer` is malformed: {error!r}"
            raise UsageError(message) from error


class StateElsewhere(Part):
    """Keeps an optimizer's state elsewhere between updates.

    Attributes:
        tier: Where it goes.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        directions: StateDirections,
        folder: str | PathLike[str] = "",
    ) -> None:
        """Make the place ready; nothing goes before :meth:`place`.

        Args:
            optimizer: The optimizer.
            model: Whose parameters the plan names.
            directions: What the plan says.
            folder: Where to, instead of where the plan says.

        Raises:
            UsageError: The optimizer cannot run parameter by parameter, or there is no such tier.
            OffloadError: The folder cannot be used.
        """
        _require_one_by_one(optimizer)
        window_bytes = directions.window_bytes
        tier = open_tier(directions.tier, window_bytes, folder or directions.folder)
        self.tier: Tier = tier
        self._optimizer = optimizer
        self._window_bytes = window_bytes
        self._least_bytes = directions.least_bytes
        named = dict(model.named_parameters())
        turns = Counter(name for name in directions.order if name in named)
        self._order = [named[name] for name in turns]
        self._sliced = {id(named[name]) for name, count in turns.items() if count > 1}
        self._places = {id(parameter): place for place, parameter in enumerate(self._order)}
        self._next = 0
        self._queue: deque[tuple[AwayState, int]] = deque()
        self._failure: OffloadError | None = None

    def place(self) -> None:
        """Have everything go that is at home: what came by itself, or could not go before.

        Raises:
            OffloadError: Some of it cannot be written. It is at home, and whole.
        """
        self._failure = None
        save_plainly(self._optimizer)
        with self._transfers():
            for parameter in self._parameters():
                state = self._state_of(parameter)
                if state is not None:
                    state.retract()
                    self._send(state)
        if self._failure is not None:
            kept = bytes_text(self._kept_bytes())
            message = (
                f"optimizer state cannot be offloaded: {self._failure}; {kept} of it stay in "
                "memory, unchanged, and no step has begun"
            )
            raise OffloadError(message) from self._failure

    def update_all(self, around: Around = contextlib.nullcontext) -> OneByOne:
        """All updates of one step of the optimizer, which is still to be finished.

        Args:
            around: Of a parameter, what its update runs inside besides.

        Raises:
            OffloadError: State did not come back as it went; the message says whose, and how many
                parameters were updated before.
        """
        one_by_one = OneByOne(self._optimizer)
        with self.updates():
            for parameter in self._parameters():
                if parameter.grad is not None:
                    with self.update_of(parameter), around(parameter):
                        one_by_one.update(parameter)
        return one_by_one

    @contextlib.contextmanager
    def updates(self) -> Iterator[None]:
        """Run the updates of one step inside this."""
        self._next = 0
        with self._transfers():
            yield
            for parameter in self._order:
                state = self._optimizer.state.get(parameter)
                if isinstance(state, AwayState) and state.is_coming:
                    state.retract()  # it was not updated in this step

    @contextlib.contextmanager
    def update_of(self, parameter: Tensor) -> Iterator[None]:
        """Run the update of one parameter inside this: its state is there.

        Raises:
            OffloadError: It did not come back as it went.
        """
        state = self._state_of(parameter, may_be_new=True)
        if state is not None and not self._comes_in_slices(parameter, state):
            try:
                state.bring_home()
            except OffloadError as error:
                message = (
                    f"the optimizer's state of a parameter of shape {list(parameter.shape)} is "
                    f"lost, in the middle of a step: {error}\n"
                    "hint: parameters updated before it are a step ahead of the others; go on "
                    "from a checkpoint"
                )
                raise OffloadError(message) from error
        place = self._places.get(id(parameter))
        if place is not None:
            self._next = max(self._next, place + 1)
        self._look_ahead()
        yield
        state = self._own_state(parameter)  # it may be new
        if state is not None:
            self._send(state)

    def _own_state(self, parameter: Tensor) -> AwayState | None:
        """The state of a parameter as one that may go; what is in 8 bits goes by itself."""
        if isinstance(self._optimizer.state.get(parameter), EightBitState):
            return None
        return away_state(self._optimizer, parameter)

    def _state_of(self, parameter: Tensor, *, may_be_new: bool = False) -> AwayState | None:
        """The same, perhaps slice by slice."""
        if isinstance(self._optimizer.state.get(parameter), EightBitState):
            return None
        state = away_state(self._optimizer, parameter)
        if id(parameter) not in self._sliced or isinstance(state, SlicedState):
            return state
        count = state_slices(self._optimizer, self._group_of(parameter), parameter)
        if count == 1 or (state is None and not may_be_new):
            return state
        values = {} if state is None else state.plain()
        sliced = SlicedState(values, parameter, count, self.tier)
        self._optimizer.state[parameter] = sliced
        return sliced

    def _comes_in_slices(self, parameter: Tensor, state: AwayState) -> bool:
        """Whether the update fetches the state itself."""
        group = self._group_of(parameter)
        return isinstance(state, SlicedState) and may_update_in_slices(
            self._optimizer, group, parameter, state
        )

    def _group_of(self, parameter: Tensor) -> dict[str, Any]:
        groups = self._optimizer.param_groups
        return next((g for g in groups if any(p is parameter for p in g["params"])), {})

    def _parameters(self) -> Sequence[Tensor]:
        """All parameters: in the order of the plan, then those it does not know."""
        held = held_parameters(self._optimizer)
        mine = {id(parameter) for parameter in held}
        ordered = [parameter for parameter in self._order if id(parameter) in mine]
        return [*ordered, *(p for p in held if id(p) not in self._places)]

    def _look_ahead(self) -> None:
        """Fetch the states that are needed next, as far as the window goes."""
        ahead = 0
        for place in range(self._next, len(self._order)):
            state = self._optimizer.state.get(self._order[place])
            if not isinstance(state, AwayState) or isinstance(state, EightBitState):
                continue
            ahead += state.away_bytes
            if ahead > self._window_bytes:
                return
            state.fetch_ahead()

    def _send(self, state: AwayState) -> None:
        """Send a state out, after as many of the oldest have settled as the window needs."""
        size = state.home_bytes(self.tier, self._least_bytes)
        if size == 0:
            return
        while self._queue and self._on_their_way() + size > self._window_bytes:
            self._settle_oldest()
        try:
            state.send(self.tier, self._least_bytes)
        except OffloadError as error:
            self._failure = error
            return
        self._queue.append((state, size))
        if size > self._window_bytes:
            self._settle_oldest()

    def _settle_oldest(self) -> None:
        try:
            self._queue[0][0].settle()
        except OffloadError as error:
            self._failure = error
        self._queue.popleft()

    def _on_their_way(self) -> int:
        return sum(size for _, size in self._queue)

    @contextlib.contextmanager
    def _transfers(self) -> Iterator[None]:
        """All settle on leaving; after an exception, what has not settled stays at home."""
        try:
            yield
            while self._queue:
                self._settle_oldest()
        finally:
            for state, _ in self._queue:
                state.keep()
            self._queue.clear()

    def _kept_bytes(self) -> int:
        states = [self._own_state(parameter) for parameter in self._parameters()]
        return sum(s.home_bytes(self.tier, self._least_bytes) for s in states if s is not None)


def _require_one_by_one(optimizer: Optimizer) -> None:
    """Refuse, by name, an optimizer that does not update each parameter on its own."""
    reason = unknown_optimizer(optimizer) or shared_state(optimizer)
    if reason is not None:
        message = (
            f"the plan offloads optimizer state, but {reason}\nhint: plan again for this workload"
        )
        raise UsageError(message)
    require_step_of_torch(optimizer, "offload_optimizer")
