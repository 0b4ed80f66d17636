"""Park and wake 512 MiB beside importing torch and loading the same weights again.

32 linear layers of 2048 x 2048. Reloading is a new process until every page of the weights is in
memory: import torch, build without weights, load with `torch.load` or safetensors. Waking is one
call. Rounds are interleaved, so that a busy machine slows both; the first output after each is
compared, outside the time. Once as the files are in the page cache, and once after it was made to
let go of all of them.

    .venv/bin/python -m benchmarks.sharing.park --spill /scratch    # a minute or two

Exits with 1 unless the memory given back is within 1 % of the parameters' bytes, waking is five
times faster than the faster way of reloading, with all files in the page cache, and every output
has the same bits.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from benchmarks.record import ROOT, Machine, gib, write_results
from benchmarks.sharing.pool import let_go, nothing
from torch import Tensor, nn

import memfit

LAYERS, WIDTH, ROUNDS = 32, 2048, 5
PAGE_BYTES = 4096
WAYS = ("torch.load", "safetensors")
BYTES_BAR, TIME_BAR = 0.01, 5.0


def build() -> nn.Module:
    """The model, without weights under a meta device."""
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])


def run(model: nn.Module) -> Tensor:
    """An output that needs every weight."""
    with torch.no_grad():
        output: Tensor = model(torch.ones(2, WIDTH))
        return output


def reload(way: str, folder: Path) -> None:
    """What a new process does; prints when it had the weights, and the output's bits."""
    with torch.device("meta"):
        model = build()
    if way == "torch.load":
        weights = torch.load(folder / "model.pt", weights_only=True)
    else:
        weights = safetensors.torch.load_file(folder / "model.safetensors")
    model.load_state_dict(weights, assign=True)
    for parameter in model.parameters():
        parameter.detach().view(-1)[:: PAGE_BYTES // parameter.element_size()].sum()
    print(time.monotonic())
    print(bits(run(model)))


def bits(output: Tensor) -> str:
    """An output as text."""
    return hashlib.sha256(output.numpy().tobytes()).hexdigest()


def anonymous_bytes() -> int:
    """Memory of this process that is no file's, by the system's own account."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def seconds_to_reload(way: str, folder: Path, expected: str) -> float:
    """Time until a new process has the weights."""
    command = [sys.executable, "-m", "benchmarks.sharing.park", "--reload", way]
    start = time.monotonic()  # one clock for all processes
    done = subprocess.run(
        [*command, "--spill", str(folder)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded, output = done.stdout.split()
    if output != expected:
        message = f"{way} gave another output"
        raise RuntimeError(message)
    return float(loaded) - start


def measure(folder: Path) -> list[dict[str, Any]]:
    """All rounds, warm and from the disk."""
    torch.manual_seed(0)
    model = build()
    torch.save(model.state_dict(), folder / "model.pt")
    safetensors.torch.save_file(model.state_dict(), folder / "model.safetensors")
    expected = bits(run(model))
    size = sum(parameter.nbytes for parameter in model.parameters())
    parked = memfit.ParkedModel(model, folder)
    awake = anonymous_bytes()
    start = time.perf_counter()
    parked.park()
    first_park = time.perf_counter() - start
    returned = awake - anonymous_bytes()
    rows = []
    for is_cold in (False, True):
        before = partial(let_go, folder) if is_cold else nothing
        medians = rounds(parked, folder, expected, before)
        reloads = {way: medians[way] for way in WAYS}
        row = {
            "is_cold": is_cold,
            "parameter_bytes": size,
            "returned_bytes": returned,
            "first_park_seconds": first_park,
            "park_again_seconds": medians["park"],
            "wake_seconds": medians["wake"],
            "reload_seconds": reloads,
            "wake_ratio": min(reloads.values()) / medians["wake"],
        }
        rows.append(row)
    return rows


def rounds(
    parked: memfit.ParkedModel, folder: Path, expected: str, before: Callable[[], None]
) -> dict[str, float]:
    """Median seconds of reloading, waking and parking again, each after ``before``."""
    times: dict[str, list[float]] = {"wake": [], "park": [], **{way: [] for way in WAYS}}
    for _ in range(ROUNDS):
        for way in WAYS:
            before()
            times[way].append(seconds_to_reload(way, folder, expected))
        before()
        start = time.perf_counter()
        parked.wake()
        times["wake"].append(time.perf_counter() - start)
        if bits(run(parked.model)) != expected:
            raise RuntimeError("the woken model gave another output")
        start = time.perf_counter()
        parked.park()
        times["park"].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def line(row: dict[str, Any]) -> str:
    """A row as a line of the table."""
    reloads = ", ".join(f"{way} {took:.2f} s" for way, took in row["reload_seconds"].items())
    return (
        f"| {'the disk' if row['is_cold'] else 'the page cache'} | {gib(row['parameter_bytes'])} "
        f"| {gib(row['returned_bytes'])} | {row['first_park_seconds']:.2f} s "
        f"| {1000 * row['park_again_seconds']:.1f} ms | {1000 * row['wake_seconds']:.1f} ms "
        f"| {reloads} | {row['wake_ratio']:.1f} x |"
    )


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--spill", type=Path, help="folder on a disk")
    parser.add_argument("--reload", choices=WAYS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.reload:
        reload(arguments.reload, arguments.spill)
        return 0
    with tempfile.TemporaryDirectory(dir=arguments.spill) as folder:
        rows = measure(Path(folder))
    head = [
        (
            "| files in | parameters | given back | first park | park again | wake "
            "| import and load | ratio |"
        ),
        "|---|---|---|---|---|---|---|---|",
    ]
    table = "\n".join([*head, *map(line, rows)])
    print(table)
    write_results("park", Machine.here(), rows, table)
    warm, _ = rows
    is_returned = abs(warm["returned_bytes"] / warm["parameter_bytes"] - 1) <= BYTES_BAR
    return 0 if is_returned and warm["wake_ratio"] >= TIME_BAR else 1


if __name__ == "__main__":
    sys.exit(main())
