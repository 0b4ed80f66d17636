"""``memfit run``: a script behaves as under ``python``, and its summary is true."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forks import FORKS, Done, environment

MIB = 1 << 20
Run = Callable[..., Done]


def start(words: list[str], folder: Path, **settings: Any) -> Done:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **settings,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def python(folder: Path, *words: str) -> Done:
    return start(list(words), folder)


def memfit(folder: Path, *words: str, **settings: Any) -> Done:
    return start(["-m", "memfit", "run", *words], folder, **settings)


def in_a_fork(folder: Path, *words: str) -> Done:
    """The same without the time that importing torch takes."""
    return FORKS.run("-m", "memfit", "run", *words, folder=folder)


def write(folder: Path, name: str, code: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(code))


def assert_same(folder: Path, *words: str) -> Done:
    """The script's output, its errors and its exit code are those it has under ``python``."""
    expected, found = python(folder, *words), memfit(folder, *words)
    assert found.stdout == expected.stdout
    assert found.code == expected.code
    assert found.stderr.startswith(expected.stderr), (found.stderr, expected.stderr)
    return found


FACTS = """
    import atexit, sys, helper
    print(__name__, __file__, __package__, __spec__ and __spec__.name, type(__loader__).__name__)
    print(sys.argv, sys.path[0], helper.WORD, sys.modules["__main__"].__dict__ is globals())
    print(sorted(name for name in globals() if name.startswith("__")))
    atexit.register(lambda: print("at exit", sys.modules["__main__"].__name__))
    if __name__ == "__main__":
        print("main")
"""


def test_a_script_finds_the_world_as_under_python(tmp_path: Path):
    write(tmp_path, "scripts/train.py", FACTS)
    write(tmp_path, "scripts/helper.py", "WORD = 'sibling'")
    ran = assert_same(tmp_path, "scripts/train.py", "--epochs", "3", "-q", "--format", "json")
    assert "'--format', 'json'" in ran.stdout
    assert "the script did not import torch: nothing was counted" in ran.stderr


def test_torch_that_is_there_before_the_script_is_counted(tmp_path: Path):
    code = """if True:
        import runpy, sys, torch
        sys.argv[1:1] = ["run"]
        runpy.run_module("memfit", run_name="__main__")
    """
    write(tmp_path, "train.py", "import torch; kept = torch.zeros(1 << 20)")
    ran = python(tmp_path, "-c", code, "--format", "json", "train.py")
    found = json.loads(ran.stderr)
    assert found["torch_imported"]
    assert found["devices"][0]["peak_bytes"] == 4 * MIB


def test_a_look_that_fails_is_told(tmp_path: Path):
    write(
        tmp_path,
        "train.py",
        """
        import torch
        from memfit.track import look
        def fail(*_):
            raise KeyError("unknown")
        fail.__code__ = fail.__code__.replace(co_filename=look.__file__)
        look.search = fail
        kept = [torch.zeros(1 << 20) for _ in range(4)]
        print(len(kept))
        """,
    )
    ran = in_a_fork(tmp_path, "train.py")
    assert (ran.code, ran.stdout) == (0, "4\n")
    assert "what is live was looked at no more: KeyError: 'unknown'" in ran.stderr


def test_torch_that_comes_past_the_import_hook_is_counted(tmp_path: Path):
    """Another hook may find torch first; the next import tells."""
    code = """
        import sys
        ours = sys.meta_path.pop(0)
        import torch
        sys.meta_path.insert(0, ours)
        import wave
        kept = torch.zeros(1 << 20)
    """
    write(tmp_path, "train.py", code)
    found = json.loads(memfit(tmp_path, "--format", "json", "train.py").stderr)
    assert found["devices"][0]["peak_bytes"] == 4 * MIB


def test_a_module_finds_the_world_as_under_python(tmp_path: Path):
    write(tmp_path, "package/__init__.py", "")
    write(tmp_path, "package/train.py", "from . import other\n" + textwrap.dedent(FACTS))
    write(tmp_path, "package/other.py", "")
    write(tmp_path, "package/__main__.py", "print('the package itself')")
    write(tmp_path, "helper.py", "WORD = 'in the working folder'")
    assert_same(tmp_path, "-m", "package.train", "--epochs", "3")
    assert_same(tmp_path, "-m", "package")
    assert_same(tmp_path, "-m", "package.absent")


def test_a_folder_with_a_main_runs(tmp_path: Path):
    write(
        tmp_path, "app/__main__.py", "import sys, part; print(sys.argv, sys.path[0], part.__name__)"
    )
    write(tmp_path, "app/part.py", "")
    assert_same(tmp_path, "app", "x")


