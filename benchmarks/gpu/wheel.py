"""The wheel under test, installed into a folder of its own beside the torch that is there.

Responsible for finding it and for installing it without its dependencies. Imports neither torch nor
memfit: it runs before either is there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path


class NoWheelError(Exception):
    """There is no wheel to install; the message says what to do."""


def find(asked: str, folder: Path) -> Path:
    """The wheel that was asked for.

    Args:
        asked: A file, or ``newest`` for the one in ``folder`` that was written last.
        folder: Where wheels are built.

    Raises:
        NoWheelError: There is none.
    """
    if asked != "newest":
        path = Path(asked)
        if not path.is_file():
            message = f"there is no wheel `{path}`: build one with `make wheel`"
            raise NoWheelError(message)
        return path
    wheels = sorted(folder.glob("memfit-*.whl"), key=lambda path: path.stat().st_mtime)
    if not wheels:
        message = f"there is no wheel of memfit in `{folder.name}/`: build one with `make wheel`"
        raise NoWheelError(message)
    return wheels[-1]


def install(wheel: Path, site: Path) -> None:
    """Install a wheel into a folder that is made anew, for ``PYTHONPATH``.

    Args:
        wheel: The file.
        site: The folder.

    Raises:
        NoWheelError: pip refuses it: it is for another Python or system.
    """
    shutil.rmtree(site, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    command += ["--disable-pip-version-check", "--target", str(site), str(wheel)]
    environment = {**os.environ, "PIP_ROOT_USER_ACTION": "ignore"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        message = f"`{wheel}` cannot be installed: {said[-1] if said else 'pip says nothing'}"
        raise NoWheelError(message)
    print(f"{wheel.name} is in {site}", file=sys.stderr)
