"""Random small graphs under random plans: loss, gradients and random state stay bitwise equal.

Plans drop, store and give homes at random, valid or not: what the executor does may cost memory or
time then, never the result.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from handmade import record
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from memfit.apply.offload.tiers import DiskTier
from memfit.apply.remat.remat import Rematerialiser

ROWS, COLUMNS = 4, 6

UNARY = {
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "sin": torch.sin,
    "scale": lambda t: t * 0.7,
    "softmax": lambda t: t.softmax(-1),
    "dropout": lambda t: F.dropout(t, 0.4),
    "native_dropout": lambda t: torch.native_dropout(t, 0.3, train=True)[0],
    "layer_norm": lambda t: F.layer_norm(t, (COLUMNS,)),
    "noise": lambda t: t + torch.rand_like(t),
    "square": lambda t: t @ torch.eye(COLUMNS) * t,
    "flipped": lambda t: t.t().contiguous().t(),
    "through_view": lambda t: t.reshape(-1).sin().view(ROWS, COLUMNS),
    "halves": lambda t: torch.cat([t[:, :3].exp(), t[:, 3:].cos()], 1),
    "chunked": lambda t: torch.cat([c.tanh() for c in t.chunk(2, 1)], 1),
    "detached": lambda t: t * t.detach(),
    "complex": lambda t: (
        torch.view_as_real(torch.view_as_complex(t.reshape(-1, 2)).conj() * 1j)
        .reshape(ROWS, COLUMNS)
        .sin()
    ),
}
IN_PLACE = {
    "relu_": torch.relu_,
    "mul_": lambda t: t.mul_(1.1),
    "add_": lambda t: t.add_(0.3),
    "dropout_": lambda t: F.dropout(t, 0.3, inplace=True),
    "slice_": lambda t: (t[:, :2].mul_(0.5), t)[1],
    "index_": lambda t: (t.__setitem__((slice(None), 1), 0.25), t)[1],
    "through_view_": lambda t: (t.t().unbind(0)[1].add_(0.1), t)[1],
    "masked_": lambda t: t.masked_fill_(torch.ones(ROWS, COLUMNS, dtype=torch.bool).tril(), 0.2),
}
BINARY = {
    "add": torch.add,
    "mul": torch.mul,
    "where": lambda a, b: torch.where(a > b, a, b * 2),
    "matmul": lambda a, b: a @ b.t() @ a,
}


class Graph(nn.Module):
    """Applies a list of steps to a growing list of tensors."""

    def __init__(self, steps):
        super().__init__()
        self.steps = steps
        self.first = nn.Linear(COLUMNS, COLUMNS)
        self.norm = nn.BatchNorm1d(COLUMNS)
        self.last = nn.Linear(COLUMNS, 1)

    def forward(self, x: Tensor) -> Tensor:
        values = [self.first(x)]
        for kind, name, a, b in self.steps:
            left = values[a % len(values)]
            right = values[b % len(values)]
            if kind == "unary":
                values.append(UNARY[name](left))
            elif kind == "in_place":
                # A fresh tensor where autograd would refuse: a saved tensor must not change.
                target = left * 1.0 if name in {"mul_", "masked_"} or b % 2 else left.sin()
                values.append(target)
                values.append(target.sigmoid() if b % 3 == 0 else target)
                values[-1 if b % 3 else -2] = IN_PLACE[name](target)
            elif kind == "norm":
                values.append(self.norm(left))
            else:
                values.append(BINARY[name](left, right))
        return self.last(torch.stack(values).sum(0)).pow(2).mean()


index = st.integers(0, 30)
step = st.one_of(
    st.tuples(st.just("unary"), st.sampled_from(sorted(UNARY)), index, index),
    st.tuples(st.just("in_place"), st.sampled_from(sorted(IN_PLACE)), index, index),
    st.tuples(st.just("binary"), st.sampled_from(sorted(BINARY)), index, index),
    st.tuples(st.just("norm"), st.just("norm"), index, index),
)


def run(model, x, context):
    model.zero_grad()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.reset_running_stats()
    torch.manual_seed(5)
    with context:
        loss = model(x)
    between = torch.get_rng_state()
    loss.backward()
    return [
        loss.detach(),
        *(p.grad.clone() for p in model.parameters() if p.grad is not None),
        *(b.clone() for b in model.buffers()),
        between,
        torch.get_rng_state(),
    ]


@given(steps=st.lists(step, min_size=1, max_size=9), chosen=st.integers(0, 2**40 - 1))
@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
def test_any_drop_set_of_any_graph_is_bitwise(steps, chosen):
    torch.manual_seed(0)
    model = Graph(steps)
    x = torch.randn(ROWS, COLUMNS)
    try:
        expected = run(model, x, contextlib.nullcontext())
    except RuntimeError as error:
        if "inplace operation" in str(error) or "a view" in str(error):
            return  # autograd itself refuses this graph
        raise
    ops = record(model, lambda: model(x))
    droppable = [m for m in ops.made if m.droppable]
    picked = {id(m) for k, m in enumerate(droppable) if chosen >> (k % 40) & 1}
    for drop in (lambda m: id(m) in picked, lambda _: True):
        remat = Rematerialiser(model, ops.remat(drop))
        got = run(model, x, remat.forward())
        outcome = remat.outcome()
        assert outcome.observations.divergence == ""
        assert outcome.observations.kept_drops == []
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


WINDOWS = (0, 100, 500, 10**6)
"""In bytes; most allocations of these graphs have 96."""


@given(
    steps=st.lists(step, min_size=1, max_size=9),
    random=st.randoms(use_true_random=False),
    window_bytes=st.sampled_from(WINDOWS),
)
@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
def test_any_drops_stores_and_homes_of_any_graph_are_bitwise(
    tmp_path_factory, steps, random, window_bytes
):
    torch.manual_seed(0)
    model = Graph(steps)
    x = torch.randn(ROWS, COLUMNS)
    try:
        expected = run(model, x, contextlib.nullcontext())
    except RuntimeError as error:
        if "inplace operation" in str(error) or "a view" in str(error):
            return  # autograd itself refuses this graph
        raise
    ops = record(model, lambda: model(x), backward=True)
    treatments = {id(m): random.choice(("keep", "drop", "store", "store")) for m in ops.made}
    homes = {id(m): random.choice((None, m.op + 1 + random.randrange(40))) for m in ops.made}

    def home(made):
        return homes[id(made)] if made.last_write < 0 else None

    tier = DiskTier(window_bytes, tmp_path_factory.mktemp("offload"), allow_memory=True)
    for stored in ("store", None):
        remat = ops.remat(lambda m, s=stored: s and treatments[id(m)] == "drop", home=home)
        offload = ops.offload(
            lambda m, s=stored: s is None or treatments[id(m)] == s, window_bytes, home=home
        )
        planned = Rematerialiser(model, remat, offload, tier)
        got = run(model, x, planned.forward())
        outcome = planned.outcome()
        assert outcome.observations.divergence == ""
        assert outcome.observations.kept_drops == []
        assert outcome.offloaded == len(offload["stores"])
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    moved = tier.moved()
    assert moved.bytes_read >= moved.bytes_written * 0.5


def test_the_generator_argument_is_honoured():
    generator = torch.Generator()
    model = nn.Linear(3, 3)
    x = torch.randn(5, 3)

    def forward():
        y = model(x)
        return (y * torch.empty_like(y).normal_(generator=generator)).tanh().sum()

    def run_once(context):
        model.zero_grad()
        generator.manual_seed(9)
        with context:
            loss = forward()
        loss.backward()
        return model.weight.grad.clone(), generator.get_state()

    expected = run_once(contextlib.nullcontext())
    remat = Rematerialiser(model, record(model, forward).remat())
    got = run_once(remat.forward())
    assert remat.outcome().replayed_ops > 2
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


@pytest.mark.parametrize("drop_all", [True, False])
def test_a_pinned_argument_that_is_written_to_is_copied(drop_all):
    """Engine plans exclude this; the executor must be right all the same."""
    model = nn.Linear(4, 4)
    x = torch.randn(2, 4)

    def forward():
        h = model(x)
        y = h + 1.0
        z = y.sin()
        h.mul_(2.0)
        return (z * h).sum()

    def run_once(context):
        model.zero_grad()
        with context:
            loss = forward()
        loss.backward()
        return model.weight.grad.clone()

    expected = run_once(contextlib.nullcontext())
    ops = record(model, forward)
    remat = Rematerialiser(model, ops.remat(lambda m: drop_all or "addmm" not in m.name))
    assert torch.equal(expected, run_once(remat.forward()))
    assert remat.outcome().replayed_ops > 0
