"""An autograd engine in Python, for fake tensors on a device this machine does not have.

Responsible for running the nodes of a graph in the order, and with the memory behaviour, of torch's
own engine: which runs first, when a gradient is added in place, when one is stolen and when copied,
when saved tensors are let go. Not responsible for recording. torch's own engine asks the device for
a stream and fails where there is none.

Not followed: hooks on tensors and nodes other than post-accumulate hooks, and double backward.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

_FIRST = 1 << 62
_NO_TASK = -1
_OWN_REFERENCES = 2
"""References to a tensor that one local variable and the asking itself make."""


class BackwardEngine:
    """Differentiates one scalar with respect to the leaves of its graph."""

    def __init__(
        self,
        started: Callable[[tuple[int, str] | None], None],
        finished: Callable[[int], None],
    ) -> None:
        """Create an engine.

        Args:
            started: Called with a node's sequence number and name before it runs, and with
                ``None`` once the graph is done. A function of the user's has no name.
            finished: Called with a node's sequence number after it ran, to let its saved tensors
                go.
        """
        self._started = started
        self._finished = finished
        self._pushed = 0
        self._sole_uses = 1

    def run(self, loss: Tensor) -> None:
        """Accumulate the gradient of ``loss`` into the leaves of its graph.

        Args:
            loss: A tensor with one element and a graph behind it.
        """
        root: Any = loss.grad_fn
        waiting = _edge_counts(root)
        with torch.no_grad(), _one_task():
            seed = torch.ones_like(loss, memory_format=torch.preserve_format)
            self._sole_uses = _storage_uses(seed)
            gradients: dict[Any, list[Tensor | None]] = {root: [seed]}
            ready = [(*self._priority(root), root)]
            while ready:
                node = heapq.heappop(ready)[-1]
                held = gradients.pop(node, [])
                if node.name().endswith("AccumulateGrad"):
                    if held and held[0] is not None:
                        self._accumulate(node, held)
                    continue
                self._run_node(node, held, gradients, waiting, ready)
        self._started(None)

    def _priority(self, node: Any) -> tuple[int, int]:
        """Smaller runs first: leaves, then the node made last; ties in order of arrival."""
        self._pushed += 1
        if node.name().endswith("AccumulateGrad"):
            return -_FIRST, self._pushed
        return -node._sequence_nr(), self._pushed

    def _run_node(
        self,
        node: Any,
        held: list[Tensor | None],
        gradients: dict[Any, list[Tensor | None]],
        waiting: dict[Any, int],
        ready: list[Any],
    ) -> None:
        sequence = node._sequence_nr()
        name = "" if isinstance(node, BackwardCFunction) else node.name()
        self._started((sequence, name))
        results = _call(node, held)
        self._finished(sequence)
        edges = node.next_functions
        for place, (target, slot) in enumerate(edges):
            if target is None or place >= len(results):
                continue
            gradient = results[place]
            if gradient is not None:
                results[place] = _as_expected(gradient, target._input_metadata[slot])
            del gradient
        held.clear()  # torch, too, lets go of them once results have their shapes
        results.reverse()
        for target, slot in edges:
            gradient = results.pop() if results else None
            if target is None:
                continue
            if gradient is not None:
                self._add(gradients, target, slot, gradient)
            del gradient
            waiting[target] -= 1
            if waiting[target] == 0:
                heapq.heappush(ready, (*self._priority(target), target))

    def _add(
        self,
        gradients: dict[Any, list[Tensor | None]],
        target: Any,
        slot: int,
        gradient: Tensor,
    ) -> None:
        """Add a gradient to what a node is given, in place where nobody else sees it."""
        slots = gradients.setdefault(target, [None] * len(target._input_metadata))
        present = slots[slot]
        if present is None:
            slots[slot] = gradient
            return
        slots[slot] = None
        if sys.getrefcount(present) == _OWN_REFERENCES and self._is_sole(present):
            slots[slot] = present.add_(gradient)
        else:
            slots[slot] = present + gradient

    def _accumulate(self, node: Any, held: list[Tensor | None]) -> None:
        """What the accumulation node of a leaf does with the leaf's whole gradient."""
        variable = node.variable
        gradient: Any = held.pop(0)
        self._started((_FIRST, ""))
        if variable.grad is not None:
            variable.grad.add_(gradient)
        elif sys.getrefcount(gradient) == _OWN_REFERENCES and _same_layout(gradient, variable):
            variable.grad = gradient.detach()
        else:
            copied = gradient.new_empty_strided(variable.shape, variable.stride())
            variable.grad = copied.copy_(gradient)
            del copied
        del gradient
        for hook in (variable._post_accumulate_grad_hooks or {}).values():
            hook(variable)

    def _is_sole(self, tensor: Tensor) -> bool:
        return _storage_uses(tensor) <= self._sole_uses


_tasks = itertools.count(1 << 40)


@contextlib.contextmanager
def _one_task() -> Iterator[None]:
    """A number for the backward that runs: a checkpoint computes again once for each.

    Torch's engine has one of its own, also where a node runs it inside.
    """
    original, own = torch._C._current_graph_task_id, next(_tasks)

    def current() -> int:
        task = original()
        return own if task == _NO_TASK else task

    torch._C._current_graph_task_id = current
    try:
        yield
    finally:
        torch._C._current_graph_task_id = original


def _storage_uses(tensor: Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def _same_layout(gradient: Tensor, variable: Tensor) -> bool:
    """Whether a gradient lies in memory as its leaf does; sizes of 1 do not matter."""
    return all(
        size == 1 or mine == theirs
        for size, mine, theirs in zip(
            gradient.shape, gradient.stride(), variable.stride(), strict=True
        )
    )


def _edge_counts(root: Any) -> dict[Any, int]:
    """How many edges of the graph lead to each node."""
    counts: dict[Any, int] = {}
    stack, seen = [root], {root}
    while stack:
        for target, _ in stack.pop().next_functions:
            if target is None:
                continue
            counts[target] = counts.get(target, 0) + 1
            if target not in seen:
                seen.add(target)
                stack.append(target)
    return counts


def _call(node: Any, held: list[Tensor | None]) -> list[Tensor | None]:
    """Run a node on its gradients, which nobody else holds afterwards; one result per edge."""
    metadata = node._input_metadata
    held.extend([None] * (len(metadata) - len(held)))
    if not isinstance(node, BackwardCFunction):
        return _as_list(_consume(node, held))
    if getattr(node, "materialize_grads", True):
        for slot, given in enumerate(held):
            if given is None:
                expected = metadata[slot]
                held[slot] = torch.zeros(
                    tuple(expected.shape), dtype=expected.dtype, device=expected.device
                )
    results = _as_list(_consume(node.apply, held))
    needed = node.needs_input_grad
    wanted = [r for r, need in zip(results, needed, strict=False) if need]
    wanted.reverse()
    return [
        wanted.pop() if target is not None and wanted else None for target, _ in node.next_functions
    ]


def _consume(function: Callable[..., Any], held: list[Tensor | None]) -> Any:
    """Call a function with what a list holds."""
    return function(*held)


def _as_list(result: Any) -> list[Tensor | None]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def _as_expected(gradient: Tensor, expected: Any) -> Tensor:
    """A gradient with the shape and element type of what it is the gradient of."""
    shape = tuple(expected.shape)
    if tuple(gradient.shape) != shape:
        gradient = gradient.sum_to_size(shape)
    if gradient.dtype != expected.dtype:
        gradient = gradient.to(expected.dtype)
    return gradient
