"""A model's call in pieces of its batch: gradients, random numbers and hooks as without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memfit.apply.pieces.call import Pieces

ROWS = 10


class Net(nn.Module):
    """Convolution, dropout, recurrence, noise, a parameter used twice and one not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(8, 5)
        self.again = self.head
        self.recurrent = nn.LSTM(5, 4, batch_first=True)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor, scale: float = 1.0, shift: Tensor | None = None) -> Any:
        hidden = self.dropout(torch.relu(self.conv(x))).mean((2, 3))
        logits = self.head(hidden) + self.again(hidden.square()) * scale
        logits = logits + 0.1 * torch.randn_like(logits)
        if shift is not None:
            logits = logits + shift
        return {"logits": logits, "last": self.recurrent(logits[:, None])[0], "kind": "a"}


def loss_of(out: Any) -> Tensor:
    # Softmax over the batch: the loss may do what the model may not.
    return out["logits"].softmax(0).square().sum() + out["last"].sum()


def stepped(model: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    """Loss, gradients, and what the random generator says afterwards."""
    torch.manual_seed(3)
    model.zero_grad()
    tensors = [it for it in (*args, *kwargs.values()) if isinstance(it, Tensor)]
    for tensor in tensors:
        tensor.grad = None
    loss = loss_of(call(*args, **kwargs))
    after = torch.rand(2)
    loss.backward()
    gradients = [*(p.grad for p in model.parameters()), *(tensor.grad for tensor in tensors)]
    return [loss.detach(), *gradients, after, torch.rand(2)]


def in_pieces(model: nn.Module, count: int, cut: tuple[int, ...] = (0,)) -> Callable[..., Any]:
    pieces = Pieces(model, count, frozenset(cut), (True, True), None)
    return lambda *args, **kwargs: pieces.run(model.forward, args, kwargs)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_gradients_and_random_numbers_are_those_of_the_whole(count: int):
    torch.manual_seed(0)
    model = Net().double()
    x = torch.randn(ROWS, 3, 8, 8, dtype=torch.double, requires_grad=True)
    shift = torch.randn(5, dtype=torch.double, requires_grad=True)
    expected = stepped(model, model, x, scale=2.0, shift=shift)
    found = stepped(model, in_pieces(model, count), x, scale=2.0, shift=shift)
    assert any(gradient is None for gradient in expected)
    for one, other in zip(expected, found, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-14)
    assert model.again is model.head


def test_nothing_of_the_batch_is_held_between_forward_and_backward():
    model = nn.Sequential(nn.Linear(4, 4096), nn.Tanh(), nn.Linear(4096, 2))
    made: list[Tensor] = []
    model[1].register_forward_hook(lambda _module, _args, result: made.append(result))
    x = torch.randn(ROWS, 4)
    out = Pieces(model, 5, frozenset({0}), (), None).run(model.forward, (x,), {})
    assert [tuple(it.shape) for it in made] == [(2, 4096)] * 5
    assert tuple(out.shape) == (ROWS, 2)
    node = out.grad_fn
    assert node is not None
    held = [tensor for tensor in node.saved_tensors if tensor.numel() > x.numel()]
    assert {id(tensor) for tensor in held} <= {id(p) for p in model.parameters()}


def test_a_parameters_gradient_arrives_once_and_is_not_copied():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    seen: list[int] = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.data_ptr()))
    run = in_pieces(model, 5)
    run(torch.randn(ROWS, 4)).sum().backward()
    assert len(seen) == 4
    before = [p.grad.clone() for p in model.parameters()]
    run(torch.randn(ROWS, 4)).mul(0).sum().backward()
    assert seen[4:] == seen[:4]
    assert all(torch.equal(p.grad, was) for p, was in zip(model.parameters(), before, strict=True))


def test_gradients_of_gradients_are_those_of_the_whole():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 1)).double()
    x = torch.randn(ROWS, 4, dtype=torch.double, requires_grad=True)
    pieces = Pieces(model, 5, frozenset({0}), (True,), None)
    found = []
    for call in (model, lambda given: pieces.run(model.forward, (given,), {})):
        torch.manual_seed(1)
        model.zero_grad()
        (slope,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
        found.append([slope.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-14)


def test_what_was_written_to_since_is_an_error():
    model = nn.Linear(4, 2)
    out = Pieces(model, 5, frozenset({0}), (), None).run(model.forward, (torch.randn(ROWS, 4),), {})
    with torch.no_grad():
        model.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_backward_runs_as_the_call_did():
    torch.manual_seed(0)
    seen: list[tuple[bool, torch.dtype]] = []

    class Told(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            result = self.inner(x)
            seen.append((self.training, result.dtype))
            return result

    model = Told()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = Pieces(model, 2, frozenset({0}), (), None).run(
            model.forward, (torch.randn(ROWS, 4),), {}
        )
    model.eval()
    out.float().sum().backward()
    assert seen == [(True, torch.bfloat16)] * 4
    assert not model.training


def test_fused_dropout_keeps_what_the_whole_would():
    class Fused(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.native_dropout(x, 0.4, train=True)[0]  # as on a GPU

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), Fused())
    pieces = Pieces(model, 3, frozenset({0}), (True,), None)
    x = torch.randn(ROWS, 4)
    found = []
    for call in (model, lambda given: pieces.run(model.forward, (given,), {})):
        torch.manual_seed(1)
        model.zero_grad()
        out = call(x)
        out.square().sum().backward()
        found.append([out.detach(), torch.rand(1), *(p.grad for p in model.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one)


def test_small_batches_run_whole():
    model = nn.Linear(4, 2)
    run = in_pieces(model, 4)
    assert "InPieces" not in type(run(torch.randn(3, 4)).grad_fn).__name__
    assert "InPieces" in type(run(torch.randn(4, 4)).grad_fn).__name__


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_there_is_no_node(mode: Callable[[], Any]):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5))
    pieces = Pieces(model, 3, frozenset({0}), (True,), None)
    x = torch.randn(ROWS, 4)
    with mode():
        torch.manual_seed(1)
        expected = model(x)
        torch.manual_seed(1)
        found = pieces.run(model.forward, (x,), {})
    torch.testing.assert_close(found, expected)
    assert found.grad_fn is None
    assert found.is_inference() == expected.is_inference()


class WithLoss(nn.Module):
    """A model that computes its loss: over the targets that are not ignored, or over all."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.head = nn.Linear(4, 5)
        self.reduction = reduction

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(x)
        if self.reduction == "mean":
            return (logits - y[:, None]).square().mean(), logits
        loss = nn.functional.cross_entropy(logits, y, reduction=self.reduction.split("_")[-1])
        return loss, logits


@pytest.mark.parametrize("reduction", ["mean", "token_mean", "sum"])
def test_a_loss_that_the_model_returns_is_weighed(reduction: str):
    torch.manual_seed(0)
    model = WithLoss(reduction).double()
    x, y = torch.randn(ROWS, 4, dtype=torch.double), torch.randint(0, 5, (ROWS,))
    y[:4] = -100 if reduction != "mean" else 1
    pieces = Pieces(model, 3, frozenset({0, 1}), (), None, (0, reduction))
    found = []
    for call in (model, lambda *args: pieces.run(model.forward, args, {})):
        model.zero_grad()
        loss, logits = call(x, y)
        (loss * 3 + logits.sum()).backward()
        found.append([loss.detach(), logits.detach(), *(p.grad for p in model.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-14)
