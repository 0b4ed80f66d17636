"""Which plan a pass of other sizes runs by, and when it is recorded instead."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from memfit.run.script.planned_step import begin_alike, key_of
from memfit.run.script.sizes import RecordedSizes
from memfit.run.script.step_plans import StepPlans


def key(*rows: int, part: str = "") -> Any:
    return ((part, True), *(((size, 8), torch.float32) for size in rows))


def plans(peak_bytes: int, *rows: int, observed_bytes: int = 0) -> StepPlans:
    """A plan for a step of these rows, within 1,000 bytes."""
    found = StepPlans()
    found.add(planned(peak_bytes, *rows, observed_bytes=observed_bytes))
    return found


def planned(peak_bytes: int, *rows: int, observed_bytes: int = 0) -> Any:
    return SimpleNamespace(
        key=key(*rows),
        step=Recording(peak_bytes, foreseen=1 << 40),  # no law
        is_foreseen=False,
        observed_peak_bytes=observed_bytes,
        plan=SimpleNamespace(
            fits=peak_bytes <= 1000,
            budget_bytes=1000,
            planned=SimpleNamespace(predicted_peak_bytes=peak_bytes),
            actions=["remat"],
        ),
    )


@pytest.mark.parametrize(
    ("peak_bytes", "rows", "is_recorded"),
    [
        (900, (100, 100), False),
        (900, (90, 100), False),
        (900, (105, 100), False),  # 992 bytes, if it grows as attention does
        (900, (102, 104), False),
        (900, (106, 100), True),
        (900, (100, 120), True),
        (500, (111, 100), True),
        (1100, (101, 100), True),
    ],
)
def test_a_step_that_is_a_little_larger_is_not_recorded_where_it_has_room(
    peak_bytes, rows, is_recorded
):
    known = plans(peak_bytes, 100, 100)
    assert known.must_record(key(*rows)) is is_recorded


def test_a_call_with_an_input_that_is_differentiated_is_of_another_kind():
    """As of a discriminator whose gradients at real pictures are penalised now and then."""
    model, data = nn.Linear(8, 8), torch.ones(2, 8)
    plain = key_of(model, ((data,), {}))
    asked = key_of(model, ((data.clone().requires_grad_(),), {}))
    assert plain != asked
    assert not begin_alike(plain, asked)
    with torch.no_grad():
        evaluated = [key_of(model, ((it,), {})) for it in (data, data.clone().requires_grad_())]
    assert evaluated[0] == evaluated[1]


def test_a_call_with_another_switch_on_is_of_another_kind():
    """As of a generator that returns its latents where the length of its paths is penalised."""
    model, data = nn.Linear(8, 8), torch.ones(2, 8)

    def key_with(*more: Any, **named: Any) -> Any:
        return key_of(model, ((data, *more), named))

    known = StepPlans()
    known.add(planned(100, 100))
    known.all[0].key = key_with(latents=False)
    assert not known.must_record(key_with(latents=False))
    assert known.must_record(key_with(latents=True))
    assert known.must_record(key_with(*[True]))
    assert key_with(0.5, 3, step=1) == key_with(0.7, 4, step=2), "numbers are no switches"
    with torch.no_grad():
        assert key_with(latents=False) == key_with(latents=True)


def test_another_kind_of_call_is_recorded_where_the_model_runs_in_pieces():
    """As one without labels, now and then, where guidance without a classifier is learnt."""
    known = plans(100, 100, 100)
    assert not known.must_record(key(100))
    (step,) = known
    step.step.way = {"kind": "micro_batch"}
    assert known.must_record(key(100))
    assert not known.must_record(key(90, 90)), "it is cut as well"


def test_what_was_empty_and_another_part_are_recorded():
    assert plans(100, 100, 0).must_record(key(100, 1))
    assert plans(100, 100).must_record(key(120, part="actor"))


@pytest.mark.parametrize(
    ("observed_bytes", "rows", "is_recorded"),
    [(1001, 108, False), (1000, 108, True), (1001, 120, True)],
)
def test_a_little_larger_step_is_not_recorded_again_and_again_above_the_budget(
    observed_bytes, rows, is_recorded
):
    known = plans(990, 100, 100, observed_bytes=observed_bytes)
    assert known.must_record(key(rows, 104)), "it is the second"
    known.add(planned(990, 104, 90, observed_bytes=observed_bytes))
    assert known.must_record(key(rows, 104)) is is_recorded


class Recording:
    """A recorded step that made so much, of which a law says what it makes at other sizes."""

    way: dict[str, Any] | None = None

    def __init__(self, made: int, foreseen: int = 0) -> None:
        self.made, self.foreseen = made, foreseen

    def made_bytes(self) -> int:
        return self.made

    def at_sizes(self, _first: Any, _sizes: Any) -> Recording:
        return Recording(self.foreseen)


@pytest.mark.parametrize(("foreseen", "is_law"), [(1200, True), (1500, True), (4000, False)])
def test_a_step_is_not_foreseen_to_grow_faster_than_attention_does(foreseen, is_law):
    """From 104 rows to 128, 1,000 bytes become 1,515 at most; from 100, 950 become 1,556."""
    sizes: Any = RecordedSizes()
    sizes.add(key(104), Recording(1000))
    sizes.add(key(100), Recording(950, foreseen))
    assert (sizes.foreseen(key(126)) is not None) is is_law
