"""A joint graph of forward and backward, read for its memory.

Responsible for what the planner needs to know of an fx joint graph: its ops in order, the storages
they make and read, what depends on the tangents, what can be run again, and sizes (of symbolic
shapes, their hints). Not responsible for choosing (:mod:`memfit.run.compiled.search`), for order
(:mod:`memfit.run.compiled.schedule`) or for rewriting (:mod:`memfit.run.compiled.partition`).

Storages are followed through the schemas of ops: what an op returns shares a storage with what it
reads where its schema says so, and is fresh otherwise. Fake tensors are no witness here: passes of
Inductor replace nodes and leave stale ones behind.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.utils import is_with_effects
from torch._functorch.partitioners import (
    _has_tag_is_backward,
    _is_backward_state,
    _must_be_in_backward,
    _must_be_in_forward,
)
from torch.utils._pytree import tree_leaves

from memfit.run.compiled.inductor.fusion import Loop, loop_of
from memfit.torch_versions import (
    flop_formulas,
    is_forward_seed_offset,
    is_primal,
    is_tangent,
    size_hint,
)

_FLOPS = flop_formulas()

_UNKNOWN_SIZE = 4096
"""Stands for a size that has no hint, as in torch's own partitioner."""

_SHARES_WITHOUT_SAYING = frozenset({"aten::_unsafe_view", "aten::lift_fresh"})
"""Ops that return their input's storage and do not declare it."""

_COLLECTIVES = frozenset({"_c10d_functional", "c10d_functional", "c10d"})


@dataclass(slots=True, frozen=True)
class Unsupported:
    """Why a joint graph is not for this planner.

    Attributes:
        reason: A sentence without its full stop.
    """

    reason: str


@dataclass(slots=True)
class Storage:
    """One allocation of the graph.

    Attributes:
        bytes: Its size.
        op: The op that makes it; -1 for an input of the graph.
        output: Position among the tensors which that op returns.
        last_forward: Last op of forward that reads it; its own op if none does.
        leaves: Whether the graph returns it, or a view of it, from forward.
    """

    bytes: int
    op: int
    output: int
    last_forward: int
    leaves: bool = False


@dataclass(slots=True)
class Tensor:
    """A tensor as an op sees it.

    Attributes:
        storage: Index of its storage.
        op: The op that returns it; -1 for an input.
        fresh: Whether that op made the storage, rather than looked at one.
        node: The fx node that stands for it.
    """

    storage: int
    op: int
    fresh: bool
    node: fx.Node


@dataclass(slots=True)
class Op:
    """One call of the graph; picking an element of a tuple is none.

    Attributes:
        node: Its fx node.
        backward: Whether it belongs to backward: it depends on a tangent or is traced there.
        reads: Tensors it reads, in order.
        returns: Tensors it returns, in order.
        view: Whether all it returns are views.
        replayable: Whether running it again gives the same bits and does nothing else.
        flops: Floating-point operations.
        moved_bytes: Bytes read and written where it runs alone.
        loop: How Inductor runs it.
        root: Whether forward must run it for what it does (a write to an input).
    """

    node: fx.Node
    backward: bool
    reads: tuple[int, ...]
    returns: tuple[int, ...]
    view: bool
    replayable: bool
    flops: int
    moved_bytes: int
    loop: Loop
    root: bool = False


