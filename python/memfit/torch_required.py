"""The one way to torch: whoever needs it asks here first.

Responsible for refusing a torch that memfit does not know how to work with, in one sentence, before
anything that would fail on it is imported. Not responsible for which versions those are
(:mod:`memfit.torch_versions`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache

from memfit import torch_versions
from memfit.errors import TorchVersionWarning, UsageError


def require_torch(show: Callable[[str], None] | None = None) -> None:
    """Make sure that the installed torch is one that memfit supports.

    Args:
        show: Shows what a person should know of it, each sentence once in a process; by default a
            :class:`~memfit.errors.TorchVersionWarning` does.

    Raises:
        UsageError: There is no torch, or it is too old.
    """
    for remark in _remarks():
        if remark in _said:
            continue
        _said.add(remark)
        if show is None:
            warnings.warn(remark, TorchVersionWarning, stacklevel=3)
        else:
            show(remark)


_said: set[str] = set()


@cache  # for those who ask often; a refusal is an exception, which is not kept
def _remarks() -> tuple[str, ...]:
    why = torch_versions.refusal()
    if why is not None:
        raise UsageError(why)
    return tuple(torch_versions.remarks())
