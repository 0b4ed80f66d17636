"""Seconds of ops by their size, for the calibrated cost model.

Responsible for running a fixed list of ops at sizes from a cache's to beyond it, and for how far
the runs of one size lie apart. Not responsible for what is done with the numbers, nor for copies
between devices and disks (:mod:`memfit.measure.transfers`).

Every run allocates its result as eager torch does. On a CPU that matters more than anything: glibc
maps results of 32 MiB and more afresh each time (mallopt(3), ``M_MMAP_THRESHOLD``), and touching
new pages can take ten times as long as computing. A step pays for them too.

The fastest run counts, by the clock of the calling thread where ops run on the CPU. That thread
does its part of every parallel op, and its clock stands still while another program has the core:
on a busy machine one preempted thread holds up all others, and a median by the wall says how busy
the machine is, not how fast. The median is kept as the spread. Where ``OMP_WAIT_POLICY`` is
``passive`` when torch is imported, as in ``memfit calibrate``, threads sleep while they wait, and a
wait for a preempted thread is not counted either.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv2d, scaled_dot_product_attention
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from memfit.torch_versions import flop_formulas

Call = Callable[[], Any]

_MATRICES = {"cpu": (32, 64, 128, 256, 512, 1024), "cuda": (64, 256, 512, 1024, 2048, 4096, 8192)}
_CHANNELS = {"cpu": (8, 32, 128), "cuda": (16, 64, 256)}
_SEQUENCES = {"cpu": (32, 128, 512), "cuda": (64, 512, 2048)}
_TENSOR_BYTES = {
    "cpu": (1 << 14, 1 << 18, 1 << 21, 1 << 23, 1 << 24, 1 << 25),
    "cuda": (1 << 16, 1 << 20, 1 << 24, 1 << 26, 1 << 28),
}
_ROW = 256
"""Elements in a row of what normalises rows, as the width of a small model."""
_SHORTEST_SECONDS = 2e-4
"""Calls shorter than that are timed together, so that the clock's own cost stays below 1 %."""
_FEWEST, _MOST = 3, 60
"""Timed runs of one size."""
_TOO_LONG = 3.0
"""A size whose runs would take longer than so many shares of the time is left out."""
_ON, _OFF = True, False
"""Arguments of operators, which have no keyword for them."""
_FLOPS = "flops"
_BYTES = "bytes"


@dataclass(frozen=True, slots=True)
class Sample:
    """One size of one op.

    Attributes:
        what: Kind and element type, or operator: ``matmul.float32``, ``gelu``.
        work: FLOPs or bytes moved.
        unit: ``flops`` or ``bytes``.
        seconds: Of the fastest run.
        spread: How much longer the median took, relative to the fastest.
        runs: Runs that were timed.
    """

    what: str
    work: int
    unit: str
    seconds: float
    spread: float
    runs: int


def seconds_here(device: torch.device) -> float:
    """The clock that ops on a device are timed by: this thread's own on the CPU, else the wall."""
    return time.perf_counter() if device.type == "cuda" else time.thread_time()


def timed(call: Call, device: torch.device, seconds: float) -> tuple[float, float, int]:
    """Seconds of the fastest run, how much longer the median took, and the number of runs.

    Args:
        call: What to time; runs once more to warm up.
        device: Where it runs.
        seconds: About how long to spend.
    """
    end = time.perf_counter() + seconds
    _once(call, device, 1)
    once = min(_once(call, device, 1) for _ in range(2))
    together = max(1, math.ceil(_SHORTEST_SECONDS / max(once, 1e-7)))
    times: list[float] = []
    while len(times) < _FEWEST or (len(times) < _MOST and time.perf_counter() < end):
        times.append(_once(call, device, together))
    fastest = max(min(times), 1e-9)
    return fastest, statistics.median(times) / fastest - 1, len(times)


def _once(call: Call, device: torch.device, together: int) -> float:
    began = seconds_here(device)
    for _ in range(together):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (seconds_here(device) - began) / together


def measure(device: torch.device, seconds: float) -> Iterator[Sample]:
    """Time every op at every size; those too slow for their share of the time are left out.

    Args:
        device: Where to run.
        seconds: About how long to spend on all of them.
    """
    families = [*_compute(device), *_memory(device)]
    share = seconds / sum(len(sizes) for _, _, sizes, _ in families)
    for what, unit, sizes, make in families:
        before: Sample | None = None
        for size in sizes:
            # The next size is about four times as slow, and runs at least six times.
            if before is not None and before.seconds * 24 > _TOO_LONG * max(share, 0.01):
                break
            try:
                call = make(size)
                work = _flops(call) if unit == _FLOPS else _moved(call)
            except (RuntimeError, NotImplementedError):
                break  # This build or device does not have the op for this element type.
            if work == 0 or (before is not None and work <= before.work):
                break
            fastest, spread, runs = timed(call, device, share)
            before = Sample(what, work, unit, fastest, spread, runs)
            yield before


Family = tuple[str, str, Sequence[int], Callable[[int], Call]]


