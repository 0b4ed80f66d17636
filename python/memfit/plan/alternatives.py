"""The step once more, with parts of it in slices.

Responsible for recording the ways of running a step that the engine finds worth a capture, with the
executor that a plan would use, so that what is predicted is what will run. Not responsible for
which ways those are (the engine), for when they are needed (:mod:`memfit.api.fit`), or for the
slices (:mod:`memfit.apply.slices.in_slices`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from memfit._native import Trace
from memfit.apply.slices.in_slices import InSlices
from memfit.capture.record.recorder import RealStepNeeded
from memfit.capture.recording import record_stage, second_batch_size
from memfit.capture.stage.fake import fake_stage, preserved_random_state
from memfit.errors import MemfitError
from memfit.tensors.garbage import no_collection

if TYPE_CHECKING:
    from memfit.capture.stage.stage import Stage
    from memfit.workload import Workload


def with_alternatives(workload: Workload, trace: Trace, *, device: str | None = None) -> Trace:
    """Record a step in slices, if anything of it is worth that.

    Args:
        workload: The workload that the trace is of; it stays as it is.
        trace: The trace.
        device: The kind of device that the trace was captured for, as it was given.

    Returns:
        The trace with its alternatives; where none was found, it says why.
    """
    chunks = trace.chunks()
    meta = json.loads(trace.json())["meta"] if chunks else {}
    if meta.get("captured") == "real":
        return trace.with_alternatives([], "the step was captured by running it")
    found = _Found()
    try:
        with preserved_random_state(), no_collection():
            stage = fake_stage(workload, device) if chunks else None
            for chunk in chunks:
                assert stage is not None
                _record(stage, workload, chunk, found, may_cut=meta["second_batch"] > 0)
    except (MemfitError, RealStepNeeded) as error:
        found.refusal = f"the step fails in slices: {error}"
    return trace.with_alternatives(found.steps, found.refusal)


@dataclass(slots=True)
class _Found:
    """What came of the recordings.

    Attributes:
        steps: As :meth:`memfit._native.Trace.with_alternatives` takes them.
        refusal: Why there are no more.
        whole_loss: Whether the loss cannot be computed in slices.
    """

    steps: list[tuple[dict[str, Any], bytes, bytes | None]] = field(default_factory=list)
    refusal: str = ""
    whole_loss: bool = False


def _record(
    stage: Stage, workload: Workload, chunk: dict[str, Any], found: _Found, *, may_cut: bool
) -> None:
    """Record the step with one chunk, or with what of it does run in slices."""
    calls = chunk.get("calls", [])
    if found.whole_loss:
        chunk = {"calls": calls}
    if not chunk.get("loss") and not calls:
        return
    running = _Observed(workload, chunk)
    stage.workload = replace(workload, loss=running.loss)
    first = record_stage(stage, None, probe=True, updates=True)
    if running.refusal:
        found.refusal = running.refusal
        found.whole_loss = True
    elif running.whole_calls:
        found.refusal = f"`{running.whole_calls[0]}` does not run in slices"
        calls = [call for call in calls if call["module"] not in running.whole_calls]
    if running.refusal or running.whole_calls:
        if calls:
            _record(stage, workload, {**chunk, "calls": calls}, found, may_cut=may_cut)
        return
    second = None
    size = first["meta"]["batch"]
    if may_cut and size:
        second = record_stage(stage, second_batch_size(size), probe=True, updates=False)
    found.steps.append(
        (
            chunk,
            json.dumps(first).encode(),
            json.dumps(second).encode() if second is not None else None,
        )
    )


class _Observed:
    """A workload's loss, in slices, and what did not run in slices.

    Attributes:
        refusal: Why the loss was computed whole in the last call; empty if it was not.
        whole_calls: Modules that ran whole in the last call.
    """

    def __init__(self, workload: Workload, chunk: dict[str, Any]) -> None:
        """Prepare; the model is the one that :meth:`loss` is given."""
        self._workload = workload
        self._chunk = chunk
        self.refusal = ""
        self.whole_calls: list[str] = []

    def loss(self, model: Any, batch: Any) -> Any:
        """The loss of a batch."""
        assert self._workload.loss is not None
        running = InSlices(model, self._chunk, warn=False)
        with running.forward():
            result = self._workload.loss(model, batch)
        self.whole_calls = running.calls.whole
        if running.loss is not None:
            seen = running.loss.last
            if seen.whole or not seen.losses:
                who = f"`{seen.whole[0]}` needs" if seen.whole else "the loss needs"
                weight = self._chunk["loss"]["weight"]
                self.refusal = f"{who} the logits of `{weight}` whole"
        return result
