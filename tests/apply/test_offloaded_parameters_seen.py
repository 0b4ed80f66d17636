"""Offloaded parameters whose memory others see: a view, numpy, another process, another thread."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import pytest
import torch
from test_offload_parameters import (
    NOTHING,
    WEIGHT,
    WIDTH,
    _any_folder,  # noqa: F401 - a fixture
    build,
    in_memory,
    plan,
    run,
    same,
    square,
)
from threads import in_threads
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.errors import UsageError
from memfit.measure.peak import storage_bytes
from memfit.run.fitted import Fitted

pytestmark = [pytest.mark.offloads_parameters, pytest.mark.usefixtures("_any_folder")]


SEEN = {
    "view": lambda p: p.detach().view(-1),
    "storage": lambda p: p.untyped_storage(),
    "numpy": lambda p: p.detach().numpy(),
    "buffer": lambda p: p.detach().numpy().data,
    "dlpack": lambda p: torch.utils.dlpack.to_dlpack(p.detach()),
}


def seen_now(kind, seen):
    """What is seen of a parameter, as a tensor."""
    if kind == "storage":
        return torch.tensor(seen.tolist(), dtype=torch.uint8).view(torch.float32)
    if kind == "dlpack":
        return torch.utils.dlpack.from_dlpack(seen).clone()
    return torch.tensor(seen.tolist())


@pytest.mark.parametrize("kind", SEEN)
@pytest.mark.parametrize("before", [True, False])
def test_whoever_sees_the_memory_of_a_parameter_always_sees_the_parameter(kind, before):
    workload = build()
    matrix = workload.model[5].outer.weight
    seen = SEEN[kind](matrix) if before and kind == "view" else None
    with Fitted(workload, plan(workload, fuse=True, room=2 * WEIGHT)) as fitted:
        fitted.step()
        seen = seen if seen is not None else SEEN[kind](matrix)
        fitted.step()
        assert torch.equal(seen_now(kind, seen).view(-1), matrix.detach().view(-1))
        if kind in {"view", "numpy"}:
            seen *= 0.5
            assert torch.equal(seen_now(kind, seen).view(-1), matrix.detach().view(-1))
        del seen
        fitted.step()
        fitted.step()
        assert storage_bytes([matrix]) == 0, "it goes once nobody else sees it"


def test_a_frozen_parameter_that_dlpack_lends_stays_while_it_does():
    """It is lent itself, as no tensor that requires gradients can be."""
    workload = build()
    matrix = workload.model[5].outer.weight.requires_grad_(requires_grad=False)
    with Fitted(workload, plan(workload, fuse=True, room=2 * WEIGHT)) as fitted:
        fitted.step()
        seen = np.from_dlpack(matrix)
        known = seen.copy()
        fitted.step()
        assert (seen == known).all()
        with torch.no_grad():
            matrix.mul_(2)
        assert (seen == 2 * known).all()
        fitted.step()
        assert (seen == 2 * known).all()
        del seen
        fitted.step()
        fitted.step()
        assert storage_bytes([matrix]) == 0, "it goes once nobody else sees it"


@pytest.mark.parametrize("see", [SEEN["view"], SEEN["numpy"]])
def test_what_others_wrote_last_goes_with_the_parameter(see):
    results = []
    for made in (lambda _: NOTHING, lambda w: plan(w, fuse=True, room=2 * WEIGHT)):
        workload = build()
        with Fitted(workload, made(workload)) as fitted:
            seen = [see(p) for p in workload.model.parameters() if p.ndim > 1]
            torch.manual_seed(0)
            fitted.step()
            for one in seen:
                one *= 0.5  # noqa: PLW2901 - in place
            del seen, one
            fitted.step()
        results.append([p.detach() for p in workload.model.parameters()])
    assert same(*results)


def test_to_log_parameters_by_numpy_changes_nothing():
    def logged(made):
        workload = build()
        with Fitted(workload, made(workload)) as fitted:
            for step in range(4):
                torch.manual_seed(step)
                fitted.step()
                for parameter in workload.model.parameters():
                    assert abs(parameter.detach().cpu().numpy()).mean() > 0
                workload.model[1].inner.weight.detach().numpy()[:] *= 0.5
            fitted.place_state()
            there = in_memory(workload.model)
        return there, [p.detach() for p in workload.model.parameters()]

    expected = logged(lambda _: NOTHING)
    there, parameters = logged(lambda workload: plan(workload, fuse=True, room=2 * WEIGHT))
    assert there <= 2 * WEIGHT
    assert same(expected[1], parameters)


@pytest.mark.parametrize(
    "share", [nn.Module.share_memory, lambda m: m[1].outer.weight.share_memory_()]
)
def test_parameters_shared_with_other_processes_stay(share):
    expected = run(build(), NOTHING, steps=4)
    workload = build()
    with Fitted(workload, plan(workload, room=2 * WEIGHT)) as fitted:
        for step in range(4):
            torch.manual_seed(step)
            fitted.step()
            if step == 1:
                share(workload.model)
        assert workload.model[1].outer.weight.is_shared()
    assert same(expected[1], [p.detach() for p in workload.model.parameters()])


def test_a_parameter_that_was_swapped_for_another_is_not_written_over():
    results = []
    for made in (lambda _: NOTHING, lambda w: plan(w, fuse=True, room=2 * WEIGHT)):
        workload = build()
        with Fitted(workload, made(workload)) as fitted:
            torch.manual_seed(0)
            fitted.step()
            for block in workload.model:
                other = nn.Parameter(torch.ones(WIDTH, WIDTH))
                torch.utils.swap_tensors(block.inner.weight, other)
            fitted.step()
        results.append([p.detach() for p in workload.model.parameters()])
    assert same(*results)


# Other threads


def test_threads_between_steps_read_what_is_there():
    workload = build()
    with Fitted(workload, plan(workload, fuse=True, room=2 * WEIGHT)) as fitted:
        for _ in range(5):
            fitted.step()
            read = in_threads(4, lambda: [p.detach().clone() for p in workload.model.parameters()])
            expected = [p.detach() for p in workload.model.parameters()]
            assert all(same(expected, one) for one in read)


def test_a_thread_that_reads_during_steps_reads_what_is_there_or_is_told():
    expected = run(build(), NOTHING, steps=6)
    workload = build()
    first = [p.detach().clone() for p in workload.model.parameters()]
    odd, stop = [], threading.Event()

    def read():
        while not stop.is_set():
            for parameter, before in zip(workload.model.parameters(), first, strict=True):
                try:
                    now = parameter.detach().clone()
                except RuntimeError as error:
                    assert "is offloaded by memfit's plan" in str(error)  # noqa: PT017 - in a thread
                    continue
                # Six steps of 0.01 each: whatever is further off is not this parameter.
                if not (now - before).abs().max() < 0.1:
                    odd.append(now)

    with Fitted(workload, plan(workload, room=2 * WEIGHT)) as fitted:
        reader = threading.Thread(target=read)
        reader.start()
        try:
            for step in range(6):
                torch.manual_seed(step)
                fitted.step()
        finally:
            stop.set()
            reader.join()
    assert not odd
    assert same(expected[1], [p.detach() for p in workload.model.parameters()])


class Threaded(nn.Module):
    """Calls its blocks in threads of their own."""

    def __init__(self, blocks):
        super().__init__()
        self.blocks = blocks

    def forward(self, x):
        return torch.cat(in_threads(1, lambda: self.blocks(x)))


def test_a_forward_in_threads_has_its_parameters():
    results = []
    for made in (lambda _: NOTHING, lambda w: plan(w, room=2 * WEIGHT)):
        workload = build()
        workload = dataclasses.replace(workload, model=Threaded(workload.model.eval()))
        results.append(run(workload, made(workload))[1])
    assert same(*results)


def test_two_threads_do_not_step_at_once():
    workload = build()
    inside, go = threading.Event(), threading.Event()

    def loss(model, batch):
        inside.set()
        go.wait()
        return square(model, batch)

    with Fitted(dataclasses.replace(workload, loss=loss), plan(workload)) as fitted:
        other = threading.Thread(target=fitted.step)
        other.start()
        inside.wait()
        with pytest.raises(UsageError, match="runs a step in another thread"):
            fitted.step()
        go.set()
        other.join()
        fitted.step()


def test_whoever_fetches_a_parameter_in_the_middle_of_a_forward_runs_no_op_of_the_script():
    """A forward that is watched op by op would take memfit's own for the model's."""

    class Ops(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.name())
            return func(*args, **(kwargs or {}))

    seen: list[str] = []
    workload = build()
    with Fitted(workload, plan(workload, fuse=True, room=2 * WEIGHT)) as fitted:
        fitted.step()
        parameter = workload.model[5].outer.weight
        with Ops():
            memory = parameter.untyped_storage()
        assert memory.nbytes() == parameter.nbytes
    assert seen == []
