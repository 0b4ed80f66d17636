"""Gradients written over those that they come from: the same bits, and a tensor less."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ran import inline
from torch import Tensor, nn
from torch.nn import functional

from memfit import _native
from memfit.run.script.lean_backward import IN_PLACE, LeanBackward
from memfit.run.script.lean_ops import LeanWay
from memfit.tensors.backward_in_place import WAYS, alone
from memfit.track import cpu

EXAMPLES: dict[str, Callable[[Tensor], Tensor]] = {
    "DivBackward": lambda x: x / 3.0,
    "EluBackward": functional.elu,
    "ExpBackward": torch.exp,
    "GeluBackward": lambda x: functional.gelu(x, approximate="tanh"),
    "HardtanhBackward": functional.hardtanh,
    "LeakyReluBackward": lambda x: functional.leaky_relu(x, 0.2),
    "LogBackward": lambda x: (x.abs() + 0.5).log(),
    "LogSoftmaxBackward": lambda x: functional.log_softmax(x, -1),
    "MaskedFillBackward": lambda x: x.masked_fill(x.detach() > 0.0, -2.0),
    "MulBackward": lambda x: x * torch.linspace(0.1, 1.0, x.shape[-1], dtype=x.dtype),
    "NegBackward": torch.neg,
    "ReluBackward": functional.relu,
    "SigmoidBackward": torch.sigmoid,
    "SiluBackward": functional.silu,
    "SoftmaxBackward": lambda x: x.softmax(-1),
    "SoftplusBackward": functional.softplus,
    "SqrtBackward": lambda x: (x.abs() + 0.5).sqrt(),
    "TanhBackward": torch.tanh,
}
IN_ORDER_ALONE = ("LogSoftmaxBackward", "MaskedFillBackward", "MulBackward", "SoftmaxBackward")
"""Of images in another order, their result lies in another way than the gradient, or may."""


def lean() -> LeanBackward:
    found = LeanBackward(lambda: 1, {})
    found.way.always = True
    return found


def backward(run: Callable[[], None], *, in_place: bool) -> tuple[int, int]:
    """Run a backward; how many ops wrote in place, and the most bytes above what was there."""
    ways, ran = lean(), []
    writes = ways.writes
    ways.writes = lambda call: bool(writes(call) and ran.append(type(call)) is None)  # type: ignore[method-assign]
    ways.way.always = in_place
    window, before = _native.AllocationWindow(), _native.counted_bytes()
    with ways.planned():
        run()
    peak, _ = window.peak()
    window.close()
    return len(ran), peak - before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", EXAMPLES)
def test_results_are_the_same_bits(name: str, dtype: torch.dtype):
    assert cpu.start() is None
    torch.manual_seed(0)
    for shape, order in (
        ((64, 257), torch.contiguous_format),
        ((7, 32, 5, 19), torch.contiguous_format),
        ((7, 32, 5, 19), torch.channels_last),
    ):
        given = torch.randn(shape, dtype=dtype).contiguous(memory_format=order).requires_grad_()
        weight = torch.randn(shape, dtype=dtype).contiguous(memory_format=order)
        found, taken = [], []
        for in_place in (False, True):
            given.grad = None
            loss = (EXAMPLES[name](given * 1.5) * weight).cos().sum()
            taken.append(backward(loss.backward, in_place=in_place))
            assert given.grad is not None
            found.append((given.grad.clone(), given.grad.stride()))
        assert torch.equal(found[0][0], found[1][0])
        assert found[0][1] == found[1][1]
        assert taken[0][0] == 0
        is_in_order = order is torch.contiguous_format or name not in IN_ORDER_ALONE
        assert taken[1][0] >= (3 if is_in_order else 1), "the op, and two products"


@pytest.mark.parametrize("name", WAYS)
def test_it_is_known_how_many_have_a_gradient_that_is_nobodys(name: str):
    assert name in EXAMPLES
    as_it_is, as_view = alone()[name]
    assert as_it_is[2:] == (2, 0, 0), "memory with one owner, and no base"
    assert as_view[2:4] == (3, 2)


class Attention(nn.Module):
    """One whose scores come in the order of a matrix product, not their own."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bhdi,bhdj->bhij", x, x).softmax(-1).mul(0.5)


def test_rows_in_another_order_are_copied_once_not_twice():
    assert cpu.start() is None
    given = torch.randn(2, 4, 16, 128, requires_grad=True)
    scores = 2 * 4 * 128 * 128 * 4
    found, taken = [], []
    for in_place in (False, True):
        given.grad = None
        made = torch.einsum("bhij,bhdj->bhdi", Attention()(given), given)
        taken.append(backward(made.square().sum().backward, in_place=in_place))
        assert given.grad is not None
        found.append(given.grad.clone())
    assert torch.equal(*found)
    assert taken[0][1] - taken[1][1] >= 0.75 * scores, "another op's peak comes next"


