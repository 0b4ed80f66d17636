"""What memfit cannot see, as `docs/reference/limits.md` states it: each row names a test here.

Each test shows the limit itself, so that a limit that goes leaves the page with its test.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from handmade import Made
from handmade import record as forward_ops
from torch import Tensor, nn

import memfit
from memfit.apply.offload.tiers import DiskTier
from memfit.apply.remat.remat import Rematerialiser
from memfit.capture import record
from memfit.measure import measure_peak
from memfit.workload import Workload

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "limits.md"


class Squashed(nn.Module):
    """Saves the result of `tanh`, which anybody can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.shown = torch.empty(0)
        self.between = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        self.shown = torch.tanh(x * self.scale)
        self.between()
        return (self.shown * self.shown).sum()


def through_data(model, _batch):
    model.shown.data.mul_(2.0)


def through_numpy(model, _batch):
    model.shown.detach().numpy()[...] = 0.0


def through_a_pointer(model, _batch):
    ctypes.memset(model.shown.data_ptr(), 0, model.shown.nbytes)


def to_a_parameter(model, _batch):
    model.scale.data.add_(1.0)


def gradient(plan, change, folder, when="after forward"):
    """The gradient of a step, with a change that torch is not told of in or after its forward."""
    model, batch = Squashed(), np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)
    x = torch.from_numpy(batch)
    remat = None
    if plan is not None:
        ops = forward_ops(copy.copy(model), lambda: model(x), backward=True)
        is_remat = plan == "remat"
        remat = Rematerialiser(
            model,
            ops.remat() if is_remat else None,
            None if is_remat else ops.offload(),
            None if is_remat else DiskTier(1 << 20, folder, allow_memory=True),
            warn=False,
        )
        model.zero_grad()
    if when == "in forward" and change is not None:
        model.between, change = partial(change, model, batch), None
    if remat is not None:
        with remat.forward():
            loss = model(x)
        seen = remat.outcome()
        assert seen.observations.dropped_saves + seen.offloaded > 0
    else:
        loss = model(x)
    if change is not None:
        change(model, batch)
    loss.backward()
    return model.scale.grad


UNSEEN = [through_data, through_numpy, through_a_pointer]


@pytest.mark.parametrize("change", UNSEEN)
@pytest.mark.parametrize("plan", ["remat", "offload"])
@pytest.mark.parametrize("when", ["in forward", "after forward"])
def test_a_hidden_write_to_a_saved_tensor(change, plan, when, tmp_path):
    untouched, plain = (gradient(None, it, tmp_path, when) for it in (None, change))
    assert not torch.equal(plain, untouched), "torch reads what is there"
    planned = gradient(plan, change, tmp_path, when)
    if change is through_data and when == "in forward":
        assert torch.equal(planned, plain), "an op that forward runs is seen"
        return
    assert not torch.equal(planned, plain), "memfit what was there before, of some saves or all"
    if when == "after forward":
        assert torch.equal(planned, untouched)


def test_a_hidden_write_to_what_is_recomputed_from(tmp_path):
    plain = gradient(None, to_a_parameter, tmp_path)
    assert not torch.equal(gradient("remat", to_a_parameter, tmp_path), plain)
    assert torch.equal(gradient("offload", to_a_parameter, tmp_path), plain)


def test_an_op_of_your_own_with_a_state_of_its_own():
    calls = []

    @torch.library.custom_op("memfit_limits::counted", mutates_args=())
    def counted(x: Tensor) -> Tensor:
        calls.append(None)
        return x * len(calls)

    model, x = Squashed(), torch.ones(4, 8)

    def gradient_of(context):
        calls.clear()
        model.zero_grad()
        with context:
            loss = torch.square(counted(x) * model.scale).sum()
        loss.backward()
        return model.scale.grad

    ops = forward_ops(model, lambda: torch.square(counted(x) * model.scale).sum(), backward=True)
    name = str(torch.ops.memfit_limits.counted.default)
    made = Made(ops.names.index(name), 0, name, tuple(x.shape), x.nbytes)
    ops.made.append(made)
    plain = gradient_of(contextlib.nullcontext())
    remat = Rematerialiser(model, ops.remat(lambda m: m is made))
    assert not torch.equal(gradient_of(remat.forward()), plain)
    assert len(calls) == 2, "it ran again in backward"


