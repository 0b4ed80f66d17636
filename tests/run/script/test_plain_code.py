"""Which models' code is known only to compute, and what is said of the others."""

from __future__ import annotations

import argparse
import math
import random
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from memfit.run.script.plain_code import more_than_computing

SIZES = (3, 5)
SEEN: list[int] = []
COUNT = 0
OPTIONS = argparse.Namespace(width=2, sizes=(2, 2), seen=[])


def doubled(x, factor=2.0):
    return x * factor


def noted(x):
    SEEN.append(1)
    return x


def cached(x, cache=[]):  # noqa: B006 - what is tested
    cache.append(x)
    return x


class Plain(nn.Module):
    """Uses torch, constants, functions that compute, and what it holds."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.act, self.kept = functional.gelu, {"scale": [1.0]}
        self.last = None

    @property
    def scale(self):
        return self.kept["scale"][0] / math.sqrt(len(SIZES))

    def forward(self, x):
        if x.dim() != 2:
            raise ValueError(f"of shape {tuple(x.shape)}")
        for layer in self.layers:
            x = self.act(layer(doubled(x))) + torch.cat([x[:, i : i + 1] for i in range(4)], 1)
        self.last = x.detach()
        return x * self.scale


def with_forward(forward):
    return type("Own", (nn.Linear,), {"forward": forward})(2, 2)


def test_code_that_computes_is_known():
    assert more_than_computing(Plain()) == ""
    assert more_than_computing(nn.Sequential(nn.Conv2d(1, 1, 1), nn.LSTM(2, 2))) == ""
    assert more_than_computing(with_forward(lambda self, x: doubled(x, SIZES[0]))) == ""
    assert more_than_computing(with_forward(lambda self, x: x[:, : OPTIONS.width])) == ""
    assert more_than_computing(with_forward(lambda self, x: x.view(*OPTIONS.sizes))) == ""


def noting(self, x):
    SEEN.append(1)
    return x


def through_another(self, x):
    return noted(x)


def with_a_cache(self, x):
    return cached(x)


def counting(self, x):
    global COUNT  # noqa: PLW0603 - what is tested
    COUNT += 1
    return x


def printing(self, x):
    print(x.shape)
    return x


def drawing(self, x):
    return x if random.random() < 1 else -x


def of_the_class(self, x):
    type(self).count = 1
    return x


def saving(self, x):
    torch.save(x, "x.pt")
    return x


def setting_an_option(self, x):
    options = OPTIONS
    options.width = 3
    return x


def adding_to_an_option(self, x):
    OPTIONS.seen.append(1)
    return x


def asking_for_another(self, x):
    return x * OPTIONS.missing


def importing(self, x):
    import os

    return x if os.sep else -x


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        (noting, "uses `SEEN`"),
        (through_another, "uses `noted`"),
        (with_a_cache, "uses `cached`"),
        (counting, "uses `COUNT`"),
        (printing, "uses `print`"),
        (drawing, "uses `random`"),
        (of_the_class, "uses `type`"),
        (saving, "uses `save`"),
        (importing, "uses `os`"),
        (setting_an_option, "uses `OPTIONS`"),
        (adding_to_an_option, "uses `OPTIONS`"),
        (asking_for_another, "uses `OPTIONS`"),
    ],
)
def test_code_that_reaches_out_is_named(forward, said):
    model = nn.Sequential(nn.Linear(2, 2), with_forward(forward))
    assert more_than_computing(model).startswith(f"`Own` {said}")


def test_what_surrounds_a_function_and_what_a_module_holds_may_reach_out():
    kept = []

    def forward(self, x):
        kept.append(x)
        return x

    assert "uses `kept`" in more_than_computing(with_forward(forward))
    holder = Plain()
    holder.writer = open
    assert "holds `writer`" in more_than_computing(holder)
    holder.writer = random.Random(0)
    assert "holds `writer`" in more_than_computing(holder)
    hooked = nn.Linear(2, 2)
    hooked.register_forward_hook(lambda *_: None)
    assert "forward hook" in more_than_computing(nn.Sequential(hooked))


@dataclass
class Numbers:
    width: int = 4
    name: str = "small"


@dataclass
class Counting(Numbers):
    calls: list[int] = field(default_factory=list)


@dataclass
class Deciding(Numbers):
    def chosen(self):
        return random.random() < 1


@pytest.mark.parametrize(
    ("held", "is_plain"),
    [
        (Numbers(), True),
        (SimpleNamespace(width=4, kind=torch.float32), True),
        (argparse.Namespace(lr=0.1, resume=None), True),
        (Counting(), False),
        (Deciding(), False),
        (SimpleNamespace(log=print), False),
        (random.Random(0), False),
    ],
)
def test_a_configuration_of_constants_leads_nowhere(held, is_plain):
    model = Plain()
    model.config = held
    said = more_than_computing(model)
    assert said == "" if is_plain else "holds `config`" in said
