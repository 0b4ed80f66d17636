"""Profiles of machines that compute as fast as a test says, whatever this one does."""

from __future__ import annotations

import json
from pathlib import Path


def costs_file(folder: Path, **rates: float) -> Path:
    """Write a profile as `memfit calibrate` does.

    Args:
        folder: Where to.
        rates: Operations a second by type, beside 1e9 in float32.
    """
    profile = {
        "name": "x",
        "flops_per_second": {"float32": 1e9, **rates},
        "bytes_per_second": 1e12,
        "op_overhead_seconds": 1e-6,
    }
    of = {"device_kind": "cpu", "device_name": "x", "torch_version": "x", "threads": 1}
    document = {"schema_version": 1, "kind": "device_profile", **of}
    file = folder / "costs.json"
    file.write_text(json.dumps({**document, "date": "2026-11-27", "profile": profile}))
    return file
