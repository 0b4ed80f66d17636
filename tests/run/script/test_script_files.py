"""``memfit run --budget`` on scripts whose weights and optimizer state were read from files."""

from __future__ import annotations

from pathlib import Path

from ran import inline

MIB = 1 << 20


def test_what_was_read_from_a_file_counts_once(tmp_path: Path):
    """Torch gives it memory that cannot be resized, and counts it like any other."""
    ran = inline(
        tmp_path,
        "4GiB",
        """
    import io, torch
    from torch import nn

    def resumed(how):
        torch.manual_seed(0)
        model = nn.Linear(1024, 1024, bias=False)
        optimizer = torch.optim.AdamW(model.parameters())
        if how == "whole":
            torch.save(model, "model.pt")
            model = torch.load("model.pt", weights_only=False)
            return model, torch.optim.AdamW(model.parameters())
        model(torch.randn(4, 1024)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.save([model.state_dict(), optimizer.state_dict()], "state.pt")
        weights, state = torch.load("state.pt")
        model.load_state_dict(weights, assign=True)
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.load_state_dict(state)
        return model, optimizer

    for how in ("whole", "state"):
        model, optimizer = resumed(how)
        for _ in range(3):
            loss = model(torch.randn(64, 1024)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(repr(loss.item()))
    """,
    )
    assert len(ran.loops) == 2
    for loop in ran.loops:
        planned, plan = loop["planned"], loop["plan"]
        over = plan["predicted_peak_bytes"] - planned["peak_bytes"]
        assert 0 <= over <= MIB, "what the script holds besides is rounded up"


def test_what_is_mapped_counts_once_it_is_written(tmp_path: Path):
    """Its pages are the process's own then, though no allocator has handed them out."""
    ran = inline(
        tmp_path,
        "4GiB",
        """
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers = lambda: nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(4)])
    torch.save(layers().state_dict(), "weights.pt")
    with torch.device("meta"):
        model, teacher = layers(), layers()
    model.load_state_dict(torch.load("weights.pt", mmap=True), assign=True)
    teacher.load_state_dict(torch.load("weights.pt", mmap=True), assign=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    x = torch.randn(64, 512)
    with torch.no_grad():
        x = teacher(x)
    for _ in range(4):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(repr(loss.item()))
    """,
    )
    (loop,) = ran.loops
    weights = 4 * 512 * 512 * 4
    peak = loop["planned"]["peak_bytes"]
    # Parameters, gradients and momentum; of the teacher, which nobody writes, nothing.
    assert 3 * weights < peak < 4 * weights
    assert peak <= loop["plan"]["predicted_peak_bytes"] <= 1.001 * peak
    (device,) = ran.report["devices"]
    assert device["peak_by_category"]["parameter"] == weights
