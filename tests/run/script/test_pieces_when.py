"""When a script's model is recorded to run in pieces: only where its whole would not fit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from memfit.options import Options
from memfit.plan.call_bytes import call_bytes
from memfit.run.script import pieces
from memfit.run.script.pieces import PiecesOfBatch
from memfit.run.script.planned_step import key_of
from memfit.run.script.request import FitRequest
from memfit.run.script.sizes import most_growth


@pytest.fixture
def proofs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for each proof that is made."""
    made: list[str] = []
    original = pieces.items_apart

    def items_apart(*args):
        made.append("proof")
        return original(*args)

    monkeypatch.setattr(pieces, "items_apart", items_apart)
    return made


def test_a_model_is_recorded_for_pieces_only_where_its_whole_does_not_fit(
    proofs: list[str], monkeypatch: pytest.MonkeyPatch
):
    request = FitRequest("1GiB", Options(allow="equivalent"))
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
    inputs = ((torch.randn(64, 64),), {})
    call = key_of(model, inputs), model, inputs
    needed = call_bytes(model, *inputs)
    assert needed is not None
    of_batch = PiecesOfBatch(request)
    of_batch.begin(*call, live_bytes=0, budget_bytes=2 * needed)
    smaller = ((torch.randn(48, 64),), {})
    monkeypatch.setattr(pieces, "call_bytes", None)  # a larger one fits: nobody asks again
    of_batch.begin(key_of(model, smaller), model, smaller, live_bytes=0, budget_bytes=2 * needed)
    larger = ((torch.randn(80, 64),), {})  # 1.25 times as large takes 1.25 * 1.25 times at most
    of_batch.begin(key_of(model, larger), model, larger, live_bytes=0, budget_bytes=2 * needed)
    assert not proofs
    assert of_batch.wants(call[0]) is None
    of_batch.begin(*call, live_bytes=0, budget_bytes=needed)
    assert proofs == ["proof"]
    assert of_batch.wants(call[0]) is not None


def test_an_evaluation_is_recorded_for_pieces_only_where_its_whole_does_not_fit(
    proofs: list[str],
):
    request = FitRequest("1GiB", Options(allow="equivalent"))
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)).eval()
    with torch.no_grad():
        for rows, count in ((64, 0), (1024, 1)):
            inputs = ((torch.randn(rows, 64),), {})
            budget = 3 * 64 * 256 * 4
            with PiecesOfBatch(request).evaluation(
                key_of(model, inputs), model, inputs, live_bytes=0, budget_bytes=budget
            ):
                model(*inputs[0])
            assert len(proofs) == count


def test_an_evaluation_runs_in_pieces_while_it_lacks_room(proofs: list[str]):
    """As of a frozen teacher, whose parameters go to files once a step lacks room."""
    of_batch = PiecesOfBatch(FitRequest("1GiB", Options(allow="equivalent")))
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)).eval()
    inputs = ((torch.randn(1024, 64),), {})
    counts = []
    with torch.no_grad():
        whole = model(*inputs[0])
        for live_mib in (31, 0, 31, 30, 0):
            live_bytes = live_mib << 20
            with of_batch.evaluation(
                key_of(model, inputs), model, inputs, live_bytes, budget_bytes=36 << 20
            ):
                torch.testing.assert_close(model(*inputs[0]), whole)
            counts.append(of_batch.evaluations)
    assert counts == [1, 1, 2, 3, 3]
    assert proofs == ["proof"]


def test_that_one_call_mixes_items_refuses_no_other(proofs: list[str]):
    """As of a network that is trained with its normalisations frozen from some epoch on."""
    request = FitRequest("1GiB", Options(allow="equivalent"))
    model = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.Linear(256, 64))
    inputs = ((torch.randn(64, 64),), {})
    of_batch = PiecesOfBatch(request)
    needed = call_bytes(model.eval(), *inputs)
    assert needed is not None
    for is_training in (True, False):
        model.train(is_training)
        call = key_of(model, inputs), model, inputs
        of_batch.begin(*call, live_bytes=0, budget_bytes=needed)
        assert not of_batch.refusal
        assert (of_batch.wants(call[0]) is None) == is_training
    assert proofs == ["proof"]


def test_a_larger_call_is_looked_at_where_it_may_not_fit():
    request = FitRequest("1GiB", Options(allow="equivalent"))
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
    of_batch = PiecesOfBatch(request)
    needed = call_bytes(model, (torch.randn(64, 64),), {})
    assert needed is not None
    for rows in (64, 128):
        inputs = ((torch.randn(rows, 64),), {})
        call = key_of(model, inputs), model, inputs
        of_batch.begin(*call, live_bytes=0, budget_bytes=4 * needed)
    assert len(of_batch._whole_bytes) == 2


@pytest.mark.parametrize(
    ("shape", "wanted", "most"),
    [
        ((8, 64), (8, 64), 1.0),
        ((8, 64), (4, 32), 1.0),
        ((8, 64), (8, 128), 4.0),
        ((8, 64), (4, 128), 4.0),
        ((8, 64), (16, 128), 16.0),
        ((8, 0), (8, 1), math.inf),
        ((8, 0), (8, 0), 1.0),
    ],
)
def test_a_call_grows_with_the_square_of_each_size_at_most(
    shape: tuple[int, ...], wanted: tuple[int, ...], most: float
):
    assert most_growth(("mode", (shape, "f")), ("mode", (wanted, "f"))) == most
