"""The head-to-head's verdicts, from rows made by hand."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.planners import points
from benchmarks.planners.judgement import front, is_open, predicted_times, times_at_peers_peaks

Row = dict[str, Any]
MODEL = {"model": "vit", "quick": False, "dropout": False, "bitwise": False, "floor_bytes": 10}


def _peer(budget: float | None, peak: int, ratio: float, error: float = 0.0) -> Row:
    return {
        **MODEL,
        "method": "torch.compile",
        "options": {"budget": budget, "reference": "eager"},
        "peak_bytes": peak,
        "step_ratio": ratio,
        "gradient_error": error,
    }


def _ours(peer: Row, ratio: float, peak: int | None = None) -> Row:
    (point,) = points.duels([peer])
    return {
        **point,
        "peak_bytes": peer["peak_bytes"] if peak is None else peak,
        "step_ratio": 1.0,
        "gradient_error": 0.0,
        "beside_ratio": ratio,
        "beside_ratios": [ratio],
    }


ALONE = _peer(None, 1000, 1.0)
SLOW = _peer(0.9, 1100, 1.25)
SMALL = _peer(0.5, 600, 1.1)
WRONG = _peer(0.1, 400, 1.0, error=0.5)


def test_the_front_leaves_out_what_is_larger_and_slower_and_what_is_wrong() -> None:
    eager = {**ALONE, "method": "eager", "dropout": True, "options": {}}

    assert front([eager, ALONE, SLOW, SMALL, WRONG]) == [ALONE, SMALL]


def test_of_two_alike_one_stays() -> None:
    twin = _peer(0.7, 600, 1.1)

    assert len(front([SMALL, twin])) == 1


def test_other_kinds_of_peers_are_fronts_of_their_own() -> None:
    of_eager = {**MODEL, "method": "every block", "peak_bytes": 500, "step_ratio": 1.0}
    of_eager |= {"gradient_error": 0.0, "dropout": True}

    assert front([of_eager, SMALL]) == [of_eager, SMALL]


def test_every_peer_is_judged_by_the_plan_for_it_or_for_the_one_before_it() -> None:
    rows = [ALONE, SLOW, SMALL, WRONG, _ours(ALONE, 1.01), _ours(SMALL, 1.03)]

    alone, slow, small = times_at_peers_peaks("vit", rows)

    assert (alone.value, alone.met) == (1.01, True)
    assert slow.value is not None
    assert abs(slow.value - 1.01 * 1.0 / 1.25) < 1e-12
    assert slow.met
    assert (small.value, small.met) == (1.03, False)


def test_a_plan_that_was_refused_or_took_more_meets_nothing() -> None:
    refused = {**points.duels([ALONE])[0], "refused": "does not fit"}

    for rows in ([ALONE], [ALONE, refused], [ALONE, _ours(ALONE, 0.5, peak=1001)]):
        (verdict,) = times_at_peers_peaks("vit", rows)
        assert not verdict.met
        assert verdict.value is None


def test_a_median_is_open_until_noise_cannot_decide_it() -> None:
    # All on one side and far from it; all on one side, but near; as many on either side.
    assert not is_open([0.9, 0.95, 0.92])
    assert is_open([1.0, 1.01, 1.0])
    assert is_open([0.9, 1.2] * 10)
    # Of ten, one on the other side is less than one in ten by chance, and three are not.
    assert not is_open([1.0] * 9 + [1.1])
    assert is_open([1.0] * 7 + [1.1] * 3)


def test_steps_are_predicted_at_the_speed_that_eager_has_beside_them() -> None:
    eager = {**ALONE, "method": "eager", "options": {}}
    eager |= {"predicted_seconds": 2.1, "profiled_step_seconds": 2.0}
    plan = _ours(ALONE, 1.0) | {"predicted_seconds": 2.2, "predicted_eager_seconds": 2.0}

    # Of 2.0 s by the profile, in turn with a step that takes as long: 10 % too much, however slow.
    (verdict,) = predicted_times("vit", [eager, plan | {"step_seconds": 3.0}])
    assert verdict.value is not None
    assert abs(verdict.value - 0.1) < 1e-12
    # A profile that was wrong itself is held against steps, not against what was planned with it.
    (verdict,) = predicted_times("vit", [eager | {"profiled_step_seconds": 1.4}, plan])
    assert (verdict.value, verdict.met) == (2.1 / 1.4 - 1, False)


def test_only_all_methods_of_a_kind_make_a_whole_run() -> None:
    every = set(points.METHODS) - {"eager"}

    assert points.kind_of(every) == ""
    assert points.kind_of(every - set(points.COMPILED)) == "eager"
    assert points.kind_of({"torch.compile", "memfit compiled"}) == "compiled"
    for less in ({"torch.compile"}, every - {"selective"}, set()):
        assert points.kind_of(less) is None


def test_a_picture_has_peers_where_they_were_in_turn_with_memfit() -> None:
    plot = pytest.importorskip("benchmarks.planners.plot", reason="needs matplotlib")
    ours = {**_ours(ALONE, 0.8), "step_ratio": 1.2}

    alone, slow, same = plot.measured_in_turn([ALONE, SLOW, ours])

    assert abs(alone["step_ratio"] - 1.5) < 1e-12
    assert (slow, same) == (SLOW, ours)
