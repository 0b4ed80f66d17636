"""A step that trains several modules, each with an optimizer of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from ran import inline

PARTS = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    class Encoder(nn.Sequential): pass
    class Decoder(nn.Sequential): pass
    encoder = Encoder(nn.Linear(512, 512))
    decoder = Decoder(*[nn.Linear(512, 512) for _ in range(10)])
    optimizers = OPTIMIZERS
    for step in range(8):
        loss = decoder(encoder(torch.randn(64, 512))).square().mean()
        for it in optimizers:
            it.zero_grad()
        loss.backward()
        for it in optimizers:
            it.step()
        print(repr(loss.item()))
    moments = [s["exp_avg_sq"] for it in optimizers for s in it.state_dict()["state"].values()]
    torch.save([*encoder.parameters(), *decoder.parameters(), *moments], "trained.pt")
"""
"""It takes 50 MiB: parameters, gradients and state 44, and temporaries of the decoder's updates."""


@pytest.mark.parametrize(
    "optimizers",
    [
        "[torch.optim.Adam(it.parameters()) for it in (encoder, decoder)]",
        "[torch.optim.Adam(it.parameters()) for it in (decoder, encoder)]",
        "[torch.optim.Adam([*encoder.parameters(), *decoder.parameters()])]",
    ],
)
def test_state_of_every_part_of_a_step_makes_room(tmp_path: Path, optimizers: str):
    """Only that of the first model called was planned for; the others' stayed."""
    ran = inline(tmp_path, "30MiB", PARTS.replace("OPTIMIZERS", optimizers), offload=str(tmp_path))
    assert len(ran.loops) == 1
    assert ran.fitting["verdict"]["kept"]


def test_temporaries_of_every_part_of_a_step_make_room(tmp_path: Path):
    """With nothing offloaded: updates of all of a decoder at once take much more than one."""
    both = "[torch.optim.Adam(it.parameters(), foreach=True) for it in (encoder, decoder)]"
    ran = inline(tmp_path, "48MiB", PARTS.replace("OPTIMIZERS", both))
    assert ran.fitting["verdict"]["kept"]
