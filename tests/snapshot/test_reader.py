"""The reader against CPython's `pickle.load`, event by event."""

import copy
import gzip
import io
import pickle
from pathlib import Path

import pytest
from pickled import by_pickle, by_reader, document
from synthetic import Shape, snapshot, write

from memfit import SnapshotError
from memfit._native import Snapshot

REAL = Path(__file__).resolve().parents[3] / "shared" / "data" / "snapshots"
PUBLISHED = Path(__file__).resolve().parents[2] / "crates/memfit-engine/tests/data/snapshots"
FILES = (
    "sil_forward_bf16_128",
    "sil_mem_snapshot",
    "wl_medium_128_inference",
    "wl_medium_512_training",
)


def real(name):
    path = REAL / f"{name}.pickle"
    if not path.exists():
        pytest.skip(f"no recorded snapshots at {REAL}")
    return path.read_bytes()


@pytest.mark.parametrize("name", FILES)
def test_a_real_snapshot_reads_as_pickle_reads_it(name):
    data = real(name)
    assert by_reader(data) == by_pickle(data)
    assert document(data)["problems"] == []


@pytest.mark.parametrize("path", sorted(PUBLISHED.glob("*.pickle")), ids=lambda path: path.stem)
def test_a_snapshot_of_the_real_allocator_reads_as_pickle_reads_it(path):
    data = path.read_bytes()
    assert by_reader(data) == by_pickle(data)
    assert document(data)["problems"] == []


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_reads_alike(protocol):
    data = pickle.dumps(snapshot(Shape(events=3500, kept_per_step=1, skipped=100)), protocol)
    assert by_reader(data) == by_pickle(data)
    assert document(data)["problems"] == []


def test_the_large_writer_writes_what_pickle_would(tmp_path):
    shape = Shape(events=3000, kept_per_step=2, skipped=77)
    write(shape, tmp_path / "snapshot.pickle")
    data = (tmp_path / "snapshot.pickle").read_bytes()
    assert pickle.loads(data) == snapshot(shape)  # noqa: S301 - made just now
    assert by_reader(data) == by_pickle(data)
    assert by_reader(gzip.compress(data)) == by_pickle(data)


class AllAtOnce(pickle._Pickler):
    """Writes the whole of a list behind one mark, as torch's own pickler does."""

    _BATCHSIZE = 10**9


def test_lists_may_be_written_all_at_once():
    whole = snapshot(Shape(events=5000, kept_per_step=1))
    file = io.BytesIO()
    AllAtOnce(file, 2).dump(whole)
    assert by_reader(file.getvalue()) == by_pickle(file.getvalue())


