"""Whether a model's call treats the items of its batch apart, so that it may run in pieces.

Responsible for recording the call alone, on fakes and at two batch sizes, and for what follows from
it: the engine says which ops mix items; this file, whether everything that the call returns, writes
and draws belongs to items. Not responsible for running it (:mod:`memfit.apply.pieces.call`) nor
for side effects of the model's code (:mod:`memfit.run.script.plain_code`).

The loss is no part of it: it gets the whole result.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import json
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from memfit._native import Trace
from memfit.apply.pieces.whole_draws import DRAWN_WHOLE
from memfit.apply.proven_ops import DETACH, VARY
from memfit.capture.record.item_positions import size_or_place_used
from memfit.capture.record.recorder import RealStepNeeded
from memfit.capture.recording import record_stage, second_batch_size
from memfit.capture.stage.fake import fake_stage, preserved_random_state
from memfit.errors import MemfitError
from memfit.tensors.garbage import no_collection
from memfit.tensors.gradient_hooks import forward_hooks, gradient_hooks
from memfit.tensors.operators import operator_of
from memfit.tensors.storage import plain_tensors
from memfit.workload import Workload, batch_size

MOST_OPS = 8192
"""Of a forward that is looked at: a recording takes about a millisecond for each."""

LEAST_ITEMS = 4
"""Two pieces of two items: on a batch of one, torch runs other ops."""


_VALUES = (
    Tensor,
    *(type(None), bool, int, float, complex, str, bytes, range, slice, Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
"""What a call is given that it cannot change, or whose copy it gets."""


class ItemsMixedError(Exception):
    """A call that may not run in pieces; the message is the reason, as a clause."""


Look = Callable[[nn.Module, Any], Callable[[], str]]
"""Looks at a model that is about to be called; what it returns looks again, and says as a clause
what the call did besides computing."""


@dataclass(frozen=True, slots=True)
class ItemsApart:
    """A call that may run in pieces.

    Attributes:
        items: Items of the batch that it was recorded with.
        cut: Which of the tensors that it is given are cut, by their places among them.
        draws: For each op that draws random numbers, in order, whether it does for every item.
        ops: Its ops: each its name, a space and its arguments, or that they vary with the batch.
        loss: The place of a loss among the tensors that it returns, and how that reduces over the
            batch; ``None`` where all of them have an entry for each item.
        forward_bytes: Most that forward of the whole call adds to what is there before, if autograd
            held nothing; convolutions are taken to need their operands once more.
        lean_bytes: The same of forward and backward.
        full_bytes: The same with all that autograd holds.
        gradient_bytes: Gradients of parameters, in the last two.
        result_bytes: What the call returns.
    """

    items: int
    cut: tuple[int, ...]
    draws: tuple[bool, ...]
    ops: tuple[str, ...]
    loss: tuple[int, str] | None
    forward_bytes: int
    lean_bytes: int
    full_bytes: int
    gradient_bytes: int
    result_bytes: int

    def action(self, pieces: int) -> dict[str, Any]:
        """The action of a plan that runs the call in pieces.

        Args:
            pieces: How many.
        """
        names = {name: index for index, name in enumerate(dict.fromkeys(self.ops))}
        call: dict[str, Any] = {"cut": list(self.cut), "draws": list(self.draws)}
        if self.loss is not None:
            call["loss"] = {"place": self.loss[0], "reduction": self.loss[1]}
        ops = {
            "names": list(names),
            "forward": [names[op] for op in self.ops],
            "call": call,
        }
        how = {"kind": "micro_batch", "promise": "equivalent", "count": pieces, "bytes": 0}
        return {**how, "micro_batch": ops}


def items_apart(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], look: Look
) -> ItemsApart:
    """What has to be known to run a call in pieces, with gradients or without as they are now.

    Args:
        model: The model; neither it nor a random state changes.
        args: What it is called with.
        kwargs: The same.
        look: Looks what a call does besides computing.

    Raises:
        ItemsMixedError: It may not run so, or nobody can know.
    """
    given = (args, kwargs)
    items = items_to_cut(model, given)
    tensors = [leaf for leaf in tree_flatten(given)[0] if isinstance(leaf, Tensor)]
    cut = [i for i, it in enumerate(tensors) if it.dim() > 0 and it.shape[0] == items]
    first, second, effect = _recorded(model, given, items, look)
    if len(first.returned) != len(second.returned) or first.constants != second.constants:
        raise ItemsMixedError("what it returns is of another kind for another batch size")
    loss = _loss(first, second)
    for place, shapes in enumerate(zip(first.returned, second.returned, strict=True)):
        if loss is None or place != loss[0]:
            _require_items(*shapes, items, second_batch_size(items))
    traced = Trace.from_json(json.dumps(first.trace).encode(), json.dumps(second.trace).encode())
    found = json.loads(traced.json())
    reason = traced.mixed_items()
    if reason is not None:
        raise ItemsMixedError(next(iter(found["meta"]["notes"]), reason))
    root = found["regions"][0]
    ops = found["ops"][root["start"] : root["end"]]
    _refuse_writes(found, ops)
    if told := size_or_place_used(first.trace, second.trace):
        raise ItemsMixedError(told)
    if first.numbers != second.numbers:
        raise ItemsMixedError("it makes a tensor of other numbers for another batch size")
    if any(op["random"] and op["phase"] != "forward" for op in found["ops"]):
        raise ItemsMixedError("it draws its random numbers again in backward, as checkpoints do")
    if effect:
        raise ItemsMixedError(effect)
    return ItemsApart(
        items,
        tuple(cut),
        tuple(_draws(found, ops, items)),
        tuple(_texts(found, ops)),
        loss,
        _growth(found, "forward", held=False),
        _growth(found, "backward", held=False),
        _growth(found, "backward", held=True),
        sum(row["bytes"] for row in found["allocations"] if row["category"] == "gradient"),
        first.result_bytes,
    )


def without_frames(reason: ItemsMixedError, ended: BaseException) -> ItemsMixedError:
    """The same reason without frames: they hold one another, and the batch until it is collected.

    Args:
        reason: Why a call may not run in pieces.
        ended: The error that it led to.
    """
    traceback.clear_frames(reason.__traceback__)
    traceback.clear_frames(ended.__traceback__)
    return type(reason)(*reason.args)


def items_to_cut(model: nn.Module, given: Any) -> int:
    """Items of the batch of a call that may run in pieces, as far as is known without a recording.

    Args:
        model: The model.
        given: What it is called with.

    Raises:
        ItemsMixedError: It may not.
    """
    _refuse_hooks(model)
    _refuse_objects(given)
    items = batch_size(given)
    if items < LEAST_ITEMS:
        raise ItemsMixedError("its batch is too small to be cut")
    return items


def _refuse_objects(given: Any) -> None:
    """A call may change an object that it is given, as a cache keeps keys and values."""
    for leaf in tree_flatten(given)[0]:
        if not isinstance(leaf, _VALUES):
            raise ItemsMixedError(
                f"it is called with a `{type(leaf).__name__}`, which it may change"
            )


@dataclass(slots=True)
class _Recorded:
    """The call at one batch size.

    Attributes:
        trace: Its ops, as JSON.
        returned: Shapes of the tensors that it returned.
        constants: What it returned besides.
        result_bytes: How much the tensors are.
        loss_place: Which of them is the loss; ``None`` for none.
        numbers: What it made tensors of that came from Python.
    """

    trace: dict[str, Any]
    returned: list[tuple[int, ...]]
    constants: list[Any]
    result_bytes: int
    loss_place: int | None
    numbers: list[Any]


class Called:
    """The call as a workload's forward, and as its loss: all that it returns, summed up."""

    def __init__(self, look: Look) -> None:
        """Call nothing yet.

        Args:
            look: Looks what a call does besides computing.
        """
        self.returned: list[tuple[int, ...]] = []
        self.constants: list[Any] = []
        self.result_bytes = 0
        self.loss_place: int | None = None
        self.numbers: list[Any] = []
        self.effect = ""
        self._look = look

    def workload(self, model: nn.Module, given: Any) -> Workload:
        """A step of the call alone, with its backward if gradients are on.

        Args:
            model: The model.
            given: What it is called with.
        """
        loss = self.loss if torch.is_grad_enabled() else None
        return Workload(model, given, loss=loss, forward=self.forward)

    def forward(self, model: nn.Module, batch: Any) -> list[Tensor]:
        """The tensors that the call returns."""
        args, kwargs = batch
        looked = self._look(model, batch)
        try:
            with contextlib.redirect_stdout(io.StringIO()), FewOps() as ops:
                result = model(*args, **kwargs)
        finally:
            self.effect = looked()  # also after an error: a profiler would stay on
        self.numbers = ops.numbers
        leaves = tree_flatten(result)[0]
        other = next((leaf for leaf in leaves if not isinstance(leaf, _KNOWN)), None)
        if other is not None:
            message = f"it returns a `{type(other).__name__}`"
            raise ItemsMixedError(message)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not _memory(tree_flatten(batch)[0]).isdisjoint(_memory(tensors)):
            raise ItemsMixedError("it returns memory that it is given, which would be a copy")
        self.returned = [tuple(tensor.shape) for tensor in tensors]
        self.constants = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
        self.result_bytes = sum(tensor.nbytes for tensor in tensors)
        return tensors

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss among them, or else something that depends on all."""
        tensors = self.forward(model, batch)
        learning = [tensor for tensor in tensors if tensor.requires_grad]
        if not learning:
            raise ItemsMixedError("nothing that it returns depends on parameters")
        losses = [tensor for tensor in learning if tensor.dim() == 0]
        self.loss_place = None
        if len(losses) == 1:
            self.loss_place = next(i for i, tensor in enumerate(tensors) if tensor is losses[0])
            return losses[0]
        return functools.reduce(torch.add, [tensor.sum() for tensor in learning])


def _memory(values: Iterable[Any]) -> set[int]:
    """Which memory the tensors among some values lie in."""
    tensors = (it for it in values if isinstance(it, Tensor) and it.layout is torch.strided)
    return {part.untyped_storage()._cdata for it in tensors for part in plain_tensors(it)}


class FewOps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Ends a forward of more ops than a proof is worth the time of.

    Attributes:
        numbers: What tensors were made of that came from Python, as ``torch.tensor`` makes them.
    """

    def __init__(self) -> None:
        """None has run yet."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers: list[Any] = []
        self._left = MOST_OPS

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one op."""
        operator = operator_of(func)
        if func is torch.ops.aten.lift_fresh.default and type(args[0]) is Tensor:
            with torch._C._DisableTorchDispatch():
                self.numbers.append(args[0].tolist())
        # The others torch calls where an exception would end the process.
        is_counted = operator.counted and operator.name != DETACH
        self._left -= is_counted
        if self._left < 0 and is_counted:
            message = f"its forward runs more than {MOST_OPS} ops"
            raise ItemsMixedError(message)
        return func(*args, **(kwargs or {}))