def test_memory_that_is_not_torchs():
    with memfit.track("arrays") as tracked:
        array = np.ones(1 << 20)
        shared = torch.from_numpy(array)
    assert shared.nbytes == 8 << 20
    assert tracked["cpu"].peak_bytes - tracked["cpu"].before_bytes < 1 << 20


def test_a_class_that_does_not_say_what_it_holds():
    class Opaque(Tensor):
        @staticmethod
        def __new__(cls, part):
            return torch.Tensor._make_wrapper_subclass(cls, part.shape, dtype=torch.float32)

        def __init__(self, part):
            self.part = part

        @classmethod
        def __torch_dispatch__(cls, func, types, args, kwargs=None):
            plain = (a.part.float() if isinstance(a, Opaque) else a for a in args)
            return func(*plain, **(kwargs or {}))

    batch = Opaque(torch.ones(4, 8, dtype=torch.int8))
    measured = measure_peak(list, [batch])
    assert measured.static_bytes == 4 * 8 * 4, "as if it were dense"


def test_what_your_code_does_besides_computing():
    log = []

    def loss(model, batch):
        log.append("called")
        return model(batch)

    record(Workload(Squashed(), torch.ones(4, 8), loss), probe=False)
    assert log, "a step that is recorded runs your code"


def test_what_the_process_holds_besides_the_step():
    held = torch.ones(1 << 20)
    workload = Workload(Squashed(), torch.ones(4, 8), lambda m, b: m(b))
    assert memfit.predict(workload).predicted_peak_bytes < held.nbytes


@pytest.mark.offloads_parameters
def test_a_pointer_to_a_parameter(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(6)))

    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=1e-3)

    workload = Workload(model, torch.ones(2, 512), lambda m, b: m(b).sum(), sgd)
    options = {"offload": tmp_path, "forbid": ["remat", "fuse_optimizer", "offload"]}
    budget = memfit.plan(workload, "1B", **options).minimum_budget_bytes
    with memfit.fit(workload, budget, **options) as fitted:
        assert [action.kind for action in fitted.plan.actions] == ["offload_parameters"]
        pointers = [parameter.data_ptr() for parameter in model.parameters()]
        fitted.step()
        others = [torch.zeros(512, 512) for _ in range(32)]
        seen = [_memory_at(pointer, others[0].nbytes) for pointer in pointers]
        now = [parameter.detach().numpy().tobytes() for parameter in model.parameters()]
    assert seen != now


def test_who_reads_a_parkable_model_while_another_thread_parks_it(tmp_path):
    """A kernel that has begun is past all that memfit could ask; here it is a read by address."""
    code = """
import ctypes, sys, threading, torch
from memfit.share.park.parked import ParkedModel
model = torch.nn.Linear(512, 512)
parkable = ParkedModel(model, sys.argv[1], allow_memory=True)
address = model.weight.data_ptr()
ctypes.string_at(address, 4)
parkable.park()
print("parked", flush=True)
threading.Thread(target=ctypes.string_at, args=(address, 4)).start()
"""
    command = [sys.executable, "-c", code, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("parked\n", -signal.SIGSEGV)


def _memory_at(address, size):
    """What a pointer leads to; nothing where that would end the process."""
    with Path("/proc/self/mem").open("rb", buffering=0) as memory:
        try:
            return os.pread(memory.fileno(), size, address)
        except OSError:
            return b""


def test_every_row_names_a_test():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")][1:]
    named = [re.findall(r"`(test_\w+)`", row) for row in rows]
    assert all(len(names) == 1 for names in named)
    assert len(named) <= 10
    of_the_broker = (Path(__file__).parents[1] / "share" / "lease" / "test_broker.py").read_text()
    tests = {name for name in globals() if name.startswith("test_")}
    tests.update(
        re.findall(r"^def (test_clients_that_cannot_be_seen_and\w+)", of_the_broker, re.MULTILINE)
    )
    assert {names[0] for names in named} == tests - {"test_every_row_names_a_test"}
