"""What people do to a model between two steps, or have attached to it.

Responsible for doing it, alike on both sides of a comparison. A change is called before each step
but the first, so that it meets a plan that was made without it. Not responsible for what is right
afterwards (``comparison.py``).
"""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable

import torch
from comparison import Change, Side
from subjects import batch_of, workload
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

CHANGES: dict[str, Change] = {}
"""By name."""


def change(once: int = 0) -> Callable[[Change], Change]:
    """Enter a change; one that says a step happens before that step alone."""

    def enter(do: Change) -> Change:
        def at(side: Side) -> None:
            if not once or side.step == once:
                do(side)

        CHANGES[do.__name__.strip("_").replace("_", " ")] = at
        return do

    return enter


def parameters(side: Side) -> list[nn.Parameter]:
    return [p for p in side.model.parameters() if p.requires_grad]


@change()
def nothing(side: Side) -> None:
    pass


# Batches


@change()
def fewer_rows(side: Side) -> None:
    side.batch = batch_of(20 - side.step, side.step)


@change()
def more_rows(side: Side) -> None:
    side.batch = batch_of(48, side.step)


@change()
def one_row(side: Side) -> None:
    side.batch = batch_of(1, side.step)


@change(once=2)
def no_number(side: Side) -> None:
    side.batch = batch_of(32, 1)
    side.batch["x"][0, 0] = float("nan")


@change()
def gradients_of_the_batch(side: Side) -> None:
    side.batch = batch_of()
    side.batch["x"].requires_grad_()


@change()
def one_batch_written_to(side: Side) -> None:
    side.batch["x"].mul_(0.5)


# The model


@change(once=1)
def evaluation(side: Side) -> None:
    side.model.eval()


@change()
def evaluation_and_back(side: Side) -> None:
    side.model.train(mode=side.step % 2 == 0)


@change(once=1)
def branch(side: Side) -> None:
    side.model.mode = "branch"


@change()
def branch_and_back(side: Side) -> None:
    side.model.mode = "branch" if side.step % 2 else ""


@change(once=1)
def couples(side: Side) -> None:
    side.model.mode = "couples"


@change(once=1)
def summed(side: Side) -> None:
    side.model.mode = "summed"


@change(once=1)
def penalised(side: Side) -> None:
    side.model.mode = "penalised"


@change(once=1)
def again(side: Side) -> None:
    side.model.mode = "again"


@change()
def reordered_and_back(side: Side) -> None:
    side.model.mode = "reordered" if side.step % 2 else ""


@change()
def in_a_thread_and_back(side: Side) -> None:
    side.model.mode = "thread" if side.step % 2 else ""


@change(once=1)
def written(side: Side) -> None:
    side.model.mode = "written"


@change()
def fails_once(side: Side) -> None:
    if side.step == 1:
        side.model.mode = "raises"
        try:
            side.run()
        except ArithmeticError:
            side.model.mode = ""


@change(once=1)
def frozen(side: Side) -> None:
    parameters(side)[0].requires_grad_(requires_grad=False)


@change()
def frozen_and_thawed(side: Side) -> None:
    side.model.last.weight.requires_grad_(side.step != 1)


@change(once=1)
def another_layer(side: Side) -> None:
    torch.manual_seed(3)
    side.model.last = nn.Sequential(side.model.last, nn.Linear(8, 8))
    side.optimizer.add_param_group({"params": list(side.model.last[1].parameters())})


@change(once=1)
def double_precision(side: Side) -> None:
    side.model.double()
    side.batch = {"x": batch_of()["x"].double(), "y": batch_of()["y"]}


@change(once=2)
def loaded(side: Side) -> None:
    side.model.load_state_dict(workload_state(side))


def workload_state(side: Side) -> dict[str, torch.Tensor]:
    return {name: value * 0.9 for name, value in side.model.state_dict().items()}


@change()
def scaled(side: Side) -> None:
    with torch.no_grad():
        for parameter in side.model.parameters():
            parameter.mul_(0.99)


@change()
def scaled_unseen(side: Side) -> None:
    for parameter in side.model.parameters():
        parameter.data.mul_(0.99)


@change()
def replaced_data(side: Side) -> None:
    side.model.last.weight.data = side.model.last.weight.data * 0.98


@change(once=1)
def parametrised(side: Side) -> None:
    nn.utils.parametrizations.weight_norm(side.model.last)
    side.optimizer.add_param_group({"params": list(side.model.last.parametrizations.parameters())})


@change(once=1)
def shared(side: Side) -> None:
    side.model.share_memory()


# Hooks


@change(once=1)
def forward_hook(side: Side) -> None:
    side.undo.callback(side.model.body.register_forward_hook(lambda m, a, out: out * 1.5).remove)


@change(once=1)
def forward_pre_hook(side: Side) -> None:
    hook = side.model.last.register_forward_pre_hook(lambda m, args: (args[0].tanh(),))
    side.undo.callback(hook.remove)


@change(once=1)
def backward_hook(side: Side) -> None:
    def double(module: nn.Module, inside: tuple, outside: tuple) -> tuple:
        return tuple(g if g is None else 2 * g for g in inside)

    side.undo.callback(side.model.last.register_full_backward_hook(double).remove)


