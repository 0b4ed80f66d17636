"""What a recorded step leaves to Python's cycle collector.

A function that keeps its own output on ``ctx`` is part of a cycle that no end of a step frees: its
graph and the output hold each other. Responsible for finding such functions in the step that was
recorded, and for what is said of them. Not responsible for cycles in a running script
(:mod:`memfit.track.cycles`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from memfit import _native
from memfit.capture.stage.stage import Stage
from memfit.track.cycles import keeping_own_output, on_ctx


@dataclass(frozen=True, slots=True)
class CtxCycles:
    """What stays of a step.

    Attributes:
        note: What a reader of the trace should know; empty where nothing stays.
        cut_refusal: Why the batch cannot be cut; ``None`` where nothing stays.
    """

    note: str = ""
    cut_refusal: str | None = None


class CtxCycleSearch:
    """Finds them: made before the step is recorded, asked afterwards."""

    def __init__(self, stage: Stage) -> None:
        """Know what was there before.

        Args:
            stage: What will be recorded; on real tensors nothing is looked for.
        """
        self._mode = stage.fake_mode
        self._earlier = [] if self._mode is None else [node for node, _ in keeping_own_output()]

    def found(self) -> CtxCycles:
        """What the step has left."""
        if self._mode is None:
            return CtxCycles()
        earlier = set(map(id, self._earlier))
        kept_bytes: dict[int, int] = {}
        names: list[str] = []
        for node, attribute in keeping_own_output():
            storages = [it.untyped_storage() for it in on_ctx(node) if self._is_recorded(it)]
            if id(node) not in earlier and storages:
                function = type(node).__name__.removesuffix("Backward")
                names.append(f"`{function}` keeps its own output as `{attribute}`")
                kept_bytes |= {storage._cdata: storage.nbytes() for storage in storages}
        if not names:
            return CtxCycles()
        stays = f"{_native.bytes_text(sum(kept_bytes.values()))} of a step stay"
        return CtxCycles(
            f"{stays} until Python's cycle collector runs, as {names[0]}: its graph and the output "
            "hold each other; `ctx.save_for_backward(...)` makes no such cycle",
            f"{names[0]}, which would stay beside the next piece",
        )

    def _is_recorded(self, tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and getattr(tensor, "fake_mode", None) is self._mode
