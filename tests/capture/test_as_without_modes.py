"""What torch does in place without a mode is recorded as done in place, with the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from peaks import measured_peak, predicted_peak
from ran import inline
from torch import Tensor, nn
from torch.nn import functional
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from memfit.capture import record
from memfit.tensors.as_without_modes import Formulas
from memfit.workload import Workload


class Of(nn.Module):
    """Computes with one parameter what it is told to."""

    def __init__(self, compute: Callable[[Tensor, Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.compute = compute
        self.weight = nn.Parameter(torch.randn(shape))

    def forward(self, batch: Tensor) -> Tensor:
        return self.compute(self.weight, batch)


ROWS = torch.arange(64) * 7
SIGNS = torch.randn(32, 200, 64)


def weighted(weight: Tensor, batch: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(
        weight * batch, batch.sigmoid(), pos_weight=torch.full((64,), 2.0), reduction="none"
    )


FORMULAS = {
    "index": (lambda weight, rows: weight[rows], (2048, 256), ROWS),
    "mask": (lambda weight, rows: weight.sin()[rows], (2048, 256), torch.arange(2048) % 9 == 0),
    "gather": (
        lambda weight, rows: torch.take_along_dim(weight.sin(), rows.unsqueeze(1), 0),
        (2048, 256),
        ROWS,
    ),
    "topk": (lambda weight, batch: (weight * batch).topk(8, -1)[0], (200, 64), SIGNS),
    "max": (lambda weight, batch: (weight * batch).max(-1)[0], (200, 64), SIGNS),
    "median": (lambda weight, batch: (weight * batch).median(-1)[0], (200, 64), SIGNS),
    "weighted": (weighted, (200, 64), SIGNS),
}


def workload(name: str) -> Workload:
    torch.manual_seed(0)
    compute, shape, batch = FORMULAS[name]
    return Workload(
        Of(compute, *shape),
        batch,
        lambda model, batch: model(batch).square().mean(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )


@pytest.mark.parametrize("name", FORMULAS)
def test_formulas_of_autograd_take_what_they_take_without_a_mode(name):
    assert predicted_peak(record(workload(name))) == measured_peak(workload(name))


INDEXED = """
    import torch
    from torch import nn

    class Memory(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(4096, 512))
            self.inner = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
        def forward(self, rows):
            return self.inner(self.table[rows].tanh())

    torch.manual_seed(0)
    model = Memory()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        loss = model(torch.arange(64) * (step + 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(repr(loss.item()), model.table[7].sum().item().hex())
"""


def test_a_recorded_step_of_a_script_takes_what_it_takes_alone(tmp_path: Path):
    """The table's gradient takes 8 MiB: beside another one the step would not fit."""
    ran = inline(tmp_path, "28MiB", INDEXED, "--no-offload")
    assert ran.loops[0]["plan"]["fits"], ran.stderr
    assert ran.loops[0]["plan"]["actions"] == []
    assert ran.fitting["verdict"]["kept"], ran.stderr


OF_THE_SCRIPT = """
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    rows = torch.arange(64)

    def weigh(gradient):  # while the node of an index runs
        scale = torch.ones(64, 512)
        other = scale.index_put((rows[:32],), torch.full((32, 512), 3.0))
        return gradient * scale + other * 0.01

    def computed_again(table):  # in that node, for its rows
        with torch.no_grad():
            scale = torch.ones(64, 512)
            other = scale.index_put((rows[:32],), torch.full((32, 512), 3.0))
        return ((table[:64] * scale) * other)[rows.clone()]

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(1024, 512))
            self.inner = nn.Linear(512, 512)
        def forward(self, kind):
            if kind == "hook":
                chosen = self.table[rows]
                chosen.register_hook(weigh)
            else:
                chosen = checkpoint(computed_again, self.table.sin(), use_reentrant=False)
            return self.inner(chosen).tanh()

    torch.manual_seed(0)
    import sys
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        loss = model(sys.argv[1]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        print(repr(loss.item()), model.table.grad.sum().item().hex())
        optimizer.step()
"""


@pytest.mark.parametrize("kind", ["hook", "checkpoint"])
def test_what_the_script_computes_while_a_node_runs_stays_as_it_is(kind, tmp_path: Path):
    """It is compared with the script alone."""
    ran = inline(tmp_path, "100MiB", OF_THE_SCRIPT, kind, fitting=["--forbid", "undo_checkpoints"])
    assert ran.loops[0]["observed"]["steps"] > 0, ran.stderr


class Plainly(TorchDispatchMode):
    """Runs a backward as one without a mode."""

    def __init__(self) -> None:
        super().__init__()
        self.formulas = Formulas()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.formulas.run(func, args, kwargs or {})


def reordered(tensor: Tensor) -> Tensor:
    """A leaf with the same numbers in another order, where it has several dimensions."""
    given = tensor.detach()
    if tensor.dim() > 1 and tensor.layout is torch.strided:
        given = given.transpose(0, -1).contiguous().transpose(0, -1)
    return given.clone().requires_grad_(tensor.requires_grad)


SEED: Callable[[int], object] = torch.default_generator.manual_seed
"""`torch.manual_seed` would note the whole stack for each kind of device that is not here."""


def gradients(op: Any, given: Any, *, in_order: bool, mode: Plainly | None) -> list[Tensor]:
    """Of a sample; empty where nothing has one."""
    alike = torch.clone if in_order else reordered
    args, kwargs = tree_map_only(
        Tensor,
        lambda it: alike(it.detach()).requires_grad_(it.requires_grad),
        ((given.input, *given.args), given.kwargs),
    )
    leaves = [it for it in tree_leaves((args, kwargs)) if isinstance(it, Tensor)]
    leaves = [it for it in leaves if it.requires_grad]
    SEED(1)
    made = [it for it in tree_leaves(op.op(*args, **kwargs)) if isinstance(it, Tensor)]
    made = [it for it in made if it.requires_grad and it.is_floating_point()]
    if not (leaves and made):
        return []
    SEED(2)
    begin = [alike(torch.randn(it.shape)) for it in made]
    if mode is None:
        found = torch.autograd.grad(made, leaves, begin, allow_unused=True)
    else:
        with mode:
            found = torch.autograd.grad(made, leaves, begin, allow_unused=True)
    return [it for it in found if it is not None and it.layout is torch.strided]


def are_same(one: Tensor, other: Tensor) -> bool:
    """Whether they are, and lie alike; what is one long may have any stride."""
    ways = zip(one.shape, one.stride(), other.stride(), strict=True)
    lies_alike = one.numel() == 0 or all(a == b for size, a, b in ways if size > 1)
    return lies_alike and torch.equal(one.nan_to_num(), other.nan_to_num())


VARY = ("torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",)
"""Its gradients differ from run to run where its mask lies in another order."""


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Two would mostly wait for each other on small tensors."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore")  # samples of what torch advises against
def test_any_op_of_torch_has_the_same_gradients_in_the_same_order_or_that_is_said():
    cases, said = 0, set()
    for op in op_db:
        if not op.supports_autograd or torch.float32 not in op.dtypes or op.name in VARY:
            continue
        SEED(0)
        # `op.sample_inputs` would look for the name of this test at each, through the whole stack.
        samples = op.sample_inputs_func(op, "cpu", torch.float32, requires_grad=True)
        for given in islice(samples, 6):
            for in_order in (True, False):
                try:
                    plain = gradients(op, given, in_order=in_order, mode=None)
                except (RuntimeError, ValueError):  # not of what lies in another order
                    assert not in_order or "as_strided" in op.name  # past a clone
                    continue
                mode = Plainly()
                others = gradients(op, given, in_order=in_order, mode=mode)
                cases += 1
                if all(map(are_same, plain, others)):
                    continue
                assert mode.formulas.others, f"{op.name}: {given}"
                said |= set(mode.formulas.others)
    assert cases > 3000
    assert said <= {
        "LinalgHouseholderProductBackward",
        "MaskedFillBackward",
        "MaxBackward",
        "MinBackward",
        "OrmqrBackward",
        "ProdBackward",
    }


ORDERED = """
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.ModuleList(nn.Linear(512, 512) for _ in range(6))
            self.scale = nn.Parameter(torch.rand(512))
        def forward(self, x):
            for number, layer in enumerate(self.inner):
                other = torch.maximum(x.t(), layer(x).t().contiguous())
                x = (x + other.t() * self.scale).tanh()
                if PROD:
                    x = x * (1 + x.mean(0).tanh().view(64, 8).prod(1).mean())
                if FILL:
                    x = x.masked_fill(x > 2, self.scale.mean())
            return x

    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(6):
        loss = model(torch.randn(48, 512)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = sum(it.double().sum().item() for it in model.parameters())
        print(f"{loss.item():.4f}" if FILL else total.hex())
"""


def ordered(*, prod: bool = False, fill: bool = False) -> str:
    return ORDERED.replace("PROD", str(prod)).replace("FILL", str(fill))


def test_the_bits_of_a_script_stay_where_a_mode_would_lay_gradients_in_another_order(
    tmp_path: Path,
):
    """It is compared with the script alone; parameters come to backward under a mode."""
    ran = inline(tmp_path, "9MiB", ordered(), offload="chosen")
    actions = {one["kind"] for one in ran.loops[0]["plan"]["actions"]}
    assert "offload_parameters" in actions, ran.stderr


@pytest.mark.parametrize("budget", ["9MiB", "100MiB"])
def test_the_bits_of_a_script_stay_where_it_multiplies_along_a_dimension(budget, tmp_path: Path):
    """It is compared with the script alone: boxes' areas are products of their sides."""
    ran = inline(tmp_path, budget, ordered(prod=True), offload="chosen")
    assert ran.loops[0]["planned"]["steps"] > 0, ran.stderr
    assert "another formula" not in ran.stderr


PRODUCTS = {
    "last": ((33, 7), lambda x: x.prod(1)),
    "first": ((33, 7), lambda x: x.prod(0, keepdim=True)),
    "all": ((33, 7), lambda x: x.prod()),
    "flat": ((31,), lambda x: x.prod(0)),
    "one": ((8, 1), lambda x: x.prod(1)),
}


@pytest.mark.parametrize("has_zero", [False, True])
@pytest.mark.parametrize("name", PRODUCTS)
def test_gradients_of_products_are_divided_by_each_factor(name, has_zero):
    shape, product = PRODUCTS[name]
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        torch.manual_seed(0)
        factors = torch.randn(shape, dtype=dtype)
        factors.view(-1)[3] *= not has_zero
        made = product(factors.requires_grad_())
        begin = torch.randn_like(made)
        (plain,) = torch.autograd.grad(made, factors, begin, retain_graph=True)
        with Plainly() as mode:
            (found,) = torch.autograd.grad(made, factors, begin)
        assert are_same(plain, found)
        assert not mode.formulas.others


def test_a_product_that_is_differentiated_twice_is_by_another_formula():
    factors = torch.randn(33, 7, requires_grad=True)
    with Plainly() as mode:
        torch.autograd.grad(factors.prod(1).sum(), factors, create_graph=True)
    assert "ProdBackward" in mode.formulas.others


def test_a_gradient_by_another_formula_is_said(tmp_path: Path):
    ran = inline(tmp_path, "100MiB", ordered(fill=True))
    assert "computes `MaskedFillBackward` by another formula" in ran.stderr
