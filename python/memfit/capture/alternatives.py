"""The step once more, with its loss computed in slices.

Responsible for recording the ways of running a step that the engine finds worth a capture, with the
executor that a plan would use, so that what is predicted is what will run. Not responsible for
which ways those are (the engine), for when they are needed (:mod:`memfit.questions`), or for the
slices (:mod:`memfit.apply.chunk`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from memfit._native import Trace
from memfit.apply.chunk import ChunkedLoss, Sliced
from memfit.capture.fake import fake_stage, no_collection, preserved_random_state
from memfit.capture.recorder import RealStepNeeded
from memfit.capture.recording import record_stage, second_batch_size
from memfit.errors import MemfitError

if TYPE_CHECKING:
    from memfit.capture.stage import Stage
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
    chunks = json.loads(trace.chunks())
    meta = json.loads(trace.json())["meta"] if chunks else {}
    if meta.get("captured") == "real":
        return trace.with_alternatives([], "the step was captured by running it")
    found = _Found()
    try:
        with preserved_random_state(), no_collection():
            stage = fake_stage(workload, device) if chunks else None
            for chunk in chunks:
                assert stage is not None
                if not _record(stage, workload, chunk, found, may_cut=meta["second_batch"] > 0):
                    break
    except (MemfitError, RealStepNeeded) as error:
        found.refusal = f"the step fails in slices: {error}"
    return trace.with_alternatives(found.steps, found.refusal)


@dataclass(slots=True)
class _Found:
    """What came of the recordings.

    Attributes:
        steps: As :meth:`memfit._native.Trace.with_alternatives` takes them.
        refusal: Why there are no more.
    """

    steps: list[tuple[str, bytes, bytes | None]] = field(default_factory=list)
    refusal: str = ""


def _record(
    stage: Stage, workload: Workload, chunk: dict[str, Any], found: _Found, *, may_cut: bool
) -> bool:
    """Record the step with one chunk; whether another one is worth a try."""
    running = _InSlices(workload, chunk)
    stage.workload = replace(workload, loss=running.loss)
    first = record_stage(stage, None, probe=True, updates=True)
    if running.seen.whole or not running.seen.losses:
        who = f"`{running.seen.whole[0]}` needs" if running.seen.whole else "the loss needs"
        found.refusal = f"{who} the logits of `{chunk['weight']}` whole"
        return False
    second = None
    size = first["meta"]["batch"]
    if may_cut and size:
        second = record_stage(stage, second_batch_size(size), probe=False, updates=False)
    found.steps.append(
        (
            json.dumps(chunk),
            json.dumps(first).encode(),
            json.dumps(second).encode() if second is not None else None,
        )
    )
    return True


class _InSlices:
    """A workload's loss, in slices.

    Attributes:
        seen: What the last call did.
    """

    def __init__(self, workload: Workload, chunk: dict[str, Any]) -> None:
        """Prepare; the model is the one that :meth:`loss` is given."""
        self._workload = workload
        self._chunk = chunk
        self.seen = Sliced()

    def loss(self, model: Any, batch: Any) -> Any:
        """The loss of a batch."""
        assert self._workload.loss is not None
        chunked = ChunkedLoss(model, self._chunk, warn=False)
        with chunked.forward():
            result = self._workload.loss(model, batch)
        self.seen = chunked.last
        return result
