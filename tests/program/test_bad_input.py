"""Bad input: a clear error on standard error, the right exit code, nothing half-written."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from memfit import _native
from memfit.program.host import Host
from program import FOLDER, PROGRAM, Outcome, environment, run

Inside = Callable[..., Outcome]


@pytest.fixture
def inside(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Inside:
    """Runs the program in this process, which saves the start of another."""
    monkeypatch.chdir(FOLDER)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run_inside(*arguments: str) -> Outcome:
        capfd.readouterr()
        code = _native.run(["memfit", *arguments], Host())
        return Outcome(code, *capfd.readouterr())

    return run_inside


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("absent.py:build", "there is no file `absent.py`"),
        ("absent.module:build", "there is no module `absent.module`"),
        ("workloads.py:absent", "`workloads.py` has no function `absent`"),
        ("workloads.py:NOT_A_FUNCTION", "is a `int`, not a function"),
        ("workloads.py:wrong_type", "returned `Linear`, not `memfit.Workload`"),
        ("workloads.py:needs_value", "`needs_value` needs a value for `rows`"),
        ("workloads.py", "names no function"),
    ],
)
def test_targets(inside: Inside, target: str, said: str):
    outcome = inside("predict", target)
    assert (outcome.code, outcome.stdout) == (2, "")
    assert said in outcome.stderr
    assert "Traceback" not in outcome.stderr


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("depht=3", "`mlp` has no parameter `depht`"),
        ("depth=many", "cannot read `many` as the value of `depth`: expected int"),
        ("bias=perhaps", "cannot read `perhaps` as the value of `bias`: expected bool"),
    ],
)
def test_settings(inside: Inside, setting: str, said: str):
    outcome = inside("predict", "workloads.py:mlp", "--set", setting)
    assert (outcome.code, outcome.stdout) == (2, "")
    assert said in outcome.stderr


def test_unknown_settings_list_the_known_ones(inside: Inside):
    outcome = inside("predict", "workloads.py:mlp", "--set", "depht=3")
    assert "hint: its parameters are `batch`, `width`, `depth`, `bias`" in outcome.stderr


@pytest.mark.parametrize(
    ("target", "error", "phase"),
    [
        ("workloads.py:fails_in_build", "RuntimeError: no data today", "build"),
        ("workloads.py:fails_in_forward", "RuntimeError: ", "forward"),
    ],
)
def test_a_model_that_fails_shows_its_own_traceback(
    inside: Inside, target: str, error: str, phase: str
):
    outcome = inside("predict", target)
    assert (outcome.code, outcome.stdout) == (2, "")
    assert "Traceback (most recent call last):" in outcome.stderr
    assert "workloads.py" in outcome.stderr
    assert error in outcome.stderr
    frames = [line for line in outcome.stderr.splitlines() if line.startswith("  File ")]
    assert frames
    assert all("workloads.py" in frame for frame in frames)
    assert outcome.stderr.count("Traceback") == 1
    last = [line for line in outcome.stderr.splitlines() if line.startswith("error: ")]
    assert len(last) == 1
    assert phase in last[0]


def test_a_batch_that_torchs_own_layers_refuse_shows_the_layer(inside: Inside):
    outcome = inside("predict", "workloads.py:fails_in_a_layer")
    frames = [line for line in outcome.stderr.splitlines() if line.startswith("  File ")]
    (frame,) = frames
    assert "linear.py" in frame
    assert "error: the step failed in forward: RuntimeError: " in outcome.stderr


def test_a_missing_package_of_the_examples_is_named(tmp_path: Path):
    (tmp_path / "needs.py").write_text(
        "import sys\nsys.modules['timm'] = None\nimport timm\ndef build(): ...\n"
    )
    outcome = run("predict", "needs.py:build", folder=tmp_path)
    assert (outcome.code, outcome.stdout) == (2, "")
    assert "`timm`" in outcome.stderr
    assert "pip install memfit[examples]" in outcome.stderr


def test_a_file_that_cannot_be_parsed(tmp_path: Path):
    (tmp_path / "broken.py").write_text("def build(:\n")
    outcome = run("predict", "broken.py:build", folder=tmp_path)
    assert (outcome.code, outcome.stdout) == (2, "")
    assert "SyntaxError" in outcome.stderr


@pytest.mark.parametrize("budget", ["lots", "0", "-1GiB", "3XB", "0%"])
def test_budgets(inside: Inside, budget: str):
    outcome = inside("plan", "workloads.py:mlp", f"--budget={budget}")
    assert (outcome.code, outcome.stdout) == (2, "")
    assert "as a budget" in outcome.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--bugdet", "3GiB", "script.py"], "a similar argument exists: '--budget'"),
        (["--epochs", "3", "script.py"], "unexpected argument '--epochs'"),
        (["--budget", "1GiB", "-x", "script.py"], "unexpected argument '-x'"),
        (["--budget", "-5", "script.py"], "a budget must be above 0"),
        (["--budget", "50", "script.py"], "did you mean `50%`?"),
    ],
)
def test_flags_of_run_that_are_none(inside: Inside, words: list[str], said: str):
    outcome = inside("run", *words)
    assert (outcome.code, outcome.stdout) == (2, "")
    assert said in outcome.stderr


def test_a_budget_behind_the_script_is_the_scripts_and_warned_of(tmp_path: Path):
    (tmp_path / "script.py").write_text("import sys; print(sys.argv[1:])")
    for own, warns in (([], True), (["--budget", "1GiB"], False)):
        outcome = run("run", *own, "script.py", "--budget=3", "-x", folder=tmp_path)
        assert (outcome.code, outcome.stdout) == (0, "['--budget=3', '-x']\n")
        said = "warning: `--budget` stands after the script" in outcome.stderr
        assert said == warns


def test_damaged_traces(inside: Inside, tmp_path: Path):
    path = tmp_path / "step.memfit"
    assert inside("predict", "workloads.py:mlp", "--save", str(path)).code == 0
    whole = path.read_bytes()
    later = b'{"schema_version":99,"kind":"trace","memfit":"7.0.0"}\n'
    for data in (b"", whole[:-10], whole[:40], b"hello", later + whole):
        path.write_bytes(data)
        outcome = inside("predict", str(path))
        assert (outcome.code, outcome.stdout) == (2, "")
        assert outcome.stderr.startswith("error: cannot read `")
    assert "7.0.0" in outcome.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write everywhere")
def test_a_folder_without_write_permission(inside: Inside, tmp_path: Path):
    tmp_path.chmod(0o500)
    outcome = inside("predict", "workloads.py:mlp", "--save", str(tmp_path / "step.memfit"))
    assert outcome.code == 2
    assert "cannot write" in outcome.stderr


def test_a_folder_that_does_not_exist(inside: Inside, tmp_path: Path):
    outcome = inside(
        "predict", "workloads.py:mlp", "--save", str(tmp_path / "absent" / "step.memfit")
    )
    assert (outcome.code, outcome.stdout) == (2, "")
    assert "cannot write" in outcome.stderr
    assert list(tmp_path.iterdir()) == []


def test_interrupting_a_capture_leaves_nothing(tmp_path: Path):
    child = subprocess.Popen(
        [PROGRAM, "predict", "workloads.py:slow", "--save", str(tmp_path / "step.memfit")],
        cwd=FOLDER,
        env={**environment(), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stderr is not None
    for line in child.stderr:
        if "building slowly" in line:
            break
    time.sleep(0.2)
    child.send_signal(signal.SIGINT)
    stdout, stderr = child.communicate(timeout=30)
    assert child.returncode == 130
    assert stdout == ""
    assert "error: interrupted" in stderr
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_stops_is_no_failure():
    with subprocess.Popen(
        [PROGRAM, "completions", "zsh"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.close()
        assert child.wait(timeout=30) == 0
        assert child.stderr is not None
        assert child.stderr.read() == b""


def test_python_m_memfit_is_the_program():
    done = subprocess.run(
        [sys.executable, "-m", "memfit", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == run("--version").stdout