@dataclass(slots=True)
class Joint:
    """A joint graph as lists; indices into them are what the rest of the package speaks.

    Attributes:
        module: The graph.
        ops: Calls in order, those of forward first.
        tensors: Tensors that ops read and return.
        storages: Allocations.
        tensor_of: The tensor of an fx node that stands for one.
        input_bytes: Bytes of the inputs of forward.
        tangent_bytes: Bytes of the tangents.
        forward_outputs: Tensors returned from forward.
        released: Storages of theirs that nobody holds by the time backward runs, unless it reads
            them: only graphs that ran after this one had use of them.
        backward_outputs: Tensors returned from backward.
        gradient_of: Of each of those, the position of the input of forward it is the gradient of.
        symbols: Sizes and other scalars of forward, as fx nodes.
        op_of: The op that an fx node is, or picks from.
    """

    module: fx.GraphModule
    ops: list[Op] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    tensor_of: dict[fx.Node, int] = field(default_factory=dict)
    input_bytes: int = 0
    tangent_bytes: int = 0
    forward_outputs: list[int] = field(default_factory=list)
    released: frozenset[int] = frozenset()
    backward_outputs: list[int] = field(default_factory=list)
    gradient_of: list[int] = field(default_factory=list)
    symbols: list[fx.Node] = field(default_factory=list)
    op_of: dict[fx.Node, int] = field(default_factory=dict)

    @property
    def forward_end(self) -> int:
        """Number of forward ops; the index of the first of backward."""
        return next((i for i, op in enumerate(self.ops) if op.backward), len(self.ops))

    @property
    def device_kind(self) -> str:
        """``cuda`` if any tensor is on such a device, else ``cpu``."""
        values = (tensor.node.meta.get("val") for tensor in self.tensors)
        on_gpu = any(isinstance(v, torch.Tensor) and v.device.type == "cuda" for v in values)
        return "cuda" if on_gpu else "cpu"

    def droppable(self) -> list[int]:
        """Storages of forward that may be computed again: every writer of theirs is replayable."""
        return [
            index
            for index, storage in enumerate(self.storages)
            if storage.op >= 0
            and not self.ops[storage.op].backward
            and self.ops[storage.op].replayable
            and (not storage.leaves or index in self.released)
        ]

    def released_outputs(self) -> list[int]:
        """What :meth:`release` was told, as far as it holds for whole storages."""
        storages = [self.tensors[t].storage for t in self.forward_outputs]
        return [i for i, storage in enumerate(storages) if storage in self.released]

    def release(self, outputs: Collection[int]) -> None:
        """Note what of forward's results nobody holds when backward runs.

        Args:
            outputs: Positions among :attr:`forward_outputs`.
        """
        tensors = [(i, self.tensors[t].storage) for i, t in enumerate(self.forward_outputs)]
        held = {storage for position, storage in tensors if position not in outputs}
        self.released = frozenset(storage for _, storage in tensors) - held


def read(module: fx.GraphModule, num_forward_outputs: int) -> Joint | Unsupported:
    """Read a joint graph.

    Args:
        module: The joint graph, as a partitioner gets it.
        num_forward_outputs: How many of its outputs belong to forward.

    Returns:
        The graph as lists, or why it cannot be planned.
    """
    for node in module.graph.nodes:
        reason = _unsupported(node)
        if reason is not None:
            return Unsupported(reason)
    return _Reader(module, num_forward_outputs).read()


def _unsupported(node: fx.Node) -> str | None:
    if is_with_effects(node):
        return f"`{node.name}` is ordered by an effect token"
    if _is_backward_state(node) or is_forward_seed_offset(node):
        return f"the graph takes `{node.name}`, which ties backward to forward"
    if node.op in {"call_module", "call_method"}:
        return f"`{node.name}` is a `{node.op}`"
    if "control_deps" in str(node.target):
        return f"`{node.name}` orders ops by a control dependency"
    return None


def bytes_of(value: Any) -> int:
    """Bytes of a tensor's own storage, of symbolic sizes by their hints.

    Args:
        value: A fake tensor.
    """
    return _numel_of(value) * int(value.dtype.itemsize)


def _numel_of(value: Any) -> int:
    return size_hint(value.numel(), _UNKNOWN_SIZE)


