"""Memory that no variable leads to: cycles through autograd that nothing frees.

Responsible for three that people make without knowing, each shown by following it round: a function
that keeps its own output on ``ctx``, gradients that hold the graph that holds their parameters, and
a tensor's hook that holds the tensor.
Not responsible for what variables hold (:mod:`memfit.track.reach`).
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Collection, Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from memfit.tensors.storage import gradient_of, is_leaf
from memfit.track.cause import Cause
from memfit.track.graphs import Graphs
from memfit.track.live_objects import instances
from memfit.track.owners import storage_of
from memfit.track.reach import closed_over, slots_of

_DEPTH = 2
"""Containers and objects between a ``ctx`` and what it keeps."""

_APART = (ModuleType, FunctionType, type, torch.nn.Module, torch.optim.Optimizer)
"""What leads to much that no ``ctx`` keeps."""


def cycle_of(addresses: Collection[int]) -> Cause | None:
    """What keeps blocks alive that no variable leads to; ``None`` where no cycle was found.

    Args:
        addresses: The blocks.
    """
    objects = gc.get_objects()
    kinds = set(map(type, objects))
    nodes = {kind for kind in kinds if issubclass(kind, torch._C._FunctionBase)}
    tensors = {kind for kind in kinds if issubclass(kind, Tensor)}
    held_by_ctx: dict[tuple[str, str], int] = {}
    held_by_gradients = 0
    held_by_hooks: dict[str, int] = {}
    for thing in objects:
        if type(thing) in nodes:
            name = _own_output(thing)
            if name is not None and _touches(on_ctx(thing), addresses):
                key = (type(thing).__name__.removesuffix("Backward"), name)
                held_by_ctx[key] = held_by_ctx.get(key, 0) + 1
        elif type(thing) in tensors and _has_graph_in_gradient(thing):
            held_by_gradients += _touches(_of_gradient(thing), addresses)
        elif type(thing) in tensors and (hook := own_hook(thing)) is not None:
            held_by_hooks[hook] = held_by_hooks.get(hook, 0) + _touches([thing], addresses)
    if held_by_ctx:
        function, name = max(held_by_ctx, key=lambda key: held_by_ctx[key])
        return Cause(
            "ctx_cycle",
            f"`{function}` keeps its own output as `{name}`: its graph and the output hold "
            "each other, and nothing frees them",
            "keep inputs and outputs with `ctx.save_for_backward(...)`, which makes no such cycle",
        )
    if held_by_gradients:
        return Cause(
            "gradient_cycle",
            "gradients made with `create_graph=True` hold the graph that holds their parameters, "
            "and nothing frees either",
            "set the gradients to `None` when they were used (`zero_grad()`), or take them with "
            "`torch.autograd.grad`, which keeps none",
        )
    hook = max(held_by_hooks, key=lambda hook: held_by_hooks[hook], default="")
    if held_by_hooks.get(hook):
        return Cause(
            "hook_cycle",
            f"the hook {hook} holds the tensor that it is registered on, which holds the hook, and "
            "nothing frees them",
            "let the hook use `tensor.detach()`, made outside it, or remove it with the handle "
            "that `register_hook` returns",
        )
    return None


def keeping_own_output() -> Iterator[tuple[Any, str]]:
    """Nodes of functions that keep their own output on ``ctx``, and how that is read."""
    for node in _nodes():
        if (name := _own_output(node)) is not None:
            yield node, name


_REFERENCES: list[tuple[int, int]] = []
"""References to each class of nodes, by ``id``, when no node was alive: each that is, is one."""


def kept_on_ctx(known: Collection[int]) -> Iterator[tuple[str, Tensor]]:
    """What functions keep on a ``ctx`` that no variable leads to: their names, and the tensors.

    Args:
        known: Nodes of graphs that a variable leads to, by ``id``.
    """
    for node in _nodes():
        if id(node) not in known:
            name = type(node).__name__.removesuffix("Backward")
            yield from ((name, tensor) for tensor in on_ctx(node))


def _nodes() -> list[Any]:
    """The nodes of functions written in Python; most programs have none, and need no search."""
    references = [(id(kind), sys.getrefcount(kind)) for kind in _kinds_of_nodes()]
    if references == _REFERENCES:
        return []
    nodes = instances(torch._C._FunctionBase)
    if not nodes:
        _REFERENCES[:] = references
    return nodes


def _kinds_of_nodes() -> Iterator[type]:
    level: list[type] = [torch._C._FunctionBase]
    while level:
        yield from level
        level = [kind for one in level for kind in list[type](type.__subclasses__(one))]


def on_ctx(node: Any) -> list[Tensor]:
    """The tensors that a function has kept as attributes of its ``ctx``."""
    return [tensor for _, tensor in _kept_on("ctx", node, _DEPTH)]


def _kept_on(text: str, thing: Any, depth: int) -> Iterator[tuple[str, Tensor]]:
    """Tensors kept as attributes of an object, or in what are attributes, and how each is read."""
    kind = type(thing)
    found: list[tuple[str, Any]] = []
    if kind is dict:
        found = [(f"{text}[{_key(key)}]", value) for key, value in list(thing.items())]
    elif kind in (list, tuple):
        found = [(f"{text}[{place}]", value) for place, value in enumerate(thing)]
    elif kind is FunctionType:
        found = [(f"{text}.{name}", value) for name, value in closed_over(thing)]
    else:
        found = [(f"{text}.{name}", value) for name, value in _attributes(thing).items()]
    for name, value in found:
        if issubclass(type(value), Tensor):
            yield name, value
        elif depth:
            yield from _kept_on(name, value, depth - 1)


def _key(key: object) -> str:
    return repr(key) if type(key) in (str, int) else "..."  # others' code does not run


def _attributes(thing: Any) -> dict[str, Any]:
    if isinstance(thing, _APART):
        return {}
    found = dict(slots_of(thing))
    try:
        space = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return found
    return found | space if type(space) is dict else found


def _own_output(node: Any) -> str | None:
    """How the function's own output is read that its ``ctx`` keeps."""
    for name, value in _kept_on("ctx", node, _DEPTH):
        with torch._C.DisableTorchFunction():
            if value.grad_fn is node:
                return name
    return None


