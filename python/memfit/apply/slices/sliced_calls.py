"""Module calls that treat rows one by one, run on some rows at a time.

Responsible for the life of one forward: cutting what the plan's modules are given, and putting what
they return together. Not responsible for the proof that a call may be cut (the engine's
``plan/technique/chunk/row_proof.rs``), nor for which slices are saved, dropped or computed again:
to the rest of memfit each slice's ops are ops like any other.

A module's own hooks run once, with whole tensors; those of modules inside it, once for each slice.
A script knows of no slices: there, a module runs whole that has any such hook.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memfit.apply.proven_ops import LeftProof, Proof, ProvenOps
from memfit.apply.remat.randomness import GeneratorState
from memfit.apply.replaced import replaced
from memfit.errors import DivergenceWarning, UsageError
from memfit.tensors.function_modes import function_mode
from memfit.tensors.gradient_hooks import another_forward, forward_hooks


@dataclass(frozen=True, slots=True)
class _Call:
    """A module to run in slices.

    Attributes:
        path: Its path.
        module: The module.
        dim: The dimension of its input that is cut.
        slices: Into how many slices, at most.
        draws: Whether it draws random numbers.
        proof: Its ops; ``None`` to trust whoever wrote the plan that it may be cut.
    """

    path: str
    module: nn.Module
    dim: int
    slices: int
    draws: bool
    proof: Proof | None


class SlicedCalls:
    """Carries out the module calls of a ``chunk`` action.

    Attributes:
        whole: Modules that the last forward could not run in slices.
    """

    def __init__(
        self,
        model: nn.Module,
        calls: Sequence[Mapping[str, Any]],
        *,
        warn: bool = True,
        unseen: bool = False,
    ) -> None:
        """Prepare; nothing is installed before :meth:`forward`.

        Args:
            model: The model the plan was made for.
            calls: ``CallChunk`` of the plan as parsed JSON.
            warn: Whether to warn, once, when a call runs whole.
            unseen: Whether one runs whole that hooks, or a forward that is another by now, would
                see in slices.

        Raises:
            UsageError: They are no such thing, or name a module that the model does not have.
        """
        self._calls = [_read(model, call) for call in calls]
        self._warns = warn
        self._unseen = unseen
        self.whole: list[str] = []

    @property
    def diverged(self) -> bool:
        """Whether a call of the last forward ran whole."""
        return bool(self.whole)

    @property
    def divergence(self) -> str:
        """Which did, as a sentence; empty if none did."""
        return f"`{self.whole[0]}` did not run in slices" if self.whole else ""

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Run one forward inside this."""
        self.whole = []
        with contextlib.ExitStack() as entered:
            for call in self._calls:
                entered.enter_context(replaced(call.module, self._in_slices(call)))
            yield

    def _in_slices(self, call: _Call) -> Callable[..., Any]:
        run = call.module.forward
        changed = another_forward(call.module) if self._unseen else None

        def forward(*args: Any, **kwargs: Any) -> Any:
            seen = self._unseen and (changed or _sees_slices(call.module))
            if seen:
                return self._run_whole(call, run, args, kwargs, f": {seen}")
            given = _only_tensor(args, kwargs)
            if given is None or given.dim() <= call.dim + 1 or given.shape[call.dim] < 2:  # noqa: PLR2004 - to cut
                return self._run_whole(call, run, args, kwargs)
            size = -(-given.shape[call.dim] // call.slices)
            before = GeneratorState.of(given.device) if call.draws else None
            made: list[Tensor] = []
            left = ""
            for piece in torch.split(given, size, call.dim):
                # Modules rely on what they are given: what is contiguous can be viewed.
                part = piece.contiguous() if given.is_contiguous() else piece
                try:
                    with contextlib.nullcontext() if call.proof is None else ProvenOps(call.proof):
                        result = run(*_with(args, part), **_with_named(kwargs, part))
                except LeftProof as found:
                    left, result = f": {found}", None
                if not isinstance(result, Tensor) or _rows(result) != _rows(part):
                    made.clear()
                    if before is not None:
                        before.put_back()
                    return self._run_whole(call, run, args, kwargs, left)
                made.append(result)
            return torch.cat(made, call.dim)

        return forward

    def _run_whole(
        self, call: _Call, run: Callable[..., Any], args: Any, kwargs: Any, why: str = ""
    ) -> Any:
        self.whole.append(call.path)
        if self._warns:
            self._warns = False
            message = (
                f"`{call.path}` cannot run in slices as it is now{why}. Results stay right; the "
                "step may take more memory than planned"
            )
            warnings.warn(message, DivergenceWarning, stacklevel=2)
        return run(*args, **kwargs)


def _read(model: nn.Module, call: Mapping[str, Any]) -> _Call:
    try:
        path, dim, slices = str(call["module"]), int(call["dim"]), int(call["slices"])
        draws = bool(call.get("draws", True))
        proof = Proof(call["ops"]) if "ops" in call else None
    except (KeyError, TypeError, ValueError) as error:
        message = f"the plan's `chunk` action is malformed: {error!r}"
        raise UsageError(message) from error
    if slices < 1 or dim < 0:
        message = f"the plan cuts dimension `{dim}` of `{path}` into `{slices}` slices"
        raise UsageError(message)
    try:
        return _Call(path, model.get_submodule(path), dim, slices, draws, proof)
    except AttributeError as error:
        message = f"the plan runs `{path}` in slices, which the model does not have"
        raise UsageError(message) from error


def _sees_slices(module: nn.Module) -> str | None:
    """What would see slices of a call, as a clause."""
    return forward_hooks(module, own=False, ours=False) or function_mode()


def _only_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The one tensor among the arguments; ``None`` if there are more, or less."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    return tensors[0] if len(tensors) == 1 else None


def _with(args: tuple[Any, ...], part: Tensor) -> list[Any]:
    return [part if isinstance(value, Tensor) else value for value in args]


def _with_named(kwargs: Mapping[str, Any], part: Tensor) -> dict[str, Any]:
    return {k: part if isinstance(value, Tensor) else value for k, value in kwargs.items()}


def _rows(tensor: Tensor) -> torch.Size:
    return tensor.shape[:-1]
