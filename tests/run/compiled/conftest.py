"""What the tests of compiled steps share: Inductor without its slowest part."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._functorch import config as functorch
from torch._inductor import config as inductor
from torch._inductor.async_compile import AsyncCompile


@pytest.fixture
def kernels_that_do_nothing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Code is generated and runs, and allocates as ever; its loops are empty and quickly built."""
    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *_: lambda *_: None)
    torch._dynamo.reset()
    with inductor.patch(fx_graph_cache=False), functorch.patch(enable_autograd_cache=False):
        yield
    torch._dynamo.reset()
