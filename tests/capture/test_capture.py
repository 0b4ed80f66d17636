"""What the engine is handed: two batch sizes, a valid trace, and complete descriptions."""

from __future__ import annotations

import json
import time

import pytest
import torch
from small_examples import SMALL, small_example
from threads import in_threads
from torch import nn

from memfit.capture import capture, record, record_pair
from memfit.capture.recording import second_batch_size
from memfit.capture.stage.stage import batch_entries, resize_batch
from memfit.errors import CaptureError
from memfit.workload import Workload, batch_size, slice_batch


@pytest.mark.parametrize("name", SMALL)
def test_two_batch_sizes_take_the_same_ops_and_allocations(name):
    first, second = record_pair(small_example(name), probe=False)
    assert second["meta"]["batch"] == 4
    for trace in (first, second):
        assert trace["meta"]["batch"] in {2, 4}
    assert [first["strings"][op["name"]] for op in first["ops"]] == [
        second["strings"][op["name"]] for op in second["ops"]
    ]
    assert len(first["allocations"]) == len(second["allocations"])


@pytest.mark.parametrize("name", ["gpt2", "resnet50"])
def test_the_engine_accepts_the_trace_and_finds_the_law(name):
    native = pytest.importorskip("memfit._native")
    trace = json.loads(native.Trace.decode(capture(small_example(name), target=name)).json())
    assert trace["meta"]["target"] == name
    assert all(allocation["law"] is not None for allocation in trace["allocations"])


def test_same_workload_same_trace():
    workload = small_example("bert")
    assert record(workload, probe=False) == record(workload, probe=False)


def test_ops_say_where_they_come_from():
    trace = record(small_example("gpt2"), probe=False)
    strings = trace["strings"]
    by_name = {}
    for op in trace["ops"]:
        by_name.setdefault((op["phase"], strings[op["name"]]), []).append(op)
    layer_norm = by_name["forward", "aten.native_layer_norm.default"][0]
    assert strings[layer_norm["module"]] == "transformer.h.0.ln_1"
    source, _, line = strings[layer_norm["source"]].rpartition(":")
    assert source == "transformers/models/gpt2/modeling_gpt2.py"
    assert line.isdigit()
    assert "normalized_shape=[64]" in strings[layer_norm["arguments"]]
    # The backward of the last one made runs first, and belongs to the same node and module.
    last = by_name["forward", "aten.native_layer_norm.default"][-1]
    backward = by_name["backward", "aten.native_layer_norm_backward.default"][0]
    assert backward["node"] == last["node"]
    assert strings[backward["module"]] == strings[last["module"]] == "transformer.ln_f"
    assert backward["source"] == last["source"]
    matmul = by_name["forward", "aten.addmm.default"][0]
    assert matmul["flops"] == 2 * 64 * 64 * 192
    dropout = by_name["forward", "aten.bernoulli_.float"][0]
    assert dropout["random"]
    assert dropout["writes"]
    view = by_name["forward", "aten.view.default"][0]
    assert view["view"]
    assert view["moved_bytes"] == 0


def test_regions_nest_and_cover_the_forward():
    trace = record(small_example("gpt2"), probe=False)
    strings = trace["strings"]
    forward = sum(op["phase"] == "forward" for op in trace["ops"])
    root = trace["regions"][0]
    assert (strings[root["module"]], root["start"], root["end"]) == ("", 0, forward)
    assert strings[root["class"]] == "GPT2LMHeadModel"
    stack = []
    for region in trace["regions"]:
        while stack and region["start"] >= stack[-1]["end"] > stack[-1]["start"]:
            stack.pop()
        assert not stack or region["end"] <= stack[-1]["end"]
        if region["end"] > region["start"]:
            stack.append(region)


def test_categories_and_names():
    workload = small_example("bert")
    trace = record(workload, probe=False)
    by_category = {}
    for allocation in trace["allocations"]:
        by_category.setdefault(allocation["category"], []).append(allocation)
    names = {trace["strings"][a["name"]] for a in by_category["input"]}
    assert names == {"input_ids", "attention_mask", "labels"}
    assert len(by_category["optimizer_state"]) == 3 * len(by_category["parameter"])
    assert by_category["activation"]
    assert by_category["temporary"]
    assert by_category["module_buffer"]


def test_second_batch_sizes():
    assert [second_batch_size(b) for b in (1, 2, 3, 4, 5, 8, 97)] == [2, 4, 2, 2, 2, 4, 48]


def test_batches_are_resized_and_sliced_along_their_dimension():
    shared = torch.arange(6).reshape(3, 2)
    batch = {"x": shared, "y": [shared, torch.ones(7)], "name": "kept", "n": 3}
    assert batch_size(batch) == 3
    assert [name for name, _ in batch_entries(batch)] == ["x", "y.0", "y.1"]
    resized = resize_batch(batch, 3, 5, 0)
    assert resized["x"].tolist() == [[0, 1], [2, 3], [4, 5], [0, 1], [2, 3]]
    assert resized["x"] is resized["y"][0]
    assert resized["y"][1] is batch["y"][1]
    assert resized["x"].untyped_storage().nbytes() == 5 * 2 * 8
    sliced = slice_batch(batch, 1, 3, 3)
    assert sliced["x"].tolist() == [[2, 3], [4, 5]]
    assert sliced["name"] == "kept"
    assert batch_size(torch.ones(2, 5), 1) == 5
    assert batch_size({"n": 3}) == 0


def test_capture_takes_time_in_proportion_to_depth():
    """Against a shallower model in the same minute: seconds would judge the machine."""

    def captured(depth):
        layers = [nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()) for _ in range(depth)]
        workload = Workload(
            model=nn.Sequential(*layers),
            batch=torch.randn(4, 8),
            loss=lambda model, batch: model(batch).mean(),
            optimizer=torch.optim.AdamW,
        )
        started = time.process_time()
        first, _ = record_pair(workload, probe=False)
        return time.process_time() - started, len(first["ops"])

    captured(2)  # what is made only once
    shallow, few = captured(20)
    deep, many = captured(100)
    assert many > 5_000
    # Where each op cost a search through all, it would be five times as much.
    assert deep / many < 2 * shallow / few, (shallow, deep)


class InThreads(nn.Module):
    """Its parts run in threads of their own; what they raise may get lost there."""

    def __init__(self, keeps_errors):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.keeps_errors = keeps_errors

    def forward(self, x):
        made = in_threads(2, lambda: self.parts[1](self.parts[0](x)))
        return sum(x if self.keeps_errors and isinstance(m, Exception) else m for m in made)


@pytest.mark.parametrize("keeps_errors", [False, True])
@pytest.mark.parametrize("loss", [lambda model, x: model(x).mean(), None])
def test_modules_called_in_threads_are_refused_by_name(keeps_errors, loss):
    model = InThreads(keeps_errors)
    with pytest.raises(CaptureError, match=r"forward calls `parts\.0` in another thread"):
        record_pair(Workload(model, torch.randn(2, 4), loss), probe=False)
