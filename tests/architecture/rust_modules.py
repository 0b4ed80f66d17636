"""Which files of a crate name items that other files of it define.

A path counts for the file that defines the first item on it, through whatever re-exports. `mod` and
re-exports themselves are no uses; what a macro makes counts for the file of its module. An `impl`
names its type like any other path. Method calls name no file and are not followed, and code that is
compiled for tests alone is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_WORD = re.compile(
    r"""//[^\n]*|/\*.*?\*/"""  # comments
    r"""|\b[bc]?r(?P<marks>\#*)".*?"(?P=marks)|(?:\b[bc])?"(?:\\.|[^"\\])*\""""  # strings
    r"""|(?:\bb)?'(?:\\.[^']*|[^'\\])'|'\w+|\b\d\w*"""  # characters, lifetimes, numbers
    r"""|(?P<word>[A-Za-z_]\w*|::|[^\s\w])""",
    re.DOTALL,
)
_ITEMS = {"fn", "struct", "enum", "union", "trait", "type", "const", "static", "macro_rules"}
_STARTS = _ITEMS | {"pub", "use", "mod", "impl", "let", "unsafe", "async"}
_OPEN, _CLOSE = {"(", "[", "{"}, {")", "]", "}"}

Names = tuple[str, ...]


@dataclass(eq=False)
class Module:
    """A module, in a file of its own or in braces.

    Attributes:
        file: The file that it is written in.
        folder: Where the files of its children lie.
        above: The module that declares it; none at the root.
        items: What it defines.
        children: Its modules.
        imports: What each name that it imports or exports stands for.
        globs: Where it imports all names from.
        paths: Every path that its code names, re-exports aside.
    """

    file: Path
    folder: Path
    above: Module | None = None
    items: set[str] = field(default_factory=set)
    children: dict[str, Module] = field(default_factory=dict)
    imports: dict[str, list[Names]] = field(default_factory=dict)
    globs: list[Names] = field(default_factory=list)
    paths: set[Names] = field(default_factory=set)

    def all(self) -> Iterator[Module]:
        """This module and those below it."""
        yield self
        for child in self.children.values():
            yield from child.all()


def words(source: str) -> list[str]:
    """Names and signs without comments, literals, attributes and what is for tests alone."""
    raw = [match["word"] for match in _WORD.finditer(source) if match["word"]]
    kept: list[str] = []
    at = 0
    while at < len(raw):
        if raw[at : at + 2] == ["#", "["]:
            end = _closed(raw, at + 1)
            attribute = raw[at:end]
            is_test = attribute[2] == "cfg" and "test" in attribute and "not" not in attribute
            at = _past_item(raw, end) if is_test else end
        else:
            kept.append(raw[at])
            at += 1
    return kept


def _closed(raw: list[str], at: int) -> int:
    """One past the bracket that closes the one at ``at``."""
    depth = 1
    while depth:
        at += 1
        depth += (raw[at] in _OPEN) - (raw[at] in _CLOSE)
    return at + 1


def _past_item(raw: list[str], at: int) -> int:
    """One past the item, field or statement that begins at ``at``."""
    while raw[at : at + 2] == ["#", "["]:
        at = _closed(raw, at + 1)
    ends = {";"} if raw[at] in _STARTS else {";", ","}
    while raw[at] not in ends | _CLOSE:
        if raw[at] not in _OPEN:
            at += 1
            continue
        is_body = raw[at] == "{"
        at = _closed(raw, at)
        if is_body and raw[at : at + 1] not in (["."], ["?"], [";"], [","], ["else"]):
            return at
    return at + (raw[at] in ends)


def _tree(raw: list[str], at: int, path: Names) -> tuple[list[tuple[str, Names]], int]:
    """The names that a ``use`` brings, with what each stands for, and where its tree ends."""
    while raw[at] not in {",", ";", "}", "as"}:
        word, at = raw[at], at + 1
        if word == "*":
            return [("*", path)], at
        if word == "{":
            found: list[tuple[str, Names]] = []
            while raw[at] != "}":
                more, at = _tree(raw, at, path)
                found += more
                at += raw[at] == ","
            return found, at + 1
        if word != "::" and (word != "self" or not path):
            path = (*path, word)
    return ([(raw[at + 1], path)], at + 2) if raw[at] == "as" else ([(path[-1], path)], at)


