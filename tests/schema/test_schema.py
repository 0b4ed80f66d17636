"""The answers: Python's types are the engine's, and values survive the way there and back."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import typing

import pytest
import python_types
import torch
from torch import nn

import memfit
from memfit import _native, schema
from memfit.records import plain, read


def workload():
    model = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(64, 64), nn.GELU())))
    return memfit.Workload(
        model,
        torch.randn(256, 64),
        lambda net, batch: net(batch).square().mean(),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    )


def test_the_types_are_those_of_the_engine():
    assert python_types.WRITTEN.read_text() == python_types.module(), "`make docs` writes it"


def test_a_plan_is_typed_to_its_last_field_and_back():
    trace = memfit.trace(workload())
    made = memfit.plan(trace, "75%", allow="equivalent")
    (action, *_) = made.actions
    assert isinstance(action, typing.get_args(schema.Action))
    assert action.promise in typing.get_args(schema.Promise)
    again = memfit.Plan.of(made.as_dict())
    assert again == made
    assert hash(again) == hash(made)
    assert _native.encode_plan(made.as_dict()) == _native.encode_plan(again.as_dict())
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.budget_bytes = 1


def test_every_answer_is_the_value_that_it_was_made_from():
    trace = memfit.trace(workload())
    value = _native.predict(trace.native, {"batch": None, "budget": None})
    assert json.dumps(plain(read(schema.Prediction, value))) == json.dumps(value)
    front = memfit.pareto(trace)
    assert memfit.Front.of(front.as_dict()) == front
    assert [point.promise for point in front.points]
    assert "\n" in str(front)


def test_what_may_be_absent_is_left_out_again():
    drop = {"op": 3, "output": 0, "shape": [4, 4], "bytes": 64, "module": "a.b"}
    assert read(schema.Dropped, drop).home is None
    assert plain(read(schema.Dropped, drop)) == drop
    with_home = {**drop, "home": 5}
    assert plain(read(schema.Dropped, with_home)) == with_home


def test_a_record_is_as_a_frozen_dataclass():
    drop = {"op": 3, "output": 0, "shape": (4, 4), "bytes": 64, "module": "a.b"}
    made = schema.Dropped(**drop)
    assert (made, hash(made)) == (schema.Dropped(**drop), hash(schema.Dropped(**drop)))
    other = dataclasses.replace(made, home=5)
    assert (other.home, other.op) == (5, 3)
    assert other != made
    assert pickle.loads(pickle.dumps(made)) == copy.deepcopy(made) == made  # noqa: S301 - its own
    assert repr(made).startswith("Dropped(op=3, output=0,")
    assert not hasattr(made, "__dict__")
    for change in (
        lambda: setattr(made, "op", 4),
        lambda: delattr(made, "op"),
        lambda: setattr(made, "new", 4),
    ):
        with pytest.raises(dataclasses.FrozenInstanceError):
            change()
    for wrong in ({**drop, "new": 1}, {"op": 3}):
        with pytest.raises(TypeError, match="field `"):
            schema.Dropped(**wrong)
