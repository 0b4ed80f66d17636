"""One storage with parameters in it, which goes elsewhere and comes back.

Responsible for its memory and its bytes: letting go, sending, fetching, waiting, and whether
somebody else may see them; and for finding the storages of a model. Not responsible for when
(:mod:`memfit.apply.offload.parameters`), nor for moving bytes
(:mod:`memfit.apply.offload.tiers`).
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from memfit.apply.offload.mapped import is_lent
from memfit.errors import OffloadError, UsageError
from memfit.tensors.storage import has_others, is_fixed
from memfit.torch_versions import allow_reads, forbid_reads

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from memfit.apply.offload.tiers import Parcel, Tier


@dataclass(slots=True)
class ParameterStorage:
    """One storage with parameters in it.

    Each note of what is true is written down before it can become false, so that an interrupt
    between any two lines loses nothing.

    Attributes:
        name: Name of the parameter, for people.
        tensors: All parameters in it.
        storage: The storage.
        size_bytes: Its bytes when they are there.
        is_own: Whether its memory was torch's own, and could be let go.
        parcel: Its bytes elsewhere; ``None`` where they never went.
        is_here: Whether its memory is there, if its bytes are perhaps still coming.
        is_changed: Whether the parcel, if any, is not what the storage has.
        is_outgoing: Whether the parcel's source must stay as it is, for it is still being written.
        is_coming: Whether the parcel is on its way into the storage.
        is_begun: Whether that has begun, as far as is known.
        is_held: Whether it stays until the next step, for somebody else may see its memory.
        readers: How many other threads use it now.
    """

    name: str
    tensors: list[Tensor]
    storage: torch.UntypedStorage
    size_bytes: int
    is_own: bool
    parcel: Parcel | None = None
    is_here: bool = True
    is_changed: bool = True
    is_outgoing: bool = False
    is_coming: bool = False
    is_begun: bool = False
    is_held: bool = False
    readers: int = 0

    def begin(self) -> None:
        """Begin to have it in memory.

        Raises:
            OffloadError: It cannot be fetched. It is still elsewhere.
        """
        self.is_begun = False
        self.is_coming = self.is_here = True
        try:
            self._begin()
        except Exception:
            self.let_go()
            self.is_coming = False
            raise

    def _begin(self) -> None:
        assert self.parcel is not None
        with contextlib.suppress(OffloadError):
            self.parcel.wait()  # who began before was interrupted, and its memory must stay
        allow_reads(self.storage)
        if self.storage.nbytes() != self.size_bytes:
            self.storage.resize_(self.size_bytes)
        self.parcel.prefetch(self.bytes())
        self.is_begun = True
        if self.storage.device.type == "cpu":  # a GPU orders its reads after what is coming
            self._forbid()

    def let_go(self) -> None:
        """Let its memory go. Whoever shares the storage gets an error in place of a wrong byte."""
        self.is_here = False
        allow_reads(self.storage)
        self.storage.resize_(0)
        self._forbid()

    def _forbid(self) -> None:
        forbid_reads(self.storage, f"the parameter `{self.name}` is offloaded by memfit's plan")

    def send(self, tier: Tier) -> None:
        """Begin to write it.

        Raises:
            OffloadError: No more can be sent.
        """
        self.parcel = None  # first, so that its place can be used again
        self.is_changed = self.is_outgoing = True
        self.parcel = tier.send(self.bytes())
        self.is_changed = False

    def settle(self) -> None:
        """Wait until it may be let go or written to.

        Raises:
            OffloadError: It could not be written; its bytes are in the storage.
        """
        if not self.is_outgoing:
            return
        try:
            if self.parcel is not None:
                self.parcel.settle()
        except OffloadError:
            self.parcel, self.is_changed, self.is_outgoing = None, True, False
            raise
        self.is_outgoing = False

    def arrive(self) -> None:
        """Wait for what is coming.

        Raises:
            OffloadError: The bytes did not come back as they went.
        """
        if not self.is_coming:
            return
        assert self.parcel is not None
        try:
            if not self.is_begun:
                self._begin()
            self.parcel.wait()
        except OffloadError:
            self.let_go()
            self.is_coming = False
            raise
        allow_reads(self.storage)
        self.is_coming = False

    def stays(self) -> bool:
        """Whether somebody else may see its memory, or it cannot be let go; between steps.

        What was shown to ``numpy``, and is not any more, gets other memory: torch never lets that
        be resized again.
        """
        # Who writes it has the storage as well, and who reads it a tensor in it.
        tensors, objects = len(self.tensors) + self.is_coming, 1 + self.is_outgoing
        if self.readers or has_others(self.storage, tensors, objects):
            return True
        # `dlpack` lends what requires gradients by a tensor of its own, and else the tensor itself.
        if any(is_lent(it) for it in self.tensors if not it.requires_grad):
            return True
        if not self.is_here:
            self._forbid()  # an interrupt may have come between letting go and forbidding
            return False
        if not is_fixed(self.tensors[0]):
            return False
        if not self.is_own or len(self.tensors) > 1 or self.storage.is_shared():
            return True
        tensor, fresh = self.tensors[0], torch.UntypedStorage(self.size_bytes)  # type: ignore[no-untyped-call]
        fresh.copy_(self.storage)
        with torch._C._DisableTorchDispatch(), torch.inference_mode(mode=False):
            shown = torch.empty(0, dtype=tensor.dtype)
            shown.set_(fresh, tensor.storage_offset(), tensor.size(), tensor.stride())
        tensor.data = shown
        self.storage = fresh
        return False

    def bytes(self) -> Tensor:
        """All of the storage, as bytes.

        Somebody may need them in the middle of a forward that is watched: no op of the script's.
        """
        with torch._C._DisableTorchDispatch():
            view = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
            return view.set_(self.storage)


def parameter_storages(model: nn.Module, names: Sequence[str]) -> list[ParameterStorage]:
    """The storages of the named parameters, with all parameters in each."""
    named = dict(model.named_parameters(remove_duplicate=False))
    sharing: dict[int, list[Tensor]] = {}
    for parameter in model.parameters():
        sharing.setdefault(parameter.untyped_storage()._cdata, []).append(parameter)
    items = []
    for name in names:
        parameter = _found(named, name)
        storage = parameter.untyped_storage()
        tensors, is_own = sharing[storage._cdata], storage.resizable()
        items.append(ParameterStorage(name, tensors, storage, storage.nbytes(), is_own))
    return items


def are_same(known: Sequence[ParameterStorage], found: Sequence[ParameterStorage]) -> bool:
    """Whether these are the same parameters, in the same storages."""

    def ids(items: Sequence[ParameterStorage]) -> list[Any]:
        return [(item.storage._cdata, [id(t) for t in item.tensors]) for item in items]

    return ids(known) == ids(found)


def _found(named: Mapping[str, nn.Parameter], name: str) -> nn.Parameter:
    if name not in named:
        message = (
            f"the plan offloads the parameter `{name}`, which the model does not have\n"
            "hint: plan again for this model"
        )
        raise UsageError(message)
    return named[name]


def refuse_fixed(model: nn.Module, names: Sequence[str]) -> None:
    """Refuse, by name, parameters whose memory belongs to somebody else."""
    named = dict(model.named_parameters(remove_duplicate=False))
    for name in names:
        parameter = _found(named, name)
        if parameter.layout is not torch.strided or is_fixed(parameter):
            message = (
                f"the parameter `{name}` lies in memory that cannot be let go: of a file, of an "
                "array, of a parkable model, or shared with other processes\n"
                "hint: plan again with `offload_parameters` forbidden, or copy the parameters: "
                "`p.data = p.data.clone()`"
            )
            raise UsageError(message)
