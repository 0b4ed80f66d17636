"""``memfit run --budget`` where optimizers call the model by themselves, through a closure."""

from __future__ import annotations

from pathlib import Path

from ran import assert_within_budget, inline

CLOSURES = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    width = 64

    class Twice(torch.optim.Optimizer):
        '''Takes the gradient at a point nearby, and steps with it.'''
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})
            self.base = torch.optim.SGD(self.param_groups, lr=0.1)
        def step(self, closure):
            params = [p for group in self.param_groups for p in group["params"]]
            with torch.enable_grad():
                closure()
            with torch.no_grad():
                moves = [p.grad * 0.05 for p in params]
                for p, move in zip(params, moves):
                    p += move
            with torch.enable_grad():
                loss = closure()
            with torch.no_grad():
                for p, move in zip(params, moves):
                    p -= move
            self.base.step()
            return loss

    def train(make, steps):
        block = lambda: nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1))
        model = nn.Sequential(*[block() for _ in range(8)])
        optimizer = make(model.parameters())
        for step in range(steps):
            batch = torch.randn(2048, width)
            def closure():
                optimizer.zero_grad()
                loss = model(batch).square().mean()
                loss.backward()
                return loss
            print(repr(float(optimizer.step(closure))))
        print(repr(sum(p.sum().item() for p in model.parameters())))
"""


def test_a_closure_that_runs_first_is_the_step(tmp_path: Path):
    code = CLOSURES + "\n    train(torch.optim.AdamW, 4); train(torch.optim.Rprop, 3)"
    ran = inline(tmp_path, "70%", code)
    for loop, steps in zip(ran.loops, (4, 3), strict=True):
        assert_within_budget(loop)
        assert loop["refusal"] is None
        assert (loop["observed"]["steps"], loop["planned"]["steps"]) == (1, steps - 1)
    assert ran.report["steps"]["count"] == 7


def test_an_optimizer_that_calls_its_closure_often_is_planned_inside(tmp_path: Path):
    """Of LBFGS, every call of the closure but the very first runs by the plan."""
    lbfgs = "lambda p: torch.optim.LBFGS(p, max_iter=4, history_size=2)"
    ran = inline(tmp_path, "75%", CLOSURES + f"\n    train({lbfgs}, 4); train(Twice, 3)")
    for loop, steps in zip(ran.loops, (4, 3), strict=True):
        assert_within_budget(loop)
        counts = [loop[kind]["steps"] for kind in ("observed", "planned", "unplanned")]
        assert counts == [0, steps, 0]


def test_a_history_in_variables_waits_in_files_between_closures(tmp_path: Path):
    """LBFGS puts the directions it keeps in its state at the end of a step: 16 in the first."""
    code = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(192, 192), nn.Tanh()) for _ in range(6)])
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=16)
    batch = torch.randn(2048, 192)

    def closure():
        optimizer.zero_grad()
        loss = (model(batch) - batch.roll(1, 0)).square().mean()
        loss.backward()
        return loss

    for step in range(2):
        print(repr(float(optimizer.step(closure))))
    print(repr(sum(p.sum().item() for p in model.parameters())))
    """
    ran = inline(tmp_path, "16MiB", code, offload="chosen")
    (loop,) = ran.loops
    assert ran.fitting["verdict"]["kept"], "its own ops take what is there, in no prediction"
    assert (loop["planned"]["steps"], loop["replans"]) == (2, 0)


def test_state_is_away_while_the_closure_runs_first(tmp_path: Path):
    """As in Lightning's automatic optimization: zeroing, forward and backward, then the updates."""
    code = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)])
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    def closure():
        loss = model(torch.randn(16, 512)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        return loss

    for step in range(6):
        loss = optimizer.step(closure) if step % 2 else optimizer.step(closure=closure)
        scheduler.step()
        print(repr(loss.item()))
    torch.save((model.state_dict(), optimizer.state_dict()), "end.pt")
    """
    ran = inline(tmp_path, "24MiB", code, offload="chosen")
    (loop,) = ran.loops
    assert_within_budget(loop)
    kinds = {action["kind"] for action in loop["plan"]["actions"]}
    assert "offload_optimizer" in kinds
    assert "fuse_optimizer" not in kinds
    # The first begins without the gradients that those after it have.
    # The first begins without the gradients that those after it have.
    assert (loop["observed"]["steps"], loop["planned"]["steps"]) == (2, 4)
