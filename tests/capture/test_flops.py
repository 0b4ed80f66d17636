"""Floating-point operations of a call: as torch counts them, from the tensors themselves."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from memfit.capture.probe.scratch_ops import takes_scratch
from memfit.tensors.operators import operator_of

aten = torch.ops.aten


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape)


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.mm.default, (numbers(3, 4), numbers(4, 5))),
        (aten.addmm.default, (numbers(5), numbers(3, 4), numbers(4, 5))),
        (aten.bmm.default, (numbers(2, 3, 4), numbers(2, 4, 5))),
        (
            aten.convolution.default,
            (
                numbers(2, 3, 8, 8),
                numbers(4, 3, 3, 3),
                None,
                [1, 1],
                [1, 1],
                [1, 1],
                False,
                [0, 0],
                1,
            ),
        ),
        (
            aten.convolution_backward.default,
            (
                *(numbers(2, 4, 8, 8), numbers(2, 3, 8, 8), numbers(4, 3, 3, 3), [0]),
                *([1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]),
            ),
        ),
        (
            aten._scaled_dot_product_flash_attention_for_cpu.default,
            (numbers(1, 2, 8, 4), numbers(1, 2, 8, 4), numbers(1, 2, 8, 4)),
        ),
    ],
)
def test_they_are_what_torch_counts(func: Any, args: tuple[Any, ...]):
    formula = operator_of(func).flops
    assert formula is not None
    out = func(*args)
    packet = aten._scaled_dot_product_flash_attention if "attention" in str(func) else None
    expected = flop_registry[packet or func.overloadpacket](*args, out_val=out)
    assert formula(*args, out_val=out) == expected > 0


def test_an_op_takes_scratch_as_ever_whatever_was_asked_of_it_before():
    row, grid = numbers(4), numbers(4, 4)
    for _ in range(2):
        assert takes_scratch("aten.convolution.default", (), {})
        assert not takes_scratch("aten.view.default", (grid,), {})
        assert not takes_scratch("aten.add.Tensor", (grid, row), {})
        assert takes_scratch("aten.add_.Tensor", (grid, row.double()), {})
        assert not takes_scratch("aten.mm.default", (grid, grid), {})
        assert takes_scratch("aten.mm.default", (grid[:, ::2], grid[:2]), {})


def test_formulas_are_torchs_without_its_compiler():
    """A program that compiles no kernels gets no Triton from memfit, and no warning of torch's."""
    code = """
    import sys
    import torch
    from memfit.torch_versions import flop_formulas

    formulas = flop_formulas()
    print("triton" in sys.modules, "torch.utils.flop_counter" in sys.modules)
    from torch.utils.flop_counter import flop_registry
    print(sorted(map(str, flop_registry.keys() - formulas.keys())))
    mm = torch.ops.aten.mm
    given = torch.ones(3, 4), torch.ones(4, 5)
    print(formulas[mm](*given, out_val=None), flop_registry[mm](*given, out_val=None))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines() == ["False False", "[]", "120 120"]
    assert ended.stderr == ""
