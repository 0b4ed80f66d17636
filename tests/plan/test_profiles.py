"""Calibrated profiles: made in little time, matched to the machine, refused when broken."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import FORKS
from torch import nn

import memfit
import program
from memfit.errors import UsageError
from memfit.measure import curves, transfers
from memfit.plan import cost_source, profiles

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A profile of this machine, measured in a second or two."""
    return profiles.make("cpu", seconds=0.5, folder=tmp_path_factory.mktemp("disk"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder of its own; the path of the profile in it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = profiles.default_path("cpu")
    assert tmp_path in file.parents
    file.parent.mkdir(parents=True)
    return file


def write(file: Path, document: Any) -> Path:
    file.write_text(json.dumps(document))
    return file


def workload() -> memfit.Workload:
    layers = [nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3)]
    return memfit.Workload(
        model=nn.Sequential(*layers),
        batch=torch.randn(64, 32),
        loss=lambda model, batch: model(batch).square().mean(),
    )


def source(**options: Any) -> str:
    return str(memfit.plan(workload(), "90%", **options).as_dict()["cost_source"])


def test_a_profile_holds_every_kind_of_measurement(made: dict[str, Any]):
    profile = made["profile"]
    assert {"matmul", "convolution", "attention"} <= profile["curves"]["compute"].keys()
    assert {"elementwise", "in_place", "gelu_backward"} <= profile["curves"]["memory"].keys()
    assert profile["transfers"].keys() == {"disk_write", "disk_read"}
    for points in profile["curves"]["memory"].values():
        works = [point["work"] for point in points]
        assert works == sorted(set(works))
    assert profile["curves"]["compute"]["matmul"].keys() >= {"float32", "int8"}
    # A small product of 2 x 32^3 FLOPs takes well over a nanosecond and well under a second.
    assert 1e-9 < profile["curves"]["compute"]["matmul"]["float32"][0]["seconds"] < 1
    assert all(sample["runs"] >= 3 and sample["spread"] >= 0 for sample in made["samples"])
    assert profiles.make.__doc__


def test_work_is_counted_as_traces_count_it():
    rows = torch.ones(4, 256)
    bytes_each = rows.numel() * 4
    plain = curves._OPERATORS["elementwise"](rows)
    assert curves._moved(plain) == 3 * bytes_each
    in_place = curves._OPERATORS["in_place"](rows)
    assert curves._moved(in_place) == 3 * bytes_each
    step = memfit.trace(
        memfit.Workload(nn.GELU(), torch.ones(4, 256, requires_grad=True), lambda m, b: m(b).sum())
    )
    document = json.loads(step.json())
    moved = {document["strings"][op["name"]]: op["moved_bytes"] for op in document["ops"]}
    assert moved["aten.gelu.default"] == curves._moved(curves._OPERATORS["gelu"](rows))


def test_the_clock_is_the_thread_s_own():
    def idle() -> None:
        subprocess.run(["sleep", "0.05"], check=True)

    seconds, _, runs = curves.timed(idle, CPU, 0.1)
    assert seconds < 0.04, "a wait is no work"
    assert runs >= 3


def test_the_disk_file_is_removed_and_a_bad_folder_is_an_error(tmp_path: Path):
    rates, how = transfers.disk(tmp_path, 8 << 20)
    assert rates.keys() == {"disk_write", "disk_read"}
    assert all(rate > 0 for rate, _ in rates.values())
    assert "cache" in how
    assert not list(tmp_path.iterdir())
    with pytest.raises(UsageError, match="cannot write to"):
        transfers.disk(tmp_path / "absent", 1)


def test_a_kept_profile_is_used_while_the_machine_is_the_same(made: dict[str, Any], cache: Path):
    assert source().startswith("roofline (this machine's CPU")
    write(cache, made)
    assert source() == f"profile of this machine, calibrated {made['date']}"
    for key, other, word in (
        ("threads", made["threads"] + 1, "thread count"),
        ("torch_version", "1.0", "torch version"),
        ("device_name", "another", "device"),
    ):
        write(cache, {**made, key: other})
        assert source().endswith(f"; the calibrated profile has another {word})")


def test_a_named_profile_is_used_whatever_machine_it_is_of(made: dict[str, Any], tmp_path: Path):
    file = write(tmp_path / "node.json", {**made, "device_name": "node 7"})
    expected = f"profile of node 7, not this machine, calibrated {made['date']}"
    assert source(costs=file) == expected
    cuda = write(tmp_path / "cuda.json", {**made, "device_kind": "cuda"})
    with pytest.raises(UsageError, match="is of a cuda device"):
        source(costs=cuda)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema_version": 9}, "schema version 9"),
        ({"kind": "plan"}, "no device profile"),
        ({"threads": "two"}, "`threads`"),
        ({"profile": {"name": "x"}}, "flops_per_second"),
        ({"profile": None}, "`profile`"),
    ],
)
def test_a_broken_profile_is_an_error(
    made: dict[str, Any], cache: Path, change: dict[str, Any], said: str
):
    write(cache, {**made, **change})
    with pytest.raises(UsageError, match=said):
        profiles.usable("cpu", None)


