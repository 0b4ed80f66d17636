"""What ops take inside, found by probing the calls that may, on steps where the peak is in one."""

from __future__ import annotations

import pytest
import torch
from peaks import predicted_peak
from torch import nn
from torch.nn import functional as F

from memfit.capture import record
from memfit.capture.probe.scratch_ops import takes_scratch
from memfit.measure import measure_peak, static_tensors
from memfit.run.fitted import Fitted
from memfit.workload import Workload

ROWS, WIDTH = 256, 128


def agree(workload):
    """Whether the peak is predicted that the allocator sees in a step that is not the first."""
    predicted = predicted_peak(record(workload))
    with Fitted(workload, {"actions": []}) as fitted:
        fitted.step()
        static = static_tensors(fitted.workload, fitted.optimizer)
        measured = measure_peak(fitted.step, static).peak_bytes
    return predicted == pytest.approx(measured, rel=0.002)


class Op(nn.Module):
    """Calls a function on what a layer returns."""

    def __init__(self, function):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.rand(ROWS, WIDTH) > 0.5)
        self.register_buffer("whole", torch.randint(0, 9, (ROWS, WIDTH)))
        self.function = function

    def forward(self, x):
        return self.function(self.layer(x), self)


FORWARDS = {
    "a mask times floats": lambda y, m: y * m.mask,
    "integers and floats": lambda y, m: y + m.whole,
    "integers divided": lambda y, m: m.whole / (m.whole + 1),
    "integers against a float": lambda y, m: (m.whole < 2.5) & m.mask,
    "two floats": lambda y, m: torch.where(m.mask, y, y.half()),
    "in place": lambda y, m: y.mul_(m.mask),
    "joined": lambda y, m: torch.cat([y, y.bfloat16()]),
    "a mask counted": lambda y, m: m.mask.sum(),
    "a mean of halves": lambda y, m: y.bfloat16().mean(),
    "a sum in another type": lambda y, m: y.bfloat16().sum(0, dtype=torch.float32),
    "columns": lambda y, m: y.t().softmax(1),
    "every second row": lambda y, m: y[:, ::2] @ y[: WIDTH // 2, ::2],
    "distances": lambda y, m: torch.cdist(y, y),
    "back from frequencies": lambda y, m: torch.fft.irfft2(torch.fft.rfft2(y)),
    "a norm in another type": lambda y, m: torch.linalg.vector_norm(y.half(), dtype=torch.float32),
    "probabilities": lambda y, m: F.binary_cross_entropy_with_logits(y, y),
    "a robust loss": lambda y, m: F.huber_loss(y, y),
    "a masked mean": lambda y, m: (y * m.mask).sum() / m.mask.sum(),
    "infinities": lambda y, m: y.isinf(),
    "rolled": lambda y, m: torch.roll(y, (1, 2), (0, 1)),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_ops_that_convert_or_copy_what_they_are_given(name):
    assert agree(Workload(Op(FORWARDS[name]).eval(), torch.randn(ROWS, WIDTH)))


LOSSES = {
    "the gradient of a sum, through a matrix": lambda y, _: y.sum(),
    "the gradient of a sum, through an activation": lambda y, _: F.gelu(y).sum(),
    "through a softmax": lambda y, _: y.softmax(1).sum(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_that_convert_or_copy_what_they_are_given(name):
    workload = Workload(
        Op(LOSSES[name]),
        torch.randn(ROWS, WIDTH),
        lambda model, batch: model(batch),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    assert agree(workload)


def wide():
    """A step whose peak is in its last product, which a processor without tiles packs."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4 * WIDTH))
    return model.eval(), torch.randn(ROWS, WIDTH)


@pytest.mark.parametrize("short", [torch.bfloat16, torch.float16])
def test_products_of_short_floats(short):
    assert agree(Workload(*wide(), autocast=short))


@pytest.mark.parametrize("short", [torch.bfloat16, torch.float16])
def test_products_of_short_floats_are_probed_where_onednn_multiplies_them(short):
    name = "bf16" if short is torch.bfloat16 else "fp16"
    is_known = getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported")()
    rows, columns = torch.ones(8, 8, dtype=short), torch.ones(8, 8, dtype=short).t()
    products = {"mm": (rows, columns), "addmm": (rows, rows, columns)}
    for product, args in products.items():
        assert takes_scratch(f"aten.{product}.default", args, {}) == is_known


def test_products_that_may_be_rounded():
    products = torch.backends.mkldnn.matmul
    before = products.fp32_precision
    for precision in ("ieee", "bf16"):  # what one takes is not what the other does
        products.fp32_precision = precision
        try:
            assert agree(Workload(*wide()))
        finally:
            products.fp32_precision = before


# Inside an encoder layer, autocast works on real tensors and not on fakes.
@pytest.mark.parametrize(
    ("kind", "autocast"),
    [("attention", None), ("attention", torch.bfloat16), ("encoder", None)],
)
def test_the_fast_path_of_attention(kind, autocast):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
            self.encoder = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)

        def forward(self, x):
            if kind == "encoder":
                return self.encoder(x)
            return self.attention(x, x, x, need_weights=False)[0]

    workload = Workload(Model().eval(), torch.randn(8, 64, 64), autocast=autocast)
    assert agree(workload)
