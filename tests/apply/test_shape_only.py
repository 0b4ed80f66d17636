"""The executor and the engine agree on which ops read nothing but a shape."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from memfit.tensors.operators import SHAPE_ONLY

ENGINE = Path(__file__).parents[2] / "crates/memfit-engine/src/trace/mod.rs"


def test_the_two_lists_are_the_same():
    if not ENGINE.exists():
        pytest.skip("the engine's source is not beside the tests")
    found = re.search(
        r"const SHAPE_ONLY: \[&str; \d+\] = \[(.*?)\];", ENGINE.read_text(), re.DOTALL
    )
    assert found is not None
    assert set(re.findall(r'"(\w+)"', found[1])) == SHAPE_ONLY
