"""Whether this processor's products in 8 bits are right: told by what they are.

Tests of what is built on right products skip where they are wrong; these do not, so that they never
skip everywhere.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest
import torch

from memfit.weights import eight_bit_products

pytest.importorskip("torchao.quantization", reason="needs torchao")


def in_pairs_of_16_bits(left, right):
    """A product as processors without VNNI add it up: two at a time, cut off at 16 bits."""
    shift = 0 if left.dtype is torch.uint8 else 128
    terms = (left.int() + shift)[:, :, None] * right.int()
    pairs = terms.unflatten(1, (-1, 2)).sum(2).clamp(-(2**15), 2**15 - 1)
    return (pairs.sum(1) - shift * right.int().sum(0)).int()


@pytest.mark.parametrize("is_right", [True, False])
def test_products_that_are_cut_off_are_told_from_right_ones(monkeypatch, is_right):
    torch.manual_seed(0)
    left, right = (torch.randint(0, 8, shape, dtype=torch.int8) for shape in [(4, 8), (8, 8)])
    assert torch.equal(in_pairs_of_16_bits(left, right), torch._int_mm(left, right)), "small ones"

    def right_product(left, right):
        return (left.long() @ right.long()).int()

    product = right_product if is_right else in_pairs_of_16_bits
    monkeypatch.setattr(torch, "_int_mm", product)
    assert eight_bit_products._are_right_here.__wrapped__() is is_right


X86 = platform.machine().lower() in {"x86_64", "amd64"}

ASKED_AND_FOUND = """
import torch
from torchao.kernel.intmm import int_scaled_matmul
from memfit.weights.eight_bit_products import _are_right_here

torch.manual_seed(0)
found = []
for rows, inner, columns in [(1, 64, 64), (17, 256, 128), (64, 1024, 100)]:
    shapes = [(rows, inner), (inner, columns)]
    left, right = ((127 * torch.randn(shape).sign()).to(torch.int8) for shape in shapes)
    product = int_scaled_matmul(left, right, torch.ones(rows, 1))
    found.append(torch.equal(product.long(), left.long() @ right.long()))
print(_are_right_here(), all(found))
"""


@pytest.mark.skipif(not X86, reason="asks oneDNN for an older x86")
@pytest.mark.parametrize("instructions", ["AVX2", "DEFAULT"])
def test_a_processor_is_told_by_what_its_products_are(instructions):
    """With AVX2 alone some processors cut them off, and others do not."""
    settings = {**os.environ, "ONEDNN_MAX_CPU_ISA": instructions}
    done = subprocess.run(
        [sys.executable, "-c", ASKED_AND_FOUND],
        env=settings,
        check=True,
        capture_output=True,
        text=True,
    )
    asked, found = done.stdout.split()
    assert asked == found