def _kept_by_hook(kept: list[Any], x: Tensor) -> Tensor:
    y = x.sin()
    y.register_hook(kept.append)
    return functional.gelu(y)


def _kept_below(kept: list[Any], x: Tensor) -> Tensor:
    y = functional.gelu(x.sin())
    y.register_hook(kept.append)
    return y.cos()


def _kept_as_view(kept: list[Any], x: Tensor) -> Tensor:
    y = functional.gelu(x.sin()).view(-1)
    y.register_hook(kept.append)
    return y.cos()


def _retained(kept: list[Any], x: Tensor) -> Tensor:
    y = functional.gelu(x.sin())
    y.retain_grad()
    kept.append(y)
    return y.cos()


def _for_two(kept: list[Any], x: Tensor) -> Tensor:
    y = x.sin()
    return functional.gelu(y) + y.tanh() + y.exp()


def _of_views(kept: list[Any], x: Tensor) -> Tensor:
    halves = torch.cat([functional.gelu(x.sin()), x.cos().tanh()])
    return halves.view(-1).exp()


def _of_both(kept: list[Any], x: Tensor) -> Tensor:
    return x.sin() * x.cos() / (x * x + 1.0)


class _Keeps(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(x.sin())


def _of_module(kept: list[Any], x: Tensor) -> Tensor:
    module = _Keeps()
    module.register_full_backward_hook(lambda _, made, given: kept.append((made, given)))
    return module(x).cos()


@pytest.mark.parametrize(
    "make",
    [
        _kept_by_hook,
        _kept_below,
        _kept_as_view,
        _retained,
        _for_two,
        _of_views,
        _of_both,
        _of_module,
    ],
)
def test_a_gradient_that_somebody_else_has_is_left_alone(make: Callable[..., Tensor]):
    assert cpu.start() is None
    torch.manual_seed(0)
    x = torch.randn(64, 96, requires_grad=True)
    found = []
    for in_place in (False, True):
        x.grad, kept = None, []
        backward((make(kept, x) * 2.0).sum().backward, in_place=in_place)
        grads = [it.grad if it.grad is not None else it for it in _tensors(kept)]
        assert x.grad is not None
        found.append([x.grad.clone(), *(it.detach().clone() for it in grads)])
    assert len(found[0]) == len(found[1])
    assert all(map(torch.equal, *found))


def _tensors(kept: Any) -> list[Any]:
    if isinstance(kept, Tensor):
        return [kept]
    return [it for one in kept if one is not None for it in _tensors(one)]


def test_the_first_product_of_a_node_is_not_taken_for_its_second_in_the_next_backward():
    x, y = (torch.randn(64, 96, requires_grad=True) for _ in range(2))
    found = []
    for in_place in (False, True):
        ways = lean()
        ways.way.always = in_place
        loss = (x * y).cos().sum()
        for wanted in ((y,), (x, y)):
            ways.ops.begins()
            with ways.planned():
                found.extend(torch.autograd.grad(loss, wanted, retain_graph=True))
    assert all(map(torch.equal, found[:3], found[3:]))


def test_a_gradient_that_was_given_keeps_its_numbers():
    x = torch.randn(64, 96, requires_grad=True)
    given = torch.randn(64, 96)
    before = given.clone()
    made = functional.gelu(x)
    backward(lambda: made.backward(given), in_place=True)
    assert torch.equal(given, before)


def test_a_graph_of_gradients_is_computed_as_it_is():
    x = torch.randn(64, 96, requires_grad=True)
    found = []
    for in_place in (False, True):

        def run() -> None:
            made = functional.gelu(x).softmax(-1).square().sum()
            (first,) = torch.autograd.grad(made, x, create_graph=True)
            (second,) = torch.autograd.grad(first.square().sum(), x)
            found.append((first.detach().clone(), second.clone()))

        backward(run, in_place=in_place)
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


PAIRS: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    torch.add,
    torch.mul,
    torch.maximum,
    lambda a, b: a / (b * b + 1.0),
    lambda a, b: a * b[:, :1],
    lambda a, b: torch.cat([a, b])[3:9],
    lambda a, b: (a.view(-1) - b.view(-1)).view(a.shape),
    lambda a, b: functional.layer_norm(a, a.shape[-1:]) + b,
)


