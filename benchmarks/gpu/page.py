"""The page that is made of the results: `YYYY-MM-DD-gpu.md`, written anew after each piece.

Responsible for the head, the order of the pieces, what was missed and what was left out. Not
responsible for the tables: each piece makes its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.gpu import page_parts, results
from benchmarks.gpu.piece import PIECES, page_of
from benchmarks.gpu.results import Document

TITLES = {
    "tests": "Tests that need a GPU",
    "run": "Unmodified scripts",
    "peaks": "Predicted peaks and plans",
    "offload": "Offloading to the host's memory",
    "park": "Parking and pools",
    "guard": "The guard",
    "allocator": "The simulated allocator",
    "compiled": "Compiled steps",
    "costs": "Step times",
}


def write(folder: Path) -> str:
    """Write the page of a folder's results.

    Args:
        folder: Where the files of the pieces are.

    Returns:
        One line for people: where the page is.

    Raises:
        ValueError: There are no results.
    """
    documents = {document["piece"]: document for document in results.read(folder)}
    if not documents:
        message = f"`{folder}` holds no results: nothing named `gpu-*.json`"
        raise ValueError(message)
    date = max(document["date"] for document in documents.values())
    path = folder / f"{date}-gpu.md"
    path.write_text(text(documents), encoding="utf-8")
    return f"{path}: {len(documents)} of {len(PIECES)} pieces"


def text(documents: dict[str, Document]) -> str:
    """The page."""
    parts = ["# On a GPU", _head(next(iter(documents.values()))["machine"])]
    missed = results.missed(list(documents.values()))
    if missed:
        parts += [f"## Missed\n\n{_list(missed)}"]
    else:
        parts += ["Every bar was met."]
    for piece in PIECES:
        if piece in documents:
            parts += _section(piece, documents[piece])
    absent = [piece for piece in PIECES if piece not in documents]
    if absent:
        parts += [f"Not run: {', '.join(absent)}."]
    return "\n\n".join(parts) + "\n"


def _section(piece: str, document: Document) -> list[str]:
    parts = [f"## {TITLES[piece]}", *page_of(piece)(document)]
    failed = results.failed([document])
    if failed:
        parts += [f"Did not come to their end:\n\n{_list(failed)}"]
    if document["left_out"]:
        left = [f"{name}: {reason}" for name, reason in document["left_out"].items()]
        parts += [f"Left out:\n\n{_list(left)}"]
    state = "" if document["is_complete"] else ", ended before it was done"
    return [*parts, f"{document['date']}, {document['seconds']:.0f} s{state}."]


def _head(machine: dict[str, Any]) -> str:
    """Where the figures come from."""
    lines = [
        ["device", f"{machine['device']}, {page_parts.gib(machine['device_bytes'])}"],
        ["driver", machine["driver"] or "none"],
        [
            "torch",
            f"{machine['torch']}, CUDA {machine['cuda'] or 'none'}, cuDNN {machine['cudnn']}",
        ],
        ["memfit", machine["memfit"]],
        ["Python", machine["python"]],
        ["host", f"{machine['cores']} cores of {machine['processor']}"],
    ]
    if machine["is_small"]:
        lines.append(["models", "of rehearsal size: no figure here says anything about speed"])
    width = max(len(value) for _, value in lines)
    rows = [f"| {name.ljust(6)} | {value.ljust(width)} |" for name, value in lines]
    return "\n".join([f"|        | {' ' * width} |", f"| ------ | {'-' * width} |", *rows])


def _list(lines: list[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)
