"""Models that are called with objects: steps of other sizes are other steps."""

from __future__ import annotations

from collections import UserDict
from pathlib import Path
from types import SimpleNamespace

import torch
from ran import inline
from torch import nn

from memfit.run.script.object_sizes import given_sizes, object_sizes
from memfit.run.script.planned_step import key_of

GRAPHS = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    class Batch:
        def __init__(self, nodes):
            self.x, self.edges = torch.randn(nodes, 64), torch.randint(0, nodes, (2, 3 * nodes))
    class Layer(nn.Module):
        def __init__(self, inside):
            super().__init__()
            self.own, self.others = nn.Linear(inside, 128), nn.Linear(inside, 128)
        def forward(self, x, edges):
            gathered = torch.zeros_like(x).index_add_(0, edges[1], x[edges[0]])
            return (self.own(x) + self.others(gathered)).relu()
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Layer(64), *[Layer(128) for _ in range(4)]])
        def forward(self, batch):
            x = batch.x
            for layer in self.layers:
                x = layer(x, batch.edges)
            return x
    net = Net()
    optimizer = torch.optim.Adam(net.parameters())
    for step in range(12):
        loss = net(Batch(int(torch.randint(2000, 4000, ())))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(repr(loss.item()))
    torch.save(net.state_dict(), "trained.pt")
"""
"""The largest step takes 49 MiB."""


def test_batches_of_graphs_differ_in_size(tmp_path: Path):
    """All had one key, and ran by the plan for the first of them, which they left."""
    ran = inline(tmp_path, "36MiB", GRAPHS, offload=str(tmp_path))
    assert ran.fitting["verdict"]["kept"], ran.stderr


LISTS = GRAPHS.replace(
    "def forward(self, batch):\n            x = batch.x",
    """def forward(self, graphs):
            x = torch.cat([x for x, _ in graphs])
            nodes = torch.tensor([len(x) for x, _ in graphs])
            before = torch.cumsum(nodes, 0) - nodes
            edges = torch.cat([it + at for (_, it), at in zip(graphs, before)], dim=1)""",
).replace("batch.edges", "edges")
LISTS = LISTS.replace(
    "net(Batch(int(torch.randint(2000, 4000, ()))))",
    "net([tuple(vars(Batch(int(n))).values()) for n in torch.randint(100, 220, (20,))])",
)


def test_steps_on_lists_of_graphs_are_of_the_sizes_of_all(tmp_path: Path):
    """No list was like another: all were recorded, and none foreseen from others."""
    ran = inline(tmp_path, "26MiB", LISTS, offload=str(tmp_path))
    assert ran.fitting["verdict"]["kept"], ran.stderr
    assert ran.loops[0]["observed"]["steps"] <= 4, ran.stderr


def test_tensors_in_objects_are_added_up_by_name():
    def graph(nodes: int) -> SimpleNamespace:
        x, inner = torch.zeros(nodes, 4), SimpleNamespace(edges=torch.zeros(2, nodes).long())
        return SimpleNamespace(x=x, store=inner, label=3, model=nn.Linear(8, 8))

    assert object_sizes([graph(3), "text", None, graph(5)]) == [
        ((32,), torch.float32),
        ((16,), torch.int64),
    ]
    assert object_sizes([UserDict(ids=torch.zeros(7))]) == [((7,), torch.float32)]


def test_items_of_a_long_list_are_added_up_by_their_names_beside_the_largest():
    sizes = [*range(20, 30)]
    items = [{"x": torch.zeros(n, 4), "edges": torch.zeros(2, 3 * n).long()} for n in sizes]
    assert given_sizes(((items, torch.zeros(2, 3)), {})) == [
        ((sum(sizes) * 4,), torch.float32),
        ((29 * 4,), torch.float32),
        ((sum(sizes) * 6,), torch.int64),
        ((29 * 6,), torch.int64),
        ((2, 3), torch.float32),
    ]
    few = items[:2]
    assert given_sizes(((few,), {}))[2] == ((21, 4), torch.float32)
    arguments = tuple(torch.zeros(n, 2) for n in sizes)
    assert given_sizes((arguments, {})) == [((n, 2), torch.float32) for n in sizes]


def test_what_holds_itself_has_an_end():
    it = SimpleNamespace(x=torch.zeros(2))
    it.itself = it
    assert object_sizes([it]) == [((2,), torch.float32)] * 3
    many = SimpleNamespace(**{f"n{i}": torch.zeros(1) for i in range(10_000)})
    assert len(object_sizes([many])) < 10_000


def test_caches_that_grow_make_no_new_kinds_of_evaluations():
    cache = SimpleNamespace(keys=torch.zeros(3))
    model = nn.Linear(2, 2)
    assert key_of(model, ((torch.zeros(1, 2), cache), {}))[-1] == ((3,), torch.float32)
    with torch.no_grad():
        assert key_of(model, ((torch.zeros(1, 2), cache), {}))[-1] == ((1, 2), torch.float32)