@pytest.mark.parametrize(
    "code",
    [
        "raise SystemExit(3)",
        "import sys; sys.exit('a last word')",
        "import sys; sys.exit()",
        "import sys; sys.exit(-1)",
        "import sys; sys.exit(256 + 7)",
        "import sys; sys.exit(True)",
        "print('before', end=''); 1 / 0",
        "try:\n    {}[1]\nexcept KeyError as error:\n    raise ValueError from error",
        "x = = 1",
        "import os; os._exit(9)",
        "import sys; sys.excepthook = lambda *a: print('own hook', a[0].__name__); [][1]",
        "raise ExceptionGroup('several', [ValueError(1), TypeError(2)])",
        "assert 1 == 2, 'message'",
    ],
)
def test_endings_are_those_of_python(tmp_path: Path, code: str):
    write(tmp_path, "script.py", code)
    assert_same(tmp_path, "script.py")


def test_processes_of_the_script_are_not_disturbed(tmp_path: Path):
    write(
        tmp_path,
        "script.py",
        """
        import concurrent.futures, multiprocessing, os, sys

        def square(x):
            return x * x

        if __name__ == "__main__":
            for method in ("spawn", "fork"):
                context = multiprocessing.get_context(method)
                with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
                    print(method, list(pool.map(square, range(5))))
            sys.stdout.flush()
            if os.fork() == 0:
                sys.exit(4)
            print(os.waitstatus_to_exitcode(os.wait()[1]))
        """,
    )
    ran = assert_same(tmp_path, "script.py")
    assert "spawn [0, 1, 4, 9, 16]" in ran.stdout
    assert ran.stderr.count("finished after") == 1, "the forked child prints no summary"


def test_no_such_script(tmp_path: Path):
    ran = memfit(tmp_path, "absent.py")
    assert ran.code == 2
    assert "error: there is no file `absent.py`" in ran.stderr
    assert memfit(tmp_path).code == 2
    write(tmp_path, "script.py", "print(1)")
    ran = memfit(tmp_path, "--report", "absent/report.json", "script.py")
    assert (ran.code, ran.stdout) == (2, ""), "found out before the script runs"