def test_numbers_are_checked_by_the_engine(made: dict[str, Any], cache: Path):
    broken = {**made, "profile": {**made["profile"], "bytes_per_second": -1.0}}
    write(cache, broken)
    with pytest.raises(UsageError, match="bytes_per_second"):
        profiles.usable("cpu", None)


def test_a_torn_file_ends_the_program_with_2(cache: Path):
    cache.write_text('{"schema_version": 1, "kin')
    done = program.run("plan", "workloads.py:mlp", "--budget", "90%")
    assert done.code == 2, done.stderr
    assert "is no device profile" in done.stderr
    assert "memfit calibrate" in done.stderr


def test_without_a_gpu_a_datasheet_stands_in(cache: Path):
    assert not cache.exists()
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    assert (
        "A100 80 GB, from its datasheet; it stands in" in cost_source.device_profile("cuda")["name"]
    )
    step = memfit.trace(workload(), device="cuda")
    said = memfit.plan(step, "90%", gpu="H100").as_dict()["cost_source"]
    assert said == "roofline (H100, from its datasheet)"
    with pytest.raises(UsageError, match="no profile of a GPU"):
        memfit.plan(step, "90%", gpu="abacus")
    with pytest.raises(UsageError, match="runs on `cpu`"):
        memfit.plan(workload(), "90%", gpu="H100")
    with pytest.raises(UsageError, match="one source"):
        memfit.plan(workload(), "90%", gpu="H100", profile=True)
    with pytest.raises(UsageError, match="no CUDA device"):
        profiles.make("cuda")


def test_the_command_writes_what_plans_read(tmp_path: Path):
    words = ["calibrate", "--seconds", "0.3", "--format", "json", "--folder", str(tmp_path)]
    done = FORKS.run("-m", "memfit", *words, XDG_CACHE_HOME=str(tmp_path))
    assert done.code == 0, done.stderr
    document = json.loads(done.stdout)
    file = tmp_path / "memfit" / "cpu.json"
    assert document["path"] == str(file)
    assert document["schema_version"] == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["memfit"]
    assert profiles.read(file)["samples"] == document["samples"]


def test_the_library_calibrates_and_plans_find_it(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = memfit.calibrate(seconds=0.2, folder=tmp_path)
    file = tmp_path / "memfit" / "cpu.json"
    assert found.path == str(file)
    assert profiles.read(file)["samples"] == found.as_dict()["samples"]
    assert found.profile.flops_per_second["float32"] > 0
    assert str(file) in str(found)
    assert found.date in memfit.plan(workload(), "90%").cost_source
    named = memfit.calibrate(seconds=0.2, output=tmp_path / "named.json")
    assert named.path == str(tmp_path / "named.json")
