"""What the executor remembers of an allocation that is not kept, so that it can be there again.

Responsible for the types: a *state* (an allocation at a version), the *record* of the op that made
it or, if it is stored, how to *fetch* it, and what refers to them. Not responsible for filling them
in (:mod:`memfit.apply.remat.watch`) or for using them (:mod:`memfit.apply.remat.replay`). The rules
are those of ``docs/concepts/transformed-trace.md``.

Who holds whom, which is all there is to memory management here::

    Token, Record.args --> State --> Record (until it ran) --> args: Ref -> State, Pin -> tensor
                             |          Record --weak--> its output States
                             |  or Fetch --> the bytes elsewhere
                             +--> anchor: the materialised tensor, once its record ran

Nothing points back strongly, so a record goes, with its pins, when the last token or record that
needs it goes, and a materialised allocation dies with the last State that stands for it.

A view needs no record: it is a :class:`Geometry` over a state.
"""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.overrides import enable_reentrant_dispatch
from torch.utils._pytree import tree_leaves

from memfit.tensors.shape_saves import blank, blank_like
from memfit.tensors.stand_ins import StandIn
from memfit.tensors.versions import counter_of, version_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memfit.apply.offload.tiers import Parcel
    from memfit.apply.remat.randomness import GeneratorState
    from memfit.tensors.operators import Operator
    from memfit.tensors.shape_saves import ShapeSave


Narrow = Literal["half", "eight_bit"]
"""A form of fewer bits."""
Goal = Literal["offload", Narrow]
"""Where an output goes that comes back without an op that runs again."""

NO_HOME = sys.maxsize
"""A home behind every op of forward: what has none stays once it is there."""


