"""The count of CPU tensor memory, held against torch's profiler and under stress."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from memfit import _native
from memfit.measure.peak import measure_peak
from memfit.track import cpu
from memfit.track.cpu import Reading, Window


@pytest.fixture(autouse=True)
def counting() -> None:
    assert cpu.start() is None


def seen(call: Callable[[], object]) -> Reading:
    """What a window round a call sees, above what was live before."""
    before = _native.counted_bytes()
    window = Window()
    call()
    found = window.close()
    assert found is not None
    return replace(
        found,
        current_bytes=found.current_bytes - before,
        peak_bytes=found.peak_bytes - before,
    )


MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "transformer": lambda: (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2),
        torch.randn(4, 32, 64),
    ),
    "convolutions": lambda: (
        nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3)),
        torch.randn(4, 3, 48, 48),
    ),
    "recurrent": lambda: (nn.LSTM(32, 32, 2), torch.randn(8, 4, 32)),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_peak_of_a_step_is_the_profilers_to_the_byte(name: str):
    model, x = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        out = model(x)
        out = out[0] if isinstance(out, tuple) else out
        out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    readings: list[Reading] = []
    truth = measure_peak(lambda: readings.append(seen(step)), [])
    assert truth.peak_bytes > 100_000
    assert readings[0].peak_bytes == truth.peak_bytes
    assert readings[0].current_bytes == truth.left_bytes


def test_threads_lose_no_byte():
    """Every allocation and free of eight threads is counted."""
    rounds, size = 400, 10_000

    def work(keep: list[torch.Tensor]) -> None:
        for i in range(rounds):
            held = [torch.empty(size, dtype=torch.uint8) for _ in range(4)]
            if i == rounds - 1:
                keep.append(held[0])

    kept: list[list[torch.Tensor]] = [[] for _ in range(8)]

    def run() -> None:
        threads = [threading.Thread(target=work, args=(keep,)) for keep in kept]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    reading = seen(run)
    assert reading.allocations == 8 * rounds * 4
    assert reading.current_bytes == 8 * size
    assert 4 * size <= reading.peak_bytes <= 8 * 8 * size


def test_memory_of_others_is_not_counted():
    array = np.zeros(1_000_000, dtype=np.uint8)
    assert seen(lambda: torch.from_numpy(array)).peak_bytes == 0
    shared = torch.zeros(1000).share_memory_()
    assert seen(lambda: shared.add_(1)).current_bytes == 0


def test_freeing_in_another_thread_and_resizing():
    box = [torch.empty(5000, dtype=torch.uint8)]

    def free() -> None:
        thread = threading.Thread(target=box.clear)
        thread.start()
        thread.join()

    assert seen(free).current_bytes == -5000
    tensor = torch.empty(1000, dtype=torch.uint8)
    assert seen(lambda: tensor.resize_(7000)).current_bytes == 6000


def test_a_refused_request_is_remembered():
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        torch.empty(10**15, dtype=torch.uint8)
    assert _native.refused_bytes() == 10**15
    assert _native.uncounted_blocks() == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_counts_on_while_threads_allocate():
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            torch.empty(100)

    threads = [threading.Thread(target=churn) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            child = os.fork()
            if child == 0:
                before = _native.counted_bytes()
                held = torch.empty(3000, dtype=torch.uint8)
                fine = _native.counted_bytes() - before == 3000
                del held
                os._exit(0 if fine and _native.counted_bytes() == before else 1)
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_what_lived_before_the_count_is_known():
    """In a process of its own, where counting begins after the model is there."""
    code = """
import numpy as np, torch
from memfit import _native
from memfit.track import cpu
model = torch.nn.Linear(100, 100)
other = torch.from_numpy(np.zeros(1000))
assert _native.counted_bytes() == 0
assert cpu.start() is None
assert _native.counted_bytes() == 4 * (100 * 100 + 100), _native.counted_bytes()
del other
model = None
assert _native.counted_bytes() == 0, _native.counted_bytes()
assert cpu.start() is None
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_dropped_window_is_closed():
    """An open window is raised at every allocation; ten thousand of them would be felt."""
    for _ in range(10_000):
        Window()
    assert seen(lambda: torch.empty(10)).allocations == 1