def held_by_hooks() -> Iterator[tuple[str, Tensor]]:
    """Tensors that hooks of their own hold: the hooks' names, and the tensors."""
    for tensor in instances(Tensor):
        hook = own_hook(tensor)
        if hook is not None:
            yield hook, tensor


def own_hook(tensor: Tensor) -> str | None:
    """The function of a hook on a tensor that holds the tensor."""
    with torch._C.DisableTorchFunction():
        hooks = None if is_leaf(tensor) else tensor._backward_hooks
    for hook in list((hooks or {}).values()):
        if any(value is tensor for _, value in _kept_on("hook", hook, _DEPTH)):
            code = getattr(hook, "__code__", None)
            return f"`{hook.__qualname__}`" if type(code) is CodeType else "that is an object"
    return None


def _has_graph_in_gradient(tensor: Tensor) -> bool:
    with torch._C.DisableTorchFunction():
        if not is_leaf(tensor) or not tensor.requires_grad:
            return False
        gradient = gradient_of(tensor)
        return gradient is not None and gradient.grad_fn is not None


def _of_gradient(tensor: Tensor) -> Iterable[Tensor]:
    """The gradient and what its graph holds, if the graph leads back to the tensor."""
    gradient = gradient_of(tensor)
    if gradient is None:
        return []
    graphs = Graphs()
    saved = [value for value, _ in graphs.of(gradient.grad_fn) if isinstance(value, Tensor)]
    leaves = [getattr(node, "variable", None) for node in graphs.nodes.values()]
    return [gradient, *saved] if any(leaf is tensor for leaf in leaves) else []


def _touches(tensors: Iterable[Tensor], addresses: Collection[int]) -> bool:
    storages = [storage_of(tensor) for tensor in tensors]
    return any(storage is not None and storage.data_ptr() in addresses for storage in storages)
