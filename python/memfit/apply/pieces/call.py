"""A module call on one piece of its batch after the other, forward and backward alike.

Responsible for running a call so that no more than one piece's activations, scratch and gradients
of activations are there at a time: forward keeps nothing but the whole result, and backward runs
each piece's forward again, then its backward. To the script it is one node of the graph. Not
responsible for the proof that the items of the batch are treated apart
(:mod:`memfit.plan.items_apart`).

Everything else is as without pieces: gradients of parameters arrive once and whole, so their hooks
and an optimizer inside backward see what they always see; autocast, modes of modules and random
numbers are those of the call; what was written to since is an error, as autograd has it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from memfit.apply.micro_batch import TOKEN_MEAN, Piece, Weights
from memfit.apply.pieces.stand_ins import stand_ins
from memfit.apply.pieces.whole_draws import WholeDraws, beneath, room_for
from memfit.apply.proven_ops import LeftProof, Proof, ProvenOps
from memfit.apply.remat.randomness import GeneratorState
from memfit.errors import UsageError

LEAST_ROWS = 2
"""On a batch of one, torch runs other ops."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """How a module call runs in pieces.

    Attributes:
        module: The module.
        count: Pieces, at most.
        cut: Which of the tensors that it is given are cut, by their places among them.
        draws: For each op that draws random numbers, in order, whether it does for every item.
        proof: Its ops, which each piece is compared with; ``None`` to compare nothing.
        loss: The place of the loss among the tensors that it returns, and how that reduces over the
            batch; ``None`` where it returns none.
    """

    module: nn.Module
    count: int
    cut: frozenset[int]
    draws: tuple[bool, ...]
    proof: Proof | None
    loss: tuple[int, str] | None = None

    def run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a call in pieces; whole where its batch is too small.

        Args:
            forward: The module's own forward.
            args: What it is called with.
            kwargs: The same.

        Raises:
            LeftProof: It is not the call that the proof is about; random states are as before.
        """
        leaves, structure = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        size = self._size(tensors)
        count = min(self.count, size // LEAST_ROWS)
        if count < 2:  # noqa: PLR2004 - to cut
            return forward(*args, **kwargs)
        bounds = [size * k // count for k in range(count + 1)]
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        call = _Call(self, forward, leaves, structure, bounds, len(tensors), parameters)
        before = call.state
        try:
            if torch.is_grad_enabled():
                made = _InPieces.apply(call, *tensors, *parameters)
            else:
                made = call.forward(tensors)
        except LeftProof:
            if before is not None:
                before.put_back()
            raise
        return call.result(made)

    def _size(self, tensors: Sequence[Tensor]) -> int:
        sizes = {
            tensors[place].shape[0] if place < len(tensors) and tensors[place].dim() > 0 else -1
            for place in self.cut
        }
        if len(sizes) != 1 or -1 in sizes:
            raise LeftProof("what it is given is not of the kind that was cut")
        return sizes.pop()


class _Call:
    """One call, from its forward to its backward.

    Attributes:
        state: The random generator before it; ``None`` where nothing is drawn.
    """

    def __init__(
        self,
        pieces: Pieces,
        forward: Callable[..., Any],
        leaves: list[Any],
        structure: TreeSpec,
        bounds: list[int],
        given: int,
        parameters: list[nn.Parameter],
    ) -> None:
        self._pieces = pieces
        self._forward = forward
        self._constants = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self._structure = structure
        self._bounds = bounds
        self._given = given
        self._parameters = [id(p) for p in parameters]
        device = (leaves[self._places[0]] if self._places else parameters[0]).device
        self.state = GeneratorState.of(device) if pieces.draws else None
        self._learns = torch.is_grad_enabled()
        self._modes = [module.training for module in pieces.module.modules()]
        self._autocast = [_Autocast.of(kind) for kind in dict.fromkeys(("cpu", device.type))]
        self._losses: list[Tensor] = []
        self._shares: list[float] = []
        self._made: list[Any] = []
        self._made_structure: TreeSpec | None = None
        self.differentiable: list[bool] = []

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The whole result, of which nothing is kept for backward; its tensors, flat.

        Raises:
            LeftProof: A piece runs other ops than the proof knows, or returns something else.
        """
        needed = [tensor.requires_grad for tensor in tensors[: self._given]]
        given = _apart(tensors[: self._given], needed)
        watch = self._pieces.proof
        whole: list[Tensor] = []
        weights = self._weights()
        with self._learning_apart(), _saving_nothing():
            for start, stop in itertools.pairwise(self._bounds):
                own = self._own(given, start, stop)
                proven = contextlib.nullcontext() if watch is None else beneath(ProvenOps(watch))
                counted = contextlib.nullcontext() if weights is None else weights.observe()
                with proven, self._piece(start, stop), _decomposing(learns=self._learns), counted:
                    result = self._run(own)
                self._take(result, start, stop, whole)
                del result
        if weights is not None and self._pieces.loss is not None:
            whole[self._pieces.loss[0]] = self._weighed(weights, self._pieces.loss[1])
        return whole

    def backward(
        self, tensors: Sequence[Tensor], gradients: Sequence[Tensor | None], needed: Sequence[bool]
    ) -> list[Tensor | None]:
        """Gradients of what the call was given and of the parameters.

        Args:
            tensors: Those that forward was given.
            gradients: Those of the result.
            needed: Which of the gradients are.
        """
        state = None if self.state is None else GeneratorState.of(self.state.device)
        whole = _apart(tensors[: self._given], needed[: self._given])
        found: list[Tensor | None] = [None] * self._given
        try:
            with self._as_called(), stand_ins(self._pieces.module) as made:
                for piece, (start, stop) in enumerate(itertools.pairwise(self._bounds)):
                    own = self._own(whole, start, stop)
                    with self._piece(start, stop), torch.enable_grad():
                        result = self._run(own)
                    parts = self._parts(gradients, piece)
                    pairs = self._learning(result, parts)
                    del result
                    if pairs:
                        torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
                    del pairs
                    for place in self._pieces.cut:
                        gradient, own[place].grad = own[place].grad, None
                        if gradient is not None:
                            found[place] = self._put(found[place], gradient, start, stop)
        finally:
            if state is not None:
                state.put_back()
        for place in set(range(self._given)) - self._pieces.cut:
            found[place], whole[place].grad = whole[place].grad, None
        for identity in self._parameters:
            stand_in = made[identity]
            gradient, stand_in.grad = stand_in.grad, None
            found.append(gradient)
        return found

    def backward_whole(
        self, tensors: Sequence[Tensor], gradients: Sequence[Tensor | None], needed: Sequence[bool]
    ) -> list[Tensor | None]:
        """The same where gradients of gradients are wanted: with a graph, so nothing in pieces.

        Args:
            tensors: Those that forward was given.
            gradients: Those of the result.
            needed: Which of the gradients are.
        """
        drawn = contextlib.nullcontext() if self.state is None else self.state.restored()
        with self._as_called(), drawn:
            result = self._run(tensors[: self._given])
        pairs = self._learning(result, gradients)
        wanted = [tensor for tensor, is_needed in zip(tensors, needed, strict=True) if is_needed]
        found = iter(
            torch.autograd.grad(
                [t for t, _ in pairs],
                wanted,
                [g for _, g in pairs],
                create_graph=True,
                allow_unused=True,
            )
        )
        return [next(found) if is_needed else None for is_needed in needed]

    def result(self, made: Sequence[Tensor]) -> Any:
        """What the module returns, of the tensors that the node made."""
        tensors = iter(made)
        leaves = [next(tensors) if leaf is _TENSOR else leaf for leaf in self._made]
        assert self._made_structure is not None, "forward has run"
        return tree_unflatten(leaves, self._made_structure)

    # One piece

    @contextlib.contextmanager
    def _piece(self, start: int, stop: int) -> Iterator[None]:
        if self.state is None:
            yield
            return
        self.state.put_back()
        size = self._bounds[-1]
        with beneath(WholeDraws(self._pieces.draws, size, start, stop - start)):
            yield

    def _own(self, given: Sequence[Tensor], start: int, stop: int) -> list[Tensor]:
        """What one piece is given, with gradients of its own where it is cut."""
        own = list(given)
        for place in self._pieces.cut:
            piece = self._cut(given[place], start, stop).detach()
            own[place] = piece.requires_grad_(given[place].requires_grad)
        return own

    def _run(self, given: Sequence[Tensor]) -> Any:
        leaves = list(self._constants)
        for at, tensor in zip(self._places, given, strict=True):
            leaves[at] = tensor
        args, kwargs = tree_unflatten(leaves, self._structure)
        return self._forward(*args, **kwargs)

    @staticmethod
    def _cut(tensor: Tensor, start: int, stop: int) -> Tensor:
        return tensor.narrow(0, start, stop - start)

    def _take(self, result: Any, start: int, stop: int, whole: list[Tensor]) -> None:
        """Put what a piece returned into the whole result."""
        leaves, structure = tree_flatten(result)
        constants = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if self._made_structure is None:
            self._made, self._made_structure = constants, structure
            self.differentiable = [tensor.requires_grad for tensor in tensors]
        same = structure == self._made_structure and constants == self._made
        place = None if self._pieces.loss is None else self._pieces.loss[0]
        shapes = (t.shape[:1] for i, t in enumerate(tensors) if i != place)
        if not same or any(shape != (stop - start,) for shape in shapes):
            raise LeftProof("a piece of its batch returned something else")
        if place is not None:
            self._losses.append(tensors[place].detach())
        if not whole:
            size = self._bounds[-1]
            whole.extend(t if i == place else room_for(t, size) for i, t in enumerate(tensors))
        for i, (target, tensor) in enumerate(zip(whole, tensors, strict=True)):
            if i != place:
                self._cut(target, start, stop).copy_(tensor.detach())

    def _weights(self) -> Weights | None:
        if self._pieces.loss is None:
            return None
        rows = [Piece(None, stop - start) for start, stop in itertools.pairwise(self._bounds)]
        return Weights(rows, self._pieces.loss[1], None)

    def _weighed(self, weights: Weights, reduction: str) -> Tensor:
        """The loss of the whole batch."""
        try:
            if reduction == TOKEN_MEAN and not weights.counts_targets:
                raise LeftProof("it was not seen how many targets its loss is a mean over")
            self._shares = weights.shares()
            return weights.mean(self._losses)
        except UsageError as error:
            raise LeftProof(str(error).partition("\n")[0]) from error

    def _parts(self, gradients: Sequence[Tensor | None], piece: int) -> list[Tensor | None]:
        """What is one piece's of the gradients of the result."""
        start, stop = self._bounds[piece : piece + 2]
        parts = [g if g is None else self._cut(g, start, stop) if g.dim() else g for g in gradients]
        if self._pieces.loss is not None:
            place = self._pieces.loss[0]
            whole, share = parts[place], self._shares[piece]
            # The mean over no target is no number, and nor is its gradient.
            parts[place] = None if whole is None or share == 0 else whole * share
        return parts

    @staticmethod
    def _learning(result: Any, gradients: Sequence[Tensor | None]) -> list[tuple[Tensor, Tensor]]:
        """Tensors of a result that have a gradient, with it."""
        tensors = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]
        pairs = zip(tensors, gradients, strict=True)
        return [(t, gradient) for t, gradient in pairs if gradient is not None and t.requires_grad]

    def _put(self, whole: Tensor | None, piece: Tensor, start: int, stop: int) -> Tensor:
        if whole is None:
            whole = room_for(piece, self._bounds[-1]).zero_()
        self._cut(whole, start, stop).copy_(piece)
        return whole

    def _learning_apart(self) -> contextlib.AbstractContextManager[Any]:
        return stand_ins(self._pieces.module) if self._learns else contextlib.nullcontext()

    @contextlib.contextmanager
    def _as_called(self) -> Iterator[None]:
        """Autocast and the modes of modules as they were at the call."""
        modules = list(self._pieces.module.modules())
        now = [module.training for module in modules]
        for module, mode in zip(modules, self._modes, strict=True):
            module.training = mode
        try:
            with contextlib.ExitStack() as entered:
                for autocast in self._autocast:
                    entered.enter_context(autocast.entered())
                yield
        finally:
            for module, mode in zip(modules, now, strict=True):
                module.training = mode


class _InPieces(torch.autograd.Function):
    """The node."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        made = call.forward(tensors)
        apart = [t for t, learns in zip(made, call.differentiable, strict=True) if not learns]
        ctx.mark_non_differentiable(*apart)
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        by = ctx.call.backward_whole if torch.is_grad_enabled() else ctx.call.backward
        return (None, *by(ctx.saved_tensors, gradients, ctx.needs_input_grad[1:]))


@dataclass(frozen=True, slots=True)
class _Autocast:
    """Autocast on one kind of device, at a moment."""

    kind: str
    enabled: bool
    dtype: torch.dtype
    caches: bool

    @classmethod
    def of(cls, kind: str) -> _Autocast:
        return cls(
            kind,
            torch.is_autocast_enabled(kind),
            torch.get_autocast_dtype(kind),
            torch.is_autocast_cache_enabled(),
        )

    def entered(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(
            self.kind, dtype=self.dtype, enabled=self.enabled, cache_enabled=self.caches
        )


_TENSOR = object()
"""Stands for a tensor among what a call returned."""


@contextlib.contextmanager
def _decomposing(*, learns: bool) -> Iterator[None]:
    """With gradients or without, and not in inference mode: there, other ops are seen."""
    with torch.inference_mode(mode=False), torch.set_grad_enabled(learns):
        yield


def _apart(tensors: Sequence[Tensor], needed: Sequence[bool]) -> list[Tensor]:
    """The same tensors, with no graph behind them."""
    return [
        it.detach().requires_grad_(is_needed) for it, is_needed in zip(tensors, needed, strict=True)
    ]


def _saving_nothing() -> contextlib.AbstractContextManager[Any]:
    """Let autograd hold nothing: the graph of a piece's forward tells what learns, no more."""
    return torch.autograd.graph.saved_tensors_hooks(_nothing, _never)


def _nothing(_tensor: Tensor) -> None:
    return None


def _never(_saved: None) -> Tensor:
    message = "a graph of a piece's first forward is differentiated"
    raise RuntimeError(message)
