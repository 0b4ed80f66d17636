"""Park and wake 512 MiB beside importing torch and loading the same weights again.

32 linear layers of 2048 x 2048. Reloading is a new process until every page of the weights is in
memory: import torch, build without weights, load with `torch.load` or safetensors. Waking is one
call. Rounds are interleaved, so that a busy machine slows both; the first output after each is
compared, outside the time.

    .venv/bin/python -m benchmarks.sharing.park --spill /scratch    # a minute or two

Exits with 1 unless the memory given back is within 1 % of the parameters' bytes, waking is five
times faster than the faster way of reloading, and every output has the same bits.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from benchmarks.record import ROOT, Machine, gib, write_results
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


def measure(folder: Path) -> dict[str, Any]:
    """All rounds."""
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
    times: dict[str, list[float]] = {"wake": [], "park": [], **{way: [] for way in WAYS}}
    for _ in range(ROUNDS):
        for way in WAYS:
            times[way].append(seconds_to_reload(way, folder, expected))
        start = time.perf_counter()
        parked.wake()
        times["wake"].append(time.perf_counter() - start)
        if bits(run(model)) != expected:
            raise RuntimeError("the woken model gave another output")
        start = time.perf_counter()
        parked.park()
        times["park"].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "parameter_bytes": size,
        "returned_bytes": returned,
        "first_park_seconds": first_park,
        "park_again_seconds": medians["park"],
        "wake_seconds": medians["wake"],
        "reload_seconds": {way: medians[way] for way in WAYS},
        "wake_ratio": min(medians[way] for way in WAYS) / medians["wake"],
    }


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
        row = measure(Path(folder))
    reloads = ", ".join(f"{way} {took:.2f} s" for way, took in row["reload_seconds"].items())
    table = (
        "| parameters | given back | first park | park again | wake | import and load "
        "| ratio |\n|---|---|---|---|---|---|---|\n"
        f"| {gib(row['parameter_bytes'])} | {gib(row['returned_bytes'])} "
        f"| {row['first_park_seconds']:.2f} s | {row['park_again_seconds']:.2f} s "
        f"| {row['wake_seconds']:.2f} s | {reloads} | {row['wake_ratio']:.1f} x |"
    )
    print(table)
    write_results("park", Machine.here(), [row], table)
    is_returned = abs(row["returned_bytes"] / row["parameter_bytes"] - 1) <= BYTES_BAR
    return 0 if is_returned and row["wake_ratio"] >= TIME_BAR else 1


if __name__ == "__main__":
    sys.exit(main())
