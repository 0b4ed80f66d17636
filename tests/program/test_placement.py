"""Static placement from Python and from the command line."""

from pathlib import Path

import pytest

import memfit
import program

STEP = {"a": (0, 3, 4), "b": (3, 9, 4), "c": (0, 9, 4), "d": (9, 21, 4), "e": (0, 21, 4)}


def test_allocations_are_placed_without_overlap():
    placed = memfit.place(STEP)
    assert (placed.status, placed.stop_reason) == ("optimal", "proved_optimal")
    assert placed.height == placed.lower_bound == 12
    assert list(placed.offsets) == list(STEP)
    for one, (lower, upper, size) in STEP.items():
        for other, (other_lower, other_upper, other_size) in STEP.items():
            if one < other and lower < other_upper and other_lower < upper:
                first, second = placed.offsets[one], placed.offsets[other]
                assert first + size <= second or second + other_size <= first


def test_the_program_says_the_same(tmp_path: Path):
    rows = [f"{name},{lower},{upper},{size}" for name, (lower, upper, size) in STEP.items()]
    path = tmp_path / "step.csv"
    path.write_text("\n".join(["id,lower,upper,size", *rows]))
    placed = memfit.place(path, alignment=8, threads=1)
    said = program.run("place", str(path), "--minimize", "--alignment", "8", "--format", "json")
    assert said.code == 0
    assert said.json["offsets"] == placed.offsets
    assert said.json["height"] == placed.height == 20


def test_a_capacity_that_is_too_small():
    placed = memfit.place(STEP, capacity=11)
    assert placed.status == "infeasible"
    assert placed.height > 11


def test_what_cannot_be_placed(tmp_path: Path):
    with pytest.raises(memfit.UsageError, match="line 2, column 3: `lower` 3 is not below"):
        memfit.place({"a": (3, 3, 1)})
    with pytest.raises(memfit.UsageError, match="cannot be negative"):
        memfit.place({"a": (0, 3, -1)})
    with pytest.raises(memfit.UsageError, match="is no id"):
        memfit.place({"a,b": (0, 3, 1)})
    with pytest.raises(memfit.UsageError, match="at least 1"):
        memfit.place(STEP, alignment=0)
    with pytest.raises(memfit.UsageError, match="cannot read"):
        memfit.place(tmp_path / "absent.csv")
