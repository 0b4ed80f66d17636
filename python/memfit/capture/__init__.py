"""Recording what one step does to memory, without running it where that is possible."""

from __future__ import annotations

from memfit.capture.recording import capture, record, record_pair
from memfit.capture.weightless import weightless

__all__ = ["capture", "record", "record_pair", "weightless"]