class _Reader:
    """Builds a :class:`Joint`."""

    def __init__(self, module: fx.GraphModule, num_forward_outputs: int) -> None:
        self._joint = Joint(module)
        output = next(iter(module.graph.find_nodes(op="output")))
        outputs = tree_leaves(output.args)
        self._forward_outputs = [n for n in outputs[:num_forward_outputs] if _is_node(n)]
        gradients = enumerate(outputs[num_forward_outputs:])
        self._backward_outputs = [(at, n) for at, n in gradients if _is_node(n)]
        self._of_backward = _after_tangents(module)

    def read(self) -> Joint | Unsupported:
        joint = self._joint
        if not self._of_backward:
            return Unsupported("nothing in the graph depends on its tangents")
        written = _written_inputs(joint.module)
        calls: list[fx.Node] = []
        for node in joint.module.graph.nodes:
            if node.op == "placeholder":
                self._input(node)
            elif node.op == "call_function":
                calls.append(node)
        ordered = [n for n in calls if n not in self._of_backward]
        ordered += [n for n in calls if n in self._of_backward]
        for node in ordered:
            picked = node.args[0] if node.target is operator.getitem else None
            if isinstance(picked, fx.Node) and picked in joint.op_of:
                joint.op_of[node] = joint.op_of[picked]
            elif not self._is_symbol(node):
                self._call(node, written)
        self._outputs()
        return joint

    def _is_symbol(self, node: fx.Node) -> bool:
        value = node.meta.get("val")
        if not isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool | int | float):
            return False
        if node not in self._of_backward:
            self._joint.symbols.append(node)
        return True

    def _input(self, node: fx.Node) -> None:
        joint, value = self._joint, node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
                joint.symbols.append(node)
            return
        size = bytes_of(value)
        if is_tangent(node):
            joint.tangent_bytes += size
        else:
            joint.input_bytes += size
        joint.storages.append(Storage(size, -1, 0, -1))
        joint.tensor_of[node] = len(joint.tensors)
        joint.tensors.append(Tensor(len(joint.storages) - 1, -1, fresh=True, node=node))

    def _call(self, node: fx.Node, written: set[fx.Node]) -> None:
        joint, index = self._joint, len(self._joint.ops)
        backward = node in self._of_backward
        reads = [joint.tensor_of[n] for n in node.all_input_nodes if n in joint.tensor_of]
        for tensor in reads:
            storage = joint.storages[joint.tensors[tensor].storage]
            if not backward:
                storage.last_forward = max(storage.last_forward, index)
        sources = _shared_sources(node)
        returns: list[int] = []
        moved = sum(self._moved(tensor) for tensor in dict.fromkeys(reads))
        fresh_bytes = 0
        for position, (holder, value) in enumerate(_returned(node)):
            source = sources(position)
            shared = source is not None and source in joint.tensor_of
            if source is not None and shared:
                made = joint.tensors[joint.tensor_of[source]].storage
            else:
                made = len(joint.storages)
                joint.storages.append(Storage(bytes_of(value), index, position, index))
                fresh_bytes += joint.storages[-1].bytes
            returns.append(len(joint.tensors))
            if holder is not None:
                joint.tensor_of[holder] = len(joint.tensors)
            joint.tensors.append(Tensor(made, index, not shared, holder or node))
        view = bool(returns) and all(not joint.tensors[t].fresh for t in returns)
        joint.op_of[node] = index
        joint.ops.append(
            Op(
                node,
                backward,
                tuple(reads),
                tuple(returns),
                view,
                replayable=_replayable(node) and not written.intersection(node.all_input_nodes),
                flops=_flops(node),
                moved_bytes=0 if view else moved + fresh_bytes,
                loop=loop_of(node, view=view, numel=_numel_of),
                root=_must_be_in_forward(node),
            )
        )

    def _moved(self, tensor: int) -> int:
        value = self._joint.tensors[tensor].node.meta.get("val")
        return bytes_of(value) if isinstance(value, torch.Tensor) else 0

    def _outputs(self) -> None:
        joint = self._joint
        for node in self._forward_outputs:
            if node in joint.tensor_of:
                tensor = joint.tensor_of[node]
                joint.forward_outputs.append(tensor)
                joint.storages[joint.tensors[tensor].storage].leaves = True
        for position, node in self._backward_outputs:
            if node in joint.tensor_of:
                joint.backward_outputs.append(joint.tensor_of[node])
                joint.gradient_of.append(position)


def _is_node(value: Any) -> bool:
    return isinstance(value, fx.Node)


def _after_tangents(module: fx.GraphModule) -> set[fx.Node]:
    """Nodes of backward: they depend on a tangent, or were traced there."""
    found: set[fx.Node] = set()
    for node in module.graph.nodes:
        if node.op == "placeholder":
            if is_tangent(node):
                found.add(node)
        elif node.op == "call_function" and (
            _has_tag_is_backward(node)
            or _must_be_in_backward(node)
            or any(n in found for n in node.all_input_nodes)
        ):
            found.add(node)
    return found


