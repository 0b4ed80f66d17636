"""State elsewhere slice by slice: the same bits, and the memory of one slice."""

from __future__ import annotations

import copy

import pytest
import torch
from test_sliced_update import ELEMENTS, MAKE, gradients, same
from torch import nn

from memfit.apply.offload.optimizer_state import StateDirections, StateElsewhere
from memfit.apply.offload.sliced_state import SlicedState
from memfit.apply.offload.state_view import bring_home
from memfit.capture.probe.optimizer_updates import Temporaries
from memfit.errors import OffloadError
from memfit.tensors.optimizers import in_memory

SLICES = 3


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(ELEMENTS, 1)


def elsewhere(make, of: nn.Module, folder):
    optimizer = make(list(of.parameters()))
    names = ("weight",) * SLICES + ("bias",)
    state = StateElsewhere(optimizer, of, StateDirections("disk", str(folder), 0, 4096, names))
    state.place()
    return optimizer, state


def take_a_step(plain, sliced, gradient):
    for of in (plain, sliced):
        of.weight.grad, of.bias.grad = gradient.reshape(1, -1).clone(), torch.ones(1)


@pytest.mark.parametrize("name", MAKE)
def test_state_that_comes_in_slices_gives_the_bits_of_the_whole(name, tmp_path):
    plain, sliced = model(), model()
    expected = MAKE[name](list(plain.parameters()))
    optimizer, state = elsewhere(MAKE[name], sliced, tmp_path)
    for gradient in gradients(plain.weight.detach().flatten()):
        take_a_step(plain, sliced, gradient)
        expected.step()
        state.place()
        state.update_all().finish()
        assert torch.equal(plain.weight, sliced.weight)
        there = in_memory(optimizer.state[sliced.weight])
        assert all(value is None or value.numel() == 1 for value in there.values())
    saved = optimizer.state_dict()["state"][0]
    known = expected.state[plain.weight]
    assert saved.keys() == known.keys()
    assert all(same(saved[key], known[key]) for key in known)
    bring_home(optimizer)
    assert type(optimizer.state[sliced.weight]) is dict
    assert all(same(optimizer.state[sliced.weight][key], known[key]) for key in known)


def test_an_update_holds_the_state_of_a_slice(tmp_path):
    sliced = model()
    optimizer, state = elsewhere(torch.optim.AdamW, sliced, tmp_path)
    for gradient in gradients(sliced.weight.detach().flatten()):
        take_a_step(sliced, sliced, gradient)
        with Temporaries() as made:
            state.update_all().finish()
        assert made.peak_bytes < 2 * sliced.weight.nbytes  # whole: two of state and more
    assert isinstance(optimizer.state[sliced.weight], SlicedState)


def test_state_that_was_read_goes_in_pieces_again(tmp_path):
    plain, sliced = model(), model()
    expected = torch.optim.Adam(plain.parameters())
    optimizer, state = elsewhere(torch.optim.Adam, sliced, tmp_path)
    for gradient in gradients(plain.weight.detach().flatten()):
        take_a_step(plain, sliced, gradient)
        expected.step()
        state.place()
        state.update_all().finish()
        optimizer.state[sliced.weight]["exp_avg"].mul_(2)
        expected.state[plain.weight]["exp_avg"].mul_(2)
        copy.deepcopy(optimizer.state_dict())
    assert torch.equal(plain.weight, sliced.weight)


def test_a_piece_that_cannot_be_written_stays_and_is_said_before_the_next_step(tmp_path):
    plain, sliced = model(), model()
    expected = torch.optim.Adam(plain.parameters())
    optimizer, state = elsewhere(torch.optim.Adam, sliced, tmp_path)
    send, calls = state.tier.send, []

    def fails(source):
        calls.append(source.nbytes)
        if len(calls) > 3:
            raise OffloadError("no room")
        return send(source)

    for number, gradient in enumerate(gradients(plain.weight.detach().flatten())):
        take_a_step(plain, sliced, gradient)
        expected.step()
        state.tier.send = fails if number == 1 else send
        state.update_all().finish()
        if number == 1:
            with pytest.raises(OffloadError, match="no room"):
                state.place()
            state.tier.send = send
            state.place()
    assert torch.equal(plain.weight, sliced.weight)
    known = expected.state[plain.weight]
    assert all(same(optimizer.state[sliced.weight][key], known[key]) for key in known)
