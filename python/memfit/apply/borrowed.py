"""Modules that executors use and do not keep alive."""

from __future__ import annotations

import weakref

from torch import nn


def borrowed(held: weakref.ref[nn.Module]) -> nn.Module:
    """A module, of which the caller's user has a reference.

    Args:
        held: A weak reference to it.
    """
    module = held()
    assert module is not None, "asked for only while its user runs it or takes it back"
    return module
