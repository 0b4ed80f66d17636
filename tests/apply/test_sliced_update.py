"""Large parameters updated in slices: the same bits as whole, with the temporaries of a slice."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.optim import (
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    RAdam,
    RMSprop,
)

from memfit.apply.optimizer_in_backward import OneByOne
from memfit.capture.probe.optimizer_updates import Temporaries
from memfit.tensors.sliced_update import LEAST_BYTES, slices_of

MAKE = {
    "adadelta": Adadelta,
    "adagrad": lambda p: Adagrad(p, lr=0.1, lr_decay=0.1),
    "adam": lambda p: Adam(p, weight_decay=0.01),
    "amsgrad": lambda p: Adam(p, amsgrad=True, maximize=True),
    "adamax": Adamax,
    "adamw": AdamW,
    "foreach": lambda p: AdamW(p, foreach=True),
    "nadam": NAdam,
    "radam": RAdam,
    "rmsprop": lambda p: RMSprop(p, centered=True, momentum=0.9),
    "sgd": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
}
ELEMENTS = 3 * LEAST_BYTES // 4 + 77


def parameter(dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(1)).to(dtype))


def gradients(like: Tensor) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [
        torch.randn(like.shape, generator=generator).to(like.dtype) * 10.0**power
        for power in (-3, 0, 2, -1)
    ]


def same(one: object, other: object) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else one == other


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", MAKE)
def test_slices_give_the_bits_of_the_whole(name, dtype, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole, cut = parameter(dtype), parameter(dtype)
        expected, sliced = MAKE[name]([whole]), MAKE[name]([cut])
        for gradient in gradients(whole):
            whole.grad, cut.grad = gradient.clone(), gradient.clone()
            assert slices_of(sliced, sliced.param_groups[0], cut) > 1
            expected.step()
            step = OneByOne(sliced)
            step.update(cut)
            step.finish()
            assert torch.equal(whole, cut)
        state, other = expected.state[whole], sliced.state[cut]
        assert list(state) == list(other)
        assert all(same(state[key], other[key]) for key in state)
        assert list(sliced.state) == [cut]
    finally:
        torch.set_num_threads(before)


def test_state_keeps_its_tensors():
    cut = parameter()
    optimizer = AdamW([cut])
    cut.grad = torch.ones_like(cut)
    OneByOne(optimizer).update(cut)
    held = dict(optimizer.state[cut])
    OneByOne(optimizer).update(cut)
    assert all(optimizer.state[cut][key] is held[key] for key in held)


def test_memory_that_lies_in_another_order_is_cut_as_it_lies():
    weight = torch.randn(64, 64, 8, 8).contiguous(memory_format=torch.channels_last)
    whole, cut = nn.Parameter(weight.clone()), nn.Parameter(weight.clone())
    expected, sliced = AdamW([whole]), AdamW([cut])
    for gradient in gradients(weight):
        whole.grad = gradient.contiguous(memory_format=torch.channels_last)
        cut.grad = whole.grad.clone()
        assert slices_of(sliced, sliced.param_groups[0], cut) > 1
        expected.step()
        OneByOne(sliced).update(cut)
    assert torch.equal(whole, cut)
    state = sliced.state[cut]["exp_avg"]
    assert torch.equal(state, expected.state[whole]["exp_avg"])
    assert state.stride() == cut.stride()


def test_what_may_round_otherwise_or_spares_nothing_stays_whole():
    def count(optimizer: torch.optim.Optimizer) -> int:
        (group,) = optimizer.param_groups
        (updated,) = group["params"]
        updated.grad = torch.ones_like(updated)
        return slices_of(optimizer, group, updated)

    assert count(AdamW([parameter()])) == 3
    assert count(AdamW([parameter(torch.bfloat16)])) == 1
    assert count(AdamW([parameter()], fused=True)) == 1
    assert count(Adafactor([nn.Parameter(torch.randn(1000, 500))])) == 1
    assert count(SGD([parameter()], lr=0.1, momentum=0.9)) == 1
    assert count(AdamW([nn.Parameter(torch.randn(1000))])) == 1

    class Own(AdamW):
        pass

    assert count(Own([parameter()])) == 1


def test_temporaries_are_those_of_a_slice():
    whole = parameter()
    whole.grad = torch.ones_like(whole)
    optimizer = AdamW([whole])
    optimizer.step()
    cut = copy.deepcopy(whole)
    cut.grad = torch.ones_like(cut)
    sliced = AdamW([cut])
    sliced.load_state_dict(optimizer.state_dict())
    with Temporaries() as at_once:
        optimizer.step()
    with Temporaries() as in_slices:
        OneByOne(sliced).update(cut)
    assert in_slices.peak_bytes < at_once.peak_bytes / 2
