"""``memfit run --allow equivalent``: losses over many classes in slices, in the script's loop."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest
from ran import Ran, inline

HEAD = """
    import torch
    from torch import nn
    from torch.nn import functional as F

    torch.manual_seed(0)
    classes, width, items, length = 8000, 64, 8, 64

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(classes, width)
            self.body = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
            self.head = nn.Linear(width, classes, bias=False)

        def forward(self, tokens):
            hidden = self.embed(tokens)
            return self.head(hidden + self.body(hidden))

    def loss_of(model, tokens):
        logits = model(tokens[:, :-1])
        return F.cross_entropy(logits.reshape(-1, classes), tokens[:, 1:].reshape(-1))

    def train(model, loss_of=loss_of, steps=5):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        for step in range(steps):
            tokens = torch.randint(0, classes, (items, length + 1))
            optimizer.zero_grad()
            loss = loss_of(model, tokens)
            loss.backward()
            optimizer.step()
            print(f"{loss.item():.4f}")
        print(f"{sum(p.double().square().sum().item() for p in model.parameters()):.1f}")
"""
WITH_ACCURACY = """
    def with_accuracy(model, tokens):
        logits = model(tokens[:, :-1]).reshape(-1, classes)
        print((logits.argmax(-1) == tokens[:, 1:].reshape(-1)).sum().item())
        return F.cross_entropy(logits, tokens[:, 1:].reshape(-1))

    train(Net(), with_accuracy)
