"""Memory that others than torch's ops write before backward: never computed from again."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from handmade import record
from torch import nn

from memfit.apply.remat.remat import Rematerialiser
from memfit.apply.remat.rewritten import Rewritten
from memfit.errors import ReplayError
from memfit.tensors.storage import may_change_unseen, shared_digest


class Policy(nn.Module):
    """What reads its input has its own output saved, as in plain torch."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, seen):
        return self.body(seen * 0.5).square().mean()


def array():
    buffer = np.zeros((4, 6), np.float32)
    return buffer, torch.from_numpy(buffer)


def part_of_an_array():
    buffer = np.zeros((8, 12), np.float32)
    return buffer, torch.from_numpy(buffer)[::2, 3:9]


def row_for_all():
    buffer = np.zeros((1, 6), np.float32)
    return buffer, torch.from_numpy(buffer).expand(4, 6)


def seen_by_an_array():
    tensor = torch.zeros(4, 6)
    return tensor.numpy(), tensor


@pytest.mark.parametrize("lent", [array, part_of_an_array, row_for_all, seen_by_an_array])
def test_what_an_array_writes_before_backward_changes_nothing(lent):
    torch.manual_seed(0)
    model = Policy()
    buffer, seen = lent()
    assert may_change_unseen(seen)
    own = torch.rand(4, 6)
    remat = Rematerialiser(model, record(model, lambda: model(own)).remat())

    def gradients(context):
        model.zero_grad()
        generator = np.random.default_rng(1)
        buffer[...] = generator.random(buffer.shape)
        with context:
            loss = model(seen)
        buffer[...] = generator.random(buffer.shape)
        loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    plain = gradients(contextlib.nullcontext())
    planned = gradients(remat.forward())
    assert remat.outcome().observations.dropped_saves > 0
    assert all(map(torch.equal, plain, planned))


def test_what_another_process_writes_before_backward_is_refused():
    torch.manual_seed(0)
    model = Policy()
    seen = torch.rand(4, 6).share_memory_()
    remat = Rematerialiser(model, record(model, lambda: model(seen)).remat())

    def run(write):
        with remat.forward():
            loss = model(seen)
        if write:
            child = os.fork()
            if child == 0:
                seen.zero_()
                os._exit(0)
            os.waitpid(child, 0)
            assert not seen.any()
        loss.backward()

    run(write=False)
    with pytest.raises(ReplayError, match="is shared between processes, and one has written"):
        run(write=True)


def test_memory_of_torchs_own_and_parameters_are_no_such_thing(tmp_path):
    own = torch.zeros(4, 6)
    torch.save(own, tmp_path / "read.pt")
    read = torch.load(tmp_path / "read.pt")
    parameter = nn.Parameter(torch.from_numpy(np.zeros((4, 6), np.float32)))
    shared = nn.Parameter(torch.zeros(4, 6).share_memory_())
    assert not any(map(may_change_unseen, (own, own[1:], parameter, parameter.t(), shared)))
    assert may_change_unseen(read[1:]), "torch says the same of what an array has"
    assert shared_digest(shared.t()) is None
    assert shared_digest(own) is None


class Counted(nn.Module):
    """Each call updates a buffer, as a spectral norm's power iteration does, and then reads it."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 6)
        self.register_buffer("scale", torch.rand(6))

    def forward(self, seen):
        with torch.no_grad():
            torch.mul(self.scale, 1.5, out=self.scale)
        return (self.body(seen) * self.scale.clone()).tanh().square().mean()


def test_what_a_later_forward_updates_before_backward_is_as_it_was():
    """The later call is watched by nothing, so no write of its is seen."""
    torch.manual_seed(0)
    model, seen = Counted(), torch.rand(4, 6)
    remat = Rematerialiser(model, record(model, lambda: model(seen)).remat())
    before = model.scale.clone()

    def gradients(context):
        model.zero_grad()
        model.scale.copy_(before)
        with context:
            loss = model(seen)
        (loss + model(seen)).backward()
        return [p.grad.numpy().tobytes() for p in model.parameters()]

    plain = gradients(contextlib.nullcontext())
    planned = gradients(remat.forward())
    assert remat.outcome().observations.dropped_saves > 0
    assert plain == planned


def _rewritten(tensor: torch.Tensor, *, storage_is_older: bool) -> bool:
    """Whether a tensor that a forward wrote to is taken for older than it."""
    rewritten = Rewritten(lambda _: storage_is_older)
    rewritten.writes([tensor])
    return tensor in rewritten


def test_what_a_forward_wrote_to_is_older_only_where_that_is_known():
    """Nothing says when memory came that is not counted, as an array's."""
    array = torch.from_numpy(np.zeros(6))
    assert not _rewritten(array, storage_is_older=False)
    assert _rewritten(array, storage_is_older=True)


def test_memory_that_a_forward_makes_and_writes_to_is_pinned_and_not_copied():
    """In a process that counts nothing, as most that fit a model do."""
    code = """
    import torch
    from torch import nn
    from memfit import _native
    from memfit.apply.remat import watch
    from memfit.apply.remat.remat import Rematerialiser
    from handmade import record

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(6, 6)
            self.register_buffer("scale", torch.rand(6))

        def forward(self, seen):
            with torch.no_grad():
                noise = torch.empty(4, 6).uniform_()
                torch.mul(self.scale, 1.5, out=self.scale)
            return (self.body(seen) * self.scale.clone() + noise).tanh().square().mean()

    copied = []
    copy = watch._copied
    watch._copied = lambda value: copied.append(tuple(value.shape)) or copy(value)
    torch.manual_seed(0)
    model, seen = Model(), torch.rand(4, 6)
    found = record(model, lambda: model(seen))
    remat = Rematerialiser(model, found.remat(lambda made: "empty" not in made.name))
    with remat.forward():
        loss = model(seen)
    loss.backward()
    print(_native.is_counted(seen.data_ptr()), remat.outcome().observations.dropped_saves > 0)
    print(copied)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    folder = Path(__file__).parents[1] / "support"
    ended = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder)
    assert ended.stdout.splitlines() == ["False True", "[(6,)]"]
