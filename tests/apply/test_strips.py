"""Forwards in strips: the same results as whole ones, in less memory, whatever the model does."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memfit
from memfit.apply.slices.strips import LazyTensor, Strips, materialized
from memfit.errors import UsageError
from memfit.measure import measure_peak, static_tensors

ROOM = {"strips": 8, "least_bytes": 1 << 12}


class Image(nn.Module):
    """A model of one function, with layers to choose from."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.point, self.wide = nn.Conv2d(8, 16, 1), nn.Conv2d(16, 8, 3, padding=1)
        self.fast = nn.Conv2d(8, 8, 5, padding=2, stride=2)
        self.far = nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=8)
        self.norm, self.bare = nn.GroupNorm(2, 8), nn.GroupNorm(4, 8, affine=False)
        self.batch = nn.BatchNorm2d(8)
        self.batch.running_mean.uniform_(-1, 1)
        self.batch.running_var.uniform_(1, 2)
        self.function = function

    def forward(self, x):
        return self.function(self, x)


def residual(m, x):
    h = m.one(F.silu(m.norm(x)))
    h = m.two(F.silu(m.bare(h)))
    return (x + h) / 2


def twice(m, x):
    return residual(m, residual(m, x))


def in_place(m, x):
    h = F.relu_(m.batch(m.one(x)))
    h = m.batch(m.two(h))
    h += x
    return F.relu_(h)


def upsampled(m, x):
    h = F.interpolate(F.gelu(m.norm(x)), scale_factor=2.0, mode="nearest")
    return m.one(h)


def beside(m, x):
    """A skip connection of a U-Net."""
    low = m.fast(F.relu(m.batch(x)))
    high = F.interpolate(low, scale_factor=2.0)
    return m.wide(torch.cat([high * 2, torch.tanh(x)], 1))


def dilated(m, x):
    return m.far(F.hardswish(m.norm(x))).sigmoid()


def seen_again(m, x):
    """Which uses what a convolution has taken."""
    h = F.silu(m.norm(m.one(x)))
    return m.two(h) + h


def written_to(m, x):
    """Which writes to what something is made of, and to a view of it."""
    h = m.one(x)
    a = torch.tanh(h)
    h.mul_(2)
    b = torch.tanh(h)
    b[..., ::3] = 0.5
    c = b.detach()
    c.add_(1)
    return m.two(a) + m.two(b) + a.flatten().sum()


def looked_at(m, x):
    """Which looks at what is put off without an op."""
    h = torch.tanh(m.norm(x))
    scale = float(h.numpy().mean()) + h.flatten().tolist()[3] + h[0, 0, 0, 0].item()
    return m.one(h) * scale


def last(m, x):
    return {"image": torch.sigmoid(m.one(x)), "more": [F.relu(m.norm(x))]}


def attention(m, x):
    q = m.one(x).flatten(2).transpose(1, 2)[:, None]
    keys = m.two(x).flatten(2)[:, None]
    scores = (q * 0.3) @ keys
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return weights @ q


def fused_attention_by_hand(m, x):
    q = m.one(x).flatten(2).transpose(1, 2)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return F.scaled_dot_product_attention(q[:, None], q[:, None], q[:, None])


def half(m, x):
    return m.one(m.norm(x).to(torch.bfloat16).to(x.dtype))


FUNCTIONS = [
    residual,
    twice,
    in_place,
    upsampled,
    beside,
    dilated,
    seen_again,
    written_to,
    looked_at,
    last,
    attention,
    fused_attention_by_hand,
    half,
]


