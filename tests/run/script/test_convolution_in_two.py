"""Convolutions that let go of their input before its gradient is computed: the same bits."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ran import inline
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from memfit import _native
from memfit.apply.remat.records import Kept
from memfit.apply.remat.replay import Replayer
from memfit.errors import ReplayError
from memfit.run.script.lean_backward import IN_TWO, NONE_IN_TWO, LeanBackward
from memfit.tensors import convolution_kinds
from memfit.tensors.convolution_in_two import InTwo
from memfit.tensors.versions import version_of
from memfit.track import cpu

ORDERS = {1: (None,), 2: (None, torch.channels_last), 3: (None, torch.channels_last_3d)}
SPACES = {1: (61,), 2: (17, 22), 3: (11, 12, 10)}


def bits(tensor: Tensor) -> Tensor:
    """What a tensor holds, so that zeros of both signs differ."""
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().contiguous().view(kinds[tensor.itemsize])


def same_bits(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(
        a.stride() == b.stride() and torch.equal(bits(a), bits(b))
        for a, b in zip(one, other, strict=True)
    )


def backward(run: Callable[[], Any], *, in_two: bool) -> tuple[int, int]:
    """Run a backward; how many convolutions let go, and the most bytes above what was there."""
    ways, ran = LeanBackward(lambda: 1, {}), []
    writes = ways.writes

    def lets_go(call: Any) -> bool:
        if not isinstance(call, InTwo):
            return False
        ran.append(call)
        return writes(call)

    ways.writes = lets_go  # type: ignore[method-assign]
    ways.way.always = in_two
    window, before = _native.AllocationWindow(), _native.counted_bytes()
    with ways.planned():
        run()
    peak, _ = window.peak()
    window.close()
    return len(ran), peak - before


def kinds(spaces: int, *, transposed: bool) -> list[dict[str, Any]]:
    """Convolutions: kernel, stride, padding, dilation, groups, channels."""
    return [
        {"kernel_size": kernel, "stride": stride, "padding": padding, "dilation": dilation}
        | {"groups": groups, "in_channels": first, "out_channels": second, "bias": bias}
        | ({"output_padding": stride - 1} if transposed and stride > 1 else {})
        for (kernel, stride, padding, dilation), (groups, first, second), bias in itertools.product(
            ((3, 1, 1, 1), (1, 1, 0, 1), (4, 2, 1, 1), (3, 1, 2, 2)),
            ((1, 5, 8), (2, 4, 6), (8, 8, 8), (4, 4, 8)),
            (True, False),
        )
        if spaces < 3 or groups < 4
    ]


@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spaces", [1, 2, 3])
def test_results_are_the_same_bits(spaces: int, dtype: torch.dtype, *, transposed: bool):
    torch.manual_seed(0)
    plain, other = f"Conv{spaces}d", f"ConvTranspose{spaces}d"
    missed = []
    for kind, order, items in itertools.product(
        kinds(spaces, transposed=transposed), ORDERS[spaces], (1, 4)
    ):
        layer = getattr(nn, other if transposed else plain)(**kind, dtype=dtype)
        given = torch.randn(items, kind["in_channels"], *SPACES[spaces], dtype=dtype)
        if order is not None:
            given = given.contiguous(memory_format=order)
        given.requires_grad_()
        leaves, found = [given, *layer.parameters()], []
        for in_two in (False, True):
            for leaf in leaves:
                leaf.grad = None
            loss = layer(given * 1.5).cos().sum()
            count, _ = backward(loss.backward, in_two=in_two)
            found.append([leaf.grad.clone() for leaf in leaves if leaf.grad is not None])
        assert same_bits(*found), (kind, order, items)
        if not count and items > 1:  # a small image alone has kernels of its own
            missed.append((kind, order, items))
    assert not missed


def _held_by_hooks(make: Callable[[], Tensor]) -> Tensor:
    """As a plan keeps a saved tensor in memory."""
    replayer = Replayer()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda it: Kept(it.detach(), version_of(it)), replayer.unpack
    ):
        return make()


def _held_by_node(make: Callable[[], Tensor]) -> Tensor:
    return make()


@pytest.mark.parametrize("held", [_held_by_node, _held_by_hooks])
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_the_input_is_gone_before_its_gradient_is_there(
    held: Callable[[Callable[[], Tensor]], Tensor], order: torch.memory_format
):
    assert cpu.start() is None
    torch.manual_seed(0)
    layer = nn.Conv2d(16, 16, 3, padding=1).to(memory_format=order)
    x = torch.randn(4, 16, 64, 64).contiguous(memory_format=order).requires_grad_()
    found, peaks = [], []
    for in_two in (False, True):
        x.grad = layer.weight.grad = None
        y = held(lambda: layer(x + 1.0))
        gradient = torch.ones_like(y)
        gc.collect()  # else what earlier tests left behind goes meanwhile
        ran, peak = backward(lambda y=y, g=gradient: y.backward(g), in_two=in_two)
        assert ran == in_two
        peaks.append(peak)
        assert x.grad is not None
        assert layer.weight.grad is not None
        found.append([x.grad.clone(), layer.weight.grad.clone()])
        del y
    assert same_bits(*found)
    assert peaks[0] - peaks[1] >= 0.9 * x.nbytes


def _added(layers: list[nn.Module], kept: list[Any], x: Tensor) -> Tensor:
    y = functional.gelu(x)
    return layers[0](y) + y


def _multiplied(layers: list[nn.Module], kept: list[Any], x: Tensor) -> Tensor:
    y = functional.gelu(x)
    return layers[0](y) * y


def _read_by_two(layers: list[nn.Module], kept: list[Any], x: Tensor) -> Tensor:
    y = functional.gelu(x)
    return layers[0](y) + layers[1](y)


def _after_relu(layers: list[nn.Module], kept: list[Any], x: Tensor) -> Tensor:
    return layers[1](layers[0](x.sin().relu()).relu())


def _a_view(layers: list[nn.Module], kept: list[Any], x: Tensor) -> Tensor:
    y = x.sin().flatten()
    return layers[0](y.view(x.shape)) + y.cos().view(x.shape)


def _turned(layers: list[nn.Module], kept: list[Any], x: Tensor) -> Tensor:
    return layers[0](x.sin().transpose(2, 3)) * 2.0


def _parts_of_one(layers: list[nn.Module], kept: list[Any], x: Tensor) -> Tensor:
    y = torch.cat([x.sin(), x.cos()])
    first, second = y.chunk(2)
    return layers[0](first) + layers[1](second)


def _held(layers: list[nn.Module], kept: list[Any], x: Tensor) -> Tensor:
    kept.append(x.sin())
    return layers[0](kept[-1])


def _held_detached(layers: list[nn.Module], kept: list[Any], x: Tensor) -> Tensor:
    y = x.sin()
    kept.append(y.detach())
    return layers[0](y)


def _held_by_a_hook(layers: list[nn.Module], kept: list[Any], x: Tensor) -> Tensor:
    y = x.sin()
    y.register_hook(lambda gradient: gradient * y.detach())
    return layers[0](y)


def _with_its_gradient(layers: list[nn.Module], kept: list[Any], x: Tensor) -> Tensor:
    y = x.sin()
    y.retain_grad()
    kept.append(y)
    return layers[0](y)


def _in_a_checkpoint(layers: list[nn.Module], kept: list[Any], x: Tensor) -> Tensor:
    made: Tensor = checkpoint(
        lambda it: layers[1](functional.gelu(layers[0](it.sin()))), x, use_reentrant=False
    )
    return made


def _with_hooks_of_others(layers: list[nn.Module], kept: list[Any], x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return layers[1](functional.gelu(layers[0](x.sin())))


def _as_its_own_weight(layers: list[nn.Module], kept: list[Any], x: Tensor) -> Tensor:
    y = x.sin()
    return functional.conv2d(y, y)


MADE = [
    _added,
    _multiplied,
    _read_by_two,
    _after_relu,
    _a_view,
    _turned,
    _parts_of_one,
    _held,
    _held_detached,
    _held_by_a_hook,
    _with_its_gradient,
    _in_a_checkpoint,
    _with_hooks_of_others,
    _as_its_own_weight,
]


@pytest.mark.parametrize("held", [_held_by_node, _held_by_hooks])
@pytest.mark.parametrize("make", MADE)
def test_an_input_that_is_needed_later_is_there(
    held: Callable[[Callable[[], Tensor]], Tensor], make: Callable[..., Tensor]
):
    assert cpu.start() is None
    torch.manual_seed(0)
    layers = [nn.Conv2d(6, 6, 3, padding=1) for _ in range(2)]
    x = torch.randn(3, 6, 12, 12, requires_grad=True)
    leaves = [x, *(it for layer in layers for it in layer.parameters())]
    found = []
    for in_two in (False, True):
        kept: list[Any] = []
        for leaf in leaves:
            leaf.grad = None
        loss = held(lambda kept=kept: make(layers, kept, x).cos().sum())
        backward(loss.backward, in_two=in_two)
        others = [*kept, *(one.grad for one in kept if one.retains_grad)]
        grads = [leaf.grad for leaf in leaves if leaf.grad is not None]
        found.append([it.detach().clone() for it in (*grads, *others)])
    assert same_bits(*found)


@pytest.mark.parametrize("held", [_held_by_node, _held_by_hooks])
def test_a_graph_that_is_retained_or_differentiated_keeps_its_inputs(
    held: Callable[[Callable[[], Tensor]], Tensor],
):
    torch.manual_seed(0)
    layer = nn.Conv2d(6, 6, 3)
    x = torch.randn(3, 6, 12, 12, requires_grad=True)
    found: list[list[Tensor]] = []
    for in_two in (False, True):
        grads: list[Tensor] = []
        loss = held(lambda: layer(x.sin()).square().sum())

        def run(loss: Tensor = loss, grads: list[Tensor] = grads) -> None:
            for _ in range(2):
                grads.extend(torch.autograd.grad(loss, [x, layer.weight], retain_graph=True))
            grads.extend(torch.autograd.grad(loss, [x, layer.weight], create_graph=True))

        def run_on(grads: list[Tensor] = grads) -> None:
            grads.extend(torch.autograd.grad(grads[-2].square().sum(), [x, layer.weight]))

        assert backward(run, in_two=in_two)[0] == 0
        backward(run_on, in_two=in_two)
        found.append([it.detach().clone() for it in grads])
    assert len(found[0]) == 8
    assert same_bits(*found)


def test_each_of_two_convolutions_lets_go_where_the_graph_ends():
    layers = nn.Sequential(nn.Conv2d(6, 6, 3), nn.GELU(), nn.Conv2d(6, 6, 3))
    x = torch.randn(3, 6, 12, 12, requires_grad=True)
    loss = layers(x.sin()).sum()
    assert backward(loss.backward, in_two=True)[0] == 2
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("held", [_held_by_node, _held_by_hooks])
def test_who_asks_for_what_is_gone_is_told_so(
    held: Callable[[Callable[[], Tensor]], Tensor],
):
    """A hook of the script's that reads a node's input once the node has run."""
    layer = nn.Conv2d(6, 6, 3)
    x = torch.randn(3, 6, 12, 12, requires_grad=True)
    made = held(lambda: layer(x.sin()))
    node = made.grad_fn
    assert node is not None
    node.register_hook(lambda *_: node._saved_input.sum())
    with pytest.raises((RuntimeError, ReplayError), match="asked for again"):
        backward(made.sum().backward, in_two=True)


def test_one_call_stays_where_two_were_not_seen_to_be_the_same(monkeypatch: pytest.MonkeyPatch):
    layer = nn.Conv2d(6, 6, 3)
    x = torch.randn(3, 6, 12, 12, requires_grad=True)
    assert backward(layer(x.sin()).sum().backward, in_two=True)[0] == 1
    convolution_kinds._is_proved.cache_clear()
    monkeypatch.setattr(convolution_kinds, "_same_bits", lambda _one, _other: False)
    try:
        assert backward(layer(x.sin()).sum().backward, in_two=True)[0] == 0
    finally:
        convolution_kinds._is_proved.cache_clear()


def test_a_planned_backward_has_those_in_two_that_its_recording_had(
    monkeypatch: pytest.MonkeyPatch,
):
    """A weight's gradient is there meanwhile, which the plan must know."""
    ways = LeanBackward(lambda: 16 << 20, {})
    small, large = (
        InTwo(None, (torch.zeros(1), torch.zeros(size << 18), torch.zeros(1))) for size in (2, 4)
    )

    def record(live_bytes: list[int]) -> tuple[int, bool]:
        ways.pass_begins()
        for live, call in zip(live_bytes, (large, large, small), strict=True):
            monkeypatch.setattr(_native, "counted_bytes", lambda live=live: live << 20)
            ways.writes(call)
        return ways.is_recorded()

    above, again = record([0, 0, 0])
    assert (above, again) == (NONE_IN_TWO, False)
    ways.pass_begins()
    ways.in_two_above = above
    assert not any(map(ways.writes, (small, large)))
    ways.way.always = False
    assert record([15, 0, 0])[1], "they ran in both ways"
    above, again = record([0, 0, 0])
    assert not again, "now all do"
    ways.pass_begins()
    ways.in_two_above = above
    assert list(map(ways.writes, (small, large))) == [True, True]
    tiny = InTwo(None, (torch.zeros(1), torch.zeros(1 << 16), torch.zeros(1)))
    assert not ways.writes(tiny)


