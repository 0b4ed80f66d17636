"""Log calls that speak once in a process, left out of what dynamo traces.

Responsible for the graph breaks that they make: dynamo ends a graph where a logger is called. What
is said once (``warning_once`` and ``info_once``, which Hugging Face's transformers gives every
logger) was said when the step was captured, before anything is compiled; left out, the graph goes
on. Not responsible for other calls of loggers, which speak in every step: they end graphs as ever.
"""

from __future__ import annotations

import contextlib
import logging

from memfit.torch_versions import ignoring_loggers

_ONCE = "_once"


def left_out() -> contextlib.AbstractContextManager[None]:
    """While it lasts, dynamo traces past them."""
    once = {method for name, method in vars(logging.Logger).items() if name.endswith(_ONCE)}
    return ignoring_loggers(once)
