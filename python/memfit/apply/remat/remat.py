"""Forward of any module, unmodified, by a plan: the executor of actions on activations.

Responsible for the life of one planned forward: hooks on the module calls that the plan names and
on no others, the watch inside them, and telling when the model left the plan. What is recorded is
:mod:`memfit.apply.remat.watch`, what is computed again is :mod:`memfit.apply.remat.replay`, what
goes elsewhere is :mod:`memfit.apply.offload.activations`; what they must do is
``docs/concepts/transformed-trace.md``.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
import weakref
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memfit.apply.offload.activations import MOST_FORWARDS, Stay, Transit
from memfit.apply.part import Part
from memfit.apply.precision.narrow import NarrowTier
from memfit.apply.remat.around_calls import around_calls, looking_for_hooks
from memfit.apply.remat.directions import Directions, Region
from memfit.apply.remat.replay import Replayer
from memfit.apply.remat.watch import Observations, Watch
from memfit.errors import DivergenceWarning, UsageError
from memfit.tensors.storage import plain_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from memfit.apply.offload.tiers import Tier
    from memfit.apply.remat.records import Goal, Narrow


@dataclass(slots=True, frozen=True)
class Outcome:
    """What one planned forward, and the backward after it, did.

    Attributes:
        observations: What was seen in forward.
        replayed_ops: Ops run again so far.
        offloaded: Allocations that went elsewhere.
        shrunk: Allocations that were held in fewer bits.
    """

    observations: Observations
    replayed_ops: int
    offloaded: int
    shrunk: int


class Rematerialiser(Part):
    """Carries out the actions of a plan on a model's activations.

    Attributes:
        tier: Where stored tensors go; ``None`` when the plan stores none.
        overflow: What to say of forwards that kept stored tensors in memory, because those of too
            many others were elsewhere; empty while none did.
    """

    def __init__(
        self,
        model: nn.Module,
        remat: Mapping[str, Any] | None,
        offload: Mapping[str, Any] | None = None,
        tier: Tier | None = None,
        *,
        unneeded_saves: Mapping[str, Any] | None = None,
        shrink: Mapping[str, Any] | None = None,
        warn: bool = True,
        strays: Callable[[], Tier | None] = lambda: None,
        outlasts: Callable[[torch.UntypedStorage], bool] = lambda _: False,
        not_called: Iterable[str] = (),
    ) -> None:
        """Prepare; nothing is installed before :meth:`forward`.

        Args:
            model: The model the plan was made for.
            remat: ``Remat`` of the plan as parsed JSON; ``None`` without that action.
            offload: ``Offload`` of the plan, likewise.
            tier: Where stored tensors go; needed with ``offload``.
            unneeded_saves: What else is dropped, as ``remat``.
            shrink: ``Shrink`` of the plan as parsed JSON; ``None`` without that action.
            warn: Whether to warn, once, when the model leaves the plan.
            strays: Makes the place for all that is saved after the model has left the plan, where
                nothing is stored otherwise.
            outlasts: Whether a storage is older than a forward though its memory may be newer.
            not_called: Paths of modules that the recorded step did not call: a forward that calls
                one has left the plan.

        Raises:
            UsageError: The plan names a module that the model does not have, or is malformed.
        """
        self._diverged = False
        self._buffers: dict[int, weakref.ref[Any]] | None = None
        self.tier = tier
        parts = {
            "remat": remat,
            "unneeded_saves": unneeded_saves,
            "offload": offload,
            "shrink": shrink,
        }
        forms: tuple[Narrow, ...] = ("half", "eight_bit") if shrink is not None else ()
        self._narrow = {form: NarrowTier(form) for form in forms}
        given = {kind: part for kind, part in parts.items() if part is not None}
        self._directions = Directions.read(given) if given else Directions({}, (), ())
        self._warned = not warn
        self.overflow = ""
        self._warns = warn
        self._strays_to, self._outlasts = strays, outlasts
        self._stays: list[weakref.ref[Stay]] = []
        self._active: _Forward | None = None
        self._last: _Forward | None = None
        self._whole: Region | None = None
        self._calls: dict[nn.Module, dict[int, Region]] = {}
        for region in self._directions.regions:
            if not region.module:
                self._whole = region
                continue
            try:
                module = model.get_submodule(region.module)
            except AttributeError as error:
                message = f"the plan watches `{region.module}`, which the model does not have"
                raise UsageError(message) from error
            self._calls.setdefault(module, {})[region.call] = region
        called = dict(model.named_modules())
        self._looking_for_hooks = looking_for_hooks(model)
        self._not_called = {called[path]: path for path in not_called if path in called}
        self._model = weakref.ref(model)

    @property
    def diverged(self) -> bool:
        """Whether the last forward left the plan."""
        return self._diverged

    @property
    def divergence(self) -> str:
        """Where it did, as a sentence; empty if it did not."""
        return self._last.watch.observations.divergence if self._last is not None else ""

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Run one forward, the loss included, inside this.

        Raises:
            UsageError: Another forward of this model is inside already.
            OffloadError: A stored tensor could not be written; there is nothing to run backward on.
        """
        if self._active is not None:
            raise UsageError("a planned forward is already running: they do not nest")
        self._diverged, self._buffers = False, None
        transits = self._transits()
        strays = partial(self._strays, transits)
        # A watch outlives its pass, and would keep the model of one that is over.
        older = weakref.WeakMethod(self._is_older)

        def is_older(storage: torch.UntypedStorage) -> bool:
            method = older()
            return method is not None and method(storage)

        watch = Watch(self._directions, self._on_divergence, transits, strays, is_older)
        running = _Forward(watch, transits)
        self._active = self._last = running
        handles = [hook for module in self._calls for hook in self._hooks(module, running)]
        for module in self._not_called:
            handles.extend(self._hooks(module, running))

        def left() -> None:
            for module in self._unwatched():
                handles.extend(self._hooks(module, running))

        running.on_leaving = left
        completed = False
        try:
            if self._whole is not None:
                running.enter(self._whole)
            yield
            completed = True
        finally:
            for handle in handles:
                handle.remove()
            self._active = None
            running.close(complete=completed)
            self._say_overflow(running)

    def leave(self, why: str) -> None:
        """Take the forward that has begun for one that is not as planned.

        Args:
            why: A clause that says so of the model.
        """
        if self._active is not None:
            self._active.watch.leave_alone(why)

    def outcome(self) -> Outcome | None:
        """What the last forward did; ``None`` before the first."""
        if self._last is None:
            return None
        last = self._last
        sent = {goal: transit.outgoing.sent for goal, transit in last.transits.items()}
        offloaded = sent.pop("offload", 0)
        observations, replayed = last.watch.observations, last.replayer.replayed
        return Outcome(observations, replayed, offloaded, sum(sent.values()))

    def _is_older(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage is older than a forward, where its memory does not tell."""
        if self._buffers is None:
            model = self._model()
            found = () if model is None else model.buffers()
            parts = (part for buffer in found for part in plain_tensors(buffer))
            storages = (it.untyped_storage() for it in parts if it.layout is torch.strided)
            self._buffers = {it._cdata: weakref.ref(it) for it in storages}
        known = self._buffers.get(storage._cdata)
        return self._outlasts(storage) or (known is not None and known() is storage)

    def _hooks(self, module: nn.Module, running: _Forward) -> list[Any]:
        regions = self._calls.get(module, {})
        calls = entered = 0
        path = self._not_called.get(module)

        def before(_module: nn.Module, _args: Any) -> None:
            nonlocal calls, entered
            entered += not running.is_elsewhere
            if running.is_elsewhere:
                running.watch.leave_alone("it calls modules in other threads")
                return
            if torch._C._current_autograd_node() is not None:
                running.enter(None)  # a user's checkpoint runs the module again in backward
                return
            region = regions.get(calls)
            calls += 1
            if path is not None:
                running.watch.leave_alone(f"it calls `{path}`, which the recorded step did not")
            running.enter(region, is_astray=region is None and running.is_astray)

        def after(_module: nn.Module, _args: Any, _result: Any) -> None:
            nonlocal entered
            if running.is_elsewhere or not entered:
                return  # of a call that began before there were hooks
            entered -= 1
            running.leave(complete=sys.exc_info()[0] is None)

        by_hooks = module.training or module not in self._looking_for_hooks
        return around_calls(module, before, after, by_hooks=by_hooks)

    def _unwatched(self) -> Iterator[nn.Module]:
        """The largest modules in which the plan watches nothing, and which watch nothing yet.

        What contains one that is watched follows the plan again in there.
        """
        model = self._model()
        waiting = [] if model is None else [model]
        while waiting:
            module = waiting.pop()
            if module in self._calls or module in self._not_called:
                continue
            inside = set(module.modules())
            if inside.isdisjoint(self._calls) and inside.isdisjoint(self._not_called):
                yield module
            else:
                waiting.extend(module.children())

    def _transits(self) -> dict[Goal, Transit]:
        """What a forward's stored tensors share, and its shrunk ones, by where they go."""
        transits: dict[Goal, Transit] = {
            form: Transit(tier, 0, ()) for form, tier in self._narrow.items()
        }
        if self.tier is not None:
            transits["offload"] = self._transit(self.tier)
        return transits

    def _strays(self, transits: dict[Goal, Transit]) -> Transit | None:
        """What takes all that is saved after the model has left the plan."""
        tier = self._strays_to()
        if tier is not None and "offload" not in transits:
            transits["offload"] = self._transit(tier)
        if tier is not None and self._active is not None:
            self._active.leaves_plan()
        return None if tier is None else transits["offload"]

    def _transit(self, tier: Tier) -> Transit:
        """What stored tensors share, within the number of forwards that may store."""
        self._stays = [reference for reference in self._stays if reference() is not None]
        is_full = len(self._stays) >= MOST_FORWARDS
        directions = self._directions
        transit = Transit(tier, directions.window_bytes, directions.order, is_full=is_full)
        assert transit.stay is not None, "it is let go of when forward ends"
        self._stays.append(weakref.ref(transit.stay))
        return transit

    def _say_overflow(self, ended: _Forward) -> None:
        """Say, once, that a forward kept what the plan would offload."""
        transit = ended.transits.get("offload")
        if self.overflow or transit is None or not transit.was_full:
            return
        self.overflow = (
            f"{MOST_FORWARDS} forwards whose backward has not run have tensors offloaded; others "
            "beside them keep theirs in memory"
        )
        if self._warns:
            message = (
                f"{self.overflow}. Results stay right; run forwards without a backward under "
                "`torch.no_grad()`, or let go of their losses"
            )
            warnings.warn(message, DivergenceWarning, stacklevel=4)

    def _on_divergence(self, where: str) -> None:
        self._diverged = True
        if self._warned:
            return
        self._warned = True
        message = (
            f"the model left the recorded step: {where}. Results stay right; tensors are kept that "
            "the plan would drop, so the step may take more memory than planned"
        )
        warnings.warn(message, DivergenceWarning, stacklevel=2)


def _others() -> str:
    """Who else decides what is computed or saved in a forward; empty where nobody does.

    Forward-mode differentiation takes other formulas under a dispatch mode
    (``isTensorSubclassLike`` in ``torch/csrc/autograd/FunctionsManual.cpp``), whose results differ
    in rounding. Transforms refuse hooks on saved tensors. Of nested hooks the innermost alone is
    asked, and whoever put up the outer ones counts on them: a checkpoint compares what is saved in
    backward with what was in forward.
    """
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward-mode automatic differentiation"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a transform of `torch.func`"
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:  # noqa: FBT003
        return "other hooks on saved tensors, as a checkpoint has them"
    return ""


class _Forward:
    """One forward under way: the watch, its replayer, and the regions that are open.

    What watches belongs to a thread, in torch too. Modules that other threads call run as they are.

    Attributes:
        watch: Watches the ops.
        replayer: Computes again, and fetches.
        transits: What is stored or shrunk, by where it goes.
        is_astray: Whether it has left the plan, so that what it saves from then on is offloaded.
        on_leaving: Called once, when it does.
    """

    def __init__(self, watch: Watch, transits: dict[Goal, Transit]) -> None:
        self.transits = transits
        self.watch = watch
        stored = transits.get("offload")
        self.replayer = Replayer(stored.ahead if stored is not None else None)
        self.is_astray = False
        self.on_leaving: Callable[[], None] = lambda: None
        self._open: list[contextlib.ExitStack | None] = []
        self._thread = threading.get_ident()

    def leaves_plan(self) -> None:
        """The plan is left: what modules save that were not watched is offloaded, too."""
        if not self.is_astray:
            self.is_astray = True
            self.on_leaving()

    @property
    def is_elsewhere(self) -> bool:
        """Whether this is another thread than the one that the forward began in."""
        return threading.get_ident() != self._thread

    def enter(self, region: Region | None, *, is_astray: bool = False) -> None:
        """A watched module is entered; a region inside a region watches nothing.

        Args:
            region: The ops that the plan expects in it; ``None`` where it expects none.
            is_astray: Whether it is watched all the same, for what it saves.
        """
        watches = region is not None or is_astray
        if not watches or any(entered is not None for entered in self._open):
            self._open.append(None)
            return
        if others := _others():
            self.watch.leave_alone(f"it runs under {others}")
            self._open.append(None)
            return
        entered = contextlib.ExitStack()
        entered.enter_context(
            torch.autograd.graph.saved_tensors_hooks(self.watch.pack, self.replayer.unpack)
        )
        entered.enter_context(self.watch)
        self._open.append(entered)
        if region is not None:
            self.watch.start_region(region.start, region.end)

    def leave(self, *, complete: bool) -> None:
        """The module entered last is left."""
        if not self._open:
            return
        entered = self._open.pop()
        if entered is not None:
            self.watch.end_region(complete=complete)
            entered.close()

    def close(self, *, complete: bool) -> None:
        """End the forward, closing what an interrupt left open."""
        while self._open:
            self.leave(complete=complete)
        self.on_leaving = lambda: None  # it holds what it hangs hooks on
        self.watch.close()
        for transit in self.transits.values():
            try:
                if complete:
                    transit.outgoing.settle()
            finally:
                transit.outgoing.abandon()
                transit.stay = None
