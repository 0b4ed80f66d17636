"""The joint graphs of a step, seen before any of them is compiled.

Responsible for running one forward through dynamo and AOTAutograd with the decompositions and graph
passes of Inductor and no compiler behind them, under partitions that keep as little as can be.
Backward is traced and never run; random state and module buffers are put back. Not responsible for
what becomes of the graphs (:mod:`memfit.run.compiled.budget_shares`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import detect_fake_mode
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.virtualized import V
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from memfit.run.compiled import log_calls
from memfit.run.compiled.joint import Joint, bytes_of, read
from memfit.run.compiled.partition import Modules, partition
from memfit.run.compiled.partitioner import signature
from memfit.run.compiled.schedule import Decision, schedule
from memfit.torch_versions import run_joint_passes


@dataclass(slots=True, frozen=True)
class Recorded:
    """One joint graph of the step, in the order in which forward reaches it.

    Attributes:
        signature: What it is known by.
        joint: The graph; ``None`` where memfit cannot partition it.
        reason: Why not; empty if it can.
        handed_bytes: What forward returns and hands to backward under torch's own partition, for
            graphs that memfit cannot partition.
        sources: Of each input of forward, the position of the graph that returned it; ``None`` for
            what no graph did.
    """

    signature: str
    joint: Joint | None
    reason: str
    handed_bytes: int
    sources: tuple[int | None, ...] = ()


@dataclass(slots=True)
class _Recorder:
    """Stands where Inductor would: keeps each joint graph and cuts it to keep little."""

    graphs: list[Recorded] = field(default_factory=list)
    calls: list[Recorded] = field(default_factory=list)
    returned: list[list[StorageWeakRef | None]] = field(default_factory=list)
    """What each call's forward returned, in the order of :attr:`Joint.forward_outputs`."""

    def run_forward(self, module: fx.GraphModule, _: Any) -> Any:
        """Run the forward graph that was cut last as it is, and note each call of it."""
        recorded = self.graphs[-1]
        count = len(recorded.joint.forward_outputs) if recorded.joint else 0

        def call(*arguments: Any) -> Any:
            self.calls.append(replace(recorded, sources=self._sources(arguments)))
            results = module.forward(*arguments)
            tensors = [r for r in results if isinstance(r, Tensor)]
            self.returned.append([_storage_of(t) for t in tensors[:count]])
            return results

        return make_boxed_func(call)

    def _sources(self, arguments: Sequence[Any]) -> tuple[int | None, ...]:
        made_by = {
            made.cdata: call
            for call, results in enumerate(self.returned)
            for made in results
            if made is not None
        }
        storages = [_storage_of(a) if isinstance(a, Tensor) else None for a in arguments]
        return tuple(None if s is None else made_by.get(s.cdata) for s in storages)

    def hands_on(self) -> bool:
        """Whether a graph returns more than scalars, as a loss is one."""
        joints = [call.joint for call in self.calls if call.joint is not None]
        outputs = [joint.tensors[t].node for joint in joints for t in joint.forward_outputs]
        return any(node.meta["val"].ndim > 0 for node in outputs)

    def forget_calls(self) -> None:
        """Begin to note calls anew."""
        self.calls.clear()
        self.returned.clear()

    def release(self) -> None:
        """Note of each graph what is gone of its results, now that nothing refers to the loss."""
        gone: dict[int, set[int]] = {}
        joints: dict[int, Joint] = {}
        for call, results in zip(self.calls, self.returned, strict=True):
            if call.joint is not None:
                expired = {i for i, s in enumerate(results) if s is not None and _is_gone(s)}
                joints[id(call.joint)] = call.joint
                gone[id(call.joint)] = expired & gone.get(id(call.joint), expired)
        for key, joint in joints.items():
            joint.release(gone[key])

    def __call__(
        self,
        gm: fx.GraphModule,
        joint_inputs: Sequence[object],
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: list[int] | None = None,
        **_: Any,
    ) -> Modules:
        tensors = (i for i in tree_leaves(joint_inputs) if isinstance(i, Tensor))
        with V.set_fake_mode(detect_fake_mode(joint_inputs)):
            gm = run_joint_passes(gm, next((t.device for t in tensors), None))
        name = signature(gm, num_fwd_outputs)
        gm.graph.eliminate_dead_code()
        joint = read(gm, num_fwd_outputs)
        static = static_lifetime_input_indices or []
        if isinstance(joint, Joint):
            self.graphs.append(Recorded(name, joint, "", 0))
            least = schedule(joint, Decision(frozenset(joint.droppable())))
            return partition(joint, least, num_fwd_outputs, static)
        modules: Modules = min_cut_rematerialization_partition(
            gm,
            joint_inputs,
            num_fwd_outputs=num_fwd_outputs,
            static_lifetime_input_indices=static,
        )
        self.graphs.append(Recorded(name, None, joint.reason, _handed_bytes(modules[0])))
        return modules


def record(
    model: nn.Module, loss: Callable[..., Tensor], batch: Any, context: Callable[[], Any]
) -> list[Recorded]:
    """See the joint graphs of a step.

    Args:
        model: The model; its buffers are as before afterwards.
        loss: Computes the loss from model and batch.
        batch: The batch.
        context: Makes the context that the loss runs in (autocast).

    Returns:
        The graphs in the order in which forward reaches them, once for each call: the blocks of a
        model whose own frame dynamo cannot trace share one graph.
    """
    recorder = _Recorder()

    def nop(module: fx.GraphModule, _: Any) -> Any:
        return make_boxed_func(module.forward)

    backend = aot_autograd(
        fw_compiler=recorder.run_forward,
        bw_compiler=nop,
        inference_compiler=nop,
        decompositions=select_decomp_table,
        partition_fn=recorder,
    )
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda})
    try:
        with torch.random.fork_rng(devices), log_calls.left_out(), context():
            compiled = torch.compile(own_code(loss), backend=backend)
            compiled(model, batch)
            if recorder.hands_on():
                # Compiling leaves cycles behind that hold what the first call made; so who holds
                # what is seen on a call that compiles nothing.
                recorder.forget_calls()
                compiled(model, batch)
                recorder.release()
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
    return recorder.calls


def own_code(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The loss behind a code object of its own.

    Dynamo keeps compiled code by code object and gives up after a few kinds of it; so two fitted
    workloads with one loss function do not count against each other.

    Args:
        loss: Computes the loss from model and batch.
    """

    def call(model: Any, batch: Any) -> Tensor:
        return loss(model, batch)

    return FunctionType(call.__code__.replace(), globals(), call.__name__, None, call.__closure__)


def _storage_of(tensor: Tensor) -> StorageWeakRef | None:
    if tensor.layout != torch.strided or is_traceable_wrapper_subclass(tensor):
        return None
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _is_gone(storage: StorageWeakRef) -> bool:
    return bool(storage.expired())  # type: ignore[no-untyped-call]


def _handed_bytes(forward: fx.GraphModule) -> int:
    """Bytes of what a forward graph returns, its inputs not among them."""
    output = next(iter(forward.graph.find_nodes(op="output")))
    values = [n.meta.get("val") for n in output.all_input_nodes if n.op != "placeholder"]
    return sum(bytes_of(v) for v in values if isinstance(v, Tensor))
