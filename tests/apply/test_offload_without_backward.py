"""Stored tensors of forwards that get no backward, or whose graph dies: nothing is left of them."""

from __future__ import annotations

import weakref

import pytest
import torch
from handmade import chain, record
from torch import nn

from memfit import _native
from memfit.apply.offload.activations import MOST_FORWARDS, Transit
from memfit.apply.offload.tiers import DiskTier
from memfit.apply.remat.directions import Directions
from memfit.apply.remat.remat import Rematerialiser
from memfit.apply.remat.watch import Watch
from memfit.errors import DivergenceWarning

ROWS, WIDTH = 64, 256
MATRIX = ROWS * WIDTH * 4
"""Bytes of one activation of the chain."""


class Written(DiskTier):
    """Knows the bytes of what is in the file."""

    def __init__(self, folder):
        super().__init__(1 << 20, folder, allow_memory=True)
        self.there = {}

    def send(self, source):
        parcel = super().send(source)
        held = Parcel(parcel)
        self.there[weakref.ref(held, self.there.pop)] = source.nbytes
        return held

    def bytes(self):
        return sum(self.there.values())


class Parcel:
    """A parcel that can be referred to weakly."""

    def __init__(self, parcel):
        self._parcel = parcel

    def __getattr__(self, name):
        return getattr(self._parcel, name)


@pytest.fixture
def written(tmp_path):
    return Written(tmp_path)


@pytest.fixture
def stored_chain(written):
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    forward = chain(3)
    ops = record(nn.Module(), lambda: forward(x))
    planned = Rematerialiser(nn.Module(), None, ops.offload(), written)

    def run():
        with planned.forward():
            return forward(x)

    return run, planned, x


def test_forwards_whose_losses_are_kept_fill_no_disk(stored_chain, written):
    run, planned, x = stored_chain
    losses = []
    with pytest.warns(DivergenceWarning, match="run forwards without a backward under") as said:
        losses += [run() for _ in range(40)]
    assert len(said) == 1
    assert written.bytes() == MOST_FORWARDS * 3 * MATRIX
    assert f"{MOST_FORWARDS} forwards" in planned.outcome().observations.kept_drops[0]
    expected = torch.autograd.grad(chain(3)(x), x)[0]
    for loss in (losses[0], losses[-1]):  # one that was offloaded and one that was not
        assert torch.equal(torch.autograd.grad(loss, x)[0], expected)
    losses.clear()
    del loss
    assert written.bytes() == 0
    run().backward()
    assert planned.outcome().offloaded == 3, "there is room again"


def test_what_belongs_to_a_graph_that_died_is_given_back(stored_chain, written):
    run, planned, _ = stored_chain
    for _ in range(40):
        loss = run()
        assert planned.outcome().offloaded == 3
        assert written.bytes() <= 2 * 3 * MATRIX  # the loss before it goes when this one is there
    del loss
    assert written.bytes() == 0
    assert planned.overflow == ""


class _Late:
    """A place that looks at what it was sent when that settles: it is to be as it was."""

    def __init__(self):
        self.settled = 0

    def refusal(self, device):
        return None

    def send(self, source):
        storage = source.untyped_storage()
        before = storage.clone()
        tier = self

        class Parcel:
            def settle(self):
                assert bytes(storage) == bytes(before)
                tier.settled += 1

        return Parcel()


def test_a_part_with_versions_of_its_own_is_written_to_after_what_was_saved_has_gone(monkeypatch):
    # As the gates of a recurrent cell are: one is saved, and the next one written to at once.
    monkeypatch.setattr(_native, "block_event", lambda _place: 1 << 60)  # all is of this forward
    tier = _Late()
    transit = Transit(tier, 1 << 30, ())
    watch = Watch(
        Directions({}, (), ("aten.exp.default",)),
        lambda _: None,
        {"offload": transit},
        lambda: transit,
    )
    watch.start_region(0, 1)
    weight = torch.randn(64, 192, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(watch.pack, lambda _: None), watch:
        gates = (torch.randn(64, 64) @ weight).unsafe_chunk(3, 1)  # not what was expected
        for gate in gates:
            gate.add_(0.1).sigmoid_()
        transit.outgoing.settle()
    assert tier.settled == 1 + len(gates)  # the matrix, too
