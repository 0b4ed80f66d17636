"""Objects that an import of torch leaves, and the garbage collector: out of its way, not lost."""

from __future__ import annotations

import textwrap
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


_LIBRARY = """
    import gc

    class Held:
        pass

    COUNT = 20_000
    made = [Held() for _ in range(COUNT)]
    was_enabled = gc.isenabled()
    """


def test_the_collector_passes_over_libraries_that_are_imported_after_torch(tmp_path: Path):
    """Until the script has something of its own, which is the collector's as ever."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    for name in ("early", "late"):
        (folder / f"{name}.py").write_text(textwrap.dedent(_LIBRARY))
    ran = inline(
        tmp_path,
        "1GiB",
        f"""
        import gc
        import sys
        sys.path.insert(0, {str(folder)!r})
        import torch
        import early
        seen = [len([it for it in gc.get_objects() if type(it) is early.Held])]
        print(gc.isenabled())

        class Own:
            def __del__(self):
                print("collected")

        import late
        one = Own()
        one.self = one
        del one
        gc.collect()
        seen.append(len([it for it in gc.get_objects() if type(it) is late.Held]))
        print(gc.isenabled(), late.was_enabled, [type(it).__name__ for it in sys.meta_path])
        print(seen, early.was_enabled, file=sys.stderr)
        """,
        ways=in_processes,
    )
    assert ran.stdout.splitlines()[:2] == ["True", "collected"]
    assert ran.stderr.splitlines()[0] == "[0, 20000] False"


def test_libraries_that_count_leaks_find_all_let_go_of(tmp_path: Path):
    """Those made with nanobind print 30 lines where the last collection passes over them."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "counting.py").write_text(
        textwrap.dedent(
            """
            import os

            class Kind(type):
                __module__ = "nanobind"

            class Bound(metaclass=Kind):
                def __del__(self, write=os.write):
                    write(1, b"let go of")

            one = Bound()
            one.self = one
            del one
            """
        )
    )
    ran = inline(
        tmp_path,
        "1GiB",
        f"""
        import sys
        sys.path.insert(0, {str(folder)!r})
        import torch
        import counting
        """,
        ways=in_processes,
    )
    assert ran.stdout == "let go of"


def test_models_that_a_library_makes_when_it_is_imported_are_planned(tmp_path: Path):
    """The collector knows nothing of them, and memfit does."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "zoo.py").write_text(
        textwrap.dedent(
            """
            import torch
            from torch import nn

            class Zoo:
                def __init__(self):
                    torch.manual_seed(0)
                    self.model = nn.Sequential(*[
                        nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)
                    ])
                    self.me = self

            zoo = Zoo()
            """
        )
    )
    ran = inline(
        tmp_path,
        "12MiB",
        f"""
        import sys
        sys.path.insert(0, {str(folder)!r})
        import torch
        from zoo import zoo

        optimizer = torch.optim.SGD(zoo.model.parameters(), 0.1)
        for step in range(4):
            loss = zoo.model(torch.randn(4096, 64)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """,
        ways=in_processes,
    )
    assert ran.loops[0]["planned"]["steps"] > 0


def test_libraries_that_cannot_be_imported_say_so_as_ever(tmp_path: Path):
    """Whatever they raise, with the lines of the library and of the script alone."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "broken.py").write_text("import no_such_library\n")
    (folder / "failing.py").write_text("raise ValueError('not here')\n")
    ran = inline(
        tmp_path,
        "1GiB",
        f"""
        import gc
        import sys
        sys.path.insert(0, {str(folder)!r})
        import torch
        try:
            import broken
        except ImportError as error:
            print(error, gc.isenabled())
        import failing
        """,
        ways=in_processes,
    )
    assert ran.code == 1
    assert ran.stdout.splitlines() == ["No module named 'no_such_library' True"]
    shown = [line for line in ran.stderr.splitlines() if line.startswith("  File")]
    files = [line.partition(",")[0].rpartition("/")[2] for line in shown]
    assert files == ['train.py"', 'failing.py"']


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


def test_what_the_first_optimizer_imports_is_looked_at_once(tmp_path: Path):
    """Torch imports its compiler then, 100,000 objects: the collector would look 60 times."""
    ran = inline(
        tmp_path,
        "1GiB",
        """
        import gc
        import sys
        import torch
        model = torch.nn.Linear(2, 2)
        is_new = "torch._dynamo" not in sys.modules
        looks = []
        gc.callbacks.append(lambda phase, of: looks.append(of["generation"]))
        torch.optim.SGD(model.parameters(), 0.1)
        print(gc.isenabled())
        print(is_new, looks, file=sys.stderr)
        """,
        ways=in_processes,
    )
    assert ran.stderr.splitlines()[0] == "True [1, 1]", "its beginning and its end"
