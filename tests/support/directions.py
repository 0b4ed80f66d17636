"""Which way imports go."""

from __future__ import annotations

from collections.abc import Mapping


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """The nodes that are left when those that lead to none are taken away, again and again."""
    left = {node: set(targets) for node, targets in graph.items()}
    while True:
        ends = {node for node, targets in left.items() if not targets & left.keys()}
        if not ends:
            return sorted(left)
        for node in ends:
            del left[node]
