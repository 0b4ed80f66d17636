"""What the tests of unmodified scripts share: one process that has torch, ended after the last."""

from __future__ import annotations

import pytest
from ran import FORKS


@pytest.fixture(scope="session", autouse=True)
def _end_of_forks():
    yield
    FORKS.end()
