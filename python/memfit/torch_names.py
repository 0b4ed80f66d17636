"""The names of torch that memfit uses, read from memfit's own source.

Responsible for finding them and for saying which of them the installed torch lacks. Not responsible
for names that differ between supported versions: :mod:`memfit.torch_versions` holds those, so its
own source is left out here.

A name counts where the source imports it from a torch module or reaches it through one. Attributes
of objects (``tensor._version``) cannot be told from the source alone and are left to the tests.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType

_PACKAGE = Path(__file__).parent
_LEFT_OUT = frozenset({"torch_versions.py"})


def used_names(package: Path = _PACKAGE) -> dict[str, tuple[str, ...]]:
    """Every torch name of a package's source and the files that use it.

    Args:
        package: Folder of the package.

    Returns:
        Dotted names in order (``torch._C._len_torch_dispatch_stack``), each with the files that
        use it, relative to the folder.
    """
    found: dict[str, set[str]] = {}
    for file in sorted(package.rglob("*.py")):
        if file.name in _LEFT_OUT:
            continue
        reader = _Reader()
        reader.visit(ast.parse(file.read_text(encoding="utf-8")))
        for name in reader.names:
            found.setdefault(name, set()).add(str(file.relative_to(package)))
    return {name: tuple(sorted(files)) for name, files in sorted(found.items())}


def missing(names: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Those names that the installed torch lacks. Imports torch.

    Args:
        names: As :func:`used_names` gives them.
    """
    return {name: files for name, files in names.items() if not _is_there(name)}


def _is_there(name: str) -> bool:
    first, *parts = name.split(".")
    found: object = import_module(first)
    path = first
    for part in parts:
        path = f"{path}.{part}"
        if not isinstance(found, ModuleType | type):
            return True  # an attribute of an object: told only by running it
        try:
            found = getattr(found, part)
        except AttributeError:
            try:
                found = import_module(path)
            except ImportError:
                return False
    return True


class _Reader(ast.NodeVisitor):
    """Collects dotted names that begin at a torch module."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._modules: dict[str, str] = {}

    def visit_If(self, node: ast.If) -> None:
        """Pass by what only type checkers see."""
        is_for_types = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for child in node.orelse if is_for_types else ast.iter_child_nodes(node):
            self.visit(child)

    def visit_Import(self, node: ast.Import) -> None:
        """``import torch._dynamo.config as dynamo``."""
        for alias in node.names:
            if alias.name.split(".")[0] != "torch":
                continue
            self.names.add(alias.name)
            self._modules[alias.asname or "torch"] = alias.name if alias.asname else "torch"

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """``from torch._C import _len_torch_dispatch_stack``."""
        module = node.module or ""
        if node.level or module.split(".")[0] != "torch":
            return
        for alias in node.names:
            name = f"{module}.{alias.name}"
            self.names.add(name)
            self._modules[alias.asname or alias.name] = name

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """``torch._C._autograd._top_saved_tensors_default_hooks``."""
        chain = list(_chain(node))
        if chain and chain[0] in self._modules:
            self.names.add(".".join((self._modules[chain[0]], *chain[1:])))
        else:
            self.generic_visit(node)


def _chain(node: ast.expr) -> Iterator[str]:
    """The parts of ``a.b.c``; nothing where it does not begin with a name."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name):
        yield node.id
        yield from reversed(parts)
