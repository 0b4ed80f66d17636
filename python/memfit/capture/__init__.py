"""Recording what one step does to memory, without running it where that is possible.

``recording`` records a step, ``stage/`` is where it runs, ``record/`` what is noted of it,
``probe/`` what is asked by experiment, ``trace_writer`` writes the trace that the engine reads,
``schema`` knows what operators do.
"""

from __future__ import annotations

from memfit.capture.recording import capture, record, record_pair

__all__ = ["capture", "record", "record_pair"]
