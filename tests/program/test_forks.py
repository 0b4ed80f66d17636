"""What tests run in forks ends as a process of its own would."""

import signal
from pathlib import Path

import pytest
from forks import FORKS, Forks

WHERE = "import os, sys; print(os.getcwd(), sys.argv[1:], os.getppid(), os.environ.get('{name}'))"


@pytest.mark.parametrize(
    ("code", "ends"),
    [
        ("pass", 0),
        ("raise SystemExit", 0),
        ("raise SystemExit(3)", 3),
        ("raise SystemExit(-1)", 255),
        ("raise SystemExit('a last word')", 1),
        ("1 / 0", 1),
        ("import os; os._exit(9)", 9),
        ("import os; os.kill(os.getpid(), 15)", -signal.SIGTERM),
        ("raise KeyboardInterrupt", -signal.SIGINT),
    ],
)
def test_exit_codes_are_those_of_python(code: str, ends: int):
    assert FORKS.run("-c", code).code == ends


def test_exit_handlers_and_threads_have_their_say():
    done = FORKS.run(
        "-c",
        "import atexit, threading, time\n"
        "atexit.register(print, 'bye')\n"
        "threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()",
    )
    assert (done.stdout, done.stderr) == ("thread\nbye\n", "")


def test_only_what_is_read_later_is_set_in_a_fork(tmp_path: Path):
    name, forks = "MEMFIT_BROKER", Forks()  # whose process has the variables of this moment
    done = forks.run("-c", WHERE.format(name=name), "word", folder=tmp_path, **{name: "here"})
    folder, words, forked_by, value = done.stdout.split()
    assert (folder, words, value) == (str(tmp_path), "['word']", "here")
    done = forks.run("-c", WHERE.format(name="OTHER"), "word", folder=tmp_path, OTHER="there")
    forks.close()
    folder, words, started_by, value = done.stdout.split()
    assert (folder, words, value) == (str(tmp_path), "['word']", "there")
    assert started_by != forked_by


def test_a_script_that_waits_for_torch_sees_its_import(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nprint('torch' in sys.modules)\nimport torch\nprint(torch.ones(1))"
    )
    assert FORKS.run(script).stdout == "False\ntensor([1.])\n"
