"""Graphs that a backward does not run through."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from memfit.track.idle_graphs import IdleGraphs


def forward(layer: nn.Module) -> Tensor:
    return layer(torch.randn(2, 4)).square().mean()


def test_graphs_that_share_nothing_but_parameters_are_idle():
    layer = nn.Linear(4, 4)
    loss, other = forward(layer), forward(layer)
    idle = IdleGraphs([loss])
    assert idle.has(other.grad_fn)
    assert not idle.has(loss.grad_fn)


def test_a_graph_is_not_idle_of_which_a_part_runs():
    layer = nn.Linear(4, 4)
    hidden = layer(torch.randn(2, 4))
    loss, other = hidden.square().mean(), hidden.abs().mean()
    idle = IdleGraphs([loss])
    assert not idle.has(other.grad_fn)
    assert not idle.has((other * 2).grad_fn), "what leads to it is not either"


def test_what_leads_to_idle_graphs_alone_is_idle():
    layer = nn.Linear(4, 4)
    loss, other, third = (forward(layer) for _ in range(3))
    idle = IdleGraphs([loss])
    assert idle.has(other.grad_fn)
    assert idle.has((other + third).grad_fn)


def test_a_graph_made_in_the_backward_may_have_one_of_its_own():
    layer = nn.Linear(4, 4)
    loss, other = forward(layer), forward(layer)
    begin = torch._C._autograd._get_sequence_nr()
    idle = IdleGraphs([loss], begin)
    assert not idle.has(forward(layer).grad_fn)
    assert idle.has(other.grad_fn)


def test_nothing_is_idle_where_no_backward_runs():
    assert not IdleGraphs([]).has(forward(nn.Linear(4, 4)).grad_fn)
