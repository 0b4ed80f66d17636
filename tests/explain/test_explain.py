"""`memfit.explain`: the same answers as the program, and peaks as an independent twin counts."""

import gzip
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from rollback import first_highest, totals

import memfit

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "crates" / "memfit-engine" / "tests" / "data" / "snapshots"
REAL = ROOT.parent / "shared" / "data" / "snapshots"
FILES = (
    "sil_forward_bf16_128",
    "sil_mem_snapshot",
    "wl_medium_128_inference",
    "wl_medium_512_training",
)
GIB = 1 << 30


def real(name: str) -> Path:
    path = REAL / f"{name}.pickle"
    if not path.exists():
        pytest.skip(f"no recorded snapshots at {REAL}")
    return path


@pytest.mark.parametrize("name", FILES)
def test_peaks_of_real_runs_are_those_of_a_plain_rollback(name: str):
    path = real(name)
    states = totals(path)
    explanation = memfit.explain(path)
    assert explanation.problems == ()
    (device,) = explanation.devices
    peak = device.peak
    for count, said in enumerate(
        [
            (peak.allocated_bytes, peak.event),
            (peak.active_bytes, peak.active_event),
            (peak.reserved_bytes, peak.reserved_event),
        ]
    ):
        assert said == first_highest([state[count] for state in states])
    assert device.live_before_recording_bytes == states[0][1]
    last = (device.last.allocated_bytes, device.last.active_bytes, device.last.reserved_bytes)
    assert last == states[-1]
    assert sum(owner.bytes for owner in device.owners) == peak.allocated_bytes
    allocated, active, reserved = states[0 if peak.event is None else peak.event + 1]
    assert device.fragmentation.inactive_bytes == reserved - active
    assert allocated == peak.allocated_bytes


def test_a_training_step_has_its_owners():
    (device,) = memfit.explain(real("wl_medium_512_training")).devices
    by_category: dict[str, int] = {}
    for owner in device.owners:
        by_category[owner.category] = by_category.get(owner.category, 0) + owner.bytes
    # AdamW keeps two tensors for each parameter, and nothing else was alive before the step.
    parameters = device.live_before_recording_bytes - by_category["optimizer_state"]
    assert by_category["optimizer_state"] == pytest.approx(2 * parameters, rel=0.03)
    assert by_category["activation"] > device.peak.allocated_bytes / 2
    assert any(owner.module.endswith("model.py:520") for owner in device.owners)
    assert device.growth == ()


def program(*arguments: object, command: str = "explain") -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "memfit", command, *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def test_python_and_the_program_say_the_same():
    path = FIXTURES / "growing_loss.pickle"
    explanation = memfit.explain(path)
    text, document = program(path), program(path, "--format", "json")
    assert (text.returncode, document.returncode) == (1, 1)
    assert str(explanation) == text.stdout
    assert explanation.as_dict() == json.loads(document.stdout)
    assert "`total_loss += loss`" in text.stdout


def test_a_snapshot_in_memory_and_a_compressed_one(tmp_path: Path):
    path = FIXTURES / "oom_live_set.pickle"
    snapshot = pickle.loads(path.read_bytes())  # noqa: S301 - this project's own file
    compressed = tmp_path / "snapshot.pickle.gz"
    compressed.write_bytes(gzip.compress(path.read_bytes()))
    devices = memfit.explain(path).as_dict()["devices"]
    assert memfit.explain(snapshot).as_dict()["devices"] == devices
    assert memfit.explain(str(compressed)).as_dict()["devices"] == devices


def test_what_grew_between_two_snapshots():
    path = FIXTURES / "growing_loss.pickle"
    later = pickle.loads(path.read_bytes())  # noqa: S301 - this project's own file
    earlier = pickle.loads(path.read_bytes())  # noqa: S301 - this project's own file
    freed = 0
    for segment in earlier["segments"]:
        for block in segment["blocks"]:
            if any(frame["filename"] == "model.py" for frame in block["frames"]) and freed < 4:
                block["state"] = "inactive"
                freed += block["size"]
                break
    earlier["device_traces"] = [[]]
    explanation = memfit.explain(later, before=earlier, steps=2)
    (device,) = explanation.devices
    assert sum(it.bytes for it in device.growth) == freed
    assert sum(it.bytes_per_step for it in device.growth) == freed // 2
    assert memfit.explain(later, before=later).devices[0].growth == ()


def test_the_device_divides_with_its_memory():
    path = FIXTURES / "oom_other_process.pickle"
    (blind,) = memfit.explain(path).devices[0].oom
    assert blind.parts.non_torch is None
    (refusal,) = memfit.explain(path, device_memory="512MiB").devices[0].oom
    assert (refusal.cause, refusal.parts.non_torch) == ("non_torch", 280 << 20)
    assert memfit.explain(path, device_memory=512 << 20).devices[0].oom[0] == refusal


def test_what_is_no_snapshot_is_refused(tmp_path: Path):
    (tmp_path / "weights.pickle").write_bytes(pickle.dumps({"layer.weight": [1.0]}))
    with pytest.raises(memfit.SnapshotError, match=r"weights\.pickle"):
        memfit.explain(tmp_path / "weights.pickle")
    with pytest.raises(memfit.UsageError, match="cannot read"):
        memfit.explain(tmp_path / "absent.pickle")
    with pytest.raises(memfit.UsageError, match="got `int`"):
        memfit.explain(7)  # type: ignore[arg-type]
    path = FIXTURES / "streams.pickle"
    with pytest.raises(memfit.UsageError, match="steps=0"):
        memfit.explain(path, before=path, steps=0)
    with pytest.raises(memfit.UsageError, match="60%"):
        memfit.explain(path, device_memory="60%")
    with pytest.raises(memfit.BudgetError, match="lots"):
        memfit.explain(path, device_memory="lots")


def test_a_replay_is_what_the_program_says():
    path = FIXTURES / "oom_live_set.pickle"
    document = program(path, "--format", "json", command="replay")
    replayed = memfit.replay(path)
    assert replayed.as_dict() == json.loads(document.stdout)
    assert str(replayed).startswith(str(path))
    (device,) = replayed.devices
    assert [it.is_recorded for it in device.replays].count(True) == 1
    asked = memfit.replay(path, {"max_split_size_mb": 256})
    assert any("max_split_size_mb:256" in it.settings for it in asked.devices[0].replays)
    with pytest.raises(memfit.UsageError, match="max_splitt"):
        memfit.replay(path, {"max_splitt": 1})
