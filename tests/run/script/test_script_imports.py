"""Objects that an import of torch leaves, and the garbage collector: out of its way, not lost."""

from __future__ import annotations

from pathlib import Path

from ran import in_processes, inline


def test_the_collector_passes_over_what_importing_torch_made(tmp_path: Path):
    ran = inline(
        tmp_path,
        "1GiB",
        """
        import argparse
        from typing import Optional
        import torch
        import gc
        import sys

        class Own:
            def __del__(self):
                print("collected")

        one = Own()
        one.self = one
        del one
        gc.collect()
        print(gc.isenabled())
        print(len(gc.get_objects()), gc.get_freeze_count(), file=sys.stderr)
        """,
        ways=in_processes,
    )
    seen, passed_over = map(int, ran.stderr.splitlines()[0].split())
    assert passed_over > 100_000
    assert seen < passed_over / 2
    assert ran.stdout.splitlines() == ["collected", "True"]


def test_files_of_objects_older_than_torch_are_written_to_the_end(tmp_path: Path):
    """A class is a cycle: only the last collection of a process lets go of what it holds."""
    ran = inline(
        tmp_path,
        "1GiB",
        """
        class Log:
            file = open("log.txt", "w")

        import torch
        Log.file.write("written")
        """,
        ways=in_processes,
    )
    assert ran.files["log.txt"] == b"written"


def test_recomputed_dropout_imports_nothing_that_the_script_does_not(tmp_path: Path):
    ran = inline(
        tmp_path,
        "70%",
        """
        import sys
        import torch
        from torch import nn

        model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Dropout()) for _ in range(6)])
        for step in range(3):
            loss = model(torch.randn(2048, 64)).square().mean()
            loss.backward()
            for parameter in model.parameters():
                parameter.data -= parameter.grad
                parameter.grad = None
            print("sympy" in sys.modules)
        """,
        ways=in_processes,
    )
    assert ran.stdout.split() == ["False"] * 3
    assert ran.loops[0]["plan"]["actions"]


def test_the_collector_does_not_run_while_a_step_is_planned(tmp_path: Path):
    """What planning makes is many objects and no cycle; each look at them all takes long."""
    code = """
    import gc
    import sys
    import torch
    from torch import nn

    def planning():
        frame = sys._getframe()
        while frame is not None:
            if frame.f_code.co_name == "_plan_pending":
                return True
            frame = frame.f_back
        return False

    collected = set()
    gc.callbacks.append(lambda phase, info: collected.add(planning()))
    gc.set_threshold(50, 5, 5)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(4):
        loss = model(torch.randn(4096, 64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    gc.callbacks.clear()
    print(sorted(collected), gc.isenabled())
    """
    ran = inline(tmp_path, "12MiB", code)
    assert ran.loops[0]["planned"]["steps"] > 0
    assert "[False] True" in ran.stdout