def test_ctrl_c_ends_the_script_as_ever(tmp_path: Path):
    write(
        tmp_path,
        "script.py",
        """
        import atexit, time
        atexit.register(print, "at exit", flush=True)
        print("ready", flush=True)
        time.sleep(60)
        """,
    )
    found = []
    for words in (["script.py"], ["-m", "memfit", "run", "script.py"]):
        with subprocess.Popen(
            [sys.executable, *words],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            line = process.stdout.readline()
            time.sleep(0.2)
            process.send_signal(signal.SIGINT)
            rest, errors = process.communicate(timeout=60)
            found.append((line, rest, process.returncode, errors))
    assert found[0][:3] == found[1][:3] == ("ready\n", "at exit\n", -signal.SIGINT)
    assert found[1][3].startswith(found[0][3])
    assert "interrupted after" in found[1][3]


TRAINING = """
    import os, sys
    os.environ["SEEN"] = str("torch" in sys.modules)
    import torch
    from torch import nn

    def main():
        torch.manual_seed(0)
        width = 256
        model = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        optimizer = torch.optim.AdamW(model.parameters())
        total = 0
        kept = []
        for step in range(9):
            loss = model(torch.randn(8, width)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss if "sum" in sys.argv else loss.item()
            if "collect" in sys.argv:
                kept.append(torch.empty(1000))
        print(os.environ["SEEN"], "KINETO_LOG_LEVEL" in os.environ)
        if "oom" in sys.argv:
            torch.empty(10**15, dtype=torch.uint8)

    main()
"""
PARAMETERS = 2 * (256 * 256 + 256) * 4


def report(folder: Path, *words: str, run: Run = memfit) -> tuple[Done, dict[str, Any]]:
    write(folder, "train.py", TRAINING)
    ran = run(folder, "--report", "report.json", "train.py", *words)
    return ran, json.loads((folder / "report.json").read_text())


def test_the_summary_of_a_training_script(tmp_path: Path):
    ran, found = report(tmp_path)
    assert ran.stdout == "False False\n", "torch was the script's to import, in its environment"
    assert (found["ended"], found["exit_code"], found["script"]) == ("finished", 0, "train.py")
    assert found["steps"]["count"] == 9
    assert found["steps"]["growth_bytes_per_step"] == 0
    cpu = found["devices"][0]
    categories = cpu["peak_by_category"]
    # The batch is small: the peak is in an optimizer step, with gradients and state.
    assert cpu["peak"]["phase"] == "optimizer"
    assert categories["parameter"] == PARAMETERS
    assert categories["gradient"] == PARAMETERS
    assert 2 * PARAMETERS <= categories["optimizer_state"] <= 2 * PARAMETERS + 100
    assert sum(categories.values()) == cpu["peak_bytes"]
    assert cpu["after_bytes"] == 0, "everything was local to `main`"
    assert 0 < cpu["peak"]["seconds"] < found["elapsed_seconds"]
    assert re.search(r"optimizer state +1\.0 MiB", ran.stderr)


def test_a_summed_loss_is_found(tmp_path: Path):
    ran, found = report(tmp_path, "sum", run=in_a_fork)
    assert found["steps"]["growth_cause"].startswith("`total` (train.py:")
    assert "loss.item()" in ran.stderr


def test_growth_is_measured(tmp_path: Path):
    _, found = report(tmp_path, "collect", run=in_a_fork)
    assert found["steps"]["growth_bytes_per_step"] == 4000
    assert found["steps"]["growing"] == 6, "the last two may be live anyway"
    assert found["steps"]["growth_bytes"] == 24_000
    assert found["steps"]["growth_cause"].startswith("`kept` (train.py:")


def test_out_of_memory(tmp_path: Path):
    ran, found = report(tmp_path, "oom")
    assert (ran.code, found["exit_code"], found["ended"]) == (1, 1, "out_of_memory")
    assert ran.stderr.startswith("Traceback (most recent call last):\n")
    assert "memfit" not in ran.stderr.partition("RuntimeError")[0], "none of memfit's frames"
    oom = found["oom"]
    assert (oom["device"], oom["requested_bytes"]) == ("cpu", 10**15)
    assert oom["live_by_category"]["parameter"] == PARAMETERS
    assert sum(oom["live_by_category"].values()) == oom["live_bytes"]
    assert oom["at"]["steps_done"] == 9
    assert "OUT OF MEMORY" in ran.stderr
    assert "memfit predict" in ran.stderr


def test_the_summary_as_json_and_none_at_all(tmp_path: Path):
    write(tmp_path, "script.py", "print('text')")
    ran = start(["-m", "memfit", "run", "--format", "json", "script.py"], tmp_path)
    assert (ran.stdout, json.loads(ran.stderr)["torch_imported"]) == ("text\n", False)
    ran = start(["-m", "memfit", "run", "--quiet", "script.py"], tmp_path)
    assert (ran.stdout, ran.stderr) == ("text\n", "")


CUDA_OOM = """
    import torch

    calls = []
    stats = {
        f"{kind}_bytes.all.{what}": 700
        for kind in ("allocated", "active", "reserved") for what in ("current", "peak")
    }
    torch.cuda.is_initialized = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.memory_stats = lambda index: stats
    torch.cuda.reset_peak_memory_stats = lambda index: None
    torch.cuda.memory._record_memory_history = lambda **settings: calls.append(settings)
    torch.cuda.memory._dump_snapshot = lambda path: open(path, "w").write(repr(calls))
    # What torch does when CUDA is first used.
    for call, *_ in torch.cuda._queued_calls:
        if "Watch" in call.__qualname__:
            call()
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
"""


def test_a_snapshot_of_cuda_memory_when_it_runs_out(tmp_path: Path):
    write(tmp_path, "script.py", CUDA_OOM)
    words = ["--snapshot", "oom.pickle", "--report", "report.json", "script.py"]
    ran = in_a_fork(tmp_path, *words)
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["snapshot"] == str(tmp_path / "oom.pickle"), ran.stderr
    assert (tmp_path / "oom.pickle").read_text() == "[{'max_entries': 1000000}]"
    assert found["ended"] == "out_of_memory"
    assert (found["oom"]["device"], found["oom"]["live_bytes"]) == ("cuda:0", 700)
    assert "memfit explain" in ran.stderr
    assert ran.code == 1


def test_without_cuda_there_is_no_snapshot(tmp_path: Path):
    write(tmp_path, "script.py", "import torch; torch.empty(3)")
    ran = in_a_fork(tmp_path, "--snapshot", "none.pickle", "script.py")
    assert ran.code == 0
    assert "no snapshot was written: the script did not use CUDA" in ran.stderr
    assert not (tmp_path / "none.pickle").exists()


def test_a_look_while_backward_lets_go_of_a_tensor_does_not_hold_it(tmp_path: Path):
    """A weak reference's callback runs in the middle of that; to hold the tensor is a crash."""
    code = """
        import weakref, torch
        from torch import nn

        torch.manual_seed(0)
        seen, gone = [], []
        layers = nn.ModuleList([nn.Linear(256, 256) for _ in range(12)])
        for step in range(30):
            h = torch.randn(300 + 40 * step, 256)
            for layer in layers:
                h = torch.tanh(layer(h))
                seen.append(weakref.ref(h, lambda _: gone.append(1)))
            h.square().mean().backward()
            print(step, len(gone))
            seen.clear()
    """
    write(tmp_path, "script.py", code)
    assert_same(tmp_path, "script.py")
