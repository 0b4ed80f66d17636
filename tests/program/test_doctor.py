"""``memfit doctor``, and what commands say where torch is not as they need it.

A torch of another version is the installed one with another ``version.py``: the rest are links.
"""

import datetime as dt
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import memfit
from memfit.doctor import facts, step
from memfit.doctor.trials import trials
from memfit.plan import profiles
from memfit.torch_versions import NEWEST, OLDEST
from program import FOLDER, Outcome, environment, run

OLD = "2.8.0+cu128"
OWN = "memfit " + ".".join(importlib.metadata.version("memfit").split(".")[:2])
RANGE = f"torch {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
NIGHTLY = f"{NEWEST[0]}.{NEWEST[1]}.0.dev20261101+cpu"
LACKING = "torch._C._set_storage_data_ptr_access_error_msg"
TOO_OLD = f"{OWN} supports {RANGE}; this is {OLD}"


def link(target: Path, folder: Path) -> None:
    (folder / target.name).symlink_to(target)


def site_with(folder: Path, version: str | None) -> Path:
    """A folder of packages as the installed ones, with another torch or none."""
    folder.mkdir()
    real = Path(torch.__file__).parent
    for package in real.parent.iterdir():
        if package.name not in {"torch", "memfit", "__pycache__"}:
            link(package, folder)
    link(Path(memfit.__file__).parent, folder)
    place = Path(str(importlib.metadata.distribution("memfit").locate_file("")))
    for about in place.glob("memfit-*.dist-info"):
        if not (folder / about.name).exists():
            link(about, folder)
    if version is not None:
        (folder / "torch").mkdir()
        for part in real.iterdir():
            if part.name not in {"version.py", "__pycache__"}:
                link(part, folder / "torch")
        text = (real / "version.py").read_text().replace(torch.__version__, version)
        (folder / "torch" / "version.py").write_text(text)
    return folder


def old_torch(folder: Path, version: str = OLD) -> Path:
    """A torch that says its version and fails when it is imported."""
    package = folder / "torch"
    package.mkdir(parents=True)
    (package / "version.py").write_text(f"__version__ = '{version}'\ncuda = '12.8'\n")
    (package / "__init__.py").write_text("raise ImportError('libcudart.so.12: no such file')\n")
    return folder


