"""How far an approximate plan changes gradients, beside what others would, updates and outputs.

Responsible for the numbers; the program says what they mean and what is too far
(``crates/memfit/src/report/approximation.rs``, ``output_error.rs``). Lengths are Euclidean, over
all parameters, in 64 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from memfit.apply.micro_batch import cut
from memfit.errors import MemfitError
from memfit.workload import Workload, batch_size

Gradients = Mapping[str, Tensor]

LEAST_OF_LENGTH = 1e-3
"""Part of the whole length below which one parameter's gradient is not judged by itself."""

_FAINT = 1e-4
"""Part of all gradients' root mean square below which one parameter's may be rounding alone."""

_FURTHER = 10
"""How many times as far as steps moved it a parameter is moved, to see whether the loss depends on
it."""


def approximation(expected: Gradients, got: Gradients, noise: float | None) -> dict[str, Any]:
    """What approximate gradients are beside the unplanned ones, in the words of the JSON contract.

    Args:
        expected: Unplanned gradients by name of the parameter.
        got: Planned ones.
        noise: As :func:`batch_noise`.
    """
    squares = {name: _square(gradient) for name, gradient in expected.items()}
    zero = torch.zeros(())
    off = {name: _square(got.get(name, zero) - expected[name]) for name in expected}
    length = math.sqrt(math.fsum(squares.values()))
    products = [_product(expected[name], got.get(name, zero)) for name in expected]
    other = math.sqrt(math.fsum(_square(gradient) for gradient in got.values()))
    judged = [name for name in expected if math.sqrt(squares[name]) >= LEAST_OF_LENGTH * length > 0]
    parts = {name: math.sqrt(off[name] / squares[name]) for name in judged}
    worst = max(parts, key=parts.__getitem__, default="")
    finite = (
        int((gradient.isfinite() & ~got[name].isfinite()).sum())
        for name, gradient in expected.items()
        if name in got
    )
    return {
        "gradient_error": _part(math.sqrt(math.fsum(off.values())), length),
        "cosine": _ratio(math.fsum(products), length * other),
        "worst_parameter": worst,
        "worst_error": parts.get(worst),
        "batch_noise": noise,
        "not_finite": sum(finite),
    }


def idle_parameters(
    workload: Workload,
    gradients: Gradients,
    before: Gradients,
    after: Gradients,
    is_the_loss: Callable[[], bool],
) -> list[str]:
    """Parameters that the loss does not depend on, whose gradients are rounding alone.

    The bias of a convolution before a batch normalisation is one, and the bias of attention's keys.
    Optimizers that normalise gradients make full steps of them, in a direction that any rounding
    turns. It is tried: they are moved further than steps moved them.

    Args:
        workload: The step; its parameters are as ``after`` says, and are again afterwards.
        gradients: Unplanned, by name of the parameter.
        before: Parameters before some unplanned steps, by name.
        after: After them.
        is_the_loss: Whether the loss is, but for rounding, what it was after these steps.

    Returns:
        Their names.
    """
    squares = {name: _square(gradient) for name, gradient in gradients.items()}
    count = sum(gradient.numel() for gradient in gradients.values())
    faint = _FAINT**2 * math.fsum(squares.values()) / max(count, 1)
    parameters = dict(workload.model.named_parameters())
    idle = []
    for name in before:
        if not 0 < squares.get(name, 0) <= faint * gradients[name].numel():
            continue
        parameter, move = parameters[name], after[name] - before[name]
        with torch.no_grad():
            parameter.add_(move.to(parameter), alpha=_FURTHER)
            if is_the_loss():
                idle.append(name)
            parameter.copy_(after[name])
    return idle


def update_error(
    before: Gradients, expected: Gradients, got: Gradients, idle: Collection[str] = ()
) -> float | None:
    """How far parameters are off after some steps, as a part of how far the unplanned ones moved.

    Args:
        before: Parameters before the steps, by name.
        expected: After unplanned steps.
        got: After planned ones.
        idle: Names of those that are left out.

    Returns:
        It; ``None`` where it is not a number.
    """
    names = [name for name in before if name not in idle]
    off = math.fsum(_square(got[name] - expected[name]) for name in names)
    moved = math.fsum(_square(expected[name] - before[name]) for name in names)
    return _part(math.sqrt(off), math.sqrt(moved)) if math.isfinite(off + moved) else None


def rounding_spread(
    before: Gradients,
    expected: Gradients,
    got: Gradients,
    again: Gradients,
    idle: Collection[str] = (),
) -> float | None:
    """How far chance alone has parameters be off, where updates are rounded at random.

    Two draws differ by the root of two times what one is off by from their mean.

    Args:
        before: Parameters before the steps, by name.
        expected: After unplanned steps.
        got: After planned ones.
        again: After the same, with another draw.
        idle: Names of those that are left out.

    Returns:
        It, as a part of how far the unplanned ones moved; ``None`` where it is not a number.
    """
    names = [name for name in before if name not in idle]
    apart = math.fsum(_square(got[name] - again[name]) for name in names)
    moved = math.fsum(_square(expected[name] - before[name]) for name in names)
    return _part(math.sqrt(apart / 2), math.sqrt(moved)) if math.isfinite(apart + moved) else None


