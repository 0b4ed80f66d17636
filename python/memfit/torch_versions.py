"""The range of torch versions that memfit supports, and everything that differs within it.

Responsible for saying which torch Python would import, whether memfit can work with it, and for
each private name and behaviour of torch that one supported version has and another has not.
Everything else that memfit takes from behind torch's underscores is the same throughout the range;
``tests/torch_versions`` lists it and looks it up. Not responsible for raising: who needs torch asks
:mod:`memfit.torch_required`.

Imports nothing of memfit, and torch only inside functions.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib.metadata
import importlib.util
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.machinery import PathFinder, SourceFileLoader
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from types import CodeType

    import torch
    from torch import fx

OLDEST = (2, 10)
"""First minor version of torch that memfit supports."""

NEWEST = (2, 15)
"""Last minor version of torch that memfit was tested with."""

OFFLOADED_PARAMETERS_SINCE = (2, 12)
"""First version that turns a read through a stale view of an emptied storage into an error: before
it, nothing takes torch's message off a storage again (``torch/csrc/Module.cpp``,
``_clear_storage_data_ptr_access_error_msg``), and without the message such a read crashes."""

Version = tuple[int, int]


@dataclass(slots=True, frozen=True)
class Installed:
    """A torch on Python's path.

    Attributes:
        version: Its full version, as ``torch.__version__`` has it.
        folder: Folder of the package.
    """

    version: str
    folder: Path


def installed() -> list[Installed]:
    """Each torch on Python's path, the one that ``import torch`` takes first.

    Reads the version beside the package instead of importing it, which takes seconds.
    """
    loaded = sys.modules.get("torch")
    found = [] if loaded is None else [_of(Path(str(loaded.__file__)).parent)]
    for entry in dict.fromkeys(sys.path):
        spec = PathFinder.find_spec("torch", [entry or "."])
        if spec is not None and spec.origin is not None:
            found.append(_of(Path(spec.origin).parent))
    return list({torch.folder: torch for torch in found if torch is not None}.values())


def _of(folder: Path) -> Installed | None:
    """The torch in a folder; ``None`` where there is something else by that name."""
    with contextlib.suppress(OSError):
        text = (folder / "version.py").read_text(encoding="utf-8")
        if match := re.search(r"^__version__ *= *['\"]([^'\"]+)['\"]", text, re.MULTILINE):
            return Installed(match.group(1), folder.resolve())
    return None


def minor(version: str) -> Version | None:
    """Major and minor version of a version as text; ``None`` where it has none."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return None if match is None else (int(match.group(1)), int(match.group(2)))


def refusal() -> str | None:
    """Why memfit cannot work with the installed torch, as a sentence; ``None`` where it can."""
    found = installed()
    if not found:
        return "memfit needs torch, which is not installed: `pip install torch`"
    here = minor(found[0].version)
    if here is None or here < OLDEST:
        return (
            f"{_own_name()} supports torch {_said(OLDEST)} to {_said(NEWEST)}; "
            f"this is {found[0].version}"
        )
    return None


def remarks() -> list[str]:
    """What a person should know of the installed torch although memfit works with it."""
    found = installed()
    if not found:
        return []
    said = []
    if (minor(found[0].version) or OLDEST) > NEWEST:
        said.append(
            f"torch {found[0].version} is newer than {_said(NEWEST)}, the last that "
            f"{_own_name()} was tested with"
        )
    if len(found) > 1:
        others = ", ".join(f"{torch.version} in `{torch.folder}`" for torch in found[1:])
        said.append(
            f"two torches are on the path: {found[0].version} in `{found[0].folder}` is used, "
            f"{others} is not"
        )
    return said


def offloaded_parameters_refusal() -> str | None:
    """Why parameters cannot be offloaded with this torch; ``None`` where they can."""
    import torch

    if hasattr(torch._C, "_clear_storage_data_ptr_access_error_msg"):
        return None
    since = _said(OFFLOADED_PARAMETERS_SINCE)
    return f"it needs torch {since} or later; this is {torch.__version__}"


def forbid_reads(storage: torch.UntypedStorage, message: str) -> None:
    """Make a read of a storage that lost its memory an error with a message."""
    import torch

    torch._C._set_storage_data_ptr_access_error_msg(storage._cdata, message)


def allow_reads(storage: torch.UntypedStorage) -> None:
    """Take back :func:`forbid_reads`. Only where :func:`offloaded_parameters_refusal` is none."""
    import torch

    torch._C._clear_storage_data_ptr_access_error_msg(storage._cdata)