def run_with(path: list[Path], *arguments: str, **variables: str) -> Outcome:
    """Run the program with these folders of packages and no others."""
    done = subprocess.run(
        [sys.executable, "-S", "-m", "memfit", *arguments],
        cwd=FOLDER,
        env={**environment(), "PYTHONPATH": os.pathsep.join(map(str, path)), **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def torchless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return site_with(tmp_path_factory.mktemp("torchless") / "site", None)


def feature(document: Any, name: str) -> Any:
    return next(found for found in document["features"] if found["name"] == name)


def test_here_the_main_job_runs_and_what_is_said_is_true():
    outcome = run("doctor", "--format", "json")
    assert outcome.code == 0, outcome.stdout + outcome.stderr
    document = outcome.json
    assert next(iter(document)) == "schema_version"
    job = document["main_jobs"][0]
    assert (job["device"], job["reached"], job["agreement"]) == ("cpu", "verified", "bitwise")
    planned = job["planned"]
    assert planned["predicted_peak_bytes"] == planned["measured_peak_bytes"]
    assert planned["measured_peak_bytes"] <= job["budget_bytes"]
    assert job["budget_bytes"] < job["unplanned"]["measured_peak_bytes"]
    assert document["torch"]["version"] == torch.__version__
    assert Path(document["torch"]["folder"]) == Path(torch.__file__).parent.resolve()
    assert document["torch"]["cuda_version"] == torch.version.cuda
    assert Path(document["package_folder"]) == Path(memfit.__file__).parent
    assert document["missing_names"] == []
    for name in ("predict", "plan", "verify", "fit", "run", "guard", "track", "predict_cuda"):
        assert feature(document, name) == {"name": name, "works": True, "why_not": None}
    has_cuda = torch.cuda.is_available()
    assert feature(document, "fit_cuda")["works"] == has_cuda
    assert (document["cuda"]["why_not"] is None) == has_cuda


def test_the_speed_of_a_folder_and_a_profile_are_told(tmp_path: Path, torchless: Path):
    absent = facts._offload(str(tmp_path / "absent"), None, None)
    assert absent["why_not"] == f"cannot offload to `{tmp_path}/absent`: there is no such folder"
    found = facts._offload(str(tmp_path), None, None)
    assert found["why_not"] is None
    assert found["write_bytes_per_second"] > 0
    assert found["read_bytes_per_second"] > 0
    assert list(tmp_path.iterdir()) == []
    assert facts._offload("host", None, "no driver")["why_not"] == "no driver"
    without = run_with([torchless], "doctor", "--format", "json", "--offload", str(tmp_path)).json
    assert "not installed" in without["offload"]["why_not"]


def test_the_step_takes_a_device_and_a_batch():
    workload = step.build(batch=8)
    assert workload.loss is not None
    assert workload.loss(workload.model, workload.batch).shape == ()


def test_no_torch(torchless: Path):
    outcome = run_with([torchless], "doctor")
    assert (outcome.code, outcome.stderr) == (1, "")
    *_, verdict, last = outcome.stdout.splitlines()
    assert verdict == "NOT READY: memfit needs torch, which is not installed: `pip install torch`"
    assert last == "next: install torch: `pip install torch`"
    assert "  torch      not installed\n" in outcome.stdout
    assert all(len(line) <= 100 or "`/" in line for line in outcome.stdout.splitlines())


@pytest.mark.parametrize(
    "command",
    [
        "predict workloads.py:mlp",
        "plan workloads.py:mlp --budget 80%",
        "plan workloads.py:mlp --pareto front.html",
        "verify workloads.py:mlp --budget 80%",
        "devices --fit workloads.py:mlp",
        "calibrate --output profile.json",
        "run --budget 80% workloads.py",
    ],
)
def test_commands_that_need_torch_say_one_sentence(torchless: Path, tmp_path: Path, command: str):
    # Where commands write: they must not get there.
    arguments = command.replace("front.html", str(tmp_path / "front.html"))
    arguments = arguments.replace("profile.json", str(tmp_path / "profile.json"))
    none = run_with([torchless], *arguments.split())
    assert (none.code, none.stdout) == (2, "")
    assert none.stderr == (
        "error: memfit needs torch, which is not installed: `pip install torch`\n"
    )
    old = run_with([old_torch(tmp_path / "old"), torchless], *arguments.split())
    assert (old.code, old.stdout) == (2, "")
    assert old.stderr == f"error: {TOO_OLD}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_an_old_torch(torchless: Path, tmp_path: Path):
    outcome = run_with([old_torch(tmp_path / "old"), torchless], "doctor")
    assert (outcome.code, outcome.stderr) == (1, "")
    *_, verdict, last = outcome.stdout.splitlines()
    assert verdict == f"NOT READY: {TOO_OLD}"
    assert last == f"next: install a later torch: `pip install 'torch>={OLDEST[0]}.{OLDEST[1]}'`"
    assert "torch is built for CUDA 12.8" in outcome.stdout


def test_an_old_torch_before_a_good_one(tmp_path: Path, torchless: Path):
    old = old_torch(tmp_path / "old")
    good = old_torch(tmp_path / "good", "2.12.1")
    outcome = run_with([old, good, torchless], "doctor", "--format", "json")
    document = outcome.json
    assert outcome.code == 1
    assert document["next_step"] == (
        f"take `{old}` off Python's path, and torch 2.12.1 in `{good}/torch` is used"
    )
    assert document["torch"]["others"] == [{"version": "2.12.1", "folder": f"{good}/torch"}]


def test_a_torch_that_cannot_be_imported(tmp_path: Path, torchless: Path):
    outcome = run_with([old_torch(tmp_path / "broken", "2.12.1"), torchless], "doctor")
    assert (outcome.code, outcome.stderr) == (1, "")
    *_, verdict, last = outcome.stdout.splitlines()
    assert verdict == "NOT READY: `import torch` fails: libcudart.so.12: no such file"
    assert last == "next: install torch again: `pip install --force-reinstall torch`"


def test_a_newer_torch_warns_once_and_runs(tmp_path: Path):
    site = site_with(tmp_path / "site", "2.99.0")
    outcome = run_with([site], "predict", "workloads.py:mlp")
    assert outcome.code == 0, outcome.stderr
    newest = f"{NEWEST[0]}.{NEWEST[1]}"
    warnings = [line for line in outcome.stderr.splitlines() if line.startswith("warning: ")]
    assert warnings == [
        f"warning: torch 2.99.0 is newer than {newest}, the last that {OWN} was tested with"
    ]
    assert "Predicted peak" in outcome.stdout


def test_a_nightly_before_another_torch(tmp_path: Path):
    site = site_with(tmp_path / "site", NIGHTLY)
    other = old_torch(tmp_path / "other")
    outcome = run_with([site, other], "doctor", "--format", "json")
    assert outcome.code == 0, outcome.stdout + outcome.stderr
    two, nightly = outcome.json["remarks"]
    assert two == (
        f"two torches are on the path: {NIGHTLY} in `{site}/torch` is used, "
        f"{OLD} in `{other}/torch` is not"
    )
    assert nightly == f"torch {NIGHTLY} is a nightly build: memfit is tested with releases only"


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (
            "Found no NVIDIA driver on your system. Please check that you have one",
            "torch is built for CUDA 13.2, and there is no NVIDIA driver here",
        ),
        (
            "No CUDA GPUs are available",
            "torch is built for CUDA 13.2 and sees no device: `CUDA_VISIBLE_DEVICES` is ``",
        ),
        (
            "The driver is too old (found 11040). Please update your driver",
            "torch is built for CUDA 13.2 and cannot use it: The driver is too old (found 11040)",
        ),
    ],
)
def test_a_cuda_torch_without_a_device(monkeypatch: pytest.MonkeyPatch, said: str, reason: str):
    def fails() -> None:
        raise RuntimeError(said)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", fails)
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert facts._cuda() == {"why_not": reason, "devices": []}
    monkeypatch.setattr(torch.version, "cuda", None)
    assert facts._cuda()["why_not"] == "this torch is built without CUDA"


