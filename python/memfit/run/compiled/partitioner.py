"""What Inductor calls to cut a joint graph: memfit's decision under that graph's share.

Responsible for the hook's contract: a partitioner that can be pickled and has an identity, so that
compiled graphs are cached across processes and budgets never mix. Not responsible for shares
(:mod:`memfit.run.compiled.budget_shares`) or for the decision (:mod:`memfit.run.compiled.search`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from memfit.run.compiled.inductor.rates import Place
from memfit.run.compiled.joint import Joint, read
from memfit.run.compiled.partition import Modules, partition
from memfit.run.compiled.search import choose


class Partitioner(CustomPartitionerFn):
    """Cuts joint graphs, each by its share of one budget.

    Attributes:
        shares: Most bytes of a graph's forward and backward, by the graph's signature.
        otherwise: Most bytes of a graph that is not among them: another shape, recompiled.
        released: Positions among what a graph's forward returns that nobody holds when its backward
            runs, by the graph's signature.
        fused: How peaks of the graphs among them are told; see
            :func:`memfit.run.compiled.search.choose`. Of others, no step is measured.
        place: Where saved tensors of the graphs among them may go.
    """

    def __init__(
        self,
        shares: Mapping[str, int],
        otherwise: int,
        *,
        released: Mapping[str, Collection[int]] | None = None,
        fused: bool = False,
        place: Place | None = None,
    ) -> None:
        """Take the shares.

        Args:
            shares: As the attribute.
            otherwise: As the attribute.
            released: As the attribute.
            fused: As the attribute.
            place: As the attribute.
        """
        self.shares = dict(shares)
        self.otherwise = otherwise
        self.released = {name: tuple(sorted(of)) for name, of in (released or {}).items() if of}
        self.fused = fused
        self.place = place

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> Modules:
        """Cut a joint graph in forward and backward; torch's own way where memfit cannot.

        Args:
            gm: The joint graph.
            joint_inputs: Its inputs.
            **kwargs: ``num_fwd_outputs``, how many of its outputs belong to forward;
                ``static_lifetime_input_indices``, inputs whose addresses stay; ``compiler``.

        Returns:
            Forward and backward.
        """
        num_fwd_outputs: int = kwargs["num_fwd_outputs"]
        static: list[int] = kwargs.get("static_lifetime_input_indices") or []
        name = signature(gm, num_fwd_outputs)
        target = self.shares.get(name, self.otherwise)
        gm.graph.eliminate_dead_code()
        joint = read(gm, num_fwd_outputs)
        if isinstance(joint, Joint):
            joint.release(self.released.get(name, ()))
            known = name in self.shares
            place = self.place if known else None
            chosen = choose(joint, target, fused=self.fused and known, place=place)
            return partition(joint, chosen.schedule, num_fwd_outputs, static)
        modules: Modules = min_cut_rematerialization_partition(
            gm,
            joint_inputs,
            num_fwd_outputs=num_fwd_outputs,
            static_lifetime_input_indices=static,
        )
        return modules

    def uuid(self) -> Any:
        """What tells two partitioners apart in torch's caches."""
        shares = tuple(sorted(self.shares.items()))
        released = tuple(sorted(self.released.items()))
        how = (self.otherwise, released, self.fused, self.place)
        return (_sources(), torch.__version__, shares, *how)

    def __eq__(self, other: object) -> bool:
        """Whether the other cuts the same way; dynamo shares compiled code where it does."""
        return isinstance(other, Partitioner) and self.uuid() == other.uuid()

    def __hash__(self) -> int:
        """A hash of the identity."""
        return hash(self.uuid())


def signature(module: fx.GraphModule, num_forward_outputs: int) -> str:
    """What a joint graph is known by before and during compilation: its inputs.

    Args:
        module: The joint graph.
        num_forward_outputs: How many of its outputs belong to forward.
    """
    parts = [str(num_forward_outputs)]
    for node in module.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            parts.append(f"{value.dtype}{[str(size) for size in value.shape]}")
        else:
            parts.append(type(value).__name__)
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]


@cache
def _sources() -> str:
    """A digest of the code that decides, and of the engine that it asks."""
    from memfit import _native

    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    digest.update(Path(_native.__file__).read_bytes())
    return digest.hexdigest()
