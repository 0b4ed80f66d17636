"""Calls of one loop's model without gradients, its parameters elsewhere until an op uses them.

Responsible for when that is done to a call, and for what was learnt of calls like it. Not
responsible for moving parameters (:mod:`memfit.apply.offload.parameters`), nor for calls on pieces
of the batch (:mod:`memfit.run.script.pieces`).

Nobody knows what such a call takes before it has run, and no plan is about it. Where training does
not fit as it is, the first call of each kind runs with as little as it can, and tells.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from memfit.answers import Plan
from memfit.apply.executor import Executor, Subject
from memfit.apply.offload.parameters import bring_parameters_home
from memfit.errors import MemfitError
from memfit.options import HOST
from memfit.run.script.place import LEAST_STATE_BYTES, strays_to
from memfit.run.script.planned_step import Key
from memfit.run.script.request import FitRequest
from memfit.run.script.verdict import Peak
from memfit.tensors.barrier import without_barrier
from memfit.tensors.storage import is_fixed
from memfit.torch_versions import offloaded_parameters_refusal

MOST_KINDS = 8
"""Kinds of calls that are looked at; a model that generates makes many."""

_FEW_CALLS = 4
"""After so many calls that fit with all parameters in memory, these stay in memory until the next
pass. Fewer are not worth it: the plan then writes the parameters to files again."""


class Evaluations:
    """What is known of one loop's calls without gradients.

    Attributes:
        count: Calls that ran with parameters elsewhere.
    """

    def __init__(
        self, request: FitRequest, device: torch.device, on_place: Callable[[str], None]
    ) -> None:
        """Know nothing yet.

        Args:
            request: Where parameters may go.
            device: Where the model is.
            on_place: Told of the place.
        """
        self._on_place = on_place
        self.count = 0
        self._request = request
        self._device = device
        self._needs_room: dict[Key, bool] = {}
        self._before: Executor | None = None
        self._own: Executor | None = None
        self._calls = 0
        self._is_home = False

    def placed(self, key: Key, model: nn.Module, held: Executor | None) -> Executor | None:
        """Have parameters where they are to be in a call, and the optimizer's state where it is.

        Args:
            key: The call's key.
            model: The model.
            held: What keeps things elsewhere now.

        Returns:
            What does from now on.
        """
        if not self._wants(key):
            if held is not None and held.parameters is not None and held is not self._own:
                self._have_home(key, model)
            return self._without_own(held, model)
        place = strays_to(self._request, self._device.type)
        if held is not None and held.parameters is not None and self._is_home:
            self._is_home = False
            held.place()
        if not place or (held is not None and held.parameters is not None):
            return held
        forbidden = "offload_parameters" in self._request.options.forbid
        if forbidden or offloaded_parameters_refusal() is not None:
            return held
        try:
            return self._placed(model, place, held)
        except MemfitError:
            bring_parameters_home(model)
            return held

    def _placed(self, model: nn.Module, place: str, held: Executor | None) -> Executor:
        said = {} if held is None else held.plan
        kept = said.as_dict() if isinstance(said, Plan) else said
        actions = [it for it in kept.get("actions", ()) if it["kind"] == "offload_optimizer"]
        actions.append({"kind": "offload_parameters", "offload_parameters": _all_of(model, place)})
        subject = Subject(weakref.ref(model), warn=False) if held is None else held.subject
        own = Executor({"actions": actions}, subject, after=held)
        own.place()
        self._on_place(place)
        self._before, self._own = held, own
        return own

    @contextlib.contextmanager
    def running(self, key: Key, placed: Executor | None, budget_bytes: int) -> Iterator[None]:
        """Run a call inside this, and learn whether it would do with all parameters in memory.

        Args:
            key: Its key.
            placed: What keeps things elsewhere, perhaps parameters.
            budget_bytes: The budget.
        """
        if placed is None or placed.parameters is None or not placed.parameters.away_bytes:
            yield
            return
        self.count += 1
        peak = Peak(self._device)
        try:
            yield
        finally:
            away = sum(parameter.nbytes for parameter in placed.subject.model.parameters())
            self._needs_room[key] = peak.close() + away > budget_bytes

    def rest(self) -> None:
        """Let go of the model."""
        self._before = self._own = None

    def _have_home(self, key: Key, model: nn.Module) -> None:
        """Bring offloaded parameters back to memory once several calls have read them."""
        self._calls += 1
        if self._calls % _FEW_CALLS == 0 and key in self._needs_room:
            bring_parameters_home(model)
            self._is_home = True

    def _wants(self, key: Key) -> bool:
        return self._needs_room.get(key, len(self._needs_room) < MOST_KINDS)

    def _without_own(self, held: Executor | None, model: nn.Module) -> Executor | None:
        if held is None or held is not self._own:
            return held
        bring_parameters_home(model)
        before = self._before
        self.rest()
        return before


def _all_of(model: nn.Module, place: str) -> dict[str, Any]:
    """Directions that keep all large parameters elsewhere between their uses."""
    with without_barrier():
        names = [
            name
            for name, parameter in model.named_parameters()
            if type(parameter) is nn.Parameter
            and parameter.layout is torch.strided
            and parameter.nbytes >= LEAST_STATE_BYTES
            and not is_fixed(parameter)
        ]
    return {
        "tier": HOST if place == HOST else "disk",
        "folder": "" if place == HOST else place,
        "room_bytes": 0,
        "ahead_bytes": 0,
        "names": names,
        "order": list(range(len(names))),
    }
