"""Random programs of functions of rows, in slices of edges and whole: the same results."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memfit.apply.slices.edge_rules import _RULES, _activation, _elementwise
from memfit.apply.slices.edges import SlicedEdges

NODES, EDGES, WIDTH = 11, 40, 4

ONE = {
    "relu": torch.relu,
    "leaky": lambda a: F.leaky_relu(a, 0.1),
    "gelu": F.gelu,
    "silu": F.silu,
    "softplus": F.softplus,
    "tanh": lambda a: a.tanh(),
    "negative": lambda a: -a,
    "from a number": lambda a: 1 - a,
    "over a number": lambda a: a / 3,
    "number over": lambda a: 2 / (a * a + 1),
    "clamped": lambda a: a.clamp(-1, 1),
    "squared": lambda a: (a**2).clamp(max=4.0),
    "softmax": lambda a: a.softmax(-1),
    "log softmax": lambda a: F.log_softmax(a, dim=1),
    "scaled by its sum": lambda a: a * a.sum(-1, keepdim=True).sigmoid(),
    "less its mean": lambda a: a - a.mean(dim=(1,), keepdim=True),
    "norm": lambda a: F.layer_norm(a, (WIDTH,)),
    "in heads": lambda a: (a.view(EDGES, 2, 2) * torch.arange(2.0)[:, None]).flatten(1),
    "in heads of -1": lambda a: a.reshape(-1, 2, 2).sigmoid().reshape(-1, WIDTH),
    "through a dimension": lambda a: a.unsqueeze(1).exp().squeeze(1).clamp(max=9),
    "halves": lambda a: torch.cat([a[:, 2:], a[:, :2] * 2], dim=-1),
    "one of each": lambda a: a * a[:, 0].unsqueeze(1),
    "no dropout": lambda a: F.dropout(a, 0.5, training=False),
    "gated": lambda a: torch.cat([g.sigmoid() * h for g, h in [a.chunk(2, -1)]] * 2, 1),
    "parts": lambda a: torch.cat([it * 2 for it in torch.split(a, [1, 3], dim=1)], 1),
    "where": lambda a: torch.where(a > 0, a, a * 0.1),
    # Not of rows: these need them whole.
    "order": lambda a: a.flip(0),
    "running sum": lambda a: a.cumsum(0) / EDGES,
    "less the mean of all": lambda a: a - a.mean(0),
    "transposed": lambda a: (a.t() * 2).t(),
    "in place": lambda a: a.clone().mul_(2),
    "maximum": lambda a: a - a.amax(),
}
TWO = {
    "sum": lambda a, b: a + b,
    "product": lambda a, b: a * b,
    "difference": torch.sub,
    "quotient": lambda a, b: a / (b.abs() + 1),
    "maximum": torch.maximum,
    "beside": lambda a, b: torch.cat((a, b), 1)[:, 1:-3],
    "mixed": lambda a, b: torch.lerp(a, b, 0.25),
    "matrix of each": lambda a, b: (a.unsqueeze(1) @ b.view(EDGES, 4, 1)).squeeze(1) + a,
}
SUMS = {
    "add": lambda t, m: torch.zeros(NODES, WIDTH, dtype=m.dtype).index_add(0, t, m),
    "add in place": lambda t, m: m.new_zeros(NODES, WIDTH).index_add_(0, t, m),
    "scatter": lambda t, m: m.new_zeros(NODES, WIDTH).scatter_add_(
        0, t.view(-1, 1).expand_as(m), m
    ),
    "mean": lambda t, m: m.new_ones(NODES, WIDTH).scatter_reduce(
        0, t.view(-1, 1).expand(-1, WIDTH), m, "mean", include_self=False
    ),
    "largest": lambda t, m: m.new_zeros(NODES, WIDTH).scatter_reduce(
        0, t.view(-1, 1).expand(-1, WIDTH), m, "amax"
    ),
    "put": lambda t, m: m.new_zeros(NODES, WIDTH).index_put((t - NODES,), m, accumulate=True),
    "rows": lambda t, m: m,
}

steps = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(sorted(ONE)), st.integers(0, 9)),
        st.tuples(st.sampled_from(sorted(TWO)), st.integers(0, 9), st.integers(0, 9)),
        st.tuples(st.just("linear"), st.integers(0, 9)),
        st.tuples(st.just("matrix"), st.integers(0, 9)),
    ),
    max_size=7,
)


def _run(program, sums, slices):
    torch.manual_seed(0)
    leaves = [
        torch.randn(*shape, dtype=torch.float64, requires_grad=True)
        for shape in ((NODES, WIDTH), (EDGES, WIDTH), (EDGES, 1), (WIDTH, WIDTH), (WIDTH,))
    ]
    x, features, weight, matrix, bias = leaves
    source, target = torch.randint(0, NODES, (2, EDGES))
    sliced = SlicedEdges({"slices": slices, "least_bytes": 1}, warn=False) if slices else None
    with sliced.forward() if sliced else contextlib.nullcontext():
        pool = [x[source], x.tanh().index_select(0, target), features, x[source] * weight]
        for name, *which in program:
            values = [pool[it % len(pool)] for it in which]
            if name == "linear":
                pool.append(F.linear(values[0], matrix, bias))
            elif name == "matrix":
                pool.append(values[0] @ matrix)
            else:
                pool.append((ONE if len(values) == 1 else TWO)[name](*values))
        results = [SUMS[name](target, pool[which % len(pool)]) for name, which in sums]
        loss = sum((it * torch.linspace(0, 1, WIDTH)).sin().sum() for it in results)
        del pool, values
    loss.backward()
    return [loss.detach(), *(it.grad for it in leaves)], sliced


@given(
    steps,
    st.lists(st.tuples(st.sampled_from(sorted(SUMS)), st.integers(0, 9)), min_size=1, max_size=3),
    st.integers(1, 20),
)
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_programs_of_rows_are_as_whole_ones(program, sums, slices):
    program = [*program, ("relu", 0)]
    truth, _ = _run(program, sums, 0)
    made, _ = _run(program, sums, slices)
    for one, other in zip(made, truth, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert torch.allclose(one, other, rtol=1e-9, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("name", sorted(ONE.keys() - {"order", "running sum", "transposed"}))
def test_functions_of_rows_are_put_off(name):
    whole = {"less the mean of all", "in place", "maximum"}
    _, sliced = _run([(name, 3)], [("add", 4)], 5)
    assert bool(sliced.whole) == (name in whole)


@pytest.mark.parametrize("name", sorted(TWO))
def test_functions_of_two_values_are_put_off(name):
    _, sliced = _run([(name, 0, 3)], [("add", 4)], 5)
    assert not sliced.whole


@pytest.mark.parametrize("name", sorted(SUMS))
def test_sums_take_rows_in_slices(name):
    _, sliced = _run([("relu", 3)], [(name, 4)], 5)
    assert bool(sliced.whole) == (name in {"largest", "rows"})


def test_every_function_of_one_value_that_is_known_treats_rows_one_by_one():
    torch.manual_seed(0)
    x = torch.rand(EDGES, WIDTH, dtype=torch.float64) / 2 + 0.25
    tried = 0
    for func in (it for it, rule in _RULES.items() if rule in {_elementwise, _activation}):
        try:
            whole = func(x)
        except (TypeError, RuntimeError):
            continue  # it takes more than one value
        if not isinstance(whole, torch.Tensor):
            continue  # the same, said in another way
        parts = torch.cat([func(it) for it in x.split(7)])
        assert torch.allclose(parts, whole), func
        tried += 1
    assert tried >= 40
