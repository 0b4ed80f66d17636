"""Files of weights: what is read from them, and what is said of those that are none."""

from __future__ import annotations

import json

import pytest
import torch

from memfit.errors import CheckpointError
from memfit.track import cpu
from memfit.weights.checkpoint import open_checkpoint

safetensors = pytest.importorskip("safetensors.torch", reason="needs safetensors")

TENSORS = {"a": torch.arange(12.0).view(3, 4), "b.c": torch.ones(5, dtype=torch.bfloat16)}


@pytest.fixture
def files(tmp_path):
    """The same tensors in each of the forms."""
    alone = tmp_path / "alone"
    sharded = tmp_path / "sharded"
    for folder in (alone, sharded):
        folder.mkdir()
    safetensors.save_file(TENSORS, alone / "model.safetensors")
    for name, tensor in TENSORS.items():
        safetensors.save_file({name: tensor}, sharded / f"{name}.safetensors")
    index = {"metadata": {}, "weight_map": {name: f"{name}.safetensors" for name in TENSORS}}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    torch.save(TENSORS, tmp_path / "weights.pt")
    return {
        "file": alone / "model.safetensors",
        "folder": alone,
        "index": sharded / "model.safetensors.index.json",
        "folder of several": sharded,
        "torch": tmp_path / "weights.pt",
    }


@pytest.mark.parametrize("form", ["file", "folder", "index", "folder of several", "torch"])
def test_tensors_are_read_where_they_lie(files, form):
    assert cpu.start() is None
    found = open_checkpoint(files[form])
    assert found.shapes == {"a": (3, 4), "b.c": (5,)}
    window = cpu.Window()
    read = {name: found.tensor(name) for name in TENSORS}
    seen = window.close()
    assert seen.allocations == 0
    assert all(torch.equal(read[name], tensor) for name, tensor in TENSORS.items())
    assert all(read[name].dtype == tensor.dtype for name, tensor in TENSORS.items())


def test_what_is_no_file_of_weights_is_refused(files, tmp_path):
    whole = files["file"].read_bytes()
    length = int.from_bytes(whole[:8], "little")
    contents = {
        "empty": (b"", "no file of weights"),
        "a text": (b"hello, this is a text", "no file of weights"),
        "an old pickle": (b"\x80\x02}q\x00.", "no file of weights"),
        "a header alone": (whole[: 8 + length], "no file of safetensors, or a damaged one"),
        "half of it": (whole[:-8], "no file of safetensors, or a damaged one"),
        "another header": (whole[:8] + b"{" * length, "no file of safetensors, or a damaged one"),
        "a zip of nothing": (b"PK\x03\x04" + bytes(40), "cannot be read by `torch.load"),
        "json": (b'{"tensors": 1}', "no index of safetensors"),
        "another json": (b'{"weight_map": {"a": 3}}', "no index of safetensors"),
        "broken json": (b'{"weight_map": ', "no index of safetensors"),
        "an index of nothing": (b'{"weight_map": {"a": "nowhere"}}', "nowhere` cannot be read"),
    }
    for name, (content, message) in contents.items():
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=message) as caught:
            open_checkpoint(path)
        assert "\n" not in str(caught.value), name
    with pytest.raises(CheckpointError, match="No such file"):
        open_checkpoint(tmp_path / "missing")


@pytest.mark.parametrize("content", [[TENSORS["a"]], {"model": TENSORS}, {}, {"a": 1}])
def test_what_holds_no_tensors_by_name_is_refused(tmp_path, content):
    torch.save(content, tmp_path / "weights.pt")
    with pytest.raises(CheckpointError, match="holds no tensors by name"):
        open_checkpoint(tmp_path / "weights.pt")


def test_an_index_that_names_the_wrong_file_is_refused(files, tmp_path):
    index = {"weight_map": {"a": "b.c.safetensors"}}
    path = files["index"].parent / "other.json"
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"says that `a` is in `b\.c\.safetensors`"):
        open_checkpoint(path)
