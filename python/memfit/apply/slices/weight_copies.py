"""The head's weights as they were when its logits were put off.

Logits that are put off may be looked at once their weights have been updated: an accuracy of
``logits`` after ``optimizer.step()``, a list of outputs read at the end. Plain torch has computed
them by then. Responsible for copies of what an update may write, and for telling whether one has.
Not responsible for the logits (:mod:`memfit.apply.slices.deferred`).

Under ``memfit run``, before backward, which updates may follow and may even be inside, the weights
of all logits that the script still holds are copied: into files where there is a place for them, as
a script that keeps them in a variable seldom looks at them. Values are compared, since ``.data`` is
written unseen, and a second backward has to reach the weights themselves as long as nothing has
changed. With ``memfit.fit`` there is no such moment in a loop of one's own: who looks too late gets
an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from weakref import WeakSet

import torch
from torch import Tensor, nn

from memfit.apply.offload.mapped import LEAST_BYTES, bytes_sampled, in_file
from memfit.errors import UsageError
from memfit.tensors.versions import version_of

Linear = tuple[Tensor, Tensor, Tensor | None]
"""Input, weight and bias of a linear layer's call."""


class WeightsBefore:
    """Input, weight and bias of a call of the head that was put off."""

    def __init__(self, linear: Linear, *, copies: bool = False) -> None:
        """Hold them as they are.

        Args:
            linear: The call's input, weight and bias.
            copies: Whether :func:`keep_weights` comes before updates; else who looks after one is
                told.
        """
        self._linear = linear
        self._versions = None if copies else _versions(linear)
        self._copies: tuple[Tensor, Tensor | None] | None = None
        self._samples = _samples(linear)
        if copies:
            _HELD.add(self)

    def linear(self) -> Linear:
        """The call's input, and weight and bias with the values that they had.

        Raises:
            UsageError: They have been written to since, and nothing was copied.
        """
        hidden, weight, bias = self._linear
        are_others = self._copies is None and not _agree(self._samples, _samples(self._linear))
        if are_others or self._versions not in (None, _versions(self._linear)):
            raise UsageError(
                "the logits are computed in slices, and the weights that make them have been "
                "updated since, or their features written to\nhint: look at logits before that, or "
                "plan again with `chunk` forbidden"
            )
        if self._copies is None:
            return self._linear
        weight_then, bias_then = self._copies
        then = _then(weight, weight_then)
        if bias is None or bias_then is None:
            return hidden, then, bias
        return hidden, then, _then(bias, bias_then)

    def to_be_written(self) -> Iterator[Tensor]:
        """What may not be written to before the logits are made."""
        hidden, weight, bias = self._linear
        yield hidden
        if self._copies is None:
            yield weight
            if bias is not None:
                yield bias

    def keep(self, made: dict[int, Tensor], place: str) -> None:
        """Copy what an update may write.

        Args:
            made: Copies so far by the identity of what they are of, added to.
            place: A folder for them; empty for memory.
        """
        _, weight, bias = self._linear
        parameters = [it for it in (weight, bias) if it is not None]
        if self._copies is not None or not any(it.requires_grad for it in parameters):
            return
        for it in parameters:
            if id(it) not in made:
                made[id(it)] = _copy(it, place)
        self._copies = made[id(weight)], made[id(bias)] if bias is not None else None


def _versions(linear: Linear) -> tuple[int, ...]:
    return tuple(version_of(it) for it in linear if it is not None)


def _samples(linear: Linear) -> tuple[bytes, ...]:
    """A few bytes of each, where they are to be had."""
    here = (it is not None and type(it) in _REAL and it.device.type == "cpu" for it in linear)
    return tuple(
        bytes_sampled(it) if may and it is not None else b""
        for it, may in zip(linear, here, strict=True)
    )


_REAL = frozenset({Tensor, nn.Parameter})


def _agree(before: tuple[bytes, ...], now: tuple[bytes, ...]) -> bool:
    """Whether samples agree; that of a tensor outside memory is empty, and agrees with any."""
    return all(a == b or not (a and b) for a, b in zip(before, now, strict=True))


_HELD: WeakSet[WeightsBefore] = WeakSet()


def keep_weights(place: Callable[[], str]) -> None:
    """Copy the weights of all logits that are put off and may still be looked at.

    Args:
        place: Tells a folder for the copies; empty for memory.
    """
    made: dict[int, Tensor] = {}
    for held in list(_HELD):
        held.keep(made, place())


def _then(tensor: Tensor, copy: Tensor) -> Tensor:
    copy = copy.to(tensor.device)
    with torch.no_grad():
        return tensor if torch.equal(tensor, copy) else copy.requires_grad_(tensor.requires_grad)


def _copy(tensor: Tensor, place: str) -> Tensor:
    storage = tensor.untyped_storage()
    here = tensor.device.type == "cpu" and storage.nbytes() >= LEAST_BYTES
    with torch.no_grad():
        if place and here:
            with contextlib.suppress(OSError, RuntimeError), torch._C._DisableTorchDispatch():
                copy = torch.empty(0, dtype=tensor.dtype)
                mapped = in_file(storage, place)
                return copy.set_(mapped, tensor.storage_offset(), tensor.size(), tensor.stride())
        return tensor.detach().clone()  # an op of the script's to plans: one may have to fetch it
