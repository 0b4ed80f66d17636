"""Recording what one step does to memory, without running it where that is possible.

``recording`` records a step, ``stage/`` is where it runs, ``record/`` what is noted of it,
``probe/`` what is asked by experiment. ``as_trace`` says a recording as a trace; ``trace_writer``
writes every trace as the engine reads it, that of a compiled step too.
"""

from __future__ import annotations

from memfit.capture.recording import capture, record, record_pair

__all__ = ["capture", "record", "record_pair"]
