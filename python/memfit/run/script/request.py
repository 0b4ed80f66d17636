"""What a person asks of ``memfit run`` beside the budget.

Responsible for reading it as the program says it. Imports no torch: a script may set environment
variables before it does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from memfit.options import Options, place_of

OVER_BUDGET = 74
"""What a script exits with that is held to its budget (``--strict``) and would not keep it."""


EQUIVALENT = "--allow equivalent"
"""The option that allows plans which are not bitwise the same."""

APPROXIMATE = "--allow approximate"
"""The option that allows plans which hold numbers in fewer bits."""


@dataclass(frozen=True, slots=True)
class FitRequest:
    """How the training steps of a script shall be fitted.

    Attributes:
        budget: As written.
        options: Which plans are allowed, and where to offload to.
        may_choose_place: Whether memfit may choose a place to offload to where nothing else fits.
        is_strict: Whether to stop the script before the first step that would exceed the budget.
    """

    budget: str
    options: Options = Options()  # noqa: RUF009 - it is frozen
    may_choose_place: bool = False
    is_strict: bool = False

    @classmethod
    def read(cls, said: Mapping[str, Any]) -> Self:
        """The request that the program made.

        Args:
            said: It, by the names of the program's fields.

        Raises:
            UsageError: There is no such folder to offload to.
        """
        offload = said["offload"]
        options = Options(
            allow=(said["allow"], *said["allow_kinds"]),
            forbid=tuple(said["forbid"]),
            # The script may change the working folder.
            offload=None if offload is None else place_of(offload),
        )
        may_choose = said["may_choose_folder"] and offload is None
        return cls(said["budget"], options, may_choose, said["is_strict"])

    def wider(self) -> list[tuple[str, Self]]:
        """Options that were not given, each with the request that has it."""
        found = []
        options = self.options
        if options.promise == "exact":
            wider = replace(options, allow=("equivalent", *options.allow_kinds))
            found.append((EQUIVALENT, replace(self, options=wider)))
        if options.promise != "approximate":
            wider = replace(options, allow=("approximate", *options.allow_kinds))
            found.append((APPROXIMATE, replace(self, options=wider)))
        if options.offload is None and not self.may_choose_place:
            found.append(("without --no-offload", replace(self, may_choose_place=True)))
        if options.forbid:
            without = replace(self, options=replace(options, forbid=()))
            found.append(("without --forbid", without))
        return found
