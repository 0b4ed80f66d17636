"""``memfit run --budget`` on scripts that ask autograd for gradients on the way to their loss."""

from __future__ import annotations

from pathlib import Path

import pytest
from ran import assert_within_budget, inline

from memfit.run.script.current_pass import FORBIDS_HOOKS, FORWARD_MODE, KEEPS_GRAPH

NET = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    width = 64
    class Penalty(nn.Sequential): pass
    class Attacked(nn.Sequential): pass

    def train(kind, loss_of):
        layers = [layer for _ in range(6) for layer in (nn.Linear(width, width), nn.Tanh())]
        model = kind(*layers)
        optimizer = torch.optim.Adam(model.parameters())
        for step in range(4):
            loss = loss_of(model, torch.randn(1024, width))
            optimizer.step()
            optimizer.zero_grad()
            print(repr(loss.item()), repr(sum(p.sum().item() for p in model.parameters())))
"""


def test_gradients_on_the_way_are_part_of_the_forward(tmp_path: Path):
    ran = inline(
        tmp_path,
        "80%",
        NET
        + """
    def penalty(model, x):
        x.requires_grad_()
        out = model(x).square().mean()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        loss = out + (slope.norm(dim=1) - 1).square().mean()
        loss.backward()
        return loss

    def attacked(model, x):
        for _ in range(2):
            x = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(model(x).square().mean(), x)
            x = x + 0.1 * slope.sign()
        loss = model(x.detach()).square().mean()
        loss.backward()
        return loss

    train(Penalty, penalty)
    train(Attacked, attacked)
    """,
    )
    for loop in ran.loops:
        assert loop["refusal"] is None
        plan, planned = loop["plan"], loop["planned"]
        assert planned["peak_bytes"] <= plan["predicted_peak_bytes"] < plan["unplanned_peak_bytes"]
        # What the first one leaves behind goes in the next step, which is observed, too.
        planned_steps = 2 if "Penalty" in loop["models"] else 3
        assert (loop["planned"]["steps"], loop["unplanned"]["steps"]) == (planned_steps, 0)


BY_HAND = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(8)]
    model = nn.Sequential(*layers)
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam(parameters) if "STEP" == "put_in_place" else None

    def descended(gradients, slopes=1.0):
        with torch.no_grad():
            for p, gradient in zip(parameters, gradients):
                p.sub_(0.1 * slopes * gradient)

    def asked(loss):
        descended(torch.autograd.grad(loss, parameters))

    def put_in_place(loss):
        for p, gradient in zip(parameters, torch.autograd.grad(loss, parameters)):
            p.grad = gradient
        optimizer.step()
        optimizer.zero_grad()

    def curved(loss):
        \"\"\"As AdaHessian has it.\"\"\"
        loss.backward(create_graph=True)
        gradients = [p.grad for p in parameters]
        descended(torch.autograd.grad(gradients, parameters, list(map(torch.ones_like, gradients))))
        for p in parameters:
            p.grad = None

    x = torch.randn(1024, 128)
    for step in range(6):
        loss = model(x).square().mean()
        STEP(loss)
        print(repr(loss.item()), repr(sum(p.double().sum().item() for p in parameters)))
        del loss
"""


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("step", ["asked", "put_in_place", "curved"])
def test_steps_that_ask_for_the_gradients_of_their_parameters_are_planned(
    tmp_path: Path, step: str
):
    ran = inline(tmp_path, "75%", BY_HAND.replace("STEP", step), offload="chosen")
    (loop,) = ran.loops
    assert loop["refusal"] is None
    plan = loop["plan"]
    # Nothing that a second derivative needs is computed again: it goes to files.
    assert plan["fits"] == (step != "curved")
    assert loop["planned"]["peak_bytes"] <= plan["budget_bytes"] < plan["unplanned_peak_bytes"]
    assert loop["planned"]["steps"] >= 4


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("first", [0, 3])
def test_a_graph_that_nothing_differentiates_ends_with_the_step(tmp_path: Path, first: int):
    step = f"loss.backward(create_graph=step >= {first})"
    code = BY_HAND.replace("STEP(loss)", f"{step}; optimizer.step(); optimizer.zero_grad()")
    ran = inline(tmp_path, "8MiB", code.replace("STEP", "put_in_place"), offload="chosen")
    (loop,) = ran.loops
    if first:
        assert loop["planned"]["steps"] == 2
        assert any(KEEPS_GRAPH[0] in note for note in loop["notes"])
    else:
        assert f"memfit: `Sequential` runs unplanned: {KEEPS_GRAPH[1]}" in ran.stderr