@pytest.mark.skipif(
    torch.version.cuda is None or torch.cuda.is_available(), reason="needs CUDA without a device"
)
def test_why_there_is_no_device_comes_from_torch_itself():
    with pytest.raises(RuntimeError):
        torch.cuda.init()
    assert facts._why_no_device().startswith(f"torch is built for CUDA {torch.version.cuda}")


def test_a_torch_without_distributed_and_onednn(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    found = facts._torch(is_usable=True)
    assert found is not None
    assert (found["has_onednn"], found["has_distributed"]) == (False, False)
    said = facts._remarks([], {"why_not": None}, is_usable=True)
    *_, distributed, onednn = said
    assert distributed == "this torch is built without distributed, which memfit does not need"
    assert onednn == (
        "this torch has no oneDNN: memfit works without it, but how much scratch memory ops take "
        "was tested only with it"
    )


def test_a_name_that_torch_lacks_is_told(monkeypatch: pytest.MonkeyPatch):
    names = {LACKING: ("a.py",), "torch.nn.Linear": ("b.py",)}
    monkeypatch.delattr(torch._C, "_set_storage_data_ptr_access_error_msg")
    monkeypatch.setattr(facts.torch_names, "used_names", lambda: names)
    absent = facts._missing_names()
    assert absent == [
        {"name": "torch._C._set_storage_data_ptr_access_error_msg", "files": ["a.py"]}
    ]
    said = facts._remarks(absent, {"why_not": None}, is_usable=True)
    assert said[-1] == f"this torch has no `{LACKING}`, which memfit uses"


def test_features_that_fail_say_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    from memfit import _native
    from memfit.doctor import trials as tried

    found = trials(str(tmp_path), None)
    for name in ("run", "guard", "track", "offload_activations", "offload_optimizer", "park"):
        assert found[name] is None, name
    problem = "`libc10.so` does not call `free`: this build of torch allocates in another way"
    monkeypatch.setattr(_native, "count_allocations", lambda: problem)
    monkeypatch.setattr(tried, "offloaded_parameters_refusal", lambda: "it needs torch 2.12")
    found = trials(str(tmp_path / "absent"), "no driver")
    counted = f"tensors on the CPU cannot be counted: {problem}"
    assert [found[name] for name in ("run", "guard", "track")] == [counted] * 3
    folder = f"there is no folder `{tmp_path}/absent` to write "
    assert found["offload_activations"] == f"{folder}offloaded tensors to"
    assert found["park"] == f"{folder}parked models to"
    assert found["offload_parameters"] == "it needs torch 2.12"
    assert found["compile_cuda"] == "no driver"


def test_no_compiler(monkeypatch: pytest.MonkeyPatch):
    from torch._inductor import cpp_builder, exc

    def absent() -> str:
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", absent)
    compiler = facts._tools()[0]
    assert (compiler["version"], compiler["path"]) == (None, None)
    assert compiler["why_not"].startswith("Inductor finds no C++ compiler: ")


@pytest.fixture
def unwritable(tmp_path: Path) -> Iterator[Path]:
    """A home that nothing can be written to, by root neither."""
    home = tmp_path / "home"
    if os.geteuid() == 0:
        home.write_text("a file where a folder should be")
        yield home
    else:
        home.mkdir(mode=0o500)
        yield home
        home.chmod(0o700)


def test_a_home_that_cannot_be_written_to(torchless: Path, unwritable: Path):
    variables = {"HOME": str(unwritable), "XDG_CACHE_HOME": ""}
    document = run_with([torchless], "doctor", "--format", "json", **variables).json
    assert document["folders"][0]["path"] == f"{unwritable}/.cache/memfit"
    assert document["folders"][0]["why_not"].startswith(f"cannot write to `{unwritable}")
    (remark,) = document["remarks"]
    assert remark == (
        "profiles cannot be kept here: write one with `memfit calibrate --output FILE.json`, "
        "and plan with `memfit plan --costs FILE.json`"
    )
    assert document["folders"][1]["why_not"] is None


def test_profiles_of_this_machine_and_of_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = profiles.default_path("cpu")
    none = facts._profile("cpu", None, None)
    assert (none["path"], none["calibrated"], none["why_not"]) == (str(path), None, None)
    made = dt.datetime.now(tz=dt.UTC).date() - dt.timedelta(days=3)
    kept = {
        "schema_version": 1,
        "kind": "device_profile",
        **profiles.identity("cpu"),
        "date": made.isoformat(),
        "profile": {
            "name": "this machine",
            "flops_per_second": {"float32": 1e11},
            "bytes_per_second": 1e10,
            "op_overhead_seconds": 1e-6,
        },
    }
    path.parent.mkdir()
    path.write_text(json.dumps(kept))
    mine = facts._profile("cpu", None, None)
    assert (mine["age_days"], mine["is_used"], mine["why_not"]) == (3, True, None)
    path.write_text(json.dumps({**kept, "torch_version": "2.9.0"}))
    other = facts._profile("cpu", None, None)
    assert (other["is_used"], other["why_not"]) == (
        False,
        "the calibrated profile has another torch version",
    )
    path.write_text("{")
    assert facts._profile("cpu", None, None)["why_not"].startswith(f"`{path}` is no device profile")
