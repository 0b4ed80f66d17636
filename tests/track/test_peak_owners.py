"""What was live at the peak, wherever it lies, with categories and owners."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from forks import FORKS

from memfit.track.look import OF_UPDATE

HEAD = """
    import torch
    from torch import nn
    from memfit.track import looks
    looks.SHARE = 1  # there is nearly always time for a look, however loaded the machine is
    torch.manual_seed(0)
"""

SCRIPTS = {
    "evaluation": """
        net = nn.Sequential(nn.Embedding(2000, 16), nn.Linear(16, 2000))
        predictions = None
        with torch.no_grad():
            for _ in range(12):
                logits = net(torch.randint(0, 2000, (4, 32)))
                predictions = logits if predictions is None else torch.cat((predictions, logits))
    """,
    "collected": """
        def collect():
            net = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)).eval()
            outs = []
            for _ in range(12):
                outs.append(net(torch.randn(1024, 256)))
        collect()
    """,
    "closures": """
        looks.SHARE, looks.EARLY_SECONDS = 1e9, 0  # there is time for the first few alone
        net = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(16)])
        optimizer = torch.optim.LBFGS(net.parameters(), max_iter=6)
        batch = torch.randn(4096, 64)
        def closure():
            optimizer.zero_grad()
            loss = net(batch).square().mean()
            loss.backward()
            return loss
        optimizer.step(closure)
    """,
    "history": """
        net = nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512))
        optimizer = torch.optim.LBFGS(net.parameters(), max_iter=24, tolerance_change=0)
        batch = torch.randn(16, 512)
        def closure():
            optimizer.zero_grad()
            loss = (net(batch) - batch).square().mean()
            loss.backward()
            return loss
        optimizer.step(closure)
    """,
    "forward": """
        net = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(24)])
        out = net(torch.randn(1024, 256))
        print(float(out.square().sum()))
    """,
    "validation": """
        def validate(net, batches):
            return sum(net(batch).square().mean() for batch in batches)  # with gradients on
        net = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(6)])
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(3):
            total = validate(net, [torch.randn(1024, 256) for _ in range(4)])
            loss = net(torch.randn(1024, 256)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            del total
    """,
    "attacked": """
        net = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8)])
        x = torch.randn(2048, 256)
        for _ in range(6):
            near = (x + torch.randn_like(x)).requires_grad_()
            gap = (net(near) - net(x)).square().mean()  # the second half needs no gradients
            near = near + torch.autograd.grad(gap, [near])[0]
    """,
    "validated": """
        def validate(net):
            total = 0
            for _ in range(12):
                total = total + net(torch.randn(2048, 256)).square().mean()  # with gradients on
            return float(total)
        net = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(4)])
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(3):
            for _ in range(3):
                total = net(torch.randn(2048, 256)).square().mean()
                total.backward()
                optimizer.step()
                optimizer.zero_grad()
            validate(net)
    """,
    "decoding": """
        def decode():
            net = nn.Sequential(*[nn.Linear(512, 512) for _ in range(12)])
            x = torch.randn(4, 512)
            with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
                for _ in range(20):
                    x = net(x).float()
        decode()
    """,
    "between": """
        import copy
        def main():
            net = nn.Linear(1024, 1024, bias=False)
            ema = copy.deepcopy(net).requires_grad_(False)
            optimizer = torch.optim.SGD(net.parameters(), 0.1)
            for _ in range(3):
                optimizer.zero_grad()
                net(torch.randn(8, 1024)).square().mean().backward()
                optimizer.step()
            snapshot = torch.ones(16 << 18)
        main()
    """,
    "training": """
        def main():
            net = nn.Sequential(*[nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(6)])
            optimizer = torch.optim.AdamW(net.parameters())
            for _ in range(6):
                loss = net(torch.randn(4096, 128)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        main()
    """,
    "leaves": """
        def weights():
            return [torch.randn(512, 512, requires_grad=True) for _ in range(4)]
        optimizer = torch.optim.Adam(weights())
        for _ in range(4):
            x = torch.randn(2048, 512)
            for weight in optimizer.param_groups[0]["params"]:
                x = (x @ weight).tanh()
            x.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    """,
    "at_once": """
        net = nn.Sequential(*[nn.Linear(512, 512) for _ in range(12)])
        optimizer = torch.optim.AdamW(net.parameters(), foreach=True)
        for _ in range(3):
            net(torch.randn(16, 512)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    """,
    "retained": """
        layers = nn.ModuleList(nn.Sequential(nn.Linear(128, 512), nn.GELU()) for _ in range(4))
        optimizer = torch.optim.SGD(layers.parameters(), 0.1)
        x = torch.randn(1024, 128)
        for _ in range(4):
            outs = [layer(x) for layer in layers]
            for out in outs:
                out.square().mean().backward(retain_graph=True)
            optimizer.step()
    """,
    "let_go": """
        layers = nn.ModuleList(nn.Sequential(nn.Linear(128, 512), nn.GELU()) for _ in range(4))
        optimizer = torch.optim.SGD(layers.parameters(), 0.1)
        for _ in range(4):
            out = torch.stack([layer(torch.randn(1024, 128)) for layer in layers])
            out.square().mean().backward(retain_graph=True)
            out.mean().backward()
            optimizer.step()
    """,
    "checkpointed": """
        from torch.utils.checkpoint import checkpoint
        layers = nn.ModuleList(nn.Sequential(nn.Linear(128, 512), nn.GELU()) for _ in range(4))
        optimizer = torch.optim.SGD(layers.parameters(), 0.1)
        for _ in range(3):
            x = torch.randn(4096, 128, requires_grad=True)
            for layer in layers:
                x = checkpoint(layer, x, use_reentrant=True)[:, :128]
            x.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    """,
    "in_library": """
        import pathlib, sys
        own = pathlib.Path("site-packages/engine").absolute()
        own.mkdir(parents=True)
        code = "def run(layers, x):; return layers(x);class Sum(nn.Module):; def forward(self, x):;"
        code = f"from torch import nn;{code}  return x.sum().detach()"
        (own / "__init__.py").write_text(code.replace(";", chr(10)))
        sys.path.insert(0, str(own.parent))
        from engine import Sum, run
        layers = [it for _ in range(24) for it in (nn.Linear(256, 256), nn.GELU())]
        print(run(nn.Sequential(*layers, Sum()), torch.randn(4096, 256)).item())
    """,
    "on_ctx": """
        import gc
        gc.disable()
        class Keeper(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.result = x.exp()
                return ctx.result
            @staticmethod
            def backward(ctx, gradient):
                return gradient * ctx.result
        net = nn.Sequential(nn.Linear(64, 512), nn.Linear(512, 64))
        for _ in range(12):
            Keeper.apply(net[0](torch.randn(1024, 64))).sum().backward()
            net.zero_grad()
    """,
}
MIB = 1 << 20
GROWING = {"collected"}


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[str, dict[str, Any]]:
    """The report of each script."""
    folder: Path = tmp_path_factory.mktemp("peaks")
    found = {}
    for name, code in SCRIPTS.items():
        lines = [line[4:] for line in HEAD.splitlines()] + [line[8:] for line in code.splitlines()]
        (folder / f"{name}.py").write_text("\n".join(lines))
        words = ["run", "--report", f"{name}.json", f"{name}.py"]
        FORKS.run("-m", "memfit", *words, folder=folder)
        found[name] = json.loads((folder / f"{name}.json").read_text())
    return found


@pytest.fixture(scope="module")
def notes(reports: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    """The notes of each script."""
    return {name: report["notes"] for name, report in reports.items()}


@pytest.fixture(scope="module")
def ran(reports: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The CPU's entry in the report of each script."""
    return {name: report["devices"][0] for name, report in reports.items()}


@pytest.mark.parametrize("name", SCRIPTS)
def test_hardly_anything_is_other(ran: dict[str, dict[str, Any]], name: str):
    found = ran[name]
    assert sum(found["peak_by_category"].values()) == found["peak_told_bytes"]
    assert found["peak_told_bytes"] >= 0.8 * found["peak_bytes"]
    assert found["peak_by_category"]["other"] <= 0.1 * found["peak_told_bytes"]


def test_the_variable_that_an_evaluation_fills_is_named(ran: dict[str, dict[str, Any]]):
    first = ran["evaluation"]["peak_owners"][0]
    assert first["owner"].startswith("`predictions` (evaluation.py:13)")
    assert first["bytes"] >= 0.9 * ran["evaluation"]["peak_told_bytes"]
    assert first["blocks"] == 2


def test_the_list_that_holds_graphs_is_named(ran: dict[str, dict[str, Any]]):
    first = ran["collected"]["peak_owners"][0]
    assert first["owner"].startswith("the autograd graph of `outs` (collected.py:")
    assert first["category"] == "activation"


def test_a_graph_is_told_apart_that_no_backward_has_run_through(
    ran: dict[str, dict[str, Any]],
):
    owners = [one["owner"] for one in ran["validation"]["peak_owners"]]
    assert owners[0].startswith("the autograd graph of `total` (validation.py:")
    assert "which no backward has run through" in owners[0]
    assert owners[0].endswith("where none will, use `torch.no_grad()`")
    assert ran["validation"]["peak_owners"][0]["bytes"] >= 0.5 * ran["validation"]["peak_bytes"]
    [own] = [owner for owner in owners if owner.startswith("the autograd graph of `loss`")]
    assert "no_grad" not in own


def test_what_a_checkpoint_runs_again_is_no_graph_that_no_backward_runs_through(
    ran: dict[str, dict[str, Any]],
):
    owners = [one["owner"] for one in ran["checkpointed"]["peak_owners"]]
    assert owners
    assert not any("no_grad" in owner for owner in owners), owners


def test_a_graph_that_went_without_a_backward_is_worth_a_word(notes: dict[str, list[str]]):
    (note,) = notes["validated"]
    assert note.startswith("the autograd graph of `total` (validated.py:")
    assert note.endswith(
        "that no backward went through: compute what needs none under `torch.no_grad()`"
    )
    assert notes["checkpointed"] == notes["leaves"] == []


def test_half_a_graph_that_no_backward_went_through_is_not_said_to_have_had_none(
    notes: dict[str, list[str]],
):
    (note,) = notes["attacked"]
    assert note.startswith("the autograd graph of `gap` (attacked.py:")
    assert "that no backward went through" in note


def test_the_function_is_named_on_whose_ctx_outputs_stay(ran: dict[str, dict[str, Any]]):
    first = ran["on_ctx"]["peak_owners"][0]
    assert first["owner"] == "`ctx` of `Keeper`"
    assert first["category"] == "activation"
    assert first["bytes"] >= 0.8 * ran["on_ctx"]["peak_told_bytes"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_collection_is_growth_and_one_forward_is_none(
    reports: dict[str, dict[str, Any]], name: str
):
    found = reports[name]["steps"]
    assert (found["growth_rhythm"] == "time") == (name in GROWING)
    if name in GROWING:
        assert found["growth_cause"].startswith("`outs` (collected.py:")
        assert "torch.no_grad()" in found["growth_advice"]


def test_graphs_that_nothing_runs_backward_on_are_worth_a_word(notes: dict[str, list[str]]):
    assert any("`with torch.no_grad():`" in note for note in notes["collected"])
    assert notes["training"] == []


def test_what_autocast_keeps_is_told_apart(ran: dict[str, dict[str, Any]]):
    assert ran["decoding"]["peak_by_category"]["cast_cache"] == 12 * (512 * 512 + 512) * 2


def test_a_copied_model_and_what_lies_between_steps(ran: dict[str, dict[str, Any]]):
    found = ran["between"]["peak_by_category"]
    assert (found["parameter"], found["gradient"]) == (8 * MIB, 4 * MIB)
    assert found["variable"] >= 16 * MIB
    assert ran["between"]["peak_owners"][0]["owner"].startswith("`snapshot` (between.py:")


def test_a_training_step_is_told_by_what_its_graph_holds(ran: dict[str, dict[str, Any]]):
    found = ran["training"]["peak_by_category"]
    assert found["activation"] > 0.5 * ran["training"]["peak_bytes"]
    assert found["temporary"] > 0


def test_leaves_that_are_no_modules_are_parameters_where_an_optimizer_has_them(
    ran: dict[str, dict[str, Any]],
):
    found = ran["leaves"]["peak_by_category"]
    assert found["parameter"] == 4 * MIB
    assert found["activation"] + found["temporary"] > 16 * MIB


def test_what_an_optimizer_makes_to_update_all_at_once_is_told(
    ran: dict[str, dict[str, Any]], notes: dict[str, list[str]]
):
    first = ran["at_once"]["peak_owners"][0]
    of_parameters = 12 * (512 * 512 + 512) * 4
    assert (first["owner"], first["category"]) == (OF_UPDATE, "temporary")
    assert of_parameters <= first["bytes"] <= 1.01 * of_parameters
    (note,) = notes["at_once"]
    assert "`AdamW` updates all parameters at once" in note
    assert "`foreach=False`" in note


def test_what_closures_compute_is_not_the_optimizers(ran: dict[str, dict[str, Any]]):
    """LBFGS calls its closure over and over, and each has a graph of its own."""
    first = ran["closures"]["peak_owners"][0]
    assert first["owner"].startswith("the autograd graph of `loss` (closures.py:"), first
    assert first["bytes"] >= 0.8 * ran["closures"]["peak_told_bytes"]


def test_what_an_optimizer_keeps_in_its_step_is_its_state(reports: dict[str, dict[str, Any]]):
    """LBFGS has its history in variables until its step ends, and this one has no other."""
    cause = reports["history"]["steps"]["growth_cause"]
    assert cause == "`LBFGS` (history.py:16) keeps state for what it updates"


def test_graphs_that_outlive_a_step_because_they_were_to_be_kept_are_worth_a_word(
    notes: dict[str, list[str]],
):
    (note,) = notes["retained"]
    assert note.startswith("`backward(retain_graph=True)` left graphs of 8.5 MiB after")
    assert notes["let_go"] == []


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_file_of_torchs_is_named(ran: dict[str, dict[str, Any]], name: str):
    owners = [one["owner"] for one in ran[name]["peak_owners"] if ".py" in one["owner"]]
    files = (f"{name}.py", "engine/__init__.py")
    assert all(any(file in owner for file in files) for owner in owners), owners


def test_what_torch_holds_for_a_library_is_a_value_of_its_line(ran: dict[str, dict[str, Any]]):
    """An `__init__.py` is named with its folder, as its name alone does not tell which it is."""
    first = ran["in_library"]["peak_owners"][0]
    assert "a value of engine/__init__.py:3" in first["owner"]
