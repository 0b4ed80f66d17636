"""From a recorded step of the script to a plan for the steps that follow.

Responsible for turning the recorded step into one as the next ones will be, and for the bytes that
are there outside the step. Not responsible for recording or for carrying the plan out.

A first step differs from all others in one way: its optimizer makes its state. What became
optimizer state is therefore taken to have been there all along. (A step that began without the
gradients that later ones begin with is not planned from; see :mod:`memfit.run.script.loop`.)
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import copy
from typing import Any

import torch
from torch import nn

from memfit import _native
from memfit._native import gpu_profile
from memfit.answers import Plan, Trace
from memfit.apply.executor import OF_OPTIMIZER, TECHNIQUES
from memfit.apply.offload.mapped import LEAST_BYTES
from memfit.apply.offload.tiers import open_tier
from memfit.capture.as_trace import trace_json
from memfit.capture.record.recorder import FORWARD
from memfit.capture.trace_writer import Meta, with_held
from memfit.errors import MemfitError
from memfit.options import HOST
from memfit.plan.cost_source import offer
from memfit.plan.profiles import usable
from memfit.run.script.observed import Observation
from memfit.run.script.op_seconds import usual_seconds
from memfit.run.script.place import chosen_place, free_bytes, strays_to, takes_files
from memfit.run.script.remains import BACKWARD_BEGINS, Passing
from memfit.run.script.request import FitRequest
from memfit.run.script.updates import add_unrecorded_step, forget_state, in_slices
from memfit.torch_versions import offloaded_parameters_refusal

_PARAMETERS = "offload_parameters"

_NOT_THE_SCRIPTS = [
    "allocator_settings",  # the allocator is at work before the first step is seen
    *(kind for kind, it in TECHNIQUES.items() if it.needs_whole_step and kind not in OF_OPTIMIZER),
]
"""What needs a step that is memfit's own."""

OUTSIDE = "outside the step"
"""Name of the bytes that the script holds meanwhile: data, other models, the last step's loss."""


_WORTH = 1 / 64
"""Part of the budget that is worth a plan of its own."""

PLANNING_SECONDS = (0.25, 1.0)
"""A script waits for its plan, and a search of four times the work finds one that is 0.5 % faster
at most; where no plan fits, it finds lower ones."""

_Limits = tuple[float | None, float | None]
"""Seconds that a search may take, or else how much work."""