def test_a_test_that_adapts_by_hand_leaves_the_steps_planned(tmp_path: Path):
    """As a MAML does: gradients of the model's parameters, and no step of its optimizer."""
    ran = inline(
        tmp_path,
        "16MiB",
        """
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(8)])
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(8):
        x = torch.randn(2048, 128)
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(repr(loss.item()))
        if step % 3 == 2:
            tested = model(x).square().mean()
            gradients = torch.autograd.grad(tested, list(model.parameters()))
            print(repr(sum(g.norm() for g in gradients).item()))
    """,
    )
    (loop,) = ran.loops
    assert loop["refusal"] is None
    assert loop["observed"]["steps"] + loop["planned"]["steps"] == 8
    assert_within_budget(loop)


def test_computed_weights_that_a_call_brings_along_are_no_parameters(tmp_path: Path):
    ran = inline(
        tmp_path,
        "90%",
        """
    import torch
    from torch import nn
    from torch.func import functional_call

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 8))
    optimizer = torch.optim.Adam(model.parameters())
    x, y = torch.randn(256, 64), torch.randn(256, 8)

    def loss_of(weights):
        return nn.functional.mse_loss(functional_call(model, weights, (x,)), y)

    def adapted(weights, create_graph):
        for _ in range(2):
            slopes = torch.autograd.grad(
                loss_of(weights), list(weights.values()), create_graph=create_graph
            )
            weights = {n: w - 0.1 * slope for (n, w), slope in zip(weights.items(), slopes)}
        return weights

    for step in range(8):
        optimizer.zero_grad()
        for _ in range(2):
            loss = loss_of(adapted(dict(model.named_parameters()), True))
            loss.backward()
        optimizer.step()
        print(repr(loss.item()))
        if step % 4 == 3:
            fresh = {n: w.detach().requires_grad_() for n, w in model.named_parameters()}
            fast = adapted(fresh, False)
            with torch.no_grad():
                print(repr(loss_of(fast).item()))
    """,
    )
    assert "RuntimeError" not in ran.stderr
    assert "error inside memfit" not in ran.stderr


def test_gradients_that_every_second_pass_adds_to_are_planned_for(tmp_path: Path):
    """The update comes after the first pass already, so the recorded step begins without any."""
    ran = inline(
        tmp_path,
        "20MiB",
        """
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.Tanh())]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(8):
        loss = model(torch.randn(768, 512)).square().mean()
        loss.backward()
        if step % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
        print(repr(loss.item()))
    """,
    )
    (loop,) = ran.loops
    assert loop["plan"]["fits"]
    assert 0 < loop["planned"]["peak_bytes"] <= 20 << 20
    assert loop["planned"]["peak_bytes"] <= loop["plan"]["predicted_peak_bytes"]


LENT = """
    import torch
    from torch import nn
    from torch.func import functional_call

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(5):
        own = dict(model.named_parameters())
        out = functional_call(model, own, (torch.randn(2048, 64),))
        lent = {name: p * 1.01 for name, p in own.items()}
        loss = functional_call(model, lent, (out,)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(repr(loss.item()))
"""


def test_parameters_that_are_lent_for_a_call_are_not_asked_for_gradients(tmp_path: Path):
    """They are no leaves: torch warned that they have none, in lines of memfit's."""
    (tmp_path / "disk").mkdir()
    ran = inline(tmp_path, "2MiB", LENT, offload=str(tmp_path / "disk"))
    assert "not a leaf" not in ran.stderr
    assert sum(loop["planned"]["steps"] for loop in ran.loops) >= 2


TASKS = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    class Tasks(nn.Module):
        def __init__(self):
            super().__init__()
            layers = [it for _ in range(6) for it in (nn.Linear(128, 128), nn.GELU())]
            self.body = nn.Sequential(*layers)
            self.heads = nn.ModuleList(nn.Linear(128, 1) for _ in range(2))
        def forward(self, x):
            shared = self.body(x)
            return [head(shared) for head in self.heads]

