"""Which features work here, found out by trying what can be tried in a moment.

Responsible for the features that the main job does not cover: counting, offloading, parking,
compiling. Not responsible for predicting, planning and running a step: the program does that with
the workload of :mod:`memfit.doctor.step`.

Only for a torch that memfit supports. Imports torch.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable

import torch
from torch import nn

from memfit.errors import first_line
from memfit.options import HOST
from memfit.torch_versions import offloaded_parameters_refusal

_ROWS = 64


def trials(offload: str | None, no_cuda: str | None) -> dict[str, str | None]:
    """Try the features.

    Args:
        offload: Folder for offloaded and parked bytes, or ``host``; ``None`` for the system's
            folder for temporary files.
        no_cuda: Why torch can use no CUDA device; ``None`` where it can.

    Returns:
        By name of the feature why it does not work, as a clause; ``None`` where it does.
    """
    folder = None if offload in {None, HOST} else offload
    uncounted = _why_not(_count)
    stored = _why_not(lambda: _store_and_fetch(folder))
    return {
        "run": uncounted,
        "guard": uncounted,
        "track": uncounted,
        "offload_activations": stored,
        "offload_optimizer": stored,
        "offload_parameters": _why_not(offloaded_parameters_refusal) or stored,
        "park": _why_not(lambda: _park_and_wake(folder)),
        "compile_cpu": _why_not(lambda: _compiler("cpu")),
        "compile_cuda": no_cuda or _why_not(lambda: _compiler("cuda")),
    }


def _why_not(trial: Callable[[], str | None]) -> str | None:
    """What a trial answers, or the error it ends in: either says why a feature does not work."""
    try:
        return trial()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
        return first_line(error)


def _count() -> str | None:
    """Count what torch allocates on the CPU."""
    from memfit.track import cpu

    problem = cpu.start()
    return None if problem is None else f"tensors on the CPU cannot be counted: {problem}"


def _store_and_fetch(folder: str | None) -> str | None:
    """Write a tensor to a file without a name and read it back."""
    from memfit.apply.offload.tiers import open_tier

    sent = torch.arange(_ROWS * _ROWS, dtype=torch.float32)
    came = torch.zeros_like(sent)
    parcel = open_tier("disk", sent.nbytes, folder or "").send(sent)
    parcel.settle()
    parcel.fetch(came)
    return None if torch.equal(sent, came) else "a tensor came back from the disk with other bits"


def _park_and_wake(folder: str | None) -> str | None:
    """Park a small model and compare what comes back."""
    from memfit.share.park.parked import park

    model = nn.Linear(_ROWS, _ROWS)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    park(model, folder or tempfile.gettempdir()).close()  # which wakes it
    after = list(model.parameters())
    same = all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    return None if same else "a parked model came back with other bits"


def _compiler(device_kind: str) -> str | None:
    """What Inductor lacks."""
    from memfit.run.compiled import toolchain

    return toolchain.missing(device_kind)