def _graph(seed: int, leaves: list[Tensor], kept: list[Any]) -> Tensor:
    """A loss by a few ops of each other's results, some of whose gradients hooks keep."""
    choose = random.Random(seed)
    made = list(leaves)
    for _ in range(choose.randint(4, 20)):
        if choose.random() < 0.6:
            x = choose.choice(list(EXAMPLES.values()))(choose.choice(made[-5:]))
        else:
            x = choose.choice(PAIRS)(choose.choice(made[-5:]), choose.choice(made))
        what = choose.random()
        if x.grad_fn is not None and what < 0.15:
            if what < 0.05:
                x.register_hook(kept.append)
            elif what < 0.1:
                x.register_hook(lambda gradient: gradient * 0.5)
            else:
                x.grad_fn.register_hook(lambda _made, given: kept.append(given))
        made.append(x)
    return sum((x.cos().sum() for x in made[-3:]), torch.zeros(()))


@pytest.mark.parametrize("seed", range(0, 400, 40))
def test_any_graph_has_the_same_gradients(seed: int):
    has_written = 0
    for number in range(seed, seed + 40):
        found: list[list[Tensor]] = []
        for in_place in (False, True):
            torch.manual_seed(number)
            leaves = [torch.randn(6, 8, requires_grad=True) for _ in range(3)]
            kept: list[Any] = []
            loss = _graph(number, leaves, kept)
            if loss.requires_grad:
                has_written += backward(loss.backward, in_place=in_place)[0]
            grads = [x.grad for x in leaves if x.grad is not None]
            found.append([*grads, *(it.detach().clone() for it in _tensors(kept))])
        plain, lean_ones = found
        assert len(plain) == len(lean_ones)
        for one, other in zip(plain, lean_ones, strict=True):
            torch.testing.assert_close(other, one, rtol=0.0, atol=0.0, equal_nan=True)
    assert has_written > 100


SCORES = """
    import torch
    from torch import nn

    class Attention(nn.Module):
        def __init__(self, width=64, heads=8):
            super().__init__()
            self.heads = heads
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

        def forward(self, x):
            batch, length, width = x.shape
            split = (batch, length, 3, self.heads, width // self.heads)
            q, k, v = self.qkv(x).view(split).permute(2, 0, 3, 1, 4)
            scores = (q @ k.transpose(-1, -2)).softmax(-1)
            return x + self.out((scores @ v).transpose(1, 2).reshape(x.shape))

    torch.manual_seed(0)
    model = nn.Sequential(Attention(), Attention(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(4, 256, 64)
    for step in range(6):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        print(repr(loss.item()))
"""


def test_a_step_fits_whose_two_largest_gradients_did_not_both(tmp_path: Path):
    """Scores of 8 MiB: they, their gradient and the one before it are 24; one is written over."""
    options = {"offload": "chosen"}
    ran = inline(tmp_path, "22MiB", SCORES, **options)
    (loop,) = ran.loops
    assert ran.report["fitting"]["verdict"]["kept"], ran.stderr
    assert IN_PLACE in loop["notes"]
    assert "results stay bitwise equal" in ran.stderr
    assert loop["planned"]["peak_bytes"] <= loop["plan"]["predicted_peak_bytes"]
    (tmp_path / "wide").mkdir()
    wide = inline(tmp_path / "wide", "30MiB", SCORES, **options)
    assert IN_PLACE not in wide.loops[0]["notes"], "there is room"
    assert wide.report["fitting"]["verdict"]["kept"], wide.stderr


def test_gradients_are_written_over_where_parameters_are_offloaded(tmp_path: Path):
    """What watches the use of parameters in backward stands below what writes in place."""
    wide = SCORES.replace("width=64", "width=512").replace(
        "nn.Linear(64, 10)", "nn.Linear(512, 10)"
    )
    wide = wide.replace("torch.randn(4, 256, 64)", "torch.randn(6, 256, 512)")
    ran = inline(tmp_path, "48MiB", wide, offload="chosen", fitting=("--forbid", "remat"))
    (loop,) = ran.loops
    kinds = [action["kind"] for action in loop["plan"]["actions"]]
    assert "offload_parameters" in kinds
    assert IN_PLACE in loop["notes"]
    assert ran.report["fitting"]["verdict"]["kept"], ran.stderr
    assert loop["planned"]["peak_bytes"] <= loop["plan"]["predicted_peak_bytes"]


def test_small_gradients_are_left_alone():
    way = LeanWay(always=True)
    assert not way.runs(1 << 10, 1 << 10, 1 << 20)
    assert way.runs(1 << 18, 1 << 18, 1 << 20)
