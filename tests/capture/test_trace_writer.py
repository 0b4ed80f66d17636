"""The document of a trace: the engine reads it, and takes its own word for what is left out."""

from __future__ import annotations

import json

import pytest
import torch

from memfit import _native
from memfit.capture.trace_writer import Meta, TraceWriter, with_held

META = Meta(
    target="by hand",
    torch_version="2.15.0",
    device_kind="cpu",
    optimizer="",
    batch=0,
    training=True,
    captured="fake",
    notes=[],
)


def written():
    """One op, in one module, that makes what its backward reads."""
    writer = TraceWriter()
    facts = {"flops": 1, "moved_bytes": 64, "view": False, "replayable": True, "shape_only": False}
    writer.op("aten.exp.default", "forward", module="m", node=0, reads=[0], outputs=[1], **facts)
    writer.op("aten.exp.default", "backward", module="m", node=0, reads=[1], outputs=[2], **facts)
    host, device = writer.device("cpu"), writer.device("cuda:0")
    for size, producer, natural in ((32, None, [[0, 2]]), (64, 0, [[0, 1]]), (64, 1, [[1, 2]])):
        writer.allocation(
            size,
            device=host if producer is None else device,
            category="input" if producer is None else "activation",
            producer=producer,
            natural=natural,
        )
    for allocation in range(3):
        writer.value(allocation, shape=(8,), stride=(1,), dtype=torch.float64)
    writer.saved(1, node=0, pack=1, unpack=1, release=2)
    writer.region("m", "Exp", call=0, start=0, end=1)
    writer.update(0, 2, ready=2, temporary_bytes=0, moved_bytes=96, state=())
    return writer


def read(trace):
    return json.loads(_native.Trace.from_json(json.dumps(trace).encode()).json())


def test_the_engine_reads_every_field_that_is_written():
    trace = written().trace(META)
    again = read(trace)
    for rows in ("allocations", "values", "ops", "saved", "regions", "updates"):
        for row, known in zip(trace[rows], again[rows], strict=True):
            told = {name: value for name, value in row.items() if value or name in known}
            assert {name: known[name] for name in told} == told
    assert again["meta"].items() >= META.items()


def test_a_string_and_a_device_are_written_once():
    trace = written().trace(META)
    assert trace["strings"] == ["", "aten.exp.default", "m", "float64", "Exp"]
    assert [op["module"] for op in trace["ops"]] == [2, 2]
    assert trace["devices"] == ["cpu", "cuda:0"]
    assert [allocation["device"] for allocation in trace["allocations"]] == [0, 1, 1]


def test_what_a_source_cannot_know_is_the_engines_word():
    assert "before memfit knew" in read(written().trace(META))["meta"]["per_parameter_refusal"]
    known = Meta(**META, per_parameter_refusal=None)
    assert read(written().trace(known))["meta"]["per_parameter_refusal"] is None


@pytest.mark.parametrize("end", [1, 2])
def test_memory_that_is_held_is_an_allocation_that_no_op_made(end):
    trace = written().trace(META)
    before = json.dumps(trace)
    more = with_held(trace, "elsewhere", [(1000, end)])
    assert json.dumps(trace) == before
    held = read(more)["allocations"][-1]
    assert more["strings"][held["name"]] == "elsewhere"
    assert (held["bytes"], held["producer"], held["natural"]) == (1000, None, [[0, end]])