class RecordedStep:
    """A step that can be planned, for any number of bytes held outside it.

    Attributes:
        not_offloaded: Why nothing can be offloaded although a place was named; empty if it can.
        place: Where the latest plan offloads to, if it does, without the user having named it;
            empty otherwise.
        may_round: Whether ops of it ran in pieces, which may change rounding.
        in_two_above: Of which size on its convolutions let go of their input.
        way: The action by which the step ran, part of every plan: the model on pieces of its batch,
            the loss in slices, or all under autocast; ``None`` where it ran as it is.
        gradients_wait: Whether plans count on gradients of the step before to be in files until
            the script drops them, which it does before backward.
    """

    def __init__(self, observation: Observation, target: str, request: FitRequest) -> None:
        """Make a trace of a recorded step.

        Args:
            observation: The recording.
            target: A name for it.
            request: Which plans are allowed, and where they may offload to.
        """
        recorder, roles = observation.recorder, observation.roles
        on_cpu = observation.device_kind == "cpu"
        meta = Meta(
            target=target,
            torch_version=torch.__version__,
            device_kind=observation.device_kind,
            optimizer=observation.optimizer,
            batch=0,
            training=True,
            captured="real",
            probe_threads=torch.get_num_threads() if on_cpu else 0,
            fused_optimizer_refusal=observation.fusing_refusal or None,
            per_parameter_refusal=observation.state_stays,
            eight_bit_refusal=observation.eight_bit_refusal,
            offloaded_parameters_refusal=offloaded_parameters_refusal(),
            loss_reduction="",
            fixed_parameters=sorted(roles.fixed),
            notes=list(recorder.notes),
        )
        scratch = {i: size for i, size in enumerate(recorder.scratch) if size > 0 and on_cpu}
        self._json = trace_json(recorder, roles, meta, scratch)
        self._native: _native.Trace | None = None
        self._traces: dict[tuple[bool, bool], Trace] = {}
        self._costs = _costs(observation)
        self._other_formulas = tuple(recorder.formulas.others)
        self._request = request
        # Who updates parameters without an optimizer is not seen to do it.
        by_hand = [] if observation.optimizer else [_PARAMETERS]
        self._forbidden = [*_NOT_THE_SCRIPTS, *by_hand]
        self.not_offloaded = ""
        self.place = ""
        named = request.options.place
        self._offer = None if named is None else self._offered(named)
        if observation.unrecorded is not None:
            forget_state(self._json, roles.optimizer_state)
            add_unrecorded_step(self._json, observation.unrecorded, observation.owners)
            self._costs = _with_updates(self._costs, self._json)
        _settle(self._json, roles.optimizer_state)
        self._slices = observation.slices
        self.way = observation.way
        self._called = observation.called
        self.may_round = observation.may_round
        self.in_two_above = observation.in_two_above
        self.gradients_wait = False
        self._not_called: tuple[str, ...] | None = None
        if self.pieces > 1:
            # The model computes with stand-ins of its parameters, which nobody would fetch.
            self._forbidden.append(_PARAMETERS)

    def not_called(self, model: nn.Module) -> tuple[str, ...]:
        """Paths of the model's modules that the step did not call, nor anything in them.

        Args:
            model: The model.
        """
        if self._not_called is None:
            strings = self._json["strings"]
            called = {strings[it["module"]] for it in self._json["regions"]}
            reached = {path[:end] for path in called for end in _ends_of_names(path)}
            paths = (path for path, _ in model.named_modules() if path)
            self._not_called = tuple(path for path in paths if path not in reached)
        return self._not_called

    @property
    def op_count(self) -> int:
        """Ops of the step."""
        return len(self._json["ops"])

    @property
    def pieces(self) -> int:
        """Pieces of the batch that the model ran on."""
        return int(self.way["count"]) if self.way and self.way["kind"] == "micro_batch" else 1

    def notes(self) -> list[str]:
        """Which gradients may round differently, and why something asked for is not offloaded."""
        said = [
            f"a step that is watched computes `{name}` by another formula: last bits may differ"
            for name in self._other_formulas
        ]
        if self.not_offloaded:
            return [*said, f"nothing is offloaded: {self.not_offloaded}"]
        why = offloaded_parameters_refusal()
        if self._request.options.place is not None and why is not None:
            said.append(f"parameters are not offloaded: {why}")
        return said

    def lasting_bytes(self) -> int:
        """Bytes that are there whatever the batch is cut into."""
        kinds = ("parameter", "module_buffer", "gradient", "optimizer_state", "input")
        rows = self._json["allocations"]
        return sum(int(row["bytes"]) for row in rows if row["category"] in kinds)

    def made_bytes(self) -> int:
        """Bytes of all allocations that were there at any time."""
        return sum(int(row["bytes"]) for row in self._json["allocations"])

    def at_sizes(
        self, first: RecordedStep, sizes: tuple[list[int], list[int], list[int]]
    ) -> RecordedStep:
        """The step at other sizes of its input.

        Args:
            first: An earlier recording at other sizes.
            sizes: Those of the input in ``first``, in this, and wanted.

        Raises:
            MemfitError: The two are no two sizes of one step, or no law explains how it grows.
        """
        there = copy(self)
        *recorded, wanted = sizes
        grown = self._trace().at_sizes([first._trace()], recorded, wanted)
        there._json, there._native, there._traces = json.loads(grown.json()), None, {}
        seconds = self._costs.get("op_seconds")
        if seconds is not None:
            pairs = zip(seconds, self._json["ops"], there._json["ops"], strict=True)
            scaled = [took * _growth(before, after) for took, before, after in pairs]
            there._costs = {**self._costs, "op_seconds": scaled}
        return there

    def _trace(self) -> _native.Trace:
        """The step itself, made once: each batch of a new length asks for it."""
        if self._native is None:
            self._native = _native_trace(self._json)
        return self._native

    def ways(self) -> list[dict[str, Any]]:
        """The ways of running it in slices that are worth a recording each."""
        return self._trace().ways()

    def classes_to_slice(self) -> int:
        """Classes of a loss that may be worth slices; 0 without one."""
        losses = (way.get("chunk", {}).get("loss") for way in self.ways())
        return max((loss["classes"] for loss in losses if loss), default=0)

    def forbid(self, kind: str) -> None:
        """Leave a technique out of plans from now on.

        Args:
            kind: Its kind of action.
        """
        if kind not in self._forbidden:
            self._forbidden = [*self._forbidden, kind]

    def share_bytes(self, percentage: str, outside_bytes: int, passing: Passing = ()) -> int:
        """What a percentage of the step comes to, as it is without a plan.

        Args:
            percentage: As the user wrote it.
            outside_bytes: What the script holds outside the step, or would hold.
            passing: What of that goes in the course of the step.
        """
        trace = _native_trace(_held(self._json, outside_bytes, passing))
        request = {"batch": None, "budget": None, "gpu": None}
        whole = int(_native.predict(trace, request)["predicted_peak_bytes"])
        return _native.parse_budget(percentage, whole)

    def plan(
        self,
        budget: str | int,
        outside_bytes: int,
        passing: Passing = (),
        *,
        time_limit: float | None = None,
        request: FitRequest | None = None,
    ) -> Plan:
        """Plan the step: without a place that nobody named, unless nothing else fits.

        Args:
            budget: As the user wrote it, or bytes.
            outside_bytes: What the script holds outside the step.
            passing: What of that goes in the course of the step.
            time_limit: Seconds after which the best plan found will do; when left out, it is the
                work of as long as a step takes, and of one of :data:`PLANNING_SECONDS` at least.
            request: Which plans are allowed, instead of what the user has asked for.
        """
        asked = request or self._request
        took = sum(self._costs.get("op_seconds", ()))
        limits: list[_Limits] = [(None, max(least, took)) for least in PLANNING_SECONDS]
        if time_limit is not None:
            limits = [(time_limit, None)]
        try:
            for limit in dict.fromkeys(limits):
                made = self._waiting_if_better(budget, (outside_bytes, passing), asked, limit)
                if made.fits:
                    break
        finally:
            self._traces.clear()
        return made

    def _waiting_if_better(
        self,
        budget: str | int,
        outside: tuple[int, Passing],
        asked: FitRequest,
        limits: _Limits,
    ) -> Plan:
        """Plan the step: with gradients in files from before its forward, if nothing else fits."""
        what = (budget, outside, asked, limits)
        made = self._best(*what)
        if made.fits or self.gradients_wait or not self._gains_by_waiting(made, asked):
            return made
        there = copy(self)
        there.gradients_wait = True
        waits = there._best(*what)
        peaks = (it.planned.predicted_peak_bytes for it in (waits, made))
        if next(peaks) >= next(peaks):
            return made
        self.gradients_wait, self.place = True, there.place
        return waits

    def _best(
        self,
        budget: str | int,
        outside: tuple[int, Passing],
        asked: FitRequest,
        limits: _Limits,
    ) -> Plan:
        """Plan the step, to the place that was named or, if that helps, to one that was not."""
        made = self._offloaded(outside, budget, asked, self._offer, limits)
        self.place = ""
        if made.fits or not asked.may_choose_place:
            return made
        place = chosen_place(self._json["meta"]["device_kind"])
        offered = None if place is None else self._offered(place)
        if place is None or offered is None:
            return made
        elsewhere = self._offloaded(outside, budget, asked, offered, limits)
        moved = sum(a.bytes for a in elsewhere.actions if a.kind.startswith("offload"))
        lower = elsewhere.planned.predicted_peak_bytes < made.planned.predicted_peak_bytes
        if not lower or moved > free_bytes(place):
            return made
        self.place = place
        return elsewhere

    def _offloaded(
        self,
        outside: tuple[int, Passing],
        budget: str | int,
        asked: FitRequest,
        offered: dict[str, Any] | None,
        limits: _Limits,
    ) -> Plan:
        """Plan for an offer: with the state of whole parameters on its way, or else of slices."""
        whole = self._trace_with(outside, is_cut=False)
        made = self._planned(whole, budget, asked, offered, limits)
        if made.fits or offered is None or not any(n > 1 for n in self._slices.values()):
            return made
        cut = self._trace_with(outside, is_cut=True)
        sliced = self._planned(cut, budget, asked, offered, limits)
        peaks = (it.planned.predicted_peak_bytes for it in (sliced, made))
        return sliced if next(peaks) < next(peaks) else made

    def _trace_with(self, outside: tuple[int, Passing], *, is_cut: bool) -> Trace:
        """The step as planned, and what the script holds outside it; made once for a plan."""
        which = (self.gradients_wait, is_cut)
        if which not in self._traces:
            found = _gradients_in_files(self._json) if self.gradients_wait else self._json
            found = in_slices(found, self._slices) if is_cut else found
            self._traces[which] = Trace(_native_trace(_held(found, *outside)))
        return self._traces[which]

    def _gains_by_waiting(self, made: Plan, asked: FitRequest) -> bool:
        """Whether it is forward that lacks room, and gradients of before that take it there."""
        worst = made.bottleneck
        if worst is None or worst.phase != FORWARD or "offload" in asked.options.forbid:
            return False
        if not takes_files(strays_to(asked, self._json["meta"]["device_kind"])):
            return False
        held = sum(self._json["allocations"][i]["bytes"] for i in _waiting(self._json))
        return bool(held > made.budget_bytes * _WORTH)

    def _planned(
        self,
        trace: Trace,
        budget: str | int,
        asked: FitRequest,
        offered: dict[str, Any] | None,
        limits: _Limits,
    ) -> Plan:
        request: dict[str, Any] = {
            "budget": str(budget),
            "allow": asked.options.promise,
            "allow_kinds": asked.options.allow_kinds,
            "forbid": [*self._forbidden, *asked.options.forbid],
            "offload": offered,
            "own_backward": True,
        }
        said = self._of_whole_updates(_native.plan(trace.native, self._costs, request, *limits))
        if self.way is None and self.may_round and said["promise"] == "exact":
            said = {**said, "promise": "equivalent", "next_class": None}
        if self.way is None:
            return Plan.of(said)
        promises = {said["promise"], self.way["promise"]}
        loosest = "approximate" if "approximate" in promises else "equivalent"
        said = {**said, "promise": loosest, "next_class": None}
        said["actions"] = [*said["actions"], self.way]
        if self.pieces > 1:
            said["predicted_step_ratio"] *= self._slowdown()
        return Plan.of(said)

    def _of_whole_updates(self, said: dict[str, Any]) -> dict[str, Any]:
        """A plan whose actions count parameters, also where each slice is an update."""
        gradients = {update["gradient"] for update in self._json["updates"]}
        for action in said["actions"]:
            if action["kind"] == "offload_optimizer":
                action["count"] = len(set(action["offload_optimizer"]["order"]))
            elif action["kind"] == "fuse_optimizer" and action["count"] > len(gradients):
                action["count"] = len(gradients)
                action["bytes"] = sum(self._json["allocations"][i]["bytes"] for i in gradients)
        return said

    def _slowdown(self) -> float:
        """How much longer the step takes than without pieces: what is called runs forward twice."""
        seconds = self._costs.get("op_seconds")
        strings, every = self._json["strings"], self._json["regions"]
        regions = [it for it in every if strings[it["module"]] == self._called]
        if seconds is None:
            return 1.0
        again = sum(sum(seconds[it["start"] : it["end"]]) for it in regions)
        whole = sum(seconds) - again
        return float(sum(seconds) / whole) if whole > 0 else 1.0

    def _offered(self, place: str) -> dict[str, Any] | None:
        """The offer of a place; ``None`` where nothing can go there, which is noted."""
        profile = self._costs.get("profile") or {}
        device_kind = self._json["meta"]["device_kind"]
        try:
            return _usable(offer(device_kind, place, profile))
        except MemfitError as error:
            self.not_offloaded = str(error).partition("\n")[0]
            return None


