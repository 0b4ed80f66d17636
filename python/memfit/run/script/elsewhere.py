"""What of the script's model and optimizer is elsewhere: optimizer state, and parameters.

Responsible for having both where a plan wants them before a pass, for what uses parameters, and for
standing in for the updates of the script's own ``optimizer.step()``. Not responsible for where they
go and come (:mod:`memfit.apply.offload.optimizer_state`, :mod:`memfit.apply.offload.parameters`)
nor for seeing that the script steps (:mod:`memfit.run.script.signals`).

The script calls the optimizer; torch's hooks tell of it before and after. Before, all updates are
made, parameter by parameter; until after, the optimizer lists no parameter. So the step that the
script called finds nothing to do, and whoever watches the optimizer sees one step, as ever. Where a
step is not stood in for (it has a closure, say), the optimizer reads its state and all parameters
at once, and what is read is in memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from memfit.answers import Plan
from memfit.apply.offload.optimizer_state import StateDirections, StateElsewhere
from memfit.apply.offload.parameters import (
    ParameterDirections,
    ParametersElsewhere,
    bring_parameters_home,
)
from memfit.apply.offload.state_view import bring_home

PARAMETERS = "offload_parameters"
KINDS = ("offload_optimizer", PARAMETERS)
"""The kinds of action that keep something elsewhere between the script's steps."""


@dataclass(slots=True, frozen=True)
class Directions:
    """What a plan keeps elsewhere.

    Attributes:
        state: How the optimizer's state goes; ``None`` where it stays.
        parameters: How parameters go; ``None`` where they stay.
    """

    state: StateDirections | None
    parameters: ParameterDirections | None

    @staticmethod
    def of(plan: Plan) -> Directions | None:
        """Read what a plan says.

        Args:
            plan: The plan.

        Returns:
            The directions; ``None`` where everything stays.
        """
        said: Mapping[str, Any] = {a["kind"]: a.get(a["kind"]) for a in plan.as_dict()["actions"]}
        state, parameters = (said.get(kind) for kind in KINDS)
        if state is None and parameters is None:
            return None
        return Directions(
            None if state is None else StateDirections.read(state),
            None if parameters is None else ParameterDirections.read(parameters),
        )


class Elsewhere:
    """Keeps what a plan says elsewhere, between the script's ops and its steps.

    Attributes:
        optimizer: The script's optimizer.
        directions: What the plan says.
    """

    def __init__(self, optimizer: Optimizer, root: nn.Module, directions: Directions) -> None:
        """Make the places ready; nothing goes before :meth:`place`.

        Args:
            optimizer: The script's optimizer.
            root: The model.
            directions: What the plan says.

        Raises:
            UsageError: The optimizer cannot run parameter by parameter, or memory of a parameter
                cannot be let go.
            OffloadError: The folder cannot be used.
        """
        self.optimizer = optimizer
        self.directions = directions
        state, parameters = directions.state, directions.parameters
        self._root = root
        self._state = None if state is None else StateElsewhere(optimizer, root, state)
        self._parameters = None if parameters is None else ParametersElsewhere(root, parameters)
        self._over_nothing: contextlib.ExitStack | None = None

    def place(self) -> None:
        """Have everything go that is at home and should not be.

        Raises:
            OffloadError: Some of it cannot be written. It is at home, and whole.
        """
        if self._state is None:
            bring_home(self.optimizer)
        else:
            self._state.send_all()
        if self._parameters is None:
            bring_parameters_home(self._root)
        else:
            self._parameters.place()

    def viewed(self) -> list[str]:
        """Names of parameters elsewhere that the script keeps a view of."""
        return [] if self._parameters is None else self._parameters.viewed()

    def running(self) -> contextlib.AbstractContextManager[None]:
        """What uses parameters runs inside: a call of a model, a backward, an update."""
        return contextlib.nullcontext() if self._parameters is None else self._parameters.running()

    def step_begins(self) -> None:
        """Make all updates, and leave nothing to the step that the script has called.

        Raises:
            OffloadError: State or a parameter did not come back as it went.
        """
        self.step_ended()
        state, parameters = self._state, self._parameters
        with self.running():
            if state is not None:
                around = contextlib.nullcontext if parameters is None else parameters.update_of
                updated = state.update_all(around)
            else:
                assert parameters is not None, "one of the two is elsewhere"
                updated = parameters.update_all(self.optimizer)
        self._over_nothing = contextlib.ExitStack()
        self._over_nothing.enter_context(updated.over_nothing())

    def step_ended(self) -> None:
        """The step that the script has called is over: its optimizer is as it was."""
        over_nothing, self._over_nothing = self._over_nothing, None
        if over_nothing is not None:
            over_nothing.close()
