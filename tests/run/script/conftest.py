"""What tests of tensors in mapped files share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from memfit.apply.offload import mapped, views
from memfit.options import Options
from memfit.run.script import held_in_files
from memfit.run.script.held_in_files import HeldInFiles
from memfit.run.script.request import FitRequest
from memfit.track import cpu


@pytest.fixture(autouse=True)
def _threads_of_the_tests_wait() -> Iterator[None]:
    """Where tests run in several processes, each has a thread that reads from a pipe."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mapped, "_WAITING", mapped._WAITING | {("gateway_base.py", "read")})
        yield


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HeldInFiles:
    """What is held in files, with no other thread but those that a test makes one of."""
    assert cpu.start() is None
    # Threads that other tests have left keep the memory until the next look.
    monkeypatch.setattr(held_in_files, "is_alone", lambda: True)
    monkeypatch.setattr(views, "is_alone", lambda: True)
    return HeldInFiles(FitRequest("1MiB", Options(offload=str(tmp_path))))
