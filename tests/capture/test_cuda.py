"""Steps for CUDA, captured on whatever machine this is."""

from __future__ import annotations

import json

import pytest
import torch
from peaks import measured_peak, predicted_peak
from small_examples import SMALL, small_example
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from memfit import _native
from memfit.capture import capture, record, record_pair
from memfit.capture.record.recorder import Recorder
from memfit.capture.record.step import StepRunner
from memfit.capture.stage import cublas
from memfit.capture.stage.backward_engine import BackwardEngine
from memfit.errors import CaptureError
from memfit.plan.alternatives import with_alternatives
from memfit.tensors.operators import operator_of
from memfit.torch_versions import flop_formulas
from memfit.weights.absent_gpu import pretended_gpu
from memfit.workload import Workload


@pytest.mark.parametrize("name", ["gpt2", "t5", "resnet50"])
def test_the_engine_gives_torchs_gradients_bit_for_bit(name):
    workload = small_example(name)
    model = workload.model
    loss = workload.loss(model, workload.batch)
    loss.backward(retain_graph=True)
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    BackwardEngine(lambda _: None, lambda _: None).run(loss)
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[n], expected[n]) for n in expected)


def test_the_engine_runs_custom_functions_and_hooks():
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, factor, x, unused):
            ctx.factor = factor
            return x * factor, unused * 1

        @staticmethod
        def backward(ctx, gradient, zero):
            assert not zero.any()
            return None, gradient * ctx.factor, zero

    leaf = nn.Parameter(torch.randn(3))
    seen = []
    leaf.register_post_accumulate_grad_hook(seen.append)
    scaled, _ = Scale.apply(3.0, leaf * 2, torch.ones(3, requires_grad=True))
    BackwardEngine(lambda _: None, lambda _: None).run((scaled + leaf).sum())
    assert leaf.grad.tolist() == [7.0, 7.0, 7.0]
    assert len(seen) == 1


@pytest.fixture
def by_the_engine(monkeypatch):
    """Records a step on the CPU with its backward run by the engine in Python."""
    made = StepRunner.__init__

    def with_tokens_by_node(self, stage, recorder):
        made(self, stage, recorder)
        recorder.saved.file_by_node()

    def backward(self, loss):
        def started(node):
            self.recorder.running_node = node

        BackwardEngine(started, self.recorder.saved.release_node).run(loss)

    def recorded(workload):
        with monkeypatch.context() as patched:
            patched.setattr(StepRunner, "__init__", with_tokens_by_node)
            patched.setattr(StepRunner, "backward", backward)
            return record(workload, probe=False)

    return recorded


@pytest.mark.parametrize("name", ["gpt2", "resnet50", "convnext"])
def test_the_engine_takes_the_memory_torchs_takes(name, by_the_engine):
    workload = small_example(name)
    expected, found = record(workload, probe=False), by_the_engine(workload)

    # Under a dispatch mode torch adds gradients out of place, which it does not do without one.
    def names(trace):
        return [trace["strings"][op["name"]].replace("add_", "add") for op in trace["ops"]]

    assert names(found) == names(expected)
    assert predicted_peak(expected) - predicted_peak(found) in range(1 << 17)


