"""One list of techniques: the engine's table, and what Python makes of it."""

from __future__ import annotations

import typing

import pytest

from memfit import _native, options
from memfit.apply import executor
from memfit.errors import UsageError


def test_the_engine_plans_what_python_names_and_carries_out():
    planned = set(_native.techniques())
    assert planned == set(typing.get_args(options.Kind))
    assert planned == set(executor.TECHNIQUES)


def test_an_action_is_told_in_the_words_of_the_reports():
    action = {"kind": "micro_batch", "promise": "equivalent", "count": 4, "bytes": 1}
    assert _native.effect(action) == "the batch in 4 pieces"


def test_an_action_that_lacks_its_directions_is_refused():
    action = {"kind": "remat", "promise": "exact", "count": 4, "bytes": 1}
    with pytest.raises(UsageError, match="missing field `remat`"):
        _native.effect(action)
