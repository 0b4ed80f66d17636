"""A loss in slices has the value and the gradients of the whole one, whatever its logits see."""

from __future__ import annotations

import contextlib
import copy
import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memfit.apply.slices.chunk import ChunkedLoss
from memfit.apply.slices.forward_mode import take_off_ended
from memfit.errors import DivergenceWarning, UsageError
from memfit.measure import measure_peak

CLASSES, WIDTH, SLICES = 101, 16, 4


class Model(nn.Module):
    """Embeddings, one layer, and a head with or without a bias or weights of its own."""

    def __init__(self, *, bias=True, tied=False):
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.middle(self.embedding(ids))))


def _flat(logits, target, **options):
    return F.cross_entropy(logits.view(-1, CLASSES), target.view(-1), **options)


def _shifted(logits, target, **options):
    logits = logits.float() if logits.dtype.itemsize < 4 else logits
    rows = logits[..., :-1, :].contiguous().view(-1, logits.size(-1))
    return F.cross_entropy(rows, target[..., 1:].reshape(-1), **options)


def _classes_second(logits, target, **options):
    return F.cross_entropy(logits.transpose(1, 2), target, **options)


def _module(logits, target, **options):
    return nn.CrossEntropyLoss(**options)(logits.permute(0, 2, 1), target)


def _selected(logits, target, **options):
    return F.cross_entropy(logits[target != 5], target[target != 5], **options)


def _one_sequence(logits, target, **options):
    return F.cross_entropy(logits[1, None][0], target[1], **options)


def _by_logarithms(logits, target, **options):
    del options["label_smoothing"]
    return F.nll_loss(F.log_softmax(logits.flatten(0, 1), dim=-1), target.flatten(), **options)


LAYOUTS = [
    _flat,
    _shifted,
    _classes_second,
    _module,
    _selected,
    _one_sequence,
    _by_logarithms,
]


def data(*, ignored=False, rows=3, length=7):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, CLASSES, (rows, length), generator=generator)
    target = torch.randint(0, CLASSES, (rows, length), generator=generator)
    if ignored:
        target[0, :4] = -100
        target[-1, -1] = -100
    return ids, target


def chunked(model, slices=SLICES):
    return ChunkedLoss(model, {"weight": "head.weight", "slices": slices})


def results(model, loss_of, *, in_slices, scale=3.0):
    """Loss and gradients of one step."""
    model.zero_grad()
    executor = chunked(model)
    with executor.forward() if in_slices else contextlib.nullcontext():
        loss = loss_of(model)
    if in_slices:
        assert (executor.last.losses, executor.last.whole) == (1, [])
    factors = torch.arange(1, loss.numel() + 1).to(loss.dtype).view(loss.shape)
    (loss * factors).sum().mul(scale).backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [loss.detach(), *gradients]