def _written_inputs(module: fx.GraphModule) -> set[fx.Node]:
    """Inputs that the graph writes to, and views of them: reading them later gives other bits."""
    written: set[fx.Node] = set()
    for node in module.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op == "call_function" and schema is not None and schema.is_mutable:
            written.update(n for n in node.args[:1] if isinstance(n, fx.Node))
    for node in module.graph.nodes:
        source = _shared_sources(node)(0) if node.op == "call_function" else None
        if source in written:
            written.add(node)
    return {n for n in written if n.op == "placeholder" or _shared_sources(n)(0) is not None}


def _returned(node: fx.Node) -> Iterator[tuple[fx.Node | None, Any]]:
    """The tensors a call returns, each with the fx node that stands for it."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        yield node, value
        return
    if not isinstance(value, tuple | list):
        return
    pickers = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    for index, element in enumerate(value):
        if isinstance(element, torch.Tensor):
            yield pickers.get(index), element


def _shared_sources(node: fx.Node) -> Callable[[int], fx.Node | None]:
    """Whose storage each result of a call shares, by its position; ``None`` for a fresh one."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return lambda _: None
    schema = target._schema
    if schema.name in _SHARES_WITHOUT_SAYING:
        return lambda _: node.args[0] if isinstance(node.args[0], fx.Node) else None
    marks = [r.alias_info for r in schema.returns]
    if not any(mark is not None and mark.before_set for mark in marks):
        return lambda _: _source_of_list(node, schema)

    def source(position: int) -> fx.Node | None:
        mark = marks[position] if len(marks) > 1 and position < len(marks) else marks[0]
        if mark is None:
            return None
        for index, argument in enumerate(schema.arguments):
            info = argument.alias_info
            if info is None or not (info.before_set & (mark.before_set | mark.after_set)):
                continue
            given = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
            if isinstance(given, fx.Node):
                return given
        return None

    return source


def _source_of_list(node: fx.Node, schema: Any) -> fx.Node | None:
    """Whose views a call returns as a list (`aten.split`): ``Tensor(a -> *) -> Tensor(a)[]``."""
    for argument, given in zip(schema.arguments, node.args, strict=False):
        info = argument.alias_info
        if info is not None and "*" in info.after_set and isinstance(given, fx.Node):
            return given
    return None


def _replayable(node: fx.Node) -> bool:
    """Whether running a call again gives the same bits and touches nothing."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if target._schema.is_mutable or _is_random(node) or target.namespace in _COLLECTIVES:
        return False
    return not node.is_impure(impure_random=False)


def _is_random(node: fx.Node) -> bool:
    """Whether a call draws random numbers; attention does only where its dropout is not 0."""
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    for position, argument in enumerate(target._schema.arguments):
        if argument.name == "dropout_p":
            given = node.args[position] if position < len(node.args) else argument.default_value
            return bool(node.kwargs.get("dropout_p", given) != 0.0)
    return True


def _flops(node: fx.Node) -> int:
    """Floating-point operations of a call, as torch's counter has them."""
    packet = getattr(node.target, "_overloadpacket", None)
    formula = _FLOPS.get(packet)
    if formula is None:
        return 0

    def value(argument: Any) -> Any:
        found = argument.meta.get("val") if isinstance(argument, fx.Node) else argument
        return _with_hints(found) if isinstance(found, torch.Tensor) else found

    args = fx.node.map_aggregate(node.args, value)
    kwargs = fx.node.map_aggregate(node.kwargs, value)
    try:
        return int(formula(*args, **kwargs, out_val=value(node)))
    except Exception:  # noqa: BLE001 - a cost nobody can count is no reason not to plan
        return 0


def _with_hints(value: torch.Tensor) -> torch.Tensor:
    """A meta tensor of the sizes that a symbolic one most likely has."""
    sizes = [size_hint(s, _UNKNOWN_SIZE) for s in value.shape]
    return torch.empty(sizes, dtype=value.dtype, device="meta")


def primals(module: fx.GraphModule) -> list[fx.Node]:
    """Inputs of forward, in order.

    Args:
        module: A joint graph.
    """
    return [n for n in module.graph.find_nodes(op="placeholder") if is_primal(n)]
