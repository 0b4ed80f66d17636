"""Which files are Python's own, an installed package's or memfit's, and which are the user's.

Responsible for that question alone. Imports no torch.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

PACKAGE = str(Path(__file__).parent) + "/"
"""Where memfit's own files lie."""

_SCHEMES = ("stdlib", "platstdlib", "purelib", "platlib")
_LIBRARIES = (
    *{str(Path(sysconfig.get_path(name)).resolve()) + "/" for name in _SCHEMES},
    *{sysconfig.get_path(name) + "/" for name in _SCHEMES},
    "<frozen",
    PACKAGE,
)


def is_library(file: str) -> bool:
    """Whether a file is one of Python's own, of an installed package or of memfit.

    Args:
        file: Its path, as code and modules have it.
    """
    return file.startswith(_LIBRARIES)
