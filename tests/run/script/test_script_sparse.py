"""``memfit run --budget`` on scripts with sparse gradients and sparse inputs."""

from __future__ import annotations

from pathlib import Path

from ran import inline


def test_sparse_gradients_and_inputs_are_planned_round(tmp_path: Path):
    ran = inline(
        tmp_path,
        "75%",
        """
    import torch
    from torch import nn

    torch.manual_seed(0)
    width, rows = 64, 1024
    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.nodes = nn.Embedding(5000, width, sparse=True)
            wide = 4 * width
            block = lambda: nn.Sequential(
                nn.Linear(width, wide), nn.GELU(), nn.Linear(wide, width)
            )
            self.layers = nn.ModuleList(block() for _ in range(4))
        def forward(self, edges, ids):
            x = self.nodes(ids)
            for layer in self.layers:
                x = x + layer(torch.sparse.mm(edges, x))
            return x
    model = Graph()
    of_nodes = torch.optim.SparseAdam([model.nodes.weight])
    of_layers = torch.optim.SGD(model.layers.parameters(), 0.1)
    edges = (torch.rand(rows, rows) * (torch.rand(rows, rows) < 0.01)).to_sparse()
    ids = torch.randint(0, 5000, (rows,))
    for step in range(4):
        loss = model(edges, ids).square().mean()
        loss.backward()
        for optimizer in (of_nodes, of_layers):
            optimizer.step()
            optimizer.zero_grad()
        print(repr(loss.item()), repr(model.nodes.weight.sum().item()))
    """,
    )
    (loop,) = ran.loops
    assert (loop["observed"]["steps"], loop["planned"]["steps"]) == (1, 3)
    assert loop["plan"]["fits"]
    assert loop["planned"]["peak_bytes"] <= loop["plan"]["budget_bytes"]
