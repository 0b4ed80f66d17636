"""The tensors of a model's state, each once, and all places that have it.

Responsible for finding them, for putting another tensor where one is, so that what is shared stays
shared, and for which of them torchao's linear layers have alone. Not responsible for what is put
there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn


@dataclass
class Slot:
    """A parameter or module buffer that a state dictionary has, and all places that have it.

    Attributes:
        tensor: It, as built; afterwards as loaded.
        places: Module, attribute and full name of each place.
        source: Its name in the file.
        unquantized_bytes: What it would take unquantised; 0 where it is not quantised.
        reason: Why it is not quantised, as a clause.
    """

    tensor: Tensor
    places: list[tuple[nn.Module, str, str]] = field(default_factory=list)
    source: str = ""
    unquantized_bytes: int = 0
    reason: str = ""

    @property
    def names(self) -> list[str]:
        """Its full names."""
        return [name for _, _, name in self.places]

    def put(self, tensor: Tensor) -> None:
        """Put another tensor in all its places."""
        for module, name, _ in self.places:
            setattr(module, name, tensor)
        self.tensor = tensor

    def why_kept(self) -> str:
        """Why it is not quantised, as a clause; nothing where it is a linear layer's weight."""
        if not isinstance(self.tensor, nn.Parameter):
            return "a module buffer"
        places = [(module, name) for module, name, _ in self.places]
        others = [module for module, name in places if not _is_weight(module, name)]
        if len(others) < len(places) and others:
            return "shared with an `nn.Linear`; quantised, it would be two"
        if others:
            return "a bias" if isinstance(others[0], nn.Linear) else "no `nn.Linear`"
        return "" if self.tensor.numel() else "empty"


def slots_of(model: nn.Module) -> Iterator[Slot]:
    """What a state dictionary of the model has, each tensor once."""
    found: dict[int, Slot] = {}
    for path, module in model.named_modules():
        own: dict[str, Any] = {**module._parameters, **module._buffers}
        for name, tensor in own.items():
            if tensor is None or name in module._non_persistent_buffers_set:
                continue
            full = f"{path}.{name}" if path else name
            found.setdefault(id(tensor), Slot(tensor)).places.append((module, name, full))
    yield from found.values()


def _is_weight(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and name == "weight"
