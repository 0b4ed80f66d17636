"""One browser and one set of pages for all tests of the HTML report."""

from __future__ import annotations

from typing import TYPE_CHECKING

import browser as chromium
import pytest
import recording
from reports import Report

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Browser]:
    if chromium.MISSING:
        pytest.skip(chromium.MISSING)
    with chromium.started(tmp_path_factory.mktemp("browser")) as window:
        yield window


@pytest.fixture(scope="session")
def training(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """A few steps with two streams, an annotation and a refused request."""
    made = recording.training()
    start = made.traces[340]["time_us"]
    annotations = [
        {"stage": stage, "name": "Optimizer.step#AdamW.step", "device": 0, "time_us": start + at}
        for stage, at in (("START", 0), ("END", 400))
    ]
    folder = tmp_path_factory.mktemp("training")
    return Report(recording.write(folder / "training.pickle", made, annotations=annotations), made)


@pytest.fixture(scope="session")
def long(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """More events than a page has columns."""
    made = recording.training(steps=190, layers=12)
    folder = tmp_path_factory.mktemp("long")
    return Report(recording.write(folder / "long.pickle", made), made)
