"""What memfit answers: a trace, a prediction, a plan, an explanation and more.

Responsible for reading, saving and printing them. Not responsible for their fields
(:mod:`memfit.schema`, made from the engine's structs), nor for how they come about
(:mod:`memfit.api`).
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from memfit import _native, schema
from memfit.errors import TraceFileError, UsageError
from memfit.records import plain, read


def save(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file whole or not at all.

    Raises:
        UsageError: The file cannot be written.
    """
    target = Path(path)
    temporary: str | None = None
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(target)
        temporary = None
    except OSError as error:
        raise UsageError(f"cannot write `{target}`: {error.strerror}") from error
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()


class Trace:
    """One recorded step: what it does to memory, op by op."""

    def __init__(self, native: _native.Trace) -> None:
        """Wrap a checked trace.

        Args:
            native: The engine's trace.
        """
        self._native = native

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Read the bytes of a ``.memfit`` file.

        Args:
            data: The file's bytes.

        Returns:
            The trace.

        Raises:
            TraceFileError: The bytes are no whole, valid trace of a known schema.
        """
        return cls(_native.Trace.decode(data))

    def encode(self) -> bytes:
        """The trace as the bytes of a ``.memfit`` file."""
        return self._native.encode()

    def json(self) -> str:
        """The whole trace as JSON."""
        return self._native.json()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace to a file, whole or not at all.

        Args:
            path: The file; its ending should be ``.memfit``.

        Raises:
            UsageError: The file cannot be written.
        """
        save(path, self.encode())

    @property
    def native(self) -> _native.Trace:
        """The engine's trace, for the rest of this package."""
        return self._native

    def __str__(self) -> str:
        """The trace as ``memfit show`` prints it."""
        return self._native.text()


class _Answer:
    """What all answers can do; the fields are those of the engine's struct."""

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> Self:
        """The answer from the engine's value.

        Args:
            value: The struct's fields by name.
        """
        return read(cls, value)

    def as_dict(self) -> dict[str, Any]:
        """The whole answer as plain dictionaries and lists."""
        fields: dict[str, Any] = plain(self)
        return fields

    def json(self) -> str:
        """The whole answer as JSON."""
        return json.dumps(self.as_dict(), separators=(",", ":"))


@dataclass(frozen=True, kw_only=True)
class Prediction(_Answer, schema.Prediction):
    """What an unplanned step takes; ``print`` shows the report.

    The fields are those of :class:`memfit.schema.Prediction`.
    """

    def __str__(self) -> str:
        """The prediction as ``memfit predict`` prints it."""
        return _native.prediction_text(self.as_dict())


@dataclass(frozen=True, kw_only=True)
class Plan(_Answer, schema.Plan):
    """How to make a step fit; ``print`` shows the report.

    The fields are those of :class:`memfit.schema.Plan`.
    """

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Read the bytes of a ``.memfit`` file.

        Args:
            data: The file's bytes.

        Returns:
            The plan.

        Raises:
            TraceFileError: The bytes are no whole plan of a known schema.
        """
        return cls.of(_native.decode_plan(data))

    @property
    def fits(self) -> bool:
        """Whether the planned step stays within the budget."""
        return self.verdict == "fits"

    @property
    def minimum_budget_bytes(self) -> int:
        """The smallest budget to ask for: the smallest peak found, and what is kept free."""
        return self.minimum_peak_bytes + self.margin_bytes

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, whole or not at all.

        Args:
            path: The file; its ending should be ``.memfit``.

        Raises:
            UsageError: The file cannot be written.
        """
        save(path, _native.encode_plan(self.as_dict()))

    def __str__(self) -> str:
        """The plan as ``memfit plan`` prints it."""
        return _native.plan_text(self.as_dict())


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPeak:
    """What a compiled step is predicted to take; how long it takes is not predicted.

    Attributes:
        predicted_peak_bytes: Peak of allocated bytes.
    """

    predicted_peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class CompiledPlan(_Answer):
    """How to make a compiled step fit.

    Attributes:
        verdict: Whether it does.
        budget_bytes: The budget.
        planned: With the plan.
        actions: What is done, in the words of :class:`Plan`.
        graphs: What is done to each joint graph, in the order of forward.
    """

    verdict: schema.Verdict
    budget_bytes: int
    planned: PlannedPeak
    actions: tuple[schema.CompiledAction, ...]
    graphs: tuple[schema.CompiledGraph, ...]


