"""A pool beside an LRU that loads from disk: 8 models, memory for 3, requests by Zipf's law.

Each model is 16 linear layers of 1024 x 1024 (64 MiB); a request runs one. The LRU keeps
the three models used last and loads the others with `torch.load` or safetensors into a model
built without weights: what people write by hand. The pool is measured as it is by default, where
a request waits for its whole model, and with `stream=True`, where it begins meanwhile. All see
the same requests, one after another, in rounds that are interleaved, so that a busy machine slows
all. Beside them all eight models in memory as torch made them, without a budget: no request
waits for anything.

In these rounds the page cache has all files. In later ones it is made to let go, before every
request, of the files of both the pool and the LRU, but for what models in memory use.

    .venv/bin/python -m benchmarks.sharing.pool --spill /scratch    # some minutes

Memory is judged by a thread that reads the system's own account. Exits with 1 unless the pool
never exceeds its budget and, streaming, serves 1.3 times as many requests a second as the faster
LRU, from the disk and with all files in the page cache.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
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
POOL, STREAM = "pool", "pool, streaming"
ALL = "all in memory, without a budget"
COLD = ", from the disk"
MODEL_BYTES = LAYERS * WIDTH * WIDTH * 4
BUDGET = ROOM * MODEL_BYTES
SLACK = 8 << 20
"""What outputs, Python and the allocator may take besides."""


def build() -> nn.Module:
    """One of the models."""
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])


def requests() -> list[int]:
    """Which model each request is for: the k-th most wanted with a weight of 1/k."""
    weights = [1 / (rank + 1) for rank in range(MODELS)]
    return random.Random(0).choices(range(MODELS), weights, k=REQUESTS)  # noqa: S311 - a fixed draw


class Pooled:
    """Serves by a pool."""

    def __init__(self, pool: memfit.Pool) -> None:
        """Create it; hits from before do not count."""
        self.pool = pool
        self.before = pool.statistics.hits

    def __call__(self, number: int) -> Tensor:
        """Serve one request."""
        with self.pool.use(str(number)) as model:
            output: Tensor = model(torch.ones(2, WIDTH))
            return output

    @property
    def hits(self) -> int:
        """Requests whose model was in memory."""
        return self.pool.statistics.hits - self.before


class Loaded:
    """Serves by loading, keeping the models that were used last."""

    def __init__(self, load: Callable[[int], dict[str, Tensor]]) -> None:
        """Create it, with no model."""
        self.load = load
        self.kept: OrderedDict[int, nn.Module] = OrderedDict()
        self.hits = 0

    def __call__(self, number: int) -> Tensor:
        """Serve one request."""
        if number in self.kept:
            self.hits += 1
        else:
            if len(self.kept) == ROOM:
                self.kept.popitem(last=False)
            with torch.device("meta"):
                model = build()
            model.load_state_dict(self.load(number), assign=True)
            self.kept[number] = model
        self.kept.move_to_end(number)
        output: Tensor = self.kept[number](torch.ones(2, WIDTH))
        return output


class Held:
    """Serves from models that are all in memory."""

    def __init__(self, models: list[nn.Module]) -> None:
        """Create it."""
        self.models = models
        self.hits = 0

    def __call__(self, number: int) -> Tensor:
        """Serve one request."""
        self.hits += 1
        output: Tensor = self.models[number](torch.ones(2, WIDTH))
        return output


Serve = Pooled | Loaded | Held


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


def nothing() -> None:
    """Leaves the page cache as it is."""


def let_go(folder: Path) -> None:
    """Makes the page cache let go of all files in a folder, those without a name too."""
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if link.readlink().is_relative_to(folder):
                forget(int(link.name))
    for file in folder.glob("*.*"):
        descriptor = os.open(file, os.O_RDONLY)
        forget(descriptor)
        os.close(descriptor)


def forget(descriptor: int) -> None:
    """Makes the page cache let go of a file, once it is on the disk."""
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def timed(
    serve: Serve, wanted: list[int], expected: dict[int, Tensor], before: Callable[[], None]
) -> tuple[float, float, int]:
    """Requests a second, CPU seconds a request, most bytes held besides what was there before."""
    judge = Judge()
    judge.start()
    took = cpu = 0.0
    wrong = set()
    with torch.no_grad():
        for number in wanted:
            before()
            start, start_cpu = time.perf_counter(), time.process_time()
            output = serve(number)
            took += time.perf_counter() - start
            cpu += time.process_time() - start_cpu
            if not torch.equal(output, expected[number]):
                wrong.add(number)
    judge.done.set()
    judge.join()
    if wrong:
        message = f"models {sorted(wrong)} gave other outputs"
        raise RuntimeError(message)
    return len(wanted) / took, cpu / len(wanted), judge.peak


def measure(folder: Path) -> list[dict[str, Any]]:
    """All ways, interleaved."""
    pools = {
        POOL: memfit.Pool(BUDGET, folder / "parked"),
        STREAM: memfit.Pool(BUDGET, folder / "parked", stream=True),
    }
    expected: dict[int, Tensor] = {}
    held: list[nn.Module] = []
    for number in range(MODELS):
        torch.manual_seed(number)
        model = build()
        with torch.no_grad():
            expected[number] = model(torch.ones(2, WIDTH))
        torch.save(model.state_dict(), folder / f"{number}.pt")
        safetensors.torch.save_file(model.state_dict(), folder / f"{number}.safetensors")
        held.append(copy.deepcopy(model))
        for pool in pools.values():
            pool.add(str(number), copy.deepcopy(model))
    del model

    def by_torch(number: int) -> dict[str, Tensor]:
        weights: dict[str, Tensor] = torch.load(folder / f"{number}.pt", weights_only=True)
        return weights

    def by_safetensors(number: int) -> dict[str, Tensor]:
        return safetensors.torch.load_file(folder / f"{number}.safetensors")

    one: dict[str, Callable[[], Serve]] = {
        **{name: partial(Pooled, pool) for name, pool in pools.items()},
        "LRU, torch.load": lambda: Loaded(by_torch),
        "LRU, safetensors": lambda: Loaded(by_safetensors),
    }
    ways = {
        **{name: (way, False) for name, way in one.items()},
        ALL: (lambda: Held(held), False),
        **{name + COLD: (way, True) for name, way in one.items()},
    }
    wanted = requests()
    rounds: dict[str, list[tuple[float, float, int, int]]] = {name: [] for name in ways}
    for is_cold in (False, True):
        turns = [(name, way) for name, (way, cold) in ways.items() if cold == is_cold] * ROUNDS
        for name, way in turns:
            gc.collect()  # what the last way had is not this one's
            for each, pool in pools.items():
                if each != name.removesuffix(COLD):
                    pool.shrink()  # the machine's memory is no pool's alone
            # Models that are in memory before a round stay the way's own: they are in its base.
            pooled = pools.get(name.removesuffix(COLD))
            awake = 0 if pooled is None else pooled.counted_bytes
            awake = MODELS * MODEL_BYTES if name == ALL else awake
            serve: Serve = way()
            before = partial(let_go, folder) if is_cold else nothing
            rate, cpu, peak = timed(serve, wanted, expected, before)
            rounds[name].append((rate, cpu, peak + awake, serve.hits))
            del serve
    return [
        {
            "way": name,
            "is_cold": is_cold,
            "requests_per_second": statistics.median(rate for rate, *_ in rounds[name]),
            "rounds": [rate for rate, *_ in rounds[name]],
            "cpu_seconds_per_request": statistics.median(cpu for _, cpu, *_ in rounds[name]),
            "peak_bytes": max(peak for *_, peak, _ in rounds[name]),
            "hits": [hits for *_, hits in rounds[name]],
        }
        for name, (_, is_cold) in ways.items()
    ]


def line(row: dict[str, Any]) -> str:
    """A way as a line of the table."""
    return (
        f"| {row['way']} | {row['requests_per_second']:.1f} "
        f"| {1000 * row['cpu_seconds_per_request']:.0f} ms "
        f"| {statistics.median(row['hits']):.0f} of {REQUESTS} | {gib(row['peak_bytes'])} "
        f"| {100 * row['peak_bytes'] / BUDGET:.0f} % |"
    )


def ratio(rows: list[dict[str, Any]], way: str, *, is_cold: bool) -> float:
    """A way's rate against that of the faster LRU."""
    rates = {row["way"]: row["requests_per_second"] for row in rows if row["is_cold"] == is_cold}
    return float(rates[way] / max(rate for name, rate in rates.items() if "LRU" in name))


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--spill", type=Path, help="folder on a disk")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.spill) as folder:
        rows = measure(Path(folder))
    most = ratio(rows, ALL, is_cold=False)
    whole, streaming = (
        [ratio(rows, name, is_cold=False), ratio(rows, name + COLD, is_cold=True)]
        for name in (POOL, STREAM)
    )
    head = [
        (
            "| way | requests a second | CPU time a request | hits | most bytes in memory "
            "| of the budget |"
        ),
        "|---|---|---|---|---|---|",
    ]
    words = (
        "Against the faster LRU, with all files in the page cache, the pool serves "
        f"{whole[0]:.2f} x as many requests, streaming {streaming[0]:.2f} x, where {most:.2f} x is "
        f"what all models in memory would reach; from the disk {whole[1]:.2f} x, streaming "
        f"{streaming[1]:.2f} x."
    )
    table = "\n".join([*head, *map(line, rows), "", words])
    print(table)
    write_results("pool", Machine.here(), rows, table)
    is_within = all(
        row["peak_bytes"] <= BUDGET + SLACK for row in rows if row["way"].startswith(POOL)
    )
    return 0 if is_within and min(streaming) >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