def test_a_cut_or_damaged_gzip_file_is_said_to_be_so():
    data = gzip.compress(pickle.dumps(snapshot(Shape(events=5000))), mtime=0)
    with pytest.raises(SnapshotError, match="cut off: it ends at byte"):
        Snapshot.decode(data[: len(data) // 2])
    middle = len(data) // 2
    damaged = data[:middle] + bytes(200) + data[middle + 200 :]
    with pytest.raises(SnapshotError, match=r"cannot read on|damaged|cut off|no such"):
        Snapshot.decode(damaged)
    with pytest.raises(SnapshotError, match="the file is empty"):
        Snapshot.decode(gzip.compress(b""))
    with pytest.raises(SnapshotError, match="inside a gzip file"):
        Snapshot.decode(gzip.compress(data))


def old(whole):
    """As torch 2.0 wrote it: no addresses of blocks, no times, `history` instead of frames."""
    for segment in whole["segments"]:
        del segment["segment_pool_id"], segment["is_expandable"], segment["frames"]
        for block in segment["blocks"]:
            del block["address"]
            frames, size = block.pop("frames"), block.pop("requested_size")
            if block["state"] != "inactive":
                block["history"] = [{"addr": 1, "real_size": size, "frames": frames}]
    for event in whole["device_traces"][0]:
        del event["time_us"]
    del whole["allocator_settings"], whole["external_annotations"]


def pending(whole):
    for block in whole["segments"][0]["blocks"][:3]:
        block["state"] = "active_pending_free"


def newest(whole):
    """What 2.15 adds, several devices and pools, and keys nobody knows."""
    whole["host_segments"] = copy.deepcopy(whole["segments"])
    whole["host_traces"] = copy.deepcopy(whole["device_traces"])
    whole["unknown"] = {"nested": [{"a": (1, 2, 3)}, {4, 5}, b"bytes", 1 << 200]}
    whole["segments"][0]["segment_pool_id"] = (3, 9)
    whole["segments"][0]["is_expandable"] = True
    for number, event in enumerate(whole["device_traces"][0]):
        event["pool_id"] = (0, number % 3)
        event["compile_context"] = "N/A" if number % 5 else f"0/{number}"
        event["user_metadata"] = "" if number % 7 else "my batch"
        event["internal_metadata"] = "mallocWithAddress"
    event["category"] = "ACTIVATION"
    at = event["addr"]
    other = [
        {"action": "segment_map", "addr": at, "size": 2 << 20, "stream": 5, "time_us": 1},
        {"action": "oom", "device_free": 1 << 33, "size": 1 << 34, "stream": 0, "time_us": 2},
        {"action": "snapshot", "addr": 0, "size": 0, "stream": 0, "time_us": 3, "frames": []},
        {"action": "annotate", "addr": at, "size": 0, "stream": -1 & (2**64 - 1), "time_us": 4},
        {"action": "segment_unmap", "addr": at, "size": 2 << 20, "stream": 0, "frames": None},
    ]
    whole["device_traces"] += [[], other]


@pytest.mark.parametrize("change", [old, pending, newest])
@pytest.mark.parametrize("traces_first", [False, True])
def test_formats_of_all_versions(change, traces_first):
    whole = snapshot(Shape(events=900, kept_per_step=2))
    change(whole)
    if traces_first:
        whole = dict(reversed(whole.items()))
    data = pickle.dumps(whole)
    assert by_reader(data) == by_pickle(data)
    assert document(data)["problems"] == []


def test_settings_and_annotations_come_along():
    whole = snapshot(Shape(events=10))
    whole["external_annotations"] = [
        {"stage": "START", "name": "Optimizer.step#AdamW.step", "device": 0, "time_us": 5},
        {"stage": "END", "name": "Optimizer.step#AdamW.step", "device": 0, "time_us": 9},
    ]
    columns = document(pickle.dumps(whole))
    notes = [
        (columns["texts"][a["name"]], a["is_start"], a["time_us"]) for a in columns["annotations"]
    ]
    assert notes == [
        ("Optimizer.step#AdamW.step", True, 5),
        ("Optimizer.step#AdamW.step", False, 9),
    ]
    settings = dict(columns["settings"])
    assert settings["max_split_size"] == "-1"
    assert settings["garbage_collection_threshold"] == "0.0"
    assert settings["roundup_power2_divisions"].startswith("[1:0,2:0,4:0")


def test_segments_alone_are_a_snapshot():
    segments = snapshot(Shape(events=500, kept_per_step=3))["segments"]
    data = pickle.dumps(segments)
    assert by_reader(data) == by_pickle(pickle.dumps({"segments": segments}))


class Command:
    def __reduce__(self):
        return print, ("executed",)


def test_nothing_is_executed(capfd):
    with pytest.raises(SnapshotError, match=r"`STACK_GLOBAL` of `builtins\.print` at byte"):
        Snapshot.decode(pickle.dumps({"segments": [Command()], "device_traces": []}))
    assert capfd.readouterr().out == ""


def test_checkpoints_are_recognised(tmp_path):
    import torch

    state = torch.nn.Linear(2, 2).state_dict()
    for number, new in enumerate((True, False)):
        path = tmp_path / f"{number}.pt"
        torch.save(state, path, _use_new_zipfile_serialization=new)
        with pytest.raises(SnapshotError, match="model checkpoint"):
            Snapshot.decode(path.read_bytes())
    with pytest.raises(SnapshotError, match=r"model checkpoint.*OrderedDict"):
        Snapshot.decode(pickle.dumps(state, 2))
    with pytest.raises(SnapshotError, match=r"model checkpoint.*torch\._utils"):
        Snapshot.decode(pickle.dumps(dict(state), 4))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([1, 2], "a list of 2 things"),
        ({"model": 1, "epoch": 2}, "a dict with `model`, `epoch`"),
        (7, "an int"),
        ({}, "an empty dict"),
    ],
)
def test_other_pickles_are_named(value, said):
    with pytest.raises(SnapshotError, match=said):
        Snapshot.decode(pickle.dumps(value))


def test_contradictions_are_listed_with_their_index_and_the_rest_is_read():
    whole = snapshot(Shape(events=300))
    trace = whole["device_traces"][0]
    trace[5]["size"] = -4
    trace[6]["action"] = "teleport"
    del trace[7]["addr"]
    trace[8] = "not a dict"
    trace.insert(20, dict(trace[19]))
    columns = document(pickle.dumps(whole))
    problems = {p["event"]: p["what"] for p in columns["problems"]}
    assert problems[5] == "its `size` is -4, not a count of bytes"
    assert problems[6] == "its `action` is `teleport`, not a known action"
    assert problems[7] == "it has no `addr`"
    assert problems[8] == "it is no dict with an `action`"
    assert problems[20] == "allocates what event 19 allocated"
    assert len(columns["devices"][0]["events"]["actions"]) == 301


def test_problems_are_counted_beyond_one_hundred():
    whole = snapshot(Shape(events=300))
    for event in whole["device_traces"][0]:
        event["size"] = "large"
    problems = document(pickle.dumps(whole))["problems"]
    assert len(problems) == 101
    assert problems[-1]["what"] == "200 more problems are not listed"


def test_files_are_read_without_holding_them(tmp_path):
    data = pickle.dumps(snapshot(Shape(events=700)))
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(data)
    assert Snapshot.read(path).json() == Snapshot.decode(data).json()
    with pytest.raises(FileNotFoundError):
        Snapshot.read(tmp_path / "missing.pickle")