NAMES = {
    "is_primal": (
        "torch._functorch._aot_autograd.utils:_is_primal",  # 2.11 on
        "torch._functorch.partitioners:_is_primal",
    ),
    "is_tangent": (
        "torch._functorch._aot_autograd.utils:_is_tangent",
        "torch._functorch.partitioners:_is_tangent",
    ),
    "is_forward_seed_offset": (
        "torch._functorch._aot_autograd.utils:_is_fwd_seed_offset",
        "torch._functorch.partitioners:_is_fwd_seed_offset",
    ),
    "is_dense": (
        "torch._prims_common:is_non_overlapping_and_dense_or_false",
        "torch._prims_common:is_non_overlapping_and_dense",
    ),
    "checkpoint_generator": (
        "torch.utils.checkpoint:_checkpoint_without_reentrant_generator_impl",  # 2.15 on
        "torch.utils.checkpoint:_checkpoint_without_reentrant_generator",
    ),
    "size_hint": (
        "torch.fx.experimental.symbolic_shapes:optimization_hint",
        "torch.fx.experimental.symbolic_shapes:size_hint",
    ),
}
"""Functions that torch renamed or moved within the range, by what memfit calls them: where each is
to be found, the newest place first."""


@cache
def function(name: str) -> Callable[..., Any]:
    """A function of torch by memfit's name for it.

    Args:
        name: A key of :data:`NAMES`.

    Raises:
        ImportError: This torch has it in none of the known places.
    """
    for place in NAMES[name]:
        module, _, attribute = place.partition(":")
        with contextlib.suppress(ImportError, AttributeError):
            return cast("Callable[..., Any]", getattr(import_module(module), attribute))
    places = ", ".join(f"`{place.replace(':', '.')}`" for place in NAMES[name])
    raise ImportError(f"this torch has none of {places}, which memfit needs")


def is_primal(node: fx.Node) -> bool:
    """Whether a placeholder of a joint graph is an input of forward."""
    return bool(function("is_primal")(node))


def is_tangent(node: fx.Node) -> bool:
    """Whether a placeholder of a joint graph is the gradient of an output."""
    return bool(function("is_tangent")(node))


