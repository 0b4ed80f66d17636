"""Ends what the tests have started."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from alone import end


@pytest.fixture(autouse=True, scope="session")
def forks() -> Iterator[None]:
    yield
    end()