def in_strips(model, x, **changed):
    """What a model returns in strips, and how."""
    strips = Strips(model, {**ROOM, **changed}, records=False)
    with torch.no_grad(), strips.forward():
        return materialized(model(x)), strips


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_results_are_the_same(function, batch, form):
    model = Image(function).eval().double()
    x = torch.randn(batch, 8, 32, 24, dtype=torch.float64).to(memory_format=form)
    before = x.clone()
    with torch.no_grad():
        expected = model(x.clone(memory_format=torch.preserve_format))
    kept = range(40) if function is seen_again else ()
    got, strips = in_strips(model, x, kept=kept)
    assert strips.calls > 0 or function in {in_place, written_to, looked_at, last}
    expected, got = (
        [it["image"], *it["more"]] if isinstance(it, dict) else [it] for it in (expected, got)
    )
    tolerance = 1e-2 if function is half else 1e-12
    for one, other in zip(expected, got, strict=True):
        assert type(other) is torch.Tensor
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    assert function is in_place or torch.equal(x, before)


def test_whoever_holds_a_value_gets_it_after_the_forward():
    model = Image(lambda m, x: setattr(m, "seen", torch.tanh(m.norm(x))) or m.one(x)).eval()
    x = torch.randn(1, 8, 64, 64)
    in_strips(model, x)
    assert isinstance(model.seen, LazyTensor)
    torch.testing.assert_close(model.seen + 0, torch.tanh(model.norm(x)))


def test_a_forward_with_gradients_runs_whole():
    model = Image(residual).eval()
    x = torch.randn(1, 8, 64, 64)
    strips = Strips(model, ROOM, records=False)
    with strips.forward():
        assert torch.equal(model(x), residual(model, x))
    assert strips.calls == 0


def test_inference_mode_runs_the_same():
    model, x = Image(twice).eval(), torch.randn(1, 8, 64, 64)
    expected, strips = in_strips(model, x)
    again = Strips(model, ROOM, records=False)
    with torch.inference_mode(), again.forward():
        got = materialized(model(x))
    assert torch.equal(got, expected)
    assert again.calls == strips.calls


@pytest.mark.parametrize("wrong", [{"strips": 0, "least_bytes": 1}, {"strips": 4}])
def test_what_is_no_plan_is_refused(wrong):
    with pytest.raises(UsageError, match=r"strips|malformed"):
        Strips(nn.Linear(1, 1), wrong, records=False)


# Whole plans


def measured(function, share, size=96):
    """A fitted forward of one image, its measured peak, and the plan."""
    workload = memfit.Workload(Image(function).eval(), torch.randn(1, 8, size, size))
    peak = memfit.predict(workload).predicted_peak_bytes
    fitted = memfit.fit(workload, int(share * peak), forbid=["micro_batch"])
    fitted.step()
    taken = measure_peak(fitted.step, static_tensors(workload, None)).peak_bytes
    assert taken == fitted.plan.planned.predicted_peak_bytes <= share * peak
    assert [action.kind for action in fitted.plan.actions] == ["chunk"]
    assert not fitted.report().diverged
    with torch.no_grad():
        expected = workload.model(workload.batch)
    torch.testing.assert_close(fitted.step(), expected, rtol=1e-4, atol=1e-5)
    return fitted


@pytest.mark.parametrize(
    ("function", "share", "size"),
    [
        pytest.param(twice, 0.80, 192, id="residual"),
        pytest.param(upsampled, 0.75, 96, id="upsampled"),
        pytest.param(attention, 0.40, 24, id="attention"),
        pytest.param(seen_again, 0.85, 192, id="used again"),
    ],
)
def test_a_plan_of_one_image_takes_what_it_says(function, share, size):
    measured(function, share, size)


def test_a_forward_that_needs_what_is_written_over_runs_whole():
    def changes(m, x):
        h = F.silu(m.norm(m.one(x)))
        made = m.two(h)
        return made + h if m.again else made

    Image.again = False
    fitted = measured(changes, 0.85)
    model, x = fitted.workload.model, fitted.workload.batch
    fitted = memfit.Fitted(fitted.workload, fitted.plan, warn=False)
    model.again = True
    with torch.no_grad():
        expected = model(x)
    torch.testing.assert_close(fitted.step(), expected)
    assert "written over" in fitted.report().divergence
    with pytest.raises(UsageError, match="`chunk` forbidden"), fitted.forward():
        model(x)
