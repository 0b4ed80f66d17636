"""Tensor classes that wrap others: an eight-bit weight with its scales, and one that wraps that."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import return_and_correct_aliasing

aten = torch.ops.aten
_EACH_PART = {aten.detach.default, aten.clone.default, aten.alias.default, aten.t.default}


class Wrapper(Tensor):
    """Holds tensors in attributes, and computes with what they stand for."""

    names: tuple[str, ...] = ()

    @staticmethod
    def __new__(cls, *parts):
        like = parts[-1]
        return torch.Tensor._make_wrapper_subclass(
            cls, parts[0].shape, dtype=like.dtype, device=like.device
        )

    def __init__(self, *parts):
        for name, part in zip(self.names, parts, strict=True):
            setattr(self, name, part)

    def __tensor_flatten__(self):
        return list(self.names), None

    @classmethod
    def __tensor_unflatten__(cls, parts, _context, _size, _stride):
        return cls(*(parts[name] for name in cls.names))

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        kwargs = kwargs or {}
        if func in _EACH_PART:
            mine = args[0]
            out = type(mine)(*(func(getattr(mine, name), **kwargs) for name in mine.names))
            return return_and_correct_aliasing(func, args, kwargs, out)
        return func(*(dense(value) for value in args), **kwargs)


class Int8(Wrapper):
    """A weight of eight bits, and a scale for each row."""

    names = ("values", "scales")

    def dense(self):
        return self.values.to(self.scales.dtype) * self.scales


class Boxed(Wrapper):
    """A tensor in another."""

    names = ("inner",)

    def dense(self):
        return dense(self.inner)


def dense(value):
    """What a tensor stands for."""
    return value.dense() if isinstance(value, Wrapper) else value


def quantised(weight):
    """A weight in eight bits."""
    scales = weight.abs().amax(1, keepdim=True) / 127
    return Int8((weight / scales).round().to(torch.int8), scales)


class QuantisedLinear(nn.Module):
    """A frozen linear layer in eight bits, and an adapter of low rank that is trained."""

    def __init__(self, width, *, boxed=False, rank=0):
        super().__init__()
        weight = quantised(torch.randn(width, width) / width**0.5)
        self.weight = nn.Parameter(Boxed(weight) if boxed else weight, requires_grad=False)
        self.down = nn.Linear(width, rank, bias=False) if rank else None
        self.up = nn.Linear(rank, width, bias=False) if rank else None

    def forward(self, x):
        out = functional.linear(x, self.weight)
        return out if self.down is None else out + self.up(self.down(x))
