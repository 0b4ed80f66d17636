"""Saved tensors elsewhere between forward and backward, as nodes of both graphs.

Responsible for which saved tensors can leave, and for writing into forward where they go and where
it waits for them, into backward where they come back. Not responsible for which of them do
(:mod:`memfit.run.compiled.search`), for when (:mod:`memfit.run.compiled.schedule`) or for moving
them (:mod:`memfit.run.compiled.transfer_ops`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch._library.custom_ops import CustomOpDef
from torch._subclasses import FakeTensor

from memfit.run.compiled import transfer_ops
from memfit.run.compiled.joint import Joint
from memfit.run.compiled.schedule import Schedule
from memfit.torch_versions import is_dense

LEAST_BYTES = 1 << 20
"""Smaller tensors stay: a transfer takes some tens of microseconds whatever its size."""


def candidates(joint: Joint, made: Schedule) -> list[int]:
    """Storages that a schedule saves and that could leave, those that have the longest first.

    Args:
        joint: The graph.
        made: The schedule.
    """
    found = []
    for tensor in made.saved:
        it = joint.tensors[tensor]
        storage = joint.storages[it.storage]
        whole = _is_whole(it.node.meta.get("val"), storage.bytes)
        if storage.bytes >= LEAST_BYTES and not storage.leaves and whole:
            found.append(it.storage)
    return sorted(found, key=lambda index: joint.storages[index].op)


def _is_whole(value: object, storage_bytes: int) -> bool:
    """Whether a tensor has a size known now, and its storage for itself."""
    if not isinstance(value, Tensor):
        return False
    extents = (*value.size(), *value.stride())
    if not all(isinstance(extent, int) for extent in extents):
        return False
    return is_dense(value) and value.numel() * value.element_size() == storage_bytes


def write_forward(joint: Joint, made: Schedule, forward: fx.GraphModule) -> None:
    """Let forward send what leaves, and return tickets in its stead.

    Args:
        joint: The graph.
        made: The schedule.
        forward: Forward as it was cut, with all that is saved among its results.
    """
    graph = forward.graph
    by_name = {node.name: node for node in graph.nodes}
    output = next(iter(graph.find_nodes(op="output")))
    sent: dict[int, fx.Node] = {}
    sources = {at.tensor: by_name[joint.tensors[at.tensor].node.name] for at in made.settled}
    tickets: dict[fx.Node, fx.Node] = {}
    for tensor, source in sources.items():
        with graph.inserting_after(source):
            call = graph.call_function(_operator(transfer_ops.send_away), (source,))
        call.meta["val"] = _ticket(source)
        sent[tensor] = call
    for at in made.settled:
        source, call = sources[at.tensor], sent[at.tensor]
        with graph.inserting_before(_next_sent(made, at.position, joint, sent) or output):
            settled = graph.call_function(_operator(transfer_ops.settle), (call, source))
        settled.meta["val"] = _ticket(source)
        tickets[source] = settled
    output.args = fx.node.map_arg(output.args, lambda node: tickets.get(node, node))
    graph.lint()


def _next_sent(
    made: Schedule, position: int, joint: Joint, sent: dict[int, fx.Node]
) -> fx.Node | None:
    """The node that sends what the op at a position of forward made; ``None`` for its end."""
    if position >= len(made.forward):
        return None
    index = made.forward[position]
    return next(node for tensor, node in sent.items() if joint.tensors[tensor].op == index)


def make_ticket(placeholder: fx.Node) -> None:
    """Make an input of backward the ticket of what it stood for.

    Args:
        placeholder: The input, in a graph of its own.
    """
    placeholder.meta["val"] = _ticket(placeholder)
    # What else torch keeps of a value would still describe the tensor.
    placeholder.meta.pop("tensor_meta", None)


def fetch(graph: fx.Graph, tensor: fx.Node, ticket: fx.Node, following: list[fx.Node]) -> fx.Node:
    """Write where a tensor comes back.

    Args:
        graph: Backward.
        tensor: The node that stands for the tensor in the joint graph.
        ticket: The input that is its ticket.
        following: Those of what comes back next.
    """
    value = tensor.meta["val"]
    what = (list(value.size()), list(value.stride()), value.dtype, value.device)
    node = graph.call_function(_operator(transfer_ops.fetch), (ticket, following, *what))
    node.meta["val"] = value
    node.meta["autograd_backward"] = True
    return node


def _operator(of: CustomOpDef) -> Any:
    """What a graph calls: the overload."""
    return of._opoverload


def _ticket(node: fx.Node) -> Tensor:
    """A fake ticket, of the mode that a node's value is of."""
    value = node.meta["val"]
    assert isinstance(value, FakeTensor), "graphs are traced with fakes"
    with value.fake_mode:
        return torch.empty(1, dtype=torch.int64, device="cpu")
