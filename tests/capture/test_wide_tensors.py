"""What a prediction says of elements wider than needed is what narrower ones take in real steps."""

from __future__ import annotations

import pytest
import torch
from peaks import measured_peak
from torch import Tensor, nn
from torch.nn import functional

import memfit
from memfit.workload import Workload

TOKENS = 256


def double(dtype: torch.dtype) -> Workload:
    """A network in 64 or 32 bits."""
    return Workload(
        nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)).to(dtype),
        torch.randn(256, 128, dtype=dtype),
        lambda model, batch: model(batch).square().mean(),
        torch.optim.AdamW,
    )


class Attention(nn.Module):
    """Attention written out, masked in one of several ways."""

    def __init__(self, way: str) -> None:
        """Build it."""
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.torch_attention = nn.MultiheadAttention(16, 1, batch_first=True)
        self.way = way
        causal = torch.ones(TOKENS, TOKENS).tril()
        self.register_buffer("causal", causal.bool() if way == "bool buffer" else causal)
        additive = torch.full((TOKENS, TOKENS), -torch.inf).triu(1)
        self.register_buffer("additive_mask", additive if way == "added" else None)

    def forward(self, tokens: Tensor) -> Tensor:
        """Attend."""
        x = self.embedding(tokens)
        kept = torch.rand(TOKENS, TOKENS) > 0.1
        scores = x @ x.transpose(-1, -2)
        match self.way:
            case "buffer":
                scores = scores.masked_fill(self.causal == 0, -torch.inf)
            case "bool buffer":
                scores = scores.masked_fill(self.causal.logical_not(), -torch.inf)
            case "kept":
                scores = scores * kept.float()
            case "bool kept":
                scores = scores * kept
            case "added":
                scores = scores + self.additive_mask
            case "weights":
                scores = scores * self.causal.exp()
            case "torch":
                return self.torch_attention(x, x, x, attn_mask=~kept, need_weights=True)[0]
            case "product":
                return kept.float() @ x
            case "dropout":
                scores = functional.dropout(scores, 0.1)
        return torch.softmax(scores, -1) @ x


def attention(way: str) -> Workload:
    """A step of it."""
    return Workload(
        Attention(way),
        torch.randint(0, 50, (1, TOKENS)),
        lambda model, batch: model(batch).mean(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )


def tokens(dtype: torch.dtype) -> Workload:
    """Mostly a batch of tokens."""
    return Workload(
        nn.Embedding(50, 1),
        torch.randint(0, 50, (64, 1024)).to(dtype),
        lambda model, batch: model(batch).mean(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )


PAIRS = {
    "float64": (double(torch.float64), double(torch.float32)),
    "compared": (attention("buffer"), attention("bool buffer")),
    "mask": (attention("kept"), attention("bool kept")),
    "index": (tokens(torch.int64), tokens(torch.int32)),
}


@pytest.mark.parametrize("reason", PAIRS)
def test_the_narrower_step_takes_what_was_said(reason):
    wide, narrow = PAIRS[reason]
    prediction = memfit.predict(wide)
    assert {tensors.reason for tensors in prediction.wide_tensors} == {reason}
    assert prediction.narrower_peak_bytes == pytest.approx(measured_peak(narrow), rel=0.005)
    assert prediction.narrower_peak_bytes < 0.9 * measured_peak(wide)
    assert memfit.predict(narrow).wide_tensors == ()


def test_a_row_says_line_and_bytes():
    [row] = memfit.predict(attention("kept")).wide_tensors
    line = Attention.forward.__code__.co_firstlineno
    assert row.source.startswith("test_wide_tensors.py:") or "/test_wide_tensors.py:" in row.source
    assert line < int(row.source.rpartition(":")[2]) < line + 20
    assert row.bytes == 4 * TOKENS**2
    assert row.saved_bytes == 3 * TOKENS**2
    assert (row.dtype, row.narrower_dtype, row.count) == ("float32", "bool", 1)


def test_a_buffer_that_is_added_is_advised_only_by_its_name():
    prediction = memfit.predict(attention("added"))
    assert [row.reason for row in prediction.wide_tensors] == ["named_mask"]
    assert "if it holds 0 and -inf alone" in str(prediction)


@pytest.mark.parametrize("way", ["weights", "torch", "product", "dropout"])
def test_what_no_narrower_type_would_help_has_no_advice(way):
    prediction = memfit.predict(attention(way))
    assert prediction.wide_tensors == ()
    assert prediction.narrower_peak_bytes is None
    assert "Wide elements" not in str(prediction)