class Geometry(NamedTuple):
    """How a tensor looks at its storage.

    Attributes:
        dtype: Element type.
        offset: Elements from the start of the storage.
        shape: Sizes, outermost first.
        stride: Strides in elements.
        conjugated: The lazy conjugation bit.
        negated: The lazy negation bit.
    """

    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    conjugated: bool
    negated: bool

    @staticmethod
    def of(tensor: Tensor) -> Geometry:
        """The geometry of a strided tensor."""
        return Geometry(
            tensor.dtype,
            int(tensor.storage_offset()),
            tuple(tensor.shape),
            tensor.stride(),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def over(self, anchor: Tensor) -> Tensor:
        """A tensor of this geometry over the storage of ``anchor``; never copies.

        Args:
            anchor: Any strided tensor over the storage; must not require gradients.
        """
        if Geometry.of(anchor) == self:
            return anchor
        with torch._C._DisableTorchDispatch():  # no op of the step, for other modes either
            view = torch.empty(0, dtype=self.dtype, device=anchor.device)
            view.set_(anchor.untyped_storage(), self.offset, self.shape, self.stride)
        if self.conjugated:
            torch._C._set_conj(view, True)  # noqa: FBT003 - takes no keyword
        if self.negated:
            torch._C._set_neg(view, True)  # noqa: FBT003 - takes no keyword
        return view


class State:
    """One dropped allocation at one version, or one stored allocation.

    Attributes:
        producer: The record that makes it, ``None`` once that ran for good; or how to fetch it.
        made_at: Index of the forward op that made the value, as the plan counts them.
        turn: How many ops forward had run by then: modules may run in another order than planned.
        anchor: A tensor over the materialised storage; ``None`` before the record ran, and after a
            replayed in-place op took the storage over.
        readers: Every token and record that ever referred to this state, weakly.
    """

    __slots__ = ("__weakref__", "anchor", "made_at", "producer", "readers", "turn")

    def __init__(self, producer: Record | Fetch, made_at: int, turn: int) -> None:
        """Create the state that ``producer`` makes."""
        self.producer: Record | Fetch | None = producer
        self.made_at = made_at
        self.turn = turn
        self.anchor: Tensor | None = None
        self.readers: list[weakref.ref[Token | Record]] = []

    def read_by(self, reader: Token | Record) -> None:
        """Note that ``reader`` refers to this state."""
        self.readers.append(weakref.ref(reader))

    def read_only_by(self, one: Token | Record) -> bool:
        """Whether no other token, and no other record that has yet to run, refers to this state."""
        for reference in self.readers:
            reader = reference()
            if reader is None or reader is one:
                continue
            if isinstance(reader, Record) and reader.consumed:
                continue
            return False
        return True


@dataclass(slots=True, frozen=True)
class Ref:
    """An argument that is a value of a dropped allocation."""

    state: State
    geometry: Geometry


@dataclass(slots=True)
class Pin:
    """An argument that is not dropped, held until the record ran.

    Attributes:
        tensor: An alias that shares storage and version counter and holds no autograd graph.
        version: The version it must still have at replay; ``None`` when writes do not matter.
        digest: Of memory that other processes may write to, the sum that it must still have.
    """

    tensor: Tensor
    version: int | None
    digest: int | None = None


@dataclass(slots=True, frozen=True)
class ShapeOnly:
    """An argument of which the op reads shape, strides and type but no element: holds no memory.

    Attributes:
        meta: A tensor on the meta device that looks like the argument.
        device: Where the argument was.
    """

    meta: Tensor
    device: torch.device


@dataclass(slots=True)
class Output:
    """What one dropped output of a record must come out as.

    Attributes:
        ordinal: Position among the tensors the op returns; ignored for an op that writes in place.
        state: The state it materialises, weakly: an output nobody refers to is not kept.
        geometry: How the op returned it in forward, checked at replay.
    """

    ordinal: int
    state: weakref.ref[State]
    geometry: Geometry


class Record:
    """One op of forward, kept so that it can run once more.

    Attributes:
        index: Index among the ops of forward, as the plan counts them.
        turn: As of :class:`State`; replays run in this order.
        operator: The op and the facts about it.
        args: Positional arguments; tensors are :class:`Ref`, :class:`Pin` or :class:`ShapeOnly`.
        kwargs: Keyword arguments, likewise.
        states: The dropped states it reads.
        generator: State of the random generator from before the call; ``None`` if not random.
        target: The dropped value it writes in place; ``None`` for an op that creates.
        outputs: The states it makes.
        home: Requests for what ops from this one on made let it pass: it runs for them and stays.
        consumed: Whether it ran for good.
    """

    __slots__ = (
        "__weakref__",
        "args",
        "consumed",
        "generator",
        "home",
        "index",
        "kwargs",
        "operator",
        "outputs",
        "states",
        "target",
        "turn",
    )

    def __init__(self, index: int, operator: Operator, turn: int) -> None:
        """Create an empty record of the op at ``index`` of forward."""
        self.index = index
        self.turn = turn
        self.operator = operator
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        self.states: tuple[State, ...] = ()
        self.generator: GeneratorState | None = None
        self.target: Ref | None = None
        self.outputs: list[Output] = []
        self.home = 0
        self.consumed = False

    def makes(self, output: Output, home: int) -> None:
        """Note a dropped output; the record passes where all of them do."""
        self.outputs.append(output)
        self.home = max(self.home, home)

    def consume(self) -> None:
        """Let go of everything the record holds, because it ran for good."""
        self.consumed = True
        self.args = ()
        self.kwargs = {}
        self.states = ()
        self.generator = None
        self.target = None


class Fetch:
    """How a stored or shrunk allocation comes back.

    Attributes:
        goal: Where it goes.
        ordinal: Position among the tensors that the op returned.
        size_bytes: Size of its storage.
        device: Where it was and will be.
        home: As :attr:`Record.home`.
        parcel: Its bytes elsewhere; ``None`` before they went, and once they are back for good.
        source: The tensor itself, from when a record takes it until it goes out.
        source_version: Version of that.
        is_sent: It has gone out.
        written_to: What to say to whoever asks for it: it was written to on its way out.
        is_ahead: It is there, or coming, and nobody has asked for it yet.
        is_coming: It is on its way back.
        stay: Held, and nothing else: see :class:`~memfit.apply.offload.activations.Stay`.
    """

    __slots__ = (
        "device",
        "goal",
        "home",
        "is_ahead",
        "is_coming",
        "is_sent",
        "ordinal",
        "parcel",
        "size_bytes",
        "source",
        "source_version",
        "stay",
        "written_to",
    )

    def __init__(
        self, goal: Goal, ordinal: int, size_bytes: int, device: torch.device, home: int
    ) -> None:
        """Create one for an allocation that has not gone anywhere."""
        self.goal = goal
        self.ordinal = ordinal
        self.size_bytes = size_bytes
        self.device = device
        self.home = home
        self.parcel: Parcel | None = None
        self.source: Tensor | None = None
        self.source_version = -1
        self.is_sent = False
        self.written_to = ""
        self.is_ahead = False
        self.is_coming = False
        self.stay: object | None = None


class Token(StandIn):
    """What autograd holds in place of a tensor that is not kept; takes no memory.

    Hooks switch autograd's own check for in-place changes off, and whoever else holds the tensor
    may write to it, so its version is kept here.

    Attributes:
        state: What it stands for.
        geometry: How the saved tensor looked at it.
        counter: Shares the saved tensor's version counter and none of its memory; ``None`` for a
            tensor that counts no versions.
        version: Its version when saved.
        shape_save: Set where backward may ask for its shape alone.
        written: Shares its memory, where an op has since written there by another counter, as
            through ``.data``: backward reads what that left. It stays in memory from then on.
    """

    __slots__ = (
        "__weakref__",
        "counter",
        "geometry",
        "shape_save",
        "state",
        "version",
        "written",
    )

    def __init__(self, state: State, tensor: Tensor) -> None:
        """Create a token for what autograd is about to save, and note it with its state."""
        self.state = state
        self.geometry = Geometry.of(tensor)
        self.counter = counter_of(tensor)
        self.version = version_of(tensor)
        self.shape_save: ShapeSave | None = None
        self.written: Tensor | None = None
        state.read_by(self)

    def blank(self) -> Tensor:
        """A tensor with the shape of the saved one, over memory that is never touched."""
        geometry = self.geometry
        return blank(geometry.dtype, geometry.offset, geometry.shape, geometry.stride)

    def let_go(self) -> Tensor | None:
        """Hold the memory no longer, unless another token or a record that has yet to run does.

        Returns:
            What looks like the saved tensor; ``None`` where it is in memory whatever happens.
        """
        if self.written is not None:
            return None
        if self.state.read_only_by(self):
            self.state.anchor = None
        return self.blank()

    def held(self, known: set[int]) -> Iterator[Tensor]:
        """What it is, where that is in memory, and what it is computed again from."""
        if self.written is not None:
            yield self.written
        waiting = [self.state]
        while waiting:
            state = waiting.pop()
            if id(state) in known:
                continue
            known.add(id(state))
            producer = state.producer
            if state.anchor is not None:
                yield state.anchor
            if isinstance(producer, Record) and id(producer) not in known:
                known.add(id(producer))
                arguments = tree_leaves((producer.args, producer.kwargs))
                yield from (it.tensor for it in arguments if isinstance(it, Pin))
                waiting.extend(producer.states)
            elif isinstance(producer, Fetch) and producer.source is not None:
                yield producer.source

    def is_written_to(self, alias: Tensor) -> None:
        """Take note that an op wrote to the saved memory; autograd refuses it where it is counted.

        Args:
            alias: Shares the memory.
        """
        if self.counter is None or version_of(self.counter) == self.version:
            self.written = alias

    def require_unchanged(self) -> None:
        """Refuse what autograd itself would refuse.

        Raises:
            RuntimeError: The saved tensor was written to since.
        """
        if self.counter is not None:
            require_unchanged(self.counter, self.version, list(self.geometry.shape))


@dataclass(slots=True)
class Kept(StandIn):
    """A saved tensor that is not dropped.

    Hooks switch autograd's own check for in-place changes off, so the version is kept here.

    Attributes:
        tensor: The tensor, detached: an output held as it is would keep its own node alive.
            ``None`` once its node has let go of it.
        version: Its version when saved; -1 for a tensor that counts none.
    """

    tensor: Tensor | None
    version: int

    def let_go(self) -> Tensor | None:
        """Hold the tensor no longer.

        Returns:
            What looks like it; ``None`` where it is on another device, and stays.
        """
        if self.tensor is None or self.tensor.device.type != "cpu":
            return None
        looks_alike = blank_like(self.tensor)
        self.tensor = None
        return looks_alike

    def held(self, known: set[int]) -> Iterator[Tensor]:  # noqa: ARG002 - there is but one
        """The tensor."""
        if self.tensor is not None:
            yield self.tensor


def require_unchanged(tensor: Tensor, version: int, shape: list[int]) -> None:
    """Refuse what autograd itself would refuse: a saved tensor that was written to since.

    Args:
        tensor: The saved tensor, or one that shares its version counter.
        version: Its version when it was saved.
        shape: Its shape, for the message.

    Raises:
        RuntimeError: It is at another version.
    """
    if version != version_of(tensor):
        message = (
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: shape {shape} is at version {version_of(tensor)}; expected version "
            f"{version} instead"
        )
        raise RuntimeError(message)


def alias_of(tensor: Tensor) -> Tensor:
    """The same storage and version counter without the autograd graph.

    Below autograd, where a mode runs, ``detach`` would give a version counter of its own; so this
    goes back above it.
    """
    if tensor.is_inference():
        return tensor
    with (
        enable_reentrant_dispatch(),
        torch._C._DisableTorchDispatch(),
        torch.no_grad(),
    ):
        return tensor.detach()
