"""Whether a call may run in pieces of its batch: what is refused, and for which reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memfit.plan.items_apart import ItemsApart, ItemsMixedError, items_apart

ROWS = 8


class Of(nn.Module):
    """A linear layer, and something that is done with what it returns."""

    def __init__(self, then: Callable[[Tensor], Any], *inside: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.inside = nn.Sequential(*inside)
        self.then = then

    def forward(self, x: Tensor, *others: Any) -> Any:
        return self.then(self.inside(self.linear(x)), *others)


def proved(model: nn.Module, *args: Any) -> ItemsApart:
    args = args or (torch.randn(ROWS, 8),)
    return items_apart(model, args, {}, lambda _model, _given: lambda: "")


@pytest.mark.parametrize(
    ("then", "reason"),
    [
        (lambda x: x @ x.t(), "no entry for each item"),
        (lambda x: x.softmax(0), "works along the batch dimension"),
        (lambda x: x.flip(0), "works along the batch dimension"),
        (lambda x: x[torch.randperm(len(x))], "works along the batch dimension"),
        (lambda x: x.t().cumsum(-1).t(), "works along the batch dimension"),
        (lambda x: x - x.mean(0), "statistic over the batch"),
        (lambda x: torch.cat([x[1:], x[:1]]), "statistic over the batch"),
        (lambda x: (x.view(2, -1, 4) - x.view(2, -1, 4).mean(0)).view(-1, 4), "statistic over"),
        (lambda x: torch.cat([x, x.std().expand(len(x), 1)], 1), "statistic over the batch"),
        (lambda x: torch.stack(list(x.unbind(0))[::-1]), "makes other tensors at batch"),
        (lambda x: x + torch.randperm(len(x))[:, None], "cannot be drawn for the whole batch"),
        (lambda x: iter([x]), "it returns a `list_iterator`"),
        (lambda x: (x, len(x)), "of another kind for another batch size"),
        (lambda x: x.detach(), "nothing that it returns depends on parameters"),
    ],
)
def test_what_mixes_items_is_refused(then: Callable[[Tensor], Any], reason: str):
    with pytest.raises(ItemsMixedError, match=reason):
        proved(Of(then))


@pytest.mark.parametrize(
    "then",
    [
        lambda x: x * (1 / len(x)),
        lambda x: x.clamp(max=1 / len(x)),
        lambda x: x / torch.tensor(float(len(x))),
        lambda x: x * torch.full((), len(x)),
        lambda x: x + x.new_full((len(x), 1), 1 / len(x)),
        lambda x: x + torch.arange(len(x))[:, None],
        lambda x: x + torch.linspace(0, 1, len(x))[:, None],
        lambda x: x + torch.nn.functional.embedding(torch.arange(len(x)), torch.ones(64, 4)),
        lambda x: x + torch.ones(64, 4)[: len(x)],
        lambda x: x + torch.ones(64, 4)[len(x)],
        lambda x: x + torch.ones(64, 4)[torch.arange(len(x))],
        lambda x: x.where((torch.arange(len(x)) > 3)[:, None], 0),
    ],
)
def test_what_tells_the_size_of_a_batch_or_places_in_it_is_refused(then: Callable[[Tensor], Any]):
    with pytest.raises(ItemsMixedError, match=r"size of the batch|of other numbers|works along"):
        proved(Of(then))


@pytest.mark.parametrize(
    "then",
    [
        lambda x: x + torch.zeros(len(x), 4) + x.new_full((len(x), 1), 2.0),
        lambda x: x + torch.ones(1, 4).expand(len(x), 4) + torch.ones(4).repeat(len(x), 1),
        lambda x: torch.cat([x, torch.ones(1, 4).expand(len(x), 4)], 1),
        lambda x: x + torch.arange(4) / 3 + torch.tensor(3.0),
        lambda x: x.reshape(len(x), 2, 2).transpose(1, 2).reshape(len(x), 4),
        lambda x: x + x[torch.arange(len(x))[:, None], torch.arange(4)],
        lambda x: nn.functional.group_norm(x[:, :, None], 2)[:, :, 0],
    ],
)
def test_what_is_the_same_for_every_item_is_none_of_that(then: Callable[[Tensor], Any]):
    assert proved(Of(then)).items == ROWS


@pytest.mark.parametrize("then", [lambda x, y: (x, y), lambda x, y: (x, y[:, 1:])])
def test_what_returns_memory_that_it_is_given_is_refused(then: Callable[[Tensor, Tensor], Any]):
    with pytest.raises(ItemsMixedError, match="returns memory that it is given"):
        proved(Of(then), torch.randn(ROWS, 8), torch.randn(ROWS, 4))


def test_modules_that_mix_items_are_refused_in_training_alone():
    model = Of(lambda x: x, nn.BatchNorm1d(4))
    with pytest.raises(ItemsMixedError, match=r"`inside.0` computes a statistic over the batch"):
        proved(model)
    assert proved(model.eval()).items == ROWS


def test_hooks_that_would_see_pieces_are_refused_and_the_models_own_are_not():
    model = Of(lambda x: x, nn.Tanh())
    model.register_forward_hook(lambda *_: None)
    proved(model)
    model.inside[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ItemsMixedError, match=r"`inside.0` has a forward hook"):
        proved(model)


def test_buffers_that_are_written_to_are_refused():
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x

    with pytest.raises(ItemsMixedError, match=r"writes to `inside.0.calls`"):
        proved(Of(lambda x: x, Counting()))


def test_what_the_code_does_besides_is_a_reason_from_the_second_call_on():
    effects = iter(["it makes a table", "", "it counts", "it counts", "it counts"])

    def look(_model: nn.Module, _given: Any) -> Callable[[], str]:
        return lambda: next(effects)

    given = (torch.randn(ROWS, 8),)
    items_apart(Of(lambda x: x), given, {}, look)
    with pytest.raises(ItemsMixedError, match="it counts"):
        items_apart(Of(lambda x: x), given, {}, look)


def test_what_is_cut_and_drawn_for_items_is_told_apart():
    def then(x: Tensor, scale: float, table: Tensor, mask: Tensor) -> Any:
        noise = torch.rand_like(x) + torch.rand(4)
        return (x * scale + table * mask + noise, None)

    model = Of(then, nn.Dropout(0.5))
    given = (torch.randn(ROWS, 8), 2.0, torch.randn(4), torch.randn(ROWS, 4))
    state = torch.get_rng_state()
    found = proved(model, *given)
    assert torch.equal(state, torch.get_rng_state())
    assert found.cut == (0, 2)
    assert found.draws == (True, True, False)
    assert found.full_bytes > found.lean_bytes > found.gradient_bytes == 4 * (8 * 4 + 4)


def test_a_loss_that_the_model_computes_is_told_with_its_reduction():
    y = torch.randint(0, 4, (ROWS,))
    entropy = nn.functional.cross_entropy
    for then, loss in (
        (lambda x, y: (x, entropy(x, y)), (1, "token_mean")),
        (lambda x, y: entropy(x, y, reduction="sum"), (0, "sum")),
        (lambda x, _: {"loss": x.square().mean(), "x": x}, (0, "mean")),
        (lambda x, _: x, None),
    ):
        assert proved(Of(then), torch.randn(ROWS, 8), y).loss == loss


@pytest.mark.parametrize(
    ("then", "reason"),
    [
        (lambda x: x.square().mean().sqrt(), "how the loss that it returns reduces"),
        (lambda x: (x.mean(), x.sum()), "no entry for each item"),
        (lambda x: (x.softmax(0).mean(), x), "works along the batch dimension"),
    ],
)
def test_losses_that_are_no_sums_over_items_are_refused(then: Callable[[Tensor], Any], reason: str):
    with pytest.raises(ItemsMixedError, match=reason):
        proved(Of(then))


def test_checkpoints_that_draw_again_in_backward_are_refused():
    class Checkpointed(nn.Sequential):
        def forward(self, x: Tensor) -> Any:
            return checkpoint(super().forward, x, use_reentrant=False)

    assert proved(Of(lambda x: x, Checkpointed(nn.Linear(4, 4), nn.Tanh()))).draws == ()
    with pytest.raises(ItemsMixedError, match="draws its random numbers again in backward"):
        proved(Of(lambda x: x, Checkpointed(nn.Linear(4, 4), nn.Dropout(0.5))))


def test_a_forward_of_very_many_ops_is_left_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(items_apart.__globals__, "MOST_OPS", 8)
    proved(Of(lambda x: x))
    with pytest.raises(ItemsMixedError, match="runs more than 8 ops"):
        proved(Of(lambda x: sum(x * i for i in range(8))))


def test_nobody_looks_on_after_a_call_that_fails():
    """A profiler that stays is called for every function from there on."""
    ended = []

    def of_values(x):
        return x if x.sum() > 0 else -x

    with pytest.raises(ItemsMixedError):
        items_apart(
            Of(of_values), (torch.randn(ROWS, 8),), {}, lambda *_: lambda: ended.append("") or ""
        )
    assert ended


@pytest.mark.parametrize("is_leaf", [True, False])
def test_a_call_with_an_input_that_is_differentiated_may_run_in_pieces(is_leaf: bool):  # noqa: FBT001
    """As with images that were sampled by the gradients of the same model."""
    given = torch.randn(ROWS, 8, requires_grad=True)
    apart = proved(Of(torch.sigmoid), given if is_leaf else torch.cat([given[:4], given[4:]]))
    assert apart.action(2)["kind"] == "micro_batch"
    assert given.grad is None
