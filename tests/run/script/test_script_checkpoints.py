"""``memfit run --budget`` on scripts that checkpoint parts of their model themselves."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from ran import assert_within_budget, inline

NET = """
    import functools, random
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint, checkpoint_sequential

    torch.manual_seed(0)
    random.seed(0)
    width = 64

    class Block(nn.Module):
        def __init__(self, norm=nn.LayerNorm):
            super().__init__()
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
            self.norm, self.dropout = norm(width), nn.Dropout(0.1)
        def forward(self, x):
            inner = nn.functional.gelu(self.up(self.norm(x)))
            return x + self.dropout(self.down(inner)) + 0.1 * x.tanh() * x.sigmoid()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.into = nn.Linear(width, width)
            self.blocks = nn.ModuleList(blocks())
        def forward(self, x):
            x = self.into(x)
            for call, block in zip(calls, self.blocks):
                x = call(block, x)
            return x
"""

LOOP = """
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(4):
        loss = forward(model, torch.randn(1024, width)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(repr(loss.item()), repr(next(model.parameters()).sum().item()))
    print(torch.rand(1), random.random())
    torch.save(model.state_dict(), "model.pt")
"""

PLAIN = "forward = lambda model, x: model(x)"

UNDONE = "checkpoints of the script are undone: the plan recomputes instead"


def loop_of(tmp_path: Path, budget: str, *parts: str):
    (loop,) = inline(tmp_path, budget, "\n".join(map(textwrap.dedent, (NET, *parts)))).loops
    assert loop["unplanned"]["steps"] == 0
    return loop


def test_checkpoints_of_every_kind_are_replaced_by_the_plan(tmp_path: Path):
    kinds = """
    segments = lambda block, x: checkpoint_sequential(
        nn.Sequential(block.norm, block.up, block.down), 3, x, use_reentrant=False)
    def contexts():
        policy = [torch.ops.aten.addmm.default]
        return torch.utils.checkpoint.create_selective_checkpoint_contexts(policy)
    def nested(block, x):
        inner = lambda y: checkpoint(block, y, use_reentrant=False) * 1.5
        return checkpoint(inner, x, use_reentrant=False, determinism_check="none")
    calls = [
        functools.partial(checkpoint, use_reentrant=False),
        functools.partial(checkpoint, use_reentrant=True),
        lambda block, x: checkpoint(lambda y: block(y), x, use_reentrant=False, early_stop=False),
        functools.partial(checkpoint, use_reentrant=False, context_fn=contexts),
        nested,
        segments,
    ]
    blocks = lambda: [Block() for _ in calls]
    """
    loop = loop_of(tmp_path, "14MiB", kinds, PLAIN, LOOP)
    assert_within_budget(loop)
    assert loop["observed"]["steps"] == 2
    assert loop["notes"] == [UNDONE], "none stays"


def test_a_checkpoint_round_the_model(tmp_path: Path):
    kind = """
    calls = [lambda block, x: block(x)] * 6
    blocks = lambda: [Block() for _ in calls]
    forward = lambda model, x: checkpoint(model, x, use_reentrant=False)
    """
    script = "\n".join(map(textwrap.dedent, (NET, kind, LOOP)))
    (loop,) = inline(tmp_path, "70%", script).loops
    assert loop["planned"]["steps"] == 2
    assert_within_budget(loop)


def test_what_a_body_does_besides_happens_as_often_as_ever(tmp_path: Path):
    """Running statistics move twice a step, as without memfit; only one block has no effect."""
    kinds = """
    count, seen = 0, {"x": 0}
    def counted(block, x):
        global count
        count += 1
        return block(x)
    def noted(block, x):
        seen["x"] += 1
        return block(x)
    def shown(block, x):
        print("block")
        return block(x)
    def drawn(block, x):
        return block(x) if random.random() < 2 else x
    def autocast():
        return torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", torch.bfloat16)
    def through(body, **options):
        return lambda block, x: checkpoint(body, block, x, use_reentrant=False, **options)
    calls = [
        functools.partial(checkpoint, use_reentrant=False),
        functools.partial(checkpoint, use_reentrant=False),
        functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False),
        functools.partial(checkpoint, use_reentrant=False, context_fn=autocast),
        *map(through, (counted, noted, shown, drawn)),
    ]
    blocks = lambda: [Block(), Block(nn.BatchNorm1d), *(Block() for _ in calls[2:])]
    """
    told = "\nprint(count, seen)"
    loop = loop_of(tmp_path, "90%", kinds, PLAIN, LOOP, told)
    stay = "a checkpoint of the script stays as it is: it "
    reasons = {note.removeprefix(stay) for note in loop["notes"] if note.startswith(stay)}
    assert reasons >= {
        "writes to a tensor of shape []",
        "draws other random numbers in backward",
        "runs in contexts of its own",
        "changes `x` of a `dict`",
        "calls `print`",
        "draws random numbers that are not torch's",
    }
    assert sum("changes" in reason for reason in reasons) == 2, "the other is a global"


def test_a_layer_of_all_blocks_keeps_its_order_of_sums(tmp_path: Path):
    """With reentrance each block adds to the gradients by itself, and rounds by itself."""
    kind = """
    calls = [functools.partial(checkpoint, use_reentrant=True)] * 3
    blocks = lambda: [Block()] * 3
    """
    loop = loop_of(tmp_path, "90%", kind, PLAIN, LOOP)
    (note,) = [note for note in loop["notes"] if "checkpoint" in note]
    assert "shares a tensor with other parts" in note


def test_what_bodies_recompute_is_elsewhere_while_steps_are_recorded(tmp_path: Path):
    kinds = """
    def often(block, x):
        for _ in range(4):
            x = block(x)
        return x
    def through(reentrant):
        return lambda block, x: checkpoint(often, block, x, use_reentrant=reentrant)
    calls = list(map(through, (True, False)))
    blocks = lambda: [Block(), Block()]
    """
    loop = loop_of(tmp_path, "9MiB", kinds, PLAIN, LOOP)
    assert loop["observed"]["steps"] == 2
    assert loop["observed"]["peak_bytes"] < 9 << 20, "in memory they are 14 MiB"


def test_a_checkpoint_that_stays_around_a_model_is_said_and_no_hooks_of_the_scripts(
    tmp_path: Path,
):
    code = """
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.GELU(), nn.Linear(256, 64))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(4):
        loss = checkpoint(model, torch.randn(512, 64), use_reentrant=False).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(repr(loss.item()))
    """
    ran = inline(tmp_path, "1MiB", code)
    (loop,) = ran.loops
    why = "the script checkpoints the call of a model, and the checkpoint stays as it is: it writes"
    assert [note for note in loop["notes"] if note.startswith(f"some steps run unplanned: {why}")]
    assert "hooks" not in ran.stderr
    assert ran.fitting["verdict"]["why"].startswith("a step ran unplanned: the script checkpoints")


PAIRS = """
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)

    class Encoder(nn.Module):
        def __init__(self, width=64):
            super().__init__()
            self.into = nn.Linear(width, width)
            layers = (nn.TransformerEncoderLayer(width, 4, batch_first=True) for _ in range(4))
            self.layers = nn.ModuleList(layers)
        def forward(self, x):
            x = self.into(x)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=REENTRANT)
            return x

    model = Encoder()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(5):
        loss = model(torch.randn(16, 32, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"{loss.item():.5f}")
"""


@pytest.mark.parametrize("reentrant", ["False", "True"])
def test_they_are_met_after_memfit_has_recorded_the_model_on_fakes(tmp_path: Path, reentrant: str):
    """That recording meets them by itself, and puts back what met them before."""
    code = PAIRS.replace("REENTRANT", reentrant)
    (loop,) = inline(tmp_path, "26MiB", code, fitting=("--allow", "equivalent")).loops
    assert UNDONE in loop["notes"]