def is_forward_seed_offset(node: fx.Node) -> bool:
    """Whether a placeholder of a joint graph is the random state of forward."""
    return bool(function("is_forward_seed_offset")(node))


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor fills its extent without holes or overlaps."""
    return bool(function("is_dense")(tensor))


def size_hint(size: int | torch.SymInt, fallback: int) -> int:
    """The number that stands for a size: the one it was traced with, or the fallback."""
    hint = function("size_hint")
    if "fallback" in signature(hint).parameters:
        return int(hint(size, fallback=fallback))
    known = hint(size, allow_none=True)
    return fallback if known is None else int(known)


def flop_formulas() -> dict[Any, Callable[..., Any]]:
    """How many floating-point operations a call takes, by operator, as torch counts them.

    A product of whole numbers of 8 bits takes as many as one of floats, which torch does not count.
    Up to 2.13 torch has no formula for attention on a CPU, which takes those of the GPU's. That of
    2.11 refuses attention in which heads of the query share one of the keys; the work is that of as
    many heads everywhere.
    """
    import torch

    aten, flop_registry = torch.ops.aten, _flop_registry()
    on_cpu = {
        aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: (
            aten._scaled_dot_product_flash_attention_backward
        ),
    }
    found = {
        aten._int_mm: flop_registry[aten.mm],
        **{cpu: flop_registry[gpu] for cpu, gpu in on_cpu.items()},
        **flop_registry,
    }
    wrapper = flop_registry[aten.mm].__code__
    found = {op: _of_shapes(formula, wrapper) for op, formula in found.items()}
    return {
        op: _of_grouped_heads(formula) if "scaled_dot_product" in str(op) else formula
        for op, formula in found.items()
    }


def _flop_registry() -> dict[Any, Callable[..., Any]]:
    """Torch's formulas, which none of Triton is needed for.

    Torch's module imports the compiler where it is installed, to know kernels by their class. That
    takes as long as to import all of memfit, and a program that compiles nothing would not have it.
    So unless one of the two is there already, the formulas are those of a copy that finds none.
    """
    name = "torch.utils.flop_counter"
    known = name in sys.modules or "triton" in sys.modules
    found = None if known else importlib.util.find_spec(name)
    if found is None or found.origin is None:
        module = import_module(name)
    else:
        loader = SourceFileLoader(f"{name}_without_triton", found.origin)
        module = ModuleType(loader.name)
        own = {**vars(builtins), "__import__": _import_without_triton}
        module.__dict__.update(__package__=found.parent, __builtins__=own)
        logging.getLogger(loader.name).disabled = True  # it would warn that it found none
        loader.exec_module(module)
    return cast("dict[Any, Callable[..., Any]]", module.flop_registry)


def _import_without_triton(name: str, *rest: Any) -> Any:
    if name.partition(".")[0] == "triton":
        raise ImportError(name)
    return builtins.__import__(name, *rest)


def _of_shapes(formula: Callable[..., Any], wrapper: CodeType) -> Callable[..., Any]:
    """A formula of shapes, given tensors; torch's own wrapper takes as long as a small op runs.

    Args:
        formula: The formula.
        wrapper: The code of torch's wrapper; what it does not wrap stays.
    """
    inside = getattr(formula, "__wrapped__", None)
    if inside is None or formula.__code__ is not wrapper:
        return formula

    def counted(*args: Any, out_val: Any = None, **kwargs: Any) -> Any:
        named = {name: _shape(value) for name, value in kwargs.items()}
        return inside(*map(_shape, args), out_shape=_shape(out_val), **named)

    return counted


def _shape(value: Any) -> Any:
    """The shape of a tensor, or those of several; whatever is something else."""
    if type(value) in (list, tuple):
        return type(value)(map(_shape, value))
    shape = getattr(value, "shape", None)
    return value if shape is None else shape


def _of_grouped_heads(formula: Callable[..., Any]) -> Callable[..., int]:
    """A formula for attention that takes shared heads for heads of their own."""

    def flops(*args: Any, **kwargs: Any) -> int:
        try:
            return int(formula(*args, **kwargs))
        except AssertionError:
            # The formulas take shapes as well as tensors: batch, heads, length, width.
            shapes = [getattr(value, "shape", value) for value in args]
            heads = max(shape[1] for shape in shapes if _is_of_attention(shape))
            wide = [
                (shape[0], heads, *shape[2:]) if _is_of_attention(shape) else shape
                for shape in shapes
            ]
            return int(formula(*wide, **kwargs))

    return flops


def _is_of_attention(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 4  # noqa: PLR2004 - what the kernels take


def run_joint_passes(module: fx.GraphModule, device: torch.device | None) -> fx.GraphModule:
    """Run Inductor's passes over a joint graph, those over its invoked subgraphs left out.

    Args:
        module: The graph; changed in place where torch does so.
        device: Device of its inputs.
    """
    from torch._inductor import compile_fx

    passes = compile_fx._recursive_joint_graph_passes
    takes_device = "input_device" in signature(passes).parameters  # 2.11 on
    extra = {"input_device": device} if takes_device else {}
    returned: Any = passes(module, skip_invoke_subgraph=True, **extra)
    return module if returned is None else cast("fx.GraphModule", returned)


def group_norm_laid_out(
    result: tuple[torch.Tensor, ...], given: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """What ``native_group_norm`` returns on fakes, in the memory format of the real kernel.

    On a CPU the kernel keeps its input's (``aten/src/ATen/native/group_norm.cpp``); the fakes of
    2.14 return a contiguous tensor, and those of 2.15 take one item's strides for a format.

    Args:
        result: What it returned on fakes.
        given: Its input.
    """
    import torch
    from torch._prims_common import suggest_memory_format

    if given.device.type != "cpu":
        return result
    wanted = suggest_memory_format(given)
    with torch._C._DisableTorchDispatch():
        strides = torch.empty(given.shape, device="meta", memory_format=wanted).stride()
    made = result[0]
    return (
        result if made.stride() == strides else (made.as_strided(made.shape, strides), *result[1:])
    )


@contextlib.contextmanager
def profiled_memory() -> Iterator[Any]:
    """Profile what is allocated on the CPU, without a word on standard error or by a warning.

    Up to 2.12 each profile warns that its events go with the next one, unless it turns all of them
    into Python objects at its end, which takes longer than what is profiled.

    Yields:
        Torch's profile; its events are there when it has ended.
    """
    from torch.profiler import ProfilerActivity, profile

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(Warning: )?Profiler clears events")
        found: Any = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        found.__enter__()
    try:
        yield found
    finally:
        found.__exit__(None, None, None)


@contextlib.contextmanager
def ignoring_loggers(functions: Iterable[Callable[..., Any]]) -> Iterator[None]:
    """Let dynamo trace past calls of logging functions.

    Args:
        functions: Functions to pass by, next to those of dynamo's own setting.
    """
    import torch._dynamo.config as dynamo

    current = hasattr(dynamo, "ignore_logging_functions")
    name = "ignore_logging_functions" if current else "ignore_logger_methods"
    with dynamo.patch({name: {*getattr(dynamo, name), *functions}}):
        yield


def _said(version: Version) -> str:
    return f"{version[0]}.{version[1]}"


@cache
def _own_name() -> str:
    try:
        version = importlib.metadata.version("memfit")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        return "memfit"
    return f"memfit {'.'.join(version.split('.')[:2])}"
