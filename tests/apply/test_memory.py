"""Measured peaks equal what the semantics say, to the byte, in cases worked out by hand."""

from __future__ import annotations

import gc
import weakref

import torch
from handmade import record
from torch import nn

from memfit.apply.remat import records
from memfit.apply.remat.remat import Rematerialiser
from memfit.measure import measure_peak

ROWS, WIDTH = 64, 256
MATRIX = ROWS * WIDTH * 4
"""Bytes of one activation of the chain below."""


def chain(length):
    """`length` times sigmoid(x + 1): each sigmoid saves its output."""

    def forward(x):
        for _ in range(length):
            x = torch.sigmoid(x + 1.0)
        return x.sum()

    return forward


def peak_of(forward, x, remat=None):
    def step():
        if remat is None:
            loss = forward(x)
        else:
            with remat.forward():
                loss = forward(x)
        loss.backward()
        x.grad = None

    step()
    return measure_peak(step, [x])


def test_the_unplanned_chain_holds_every_output():
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    measured = peak_of(chain(6), x)
    # Six outputs are saved. At the last op of forward the sum (4 bytes) joins them; in backward the
    # gradient is expanded without memory, and sigmoid_backward makes one more before a save goes.
    assert measured.static_bytes == MATRIX
    assert measured.peak_bytes - MATRIX == 6 * MATRIX + MATRIX + 2 * 4
    assert measured.left_bytes == 0


def test_dropping_every_sum_and_sigmoid_leaves_the_backward_chain():
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    forward = chain(6)
    ops = record(nn.Module(), lambda: forward(x))
    remat = Rematerialiser(nn.Module(), ops.remat())
    measured = peak_of(forward, x, remat)
    # At the first unpack the chain is replayed from x: every sigmoid has a token, so all six are
    # there at once; sums are intermediates. The last sigmoid needs its sum while it runs, so the
    # replay itself reaches 5 sigmoids + sum + sigmoid; backward of the last then adds its gradient.
    assert measured.peak_bytes - MATRIX == 7 * MATRIX + 2 * 4
    assert measured.left_bytes == 0
    assert remat.outcome().replayed_ops == 12


def test_keeping_one_in_the_middle_halves_the_chain():
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    forward = chain(6)
    ops = record(nn.Module(), lambda: forward(x))
    middle = [m for m in ops.made if "sigmoid" in m.name][2]
    remat = Rematerialiser(nn.Module(), ops.remat(lambda m: m is not middle))
    measured = peak_of(forward, x, remat)
    # Kept: the third sigmoid. The second half is replayed to 3 sigmoids beside it, with the
    # gradient: 5. When the first half is replayed, the middle one and the second half are gone but
    # for the gradient: 3 sigmoids replayed (the third is kept and released) stay below that.
    assert measured.peak_bytes - MATRIX == 5 * MATRIX + 2 * 4
    assert measured.left_bytes == 0


def test_a_dropped_allocation_lives_in_forward_for_its_natural_range_only():
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    forward = chain(20)
    ops = record(nn.Module(), lambda: forward(x))
    remat = Rematerialiser(nn.Module(), ops.remat())

    def only_forward():
        with remat.forward():
            forward(x)

    only_forward()
    # While a sigmoid runs, its input, its output, and the old output that the name `x` still holds.
    assert measure_peak(only_forward, [x]).peak_bytes - MATRIX == 3 * MATRIX


def test_an_in_place_op_is_replayed_in_place_where_nothing_else_needs_its_input():
    x = torch.randn(ROWS, WIDTH, requires_grad=True)

    def forward(x):
        y = (x + 1.0).mul_(2.0).add_(3.0)
        return y.sin().sum()

    ops = record(nn.Module(), lambda: forward(x))
    remat = Rematerialiser(nn.Module(), ops.remat(lambda m: "sin" not in m.name))
    measured = peak_of(forward, x, remat)
    # Replayed: one allocation that two in-place ops take over. In forward: y beside its sine (2);
    # in backward: y, cos(y), then the gradient (3), the expanded gradient of the sum being free.
    # Beside them the loss, its gradient, and the factor 2.0, a double that `mul` saves.
    assert measured.peak_bytes - MATRIX == 3 * MATRIX + 2 * 4 + 8
    assert measured.left_bytes == 0
    assert remat.outcome().replayed_ops == 3


def test_an_in_place_op_is_replayed_on_a_copy_where_its_input_is_still_needed():
    """The second sigmoid is asked for first, and the first one reads what was there before."""
    x = torch.randn(ROWS, WIDTH, requires_grad=True)

    def forward(x):
        y = x + 1.0
        first = torch.sigmoid(y)
        y.mul_(2.0)
        return first.sum() + torch.sigmoid(y).sum()

    forward(x).backward()
    expected, x.grad = x.grad, None
    ops = record(nn.Module(), lambda: forward(x))
    remat = Rematerialiser(nn.Module(), ops.remat())
    with remat.forward():
        loss = forward(x)
    loss.backward()
    outcome = remat.outcome()
    assert outcome.observations.dropped_saves == 2
    assert outcome.replayed_ops == 4
    assert torch.equal(x.grad, expected)


def test_shape_only_arguments_are_not_held():
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    alive = []

    def forward(x):
        y = x * 3.0
        alive.append(weakref.ref(y.untyped_storage()))
        mask = torch.empty_like(y).bernoulli_(0.5)
        return (y * 1.5 * mask).sum()

    ops = record(nn.Module(), lambda: forward(x))
    alive.clear()
    remat = Rematerialiser(nn.Module(), ops.remat(lambda m: "empty_like" in m.name))
    with remat.forward():
        loss = forward(x)
    assert remat.outcome().observations.dropped_saves == 1
    assert alive[0]() is None
    loss.backward()
    assert remat.outcome().replayed_ops == 2


def test_nothing_is_left_after_a_step():
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    forward = chain(4)
    ops = record(nn.Module(), lambda: forward(x))
    remat = Rematerialiser(nn.Module(), ops.remat())
    gc.collect()
    gc.disable()
    try:
        before = _records_alive()
        with remat.forward():
            loss = forward(x)
        assert _records_alive() > before
        loss.backward()
        del loss
        assert _records_alive() == before
        with remat.forward():
            loss = forward(x)
        del loss  # no backward at all
        assert _records_alive() == before
    finally:
        gc.enable()


def _records_alive():
    kinds = (records.Record, records.State, records.Token, records.Kept)
    return sum(type(o) in kinds for o in gc.get_objects())
