"""Another process on the same device: it holds memory, computes, and says whether all went well.

    python -m benchmarks.gpu.neighbour DEVICE BYTES

It prints ``ready`` once it has its memory and goes on until its standard input ends; then it prints
one line of JSON: ``rounds``, ``wrong`` (results unlike the first) and ``longest_seconds`` of a
round.
"""

from __future__ import annotations

import json
import select
import sys
import time

import torch


def main(kind: str, size_bytes: int) -> int:
    """Compute until told to stop."""
    side = max(64, int((size_bytes / 12) ** 0.5))
    torch.manual_seed(0)
    left, right = (torch.randn(side, side, device=kind) for _ in range(2))
    expected = torch.mm(left, right)
    rounds = wrong = 0
    longest = 0.0
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        began = time.perf_counter()
        wrong += not torch.equal(torch.mm(left, right), expected)
        longest = max(longest, time.perf_counter() - began)
        rounds += 1
    print(json.dumps({"rounds": rounds, "wrong": wrong, "longest_seconds": longest}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
