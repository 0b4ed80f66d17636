"""Whether a script keeps its budget, said when it does not and once more at the end.

Responsible for the peak of every stretch of the script, training step or not, for the line that
says that one was over, and for the verdict. Not responsible for holding anything to the budget
(:mod:`memfit.guard`) nor for what a step needs (:mod:`memfit.run.script.loop`).

A stretch goes from the end of a pass to the begin of the next one, or from its begin to its end: no
moment between the first look and the last is in none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from memfit import _native
from memfit.track import cpu, cuda

BETWEEN = "between"
"""Name of the stretches outside passes; the others bear the names of passes' kinds."""

_BEFORE_STEPS = "before the first training step, where memfit plans nothing"
_BY_HAND = "in a step by hand, of tensors in no module: memfit plans the third one at the earliest"
_BETWEEN_STEPS = "between training steps, where memfit plans nothing"


@dataclass(frozen=True, slots=True)
class Over:
    """A stretch above the budget.

    Attributes:
        stretch: What ran.
        peak_bytes: Most bytes live at once in it.
        why: What is known of the cause, as a clause.
        remedy: What would keep the budget.
    """

    stretch: str
    peak_bytes: int
    why: str
    remedy: str


class Peak:
    """Bytes live on a device since it was made."""

    def __init__(self, device: torch.device) -> None:
        """Begin.

        Args:
            device: Where to look.
        """
        self._device = device
        self._window = cuda.Window() if device.type == "cuda" else cpu.Window()

    def so_far(self) -> int:
        """Most bytes live at once since it began."""
        if isinstance(self._window, cuda.Window):
            return int(torch.cuda.max_memory_allocated(self._device))
        reading = self._window.read()
        return reading.peak_bytes if reading is not None else 0

    def close(self) -> int:
        """End it; most bytes live at once since it began."""
        if isinstance(self._window, cuda.Window):
            seen = self._window.close().get(self._device.index or 0)
            return seen.peak["allocated"] if seen is not None else 0
        reading = self._window.close()
        return reading.peak_bytes if reading is not None else 0


class BudgetKept:
    """What is known of a script and its budget.

    Attributes:
        budget_bytes: The budget; 0 while it is a percentage of a step that nobody knows yet.
        worst: The stretch that was furthest above it; ``None`` while all were within.
        peak_bytes: The highest peak of all stretches.
        between_peak_bytes: That of those between passes: no plan of a step lowers it.
    """

    def __init__(self, written: str, say: Callable[[str], None]) -> None:
        """Know the budget, where it is a number of bytes.

        Args:
            written: The budget as the user wrote it.
            say: Shows a line to the user.
        """
        self._is_share = "%" in written
        self.budget_bytes = 0 if self._is_share else _native.parse_budget(written, 0)
        self.worst: Over | None = None
        self.peak_bytes = 0
        self.between_peak_bytes = 0
        self._say = say
        self._said: set[str] = set()
        self._earlier: list[Over] = []
        self._between: Peak | None = None
        self._has_passed = False
        self._of_update = (0, "")
        self._unseen = ""
        self._is_by_hand = False

    def resolve(self, budget_bytes: int) -> None:
        """Know what a percentage comes to, and judge what was before.

        Of several loops each has its share; the script has that of the one that takes most.

        Args:
            budget_bytes: The budget of a loop; 0 while it is not known.
        """
        if not self._is_share or budget_bytes <= self.budget_bytes:
            return
        self.budget_bytes = budget_bytes
        if self.worst is not None and self.worst.peak_bytes <= budget_bytes:
            self.worst = None
        earlier, self._earlier = self._earlier, []
        for stretch in earlier:
            self._judge(stretch)

    def pass_begins(self) -> None:
        """The stretch between passes is over."""
        between, self._between = self._between, None
        if between is None:
            return
        peak, (of_update, optimizer) = between.close(), self._of_update
        where = _BETWEEN_STEPS if self._has_passed else _BEFORE_STEPS
        if self._unseen and not self._has_passed:
            steps = f"in steps of `{self._unseen}`"
            where = f"{steps}, where no call of a model was seen and memfit plans nothing"
        if self._is_by_hand and not self._has_passed:
            where = _BY_HAND
        if of_update == peak:
            where = f"in a step of `{optimizer}`, which no plan knows"
        self.ended(Over(BETWEEN, peak, where, "less held there, or a larger budget"))
        self._has_passed, self._of_update = True, (0, "")

    @contextlib.contextmanager
    def update_of(self, optimizer: Optimizer) -> Iterator[None]:
        """An optimizer steps inside this: a new peak between passes is its own.

        Args:
            optimizer: The optimizer.
        """
        between = self._between
        before = 0 if between is None else between.so_far()
        yield
        if between is not None:
            self._unseen = type(optimizer).__name__
        if between is not None and between is self._between and between.so_far() > before:
            self._of_update = between.so_far(), type(optimizer).__name__

    def backward_by_hand(self) -> None:
        """A backward is about to run that no model leads to, where no optimizer was made."""
        self._is_by_hand = True

    def pass_ended(self, device: torch.device) -> None:
        """A stretch between passes begins.

        Args:
            device: Where the budget is.
        """
        if self._between is None:
            self._between = Peak(device)

    def ended(self, stretch: Over) -> None:
        """Judge a stretch.

        Args:
            stretch: Its peak, and what would be the cause if that is over the budget.
        """
        self.peak_bytes = max(self.peak_bytes, stretch.peak_bytes)
        if stretch.stretch == BETWEEN:
            self.between_peak_bytes = max(self.between_peak_bytes, stretch.peak_bytes)
        if self.budget_bytes:
            self._judge(stretch)
        else:
            self._earlier.append(stretch)

    def _judge(self, stretch: Over) -> None:
        if stretch.peak_bytes <= self.budget_bytes:
            return
        if self.worst is None or stretch.peak_bytes > self.worst.peak_bytes:
            self.worst = stretch
        key = f"{stretch.stretch}: {stretch.why}"
        if key not in self._said:
            self._said.add(key)
            over = _native.bytes_text(stretch.peak_bytes - self.budget_bytes)
            budget = _native.bytes_text(self.budget_bytes)
            self._say(f"over the budget of {budget} by {over}: {stretch.why}")

    def verdict(self) -> dict[str, Any] | None:
        """Whether it was kept, in the program's words; ``None`` where nobody knows its bytes."""
        self.pass_begins()
        if not self.budget_bytes:
            return None
        worst = self.worst
        return {
            "budget_bytes": self.budget_bytes,
            "peak_bytes": self.peak_bytes,
            "kept": worst is None,
            "why": None if worst is None else worst.why,
            "remedy": None if worst is None else worst.remedy,
        }
