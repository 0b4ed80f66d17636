"""Which files are Python's own, an installed package's or memfit's, and which are the user's.

Responsible for that question, and for the name of the module that a thing is of. Imports no torch.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

PACKAGE = str(Path(__file__).parent) + "/"
"""Where memfit's own files lie."""

_SCHEMES = ("stdlib", "platstdlib", "purelib", "platlib")
_LIBRARIES = (
    *{str(Path(sysconfig.get_path(name)).resolve()) + "/" for name in _SCHEMES},
    *{sysconfig.get_path(name) + "/" for name in _SCHEMES},
    "<frozen",
    PACKAGE,
)
_FOLDERS = ("/site-packages/", "/dist-packages/")
"""Where packages lie that are installed for one user, with the system or in a folder of choice."""


def is_library(file: str) -> bool:
    """Whether a file is one of Python's own, of an installed package or of memfit.

    Args:
        file: Its path, as code and modules have it.
    """
    return file.startswith(_LIBRARIES) or any(folder in file for folder in _FOLDERS)


def module_name(thing: Any) -> str:
    """The name of the module that a class or function says it is of; empty where it says none.

    A class whose objects say it for themselves, as that of Cython's functions, has a descriptor in
    the place of the name.

    Args:
        thing: The class or function.
    """
    name = getattr(thing, "__module__", None)
    return name if isinstance(name, str) else ""
