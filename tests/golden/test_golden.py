"""Plans are what they were: a part of what `golden.py` compares, small enough for every run."""

from __future__ import annotations

import json

import pytest
import torch

import golden
from memfit.torch_versions import NEWEST, minor


@pytest.mark.skipif(minor(torch.__version__) != NEWEST, reason="what is kept is of that torch")
@pytest.mark.parametrize("name", ["in place", "inference"])
def test_plans_are_what_they_were(name):
    found, _ = golden.now(name)
    before = json.loads(golden.PLANS.read_text())
    assert found == {asked: kept for asked, kept in before.items() if asked.startswith(f"{name},")}
    assert len({kept["digest"] for kept in found.values()}) > 3


def test_all_models_are_kept():
    before = json.loads(golden.PLANS.read_text())
    names = {asked.partition(",")[0] for asked in before}
    assert names == {*golden.SMALL, *golden.EXAMPLES}
    assert len(before) == len(names) * len(golden.BUDGETS) * 4