@change(once=1)
def gradient_hook(side: Side) -> None:
    side.undo.callback(side.model.last.weight.register_hook(lambda g: g.clamp(-1e-3, 1e-3)).remove)


@change(once=1)
def accumulated_hook(side: Side) -> None:
    def look(parameter: nn.Parameter) -> None:
        side.kept.setdefault("seen", []).append(parameter.grad.clone())

    side.undo.callback(side.model.last.weight.register_post_accumulate_grad_hook(look).remove)


@change()
def saved_tensor_hooks(side: Side) -> None:
    if side.step == 1:
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t)
        side.undo.enter_context(hooks)


# The optimizer


@change()
def learning_rate(side: Side) -> None:
    side.optimizer.param_groups[0]["lr"] *= 0.5


@change()
def schedule(side: Side) -> None:
    if side.step == 1:
        side.kept["schedule"] = torch.optim.lr_scheduler.StepLR(side.optimizer, 1, 0.5)
    side.kept["schedule"].step()


@change(once=2)
def momentum_scaled(side: Side) -> None:
    for entry in side.optimizer.state.values():
        for name in ("exp_avg", "momentum_buffer"):
            if name in entry:
                entry[name].mul_(0.5)


@change(once=2)
def optimizer_loaded(side: Side) -> None:
    side.optimizer.load_state_dict(copy.deepcopy(side.optimizer.state_dict()))


def _clip(optimizer: torch.optim.Optimizer, *_: object) -> None:
    everything = [p for group in optimizer.param_groups for p in group["params"]]
    torch.nn.utils.clip_grad_norm_(everything, 1e-2)


@change(once=1)
def step_hook(side: Side) -> None:
    side.undo.callback(side.optimizer.register_step_pre_hook(_clip).remove)


@change(once=1)
def step_hook_of_all(side: Side) -> None:
    side.undo.callback(register_optimizer_step_pre_hook(_clip).remove)


@change(once=1)
def step_replaced(side: Side) -> None:
    step = side.optimizer.step

    def clipped(*args: object, **kwargs: object) -> object:
        _clip(side.optimizer)
        return step(*args, **kwargs)

    side.optimizer.step = clipped


@change(once=1)
def group_doubled(side: Side) -> None:
    with torch.no_grad():
        twin = nn.Parameter(torch.ones(3))
    side.optimizer.add_param_group({"params": [twin], "lr": 0.5})


@change(once=1)
def foreach(side: Side) -> None:
    for group in side.optimizer.param_groups:
        group["foreach"] = True


# What looks on


@change()
def inference(side: Side) -> None:
    with torch.inference_mode():
        side.kept.setdefault("seen", []).append(side.model(batch_of(7, 1)["x"]).sum().item())


@change()
def validation(side: Side) -> None:
    with torch.no_grad():
        loss = side.workload.loss(side.model, batch_of(9, 2))
    side.kept.setdefault("seen", []).append(loss.item())


@change()
def copied(side: Side) -> None:
    twin = copy.deepcopy(side.model)
    side.kept.setdefault("seen", []).append(sum(p.detach().sum() for p in twin.parameters()))


@change()
def written_down(side: Side) -> None:
    file = io.BytesIO()
    torch.save([side.model.state_dict(), side.optimizer.state_dict()], file)
    file.seek(0)
    model, optimizer = torch.load(file)
    side.model.load_state_dict(model)
    side.optimizer.load_state_dict(optimizer)


@change()
def read_in_a_thread(side: Side) -> None:
    def read() -> None:
        sums = [float(p.detach().double().sum()) for p in side.model.parameters()]
        side.kept.setdefault("seen", []).append(sum(sums))

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()


@change()
def read_by_numpy(side: Side) -> None:
    found = [p.detach().cpu().numpy().astype("float64").sum() for p in side.model.parameters()]
    side.kept.setdefault("seen", []).append(float(sum(found)))


@change()
def kept_by_numpy(side: Side) -> None:
    if side.step == 1:
        side.kept["array"] = side.model.last.weight.detach().numpy()
    side.kept.setdefault("seen", []).append(float(side.kept["array"].astype("float64").sum()))


@change()
def average(side: Side) -> None:
    if side.step == 1:
        side.kept["average"] = torch.optim.swa_utils.AveragedModel(side.model)
    side.kept["average"].update_parameters(side.model)
    averaged = side.kept["average"].module.last.weight
    side.kept.setdefault("seen", []).append(averaged.detach().clone())


@change()
def another_model(side: Side) -> None:
    other = workload("layers")
    loss = other.loss(other.model, other.batch)
    loss.backward()
    side.kept.setdefault("seen", []).append(other.model.last.weight.grad.clone())


@change()
def gradient_mode(side: Side) -> None:
    x = batch_of(5, 3)["x"]
    (gradient,) = torch.autograd.grad(side.model(x).sum(), [side.model.last.weight])
    side.kept.setdefault("seen", []).append(gradient)


@change(once=1)
def anomalies(side: Side) -> None:
    side.undo.enter_context(torch.autograd.detect_anomaly(check_nan=False))
