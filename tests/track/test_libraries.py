"""Which files are a library's, wherever packages are installed."""

from __future__ import annotations

import pytest
import torch

from memfit import libraries
from memfit.libraries import is_library


@pytest.mark.parametrize(
    "file",
    [
        "/home/ada/.local/lib/python3.12/site-packages/torch_geometric/nn/conv/gcn_conv.py",
        "/usr/lib/python3/dist-packages/yaml/nodes.py",
        "/opt/target/site-packages/pytorch_lightning/trainer.py",
        torch.__file__,
        libraries.__file__,
    ],
)
def test_packages_are_libraries_wherever_they_are_installed(file: str) -> None:
    """For one user, with the system of a virtual environment, or in a folder of choice."""
    assert is_library(file)


@pytest.mark.parametrize("file", ["/home/ada/site/train.py", "train.py", "/home/ada/packages/a.py"])
def test_files_of_the_user_are_no_libraries(file: str) -> None:
    """Whatever their folder is called."""
    assert not is_library(file)
