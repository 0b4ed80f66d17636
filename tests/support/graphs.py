"""Joint graphs under test: run node by node, with the storages that really live counted."""

import collections
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import default_partition
from torch._inductor.decomposition import select_decomp_table

from memfit.run.compiled.joint import Joint, read
from memfit.run.compiled.partition import partition
from memfit.run.compiled.schedule import Decision, Schedule, schedule

Decide = Callable[[Joint], Decision]


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.norm2, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (
            t.view(batch, length, 2, width // 2).transpose(1, 2)
            for t in self.qkv(self.norm(x)).split(width, 2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.proj(y.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Transformer(nn.Module):
    """A few small blocks over a vocabulary of 100."""

    def __init__(self, blocks: int = 2, dropout: float = 0.0, *, broken: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 16)
        self.blocks = nn.ModuleList([Block(dropout) for _ in range(blocks)])
        self.head = nn.Linear(16, 100)
        self.broken = broken

    def forward(self, ids, targets):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
            if self.broken:
                torch._dynamo.graph_break()
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Convolutions(nn.Module):
    """Convolutions with batch normalisation, which writes to module buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(8, 10)

    def forward(self, images, targets):
        return F.cross_entropy(self.head(self.layers(images).mean((2, 3))), targets)


class Layers(nn.Module):
    """Layers that share a norm, and what Inductor fuses between them, dropout included."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(4)])
        self.norm = nn.LayerNorm(32)

    def forward(self, x):
        for layer in self.layers:
            x = x + F.dropout(F.gelu(layer(self.norm(x))), 0.3)
        return x


def tokens(batch: int = 4, length: int = 32):
    torch.manual_seed(1)
    return torch.randint(0, 100, (batch, length)), torch.randint(0, 100, (batch, length))


def images():
    torch.manual_seed(1)
    return torch.randn(4, 3, 12, 12), torch.randint(0, 10, (4,))


@dataclass
class Run:
    """What running a model by a decision gave."""

    loss: Any = None
    gradients: list[Any] = field(default_factory=list)
    joints: list[Joint] = field(default_factory=list)
    schedules: list[Schedule] = field(default_factory=list)
    modules: list[tuple[fx.GraphModule, fx.GraphModule]] = field(default_factory=list)
    forward_peaks: list[int] = field(default_factory=list)
    backward_peaks: list[int] = field(default_factory=list)


def run(model: nn.Module, batch: Any, decide: Decide, *, decomposed: bool = True) -> Run:
    """Run one forward and backward whose graphs are cut by ``decide``, and count what lives."""
    found = Run()

    def cut(gm, joint_inputs, *, num_fwd_outputs, static_lifetime_input_indices=None, **_):
        gm.graph.eliminate_dead_code()
        joint = read(gm, num_fwd_outputs)
        assert isinstance(joint, Joint), joint
        made = schedule(joint, decide(joint))
        found.joints.append(joint)
        found.schedules.append(made)
        modules = partition(joint, made, num_fwd_outputs, static_lifetime_input_indices or [])
        found.modules.append(modules)
        return modules

    _step(found, model, batch, cut, decomposed=decomposed)
    return found


def run_by_torch(model: nn.Module, batch: Any, cut: Callable[..., Any]) -> Run:
    """The same by a partition function of torch."""
    found = Run()
    decomposed = cut is not default_partition
    _step(found, model, batch, cut, decomposed=decomposed)
    return found


def _step(found: Run, model: nn.Module, batch: Any, cut: Any, *, decomposed: bool) -> None:
    def counted(peaks: list[int]):
        def compiler(gm: fx.GraphModule, _: Any):
            def call(arguments: list[Any]) -> Any:
                outputs, peak = interpret(gm, arguments)
                peaks.append(peak)
                return outputs

            call._boxed_call = True
            return call

        return compiler

    backend = aot_autograd(
        fw_compiler=counted(found.forward_peaks),
        bw_compiler=counted(found.backward_peaks),
        decompositions=select_decomp_table if decomposed else None,
        partition_fn=cut,
    )
    torch._dynamo.reset()
    torch.manual_seed(2)
    found.loss = torch.compile(model, backend=backend)(*batch)
    found.loss.backward()
    found.loss = found.loss.detach()
    found.gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad(set_to_none=True)


def interpret(gm: fx.GraphModule, arguments: list[Any]) -> tuple[Any, int]:
    """Run a graph node by node; a value dies after its last use, but for inputs of the model."""
    dying = _dying(gm)
    env: dict[fx.Node, Any] = {}
    values = iter(arguments)
    peak = 0
    for node in gm.graph.nodes:
        look_up = env.__getitem__
        if node.op == "placeholder":
            env[node] = next(values)
        elif node.op == "get_attr":
            env[node] = getattr(gm, node.target)
        elif node.op == "output":
            return fx.node.map_arg(node.args[0], look_up), peak
        else:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), look_up)
            env[node] = node.target(*args, **kwargs)
        peak = max(
            peak, sum({k: s for v in env.values() for k, s in _storages(v).items()}.values())
        )
        for dead in dying[node]:
            del env[dead]
    raise AssertionError("the graph returns nothing")


def _dying(gm: fx.GraphModule) -> dict[fx.Node, list[fx.Node]]:
    """What is let go after each node."""
    last = {}
    for node in gm.graph.nodes:
        last.setdefault(node, node)
        for read_node in node.all_input_nodes:
            last[read_node] = node
    dying = collections.defaultdict(list)
    for node, user in last.items():
        if not _is_model_input(node):
            dying[user].append(node)
    return dying


def _is_model_input(node: fx.Node) -> bool:
    return node.name.startswith(("primals", "tangents"))


def _storages(value: Any) -> dict[int, int]:
    if isinstance(value, torch.Tensor):
        return {value.untyped_storage()._cdata: value.untyped_storage().nbytes()}
    if isinstance(value, (tuple, list)):
        return {k: s for element in value for k, s in _storages(element).items()}
    return {}
