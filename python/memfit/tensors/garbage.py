"""When Python's cycle collector runs.

Responsible for keeping it out of a step that is watched, as it ends lives at moments of its own
choice, and out of memfit's own work: what it finds is the program's to find. Not responsible for
what is watched.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Keep the cycle collector from ending lives at moments of its own choice."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def collected_once() -> Iterator[None]:
    """Look once at what is made inside, as by large imports: it lives, and is looked at often."""
    enabled = gc.isenabled()
    with no_collection():
        try:
            yield
        finally:
            if enabled:
                gc.collect(1)


@contextlib.contextmanager
def collected_before() -> Iterator[None]:
    """The same, once all garbage is gone.

    What is freed in a step and was garbage before it hides as much of the step's peak.
    """
    gc.collect()
    with no_collection():
        yield
