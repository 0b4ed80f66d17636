"""A decision as two fx graphs: forward, and the backward that computes again what it drops.

Responsible for cutting a joint graph in two by a :class:`~memfit.run.compiled.schedule.Schedule`,
with torch's own conventions for what crosses (tensors with version checks, tensors without,
symbolic sizes, tangents), and for writing backward in the schedule's order, ops that run several
times included. Not responsible for what is dropped.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._functorch.compile_utils import raise_getitems
from torch._functorch.partitioners import (
    _extract_fwd_bwd_modules,
    is_not_collective,
    thread_graphsafe_rng_from_hops,
)
from torch.utils._ordered_set import OrderedSet
from torch.utils._pytree import tree_leaves

from memfit.run.compiled import transfer_nodes
from memfit.run.compiled.joint import Joint, primals
from memfit.run.compiled.schedule import Schedule
from memfit.torch_versions import is_tangent

Modules = tuple[fx.GraphModule, fx.GraphModule]


def partition(
    joint: Joint, made: Schedule, num_forward_outputs: int, static_inputs: list[int]
) -> Modules:
    """Cut a joint graph by a schedule.

    Args:
        joint: The graph.
        made: What runs where and when.
        num_forward_outputs: How many of the graph's outputs belong to forward.
        static_inputs: Inputs whose addresses stay, by position.

    Returns:
        Forward and backward.
    """
    inputs = primals(joint.module)
    tensors = [joint.tensors[t].node for t in (*made.inputs, *made.saved)]
    saved = [n for n in tensors if not is_tangent(n)]
    symbols = list(dict.fromkeys(joint.symbols))
    forward, backward = _extract_fwd_bwd_modules(
        joint.module,
        saved,
        saved_sym_nodes=symbols,
        num_fwd_outputs=num_forward_outputs,
        static_lifetime_input_nodes=OrderedSet(
            node for index, node in enumerate(inputs) if index in static_inputs
        ),
    )
    forward.graph.eliminate_dead_code(is_impure_node=is_not_collective)
    transfer_nodes.write_forward(joint, made, forward)
    backward = fx.GraphModule(backward, _Rewrite(joint, made, backward.graph).graph())
    forward, backward = raise_getitems(forward), raise_getitems(backward)
    forward = thread_graphsafe_rng_from_hops(forward, is_backward=False)
    return forward, thread_graphsafe_rng_from_hops(backward, is_backward=True)


class _Rewrite:
    """Writes backward call by call, as the schedule has it."""

    def __init__(self, joint: Joint, made: Schedule, extracted: fx.Graph) -> None:
        self._joint = joint
        self._made = made
        self._extracted = extracted
        self._calls = {n.name: n for n in extracted.nodes if n.op == "call_function"}
        self._new = fx.Graph()
        self._shared: dict[str, fx.Node] = {}
        """Inputs, sizes and constants: what every call may read."""
        self._made_by: dict[tuple[int, str], fx.Node] = {}
        """What each call made, by call and name."""
        self._away = {joint.tensors[at.tensor].node.name for at in made.settled}

    def graph(self) -> fx.Graph:
        scalars = self._scalars_without_tensors()
        for node in self._extracted.nodes:
            if node.op in {"placeholder", "get_attr"} or node in scalars:
                self._shared[node.name] = self._copy(node, self._look_up_shared)
                if node.name in self._away:
                    transfer_nodes.make_ticket(self._shared[node.name])
        fetches = [call.fetched for call in self._made.calls if call.fetched is not None]
        after = dict(zip(fetches, [[t] for t in fetches[1:]], strict=False))
        for position, call in enumerate(self._made.calls):
            if call.fetched is None:
                self._write(position, call.op, call.reads)
            else:
                self._fetch(position, call.fetched, after.get(call.fetched, []))
        self._output()
        self._new.eliminate_dead_code(is_impure_node=is_not_collective)
        self._new.lint()
        return self._new

    def _scalars_without_tensors(self) -> set[fx.Node]:
        """Arithmetic on sizes that backward does itself, from inputs alone."""
        found: set[fx.Node] = set()
        made = [c.op for c in self._made.calls if c.fetched is None]
        calls = {self._joint.ops[index].node.name for index in made}
        pickers = {n.name for n in self._joint.op_of}
        for node in self._extracted.nodes:
            if node.op == "call_function" and node.name not in calls | pickers:
                found.add(node)
        return found

    def _fetch(self, position: int, tensor: int, following: list[int]) -> None:
        nodes = [self._joint.tensors[t].node for t in (tensor, *following)]
        ticket, *later = [self._shared[node.name] for node in nodes]
        fetched = transfer_nodes.fetch(self._new, nodes[0], ticket, later)
        self._made_by[position, nodes[0].name] = fetched

    def _write(self, position: int, index: int, sources: list[int | None]) -> None:
        op = self._joint.ops[index]
        reads = {
            self._joint.tensors[tensor].node.name: source
            for tensor, source in zip(op.reads, sources, strict=True)
        }

        def look_up(node: fx.Node) -> fx.Node:
            if node.name not in reads:
                return self._look_up_shared(node)
            source = reads[node.name]
            return self._shared[node.name] if source is None else self._made_by[source, node.name]

        original = self._calls.get(op.node.name, op.node)
        new = self._copy(original, look_up)
        new.meta["autograd_backward"] = True
        if self._waits_for_a_product(position, sources):
            self._add_otherwise(new)
        self._made_by[position, op.node.name] = new
        for tensor in op.returns:
            picker = self._joint.tensors[tensor].node
            if picker is not op.node:
                self._made_by[position, picker.name] = self._copy(
                    self._calls.get(picker.name, picker), lambda _: new
                )

    def _waits_for_a_product(self, position: int, sources: list[int | None]) -> bool:
        """Whether a call adds a matrix product that ran long before to a tensor of its type."""
        calls, ops = self._made.calls, self._joint.ops
        node = ops[calls[position].op].node
        if node.target is not torch.ops.aten.add.Tensor or node.kwargs:
            return False
        # What is added may be a number or a size.
        values = [n.meta.get("val") if isinstance(n, fx.Node) else None for n in node.args]
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        if len(tensors) != len(values) or len({tensor.dtype for tensor in tensors}) != 1:
            return False
        for source in sources:
            if source is None or calls[source].fetched is not None:
                continue
            between = calls[source + 1 : position]
            if ops[calls[source].op].node.target is torch.ops.aten.mm.default and any(
                call.fetched is not None or not ops[call.op].view for call in between
            ):
                return True
        return False

    def _add_otherwise(self, node: fx.Node) -> None:
        """Write a sum of two tensors as a difference, the same bit for bit.

        Inductor makes a product and its sum one op, which runs where the sum is: what the product
        reads would stay until then, as the gradient of the logits does with tied embeddings.
        """
        first, second = node.args
        assert isinstance(second, fx.Node), "it adds two tensors"
        with self._new.inserting_before(node):
            negative = self._new.call_function(torch.ops.aten.neg.default, (second,))
        negative.meta = {**second.meta, "autograd_backward": True}
        node.target = torch.ops.aten.sub.Tensor
        node.args = (first, negative)

    def _copy(self, node: fx.Node, look_up: Any) -> fx.Node:
        return self._new.node_copy(node, look_up)

    def _look_up_shared(self, node: fx.Node) -> fx.Node:
        return self._shared[node.name]

    def _output(self) -> None:
        old = next(iter(self._extracted.find_nodes(op="output")))
        joint = self._joint
        sources = {
            joint.tensors[tensor].node.name: source
            for tensor, source in zip(joint.backward_outputs, self._made.outputs, strict=True)
        }

        def look_up(node: fx.Node) -> fx.Node:
            source = sources.get(node.name)
            return self._shared[node.name] if source is None else self._made_by[source, node.name]

        values = fx.node.map_arg(tuple(tree_leaves(old.args)), look_up)
        new = self._new.output(values)
        new.meta.update(old.meta)
