"""What differs between versions of torch is found on this one, and refused where it lacks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import memfit
from memfit import torch_versions
from memfit.run.compiled.joint import _is_random


@pytest.mark.parametrize("name", sorted(torch_versions.NAMES))
def test_a_function_that_moved_is_found(name: str):
    assert callable(torch_versions.function(name))


def test_sizes_have_hints():
    assert torch_versions.size_hint(7, fallback=1) == 7


def test_dense_tensors_are_told_from_others():
    whole = torch.zeros(4, 6)
    assert torch_versions.is_dense(whole.t())
    assert not torch_versions.is_dense(whole[:, :3])


def test_attention_draws_only_with_dropout():
    """As torch's own partitioner has it, which asks so from 2.14 on."""

    def attend(q: torch.Tensor) -> torch.Tensor:
        half = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(q, q, q, 0.5)[0]
        none = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(q, q, q)[0]
        return torch.ops.aten.bernoulli.p(half, 0.5) + none

    nodes = [n for n in fx.symbolic_trace(attend).graph.nodes if n.op == "call_function"]
    ops = [n for n in nodes if isinstance(n.target, torch._ops.OpOverload)]
    assert [_is_random(node) for node in ops] == [
        torch.Tag.nondeterministic_seeded in ops[0].target.tags,
        False,
        True,
    ]


def test_attention_on_a_cpu_has_its_operations_counted():
    formulas = torch_versions.flop_formulas()
    aten = torch.ops.aten
    q = torch.zeros(2, 4, 8, 16)
    forward = formulas[aten._scaled_dot_product_flash_attention_for_cpu](q, q, q, out_val=q)
    assert forward == 2 * 2 * (2 * 4 * 8 * 8 * 16)
    backward = formulas[aten._scaled_dot_product_flash_attention_for_cpu_backward]
    assert backward(q, q, q, q, out_val=q) > forward


def fake_torch(folder: Path, version: str) -> Path:
    """A folder with a package that calls itself torch."""
    package = folder / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('not to be imported')\n")
    (package / "version.py").write_text(f"__version__ = '{version}'\n")
    return folder


@pytest.fixture
def _not_imported(monkeypatch: pytest.MonkeyPatch):
    """As in a process that has not imported torch yet, with nothing on the path."""
    torch_versions._own_name()  # read from the path, once
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(sys, "path", [])


@pytest.mark.usefixtures("_not_imported")
@pytest.mark.parametrize(
    ("version", "refused"),
    [
        ("2.8.0", True),
        ("2.9.1+cpu", True),
        ("1.13.1", True),
        ("nonsense", True),
        ("2.10.0", False),
        ("2.11.0+cu130", False),
        ("2.15.0.dev20261101", False),
        ("2.16.0.dev20261120+cu132", False),
        ("3.0.0", False),
    ],
)
def test_versions_outside_the_range_are_refused_in_one_sentence(
    tmp_path: Path, version: str, refused
):
    sys.path.append(str(fake_torch(tmp_path, version)))
    refusal = torch_versions.refusal()
    assert (refusal is not None) == refused
    if refusal is not None:
        assert refusal == f"memfit 0.2 supports torch 2.10 to 2.15; this is {version}"


@pytest.mark.usefixtures("_not_imported")
def test_without_torch_it_says_to_install_it():
    assert torch_versions.refusal() == (
        "memfit needs torch, which is not installed: `pip install torch`"
    )
    assert torch_versions.remarks() == []


@pytest.mark.usefixtures("_not_imported")
def test_a_newer_torch_is_remarked_on(tmp_path: Path):
    sys.path.append(str(fake_torch(tmp_path, "2.16.0.dev20261120")))
    assert torch_versions.remarks() == [
        "torch 2.16.0.dev20261120 is newer than 2.15, the last that memfit 0.2 was tested with"
    ]


@pytest.mark.usefixtures("_not_imported")
def test_two_torches_on_the_path_are_both_named(tmp_path: Path):
    first, second = fake_torch(tmp_path / "a", "2.12.1"), fake_torch(tmp_path / "b", "2.8.0")
    sys.path.extend([str(first), str(second), str(first)])
    assert torch_versions.refusal() is None
    (remark,) = torch_versions.remarks()
    assert remark == (
        f"two torches are on the path: 2.12.1 in `{first / 'torch'}` is used, "
        f"2.8.0 in `{second / 'torch'}` is not"
    )


def test_the_torch_that_is_imported_is_the_one_that_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "path", [str(fake_torch(tmp_path, "2.8.0")), *sys.path])
    assert torch_versions.installed()[0].version == torch.__version__
    assert torch_versions.refusal() is None


@pytest.fixture
def _before_2_12(monkeypatch: pytest.MonkeyPatch):
    """A torch that cannot tell a stale view of an emptied storage."""
    monkeypatch.delattr(torch._C, "_clear_storage_data_ptr_access_error_msg", raising=False)


def workload() -> memfit.Workload:
    torch.manual_seed(0)
    return memfit.Workload(
        model=nn.Sequential(*(nn.Linear(512, 512) for _ in range(6))),
        batch=torch.randn(4, 512),
        loss=lambda model, batch: F.mse_loss(model(batch), batch),
        optimizer=torch.optim.SGD,
    )


@pytest.mark.usefixtures("_before_2_12")
def test_where_parameters_cannot_be_offloaded_the_plan_says_which_torch_can(tmp_path: Path):
    plan = memfit.plan(workload(), budget="9MiB", offload=tmp_path)
    assert {r["kind"]: r["reason"] for r in plan.as_dict()["refusals"]}["offload_parameters"] == (
        f"it needs torch 2.12 or later; this is {torch.__version__}"
    )
    assert "offload_parameters" not in {action["kind"] for action in plan.as_dict()["actions"]}


@pytest.mark.offloads_parameters
def test_a_plan_of_a_newer_torch_is_refused_before_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    plan = memfit.plan(workload(), budget="5MiB", offload=tmp_path)
    assert "offload_parameters" in {action["kind"] for action in plan.as_dict()["actions"]}
    monkeypatch.delattr(torch._C, "_clear_storage_data_ptr_access_error_msg")
    with pytest.raises(memfit.UsageError, match=r"offloads parameters: it needs torch 2\.12"):
        memfit.Fitted(workload(), plan.as_dict())
