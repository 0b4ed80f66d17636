"""Benchmarks name what memfit has: the suite runs none of them, and moves may leave them behind."""

import ast
import importlib
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def _imported(tree):
    """What a program imports from memfit, by the name that it gives it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                if name.name == "memfit":
                    yield "memfit", importlib.import_module("memfit")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "memfit":
            module = importlib.import_module(node.module)
            for name in node.names:
                if hasattr(module, name.name):
                    yield name.asname or name.name, getattr(module, name.name)
                else:
                    found = importlib.import_module(f"{node.module}.{name.name}")
                    yield name.asname or name.name, found


@pytest.mark.parametrize(
    "file", sorted(BENCHMARKS.rglob("*.py")), ids=lambda file: str(file.relative_to(BENCHMARKS))
)
def test_what_a_benchmark_asks_of_memfit_is_there(file):
    tree = ast.parse(file.read_text())
    modules = {name: it for name, it in _imported(tree) if isinstance(it, ModuleType)}
    lacking = [
        f"{ast.unparse(node)} in line {node.lineno}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in modules
        and not hasattr(modules[node.value.id], node.attr)
    ]
    assert not lacking
