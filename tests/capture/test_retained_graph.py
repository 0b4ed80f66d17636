"""What a graph takes in a forward of inference is what real forwards take with it and without."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit._native import bytes_text
from memfit.capture.record.gradient_mode import gradient_mode
from memfit.measure import measure_peak, static_tensors
from memfit.workload import Workload


def model() -> nn.Module:
    """Layers whose activations a graph keeps."""
    layers = [nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(6)]
    return nn.Sequential(*layers)


def with_gradients(model: nn.Module, batch: Tensor) -> Tensor:
    """A forward that turns gradients on, whoever calls it."""
    with torch.enable_grad():
        return model(batch)


def measured(workload: Workload, *, gradients: bool) -> int:
    """Peak of the second real forward."""

    def forward() -> None:
        with torch.set_grad_enabled(gradients):
            workload.model(workload.batch)

    forward()
    return measure_peak(forward, static_tensors(workload, None)).peak_bytes


def notes_of_graphs(prediction: memfit.Prediction) -> list[str]:
    """The sentences that speak of a graph."""
    return [note for note in prediction.notes if "autograd's graph" in note]


def test_a_forward_without_no_grad_is_said_to_take_what_it_takes():
    workload = Workload(model(), torch.randn(512, 128))
    prediction = memfit.predict(workload)
    peak = measured(workload, gradients=True)
    [note] = notes_of_graphs(prediction)
    assert prediction.predicted_peak_bytes == measured(workload, gradients=False)
    assert f"the peak would be {bytes_text(peak)} at batch 512" in note
    more = peak - prediction.predicted_peak_bytes
    assert f"would hold {bytes_text(more)} more" in note


def test_a_forward_that_turns_gradients_on_is_told_what_it_would_take_without():
    workload = Workload(model(), torch.randn(512, 128), forward=with_gradients)
    prediction = memfit.predict(workload)
    without = measured(workload, gradients=False)
    [note] = notes_of_graphs(prediction)
    assert prediction.predicted_peak_bytes == measured(workload, gradients=True)
    assert note.startswith("the forward turns gradients on")
    assert "test_retained_graph.py:" in note
    assert note.endswith(
        f"the peak would be {bytes_text(without)} under `torch.no_grad()` or "
        "`torch.inference_mode()`"
    )
    assert note in memfit.plan(workload, budget="100%").notes


@pytest.mark.parametrize("case", ["frozen", "no_grad", "inference_mode", "training"])
def test_where_no_graph_would_be_kept_nothing_is_said(case):
    net, batch = model(), torch.randn(512, 128)
    match case:
        case "frozen":
            workload = Workload(net.requires_grad_(requires_grad=False), batch)
        case "training":
            workload = Workload(net, batch, lambda model, batch: model(batch).mean())
        case _:
            mode = getattr(torch, case)
            workload = Workload(net, batch, forward=mode()(lambda model, batch: model(batch)))
    assert notes_of_graphs(memfit.predict(workload)) == []
    assert torch.is_grad_enabled()


def test_another_thread_turns_gradients_on_meanwhile():
    seen = []

    def train() -> None:
        with torch.no_grad():
            seen.append(torch.is_grad_enabled())
        with torch.enable_grad():
            seen.append(torch.is_grad_enabled())

    with gradient_mode("off"):
        with torch.enable_grad():
            assert not torch.is_grad_enabled()
        other = threading.Thread(target=train)
        other.start()
        other.join()
    assert seen == [False, True]
    assert torch.is_grad_enabled()
