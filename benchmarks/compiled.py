"""Compiled steps: memfit's partition beside torch's own, at every budget.

A GPT of width 256 (4 heads, vocabulary 1000, batch 4 x 256 tokens, float32) as in the tables that
torch's `activation_memory_budget` is known by. Two peaks:

- *graph peak*: liveness by storage while forward and backward of the joint graph run node by node,
  the graph's inputs freed after their last use or held to the end, as asked;
- *Inductor peak* (``--inductor``): profiler memory events above the start of the step.

For every fraction of torch's, memfit plans for the very peak that torch reached, and for less.

    python benchmarks/compiled.py --layers 8 16
"""

import argparse
import collections
import gc
import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

from memfit.run.compiled.joint import Joint, read
from memfit.run.compiled.partition import partition
from memfit.run.compiled.partitioner import Partitioner
from memfit.run.compiled.search import choose

FRACTIONS = (1.0, 0.8, 0.5, 0.3, 0.2, 0.1, 0.05, 0.02, 0.0)
MIB = 1 << 20
Cut = Callable[..., Any]


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        """Build it."""
        super().__init__()
        self.heads = heads
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.proj, self.norm2 = nn.Linear(width, width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention, then MLP."""
        b, t, d = x.shape
        q, k, v = (
            part.view(b, t, self.heads, d // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm(x)).split(d, 2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """The model of the tables."""

    def __init__(self, layers: int) -> None:
        """Build it."""
        super().__init__()
        self.tokens, self.positions = nn.Embedding(1000, 256), nn.Embedding(256, 256)
        self.blocks = nn.ModuleList([Block(256, 4) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(256), nn.Linear(256, 1000, bias=False)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def storages(value: Any) -> dict[int, int]:
    """Storages behind a value, with their bytes."""
    if isinstance(value, torch.Tensor):
        return {value.untyped_storage()._cdata: value.untyped_storage().nbytes()}
    if isinstance(value, (tuple, list)):
        return {k: s for element in value for k, s in storages(element).items()}
    return {}


def last_uses(gm: fx.GraphModule) -> dict[fx.Node, list[fx.Node]]:
    """What is used last by each node."""
    last: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        last.setdefault(node, node)
        last.update(dict.fromkeys(node.all_input_nodes, node))
    dying = collections.defaultdict(list)
    for node, user in last.items():
        dying[user].append(node)
    return dying


class Counted:
    """Runs a graph node by node and keeps both graph peaks."""

    def __init__(self) -> None:
        """Start without peaks."""
        self.freeing = self.holding = 0

    def compile(self, gm: fx.GraphModule, _: Any) -> Any:
        """Stand where Inductor would."""

        def call(arguments: list[Any]) -> Any:
            given = list(arguments)
            arguments.clear()
            return self.run(gm, given)

        call._boxed_call = True  # type: ignore[attr-defined]  # torch's own convention
        return call

    def run(self, gm: fx.GraphModule, arguments: list[Any]) -> Any:
        """Run once."""
        dying = last_uses(gm)
        env: dict[fx.Node, Any] = {}
        held: dict[int, int] = {}
        count: collections.Counter[int] = collections.Counter()
        alive, values = 0, iter(arguments)
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                env[node] = next(values)
                if node.name.startswith("primals"):
                    held.update(storages(env[node]))
            elif node.op == "get_attr":
                env[node] = getattr(gm, node.target)
            elif node.op == "output":
                return fx.node.map_arg(node.args[0], env.__getitem__)
            else:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
                env[node] = node.target(*args, **kwargs)
            for key, size in storages(env[node]).items():
                alive += size * (count[key] == 0)
                count[key] += 1
            gone = sum(size for key, size in held.items() if count[key] == 0)
            self.freeing = max(self.freeing, alive)
            self.holding = max(self.holding, alive + gone)
            for dead in dying[node]:
                for key, size in storages(env.pop(dead)).items():
                    count[key] -= 1
                    alive -= size * (count[key] == 0)
        raise AssertionError("the graph returns nothing")


def ours(target_bytes: int, seen: dict[str, Any]) -> Cut:
    """A partition of memfit for a graph peak, inputs held."""

    def cut(gm: fx.GraphModule, _: Any, *, num_fwd_outputs: int, **__: Any) -> Any:
        gm.graph.eliminate_dead_code()
        joint = read(gm, num_fwd_outputs)
        assert isinstance(joint, Joint)
        start = time.process_time()
        chosen = choose(joint, target_bytes)
        seen["plan_cpu_seconds"] = time.process_time() - start
        seen["saved_bytes"] = chosen.schedule.saved_bytes
        seen["predicted_peak_bytes"] = chosen.peak_bytes
        return partition(joint, chosen.schedule, num_fwd_outputs, [])

    return cut


def graph_peaks(model: nn.Module, batch: Any, cut: Cut) -> tuple[Counted, list[torch.Tensor]]:
    """Both graph peaks of one step, and its gradients."""
    counted = Counted()
    backend = aot_autograd(
        fw_compiler=counted.compile, bw_compiler=counted.compile, partition_fn=cut
    )
    torch._dynamo.reset()
    torch.compile(model, backend=backend)(*batch).backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    return counted, gradients


def error(gradients: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Largest relative error of a gradient."""
    pairs = zip(gradients, expected, strict=True)
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def graphs(layers: int) -> list[dict[str, Any]]:
    """The sweep at the level of graphs."""
    torch.manual_seed(0)
    model, batch = GPT(layers), tuple(torch.randint(0, 1000, (4, 256)) for _ in range(2))
    model(*batch).backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    rows = []

    def row(method: str, counted: Counted, gradients: list[torch.Tensor], **more: Any) -> None:
        rows.append(
            {
                "layers": layers,
                "method": method,
                "freeing_peak_mib": round(counted.freeing / MIB, 1),
                "holding_peak_mib": round(counted.holding / MIB, 1),
                "gradient_error": error(gradients, expected),
                **more,
            }
        )
        print(json.dumps(rows[-1]), flush=True)

    targets = []
    for fraction in FRACTIONS:
        with torch._functorch.config.patch(activation_memory_budget=fraction):
            counted, gradients = graph_peaks(model, batch, min_cut_rematerialization_partition)
        row(f"torch {fraction}", counted, gradients)
        targets.append(counted.holding)
    for target in (*sorted(set(targets), reverse=True), 0):
        seen: dict[str, Any] = {}
        counted, gradients = graph_peaks(model, batch, ours(target, seen))
        row(f"memfit {target / MIB:.1f} MiB", counted, gradients, **seen)
    return rows


def inductor(layers: int) -> list[dict[str, Any]]:
    """The sweep under Inductor: minutes of compiling."""
    torch.manual_seed(0)
    model, batch = GPT(layers), tuple(torch.randint(0, 1000, (4, 256)) for _ in range(2))
    model(*batch).backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    rows = []

    def measure(method: str, options: dict[str, Any]) -> None:
        torch._dynamo.reset()
        step = torch.compile(model, options={"force_disable_caches": True, **options})
        start = time.process_time()
        model.zero_grad(set_to_none=True)
        step(*batch).backward()
        compile_seconds = time.process_time() - start
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        seconds = []
        for _ in range(5):
            model.zero_grad(set_to_none=True)
            start = time.process_time()
            step(*batch).backward()
            seconds.append(time.process_time() - start)
        model.zero_grad(set_to_none=True)
        rows.append(
            {
                "layers": layers,
                "method": method,
                "inductor_peak_mib": round(profiled(lambda: step(*batch).backward()) / MIB, 1),
                "step_cpu_seconds": round(sorted(seconds)[2], 3),
                "compile_cpu_seconds": round(compile_seconds, 1),
                "gradient_error": error(gradients, expected),
            }
        )
        print(json.dumps(rows[-1]), flush=True)

    parameters = sum(p.nbytes for p in model.parameters())
    for fraction in (1.0, 0.3, 0.1, 0.0):
        with torch._functorch.config.patch(activation_memory_budget=fraction):
            measure(f"torch {fraction}", {})
    for above in (80, 50, 0):
        target = parameters + above * MIB
        partitioner = Partitioner({}, target)
        measure(f"memfit parameters + {above} MiB", {"custom_partitioner_fn": partitioner})
    return rows


def profiled(call: Callable[[], Any]) -> int:
    """Peak of a call by the profiler's memory events, above its start."""
    gc.collect()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        call()
    events = profile.profiler.kineto_results.events()
    alive = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


def main() -> None:
    """Run the sweeps and print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--inductor", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for layers in options.layers:
        rows += inductor(layers) if options.inductor else graphs(layers)
    if options.out is not None:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