"""


def test_gradients_asked_of_what_is_no_parameter_of_the_model_are_part_of_the_step(tmp_path: Path):
    """Weights of tasks, which a balance of their gradients trains, as in GradNorm."""
    ran = inline(
        tmp_path,
        "70%",
        TASKS
        + """
    model, weights = Tasks(), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam(model.parameters())
    last = model.body[-2].weight
    for step in range(8):
        losses = torch.stack([it.square().mean() for it in model(torch.randn(1024, 128))])
        norms = torch.stack([
            torch.autograd.grad(w * loss, last, retain_graph=True, create_graph=True)[0].norm()
            for w, loss in zip(weights, losses)
        ])
        balance = (norms - norms.mean().detach()).abs().sum()
        optimizer.zero_grad()
        weights.grad = torch.autograd.grad(balance, weights, retain_graph=True)[0]
        losses.sum().backward()
        optimizer.step()
        print(repr(losses.sum().item()), repr(weights.grad.sum().item()))
    """,
        offload="chosen",
    )
    (loop,) = ran.loops
    assert loop["refusal"] is None
    assert loop["planned"]["steps"] >= 4
    assert ran.fitting["verdict"]["kept"], ran.stderr


@pytest.mark.parametrize("fuses", [False, True])
def test_gradients_of_parameters_asked_for_after_backward_are_part_of_it(fuses, tmp_path: Path):
    """Weights of tasks that are the model's own, after the backward of all, as in GradNorm.

    They are of parameters as that backward had them, which no optimizer may have updated in it.
    """
    ran = inline(
        tmp_path,
        "70%",
        TASKS
        + """
    model = Tasks()
    model.weights = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam(model.parameters())
    last = model.body[-2].weight
    for step in range(8):
        losses = torch.stack([it.square().mean() for it in model(torch.randn(1024, 128))])
        weighted = model.weights * losses
        optimizer.zero_grad()
        weighted.sum().backward(retain_graph=True)
        norms = torch.stack([
            torch.autograd.grad(it, last, retain_graph=True, create_graph=True)[0].norm()
            for it in weighted
        ])
        balance = (norms - norms.mean().detach()).abs().sum()
        model.weights.grad = torch.autograd.grad(balance, model.weights)[0]
        optimizer.step()
        print(repr(losses.sum().item()), repr(model.weights.grad.sum().item()))
    """,
        offload="chosen",
        fuses=fuses,
    )
    (loop,) = ran.loops
    assert loop["refusal"] is None
    assert loop["planned"]["steps"] >= 4
    assert ran.fitting["verdict"]["kept"], ran.stderr


FUNCTIONAL = """
    import torch
    from torch import nn
    from torch.func import functional_call, grad, stack_module_state, vmap

    torch.manual_seed(0)
    make = lambda: nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
    model = make()

    def of_one(parameters, x):
        return functional_call(model, parameters, (x[None],)).square().mean()

    def squares(parameters):
        found = vmap(grad(of_one), in_dims=(None, 0))(parameters, torch.randn(16, 64))
        return sum(it.square().mean() for it in found.values())
"""


def test_a_step_that_takes_gradients_of_functions_is_left_alone(tmp_path: Path):
    """It failed, as torch allows no hooks of saved tensors there."""
    code = """
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(4):
        loss = model(torch.randn(1024, 64)).square().mean()
        loss = loss + squares(dict(model.named_parameters()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(repr(loss.item()))
    """
    ran = inline(tmp_path, "75%", FUNCTIONAL + code)
    (loop,) = ran.loops
    assert loop["refusal"] == FORBIDS_HOOKS[1]
    assert f"`Sequential` runs unplanned: {FORBIDS_HOOKS[1]}" in ran.stderr


def test_gradients_of_functions_after_a_use_of_parameters_are_as_without(tmp_path: Path):
    """A use of what an optimizer updates begins a pass; torch allows no hooks in what follows."""
    code = """
    parameters, _ = stack_module_state([make() for _ in range(4)])
    parameters = {name: it.detach().requires_grad_() for name, it in parameters.items()}
    optimizer = torch.optim.Adam(parameters.values())
    call = lambda own, x: functional_call(model, own, (x,))
    for step in range(4):
        loss = vmap(call, in_dims=(0, None))(parameters, torch.randn(2048, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(repr(loss.item()))
    print(repr(squares({name: it[0].detach() for name, it in parameters.items()}).item()))
    """
    ran = inline(tmp_path, "8MiB", FUNCTIONAL + code)
    # Nothing tells of an ensemble's steps, and that is what is said.
    assert ran.fitting["verdict"]["why"].startswith("in steps of `Adam`, where no call of a model")


def test_a_step_that_differentiates_in_forward_mode_is_left_alone(tmp_path: Path):
    """It failed, as tangents that are zero have no memory; watched, its last bits were others."""
    code = """
    from torch.autograd import forward_ad

    optimizer = torch.optim.Adam(model.parameters())
    for step in range(4):
        x = torch.randn(1024, 64)
        loss = model(x).square().mean()
        with forward_ad.dual_level():
            given = forward_ad.make_dual(x[:8], torch.ones(8, 64))
            slope = forward_ad.unpack_dual(model(given)).tangent.mean()
        (loss + slope).backward()
        optimizer.step()
        optimizer.zero_grad()
        print(repr(loss.item()), repr(slope.item()))
    """
    (loop,) = inline(tmp_path, "75%", FUNCTIONAL + code).loops
    assert loop["refusal"] == FORWARD_MODE[1]


def test_forward_mode_in_what_torch_traces_is_as_without(tmp_path: Path):
    """Nothing is left there: the modes of a trace come off in an order of their own."""
    code = """
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(4):
        x = torch.randn(1024, 64)
        result, tangent = torch.func.linearize(model, x)
        result.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        print(repr(result.sum().item()), repr(tangent(x).sum().item()))
    """
    inline(tmp_path, "75%", FUNCTIONAL + code)
