"""The executor of a plan's ``micro_batch`` action in a step that is a script's own.

Responsible for having the model's calls run in pieces while a forward lasts, and for telling of
one that did not. Not responsible for how a call does (:mod:`memfit.apply.pieces.call`), nor for
steps that are memfit's own (:mod:`memfit.apply.micro_batch`).
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from memfit.apply.borrowed import borrowed
from memfit.apply.part import Part
from memfit.apply.pieces.call import Pieces
from memfit.apply.proven_ops import LeftProof, Proof
from memfit.apply.replaced import replaced
from memfit.errors import UsageError
from memfit.tensors.function_modes import function_mode
from memfit.tensors.gradient_hooks import another_forward, forward_hooks, own_forwards


class InPieces(Part):
    """Runs a model's calls on one piece of the batch after the other; keeps no model alive."""

    def __init__(self, model: nn.Module, count: int, ops: Mapping[str, Any]) -> None:
        """Prepare; nothing is installed before :meth:`forward`.

        Args:
            model: The model.
            count: Pieces of the batch.
            ops: ``MicroBatch`` of the plan as parsed JSON, with its ``call``.

        Raises:
            UsageError: It is no such thing.
        """
        try:
            proof = Proof([ops["names"][i] for i in ops["forward"]])
            cut = frozenset(int(place) for place in ops["call"]["cut"])
            draws = tuple(bool(draw) for draw in ops["call"]["draws"])
            said = ops["call"].get("loss")
            loss = None if said is None else (int(said["place"]), str(said["reduction"]))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            message = f"the plan's `micro_batch` action is malformed: {error!r}"
            raise UsageError(message) from error
        self._held = weakref.ref(model)
        self._how = (count, cut, draws, proof, loss)
        self._own_forwards = own_forwards(model)
        self._changed = another_forward(model, self._own_forwards)
        self._left = ""

    @property
    def diverged(self) -> bool:
        """Whether a call of the last forward ran whole that should not have."""
        return bool(self._left)

    @property
    def divergence(self) -> str:
        """Why it did, as a sentence; empty if none did."""
        return f"the model ran on its whole batch: {self._left}" if self._left else ""

    def forward(self) -> AbstractContextManager[None]:
        """What a forward runs inside."""
        self._left = ""
        model = borrowed(self._held)
        whole, pieces = model.forward, Pieces(model, *self._how)
        self._changed = self._changed or another_forward(model, self._own_forwards)

        def forward(*args: Any, **kwargs: Any) -> Any:
            try:
                self._require_unseen()
                return pieces.run(whole, args, kwargs)
            except LeftProof as left:
                self._left = self._left or str(left)
                return whole(*args, **kwargs)

        return replaced(model, forward)

    def _require_unseen(self) -> None:
        """Leave the proof where something sees pieces that came after it, as a hook does."""
        model = borrowed(self._held)
        hooks = forward_hooks(model, own=False, ours=False)
        reason = self._changed or hooks or function_mode()
        if reason is not None:
            raise LeftProof(reason)