OPTIONS = [
    {"reduction": reduction, "label_smoothing": smoothing, "weighted": weighted, "ignored": ignored}
    for reduction, smoothing, weighted, ignored in itertools.product(
        ("mean", "sum", "none"), (0.0, 0.1), (False, True), (False, True)
    )
]


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_loss_and_gradients_are_as_near_to_the_truth_as_those_of_the_whole_loss(layout, dtype):
    # Every option with every layout and, over the layouts, with every type.
    first = LAYOUTS.index(layout) + DTYPES.index(dtype)
    for option in OPTIONS[first % len(DTYPES) :: len(DTYPES)]:
        torch.manual_seed(0)
        model = Model().to(dtype)
        ids, target = data(ignored=option["ignored"])
        options = {name: option[name] for name in ("reduction", "label_smoothing")}
        weight = torch.rand(CLASSES, generator=torch.Generator().manual_seed(2)).to(dtype)

        def loss_of(model, options=options, option=option, weight=weight, target=target, ids=ids):
            logits = model(ids)
            wide = (
                logits.dtype
                if layout is not _shifted
                else torch.promote_types(logits.dtype, torch.float32)
            )
            given = weight.to(wide) if option["weighted"] else None
            return layout(logits, target, weight=given, **options)

        whole = results(model, loss_of, in_slices=False)
        sliced = results(model, loss_of, in_slices=True)
        truth = results(copy.deepcopy(model).double(), loss_of, in_slices=False)
        for ours, theirs, true in zip(sliced, whole, truth, strict=True):
            assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
            error = float((ours.double() - true).norm())
            allowed = 2 * float((theirs.double() - true).norm())
            # Where the whole loss happens to be right to the last bit, one bit is no error.
            rounding = torch.finfo(theirs.dtype).eps * float(true.norm())
            assert error <= allowed + rounding, (option, error, allowed)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_autocast_computes_slices_in_its_type_and_sums_in_the_parameters(tied, bias):
    torch.manual_seed(0)
    model = Model(bias=bias, tied=tied)
    ids, target = data()

    def loss_of(model):
        with torch.autocast("cpu", torch.bfloat16):
            return _flat(model(ids), target)

    whole = results(model, loss_of, in_slices=False)
    sliced = results(model, loss_of, in_slices=True)
    truth = results(model, lambda m: _flat(m(ids), target), in_slices=False)
    for ours, theirs, true in zip(sliced, whole, truth, strict=True):
        assert ours.dtype == theirs.dtype
        error, allowed = (ours - true).norm(), 2 * (theirs - true).norm()
        assert error <= allowed + torch.finfo(torch.bfloat16).eps * true.norm()


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("slices", [1, 3, 64])
def test_rows_need_not_divide_into_slices(rows, slices):
    torch.manual_seed(0)
    model = Model().double()
    ids, target = data(rows=rows)
    expected = results(model, lambda m: _flat(m(ids), target), in_slices=False)
    model.zero_grad()
    with chunked(model, slices).forward():
        loss = _flat(model(ids), target)
    loss.backward(torch.full_like(loss, 3.0))
    torch.testing.assert_close(model.head.weight.grad, expected[-2])
    torch.testing.assert_close(model.middle.weight.grad, expected[2])


def test_ignoring_every_target_gives_no_number_and_no_gradient_as_torch_does():
    model = Model()
    ids, target = data()
    target[:] = -100
    whole = results(model, lambda m: _flat(m(ids), target), in_slices=False)
    sliced = results(model, lambda m: _flat(m(ids), target), in_slices=True)
    assert sliced[0].isnan()
    assert whole[0].isnan()
    for ours, theirs in zip(sliced[1:], whole[1:], strict=True):
        assert torch.equal(ours, theirs)
        assert not ours.any()


def test_no_rows_at_all_are_as_in_torch():
    model = Model()
    ids, target = data()
    for reduction in ("mean", "sum", "none"):
        with chunked(model).forward():
            ours = _flat(model(ids)[:0], target[:0], reduction=reduction)
        theirs = _flat(model(ids)[:0], target[:0], reduction=reduction)
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert ours.shape == theirs.shape


def test_a_kept_graph_gives_its_gradients_again():
    model = Model()
    ids, target = data()
    with chunked(model).forward():
        loss = _flat(model(ids), target)
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in model.parameters()]
    loss.backward()
    for parameter, gradient in zip(model.parameters(), once, strict=True):
        torch.testing.assert_close(parameter.grad, 2 * gradient)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("frozen", ["head.weight", "head.bias", "embedding.weight"])
def test_what_needs_no_gradient_gets_none(frozen):
    model = Model()
    model.get_parameter(frozen).requires_grad_(requires_grad=False)
    ids, target = data()
    whole = results(model, lambda m: _flat(m(ids), target), in_slices=False)
    sliced = results(model, lambda m: _flat(m(ids), target), in_slices=True)
    assert model.get_parameter(frozen).grad is None
    for ours, theirs in zip(sliced, whole, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_evaluation_without_gradients_keeps_no_graph():
    model = Model()
    ids, target = data()
    with torch.no_grad(), chunked(model).forward():
        loss = _flat(model(ids), target)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, _flat(model(ids), target).detach())


