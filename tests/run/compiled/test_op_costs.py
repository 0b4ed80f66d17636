"""Nominal costs of ops: what Inductor computes inside a reader moves nothing."""

import pytest
import torch
import torch.nn.functional as F
from graphs import run
from torch import nn

from memfit.run.compiled import search
from memfit.run.compiled.inductor.fusion import op_name
from memfit.run.compiled.inductor.op_costs import costs
from memfit.run.compiled.schedule import KEEP_ALL

ROWS, WIDTH = 64, 32
SIZE = ROWS * WIDTH * 4


class Net(nn.Module):
    """Two matrix products with elementwise ops between them."""

    def __init__(self, between):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.between = between

    def forward(self, x):
        return self.second(self.between(self.first(x))).square().mean()


def joint_of(between):
    return run(Net(between), (torch.randn(ROWS, WIDTH),), lambda _: KEEP_ALL).joints[0]


def forward_costs(joint):
    """Of each op of forward that is no view, its name and cost."""
    every = zip(joint.ops[: joint.forward_end], costs(joint), strict=False)
    return [(op_name(op.node), cost) for op, cost in every if not op.view]


def test_elementwise_ops_between_library_kernels_move_one_source_and_one_result():
    found = forward_costs(joint_of(lambda x: torch.relu(x * 2 + 1) * 3))
    between = [cost.moved_bytes for name, cost in found if name in {"mul", "add", "relu"}]
    # What squares and means comes after the second product.
    assert between == [0, 0, 0, 2 * SIZE]
    product = next(cost for name, cost in found if name == "addmm")
    assert product.flops == 2 * ROWS * WIDTH * WIDTH
    assert product.moved_bytes == (WIDTH + WIDTH * WIDTH) * 4 + 2 * SIZE


def test_functions_of_many_operations_cost_them_inside_a_reader_too():
    found = dict(forward_costs(joint_of(lambda x: torch.erf(x) * 3)))
    assert found["erf"].moved_bytes == 0
    assert found["erf"].seconds == pytest.approx(ROWS * WIDTH * 1e-9, rel=0.5)
    assert found["mul"].seconds < found["erf"].seconds


def test_a_gather_moves_the_rows_it_gathers_and_not_the_table():
    class Lookup(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(100_000, WIDTH), nn.Linear(WIDTH, 4)

        def forward(self, ids):
            return self.head(self.table(ids)).square().mean()

    joint = run(Lookup(), (torch.randint(100, (ROWS,)),), lambda _: KEEP_ALL).joints[0]
    found = dict(forward_costs(joint))
    assert SIZE <= found["embedding"].moved_bytes <= 4 * SIZE


def test_normalised_activations_are_computed_again_before_products_are():
    width, rows = 128, 1024

    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(6)])

        def forward(self, x):
            for layer in self.layers:
                x = F.relu(F.layer_norm(layer(x), (width,)) * 2 + 1)
            return x.square().mean()

    joint = run(Deep(), (torch.randn(rows, width),), lambda _: KEEP_ALL).joints[0]
    full = search.choose(joint, 1 << 60).peak_bytes
    chosen = search.choose(joint, full - 4 * rows * width * 4)
    names = [op_name(joint.ops[op].node) for op in chosen.schedule.recomputed]
    assert names.count("relu") == 4
    assert "addmm" not in names


def test_a_softmax_is_saved_as_what_it_is_computed_from():
    class Classes(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.head = nn.Linear(WIDTH, 512), nn.Linear(512, 1000)

        def forward(self, x, targets):
            return F.cross_entropy(self.head(torch.relu(self.first(x))), targets)

    batch = torch.randn(256, WIDTH), torch.randint(1000, (256,))
    joint = run(Classes(), batch, lambda _: KEEP_ALL).joints[0]
    full = search.choose(joint, 1 << 60, fused=True)
    chosen = search.choose(joint, full.peak_bytes - 256 * 512, fused=True)

    def saved(choice):
        storages = {joint.tensors[t].storage for t in choice.schedule.saved}
        ops = [joint.storages[s].op for s in storages if joint.storages[s].bytes == 256 * 1000 * 4]
        return [op_name(joint.ops[op].node) for op in ops]

    assert saved(full) == ["sub"]
    assert saved(chosen) == ["addmm"]
    assert chosen.peak_bytes <= full.peak_bytes
