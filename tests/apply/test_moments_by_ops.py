"""Moments in 8 bits by torch's ops, as on a GPU, beside the kernel: the same but for last bits."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import memfit
from memfit import _native
from memfit.apply.precision import eight_bit_state, moments_by_ops
from memfit.apply.precision.eight_bit_updates import EightBitUpdates
from memfit.apply.precision.narrow import memory_of
from memfit.capture import capture
from memfit.measure.peak import profiled_bytes
from memfit.tensors.narrow_parameters import halves, joined

SIZES = (256, 1000, 4096, 5 * 4096 + 300)
STEPS = 6
ADAM = {
    "direction": 1.0,
    "penalty": 0.01,
    "decay": 0.999,
    "first_added": 0.1,
    "second_stays": 0.999,
    "second_added": 0.001,
    "step": 1e-3,
    "root_correction": 1.0,
    "epsilon": 1e-8,
}
MOMENTUM = {
    "direction": -1.0,
    "penalty": 0.01,
    "stays": 0.9,
    "added": 0.7,
    "nesterov": None,
    "step": 1e-2,
}
RULES = {
    "adam": ADAM,
    "momentum": MOMENTUM,
    "nesterov": {**MOMENTUM, "nesterov": 0.9},
}


@pytest.fixture(autouse=True)
def several_slices(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(moments_by_ops, "_SLICE", 4096)


def held(numbers: int) -> torch.Tensor:
    return torch.zeros(numbers + 4 * -(-numbers // 256), dtype=torch.uint8)


def numbers_of(size: int) -> torch.Tensor:
    """Numbers many powers of ten apart."""
    generator = torch.Generator().manual_seed(size)
    far = 10.0 ** torch.randint(-6, 2, (size,), generator=generator)
    return torch.randn(size, generator=generator) * far


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("is_square", [False, True])
def test_codes_and_scales_are_the_kernels(size: int, *, is_square: bool):
    wide = numbers_of(size)
    wide = wide.square() if is_square else wide
    wide[:3] = 0.0
    expected, found = held(size), held(size)
    _native.shrink_moment(is_square, memory_of(wide), memory_of(expected))
    moments_by_ops.shrink_moment(wide, found, is_square=is_square)
    # A number halfway between two codes may go to either.
    off = (found[:size].int() - expected[:size].int()).abs()
    assert (off == 0).float().mean() > 0.999
    assert off.max() <= 1
    assert torch.equal(found[size:], expected[size:])
    for form in (expected, found):
        by_kernel, by_ops = torch.empty(size), torch.empty(size)
        _native.expand_moment(is_square, memory_of(form), memory_of(by_kernel))
        moments_by_ops.expand_moment(form, by_ops, is_square=is_square)
        torch.testing.assert_close(by_ops, by_kernel, rtol=1e-6, atol=0.0)
        assert (by_ops[3:] != 0).all() or not is_square


@pytest.mark.parametrize("is_square", [False, True])
def test_a_block_that_is_not_finite_is_not_a_number_and_no_other_is(*, is_square: bool):
    for bad in (float("inf"), float("nan")):
        wide = numbers_of(1024).abs()
        wide[300] = bad
        found, back = held(1024), torch.empty(1024)
        moments_by_ops.shrink_moment(wide, found, is_square=is_square)
        moments_by_ops.expand_moment(found, back, is_square=is_square)
        assert back[256:512].isnan().all()
        assert back[:256].isfinite().all()
        assert back[512:].isfinite().all()


def updated(
    rule: str, dtype: torch.dtype, size: int, *, by_ops: bool, device: str = "cpu"
) -> list[torch.Tensor]:
    """The parameter after each step, from moments that are zero."""
    torch.manual_seed(0)
    parameter = torch.randn(size).to(dtype).to(device)
    state = [held(size).to(device) for _ in range(2 if rule == "adam" else 1)]
    after = []
    for number in range(STEPS):
        gradient = (torch.randn(size) * 1e-2).to(dtype).to(device)
        seed = None if dtype is torch.float32 else 77 + number
        said = {**RULES[rule], "seed": seed}
        if by_ops:
            update = getattr(
                moments_by_ops, f"update_by_{'adam' if rule == 'adam' else 'momentum'}"
            )
            update(said, parameter, gradient, *state)
        else:
            update = getattr(_native, f"update_by_{'adam' if rule == 'adam' else 'momentum'}")
            update(said, *map(memory_of, (parameter, gradient, *state)), 1)
        after.append(parameter.float().cpu().clone())
    return after


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rule", list(RULES))
def test_updates_are_the_kernels_but_for_last_bits(rule: str, size: int):
    expected, found = (updated(rule, torch.float32, size, by_ops=by) for by in (False, True))
    torch.manual_seed(0)
    start = torch.randn(size)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=1e-7)
    for one, other in zip(expected, found, strict=True):
        # One code more or less, now and then, is as far as they part.
        assert (one - other).norm() <= 2e-3 * (one - start).norm()


@pytest.mark.parametrize("rule", list(RULES))
def test_with_lower_halves_updates_are_the_kernels_but_for_last_bits(rule: str):
    size = 5 * 4096 + 300
    torch.manual_seed(0)
    numbers = torch.randn(size)
    slopes = [(torch.randn(size) * 1e-2).to(torch.bfloat16) for _ in range(3)]
    found = []
    for by_ops in (False, True):
        (upper, lower), state = halves(numbers), [held(size) for _ in range(2)]
        name = "update_by_adam" if rule == "adam" else "update_by_momentum"
        moments = state if rule == "adam" else state[:1]
        said = {**RULES[rule], "seed": None}
        for slope in slopes:
            if by_ops:
                getattr(moments_by_ops, name)(said, upper, slope, *moments, lower=lower)
            else:
                memory = map(memory_of, (upper, slope, *moments))
                getattr(_native, name)(said, *memory, 1, memory_of(lower))
        found.append(joined(upper, lower))
    assert (found[0] - found[1]).norm() <= 2e-3 * (found[0] - numbers).norm()
    assert (found[0] - numbers).abs().max() > 0.0


@pytest.mark.parametrize("rule", list(RULES))
def test_numbers_of_16_bits_are_rounded_by_the_same_draws(rule: str):
    size = 5 * 4096 + 300
    expected, found = (updated(rule, torch.bfloat16, size, by_ops=by) for by in (False, True))
    for one, other in zip(expected, found, strict=True):
        assert (one == other).float().mean() > 0.99
    assert not torch.equal(found[-1], found[0])


def test_rounding_keeps_what_is_no_number():
    numbers = torch.empty(512, dtype=torch.bfloat16)
    after = torch.full((512,), float("nan"))
    after[:100] = float("inf")
    after[100:200] = 1.0
    room = (torch.empty(512), torch.empty(512))
    (piece,) = moments_by_ops._pieces(512)
    written = moments_by_ops._Numbers(numbers, None, piece)
    written._start = 1 << 31  # places begin anew after 2^32
    written.write(after, 3, room)
    assert numbers[:100].isposinf().all()
    assert (numbers[100:200] == 1.0).all()
    assert numbers[200:].isnan().all()


@pytest.mark.parametrize(
    ("dtype", "keeps_lower"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)],
)
@pytest.mark.parametrize("rule", list(RULES))
def test_an_update_takes_no_more_room_than_plans_count_on(
    rule: str, dtype: torch.dtype, *, keeps_lower: bool
):
    size = 4 * 4096
    parameter, gradient = (torch.randn(size).to(dtype) for _ in range(2))
    state = [held(size) for _ in range(2 if rule == "adam" else 1)]
    said = {**RULES[rule], "seed": None if dtype is torch.float32 else 1}
    update = getattr(moments_by_ops, f"update_by_{'adam' if rule == 'adam' else 'momentum'}")
    lower = torch.zeros(size, dtype=torch.int16) if keeps_lower else None
    update(said, parameter, gradient, *state, lower=lower)
    taken, left = profiled_bytes(lambda: update(said, parameter, gradient, *state, lower=lower))
    assert left == 0
    counted = moments_by_ops.ROOM_BYTES * 4096
    assert 0.8 * counted < taken <= counted


class Counted(TorchDispatchMode):
    """Counts ops that compute."""

    def __init__(self):
        super().__init__()
        self.ops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops += not (func.is_view or func is torch.ops.aten.empty.memory_format)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("rule", "dtype", "keeps_lower", "ops"),
    [
        ("adam", torch.float32, False, 69),
        ("adam", torch.bfloat16, False, 69 + 21),
        ("adam", torch.bfloat16, True, 69 + 39),
        ("nesterov", torch.float32, False, 39),
        ("nesterov", torch.bfloat16, False, 39 + 21),
        ("nesterov", torch.bfloat16, True, 39 + 39),
    ],
)
def test_a_slice_takes_as_many_ops_as_plans_count_on(
    rule: str, dtype: torch.dtype, ops: int, *, keeps_lower: bool
):
    """As `ops_of_slice` in `technique/optimizer_bits.rs` has them."""
    parameter, gradient = (torch.randn(4096).to(dtype) for _ in range(2))
    lower = torch.zeros(4096, dtype=torch.int16) if keeps_lower else None
    state = [held(4096) for _ in range(2 if rule == "adam" else 1)]
    is_rounded = dtype is torch.bfloat16 and not keeps_lower
    said = {**RULES[rule], "seed": 1 if is_rounded else None}
    update = getattr(moments_by_ops, f"update_by_{'adam' if rule == 'adam' else 'momentum'}")
    with Counted() as counted:
        update(said, parameter, gradient, *state, lower=lower)
    assert counted.ops == ops


def test_the_state_is_updated_so_where_there_is_no_kernel(monkeypatch: pytest.MonkeyPatch):
    def trained(*, kernel: bool) -> list[torch.Tensor]:
        monkeypatch.setattr(eight_bit_state, "has_kernel", lambda _: kernel)
        torch.manual_seed(0)
        layer = torch.nn.Linear(128, 96)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
        state = optimizer.state[layer.weight] = eight_bit_state.EightBitState({})
        for _ in range(4):
            layer(torch.randn(8, 128)).square().mean().backward()
            group = optimizer.param_groups[0]
            assert EightBitUpdates(optimizer).update(group, layer.weight)
            layer.zero_grad()
        wide = state["exp_avg_sq"]  # from here on in 32 bits
        state.shrink(optimizer, layer.weight)
        assert not state.is_narrow(optimizer), "it is kept"
        return [layer.weight.detach(), wide]

    torch.manual_seed(0)
    start = torch.nn.Linear(128, 96).weight.detach()
    (expected, moment), (found, again) = (trained(kernel=it) for it in (True, False))
    assert (found - expected).norm() < 0.01 * (expected - start).norm()
    assert (again - moment).norm() < 0.05 * moment.norm()


def test_plans_for_a_gpu_count_on_that_room():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(4)))
    load = memfit.Workload(
        model,
        torch.randn(8, 512),
        lambda model, batch: model(batch).square().mean(),
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, foreach=False),
    )
    forbid = ["remat", "fuse_optimizer", "micro_batch", "chunk", "shrink"]
    recorded = (capture(load, device=device) for device in ("cpu", "cuda"))
    traces = (memfit.Trace(_native.Trace.decode(data)) for data in recorded)
    options = {"allow": "optimizer_bits", "forbid": forbid}
    cpu, gpu = (memfit.plan(trace, "1%", **options) for trace in traces)
    assert "optimizer_bits" in {action.kind for action in gpu.actions}
    room = moments_by_ops.ROOM_BYTES * 512 * 512
    more = gpu.minimum_peak_bytes - cpu.minimum_peak_bytes
    assert 0.9 * room < more <= room


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("rule", list(RULES))
def test_updates_on_a_gpu_are_those_on_a_cpu_but_for_last_bits(rule: str):
    size = 5 * 4096 + 300
    expected, found = (
        updated(rule, torch.float32, size, by_ops=True, device=device) for device in ("cpu", "cuda")
    )
    for one, other in zip(expected, found, strict=True):
        assert (one - other).norm() <= 2e-3 * one.norm()
