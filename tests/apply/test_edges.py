"""Messages along edges in slices: results as of whole ones, and whole for who needs them."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memfit.apply.proven_ops import LeftProof
from memfit.apply.slices.edges import EdgeTensor, SlicedEdges
from memfit.errors import DivergenceWarning, UsageError

NODES, EDGES, WIDTH, SLICES = 50, 700, 8, 7
TOLERANCE = 1e-5


def graph():
    torch.manual_seed(0)
    return torch.randint(0, NODES, (2, EDGES))


def sliced(**changed):
    return SlicedEdges({"slices": SLICES, "least_bytes": 1, **changed})


class Layer(nn.Module):
    """Node values, a weight and features for each edge, and layers that messages go through."""

    def __init__(self, convolve):
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.messages = nn.Sequential(
            nn.Linear(2 * WIDTH + 3, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, WIDTH)
        )
        self.attention = nn.Parameter(torch.randn(2, WIDTH // 2))
        self.x = nn.Parameter(torch.randn(NODES, WIDTH))
        self.weight = nn.Parameter(torch.rand(EDGES))
        self.features = nn.Parameter(torch.randn(EDGES, 3))
        self.convolve = convolve

    def forward(self, edges):
        return self.convolve(self, self.linear(self.x), *edges)


def gcn(layer, x, source, target):
    messages = x[source] * layer.weight.unsqueeze(1)
    return torch.zeros_like(x).index_add(0, target, messages)


def gcn_in_place(layer, x, source, target):
    return x.new_zeros(NODES, WIDTH).index_add_(0, target, layer.weight[:, None] * x[source])


def sage_sum(layer, x, source, target):
    return x + torch.zeros(NODES, WIDTH).index_add_(0, target, x.index_select(-2, source))


def sage_mean(layer, x, source, target):
    index = target.unsqueeze(1).expand(-1, WIDTH)
    return x.new_zeros(NODES, WIDTH).scatter_reduce(0, index, x[source], "mean", include_self=False)


def mean_with_itself(layer, x, source, target):
    index = target.unsqueeze(1).expand(-1, WIDTH)
    return (x * 2).scatter_reduce_(0, index, x[source].relu(), reduce="mean")


def scattered_as_pyg_does(layer, x, source, target):
    messages = x.index_select(-2, source)
    index = target.view(-1, 1).expand_as(messages)
    return messages.new_zeros(NODES, WIDTH).scatter_add_(0, index, messages)


def mpnn(layer, x, source, target):
    given = torch.cat([x[source], x[target], layer.features], dim=-1)
    return torch.zeros_like(x).index_put((target,), layer.messages(given), accumulate=True)


def gat(layer, x, source, target):
    h = x.view(NODES, 2, WIDTH // 2)
    scores = F.leaky_relu((h[source] + h[target]) * layer.attention, 0.2).sum(-1)
    index = target.unsqueeze(1).expand(-1, 2)
    largest = torch.zeros(NODES, 2).scatter_reduce(0, index, scores, "amax", include_self=False)
    scores = (scores - largest[target]).exp()
    alpha = scores / torch.zeros(NODES, 2).index_add(0, target, scores)[target]
    return torch.zeros_like(h).index_add(0, target, h[source] * alpha.unsqueeze(-1)).flatten(1)


def gated(layer, x, source, target):
    given = torch.cat((x[source], x[target]), 1)
    gate = torch.sigmoid(given[:, :WIDTH])
    return torch.zeros_like(x).index_add(0, target, gate * F.softplus(given[:, WIDTH:]))


def negative(layer, x, source, target):
    return torch.zeros_like(x).index_put_((target - NODES,), x[source - NODES], accumulate=True)


FORMS = [
    *(gcn, gcn_in_place, sage_sum, sage_mean, mean_with_itself, scattered_as_pyg_does, mpnn),
    *(gat, gated, negative),
]


def results(convolve, slices=None, *, then=None):
    """The result of a layer and gradients of all that it trains."""
    layer, edges = Layer(convolve), graph()
    with slices.forward() if slices else contextlib.nullcontext():
        made = layer(edges)
        loss = (made * torch.linspace(0, 1, WIDTH)).square().sum()
    if then is not None:
        then(layer)
    loss.backward()
    return [made.detach(), *(it.grad for it in layer.parameters() if it.grad is not None)]


def assert_near(given, truth):
    assert len(given) == len(truth)
    for one, other in zip(given, truth, strict=True):
        assert one.shape == other.shape
        assert (one - other).abs().max() <= TOLERANCE * other.abs().max().clamp(min=1e-9)


@pytest.mark.parametrize("convolve", FORMS)
def test_sums_and_gradients_are_as_those_of_whole_messages(convolve):
    slices = sliced()
    assert_near(results(convolve, slices), results(convolve))
    assert slices.sums >= 1
    assert slices.divergence == ""


def test_messages_never_exist_whole():
    seen = []
    from torch.utils._python_dispatch import TorchDispatchMode

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made = func(*args, **(kwargs or {}))
            if isinstance(made, torch.Tensor) and made.dim() > 1:
                seen.append(made.shape[0])
            return made

    for convolve in (gcn, scattered_as_pyg_does):
        with Sizes():
            layer, edges = Layer(convolve), graph()
            seen.clear()
            with sliced().forward():
                loss = layer(edges).sum()
            loss.backward()
        views = {EDGES}  # of what exists for edges, as their weights do
        assert max(set(seen) - views) <= max(NODES, -(-EDGES // SLICES))


def _dropout(layer, x, source, target):
    torch.manual_seed(3)
    return torch.zeros_like(x).index_add(0, target, F.dropout(x[source], 0.5))


def _in_place(layer, x, source, target):
    messages = x[source]
    messages *= 2
    return torch.zeros_like(x).index_add(0, target, messages)


def _hooked(layer, x, source, target):
    messages = x[source] * layer.weight[:, None]
    messages.register_hook(lambda gradient: gradient * 2)
    return torch.zeros_like(x).index_add(0, target, messages)


def _by_numpy(layer, x, source, target):
    messages = x[source]
    messages.detach().numpy()
    return torch.zeros_like(x).index_add(0, target, messages)


def _normalised_over_edges(layer, x, source, target):
    messages = x[source]
    messages = (messages - messages.mean(0)) / messages.std(0)
    return torch.zeros_like(x).index_add(0, target, messages)


def _transposed(layer, x, source, target):
    return torch.zeros_like(x).index_add(0, target, (x[source].t() * 2).t())


def _along_edges(layer, x, source, target):
    return torch.zeros_like(x).index_add(0, target, torch.cat([x[source][:9], x[source][9:]]))


def _source_changes(layer, x, source, target):
    x = x * 1
    messages = x[source]
    x += 1
    return torch.zeros_like(x).index_add(0, target, messages) + x


def _index_changes(layer, x, source, target):
    source = source.clone()
    messages = x.detach()[source]
    source.zero_()
    return torch.zeros_like(x).index_add(0, target, messages) + x


def _wider_scatter(layer, x, source, target):
    index = target.unsqueeze(1).repeat(1, WIDTH)
    return torch.zeros_like(x).scatter_add(0, index, x[source])


def _through_a_function(layer, x, source, target):
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, given):
            return given * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    return torch.zeros_like(x).index_add(0, target, Double.apply(x[source]))


def _written_after_use(layer, x, source, target):
    messages = x[source]
    doubled = messages * 2
    messages.mul_(3)
    return torch.zeros_like(x).index_add(0, target, doubled)


def _written_through_a_view(layer, x, source, target):
    messages = x[source]
    heads = messages.view(EDGES, 2, -1)
    heads.mul_(3)
    return torch.zeros_like(x).index_add(0, target, messages)


def _view_of_what_is_written(layer, x, source, target):
    messages = x[source]
    part = messages[:, :4]
    messages.mul_(3)
    return torch.cat([torch.zeros(NODES, 4).index_add(0, target, part)] * 2, 1)


def _two_views(layer, x, source, target):
    messages = x[source]
    left, right = messages[:, :4], messages[:, 4:]
    right.add_(left)
    return torch.zeros_like(x).index_add(0, target, torch.cat([left, right], 1))


def _many_steps(layer, x, source, target):
    messages = x[source]
    for step in range(200):
        messages = messages * (1 + 0.001 * step)
    return torch.zeros_like(x).index_add(0, target, messages * 1e-8)


def _to_itself(layer, x, source, target):
    x = x * 1
    return x.index_add_(0, target, x[source].sigmoid())


@pytest.mark.parametrize(
    "convolve",
    [
        *(_dropout, _in_place, _hooked, _by_numpy, _normalised_over_edges, _transposed),
        *(_along_edges, _source_changes, _index_changes, _wider_scatter, _through_a_function),
        *(
            _to_itself,
            _written_after_use,
            _view_of_what_is_written,
            _written_through_a_view,
            _two_views,
            _many_steps,
        ),
    ],
)
def test_what_is_not_known_to_treat_rows_one_by_one_gets_them_whole(convolve):
    truth = results(convolve)
    slices = sliced()
    with pytest.warns(DivergenceWarning, match="needs rows of all edges"):
        made = results(convolve, slices)
    assert_near(made, truth)
    assert "whole" in slices.divergence
    again = sliced(kept=slices.to_be_kept)
    assert_near(results(convolve, again), truth)
    assert again.divergence == ""


def test_what_a_sum_was_made_of_may_be_written_to_where_gathers_do_not_save_it():
    def convolve(layer, x, source, target):
        x = x * 1
        made = torch.zeros_like(x).index_add(0, target, x[source] * layer.weight.detach()[:, None])
        x += made
        return x + made

    slices = sliced()
    assert_near(results(convolve, slices), results(convolve))
    assert slices.sums == 1
    assert slices.divergence == ""


def test_rows_that_live_on_are_made_at_the_end_of_the_forward():
    kept = []

    def convolve(layer, x, source, target):
        kept.append(x[source])
        return torch.zeros_like(x).index_add(0, target, kept[-1])

    slices = sliced()
    with pytest.warns(DivergenceWarning, match="the end of the forward"):
        results(convolve, slices)
    assert type(kept[0]) is EdgeTensor
    assert torch.equal(kept[0] * 1, kept[0].become_real("") * 1)


@pytest.mark.parametrize("look", [lambda it: it.retain_grad(), lambda it: it.grad_fn])
def test_a_gradient_that_is_asked_for_too_late_is_refused(look):
    def convolve(layer, x, source, target):
        messages = x[source]
        made = torch.zeros_like(x).index_add(0, target, messages * 2)
        look(messages)
        return made

    with pytest.raises(LeftProof, match="after they were added up in slices"):
        results(convolve, sliced())


@pytest.mark.parametrize("convolve", [gcn, mpnn, gat])
def test_gradients_may_be_differentiated(convolve):
    def twice(slices):
        layer, edges = Layer(convolve), graph()
        with slices.forward() if slices else contextlib.nullcontext():
            loss = layer(edges).square().sum()
        (of_x,) = torch.autograd.grad(loss, layer.x, create_graph=True)
        of_x.square().sum().backward()
        return [it.grad for it in layer.parameters() if it.grad is not None]

    assert_near(twice(sliced()), twice(None))


def test_a_kept_graph_gives_its_gradients_again():
    layer, edges = Layer(gcn), graph()
    with sliced().forward():
        loss = layer(edges).sum()
    loss.backward(retain_graph=True)
    once = layer.x.grad.clone()
    loss.backward()
    assert torch.equal(layer.x.grad, 2 * once)


def test_without_gradients_nothing_is_saved():
    layer, edges = Layer(gcn), graph()
    with torch.no_grad():
        truth = layer(edges)
        slices = sliced()
        with slices.forward():
            made = layer(edges)
    assert torch.equal(made, truth)
    assert slices.sums == 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_runs_again_is_left_alone(reentrant):
    from torch.utils.checkpoint import checkpoint

    def convolve(layer, x, source, target):
        return checkpoint(gcn, layer, x, source, target, use_reentrant=reentrant)

    slices = sliced()
    assert_near(results(convolve, slices), results(convolve))
    assert slices.sums == 0


def test_under_autocast_messages_are_whole():
    slices = sliced()
    with torch.autocast("cpu", torch.bfloat16):
        truth, made = results(negative), results(negative, slices)
    assert all(map(torch.equal, made, truth))
    assert slices.sums == 0


def test_few_or_small_rows_are_not_put_off():
    for slices in (sliced(least_bytes=EDGES * WIDTH * 4 + 1), sliced(slices=EDGES)):
        results(gcn, slices)
        assert slices.sums == 0


def test_an_index_that_is_out_of_range_is_an_error():
    layer = Layer(gcn)
    source, target = graph()
    source[3] = NODES
    with pytest.raises(IndexError), sliced().forward():
        layer((source, target))


@pytest.mark.parametrize("edges", [{}, {"slices": 4}, {"slices": 0, "least_bytes": 1}])
def test_a_plan_that_cannot_be_followed_is_named(edges):
    with pytest.raises(UsageError):
        SlicedEdges(edges)


def test_a_second_forward_counts_anew():
    slices = sliced()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results(_dropout, slices)
    results(gcn, slices)
    assert (slices.sums, slices.divergence) == (1, "")


class _Squared(torch.autograd.Function):
    """A function of a script's own, which takes a tensor without asking torch's functions."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


@pytest.mark.parametrize("asked", ["grad", "backward"])
def test_gradients_pass_through_functions_of_autograds_own(asked: str):
    """Also those that are asked for by `torch.autograd.grad`, which leaves gradients alone."""
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(8, 8), torch.randn(50, 8)
    source, target = torch.randint(0, 50, (2, 4000))
    weights = list(layer.parameters())

    def loss() -> torch.Tensor:
        nodes = layer(x)
        messages = _Squared.apply(nodes[source])
        return (torch.zeros_like(nodes).index_add(0, target, messages) + nodes).square().mean()

    def gradients(of: torch.Tensor) -> list[torch.Tensor]:
        if asked == "backward":
            layer.zero_grad()
            of.backward()
            return [it.grad for it in weights]
        return list(torch.autograd.grad(of, weights))

    expected = gradients(loss())
    sliced = SlicedEdges({"slices": 4, "least_bytes": 1}, warn=False)
    with sliced.forward():
        made = loss()
    assert sliced.whole
    torch.testing.assert_close(gradients(made), expected)
