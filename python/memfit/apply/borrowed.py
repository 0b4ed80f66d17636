"""Modules that executors know and do not keep alive."""

from __future__ import annotations

import weakref

from torch import nn


def borrowed(held: weakref.ref[nn.Module]) -> nn.Module:
    """A module that whoever runs it holds.

    Args:
        held: What knows it.
    """
    module = held()
    assert module is not None, "asked for only while it runs, or its user brings it home"
    return module