def test_a_large_weights_gradient_would_take_the_place():
    counts = []
    for size in (12, 4):
        layer = nn.Conv2d(6, 6, 3)
        x = torch.randn(3, 6, size, size, requires_grad=True)
        counts.append(backward(layer(x.sin()).sum().backward, in_two=True)[0])
    assert counts == [1, 0]


def test_the_trial_knows_bits_apart():
    one = torch.tensor([0.0, torch.nan])
    assert convolution_kinds._same_bits(one, one.clone())
    assert not convolution_kinds._same_bits(one, torch.tensor([-0.0, torch.nan]))
    assert not convolution_kinds._same_bits(one, None)


IMAGES = """
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, first, second, **more):
            super().__init__()
            self.of, self.act = nn.Conv2d(first, second, 3, padding=1, **more), nn.GELU()

        def forward(self, x):
            return self.act(self.of(x))

    class Skips(Block):
        def forward(self, x):
            return x + super().forward(x)

    class Twice(Block):
        def __init__(self, first, second):
            super().__init__(first, second)
            self.other = nn.Conv2d(first, second, 3, padding=1)

        def forward(self, x):
            return self.act(self.of(x) + self.other(x))

    class Ramp(Block):
        def forward(self, x):
            return self.of(x.relu()).relu()

    torch.manual_seed(0)
    model = nn.Sequential(
        Block(3, 32), SECOND(32, 32), Block(32, 32, stride=2), Block(32, 64, stride=2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = torch.randn(8, 3, 64, 64), torch.arange(8)
    for step in range(6):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        print(loss.item().hex(), [p.double().sum().item().hex() for p in model.parameters()])
"""