def _recorded(
    model: nn.Module, given: Any, items: int, look: Look
) -> tuple[_Recorded, _Recorded, str]:
    """The call at two batch sizes, and what it does besides computing."""
    call = Called(look)
    workload = call.workload(model, given)
    other = second_batch_size(items)
    found: list[_Recorded] = []
    try:
        with preserved_random_state(), no_collection():
            stage = fake_stage(workload)
            # What only a first call does happens once anyway: the third is as all that come.
            for size in (items, other, other):
                if len(found) < 2 or call.effect:  # noqa: PLR2004 - sizes
                    trace = record_stage(stage, size, probe=False, updates=False)
                    found.append(
                        _Recorded(
                            trace,
                            call.returned,
                            call.constants,
                            call.result_bytes,
                            call.loss_place,
                            call.numbers,
                        )
                    )
    except (MemfitError, RealStepNeeded) as error:
        if isinstance(error.__cause__, ItemsMixedError):
            raise without_frames(error.__cause__, error) from None
        where = " at another batch size" if found else ""
        message = f"it cannot be recorded on fakes{where} ({error})"
        raise ItemsMixedError(message) from error
    return found[0], found[-1], call.effect


CONVOLUTION = "aten.convolution"
"""Ops that put their operands into another order, or columns: the largest scratch memory."""