def test_logits_that_somebody_reads_are_the_real_ones_with_one_warning():
    model = Model()
    ids, target = data()
    plain = model(ids)
    plain_loss = _flat(plain, target) + 1e-2 * plain.logsumexp(-1).pow(2).mean()
    plain_loss.backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    executor = chunked(model)
    logits, loss = None, None

    def forward():
        nonlocal logits, loss
        with executor.forward():
            logits = model(ids)
            loss = _flat(logits, target) + 1e-2 * logits.logsumexp(-1).pow(2).mean()

    with pytest.warns(DivergenceWarning, match="needs the whole logits") as caught:
        forward()
    loss.backward()
    assert len(caught) == 1
    assert executor.diverged
    assert "logsumexp" in executor.divergence
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(logits.argmax(-1), plain.argmax(-1))
        assert torch.equal(logits.view(-1, CLASSES)[3:5], plain.view(-1, CLASSES)[3:5])
        with executor.forward():
            again = model(ids)
        torch.testing.assert_close(again + 1, plain + 1)
        torch.testing.assert_close(torch.cat([again, again]), torch.cat([plain, plain]))


def test_probabilities_as_targets_use_the_logits_whole():
    model = Model()
    ids, _ = data()
    target = torch.rand(*ids.shape, CLASSES).softmax(-1)
    executor = chunked(model)
    with pytest.warns(DivergenceWarning), executor.forward():
        loss = F.cross_entropy(model(ids).view(-1, CLASSES), target.view(-1, CLASSES))
    plain = F.cross_entropy(model(ids).view(-1, CLASSES), target.view(-1, CLASSES))
    torch.testing.assert_close(loss, plain)


def test_a_target_out_of_range_is_an_error():
    model = Model()
    ids, target = data()
    target[0, 0] = CLASSES
    with pytest.raises((IndexError, RuntimeError)), chunked(model).forward():
        _flat(model(ids), target)


def test_an_autograd_function_that_hides_the_logits_has_its_gradient_go_on_from_them():
    class Hidden(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits):
            ctx.save_for_backward(logits)
            return logits.square().sum()

        @staticmethod
        def backward(ctx, gradient):
            (logits,) = ctx.saved_tensors
            return 2 * logits * gradient

    model = Model()
    ids, _ = data()
    Hidden.apply(model(ids).view(-1, CLASSES)).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with pytest.warns(DivergenceWarning), chunked(model).forward():
        loss = Hidden.apply(model(ids).view(-1, CLASSES))
    loss.backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_a_product_with_the_transposed_weight_is_put_off_too():
    model = Model(bias=False, tied=True)
    ids, target = data()

    def loss_of(model):
        hidden = torch.tanh(model.middle(model.embedding(ids)))
        return _flat(hidden @ model.head.weight.T, target)

    whole = results(model, loss_of, in_slices=False)
    sliced = results(model, loss_of, in_slices=True)
    for ours, theirs in zip(sliced, whole, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_whole_logits_never_exist():
    model = Model(bias=False)
    ids = torch.randint(0, CLASSES, (64, 64))

    def step():
        with chunked(model, 64).forward():
            loss = _flat(model(ids), ids)
        loss.backward()
        model.zero_grad()

    step()
    measured = measure_peak(step, [*model.parameters(), ids])
    logits = ids.numel() * CLASSES * 4
    hidden = ids.numel() * WIDTH * 4
    assert measured.peak_bytes - measured.static_bytes < 8 * hidden < logits * 1.3
    assert measured.left_bytes == 0


@pytest.mark.parametrize(
    ("chunk", "said"),
    [
        ({}, "malformed"),
        ({"weight": "head.weight", "slices": 0}, "`0` slices"),
        ({"weight": "nowhere.weight", "slices": 2}, "`nowhere.weight`"),
    ],
)
def test_a_plan_that_cannot_be_followed_is_named(chunk, said):
    with pytest.raises(UsageError, match=said):
        ChunkedLoss(Model(), chunk)


def _set(logits):
    logits[..., 0] = -30.0
    return logits


def _halved_cast(logits):
    wide = logits.double()
    wide.div_(2)
    return wide


def _written_through_a_view(logits):
    shown = logits[:, :]
    logits.mul_(3)
    return shown


def _hooked(logits):
    logits.register_hook(lambda gradient: 5 * gradient)
    return logits.view(-1, CLASSES)


def _looked_at_before(logits):
    assert logits.argmax(-1).shape == logits.shape[:-1]
    return logits


@pytest.mark.parametrize(
    "change", [_set, _halved_cast, _written_through_a_view, _hooked, _looked_at_before]
)
def test_logits_that_were_written_to_or_hooked_before_the_loss_are_those(change):
    model, ids = Model(), torch.randint(0, CLASSES, (3, 8))
    found = []
    chunk = {"weight": "head.weight", "slices": SLICES}
    for way in (contextlib.nullcontext(), ChunkedLoss(model, chunk, warn=False).forward()):
        model.zero_grad()
        with way:
            loss = F.cross_entropy(change(model(ids)).reshape(-1, CLASSES), ids.flatten())
        loss.backward()
        found.append((loss.detach(), *(p.grad.clone() for p in model.parameters())))
    for expected, got in zip(*found, strict=True):
        assert torch.equal(expected, got)


def test_gradients_that_keep_their_graph_may_be_differentiated_where_that_was_asked_for():
    model, ids = Model(), torch.randint(0, CLASSES, (3, 8))
    found = []
    for way in (
        contextlib.nullcontext(),
        ChunkedLoss(model, {"weight": "head.weight", "slices": 3}, in_script=True).forward(),
    ):
        model.zero_grad()
        with way:
            loss = _flat(model(ids), ids)
        gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        (loss + sum(it.square().sum() for it in gradients)).backward()
        found.append([p.grad.clone() for p in model.parameters()])
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected)


