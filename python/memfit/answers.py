"""What memfit answers: a trace, a prediction, a plan, an explanation, as objects.

Responsible for reading and saving them and for their attributes. Not responsible for how they come
about (:mod:`memfit.api.fit`, :mod:`memfit.api.explain`) nor for any number in them: the engine
computes those, and the attributes are the fields of its structs under the same names.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

from memfit import _native
from memfit.errors import TraceFileError, UsageError


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
    """A struct of the engine, read from its JSON."""

    def __init__(self, text: str) -> None:
        """Read the answer.

        Args:
            text: The struct as JSON.
        """
        self._text = text
        self._fields = json.loads(text, object_hook=lambda fields: SimpleNamespace(**fields))

    def json(self) -> str:
        """The whole answer as JSON."""
        return self._text

    def as_dict(self) -> dict[str, Any]:
        """The whole answer as plain dictionaries and lists."""
        fields: dict[str, Any] = json.loads(self._text)
        return fields

    def __getattr__(self, name: str) -> Any:
        """A field of the engine's struct."""
        if not name.startswith("_"):
            try:
                return getattr(self._fields, name)
            except AttributeError:
                pass
        message = f"`{type(self).__name__}` has no field `{name}`"
        raise AttributeError(message)

    def __dir__(self) -> list[str]:
        """The fields, for completion."""
        return [*super().__dir__(), *vars(self._fields)]

    def __eq__(self, other: object) -> bool:
        """Whether the other says the same."""
        return isinstance(other, type(self)) and other.json() == self._text

    def __hash__(self) -> int:
        """A hash of what it says."""
        return hash(self._text)


class Prediction(_Answer):
    """What an unplanned step takes.

    ``predicted_peak_bytes``, ``interval_bytes``, ``peak``, ``breakdown``, ``top``, ``timeline``,
    ``phases``, ``largest_batch``, ``devices``: see the JSON reference.
    """

    def __str__(self) -> str:
        """The prediction as ``memfit predict`` prints it."""
        return _native.prediction_text(self._text)


class Plan(_Answer):
    """How to make a step fit.

    ``verdict``, ``budget_bytes``, ``unplanned``, ``planned``, ``minimum_peak_bytes``, ``actions``,
    ``predicted_step_ratio``, ``lower_bound_ratio``, ``refusals``, ``bottleneck``: see the JSON
    reference.
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
        return cls(_native.decode_plan(data))

    @property
    def fits(self) -> bool:
        """Whether the planned step stays within the budget."""
        return bool(self.verdict == "fits")

    @property
    def minimum_budget_bytes(self) -> int:
        """The smallest budget to ask for: the smallest peak found, and what is kept free."""
        return int(self.minimum_peak_bytes + self.margin_bytes)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, whole or not at all.

        Args:
            path: The file; its ending should be ``.memfit``.

        Raises:
            UsageError: The file cannot be written.
        """
        save(path, _native.encode_plan(self._text))

    def __str__(self) -> str:
        """The plan as ``memfit plan`` prints it."""
        return _native.plan_text(self._text)


class Front(_Answer):
    """Step time against peak over all budgets; each point is a plan.

    ``points``, each with ``budget_bytes``, ``predicted_peak_bytes``, ``predicted_step_ratio``,
    ``lower_bound_ratio``, ``class`` and ``actions``; ``unplanned``, ``minimum_peak_bytes``,
    ``bound``: see the JSON reference.
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
        save(path, _native.front_page(self._text, ending == ".svg").encode())

    def __str__(self) -> str:
        """The front as ``memfit plan --pareto`` prints it."""
        return _native.front_text(self._text)


class Explanation(_Answer):
    """What happened in a CUDA memory snapshot.

    ``source``, ``events``, ``problems``, and ``devices``, each with ``peak``, ``owners``,
    ``fragmentation``, ``oom``, ``growth`` and ``counterfactuals``: see the JSON reference.
    """

    def __str__(self) -> str:
        """The explanation as ``memfit explain`` prints it."""
        return _native.explanation_text(self._text)


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