_KNOWN = (Tensor, bool, int, float, str, type(None))


def _refuse_hooks(model: nn.Module) -> None:
    """Refuse hooks that would see pieces; the model's own see what is whole."""
    reason = forward_hooks(model, own=False) or gradient_hooks(model)
    if reason is not None:
        raise ItemsMixedError(reason)


def _loss(first: _Recorded, second: _Recorded) -> tuple[int, str] | None:
    """The loss that the call returns, and how it reduces over the batch."""
    kinds = {recorded.trace["meta"]["loss_reduction"] for recorded in (first, second)}
    if first.loss_place is None or first.loss_place != second.loss_place:
        return None
    if len(kinds) > 1 or kinds == {""}:
        raise ItemsMixedError("how the loss that it returns reduces over the batch is not known")
    return first.loss_place, kinds.pop()


def _require_items(one: tuple[int, ...], other: tuple[int, ...], first: int, second: int) -> None:
    """Require of a tensor that it has an entry for each item, along its first dimension."""
    rest_is_same = len(one) == len(other) and one[1:] == other[1:]
    if not rest_is_same or (one[:1], other[:1]) != ((first,), (second,)):
        message = f"it returns a tensor of shape {list(one)}, which has no entry for each item"
        raise ItemsMixedError(message)


def _refuse_writes(trace: dict[str, Any], ops: list[dict[str, Any]]) -> None:
    """Refuse writes to what was there before: they would happen twice."""
    for op in ops:
        for value in op["writes"]:
            allocation = trace["allocations"][trace["values"][value]["allocation"]]
            if allocation["producer"] is None:
                name = trace["strings"][allocation["name"]] or "what it is given"
                message = f"`{trace['strings'][op['name']]}` writes to `{name}`"
                raise ItemsMixedError(message)


