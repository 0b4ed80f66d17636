"""Plans for treatments of a recorded step chosen by hand, with what the engine says of them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from memfit import Trace, _native


@dataclass
class Treated:
    """A recorded step, and what is done to its allocations; homes by allocation."""

    trace: Trace
    drops: dict[int, int | None] = field(default_factory=dict)
    stores: dict[int, int | None] = field(default_factory=dict)
    halves: dict[int, int | None] = field(default_factory=dict)
    eighths: dict[int, int | None] = field(default_factory=dict)
    window_bytes: int = 0

    def evaluate(self) -> dict[str, Any]:
        """What the engine says."""
        request = {
            "drops": list(self.drops.items()),
            "stores": list(self.stores.items()),
            "halves": list(self.halves.items()),
            "eighths": list(self.eighths.items()),
            "window_bytes": self.window_bytes,
        }
        return _native.evaluate(self.trace.native, request)

    def plan(self) -> dict[str, Any]:
        """The plan, watching the whole forward."""
        recorded = json.loads(self.trace.json())
        strings = recorded["strings"]
        names = [strings[op["name"]] for op in recorded["ops"] if op["phase"] == "forward"]
        distinct = sorted(set(names))
        watched = {
            "active": [{"module": "", "call": 0, "start": 0, "end": len(names)}],
            "names": distinct,
            "forward": [distinct.index(name) for name in names],
        }

        def entries(treated: dict[int, int | None]) -> list[dict[str, Any]]:
            return [self._entry(recorded, *it) for it in treated.items()]

        drops, stores = entries(self.drops), entries(self.stores)
        places = {allocation: place for place, allocation in enumerate(self.stores)}
        offload = {
            "tier": "disk",
            "window_bytes": self.window_bytes,
            "stores": stores,
            "order": [places[a] for a in self.evaluate()["fetch_order"]],
            **watched,
        }
        shrink = {"half": entries(self.halves), "eight_bit": entries(self.eighths), **watched}
        action = {"promise": "exact", "count": 1, "bytes": 0}
        actions = []
        if drops:
            actions.append({"kind": "remat", **action, "remat": {"drops": drops, **watched}})
        if stores:
            actions.append({"kind": "offload", **action, "offload": offload})
        if self.halves or self.eighths:
            actions.append({"kind": "shrink", **action, "shrink": shrink})
        return {"actions": actions}

    @staticmethod
    def _entry(recorded: dict[str, Any], allocation: int, home: int | None) -> dict[str, Any]:
        made = recorded["allocations"][allocation]
        outputs = recorded["ops"][made["producer"]]["outputs"]
        values = [recorded["values"][value] for value in outputs]
        output = [value["allocation"] for value in values].index(allocation)
        return {
            "op": made["producer"],
            "output": output,
            "shape": values[output]["shape"],
            "bytes": made["bytes"],
            "module": "",
            "home": home,
        }