@dataclass(frozen=True, kw_only=True)
class Front(_Answer, schema.Front):
    """Step time against peak over all budgets; each point is a plan. ``print`` shows the report.

    The fields are those of :class:`memfit.schema.Front`.
    """

    def save(self, path: str | os.PathLike[str]) -> None:
        """Draw the front into a file, whole or not at all.

        Args:
            path: The file: a page when it ends in ``.html``, an image when it ends in ``.svg``.

        Raises:
            UsageError: The ending is another, or the file cannot be written.
        """
        ending = Path(path).suffix.lower()
        if ending not in {".html", ".htm", ".svg"}:
            message = f"cannot tell what to write from `{path}`: write FILE.html or FILE.svg"
            raise UsageError(message)
        save(path, _native.front_page(self.as_dict(), ending == ".svg").encode())

    def __str__(self) -> str:
        """The front as ``memfit plan --pareto`` prints it."""
        return _native.front_text(self.as_dict())


@dataclass(frozen=True, kw_only=True)
class Explanation(_Answer, schema.Explanation):
    """What happened in a CUDA memory snapshot; ``print`` shows the report.

    The fields are those of :class:`memfit.schema.Explanation`.
    """

    def __str__(self) -> str:
        """The explanation as ``memfit explain`` prints it."""
        return _native.explanation_text(self.as_dict())


@dataclass(frozen=True, kw_only=True)
class _Told(_Answer):
    """An answer whose text was made with it."""

    text: str = field(default="", repr=False, compare=False)

    @classmethod
    def told(cls, value: Mapping[str, Any], text: str) -> Self:
        """The answer from the engine's value and its text.

        Args:
            value: The struct's fields by name.
            text: The report.
        """
        return replace(cls.of(value), text=text)

    def as_dict(self) -> dict[str, Any]:
        """The whole answer as plain dictionaries and lists, without the text."""
        fields = super().as_dict()
        del fields["text"]
        return fields

    def __str__(self) -> str:
        """The report as the command prints it."""
        return self.text


@dataclass(frozen=True, kw_only=True)
class OomMessages(_Told, schema.OomMessages):
    """What PyTorch's OOM messages decide; ``print`` shows the report.

    The fields are those of :class:`memfit.schema.OomMessages`.
    """


@dataclass(frozen=True, kw_only=True)
class Verification(_Told, schema.Verification):
    """A plan beside what real steps took; ``print`` shows the report.

    The fields are those of :class:`memfit.schema.Verification`.
    """


@dataclass(frozen=True, kw_only=True)
class Pruning(_Told, schema.Pruning):
    """What was pruned of a model, and what it takes; ``print`` shows the report.

    The fields are those of :class:`memfit.schema.Pruning`.
    """


@dataclass(frozen=True, kw_only=True)
class Replay(_Told, schema.Replay):
    """The requests of a snapshot under other allocator settings; ``print`` shows the report.

    The fields are those of :class:`memfit.schema.Replay`.
    """


@dataclass(frozen=True, kw_only=True)
class Calibration(_Told, schema.Calibration):
    """What ops cost on this machine, kept for plans; ``print`` shows the report.

    The fields are those of :class:`memfit.schema.Calibration`.
    """


def load(path: str | os.PathLike[str]) -> Trace | Plan:
    """Read a saved trace or plan.

    Args:
        path: A file written by ``save`` or ``memfit --save``.

    Returns:
        What the file holds.

    Raises:
        UsageError: The file cannot be read.
        TraceFileError: It is damaged, cut off, or of a later schema.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read `{path}`: {error.strerror}") from error
    try:
        if _native.file_kind(data) == "plan":
            return Plan.decode(data)
        return Trace.decode(data)
    except TraceFileError as error:
        raise TraceFileError(f"cannot read `{path}`: {error}") from error