def _draws(trace: dict[str, Any], ops: list[dict[str, Any]], items: int) -> list[bool]:
    """Which of the ops that draw random numbers draw for every item."""
    found = []
    for op in ops:
        if not op["random"]:
            continue
        name = trace["strings"][op["name"]]
        values = [trace["values"][value] for value in op["outputs"]]
        batched = [value for value in values if any(value.get("shape_per_item") or [])]
        for value in batched:
            is_first = value["shape"][0] == items and value["shape_per_item"][0] == 1
            if name not in DRAWN_WHOLE or not is_first:
                message = f"`{name}` draws numbers that cannot be drawn for the whole batch"
                raise ItemsMixedError(message)
        found.append(bool(batched))
    return found


def _texts(trace: dict[str, Any], ops: list[dict[str, Any]]) -> list[str]:
    strings = trace["strings"]
    return [
        f"{strings[op['name']]} "
        f"{VARY if op.get('arguments_vary') else strings[op['arguments']]}".rstrip()
        for op in ops
    ]


def _growth(trace: dict[str, Any], last_phase: str, *, held: bool) -> int:
    """Most bytes above what is there at first, with what is held for backward alone or without."""
    rows, ops = trace["allocations"], trace["ops"]
    ranges = [list(row["natural"]) for row in rows]
    for save in trace["saved"] if held else ():
        ranges[trace["values"][save["value"]]["allocation"]].append([save["pack"], save["release"]])
    before = sum(row["bytes"] for row in rows if row["producer"] is None)
    sizes = (row["bytes"] for row in rows)
    alive = alive_bytes(len(ops), zip(sizes, map(_joined, ranges), strict=True))
    during = [
        size + op["moved_bytes"] * trace["strings"][op["name"]].startswith(CONVOLUTION)
        for op, size in zip(ops, alive, strict=True)
        if op["phase"] in ("forward", last_phase)
    ]
    return int(max(during, default=before) - before)


def alive_bytes(ops: int, lives: Iterable[tuple[int, list[list[int]]]]) -> list[int]:
    """Bytes alive during each op.

    Args:
        ops: How many there are.
        lives: Sizes of allocations, each with the ranges between ops in which it lives.
    """
    changes = [0] * (ops + 1)
    for size, spans in lives:
        for start, end in spans:
            changes[start] += size
            changes[end] -= size
    return list(itertools.accumulate(changes[:ops]))


def _joined(spans: list[list[int]]) -> list[list[int]]:
    """Ranges without those that overlap."""
    joined: list[list[int]] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([start, end])
    return joined
