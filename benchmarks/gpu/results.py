"""What a piece found, written after every measure, so that a kill at any moment loses nothing.

Responsible for the file of a piece: its rows, each with a name that is its own, the bars they are
held to, and what was left out and why; and for putting together files of several runs. Not
responsible for tables (:mod:`benchmarks.gpu.page`).
"""

from __future__ import annotations

import datetime as dt
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1

Row = dict[str, Any]
Document = dict[str, Any]


def bar(what: str, *, met: bool, got: str, wanted: str) -> dict[str, Any]:
    """A bar that a row is held to.

    Args:
        what: What is promised.
        met: Whether it is kept.
        got: What was measured, for people.
        wanted: What the bar asks for.
    """
    return {"what": what, "is_met": bool(met), "got": got, "wanted": wanted}


class Results:
    """The results of one piece, and their file."""

    def __init__(
        self, piece: str, folder: Path, machine: Mapping[str, Any], seconds: float
    ) -> None:
        """Begin, without rows; the file is written at the first.

        Args:
            piece: Its name.
            folder: Where its file goes.
            machine: Where the figures come from.
            seconds: How long the piece may take.
        """
        self._began = time.monotonic()
        self._seconds = seconds
        self._path = path_of(folder, piece)
        self._document: Document = {
            "schema_version": SCHEMA_VERSION,
            "piece": piece,
            "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
            "machine": dict(machine),
            "is_complete": False,
            "seconds": 0.0,
            "rows": {},
            "left_out": {},
        }

    @property
    def rows(self) -> Mapping[str, Row]:
        """The rows so far, by name."""
        rows: dict[str, Row] = self._document["rows"]
        return rows

    @property
    def seconds_left(self) -> float:
        """Seconds until the piece has to end."""
        return self._seconds - (time.monotonic() - self._began)

    def put(self, name: str, figures: Mapping[str, Any]) -> None:
        """Add figures to a row and write the file; bars add up."""
        row = self._document["rows"].setdefault(name, {})
        bars = [*row.get("bars", []), *figures.get("bars", [])]
        row.update(figures)
        row["bars"] = bars
        self._write()

    def leave_out(self, name: str, reason: str) -> None:
        """Say why something was not measured."""
        self._document["left_out"][name] = reason
        self._write()

    def fits(self, name: str, seconds: float) -> bool:
        """Whether there is time for a measure; where there is none, that is written down.

        Args:
            name: The measure.
            seconds: What it takes, about.
        """
        if self.seconds_left >= seconds:
            return True
        left = max(self.seconds_left, 0.0)
        self.leave_out(name, f"no time: {left:.0f} s were left of {self._seconds:.0f} s")
        return False

    def complete(self) -> None:
        """All that was to be measured was."""
        self._document["is_complete"] = True
        self._write()

    def _write(self) -> None:
        self._document["seconds"] = time.monotonic() - self._began
        write(self._path, self._document)


def path_of(folder: Path, piece: str) -> Path:
    """The file of a piece."""
    return folder / f"gpu-{piece}.json"


def write(path: Path, document: Document) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_suffix(".half")
    half.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    half.replace(path)


def read(folder: Path) -> list[Document]:
    """The documents of all pieces in a folder.

    Raises:
        ValueError: A file of another version.
    """
    found = []
    for path in sorted(folder.glob("gpu-*.json")):
        document: Document = json.loads(path.read_text(encoding="utf-8"))
        if document.get("schema_version") != SCHEMA_VERSION:
            message = f"`{path}` is of another version: measure again, or remove it"
            raise ValueError(message)
        found.append(document)
    return found


def merge(folder: Path, others: Path) -> list[str]:
    """Take the rows of a folder's files into another's; what was measured last counts.

    Args:
        folder: Whose files get the rows.
        others: Whose files have them.

    Returns:
        The pieces that were merged.

    Raises:
        ValueError: The files are of different machines or versions, or there are none.
    """
    mine = {document["piece"]: document for document in read(folder)} if folder.exists() else {}
    added = read(others)
    if not added:
        message = f"`{others}` holds no results: nothing named `gpu-*.json`"
        raise ValueError(message)
    for document in added:
        _same_machine([*mine.values(), document])
        old = mine.get(document["piece"])
        if old is not None:
            document["rows"] = {**old["rows"], **document["rows"]}
            left = {**old["left_out"], **document["left_out"]}
            document["left_out"] = {k: v for k, v in left.items() if k not in document["rows"]}
            document["seconds"] += old["seconds"]
        write(path_of(folder, document["piece"]), document)
    return [document["piece"] for document in added]


def _same_machine(documents: list[Document]) -> None:
    first = documents[0]
    for document in documents[1:]:
        differs = [
            f"{key}: {first['machine'].get(key)} and {value}"
            for key, value in document["machine"].items()
            if first["machine"].get(key) != value
        ]
        if differs:
            message = (
                f"`{first['piece']}` and `{document['piece']}` were measured in different settings "
                f"({'; '.join(differs)}): keep them in folders of their own"
            )
            raise ValueError(message)


def missed(documents: list[Document]) -> list[str]:
    """Every bar that was missed, as a sentence."""
    return [
        f"{document['piece']}, {name}: {one['what']}: {one['got']}, wanted {one['wanted']}"
        for document in documents
        for name, row in document["rows"].items()
        for one in row.get("bars", [])
        if not one["is_met"]
    ]


def failed(documents: list[Document]) -> list[str]:
    """Every measure that did not come to its end, with why, as a sentence."""
    return [
        f"{document['piece']}, {name}: {row['failed']}"
        for document in documents
        for name, row in document["rows"].items()
        if "failed" in row
    ]
