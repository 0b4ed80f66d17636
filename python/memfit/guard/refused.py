"""From torch's error to one a person can act on.

Responsible for recognising the error of a refused request, and for what
:class:`~memfit.errors.OutOfBudget` says. Not responsible for refusing, nor for who owns a block
(:mod:`memfit.guard.holders`).
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.optim import Optimizer

from memfit import _native
from memfit.errors import Holder, OutOfBudget
from memfit.guard.holders import Block, holders_of
from memfit.track.live_objects import instances

LISTED = 10
"""Holders that a message names."""

_TORCH = re.compile(r"DefaultCPUAllocator: .*tried to allocate (\d+) bytes")
_TRAINED = frozenset({"gradient", "optimizer_state"})
"""Categories that only training has."""

_WORKER = "in DataLoader worker process"


@dataclass(slots=True, frozen=True)
class Refusal:
    """A refused request.

    Attributes:
        requested_bytes: What was asked for.
        in_use_bytes: What was in use.
        budget_bytes: The budget.
        is_by_system: Whether the budget would have let it through and the system did not.
        blocks: What was live: address, bytes and category.
    """

    requested_bytes: int
    in_use_bytes: int
    budget_bytes: int
    is_by_system: bool
    blocks: Sequence[Block]


def out_of_budget(
    error: BaseException, budget_bytes: int, refusals_before: int
) -> OutOfBudget | None:
    """What to raise instead of torch's error; ``None`` where it is about something else.

    Args:
        error: What was raised.
        budget_bytes: The budget, for refusals that another process wrote down.
        refusals_before: Refusals that were there before the budget.
    """
    if not isinstance(error, RuntimeError) or isinstance(error, OutOfBudget):
        return None
    said = _TORCH.search(str(error))
    if said is None:
        return None
    requested_bytes = int(said.group(1))
    refusal = _last() if _native.refusals() > refusals_before else None
    _native.forget_refusal()
    if refusal is not None and refusal.requested_bytes == requested_bytes:
        return error_of(refusal, said.group(), error=error)
    if _WORKER in str(error):
        in_use_bytes = _native.taken_bytes()
        other = Refusal(requested_bytes, in_use_bytes, budget_bytes, False, ())  # noqa: FBT003
        return error_of(other, said.group(), where="in a process of a DataLoader, ")
    return None


def _last() -> Refusal | None:
    last = _native.last_refusal()
    if last is None:
        return None
    return Refusal(
        last["requested_bytes"],
        last["held_bytes"],
        last["budget_bytes"],
        last["is_by_system"],
        [(it["address"], it["bytes"], it["category"]) for it in last["blocks"]],
    )


def error_of(
    refusal: Refusal,
    said: str,
    *,
    error: BaseException | None = None,
    where: str = "",
    device: str = "cpu",
    kind: type[OutOfBudget] = OutOfBudget,
) -> OutOfBudget:
    """The error of a refusal.

    Args:
        refusal: The refusal.
        said: Torch's words.
        error: What was raised, if the functions that it has ended may hold what was live.
        where: What goes before the sentence.
        device: The device.
        kind: The class of the error.
    """
    trace = error.__traceback__ if error is not None else None
    holders, by_category = holders_of(refusal.blocks, list(traceback.walk_tb(trace)))
    hints = _hints(refusal.budget_bytes, by_category)
    return kind(
        _message(refusal, said, where, holders[:LISTED], hints),
        device=device,
        budget_bytes=refusal.budget_bytes,
        in_use_bytes=refusal.in_use_bytes,
        requested_bytes=refusal.requested_bytes,
        by_category=by_category,
        holders=tuple(holders[:LISTED]),
    )


def _message(
    refusal: Refusal, said: str, where: str, holders: Sequence[Holder], hints: Sequence[str]
) -> str:
    who = "the system, not the budget, refused" if refusal.is_by_system else "out of budget"
    requested, in_use = _exact(refusal.requested_bytes), _exact(refusal.in_use_bytes)
    budget = _exact(refusal.budget_bytes)
    lines = [f"{where}{who}: {requested} requested, {in_use} in use, budget {budget}"]
    if holders:
        lines.append("largest holders of what was in use:")
        lines += [_line(holder) for holder in holders]
    lines += [f"hint: {hint}" for hint in hints]
    # Programs that halve their batch on this error know it by torch's words.
    lines.append(f"torch: {said}")
    return "\n".join(lines)


def _hints(budget_bytes: int, by_category: Mapping[str, int]) -> list[str]:
    """What to do next: of training where something trains, else of inference."""
    asked = f"--budget {budget_bytes}"
    training = [
        f"`memfit plan FILE.py:FUNCTION {asked}` finds a way to run a step within it",
        f"`memfit run {asked} SCRIPT.py` plans the training steps of a script",
    ]
    if not _TRAINED.isdisjoint(by_category) or instances(Optimizer):
        return training
    kept_bytes = by_category.get("activation", 0)
    if kept_bytes:
        kept = f"{_native.bytes_text(kept_bytes)} of it are kept for a backward"
        kept = f"{kept}; where none follows, `torch.no_grad()` round the forward keeps none"
        return [kept, *training]
    largest = f"`memfit predict FILE.py:FUNCTION {asked} --largest batch`"
    return [f"{largest} finds the largest batch whose forward fits"]


def _line(holder: Holder) -> str:
    blocks = "1 block" if holder.blocks == 1 else f"{holder.blocks} blocks"
    return f"  {_native.bytes_text(holder.bytes):>10}  {holder.name} ({blocks})"


def _exact(count: int) -> str:
    return f"{_native.bytes_text(count)} ({count} bytes)"
