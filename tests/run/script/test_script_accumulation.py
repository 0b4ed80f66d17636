"""``memfit run --budget`` on scripts that add up the gradients of several passes."""

from __future__ import annotations

from pathlib import Path

import pytest
from ran import inline

from memfit.run.script.gradients_between import GRADIENTS_IN_FILES

ACCUMULATED = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(8)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    kept = []
    for step in range(4):
        for piece in range(3):
            loss = model(torch.randn(2048, 512)).square().mean()
            {before}
            loss.backward()
            print(repr(loss.item()))
        optimizer.step()
        optimizer.zero_grad()
        print(repr(sum(p.double().sum().item() for p in model.parameters())))
"""


@pytest.mark.parametrize(
    "before",
    [
        "pass",
        # A tensor and an array that are read in the next pass, and a gradient that is written.
        """print([it.sum().item() for it in kept])
            held = [model[2][0].weight.grad, model[3][0].weight.grad.numpy()] if piece else []
            kept[:] = held
            del held
            model[4][0].weight.grad.mul_(0.5) if piece else None""",
    ],
)
def test_gradients_that_passes_add_to_are_in_files_while_one_is_recorded(
    tmp_path: Path, before: str
) -> None:
    """8 MiB of parameters and as much of gradients, in the second pass from the start."""
    ran = inline(tmp_path, "38MiB", ACCUMULATED.format(before=before), offload="chosen")
    (loop,) = ran.loops
    assert loop["plan"]["fits"]
    assert ran.fitting["verdict"]["kept"], ran.stderr


def test_gradients_stay_while_nobody_knows_the_budget(tmp_path: Path) -> None:
    """It is a part of a step that is recorded still, and all of it has room."""
    ran = inline(tmp_path, "100%", ACCUMULATED.format(before="pass"), offload="chosen")
    (loop,) = ran.loops
    assert GRADIENTS_IN_FILES not in loop["notes"]
    assert ran.fitting["verdict"]["kept"], ran.stderr


def test_micro_batches_that_never_end_a_step_are_recorded_a_few_times(tmp_path: Path):
    """The last one is smaller: of the others no recording comes to its end, in 300 passes."""
    code = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)])
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(100):
        data = torch.randn(1400, 64)
        for part in data.split(500):
            loss = (model(part) - part).square().mean() * len(part) / 1400
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(repr(loss.item()))
    """
    ran = inline(tmp_path, "75%", code, offload="chosen")
    (loop,) = ran.loops
    assert loop["refusal"] is None
    assert loop["planned"]["steps"] >= 98
    assert ran.fitting["verdict"]["kept"], ran.fitting["verdict"]