def _ends_of_names(path: str) -> Iterator[int]:
    """Where the paths of a module and of all that it is in end."""
    yield from (at for at, character in enumerate(path) if character == ".")
    yield len(path)


def _waiting(trace: dict[str, Any]) -> list[int]:
    """Gradients, large enough for files, that were there before a step and go in its forward."""
    ops = trace["ops"]
    forward = next((i for i, op in enumerate(ops) if op["phase"] != FORWARD), len(ops))
    return [
        index
        for index, row in enumerate(trace["allocations"])
        if row["category"] == "gradient"
        and row["producer"] is None
        and row["bytes"] >= LEAST_BYTES
        and all(end <= forward for _, end in row["natural"])
    ]


def _gradients_in_files(trace: dict[str, Any]) -> dict[str, Any]:
    """A step that begins with its gradients in files."""
    waiting = set(_waiting(trace))
    rows = enumerate(trace["allocations"])
    return {
        **trace,
        "allocations": [{**row, "bytes": 0} if i in waiting else row for i, row in rows],
    }


def _held(trace: dict[str, Any], outside_bytes: int, passing: Passing) -> dict[str, Any]:
    """A step and what the script holds outside it, of which what passes goes in its course.

    Op :data:`BACKWARD_BEGINS` is the first one after forward.
    """
    ops = trace["ops"]
    forward = next((i for i, op in enumerate(ops) if op["phase"] != FORWARD), len(ops))
    held = []
    lasting = outside_bytes
    ends = ((forward if end == BACKWARD_BEGINS else end, size) for size, end in passing)
    for end, size in sorted(ends, reverse=True):
        held.append((min(size, lasting), min(end, len(ops))))
        lasting -= held[-1][0]
    held.append((lasting, len(ops)))
    return with_held(trace, OUTSIDE, [(size, end) for size, end in held if size > 0 and end > 0])


