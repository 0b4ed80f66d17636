"""Imports go one way: from a floor of the house to one below it, and never in a circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

from directions import circle

import memfit

PACKAGE = Path(memfit.__file__).parent

FLOORS = (
    {"."},  # the files of the package itself: errors, sizes, workloads, answers
    {"tensors"},
    {"weights"},
    {"track"},
    {"capture", "measure"},
    {"apply"},
    {"plan"},
    {"prune"},
    {"guard"},
    {"share"},
    {"run"},
    {"verify"},
    {"api"},
    {"doctor"},
    {"program"},
)
"""Folders from the ground up. A file imports from its own folder and from the floors below."""

DOORS = {"memfit", "memfit.__main__"}
"""Where users come in; they lead to every floor."""


def modules(package: Path) -> dict[str, Path]:
    """The files of a package by the names of their modules."""
    files = {}
    for file in sorted(package.rglob("*.py")):
        parts = (package.name, *file.relative_to(package).with_suffix("").parts)
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return files


def imports(file: Path, known: Mapping[str, Path]) -> Iterator[str]:
    """The modules of the package that a file names in an import, at its top or in a function."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                if whole in known:
                    yield whole
                elif alias.name != "_native":
                    yield node.module


def arrows(package: Path) -> dict[str, set[str]]:
    """What each module imports of its package."""
    known = modules(package)
    return {name: set(imports(file, known)) - {name} for name, file in known.items()}


def folder_of(name: str) -> str:
    """The folder a module lies in, directly under the package."""
    parts = name.split(".")
    is_folder = (PACKAGE / parts[1]).is_dir() if len(parts) > 1 else False
    return parts[1] if is_folder else "."


def test_imports_lead_down():
    floor = {folder: height for height, folders in enumerate(FLOORS) for folder in folders}
    inside = {name: targets for name, targets in arrows(PACKAGE).items() if name not in DOORS}
    assert {folder_of(name) for name in inside} == floor.keys()
    wrong = [
        f"{name} imports {target}"
        for name, targets in inside.items()
        for target in sorted(targets)
        if folder_of(target) != folder_of(name)
        and (target in DOORS or floor[folder_of(target)] >= floor[folder_of(name)])
    ]
    assert wrong == []


def test_no_circle_of_files():
    graph = arrows(PACKAGE)
    assert len(graph) > 100
    assert circle({name: targets - DOORS for name, targets in graph.items()}) == []


def test_a_circle_is_found(tmp_path):
    package = tmp_path / "house"
    package.mkdir()
    for name, source in {
        "__init__": "",
        "a": "from house import b",
        "b": "def later():\n    from house.a import x",
        "c": "import house.a",
    }.items():
        (package / f"{name}.py").write_text(source)
    assert circle(arrows(package)) == ["house.a", "house.b", "house.c"]


def test_functions_keep_their_names_where_folders_bear_the_same():
    import memfit.guard.limit
    import memfit.plan.profiles
    import memfit.track.cpu

    assert callable(memfit.guard)
    assert callable(memfit.plan)
    assert callable(memfit.track)