class Scaled(nn.Module):
    """One weight for all examples."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(200, 64))

    def forward(self, batch):
        return (self.weight * batch).topk(8, -1)[0]


def test_a_gradient_lives_until_the_result_of_its_node_has_its_shape(by_the_engine):
    """The weight's gradient, 50 KiB, is summed while the gradient of the product is there."""
    workload = Workload(
        Scaled(),
        torch.randn(64, 200, 64),
        lambda model, batch: model(batch).square().mean(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    assert predicted_peak(by_the_engine(workload)) == measured_peak(workload)


@pytest.mark.parametrize("name", SMALL)
def test_whole_steps_are_captured(name):
    workload = small_example(name)
    trace = record(workload, device="cuda")
    assert trace["meta"]["device_kind"] == "cuda"
    assert trace["devices"][0] == "cuda:0"
    gradients = [a for a in trace["allocations"] if a["category"] == "gradient"]
    trained = [p for p in workload.model.parameters() if p.requires_grad]
    assert len(gradients) == len({id(p) for p in trained})
    assert {a["device"] for a in gradients} == {0}
    assert all(p.device.type == "cpu" for p in trained)


@pytest.mark.parametrize(
    ("autocast", "kernel"),
    [
        (None, "aten._scaled_dot_product_efficient_attention.default"),
        (torch.bfloat16, "aten._scaled_dot_product_flash_attention.default"),
    ],
)
def test_attention_runs_by_the_kernel_a_gpu_would_choose(autocast, kernel):
    workload = small_example("gpt2", sequence=256)
    workload.autocast = autocast
    trace = record(workload, device="cuda")
    used = [trace["strings"][op["name"]] for op in trace["ops"]]
    assert used.count(kernel) == 2
    assert used.count(kernel.replace(".default", "_backward.default")) == 2
    assert "aten._safe_softmax.default" not in used
    assert any(name.startswith("aten._foreach_") for name in used)
    assert ("bfloat16" in trace["strings"]) == (autocast is not None)
    assert not torch.is_autocast_enabled("cuda")


def test_saved_tensors_are_released_node_by_node():
    trace = record(small_example("gpt2"), device="cuda")
    first_optimizer = next(
        index for index, op in enumerate(trace["ops"]) if op["phase"] == "optimizer"
    )
    releases = {save["release"] for save in trace["saved"] if save["unpack"] is not None}
    assert max(releases) <= first_optimizer
    assert len(releases) > 10


def test_two_batch_sizes_take_the_same_ops():
    first, second = record_pair(small_example("gpt2"), device="cuda")
    assert [op["phase"] for op in first["ops"]] == [op["phase"] for op in second["ops"]]


def test_a_step_that_needs_values_is_refused():
    class Branching(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y if y.sum().item() > 0 else -y

    workload = Workload(Branching(8, 8), torch.randn(4, 8), lambda m, b: m(b).mean())
    with pytest.raises(CaptureError, match="capture it for `cpu`"):
        record(workload, device="cuda")


class Grouped(nn.Module):
    """Attention of eight heads over four heads of keys."""

    def __init__(self, *, by_columns: bool = False):
        super().__init__()
        self.inner = nn.Linear(64, 64)
        self.by_columns = by_columns

    def forward(self, x):
        query = self.inner(x).view(x.shape[0], -1, 8, 8).transpose(1, 2)
        if self.by_columns:  # a bias whose rows do not lie together, as T5's
            bias = self.inner.weight[:16, :16].t().expand(1, 8, 16, 16)
            return F.scaled_dot_product_attention(query, query, query, attn_mask=bias)
        return F.scaled_dot_product_attention(query, query[:, :4], query[:, 4:], enable_gqa=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch asks the GPU that is here")
@pytest.mark.parametrize(
    ("by_columns", "autocast", "kernel"),
    [
        (False, None, "math"),  # the memory-efficient kernel shares no heads
        (False, torch.bfloat16, "flash"),
        (True, None, "math"),
    ],
)
def test_attention_that_no_fused_kernel_takes_is_plain(by_columns, autocast, kernel):
    model = Grouped(by_columns=by_columns)
    workload = Workload(
        model, torch.randn(2, 16, 64), lambda m, b: m(b).float().mean(), autocast=autocast
    )
    trace = record(workload, device="cuda")
    assert f"attention was taken to run as {kernel} attention" in trace["meta"]["notes"]


def test_heads_that_are_shared_count_as_heads_of_their_own():
    flops = flop_formulas()[torch.ops.aten._scaled_dot_product_flash_attention]
    query, keys = torch.empty(2, 8, 16, 32), torch.empty(2, 4, 16, 32)
    whole = flops(query, query, query, out_val=None)
    assert whole == 2 * 2 * (2 * 8) * 16 * 16 * 32
    assert flops(query, keys, keys, out_val=None) == whole


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_what_asks_the_gpu_itself_is_refused_where_there_is_none():
    model = nn.LSTM(8, 8)
    workload = Workload(model, torch.randn(4, 2, 8), lambda m, b: m(b)[0].mean())
    with pytest.raises(CaptureError, match="capture it where the GPU is, or for `cpu`"):
        record(workload, device="cuda")


def test_the_bytes_of_a_storage_are_not_written_out():
    class Viewing(nn.Linear):
        def forward(self, x):
            whole = self.weight.detach().untyped_storage()
            flat = torch.empty(0).set_(whole, 0, (self.weight.numel(),))
            y = super().forward(x) * flat.sum()
            return y if y.sum().item() != 0 else -y  # which asks for a real step

    model = Viewing(64, 64)
    trace = record(Workload(model, torch.randn(4, 64), lambda m, b: m(b).mean()))
    (viewed,) = (op for op in trace["ops"] if "aten.set_" in trace["strings"][op["name"]])
    assert trace["strings"][viewed["arguments"]] == "storage_offset=0, size=[4096]"


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(cublas, "is_pretended", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.delenv("CUBLASLT_WORKSPACE_SIZE", raising=False)
    return monkeypatch


def test_workspaces_of_cublas_are_those_of_the_threads_that_multiply(hopper):
    # As measured on an H200: Llama, which has no biases, 64 MiB; GPT-2, 65 MiB; a U-Net none.
    of = cublas.workspace_bytes
    assert of(["aten.mm.default"], training=True) == 64 << 20
    assert of(["aten.mm.default", "aten.addmm.default"], training=True) == 65 << 20
    assert of(["aten.bmm.default"], training=False) == 32 << 20
    assert of(["aten.convolution.default"], training=True) == 0
    hopper.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert of(["aten.mm.default"], training=False) == (8 << 20) + (128 << 10)
    hopper.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")
    assert of(["aten.mm.default"], training=False) == (8 << 20) + (128 << 10)
    hopper.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert of(["aten.mm.default"], training=False) == 128 << 10


def test_workspaces_of_cublas_are_in_the_peak(hopper):
    workload = small_example("gpt2")
    with_workspaces = predicted_peak(record(workload, device="cuda", probe=False))
    hopper.setattr(cublas, "is_pretended", lambda: True)
    assert with_workspaces - predicted_peak(record(workload, device="cuda", probe=False)) == (
        65 << 20
    )


def test_an_op_with_random_numbers_of_its_own_is_not_run_again():
    # Its dropout draws from a state on the GPU: run again, it would give other numbers.
    assert not operator_of(torch.ops.aten._cudnn_rnn.default).repeatable
    assert operator_of(torch.ops.aten.native_dropout.default).repeatable


def test_a_real_step_may_have_tensors_on_any_gpu():
    """Scripts are recorded as they run; fakes stand here for a GPU's tensors."""
    recorder = Recorder(nn.Linear(2, 2), None)
    with FakeTensorMode(), pretended_gpu(), recorder:
        torch.empty(3, device="cuda").mul(2)
        torch.empty(3, device="cuda:1")
    assert len(recorder.ops) == 3


def test_slices_that_draw_are_recorded_for_a_gpu_that_is_not_there():
    """Their generator has no state where there is no GPU."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide, self.back = nn.Linear(64, 2048), nn.Linear(2048, 64)

        def forward(self, x):
            return F.dropout(self.back(F.gelu(self.wide(x))), 0.1, self.training)

    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(2)))
    load = Workload(model, torch.randn(8, 64, 64), lambda model, x: model(x).square().mean())
    trace = _native.Trace.decode(capture(load, device="cuda"))
    ways = [way for way in trace.ways() if "chunk" in way]
    assert ways
    found = json.loads(with_alternatives(load, trace, ways, device="cuda").json())["alternatives"]
    assert len(found["steps"]) == len(ways), found
