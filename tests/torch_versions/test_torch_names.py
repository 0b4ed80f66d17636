"""Every name of torch that memfit uses is there: a new torch fails here, not in a step."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import fx, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import memfit
from memfit.torch_names import missing, used_names

PACKAGE = Path(memfit.__file__).parent


def test_every_name_that_is_used_is_there():
    names = used_names()
    assert "torch._C._autograd._push_saved_tensors_default_hooks" in names
    assert "torch._functorch.partitioners.thread_graphsafe_rng_from_hops" in names
    assert len(names) > 250, "the source is read"
    assert missing(names) == {}


def test_a_name_that_is_not_there_is_named_with_its_file(tmp_path: Path):
    (tmp_path / "using.py").write_text(
        "import torch\n"
        "import torch._dynamo.config as dynamo\n"
        "from torch._C import _gone\n"
        "from torch import nn\n"
        "a = torch._C._autograd._also_gone(dynamo.suppress_errors, nn.Linear)\n"
    )
    assert missing(used_names(tmp_path)) == {
        "torch._C._autograd._also_gone": ("using.py",),
        "torch._C._gone": ("using.py",),
    }


def test_every_private_attribute_that_is_used_is_one_of_some_object_of_torch():
    owners = list(_objects())
    unknown = {
        name: sorted(files)
        for name, files in _private_attributes().items()
        if not any(hasattr(owner, name) for owner in owners)
    }
    assert unknown == {}


def _private_attributes() -> dict[str, set[str]]:
    """Private attributes that memfit reads and nowhere defines, with the files that read them."""
    defined: set[str] = set()
    read: dict[str, set[str]] = {}
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            match node:
                case ast.FunctionDef() | ast.ClassDef():
                    defined.add(node.name)
                case ast.Name(ctx=ast.Store()):
                    defined.add(node.id)
                case ast.Attribute(ctx=ast.Store(), value=ast.Name(id="self")):
                    defined.add(node.attr)
                case ast.alias():
                    defined.add((node.asname or node.name).split(".")[-1])
                case ast.Attribute() if node.attr.startswith("_") and file.name not in LEFT_OUT:
                    read.setdefault(node.attr, set()).add(file.name)
    own = {name for name in read if name.startswith("__")}
    return {name: files for name, files in read.items() if name not in defined | own}


LEFT_OUT = {"torch_versions.py"}
"""What differs between versions is asked for there, in the test of that file."""


def _objects() -> Iterator[object]:
    """One of each kind of object whose insides memfit knows."""
    tensor = torch.zeros(2, requires_grad=True)
    result = (tensor * 2).sum()
    module = nn.Linear(2, 2)
    yield from (sys, torch, torch._C, torch._C._autograd, torch.autograd, torch.cuda)
    yield torch.autograd.Variable
    yield nn.modules.module
    yield from (torch.ops.aten, torch.ops.aten.add.Tensor, torch.ops.mkldnn, torch.cuda.memory)
    yield from (tensor, tensor.untyped_storage(), result.grad_fn, module)
    yield from (
        nn.GRU(2, 2),
        nn.functional.batch_norm(result.expand(2, 2), *torch.ones(2, 2)).grad_fn,
    )
    yield nn.functional.conv1d(torch.ones(1, 1, 2), nn.Conv1d(1, 1, 1).weight).grad_fn
    yield torch.optim.SGD(module.parameters())
    yield from (fx.Graph(), TorchDispatchMode(), FakeTensorMode())
    yield import_of("torch._inductor.compile_fx")
    yield import_of("torch.autograd.graph")
    yield import_of("torch.autograd.forward_ad")
    yield import_of("torch.utils._device")
    yield import_of("torch.utils.checkpoint")
    yield import_of("torch.utils.data.dataloader")
    yield import_of("torch._dynamo.eval_frame")
    yield import_of("runpy")
    yield torch.library.custom_op("memfit_tests::named", _doubled, mutates_args=())


def _doubled(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


def import_of(name: str) -> object:
    """A module by its name."""
    return __import__(name, fromlist=["_"])
