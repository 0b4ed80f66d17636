"""What a look at the reach of a function sees."""

from __future__ import annotations

from memfit.capture.record.effects import Look


class ModuleEach:
    """As Cython's functions: each says what module it is of, and their class has no name of one."""

    __module__ = property(lambda self: __name__)

    def __init__(self) -> None:
        self.calls = 0


def test_what_a_class_without_a_modules_name_holds_is_looked_at():
    counter = ModuleEach()

    def counts() -> None:
        counter.calls += 1

    before = Look(counts, ())
    assert not before.difference(Look(counts, ()))
    counts()
    assert before.difference(Look(counts, ()))
