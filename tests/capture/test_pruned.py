"""What a prediction says of pruning is what real steps take with masks and without."""

from __future__ import annotations

import re

import pytest
import torch
from peaks import measured_peak
from torch import nn
from torch.nn.utils import prune

import memfit
from memfit.sizes import in_bytes
from memfit.workload import Workload

KINDS = {
    "linear": (nn.Linear(256, 1024), nn.Linear(1024, 256)),
    "convolution": (nn.Conv2d(16, 128, 3, padding=1), nn.Conv2d(128, 16, 3, padding=1)),
}
BATCHES = {"linear": torch.randn(8, 256), "convolution": torch.randn(4, 16, 16, 16)}


def workload(kind: str, *, pruned: bool) -> Workload:
    """Two layers, with masks or as `prune.remove` leaves them."""
    first, second = KINDS[kind]
    model = nn.Sequential(first, nn.GELU(), second)
    for layer in (first, second):
        if pruned:
            prune.l1_unstructured(layer, "weight", 0.5)
        elif prune.is_pruned(layer):
            prune.remove(layer, "weight")
    return Workload(
        model,
        BATCHES[kind],
        lambda model, batch: model(batch).square().mean(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor"
)  # torch's, of any pruned weight
@pytest.mark.parametrize("kind", KINDS)
def test_masks_add_what_is_said_and_removing_them_gives_it_back(kind):
    with_masks = workload(kind, pruned=True)
    prediction = memfit.predict(with_masks)
    assert prediction.predicted_peak_bytes == pytest.approx(measured_peak(with_masks), rel=0.001)
    [note] = [note for note in prediction.notes if "pruning" in note]
    sizes = re.fullmatch(r"pruning adds (.+?) to the peak: .* makes the peak (.+?), as .*", note)
    added, left = (in_bytes(size, "read") for size in sizes.groups())

    removed = workload(kind, pruned=False)
    measured = measured_peak(removed)
    # The note rounds to a tenth of a MiB.
    assert left == pytest.approx(measured, abs=52_429)
    assert added == pytest.approx(prediction.predicted_peak_bytes - measured, abs=52_429)
    assert not [note for note in memfit.predict(removed).notes if "pruning" in note]
