"""What a person may ask of a plan: how exact, with which techniques, with what place to offload to.

Not responsible for what a technique does nor for how fast a place is
(:mod:`memfit.plan.cost_source`). Imports no torch: a script may set environment variables before it
does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from os import PathLike, fspath
from pathlib import Path
from typing import Self, TypedDict, Unpack, get_args

from memfit.errors import UsageError
from memfit.schema import Kind, Promise

Allowance = Promise | Kind
"""What a person allows: all techniques of a promise, or one by name."""

HOST = "host"
"""The name of the host's memory where a folder could be meant; ``./host`` is a folder."""


def place_of(place: str) -> str:
    """Where a place for what is offloaded is, whatever the working folder becomes.

    Args:
        place: A folder, or :data:`HOST`.

    Returns:
        The folder's whole path, or :data:`HOST`.

    Raises:
        UsageError: There is no such folder.
    """
    if place == HOST:
        return HOST
    folder = Path(place).expanduser().resolve()
    if not folder.is_dir():
        message = f"cannot offload to `{place}`: there is no such folder"
        raise UsageError(f"{message}\nhint: make it, or name another")
    return str(folder)


class OptionKeywords(TypedDict, total=False):
    """The fields of :class:`Options` as keywords."""

    allow: Allowance | Sequence[Allowance]
    own_loop: bool
    forbid: Sequence[Kind]
    keep: Sequence[str]
    offload: str | PathLike[str] | None
    profile: bool
    costs: str | PathLike[str] | None
    gpu: str | None
    time_limit: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a step may be planned.

    Attributes:
        allow: Loosest promise to consider even where a stricter plan fits; or a technique that
            changes numbers by its own name (``"shrink"``); or several of both, in a list or
            between commas as the command line has them.
        own_loop: Only plan what works inside the caller's own loop.
        forbid: Techniques to leave out.
        keep: Modules, as ``named_modules()`` names them, that compute in their own types with
            parameters as they are, where autocast or fewer bits are planned.
        offload: Where activations, optimizer state and parameters may be offloaded to: a folder for
            files, or ``"host"`` for the host's memory (steps on CUDA). ``None`` for nowhere.
        profile: Take op times from one real step; the subject must be a workload.
        costs: Take them from a profile that ``memfit calibrate`` wrote. By default, the one kept
            for this machine if it matches, else a quick measurement.
        gpu: Take them from a GPU's datasheet (``"h100"``), for a step on CUDA.
        time_limit: Answer after about so many seconds with the best plan found; by default the
            search stops by its own count, so that equal inputs give equal plans.
    """

    allow: Allowance | Sequence[Allowance] = "exact"
    own_loop: bool = False
    forbid: Sequence[Kind] = ()
    keep: Sequence[str] = ()
    offload: str | PathLike[str] | None = None
    profile: bool = False
    costs: str | PathLike[str] | None = None
    gpu: str | None = None
    time_limit: float | None = None

    def __post_init__(self) -> None:
        """Refuse what no plan can be made for.

        Raises:
            UsageError: Always with the option's name and what it may be.
        """
        for allowed in self._allowances:
            _one_of("allow", allowed, (*get_args(Promise), *get_args(Kind)))
        if isinstance(self.forbid, str):
            raise UsageError(f"`forbid` is a list of techniques: write `forbid=[{self.forbid!r}]`")
        if isinstance(self.keep, str):
            raise UsageError(f"`keep` is a list of modules: write `keep=[{self.keep!r}]`")
        for kind in self.forbid:
            _one_of("forbid", kind, get_args(Kind))
        if self.profile + (self.costs is not None) + (self.gpu is not None) > 1:
            raise UsageError("op times have one source: give one of `profile`, `costs` and `gpu`")
        limit = self.time_limit
        if limit is not None and not 0 < limit < float("inf"):
            raise UsageError(f"`time_limit={limit}` is no number of seconds")

    @classmethod
    def of(cls, options: Options | None, **keywords: Unpack[OptionKeywords]) -> Self:
        """The options with some of them set by keywords.

        Args:
            options: Those there are; ``None`` for the defaults.
            **keywords: Fields that replace them.

        Raises:
            UsageError: A keyword is no option, or a value cannot be.
        """
        known = [field.name for field in fields(cls)]
        for name in keywords:
            _one_of("option", name, known)
        if options is None:
            return cls(**keywords)
        if not isinstance(options, cls):
            kind = type(options).__name__
            raise UsageError(f"expected a `memfit.Options`, got `{kind}`: name the option")
        return replace(options, **keywords)

    @property
    def _allowances(self) -> Sequence[str]:
        return self.allow.split(",") if isinstance(self.allow, str) else self.allow

    @property
    def promise(self) -> Promise:
        """Loosest promise to consider even where a stricter plan fits."""
        promises: tuple[Promise, ...] = get_args(Promise)
        named = [promise for promise in promises if promise in self._allowances]
        return named[-1] if named else "exact"

    @property
    def allow_kinds(self) -> list[Kind]:
        """Techniques that are allowed by name, whatever their promise."""
        kinds: tuple[Kind, ...] = get_args(Kind)
        return [kind for kind in kinds if kind in self._allowances]

    @property
    def place(self) -> str | None:
        """Where to offload to, as text."""
        return None if self.offload is None else fspath(self.offload)

    @property
    def costs_file(self) -> Path | None:
        """The profile to take op times from."""
        return None if self.costs is None else Path(self.costs)


def _one_of(name: str, given: object, known: Sequence[str]) -> None:
    """Refuse a word that is not one of those known, with the nearest and all of them."""
    if given in known:
        return
    near = get_close_matches(given, known, n=1) if isinstance(given, str) else []
    all_of_them = f"one of {', '.join(known)}"
    hint = f"did you mean `{near[0]}`? It is {all_of_them}" if near else all_of_them
    raise UsageError(f"`{name}` knows no `{given}`\nhint: {hint}")
