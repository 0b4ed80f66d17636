"""The eight example workloads at sizes a test can afford."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from memfit.workload import Workload

SMALL: dict[str, dict[str, Any]] = {
    "gpt2": {"batch": 2, "sequence": 32, "layers": 2, "width": 64},
    "llama": {"batch": 2, "sequence": 32, "layers": 2, "width": 128},
    "bert": {"batch": 2, "sequence": 32, "layers": 2, "width": 64},
    "t5": {"batch": 2, "sequence": 16, "layers": 2, "width": 64},
    "resnet50": {"batch": 2, "resolution": 64, "layers": 18},
    "vit": {"batch": 2, "name": "vit_tiny_patch16_224", "depth": 2},
    "convnext": {"batch": 2, "name": "convnext_atto", "resolution": 64},
    "unet": {"batch": 2, "resolution": 16, "width": 32, "layers": 1},
}

_FOLDER = Path(__file__).parents[2] / "examples"


def small_example(name: str, **settings: Any) -> Workload:
    """Build an example at a small size.

    Args:
        name: File name of the example, without suffix.
        settings: What to change of its small settings.

    Returns:
        The workload.
    """
    spec = importlib.util.spec_from_file_location(f"example_{name}", _FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    workload = module.build(**{**SMALL[name], **settings})
    assert isinstance(workload, Workload)
    return workload
