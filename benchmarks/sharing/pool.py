"""A pool beside an LRU that loads from disk: 8 models, memory for 3, requests by Zipf's law.

Each model is 16 linear layers of 1024 x 1024 (64 MiB); a request runs one. The LRU keeps
the three models used last and loads the others with `torch.load` or safetensors into a model
built without weights: what people write by hand. All see the same requests, one after another,
in rounds that are interleaved, so that a busy machine slows all.

    .venv/bin/python -m benchmarks.sharing.pool --spill /scratch    # some minutes

Memory is judged by a thread that reads the system's own account. Exits with 1 unless the pool
never exceeds its budget and serves 1.3 times as many requests a second as the faster LRU.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from benchmarks.record import Machine, gib, write_results
from torch import Tensor, nn

import memfit

MODELS, ROOM, LAYERS, WIDTH = 8, 3, 16, 1024
REQUESTS, ROUNDS = 120, 3
BAR = 1.3
MODEL_BYTES = LAYERS * WIDTH * WIDTH * 4
BUDGET = ROOM * MODEL_BYTES
SLACK = 8 << 20
"""What outputs, Python and the allocator may take besides."""

Serve = Callable[[int], Tensor]


def build() -> nn.Module:
    """One of the models."""
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])


def requests() -> list[int]:
    """Which model each request is for: the k-th most wanted with a weight of 1/k."""
    weights = [1 / (rank + 1) for rank in range(MODELS)]
    return random.Random(0).choices(range(MODELS), weights, k=REQUESTS)  # noqa: S311 - a fixed draw


def with_pool(pool: memfit.Pool) -> Serve:
    """Serves by a pool."""

    def serve(number: int) -> Tensor:
        with pool.use(str(number)) as model:
            output: Tensor = model(torch.ones(2, WIDTH))
            return output

    return serve


def with_lru(load: Callable[[int], dict[str, Tensor]]) -> Serve:
    """Serves by loading, keeping the models that were used last."""
    kept: OrderedDict[int, nn.Module] = OrderedDict()

    def serve(number: int) -> Tensor:
        if number not in kept:
            if len(kept) == ROOM:
                kept.popitem(last=False)
            with torch.device("meta"):
                model = build()
            model.load_state_dict(load(number), assign=True)
            kept[number] = model
        kept.move_to_end(number)
        output: Tensor = kept[number](torch.ones(2, WIDTH))
        return output

    return serve


class Judge(threading.Thread):
    """Reads what the process holds in memory, anonymous or of mapped files, as fast as it can."""

    def __init__(self) -> None:
        """Create it; what is there now does not count."""
        super().__init__(daemon=True)
        self.base = self.resident()
        self.peak = 0
        self.done = threading.Event()

    @staticmethod
    def resident() -> int:
        """Bytes in memory, by the system's own account."""
        lines = Path("/proc/self/status").read_text().splitlines()
        wanted = ("RssAnon", "RssFile")
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(wanted))

    def run(self) -> None:
        """Read until told to stop."""
        while not self.done.is_set():
            self.peak = max(self.peak, self.resident() - self.base)
            time.sleep(0.0005)


def timed(serve: Serve, wanted: list[int], expected: dict[int, Tensor]) -> tuple[float, float, int]:
    """Requests a second, CPU seconds a request, most bytes held besides what was there before."""
    judge = Judge()
    judge.start()
    start, cpu = time.perf_counter(), time.process_time()
    with torch.no_grad():
        wrong = [number for number in wanted if not torch.equal(serve(number), expected[number])]
    took, cpu = time.perf_counter() - start, time.process_time() - cpu
    judge.done.set()
    judge.join()
    if wrong:
        message = f"models {sorted(set(wrong))} gave other outputs"
        raise RuntimeError(message)
    return len(wanted) / took, cpu / len(wanted), judge.peak


def measure(folder: Path) -> list[dict[str, Any]]:
    """All ways, interleaved."""
    pool = memfit.Pool(BUDGET, folder / "parked")
    expected: dict[int, Tensor] = {}
    for number in range(MODELS):
        torch.manual_seed(number)
        model = build()
        with torch.no_grad():
            expected[number] = model(torch.ones(2, WIDTH))
        torch.save(model.state_dict(), folder / f"{number}.pt")
        safetensors.torch.save_file(model.state_dict(), folder / f"{number}.safetensors")
        pool.add(str(number), model)
    del model

    def by_torch(number: int) -> dict[str, Tensor]:
        weights: dict[str, Tensor] = torch.load(folder / f"{number}.pt", weights_only=True)
        return weights

    def by_safetensors(number: int) -> dict[str, Tensor]:
        return safetensors.torch.load_file(folder / f"{number}.safetensors")

    ways: dict[str, Callable[[], Serve]] = {
        "pool": lambda: with_pool(pool),
        "LRU, torch.load": lambda: with_lru(by_torch),
        "LRU, safetensors": lambda: with_lru(by_safetensors),
    }
    wanted = requests()
    rates: dict[str, list[float]] = {name: [] for name in ways}
    cpus: dict[str, list[float]] = {name: [] for name in ways}
    peaks = dict.fromkeys(ways, 0)
    for _ in range(ROUNDS):
        for name, way in ways.items():
            # The pool's models that are awake before a round stay its own: they are in its base.
            awake = pool.counted_bytes if name == "pool" else 0
            rate, cpu, peak = timed(way(), wanted, expected)
            rates[name].append(rate)
            cpus[name].append(cpu)
            peaks[name] = max(peaks[name], peak + awake)
    return [
        {
            "way": name,
            "requests_per_second": statistics.median(rates[name]),
            "rounds": rates[name],
            "cpu_seconds_per_request": statistics.median(cpus[name]),
            "peak_bytes": peaks[name],
            "hits": pool.statistics.hits if name == "pool" else None,
        }
        for name in ways
    ]


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--spill", type=Path, help="folder on a disk")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.spill) as folder:
        rows = measure(Path(folder))
    pool, *others = rows
    ratio = pool["requests_per_second"] / max(row["requests_per_second"] for row in others)
    lines = [
        "| way | requests a second | CPU time a request | most bytes in memory | of the budget |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['way']} | {row['requests_per_second']:.1f} "
        f"| {1000 * row['cpu_seconds_per_request']:.0f} ms | {gib(row['peak_bytes'])} "
        f"| {100 * row['peak_bytes'] / BUDGET:.0f} % |"
        for row in rows
    ]
    table = "\n".join([*lines, "", f"The pool against the faster LRU: {ratio:.2f} x."])
    print(table)
    write_results("pool", Machine.here(), rows, table)
    return 0 if pool["peak_bytes"] <= BUDGET + SLACK and ratio >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