def batch_noise(workload: Workload) -> float | None:
    """What other examples would change the gradients by, as a part of their length.

    Gradients of a mean over ``n`` examples vary by the spread of one example over the root of
    ``n``. So half of the difference between the gradients of a batch's halves varies as those of
    the whole batch do.

    Args:
        workload: The step; its gradients are gone afterwards.

    Returns:
        It; ``None`` where the batch has no halves that the model takes.
    """
    assert workload.loss is not None, "only what trains has gradients"
    try:
        halves = cut(workload.batch, 2, workload.batch_dim)
        if len(halves) < 2:  # noqa: PLR2004
            return None
        first, second = (_gradients(workload, half.batch) for half in halves)
    except (MemfitError, RuntimeError, ValueError, IndexError, TypeError):
        return None  # the model does not take a half: nothing is known
    finally:
        workload.model.zero_grad()
    zero = torch.zeros(())
    names = first.keys() | second.keys()
    pairs = [(first.get(name, zero), second.get(name, zero)) for name in names]
    difference = math.sqrt(math.fsum(_square(a - b) for a, b in pairs))
    return _ratio(difference, math.sqrt(math.fsum(_square(a + b) for a, b in pairs)))


def output_error(expected: Gradients, got: Gradients) -> dict[str, Any]:
    """What approximate outputs of inference are beside the unplanned ones.

    Args:
        expected: Unplanned, by their place.
        got: Planned.

    Returns:
        It in the words of the JSON contract.
    """
    numbers = {k: it for k, it in expected.items() if it.is_floating_point() or it.is_complex()}
    fits = all(name in got and got[name].shape == it.shape for name, it in numbers.items())
    length = math.sqrt(math.fsum(map(_square, numbers.values())))
    found: dict[str, Any] = {"error": None, "cosine": None}
    found |= {"rows": 0, "other_choices": 0, "not_finite": 0}
    if not fits or not numbers:
        return found
    other = math.sqrt(math.fsum(_square(got[name]) for name in numbers))
    off = math.sqrt(math.fsum(_square(got[name] - it) for name, it in numbers.items()))
    product = math.fsum(_product(it, got[name]) for name, it in numbers.items())
    found |= {"error": _part(off, length), "cosine": _ratio(product, length * other)}
    found["not_finite"] = sum(
        int((it.isfinite() & ~got[name].isfinite()).sum()) for name, it in numbers.items()
    )
    name, only = next(iter(numbers.items()))
    if len(numbers) == 1 and only.dim() in {2, 3} and only.shape[-1] > 1 and only.numel() > 0:
        other_choices = only.argmax(-1) != got[name].argmax(-1)
        found |= {
            "rows": other_choices.numel(),
            "other_choices": int(other_choices.sum()),
        }
    return found


def may_be_drawn(workload: Workload) -> bool:
    """Whether a workload's batch has examples that other batches can be drawn from.

    Args:
        workload: The workload.
    """
    return batch_size(workload.batch, workload.batch_dim) > 1


def drawn_batches(workload: Workload, count: int, draw: int) -> list[Any]:
    """Batches of examples that are drawn from the workload's, with repetition.

    Args:
        workload: Whose batch it is; where its examples cannot be drawn, it is each of the batches.
        count: How many batches.
        draw: Number of the draw: the same gives the same.
    """
    if not may_be_drawn(workload):
        return [workload.batch] * count
    size = batch_size(workload.batch, workload.batch_dim)
    dim = workload.batch_dim
    generator = torch.Generator().manual_seed(draw)

    def drawn() -> Any:
        rows = torch.randint(size, (size,), generator=generator)

        def pick(leaf: Tensor) -> Tensor:
            if not -leaf.dim() <= dim < leaf.dim() or leaf.shape[dim] != size:
                return leaf
            return leaf.index_select(dim, rows.to(leaf.device))

        return tree_map_only(Tensor, pick, workload.batch)

    return [drawn() for _ in range(count)]


def loss_of_batch(workload: Workload) -> float | None:
    """The loss of the workload's batch as the model is now; ``None`` where it is not a number.

    Args:
        workload: The workload.
    """
    assert workload.loss is not None, "only what trains has a loss"
    with torch.no_grad(), workload.autocasting():
        loss = float(workload.loss(workload.model, workload.batch))
    return loss if math.isfinite(loss) else None


def _gradients(workload: Workload, batch: Any) -> Gradients:
    model = workload.model
    model.zero_grad()
    assert workload.loss is not None
    with workload.autocasting():
        loss = workload.loss(model, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    named = ((name, p.grad) for name, p in model.named_parameters())
    return {name: grad.detach().clone().to_dense() for name, grad in named if grad is not None}


def _square(tensor: Tensor) -> float:
    return _product(tensor, tensor)


def _product(a: Tensor, b: Tensor) -> float:
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    return float((a * b.conj()).sum().real)


def _part(off: float, length: float) -> float | None:
    """A length as a part of another; what is not off at all is no part of any."""
    return 0.0 if off == 0 else _ratio(off, length)


def _ratio(a: float, b: float) -> float | None:
    return a / b if b > 0 and math.isfinite(a) and math.isfinite(b) else None
