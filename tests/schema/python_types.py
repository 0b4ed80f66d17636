"""Makes Python's types of the answers from the engine's JSON Schema.

    python tests/schema/python_types.py            # exit code 1: what is kept differs
    python tests/schema/python_types.py --write    # writes python/memfit/schema.py

One struct of the engine is one record (a frozen dataclass), with its documentation; a list of words
is a ``Literal``; a struct that comes in kinds (an action of a plan) is a union of one record for
each kind, told apart by ``kind``.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memfit import _native

ROOT = Path(__file__).parents[2]
WRITTEN = ROOT / "python" / "memfit" / "schema.py"

HEAD = '''"""The answers of the engine as Python has them, made from its JSON Schema: do not edit.

Written by ``tests/schema/python_types.py --write``; a test compares it with the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

from memfit.records import record
'''

SCALARS = {"integer": "int", "number": "float", "string": "str", "boolean": "bool"}
WIDTH = 100

Schema = dict[str, Any]


def module() -> str:
    """The text of the module."""
    definitions: dict[str, Schema] = _native.schema()["$defs"]
    texts = [HEAD]
    # A name for a list is looked up when the module is read: those come last.
    for name in sorted(definitions, key=lambda it: (definitions[it].get("type") == "array", it)):
        schema = definitions[name]
        if words := _words(schema):
            texts.append(_literal(name, schema, words))
        elif "oneOf" in schema:
            texts.append(_union(name, schema))
        elif schema["type"] == "object":
            texts.append(_dataclass(name, schema, _fields(schema)))
        elif schema["type"] == "array":
            texts.append(f"{name}: TypeAlias = {_type(schema)}\n{_docstring(schema, '')}")
    return _formatted("\n\n".join(texts))


def _words(schema: Schema) -> list[str]:
    """The words of an enumeration; none for anything else."""
    if "enum" in schema:
        return list(schema["enum"])
    kinds = schema.get("oneOf", [])
    if kinds and all("const" in kind for kind in kinds):
        return [kind["const"] for kind in kinds]
    return []


def _literal(name: str, schema: Schema, words: list[str]) -> str:
    said = ", ".join(f'"{word}"' for word in words)
    meanings = [
        f"- ``{kind['const']}``: {_prose(kind['description'])}"
        for kind in schema.get("oneOf", [])
        if "description" in kind
    ]
    return f"{name} = Literal[{said}]\n{_docstring(schema, '', meanings)}"


def _union(name: str, schema: Schema) -> str:
    """A dataclass for each kind, and the name of all of them."""
    common = list(_fields(schema))
    texts, members = [], []
    for kind in schema["oneOf"]:
        tag = kind["properties"]["kind"]["const"]
        member = "".join(word.capitalize() for word in tag.split("_")) + name
        own = [field for field in _fields(kind) if field[0] != "kind"]
        tagged = ("kind", f'Literal["{tag}"]', "Which technique.")
        texts.append(_dataclass(member, kind, [tagged, *common, *own]))
        members.append(member)
    union = f"{name}: TypeAlias = {' | '.join(members)}\n{_docstring(schema, '')}"
    return "\n\n".join([*texts, union])


def _fields(schema: Schema) -> Iterator[tuple[str, str, str]]:
    """Name, type and meaning of each field; those that may be absent last."""
    properties: dict[str, Schema] = schema.get("properties", {})
    required: list[str] = schema.get("required", [])
    for name in required:
        yield name, _type(properties[name]), properties[name].get("description", "")
    for name in sorted(properties.keys() - set(required)):
        kind = _type(properties[name])
        optional = kind if kind.endswith("| None") else f"{kind} | None"
        yield name, f"{optional} = None", properties[name].get("description", "")


def _type(schema: Schema) -> str:  # noqa: PLR0911 - one line for each form
    """The annotation of a schema."""
    if "$ref" in schema:
        name = str(schema["$ref"]).rsplit("/", 1)[-1]
        target = _native.schema()["$defs"][name]
        is_scalar = target.get("type") in SCALARS and not _words(target)
        return SCALARS[target["type"]] if is_scalar else name
    if "anyOf" in schema:
        return " | ".join(_type(one) for one in schema["anyOf"])
    kind = schema["type"]
    if isinstance(kind, list):
        return " | ".join(_type({**schema, "type": one}) for one in kind)
    if kind == "null":
        return "None"
    if kind == "array":
        if "prefixItems" in schema:
            return f"tuple[{', '.join(_type(one) for one in schema['prefixItems'])}]"
        return f"tuple[{_type(schema['items'])}, ...]"
    if kind == "object":
        return f"Mapping[str, {_type(schema['additionalProperties'])}]"
    return SCALARS[kind]


def _dataclass(name: str, schema: Schema, fields: Any) -> str:
    fields = list(fields)
    said = [f"    {field}: {_prose(meaning)}" for field, _, meaning in fields if meaning]
    meanings = ["Attributes:", *said] if said else []
    lines = [
        "@record",
        f"class {name}:",
        _docstring(schema, "    ", meanings),
        *(f"    {field}: {kind}" for field, kind, _ in fields),
    ]
    return "\n".join(lines) + "\n"


def _docstring(schema: Schema, indent: str, meanings: list[str] | None = None) -> str:
    summary, *more = [_prose(part) for part in schema["description"].split("\n\n")]
    if len(indent) + 3 + len(summary) > WIDTH and ". " in summary:
        summary, rest = summary.split(". ", 1)
        summary, more = f"{summary}.", [rest, *more]
    parts = [_wrapped(summary, indent, first='"""')]
    parts += [_wrapped(part, indent) for part in more]
    if meanings:
        parts.append("\n".join(_wrapped(line, indent, hanging=True) for line in meanings))
    text = "\n\n".join(parts)
    ends_at_once = len(parts) == 1 and "\n" not in text and len(text) + 3 <= WIDTH
    return f'{text}"""' if ends_at_once else f'{text}\n{indent}"""'


def _prose(text: str) -> str:
    """Rust's documentation as Python writes it."""
    text = " ".join(text.split())
    text = re.sub(r"\[(`[^`]+`)\](\([^)]*\))?", r"\1", text)
    text = re.sub(r"`(?:[a-z_]+::)*([^`]+)`", r"``\1``", text).replace("::", ".")
    return text.replace("\\", "\\\\")


def _wrapped(text: str, indent: str, *, first: str = "", hanging: bool = False) -> str:
    """Lines of at most the project's width."""
    lead = len(text) - len(text.lstrip(" "))
    follow = indent + " " * (lead + 4 if hanging else lead)
    lines, line = [], indent + " " * lead + first
    empty = True
    for word in text.split():
        if not empty and len(line) + 1 + len(word) > WIDTH:
            lines.append(line)
            line, empty = follow, True
        line += word if empty else f" {word}"
        empty = False
    return "\n".join([*lines, line])


def _formatted(text: str) -> str:
    ruff = Path(sys.executable).with_name("ruff")
    command = [str(ruff), "format", "--stdin-filename", str(WRITTEN), "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True, cwd=ROOT)
    return done.stdout


def main() -> int:
    """Compare or write; the exit code."""
    text = module()
    if sys.argv[1:] == ["--write"]:
        WRITTEN.write_text(text)
        return 0
    if WRITTEN.read_text() == text:
        return 0
    print("python/memfit/schema.py is not what the engine says: `make docs` writes it")
    return 1


if __name__ == "__main__":
    sys.exit(main())
