"""What all tests share: markers for what is not everywhere, few threads, a small heap to search."""

import gc
import os
import signal

import pytest
import torch
from alone import end
from forks import FORKS

from memfit.torch_versions import offloaded_parameters_refusal

torch.set_num_threads(1)

# A shell starts its background jobs with Ctrl-C ignored, and tests of it would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Inductor would compile and load a program for each set of vector instructions that the processor
# has, to see whether the compiler has it too. Processes that tests start inherit this.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")


@pytest.fixture(scope="module", autouse=True)
def _heap_of_its_own():
    """Keep what earlier files left out of every collection and search of the heap in this one."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _nothing_left_on_torch():
    """No test file leaves looks at gradients behind for those that run after it."""
    yield
    assert "grad" not in vars(torch.nn.Parameter)


@pytest.fixture(scope="session", autouse=True)
def _end_of_what_forks():
    yield
    end()
    FORKS.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need what is not here, and say so."""
    lacking = {"offloads_parameters": offloaded_parameters_refusal()}
    if not torch.cuda.is_available():
        lacking["gpu"] = "no CUDA device on this machine"
    for item in items:
        for marker, reason in lacking.items():
            if reason is not None and marker in item.keywords:
                item.add_marker(pytest.mark.skip(reason=reason))