@pytest.mark.parametrize(
    ("second", "budget"),
    [("Block", "19MiB"), ("Skips", "22MiB"), ("Twice", "24MiB"), ("Ramp", "20MiB")],
)
def test_a_step_fits_whose_largest_layer_did_not(tmp_path: Path, second: str, budget: str):
    """Input, two gradients, and copies of two of them are 20 MiB; now 16 are there at once."""
    ran = inline(tmp_path, budget, IMAGES.replace("SECOND", second), offload="chosen")
    (loop,) = ran.loops
    assert ran.fitting["verdict"]["kept"], ran.stderr
    assert IN_TWO in loop["notes"]
    assert "results stay bitwise equal" in ran.stderr
    assert loop["planned"]["peak_bytes"] <= loop["plan"]["predicted_peak_bytes"]


def test_steps_that_run_as_recorded_take_less_too(tmp_path: Path):
    ran = inline(tmp_path, "18124KiB", IMAGES.replace("SECOND", "Block"), offload="chosen")
    (loop,) = ran.loops
    assert not loop["plan"]["fits"]
    assert ran.fitting["verdict"]["kept"], ran.stderr
    assert IN_TWO in loop["notes"]


def test_an_input_stays_where_there_is_room(tmp_path: Path):
    ran = inline(tmp_path, "34MiB", IMAGES.replace("SECOND", "Block"), offload="chosen")
    assert IN_TWO not in ran.loops[0]["notes"]
    assert ran.fitting["verdict"]["kept"], ran.stderr


def test_saved_tensors_in_memory_go_as_planned(tmp_path: Path):
    """Where nothing is offloaded, what is kept stays in memory and goes before its node ends."""
    ran = inline(tmp_path, "20MiB", IMAGES.replace("SECOND", "Block"), fuses=True)
    (loop,) = ran.loops
    assert IN_TWO in loop["notes"], ran.stderr
    assert ran.fitting["verdict"]["kept"], ran.stderr
    assert loop["planned"]["peak_bytes"] <= loop["plan"]["predicted_peak_bytes"]
