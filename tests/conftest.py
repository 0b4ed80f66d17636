"""What all tests share: the `gpu` marker, few threads, and a small heap to search."""

import gc

import pytest
import torch

torch.set_num_threads(2)


@pytest.fixture(scope="module", autouse=True)
def _heap_of_its_own():
    """Keep what earlier files left out of every collection and search of the heap in this one."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need a GPU where there is none, and say so."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device on this machine")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
