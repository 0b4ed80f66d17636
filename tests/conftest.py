"""What all tests share: the `gpu` marker, and few threads."""

import pytest
import torch

torch.set_num_threads(2)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need a GPU where there is none, and say so."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device on this machine")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
