"""Plans made by hand, so that the executor is tested without the engine.

A small recorder of its own lists the ops of forward and what each of them creates; a plan then
drops whatever a rule picks among the droppable allocations.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CHEAP = [
    "mul",
    "add",
    "sub",
    "div",
    "neg",
    "tanh",
    "pow",
    "gelu",
    "relu",
    "silu",
    "sigmoid",
    "rsqrt",
    "exp",
    "mean",
    "cos",
    "sin",
    "where",
    "clone",
    "_to_copy",
    "cat",
    "native_layer_norm",
    "native_group_norm",
    "native_batch_norm",
    "_softmax",
    "_safe_softmax",
    "_log_softmax",
    "empty_like",
    "bernoulli_",
    "native_dropout",
]


@dataclass
class Made:
    """An allocation that a forward op created."""

    op: int
    output: int
    name: str
    shape: tuple[int, ...]
    bytes: int
    droppable: bool = True
    storable: bool = True
    saved: bool = False
    unpacked_as: int = -1
    last_write: int = -1


@dataclass
class ForwardOps:
    """The ops of one forward and what they created."""

    names: list[str] = field(default_factory=list)
    made: list[Made] = field(default_factory=list)
    calls: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)

    def remat(
        self,
        drop: Callable[[Made], bool] = lambda _: True,
        regions: list[tuple[str, int]] | None = None,
        home: Callable[[Made], int | None] = lambda _: None,
    ) -> dict[str, Any]:
        """The `remat` part of an action that drops what `drop` picks."""
        watched = self._watched(regions)
        picked = [m for m in self.made if m.droppable and drop(m) and _within(m, watched)]
        return {"drops": [_entry(m, home(m)) for m in picked], **watched}

    def offload(
        self,
        store: Callable[[Made], bool] = lambda _: True,
        window_bytes: int = 0,
        regions: list[tuple[str, int]] | None = None,
        home: Callable[[Made], int | None] = lambda _: None,
    ) -> dict[str, Any]:
        """The `offload` part of an action that stores what `store` picks."""
        watched = self._watched(regions)
        picked = [
            m for m in self.made if m.storable and m.saved and store(m) and _within(m, watched)
        ]
        asked = [k for k, m in enumerate(picked) if m.unpacked_as >= 0]
        return {
            "tier": "disk",
            "window_bytes": window_bytes,
            "stores": [_entry(m, home(m)) for m in picked],
            "order": sorted(asked, key=lambda k: picked[k].unpacked_as),
            **watched,
        }

    def _watched(self, regions: list[tuple[str, int]] | None) -> dict[str, Any]:
        names = sorted(set(self.names))
        active = [{"module": "", "call": 0, "start": 0, "end": len(self.names)}]
        if regions is not None:
            active = [
                {
                    "module": module,
                    "call": call,
                    "start": self.calls[module, call][0],
                    "end": self.calls[module, call][1],
                }
                for module, call in regions
            ]
        forward = [names.index(name) for name in self.names]
        return {"active": active, "names": names, "forward": forward}

    def plan(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """A whole plan with this one action."""
        return {
            "actions": [
                {
                    "kind": "remat",
                    "promise": "exact",
                    "count": 1,
                    "bytes": 0,
                    "remat": self.remat(*args, **kwargs),
                }
            ]
        }


def _within(made: Made, watched: dict[str, Any]) -> bool:
    return any(region["start"] <= made.op < region["end"] for region in watched["active"])


def _entry(made: Made, home: int | None) -> dict[str, Any]:
    entry = {"op": made.op, "output": made.output, "shape": list(made.shape), "bytes": made.bytes}
    return {**entry, "module": "", **({} if home is None else {"home": home})}


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops = ForwardOps()
        self.owner: dict[int, Made] = {}
        self.before: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace in {"prim", "profiler"}:
            return func(*args, **kwargs)
        index = len(self.ops.names)
        self.ops.names.append(str(func))
        given = {
            t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)
        }
        out = func(*args, **kwargs)
        written = [
            a
            for a, s in zip(args, func._schema.arguments, strict=False)
            if s.alias_info is not None and s.alias_info.is_write and isinstance(a, Tensor)
        ]
        for tensor in written:
            made = self.owner.get(tensor.untyped_storage()._cdata)
            if made is not None:
                made.droppable &= len(written) == 1
                made.storable &= not made.saved
                made.last_write = index
        tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        for ordinal, tensor in enumerate(tensors):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in given or key in self.owner or func.namespace != "aten":
                continue
            droppable = "lift_fresh" not in str(func)
            made = Made(index, ordinal, str(func), tuple(tensor.shape), storage.nbytes(), droppable)
            made.storable = storage.nbytes() > 0
            self.ops.made.append(made)
            self.owner[key] = made
            weakref.finalize(storage, self.owner.pop, key, None)
        return out


@contextlib.contextmanager
def _calls(model: nn.Module, recorder: _Recorder) -> Iterator[None]:
    paths = {id(module): path for path, module in model.named_modules()}
    counts: dict[str, int] = {}
    stack: list[tuple[str, int, int]] = []

    def before(module: nn.Module, _args: Any) -> None:
        path = paths.get(id(module), "?")
        call = counts.get(path, 0)
        counts[path] = call + 1
        stack.append((path, call, len(recorder.ops.names)))

    def after(_module: nn.Module, _args: Any, _result: Any) -> None:
        path, call, start = stack.pop()
        recorder.ops.calls[path, call] = (start, len(recorder.ops.names))

    handles = [
        nn.modules.module.register_module_forward_pre_hook(before),
        nn.modules.module.register_module_forward_hook(after),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def record(
    model: nn.Module, forward: Callable[[], Tensor], *, backward: bool = False
) -> ForwardOps:
    """Run `forward` once and list its ops; random state and buffers are put back.

    The result of forward is alive to the end of the step, so it is not droppable. With `backward`,
    run that too for the order in which saved tensors are asked for.
    """
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    random = torch.get_rng_state()
    recorder = _Recorder()
    asked = 0

    def pack(tensor: Tensor) -> tuple[Tensor, Made | None]:
        made = recorder.owner.get(tensor.untyped_storage()._cdata)
        if made is not None:
            made.saved = True
        return tensor, made

    def unpack(packed: tuple[Tensor, Made | None]) -> Tensor:
        nonlocal asked
        tensor, made = packed
        if made is not None and made.unpacked_as < 0:
            made.unpacked_as = asked
            asked += 1
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
    with hooks, recorder, _calls(model, recorder):
        result = forward()
    for tensor in tree_leaves(result):
        if isinstance(tensor, Tensor):
            made = recorder.owner.get(tensor.untyped_storage()._cdata)
            if made is not None:
                made.droppable = made.storable = False
    if backward:
        parameters = [p for p in model.parameters() if p.requires_grad]
        torch.autograd.grad(result, parameters, allow_unused=True)
    with torch.no_grad():
        for name, b in model.named_buffers():
            b.copy_(buffers[name])
    torch.set_rng_state(random)
    return recorder.ops


def chain(length: int) -> Callable[[Tensor], Tensor]:
    """A forward of so many times sigmoid(x + 1): each sigmoid saves its output."""

    def forward(x: Tensor) -> Tensor:
        for _ in range(length):
            x = torch.sigmoid(x + 1.0)
        return x.sum()

    return forward


def cheap(made: Made) -> bool:
    """Whether it is cheap to make again."""
    return made.name.split(".")[1] in CHEAP
