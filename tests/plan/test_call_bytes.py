"""What a call of a model takes, told without recording it: the same as a recording tells."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memfit.plan.call_bytes import CallMixedError, call_bytes
from memfit.plan.items_apart import ItemsMixedError, items_apart
from memfit.tensors.garbage import no_collection

ROWS = 8


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inside(x) * 2


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inside, x, use_reentrant=False), x[:, 0].clone()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Sequential(Residual(), Residual(), Residual()), (ROWS, 4, 16, 16)),
        (nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.5), nn.Linear(64, 16)), (ROWS, 16)),
        (Attention(), (ROWS, 12, 16)),
    ],
)
def test_it_is_what_a_recording_tells(model: nn.Module, shape: tuple[int, ...]):
    given = (torch.randn(shape),)
    state = torch.get_rng_state()
    found = call_bytes(model, given, {})
    assert torch.equal(state, torch.get_rng_state())
    recorded = items_apart(model, given, {}, lambda *_: lambda: "")
    assert found is not None
    assert found == recorded.lean_bytes
    assert all(parameter.grad is None for parameter in model.parameters())
    with torch.no_grad():
        recorded = items_apart(model, given, {}, lambda *_: lambda: "")
        assert call_bytes(model, given, {}) == recorded.forward_bytes


def test_checkpoints_are_followed():
    given = (torch.randn(ROWS, 16),)
    found = call_bytes(Checkpointed(), given, {})
    assert found is not None
    assert found >= 2 * ROWS * 64 * 4  # what is recomputed is there, and its gradient


def test_what_fakes_do_not_tell_is_said():
    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if x.sum() > 0 else x

    model = nn.Sequential(nn.Linear(8, 8), Asks())
    assert call_bytes(model, (torch.randn(ROWS, 8),), {}) is None


def test_what_may_not_run_in_pieces_anyway_is_not_run():
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise AssertionError

    with pytest.raises(ItemsMixedError, match="too small"):
        call_bytes(Fails(), (torch.randn(2, 8),), {})
    model = nn.Sequential(Fails())
    model[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ItemsMixedError, match="has a forward hook"):
        call_bytes(model, (torch.randn(ROWS, 8),), {})


class Rest(nn.Module):
    """What comes after; it must not run."""

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError


class Returns(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.inside = nn.Linear(8, 8)
        self.what = what

    def forward(self, x: Tensor) -> Any:
        y = self.inside(x)
        return {"state": (y, y[None]), "loss": (y, y.mean()), "two": (y.mean(), y.sum())}[self.what]


def test_a_forward_ends_where_a_statistic_over_the_batch_is_computed():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), Rest())
    message = r"`aten.native_batch_norm.default` in `1` computes a statistic over the batch"
    with pytest.raises(CallMixedError, match=message):
        call_bytes(model, (torch.randn(ROWS, 8),), {})
    # Those of an item alone, or of what was trained, are no reason.
    own = nn.Sequential(nn.Conv1d(4, 4, 1), nn.InstanceNorm1d(4), nn.BatchNorm1d(4).eval())
    assert call_bytes(own, (torch.randn(ROWS, 4, 8),), {}) is not None
    with pytest.raises(ItemsMixedError, match="statistic"):
        items_apart(nn.Sequential(*model[:2]), (torch.randn(ROWS, 8),), {}, lambda *_: lambda: "")


@pytest.mark.parametrize("what", ["state", "two"])
def test_no_backward_runs_of_what_is_returned_whole(what: str, monkeypatch: pytest.MonkeyPatch):
    model, given = Returns(what), (torch.randn(ROWS, 8),)
    with pytest.raises(ItemsMixedError, match="has no entry for each item"):
        items_apart(model, given, {}, lambda *_: lambda: "")
    monkeypatch.setattr(Tensor, "backward", None)
    with pytest.raises(CallMixedError, match="has no entry for each item"):
        call_bytes(model, given, {})


def test_a_loss_that_is_returned_is_no_reason():
    assert call_bytes(Returns("loss"), (torch.randn(ROWS, 8),), {}) is not None


def test_what_is_given_an_object_that_it_may_change_is_not_run():
    """A cache of keys and values would keep tensors without values, and fail in the next call."""

    class Cache:
        def __init__(self) -> None:
            self.keys: list[Tensor] = []

    class Attends(nn.Module):
        def forward(self, x: Tensor, cache: Cache) -> Tensor:
            cache.keys.append(x)
            return torch.stack(cache.keys).sum(0)

    cache = Cache()
    with pytest.raises(ItemsMixedError, match="called with a `Cache`, which it may change"):
        call_bytes(Attends(), (torch.randn(ROWS, 8),), {"cache": cache})
    assert cache.keys == []


def test_nothing_up_the_stack_waits_for_the_collector():
    class Local:
        pass

    def asks():
        local = Local()
        model = nn.Linear(8, 8)
        assert call_bytes(model, (torch.randn(16, 8),), {}) is not None
        return weakref.ref(local)

    gc.collect()
    with no_collection():
        assert asks()() is None


class OverBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x))


def test_a_batch_does_not_wait_for_the_collector_where_its_call_is_refused():
    def asks(ask: Any) -> tuple[Any, ...]:
        batch = torch.randn(16, 16)
        with pytest.raises(ItemsMixedError, match="statistic over the batch"):
            ask(OverBatch(), batch)
        return weakref.ref(batch), weakref.ref(batch.untyped_storage())

    gc.collect()
    with no_collection():
        for ask in (
            lambda model, batch: call_bytes(model, (batch,), {}),
            lambda model, batch: items_apart(model, (batch,), {}, lambda *_: str),
        ):
            assert [it() for it in asks(ask)] == [None, None]