"""
# Of 512 rows: logits of 15.6 MiB, held three times; parameters, gradients and momentum of 12.
TIGHT, LESS, WHOLE = "36MiB", "53MiB", "66MiB"


def allowed(tmp_path: Path, budget: str, code: str, *options: str) -> Ran:
    fitting = ("--allow", "equivalent", *options)
    return inline(tmp_path, budget, dedent(HEAD) + dedent(code), fitting=fitting)


def actions_of(ran: Ran) -> set[str]:
    return {action["kind"] for loop in ran.loops for action in loop["plan"]["actions"]}


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_a_loss_runs_in_slices_from_the_first_step_on(tmp_path: Path):
    ran = allowed(tmp_path, TIGHT, "train(Net())")
    (loop,) = ran.loops
    assert ran.fitting["verdict"]["kept"], ran.stderr
    assert "chunk" in actions_of(ran)
    assert loop["observed"]["steps"] == 1
    predicted, measured = loop["plan"]["predicted_peak_bytes"], loop["planned"]["peak_bytes"]
    assert predicted - (1 << 20) <= measured <= predicted
    assert "rounding may differ" in ran.stderr
    assert "computed in up to 32 slices" in ran.stderr


def test_a_head_that_is_no_layer_is_found_in_a_whole_step(tmp_path: Path):
    ran = allowed(
        tmp_path,
        LESS,
        """
        class Bare(Net):
            def __init__(self):
                super().__init__()
                self.words, self.head = nn.Parameter(self.head.weight.detach()), None

            def forward(self, tokens):
                hidden = self.embed(tokens)
                return (hidden + self.body(hidden)) @ self.words.T

        train(Bare())
        """,
    )
    (loop,) = ran.loops
    assert ran.fitting["verdict"]["kept"], ran.stderr
    assert "chunk" in actions_of(ran)
    assert loop["observed"]["steps"] == 2
    assert loop["plan"]["unplanned_peak_bytes"] > loop["plan"]["budget_bytes"]


def test_a_budget_that_whole_logits_keep_leaves_them_whole(tmp_path: Path):
    ran = allowed(tmp_path, WHOLE, "train(Net())")
    assert ran.fitting["verdict"]["kept"], ran.stderr
    assert "chunk" not in actions_of(ran)


def test_what_is_forbidden_or_exact_stays_whole_and_is_offered(tmp_path: Path):
    ran = allowed(tmp_path, LESS, "train(Net())", "--forbid", "chunk")
    assert "chunk" not in actions_of(ran)
    (tmp_path / "exact").mkdir()
    exact = inline(tmp_path / "exact", LESS, dedent(HEAD) + "train(Net())")
    (loop,) = exact.loops
    assert "chunk" not in actions_of(exact)
    assert any("compute its loss over 8,000 classes in slices" in it for it in loop["notes"])


def test_a_script_that_looks_at_its_logits_gets_them_whole(tmp_path: Path):
    ran = allowed(
        tmp_path,
        TIGHT,
        WITH_ACCURACY,
    )
    (loop,) = ran.loops
    assert "chunk" not in actions_of(ran)
    assert any("it used the logits whole, in `argmax`" in note for note in loop["notes"]), loop


@pytest.mark.parametrize("budget", [TIGHT, LESS])
def test_a_loss_in_the_model_over_a_tied_weight_and_accumulated_gradients(
    tmp_path: Path, budget: str
):
    ran = allowed(
        tmp_path,
        budget,
        """
        class Tied(Net):
            def __init__(self):
                super().__init__()
                self.head.weight = self.embed.weight

            def forward(self, tokens, labels):
                logits = super().forward(tokens).float()
                labels = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
                loss = F.cross_entropy(
                    logits.view(-1, classes), labels.view(-1), ignore_index=-100,
                    label_smoothing=0.1,
                )
                return {"loss": loss, "logits": logits}

        model = Tied()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        for step in range(5):
            for _ in range(2):
                tokens = torch.randint(0, classes, (items, length))
                tokens[:, 50:] = -100 if step % 2 else 7
                out = model(tokens.clamp(min=0), labels=tokens)
                print(out["logits"].shape, f"{out['loss'].item():.2f}")
                (out["loss"] / 2).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            print(f"{norm.item():.3f}")
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        print(f"{sum(p.double().square().sum().item() for p in model.parameters()):.1f}")
        """,
    )
    assert ran.fitting["verdict"]["kept"], ran.stderr
    assert "chunk" in actions_of(ran)


def test_other_lengths_are_foreseen(tmp_path: Path):
    ran = allowed(
        tmp_path,
        TIGHT,
        """
        lengths = iter([64, 48, 32, 56, 40, 60, 36])

        def loss_of_some(model, tokens):
            return loss_of(model, tokens[:, : next(lengths) + 1])

        train(Net(), loss_of_some, steps=7)
        """,
    )
    (loop,) = ran.loops
    assert ran.fitting["verdict"]["kept"], ran.stderr
    assert "chunk" in actions_of(ran)
    assert loop["observed"]["steps"] <= 3


def test_evaluations_and_modes_of_the_scripts_see_what_they_would(tmp_path: Path):
    ran = allowed(
        tmp_path,
        TIGHT,
        """
        from torch.overrides import TorchFunctionMode

        class Names(TorchFunctionMode):
            names = []

            def __torch_function__(self, func, types, args=(), kwargs=None):
                self.names.append(getattr(func, "__name__", ""))
                return func(*args, **(kwargs or {}))

        model = Net()
        train(model, steps=3)
        with torch.no_grad():
            print(model(torch.arange(10)[None]).argmax(-1).shape)
        with Names():
            train(model, steps=2)
        count = len(Names.names)
        torch.ones(3).exp()
        print(count == len(Names.names))
        """,
    )
    assert "chunk" in actions_of(ran)


BY_OPTIMIZER = "torch.optim.SGD(model.parameters(), lr=50.0).step"
BY_DATA = "lambda: [it.data.sub_(it.grad, alpha=50.0) for it in model.parameters()]"


@pytest.mark.parametrize(("update", "looks"), [(BY_OPTIMIZER, (0, 4)), (BY_DATA, (4,))])
def test_logits_that_are_looked_at_after_an_update_are_those_of_before(
    tmp_path: Path, update: str, looks: tuple[int, ...]
):
    ran = allowed(
        tmp_path,
        TIGHT,
        f"""
        model = Net()
        update = {update}
        for step in range(6):
            tokens = torch.randint(0, classes, (items, length + 1))
            model.zero_grad()
            logits = model(tokens[:, :-1])
            F.cross_entropy(logits.view(-1, classes), tokens[:, 1:].reshape(-1)).backward()
            update()
            if step in {looks}:
                with torch.no_grad():
                    target = tokens[:, 1:].reshape(-1)
                    print(f"{{F.cross_entropy(logits.view(-1, classes), target):.4f}}")
                    print((logits.argmax(-1).view(-1) == target).sum().item())
                    print(f"{{logits.max():.3f}}")
        """,
    )
    assert "chunk" in actions_of(ran)


def test_a_function_of_autograds_own_gets_logits_whole_and_its_steps_are_planned(tmp_path: Path):
    ran = allowed(
        tmp_path,
        LESS,
        """
        class CrossEntropy(torch.autograd.Function):
            @staticmethod
            def forward(ctx, logits, target):
                logarithms = torch.log_softmax(logits, -1)
                ctx.save_for_backward(logarithms, target)
                return -logarithms.gather(1, target[:, None]).mean()

            @staticmethod
            def backward(ctx, gradient):
                logarithms, target = ctx.saved_tensors
                given = logarithms.exp()
                given[torch.arange(len(target)), target] -= 1
                return given * (gradient / len(target)), None

        def own_loss(model, tokens):
            logits = model(tokens[:, :-1]).reshape(-1, classes)
            return CrossEntropy.apply(logits, tokens[:, 1:].reshape(-1))

        train(Net(), own_loss)
        """,
    )
    (loop,) = ran.loops
    assert loop["planned"]["steps"] > 0, loop
    assert "chunk" not in actions_of(ran)


def test_a_model_that_pieces_of_its_batch_do_not_fit_runs_in_slices(tmp_path: Path):
    # It returns whole logits beside its loss, so they stay however small the pieces are.
    ran = allowed(
        tmp_path,
        TIGHT,
        """
        class WithLoss(Net):
            def forward(self, tokens, targets):
                logits = super().forward(tokens)
                return logits, F.cross_entropy(logits.view(-1, classes), targets.view(-1))

        model = WithLoss()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(8):
            tokens = torch.randint(0, classes, (items, length + 1))
            logits, loss = model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"{loss.item():.4f}")
        """,
    )
    (loop,) = ran.loops
    assert loop["plan"]["fits"], ran.stderr
    assert "chunk" in actions_of(ran)
    assert loop["planned"]["peak_bytes"] <= loop["plan"]["budget_bytes"]


def test_a_larger_batch_is_recorded_in_slices_too(tmp_path: Path):
    ran = allowed(
        tmp_path,
        TIGHT,
        """
        lengths = iter([64, 40, 57, 96, 33, 80])

        def loss_of_some(model, tokens):
            return loss_of(model, torch.randint(0, classes, (items, next(lengths) + 1)))

        train(Net(), loss_of_some, steps=6)
        """,
    )
    assert ran.fitting["verdict"]["kept"], ran.stderr
    assert "chunk" in actions_of(ran)


def test_losses_of_evaluations_run_in_slices_where_steps_do(tmp_path: Path):
    ran = allowed(
        tmp_path,
        TIGHT,
        """
        model = Net()
        train(model, steps=3)
        with torch.no_grad():  # whole logits would be 31.2 MiB, twice
            print(f"{loss_of(model, torch.randint(0, classes, (2 * items, length + 1))):.4f}")
            print(model(torch.arange(10)[None]).argmax(-1).tolist())
        train(model, steps=2)
        """,
    )
    assert ran.fitting["verdict"]["kept"], ran.stderr


def test_logits_that_a_first_step_looks_at_are_not_sliced_in_another(tmp_path: Path):
    ran = allowed(
        tmp_path,
        TIGHT,
        WITH_ACCURACY,
        "--forbid",
        "micro_batch",
    )
    (loop,) = ran.loops
    assert loop["observed"]["steps"] == 2
    assert loop["planned"]["steps"] == 3
    assert not loop["divergence"], "the recorded step has the ops of the planned ones"


def test_logits_are_those_of_before_where_gradients_are_asked_for_by_hand(tmp_path: Path):
    ran = allowed(
        tmp_path,
        TIGHT,
        """
        model = Net()
        parameters = list(model.parameters())
        for step in range(6):
            tokens = torch.randint(0, classes, (items, length + 1))
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.view(-1, classes), tokens[:, 1:].reshape(-1))
            gradients = torch.autograd.grad(loss, parameters)
            with torch.no_grad():
                for parameter, gradient in zip(parameters, gradients):
                    parameter.sub_(gradient, alpha=50.0)
            print(f"{loss.item():.4f} {logits.square().sum().item():.0f}")
        """,
    )
    assert ran.code == 0


def test_logits_of_an_evaluation_may_be_looked_at_after_more_steps(tmp_path: Path):
    ran = allowed(
        tmp_path,
        TIGHT,
        """
        model = Net()
        train(model, steps=3)
        kept = []
        for _ in range(2):
            with torch.no_grad():
                kept.append(model(torch.arange(64)[None]))
            train(model, steps=1)
        print(*(f"{it.square().sum().item():.0f} {it.argmax().item()}" for it in kept))
        print(str(kept[0])[:8])
        """,
    )
    assert "chunk" in actions_of(ran)
