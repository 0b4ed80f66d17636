"""``memfit run --budget`` on two models in turn, one of which trains through the other's graph."""

from __future__ import annotations

from pathlib import Path

from ran import inline

GAN = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    block = lambda: nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))
    class Maker(nn.Sequential): pass
    class Judge(nn.Sequential): pass
    maker = Maker(*[block() for _ in range(3)])
    judge = Judge(*[block() for _ in range(3)], nn.Linear(128, 1))
    of_maker, of_judge = (torch.optim.Adam(m.parameters()) for m in (maker, judge))
    loss = nn.BCEWithLogitsLoss()
    ones, zeros = torch.ones(1024, 1), torch.zeros(1024, 1)
    for step in range(6):
        of_judge.zero_grad()
        loss(judge(torch.randn(1024, 128)), ones).backward()
        made = maker(torch.randn(1024, 128))
        loss(judge(made.detach()), zeros).backward()
        of_judge.step()
        of_maker.zero_grad()
        fooled = loss(judge(made), ones)
        fooled.backward()
        of_maker.step()
        print(repr(fooled.item()))
"""


def test_what_a_step_takes_through_another_ones_graph_is_predicted(tmp_path: Path):
    """What hooks hand out of that graph was taken to be there throughout, and held besides."""
    ran = inline(tmp_path, "16MiB", GAN)
    assert [loop["models"] for loop in ran.loops] == [["Judge"], ["Maker", "Judge"]]
    assert ran.fitting["verdict"]["kept"]
    for loop in ran.loops:
        measured, predicted = loop["planned"]["peak_bytes"], loop["plan"]["predicted_peak_bytes"]
        assert measured <= predicted <= measured + (3 << 20), loop["models"]