def _compute(device: torch.device) -> Iterator[Family]:
    """Ops whose work is counted in FLOPs, as ``torch.utils.flop_counter`` counts them."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")

        def matmul(size: int, dtype: torch.dtype = dtype) -> Call:
            left = torch.ones(size, size, dtype=dtype, device=device)
            right = torch.ones_like(left)
            return lambda: left @ right

        yield f"matmul.{name}", _FLOPS, _MATRICES[device.type], matmul

    def eight_bit(size: int) -> Call:
        matrix = torch.ones(size, size, dtype=torch.int8, device=device)
        return lambda: torch._int_mm(matrix, matrix.t())

    yield "matmul.int8", _FLOPS, _MATRICES[device.type], eight_bit
    for backward in (False, True):
        suffix = "_backward.float32" if backward else ".float32"

        def convolution(channels: int, *, backward: bool = backward) -> Call:
            images = torch.randn(4, channels, 28, 28, device=device, requires_grad=backward)
            weight = torch.randn(channels, channels, 3, 3, device=device, requires_grad=backward)
            return _either(lambda: conv2d(images, weight, padding=1), [images, weight], backward)

        yield f"convolution{suffix}", _FLOPS, _CHANNELS[device.type], convolution

        def attention(length: int, *, backward: bool = backward) -> Call:
            shape = (2, 8, length, 64)
            q, k, v = (torch.randn(shape, device=device, requires_grad=backward) for _ in range(3))
            return _either(lambda: scaled_dot_product_attention(q, k, v), [q, k, v], backward)

        yield f"attention{suffix}", _FLOPS, _SEQUENCES[device.type], attention


def _either(forward: Call, inputs: list[Tensor], backward: bool) -> Call:  # noqa: FBT001 - private
    """The forward call, or the backward of one forward, again and again."""
    if not backward:
        return forward
    with torch.enable_grad():
        out: Tensor = forward()
    gradient = torch.ones_like(out)
    return lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True)


def _memory(device: torch.device) -> Iterator[Family]:
    """Ops whose work is the bytes they move: the plain ones, and those that also compute much."""
    sizes = _TENSOR_BYTES[device.type]
    for what, make in _OPERATORS.items():

        def call(size: int, make: Callable[..., Call] = make) -> Call:
            rows = max(size // (4 * _ROW), 1)
            return make(torch.randn(rows, _ROW, device=device))

        yield what, _BYTES, sizes, call


@dataclass(frozen=True, slots=True)
class _Aten:
    """One call of an operator, with what it reads in sight."""

    operator: Any
    args: tuple[Any, ...]

    def __call__(self) -> Any:
        """Run it."""
        return self.operator(*self.args)


def _aten(name: str, *args: Any) -> _Aten:
    return _Aten(getattr(torch.ops.aten, name).default, args)


def _layer_norm_backward(rows: Tensor) -> _Aten:
    weight, bias = torch.ones_like(rows[0]), torch.zeros_like(rows[0])
    _, mean, deviation = torch.native_layer_norm(rows, [_ROW], weight, bias, 1e-5)
    mask = [True, True, True]
    read = (torch.ones_like(rows), rows, [_ROW], mean, deviation, weight, bias, mask)
    return _aten("native_layer_norm_backward", *read)


def _images(rows: Tensor) -> Tensor:
    """The same numbers as images of 8 by 8 with up to 64 channels."""
    return rows.view(-1, min(64, rows.numel() // 64), 8, 8)


def _batch_norm(rows: Tensor) -> _Aten:
    images = _images(rows)
    one = torch.ones(images.shape[1], device=rows.device)
    read = (images, one, one.clone(), one.clone(), one.clone(), True, 0.1, 1e-5)
    return _aten("native_batch_norm", *read)


def _batch_norm_backward(rows: Tensor) -> _Aten:
    images = _images(rows)
    one = torch.ones(images.shape[1], device=rows.device)
    _, mean, deviation = _batch_norm(rows)()
    statistics_read = (one, one.clone(), one.clone(), mean, deviation, True, 1e-5)
    read = (torch.ones_like(images), images, *statistics_read, [True, True, True])
    return _aten("native_batch_norm_backward", *read)


_OPERATORS: dict[str, Callable[[Tensor], _Aten]] = {
    "elementwise": lambda x: _Aten(torch.ops.aten.add.Tensor, (x, x.clone())),
    "in_place": lambda x: _Aten(torch.ops.aten.add_.Tensor, (x, x.clone())),
    "gelu": lambda x: _aten("gelu", x),
    "gelu_backward": lambda x: _aten("gelu_backward", x, x.clone()),
    "silu": lambda x: _aten("silu", x),
    "silu_backward": lambda x: _aten("silu_backward", x, x.clone()),
    "native_dropout": lambda x: _aten("native_dropout", x, 0.1, _ON),
    "bernoulli_": lambda x: _Aten(torch.ops.aten.bernoulli_.float, (x, 0.5)),
    "_softmax": lambda x: _aten("_softmax", x, -1, _OFF),
    "_softmax_backward_data": lambda x: _aten(
        "_softmax_backward_data", x, x.clone(), -1, torch.float32
    ),
    "_log_softmax": lambda x: _aten("_log_softmax", x, -1, _OFF),
    "_log_softmax_backward_data": lambda x: _aten(
        "_log_softmax_backward_data", x, x.clone(), -1, torch.float32
    ),
    "native_layer_norm": lambda x: _aten(
        "native_layer_norm", x, [_ROW], torch.ones_like(x[0]), torch.zeros_like(x[0]), 1e-5
    ),
    "native_layer_norm_backward": _layer_norm_backward,
    "native_batch_norm": _batch_norm,
    "native_batch_norm_backward": _batch_norm_backward,
}
"""By the operator's name, as the cost model looks it up; the first two stand for all others."""


def _flops(call: Call) -> int:
    counter = FlopCounterMode(display=False)
    counter.flop_registry.update(flop_formulas())
    with counter:
        call()
    return int(counter.get_total_flops())


def _moved(call: Any) -> int:
    """Bytes read plus written, as a trace counts them: what is written in place counts twice."""
    read = [t for t in tree_leaves(call.args) if isinstance(t, Tensor)]
    made = [t for t in tree_leaves(call()) if isinstance(t, Tensor)]
    return sum(t.numel() * t.element_size() for t in (*read, *made))