def _native_trace(described: dict[str, Any]) -> _native.Trace:
    return _native.Trace.from_json(json.dumps(described).encode(), None, 0)


def _growth(before: dict[str, Any], after: dict[str, Any]) -> float:
    """How much longer an op takes at other sizes."""
    for what in ("flops", "moved_bytes"):
        if before[what] > 0:
            return float(after[what]) / float(before[what])
    return 1.0


def _usable(offered: dict[str, Any]) -> dict[str, Any]:
    """An offer whose place takes files: a plan that finds out later would end the script.

    Raises:
        OffloadError: It does not: its files would lie in memory.
    """
    if offered["tier"] != HOST:
        open_tier(offered["tier"], 0, offered["folder"])
    return offered


def _costs(observation: Observation) -> dict[str, Any]:
    """What ops take: as measured in the recorded step, or by the GPU's datasheet.

    Nothing is run for it: that would take memory which the script may not have.
    """
    if observation.device_kind == "cpu":
        return {"kind": "profile", "op_seconds": usual_seconds(observation.recorder)}
    found, _ = usable("cuda", None)
    return {"kind": "roofline", "profile": found or _datasheet()}


def _datasheet() -> dict[str, Any]:
    """What is known of the GPU, or of one that stands in for it."""
    try:
        return gpu_profile(torch.cuda.get_device_name())
    except MemfitError:
        return gpu_profile(None)


def _with_updates(costs: dict[str, Any], trace: dict[str, Any]) -> dict[str, Any]:
    """Costs with the last op, which nobody timed: as fast as the fastest op moved bytes."""
    seconds = costs.get("op_seconds")
    if seconds is None:
        return costs
    pairs = zip(trace["ops"], seconds, strict=False)
    rate = max((op["moved_bytes"] / took for op, took in pairs if took > 0), default=0.0)
    took = trace["ops"][-1]["moved_bytes"] / rate if rate > 0 else 0.0
    return {**costs, "op_seconds": [*seconds, took]}


def _settle(trace: dict[str, Any], optimizer_state: set[int]) -> None:
    """Let optimizer state exist from the start."""
    end = len(trace["ops"])
    for index in optimizer_state if end > 0 else ():
        trace["allocations"][index].update(
            producer=None, natural=[[0, end]], category="optimizer_state"
        )