def test_a_forward_that_ends_in_backward_leaves_no_mode_on_torchs_stack():
    """As under ``memfit run``, where backward is what ends it, inside a call that modes handle."""
    model, ids = Model(), torch.randint(0, CLASSES, (3, 8))
    forward = chunked(model).forward()
    forward.__enter__()
    loss = _flat(model(ids), ids)

    class Ends(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is torch.Tensor.backward:
                forward.__exit__(None, None, None)
            return func(*args, **(kwargs or {}))

    with Ends():
        loss.backward()
    whole = model(ids)
    assert type(whole) is torch.Tensor
    take_off_ended()
    assert torch._C._len_torch_function_stack() == 0


def test_logits_that_are_looked_at_after_an_update_are_an_error_and_no_others():
    model, ids = Model(), torch.randint(0, CLASSES, (3, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ChunkedLoss(model, {"weight": "head.weight", "slices": 3}, warn=False).forward():
        logits = model(ids)
        _flat(logits, ids).backward()
    optimizer.step()
    with pytest.raises(UsageError, match="have been updated since"):
        logits.argmax(-1)


class _LogOfSums(torch.autograd.Function):
    """A function of a script's own, which takes logits without asking torch's functions."""

    @staticmethod
    def forward(ctx, logits):
        ctx.save_for_backward(logits)
        return logits.logsumexp(-1)

    @staticmethod
    def backward(ctx, gradient):
        (logits,) = ctx.saved_tensors
        return logits.softmax(-1) * gradient[:, None]


@pytest.mark.parametrize("in_script", [False, True])
def test_gradients_asked_of_autograd_pass_through_functions_of_its_own(*, in_script: bool):
    """`torch.autograd.grad` leaves no gradient anywhere on the way, and runs no hook there."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 200)), torch.randn(64, 16)
    weights = list(model.parameters())

    def loss() -> torch.Tensor:
        return _LogOfSums.apply(model(x)).mean() + model[0].weight.square().sum()

    expected = torch.autograd.grad(loss(), weights)
    chunk = {"weight": "1.weight", "slices": 4}
    sliced = ChunkedLoss(model, chunk, warn=False, in_script=in_script)
    with sliced.forward():
        made = loss()
    assert sliced.last.whole
    torch.testing.assert_close(torch.autograd.grad(made, weights), expected, rtol=0, atol=0)
