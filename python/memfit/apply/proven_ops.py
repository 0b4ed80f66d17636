"""The ops that a plan's proof is about, compared with those that run.

Whether a batch may be cut, or a module run on some rows at a time, is proved from the ops of the
recorded step and their arguments. If the model has changed since (another branch, a switch to
training), it runs other ops, and the proof no longer holds.

Responsible for stopping a forward before the first op that differs. Not responsible for what runs
instead (:mod:`memfit.run.fitted`, :mod:`memfit.apply.slices.sliced_calls`). Backward is not
watched: autograd derives it from forward. Arguments that are sizes are not compared.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.capture.stage.arguments import arguments_text
from memfit.tensors.operators import Operator, operator_of
from memfit.tensors.storage import is_wrapper

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

VARY = "*"
"""Stands for arguments that are others at another batch size (``technique/micro_batch.rs``)."""

DETACH = "aten.detach.default"
"""Autograd calls it for what it saves, or does not; whoever calls it, it computes nothing."""

_SIZE = re.compile(r"SymInt\S* (\w+)")
"""An argument that is a size, in the text of an operator's schema."""


_COUNTING = "aten.arange."
"""Ops whose bounds are sizes, whatever their schema says."""


class LeftProof(BaseException):
    """A forward is about to run what the proof does not know; no user code is to catch it."""


class Proof:
    """The ops of a forward, in order."""

    def __init__(self, ops: Sequence[str]) -> None:
        """Read them.

        Args:
            ops: Name of each, then a space and its arguments, if it has any, or :data:`VARY`.
        """
        parts = (op.partition(" ") for op in ops)
        self._ops = [(name, arguments) for name, _, arguments in parts if name != DETACH]
        self._same: set[tuple[str, str, str]] = set()

    def __len__(self) -> int:
        """Number of ops."""
        return len(self._ops)

    def differs(
        self, index: int, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> str:
        """How a call differs from what runs at this place; empty where it does not.

        Args:
            index: The place.
            operator: The op that is called.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
        """
        if index >= len(self._ops):
            return f"it went on with `{operator.name}` after forward op {index}, the last"
        name, arguments = self._ops[index]
        if operator.name != name:
            return f"it ran `{operator.name}` as forward op {index} instead of `{name}`"
        if arguments == VARY:
            return ""
        found = arguments_text(operator, args, kwargs)
        if found == arguments or (name, found, arguments) in self._same:
            return ""
        if _settings(operator, found) != _settings(operator, arguments):
            return f"it ran forward op {index}, `{name}`, with ({found}) instead of ({arguments})"
        self._same.add((name, found, arguments))
        return ""


def _settings(operator: Operator, arguments: str) -> list[str]:
    """Arguments that are neither sizes nor a device."""
    sizes = ("start", "end") if operator.name.startswith(_COUNTING) else ()
    others = {*_SIZE.findall(str(operator.func._schema)), *sizes, "device"}
    parts = filter(None, arguments.split(", "))
    return [part for part in parts if part.partition("=")[0] not in others]


class ProvenOps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, ends a forward that leaves the proof, by :class:`LeftProof`.

    Attributes:
        left: How it left; empty while it did not.
    """

    def __init__(self, proof: Proof) -> None:
        """Expect the first op.

        Args:
            proof: The ops of one forward.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.left = ""
        self._proof = proof
        self._index = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Not to wrap every call for a compiler that never sees this mode."""
        return False

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop watching.

        Raises:
            LeftProof: It ended too early, or was left and somebody caught that.
        """
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        if kind is not None:
            return
        if self._index < len(self._proof) and not self.left:
            self.left = f"it ended after {self._index} of {len(self._proof)} ops"
        if self.left:
            raise LeftProof(self.left)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an op, if the proof knows it.

        Raises:
            LeftProof: It does not.
        """
        kwargs = dict(kwargs) if kwargs else {}
        operator = operator_of(func)
        if any(map(is_wrapper, types)):
            return NotImplemented  # as in the recording
        if not operator.counted or operator.name == DETACH:
            return func(*args, **kwargs)
        left = self.left or self._proof.differs(self._index, operator, args, kwargs)
        if not left:
            self._index += 1
        elif torch._C._current_autograd_node() is None:  # what is recomputed runs inside a node
            self.left = left
            raise LeftProof(left)
        return func(*args, **kwargs)