def read(file: Path, folder: Path, above: Module | None = None) -> Module:
    """The module that a file holds, with all below it."""
    root = Module(file, folder, above)
    raw = [*words(file.read_text()), ";", ";"]
    stack: list[Module | None] = [root]  # by open brace: the module that it holds, if it does
    at = 0
    while at < len(raw) - 2:
        module = next(one for one in reversed(stack) if one is not None)
        match raw[at], raw[at + 1], raw[at + 2]:
            case "mod", name, ";":
                inside, beside = module.folder / name / "mod.rs", module.folder / f"{name}.rs"
                below = beside if beside.exists() else inside
                module.children[name] = read(below, module.folder / name, module)
                at += 3
            case "mod", name, "{":
                child = Module(module.file, module.folder / name, module)
                module.children[name] = child
                stack.append(child)
                at += 3
            case "use", after, _ if after != "<":
                is_export = raw[at - 1] in {"pub", ")"}  # `pub(crate)` ends in a bracket
                found, at = _tree(raw, at + 1, ())
                for name, path in found:
                    if name == "*":
                        module.globs.append(path)
                        continue
                    module.imports.setdefault(name, []).append(path)
                    module.paths |= set() if is_export else {path}
            case sign, _, _:
                if sign in "{}":
                    stack = [*stack, None] if sign == "{" else stack[:-1]
                elif sign in _ITEMS and stack[-1] is not None:
                    behind = raw[at + 1 : at + 4]
                    module.items.add(next(it for it in behind if it not in {"!", "mut", *_ITEMS}))
                at = _path(raw, at, module)
    return root


def _path(raw: list[str], at: int, module: Module) -> int:
    """Notes the path that begins at a word, if one does; one past it."""
    end = at + 1
    is_member = raw[at - 1] == "." and raw[at - 2] != "."  # not so behind the dots of a range
    if not raw[at].isidentifier() or is_member or raw[at - 1] in {"::", "fn"}:
        return end
    while raw[end] == "::" and raw[end + 1].isidentifier():
        end += 2
    # A lone small name is a local one, mostly; in a call or a macro it may be another file's.
    if end > at + 1 or raw[at][0].isupper() or raw[end] in {"(", "!"}:
        module.paths.add(tuple(raw[at:end:2]))
    return end


Seen = frozenset[tuple[Module, Names]]


def defining(module: Module, path: Names, seen: Seen = frozenset()) -> set[Path]:
    """The files of the crate that define the first item on a path, as seen from a module."""
    if not path or path[0] not in {"crate", "self", "super"}:
        return _found(module, path, seen) if path else set()
    while path and path[0] in {"crate", "self", "super"}:
        while path[0] == "crate" and module.above is not None:
            module = module.above
        module = module.above or module if path[0] == "super" else module
        path = path[1:]
    return _below(module, path, seen)


def _below(module: Module, path: Names, seen: Seen) -> set[Path]:
    """The same for a path into a module; an item that is not found there came from a macro."""
    is_known = bool(path) and path[0] in {*module.items, *module.children, *module.imports}
    found = _found(module, path, seen) if path else set()
    return found if found or is_known or not path else {module.file}


def _found(module: Module, path: Names, seen: Seen) -> set[Path]:
    """The same for a path that begins with a name known in the module; empty if it is not known."""
    name, rest = path[0], path[1:]
    if (module, path) in seen:
        return set()
    seen |= {(module, path)}
    if name in module.children and (rest or name not in {*module.items, *module.imports}):
        return _below(module.children[name], rest, seen)
    if name in module.items:
        return {module.file}
    # Names that are no module's stand for other crates.
    inner = {"crate", "self", "super", *module.children, *module.imports} - {name}
    inner |= {name} & module.children.keys()
    targets = [(*it, *rest) for it in module.imports.get(name, []) if it[0] in inner]
    if name not in module.imports:
        targets = [(*it, *path) for it in module.globs if it[0] in inner]
    return {file for target in targets for file in defining(module, target, seen)}


def arrows(source: Path) -> dict[str, set[str]]:
    """The files of a crate's source folder, and which others each names an item of."""
    root = source / "lib.rs" if (source / "lib.rs").exists() else source / "main.rs"
    graph: dict[str, set[str]] = {}
    for module in read(root, source).all():
        files = {file for path in module.paths for file in defining(module, path)}
        named = {file.relative_to(source).as_posix() for file in files - {module.file}}
        graph.setdefault(module.file.relative_to(source).as_posix(), set()).update(named)
    return graph
