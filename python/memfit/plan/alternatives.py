"""The step once more, in other ways: in slices, in fewer bits, without a graph or checkpoints.

Responsible for recording the ways of running a step that the engine finds worth a capture, with the
parts of an executor that a plan would use, so that what is predicted is what will run. Not
responsible for which ways those are (the engine), for when they are needed (:mod:`memfit.api.fit`),
nor for the slices (:mod:`memfit.apply.slices.in_slices`) and what is cast (torch).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memfit._native import Trace
from memfit.apply.precision.autocast import DTYPES, kept, modules_to_keep
from memfit.apply.slices.in_slices import InSlices, as_real
from memfit.capture.record.gradient_mode import Gradients, gradient_mode
from memfit.capture.record.recorder import RealStepNeeded
from memfit.capture.recording import record_stage, second_batch_size
from memfit.capture.stage.fake import fake_stage, preserved_random_state
from memfit.errors import MemfitError, UsageError, first_line
from memfit.tensors.garbage import no_collection
from memfit.tensors.narrow_parameters import alias_refusal, range_refusal
from memfit.weights.by_rows import require_torchao
from memfit.weights.eight_bit_products import (
    LEAST_ROWS,
    products_refusal,
    require_products,
)
from memfit.weights.in_eight_bits import linear_weights, quantize

if TYPE_CHECKING:
    from memfit.capture.stage.stage import Stage
    from memfit.workload import Workload

Way = dict[str, Any]
"""A ``Way`` of the engine as parsed JSON."""

_REFUSALS = {
    "half_parameters": "half_refusal",
    "int8_weights": "int8_refusal",
    "autocast": "autocast_refusal",
    "chunk": "refusal",
    "no_graph": "graph_refusal",
    "undo_checkpoints": "checkpoints_refusal",
}
"""Where ``Refusals`` of the engine say why a way was not captured; the first that it has counts."""


def with_alternatives(
    workload: Workload, trace: Trace, ways: Sequence[Way], *, device: str | None = None
) -> Trace:
    """Record a step in other ways.

    Args:
        workload: The workload that the trace is of; it stays as it is.
        trace: The trace.
        ways: The ways, as the engine asks for them: with ``sizes`` where not each is to be recorded
            at another batch size too.
        device: The kind of device that the trace was captured for, as it was given.

    Returns:
        The trace with its alternatives; where one was not found, it says why.

    Raises:
        UsageError: A module that is to be kept is none of the model's.
    """
    meta = json.loads(trace.json())["meta"] if ways else {}
    if meta.get("captured") == "real":
        refusal = "the step was captured by running it"
        return trace.with_alternatives([], dict.fromkeys(_REFUSALS.values(), refusal))
    found = _Found(tells=not any("chunk" in way and "autocast" not in way for way in ways))
    for way in ways:
        modules_to_keep(workload.model, _keep(way))  # a mistake is one whatever else there is
    with preserved_random_state(), no_collection():
        stages = _Stages(workload, device)
        if any("items" in way for way in ways):
            return _with_pieces(stages, trace, ways)
        for asked in ways:
            sizes = asked.get("sizes", "both")
            plain = {key: value for key, value in asked.items() if key != "sizes"}
            way = _possible(plain, workload.model, meta)
            refusal = _impossible(way, workload.model, meta)
            try:
                if not refusal and not _is_needless(way, found.steps):
                    _record(stages, way, sizes, found, meta)
            except (MemfitError, RealStepNeeded) as error:
                refusal = f"the step fails {_how(way)}: {error}"
            if refusal:
                found.refuse(way, refusal)
        if meta.get("second_batch", 0) > 0:  # nothing is known of it where no way is asked for
            _record_other_sizes(stages, found)
    steps = [(step.way, step.first, step.second) for step in found.steps]
    return trace.with_alternatives(steps, found.refusals)


def _how(way: Way) -> str:
    """How a step runs in a way, in words."""
    if "half_parameters" in way:
        return f"with parameters in {way['autocast']['dtype']}"
    if held := way.get("int8_weights"):
        return f"with weights{' and products' if held.get('dynamic') else ''} in 8 bits"
    if "autocast" in way:
        return "under autocast"
    if "undo_checkpoints" in way:
        return "without its checkpoints"
    return "in slices" if "chunk" in way else "without a graph"


def _possible(way: Way, model: nn.Module, meta: dict[str, Any]) -> Way:
    """A way with the weights that there are to quantise, which the engine cannot tell."""
    if "int8_weights" not in way:
        return way
    asked = way["int8_weights"]
    held = {"names": linear_weights(model, asked["names"])}
    if "dynamic" in asked:
        named = dict(model.named_parameters(remove_duplicate=False))
        kind = meta["device_kind"]
        held["dynamic"] = [
            name
            for name in held["names"]
            if name in asked["dynamic"] and not products_refusal(named[name].shape, kind)
        ]
    return {**way, "int8_weights": held}


def _impossible(way: Way, model: nn.Module, meta: dict[str, Any]) -> str:
    """Why a step cannot run in a way, as a sentence; empty where nothing is known against it."""
    if "int8_weights" in way:
        return _not_in_eight_bits(way["int8_weights"], model, meta["device_kind"])
    dtype = way.get("autocast", {}).get("dtype")
    if "half_parameters" in way:
        names = way["half_parameters"]["names"]
        if refusal := alias_refusal(model, names) or range_refusal(model, names, DTYPES[dtype]):
            return refusal
    if dtype == "bfloat16" and meta["device_kind"] == "cuda" and torch.cuda.is_available():
        here = torch.cuda.is_bf16_supported(including_emulation=False)
        return "" if here else f"{torch.cuda.get_device_name()} does not compute in bfloat16"
    return ""


def _not_in_eight_bits(held: dict[str, Any], model: nn.Module, device: str) -> str:
    """The same of weights in 8 bits, and of their products."""
    if not held["names"]:
        return "no large weight in float32 is that of an `nn.Linear` alone"
    try:
        require_torchao()
        if "dynamic" in held:
            require_products(device)
    except UsageError as error:
        return first_line(error)
    if held.get("dynamic") == []:
        first = held["names"][0]
        weight = dict(model.named_parameters(remove_duplicate=False))[first]
        return f"`{first}` has none: {products_refusal(weight.shape, device)}"
    return ""


def _is_needless(way: Way, steps: Sequence[_Step]) -> bool:
    """Whether a way keeps casts of weights none of which the same without the cache makes twice."""
    autocast = way.get("autocast")
    if not autocast or not autocast["cache"]:
        return False
    without = {**way, "autocast": {**autocast, "cache": False}}
    recorded = next((json.loads(it.first) for it in steps if it.way == without), None)
    if recorded is None:
        return False
    rows, values, strings = (recorded[it] for it in ("allocations", "values", "strings"))
    cast = Counter(
        values[op["reads"][0]]["allocation"]
        for op in recorded["ops"]
        if op["phase"] == "forward" and strings[op["name"]] == "aten._to_copy.default"
    )
    parameters = {i for i, row in enumerate(rows) if row["category"] == "parameter"}
    return all(cast[parameter] <= 1 for parameter in parameters)


@dataclass(slots=True)
class _Stages:
    """Copies of a workload on fakes: one for all ways with the same parameters, when needed."""

    workload: Workload
    device: str | None
    made: dict[tuple[Any, ...], Stage] = field(default_factory=dict)

    def of(self, running: Workload, way: Way) -> Stage:
        """The stage of a step in another way.

        Raises:
            UsageError: It needs parameters in fewer bits, and they cannot be.
        """
        half = tuple(way.get("half_parameters", {}).get("names", ()))
        held = way.get("int8_weights", {})
        eight = (tuple(held.get("names", ())), tuple(held.get("dynamic", ())))
        dtype = DTYPES[way["autocast"]["dtype"]] if half else None
        stage = self.made.get((half, dtype, eight))
        if stage is None:
            stage = self.made[half, dtype, eight] = self._narrowed(half, dtype)
            if eight[0]:
                _quantize(stage, *eight)
        stage.workload = running
        return stage

    def record(
        self,
        running: Workload,
        way: Way,
        size: int | None,
        *,
        updates: bool,
        expected: list[str] | None = None,
    ) -> dict[str, Any]:
        """Record a step in another way.

        Args:
            running: What runs in that way.
            way: The way.
            size: Number of examples; ``None`` for the workload's own.
            updates: Whether to measure the optimizer's update of each parameter.
            expected: Names of the ops that it has to run; ``None`` for any.

        Raises:
            MemfitError: It fails.
            RealStepNeeded: It cannot be followed on fakes, or runs another op.
        """
        stage = self.of(running, way)
        undone = bool(way.get("undo_checkpoints"))
        with kept(stage.model, _keep(way)):
            return record_stage(
                stage, size, probe=True, updates=updates, undone=undone, expected=expected
            )

    def _narrowed(self, names: tuple[str, ...], dtype: torch.dtype | None) -> Stage:
        stage = fake_stage(self.workload, self.device)
        if not names or stage.fake_mode is None:
            return stage
        named = dict(stage.model.named_parameters(remove_duplicate=False))
        with stage.fake_mode:
            for name in names:
                named[name].data = named[name].data.to(dtype)
        stage.has_narrow_parameters = True
        return stage


def _quantize(stage: Stage, names: Sequence[str], dynamic: Sequence[str]) -> None:
    """Hold weights of a stage in 8 bits.

    Raises:
        UsageError: They cannot be.
    """
    if stage.fake_mode is None:
        raise UsageError("the model was not captured on tensors without values")
    with stage.fake_mode:
        quantize(stage.model, names, dynamic)


class _RunsWhole(RealStepNeeded):
    """Something of a forward was not in slices: the rest of the step is not worth recording."""


@dataclass(slots=True)
class _Step:
    """A step recorded in another way.

    Attributes:
        way: The way.
        sizes: At which batch sizes it is wanted, as the engine says it.
        size: Its batch size; 0 where there is none.
        workload: What its recording ran.
        ops: Names of its ops.
        first: Its trace as JSON.
        second: Its trace at another batch size.
    """

    way: Way
    sizes: str | dict[str, int]
    size: int
    workload: Workload
    ops: list[str]
    first: bytes
    second: bytes | None = None


@dataclass(slots=True)
class _Found:
    """What came of the recordings.

    Attributes:
        steps: The steps, in the order in which they were asked for.
        refusals: Why there are no others, by the engine's name for what they would be.
        whole_loss: Whether the loss cannot be computed in slices.
        tells: Whether what does not run in slices under autocast is why a plan has no more in
            slices: else the step without it says so.
    """

    steps: list[_Step] = field(default_factory=list)
    refusals: dict[str, str] = field(default_factory=dict)
    whole_loss: bool = False
    tells: bool = True

    def refuse(self, way: Way, refusal: str) -> None:
        """Take note that a way is not to be had."""
        self.refusals[next(name for part, name in _REFUSALS.items() if part in way)] = refusal


def _record(
    stages: _Stages,
    way: Way,
    sizes: str | dict[str, int],
    found: _Found,
    meta: dict[str, Any],
) -> None:
    """Record the step in one way, or with what of it does run in slices."""
    chunk = way.get("chunk")
    calls = chunk.get("calls", []) if chunk else []
    if chunk and found.whole_loss:
        chunk = {key: chunk[key] for key in ("calls", "edges", "strips") if key in chunk}
    if chunk and not (
        calls or any(chunk.get(part) for part in ("loss", "head", "edges", "strips"))
    ):
        return
    said = {**way, "chunk": chunk} if chunk else way
    if any(step.way == said for step in found.steps):
        return  # what is left of another one
    running = _Observed(stages.workload, way, chunk)
    workload = replace(stages.workload, **running.runs(), **_cast(way))
    try:
        first = _as_of(meta, stages.record(workload, way, None, updates=True))
    except _RunsWhole:
        first = None
    if first is not None and "half_parameters" in way and workload.training:
        named = dict(stages.of(workload, way).model.named_parameters(remove_duplicate=False))
        _require_updates(named, way["half_parameters"]["names"], first)
    is_dynamic = bool(way.get("int8_weights", {}).get("dynamic"))
    if first is not None and is_dynamic and meta["device_kind"] == "cuda":
        _require_rows(first)
    if less := _less(running, chunk or {}, found, tells="autocast" not in way or found.tells):
        _record(stages, {**way, "chunk": less}, sizes, found, meta)
    if less is not None:
        return
    assert first is not None
    ops = [first["strings"][op["name"]] for op in first["ops"]]
    size, recorded = first["meta"]["batch"], json.dumps(first).encode()
    found.steps.append(_Step(said, sizes, size, workload, ops, recorded))


def _record_other_sizes(stages: _Stages, found: _Found) -> None:
    """Record the steps at another batch size where a plan may need that."""
    are_known: set[int] = set()
    for step in reversed(found.steps):
        group = step.sizes["last_of"] if isinstance(step.sizes, dict) else None
        if step.sizes == "one" or group in are_known or not step.size:
            continue
        other = second_batch_size(step.size)
        try:
            recorded = stages.record(
                step.workload, step.way, other, updates=False, expected=step.ops
            )
        except (MemfitError, RealStepNeeded):
            continue  # one size is known, as it is of a step that runs other ops at another
        step.second = json.dumps(recorded).encode()
        if group is not None and Trace.from_json(step.first, step.second, 0).knows_other_sizes():
            are_known.add(group)


def _keep(way: Way) -> list[str]:
    """The modules that a way casts nothing in."""
    keep: list[str] = way.get("autocast", {}).get("keep", [])
    return keep


def _with_pieces(stages: _Stages, trace: Trace, ways: Sequence[Way]) -> Trace:
    """The trace with what ops take on pieces of the batch; without those on which it fails."""
    for way in ways:
        plain = {key: value for key, value in way.items() if key != "items"}
        running = _Observed(stages.workload, plain, plain.get("chunk"))
        changed = {**running.runs(), **_cast(plain)} if plain else {}
        workload = replace(stages.workload, **changed)
        try:
            expected = trace.op_names(plain)
            piece = stages.record(workload, plain, way["items"], updates=False, expected=expected)
        except (MemfitError, RealStepNeeded):
            continue  # the law holds, as before
        trace = trace.with_piece(way, json.dumps(piece).encode())
    return trace


def _less(
    running: _Observed, chunk: dict[str, Any], found: _Found, *, tells: bool
) -> dict[str, Any] | None:
    """What of a chunk is left where not all of it runs so; empty for nothing, ``None`` for all.

    Args:
        running: What a recording showed.
        chunk: What was to run in slices.
        found: Takes note of what does not.
        tells: Whether that is why a plan has no more in slices: else it is another step's.
    """
    calls, strips, edges = chunk.get("calls", []), chunk.get("strips"), chunk.get("edges")
    refusal = ""
    if running.refusal:
        refusal = running.refusal
        found.whole_loss = True
    elif running.whole_calls:
        refusal = f"`{running.whole_calls[0]}` does not run in slices"
        calls = [call for call in calls if call["module"] not in running.whole_calls]
    elif strips and not running.in_strips:
        refusal, strips = "no convolution or product takes what is put off", None
    elif edges and not running.edge_sums and not running.whole_gathers:
        refusal, edges = "no sum takes messages that are computed row by row", None
    if refusal:
        if tells:
            found.refusals["refusal"] = refusal
        less = {**chunk, "calls": calls, "strips": strips, "edges": edges}
        if running.refusal:
            less.update(loss=None, head=None)
        return {part: of for part, of in less.items() if of}
    if edges and running.whole_gathers:
        return {**chunk, "edges": {**edges, "kept": running.kept_gathers}}
    if strips and running.asked_again:
        kept = sorted({*strips.get("kept", []), *running.asked_again})
        return {**chunk, "strips": {**strips, "kept": kept}}
    return None


def _require_updates(
    named: Mapping[str, nn.Parameter], names: Sequence[str], recorded: dict[str, Any]
) -> None:
    """Refuse to narrow what trains and is not updated: by torch, later, its updates would be lost.

    Raises:
        UsageError: A parameter wants a gradient and got none in the recorded step.
    """
    rows, strings = recorded["allocations"], recorded["strings"]
    updated = {strings[rows[it["parameter"]]["name"]] for it in recorded["updates"]}
    for name in names:
        if named[name].requires_grad and name not in updated:
            raise UsageError(f"`{name}` trains, and no gradient reaches it")


def _require_rows(recorded: dict[str, Any]) -> None:
    """Refuse products in 8 bits of few rows on a GPU, which torchao computes in another way there.

    Raises:
        UsageError: There is one.
    """
    values, strings = recorded["values"], recorded["strings"]
    for op in recorded["ops"]:
        if strings[op["name"]] != "aten._int_mm.default":
            continue
        rows = values[op["reads"][0]]["shape"][0]
        if rows < LEAST_ROWS:
            message = f"`{strings[op['module']]}` multiplies {rows} rows, and a product in 8 bits"
            raise UsageError(f"{message} on a GPU takes {LEAST_ROWS} or more")


def _as_of(meta: dict[str, Any], recorded: dict[str, Any]) -> dict[str, Any]:
    """A recorded way with what is true of the step in all ways: what one recording cannot tell."""
    own = recorded["meta"]
    own["micro_batch_refusal"] = meta.get("micro_batch_refusal")
    if own["inference"] is not None and meta.get("inference") is not None:
        own["inference"]["is_model_call"] = meta["inference"]["is_model_call"]
    return recorded


def _cast(way: Way) -> dict[str, Any]:
    """Fields of a workload that autocasts as a way does."""
    autocast = way.get("autocast")
    if autocast is None:
        return {}
    return {"autocast": DTYPES[autocast["dtype"]], "autocast_cache": autocast["cache"]}


class _Observed:
    """A workload's loss or forward in another way, and what did not run in slices.

    Attributes:
        refusal: Why the loss was computed whole in the last call; empty if it was not.
        whole_calls: Modules that ran whole in the last call.
        in_strips: Convolutions and products that took strips in the last call.
        asked_again: Those of them that wrote over what was used again.
        edge_sums: Sums of messages in slices in the last call.
        whole_gathers: Gathers for edges whose rows were needed whole in it.
        kept_gathers: Those, and what was not put off already.
    """

    def __init__(self, workload: Workload, way: Way, chunk: dict[str, Any] | None) -> None:
        """Prepare; the model is the one that each call is given."""
        self._workload = workload
        self._chunk = chunk
        self._gradients: Gradients | None = "off" if way.get("no_graph") else None
        self.refusal = ""
        self.whole_calls: list[str] = []
        self.in_strips = 0
        self.asked_again: set[int] = set()
        self.edge_sums = 0
        self.whole_gathers: set[int] = set()
        self.kept_gathers: list[int] = []

    def runs(self) -> dict[str, Any]:
        """The field of a workload that runs so."""
        return {"loss": self._loss} if self._workload.training else {"forward": self._forward}

    def _loss(self, model: Any, batch: Any) -> Any:
        assert self._workload.loss is not None
        return self._observe(self._workload.loss, model, batch)

    def _forward(self, model: Any, batch: Any) -> Any:
        if self._gradients is None:
            return self._observe(self._workload.infer, model, batch)
        with gradient_mode(self._gradients):
            return self._observe(self._workload.infer, model, batch)

    def _observe(self, run: Callable[[Any, Any], Any], model: Any, batch: Any) -> Any:
        if self._chunk is None:
            return run(model, batch)
        running = InSlices(model, self._chunk, warn=False, records=True)
        with running.forward():
            result = as_real(run(model, batch))
        self.whole_calls = running.calls.whole
        if running.strips is not None:
            self.in_strips, self.asked_again = running.strips.calls, running.strips.asked_again
        if running.edges is not None:
            self.edge_sums = running.edges.sums
            self.whole_gathers = running.edges.whole_gathers
            self.kept_gathers = running.edges.to_be_kept
        if running.loss is not None:
            seen = running.loss.last
            if seen.whole or not seen.losses:
                who = f"`{seen.whole[0]}` needs" if seen.whole else "the loss needs"
                weight = (self._chunk.get("loss") or self._chunk["head"])["weight"]
                self.refusal = f"{who} the logits of `{weight}` whole"
        is_without_strips = running.strips is not None and not self.in_strips
        is_without_edges = running.edges is not None and (
            bool(self.whole_gathers) or not self.edge_sums
        )
        if self.refusal or self.whole_calls or is_without_strips or is_without_edges:
            raise _RunsWhole
        return result
