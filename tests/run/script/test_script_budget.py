"""Whether a script keeps its budget: said when it does not, and at the end."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ran import Ran, assert_within_budget, in_forks, inline

from memfit import _native
from memfit.run.script.loop_report import (
    _is_worth_asking_for,
    _least_budget_bytes,
    _with_what_is_kept_free,
)
from memfit.run.script.passes import Count
from memfit.run.script.remedies import why_over
from memfit.run.script.verdict import BudgetKept, Over

STEPS = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    block = lambda: nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    model = nn.Sequential(*[block() for _ in range(4)])
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(rows):
        loss = model(torch.randn(4, rows, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(repr(loss.item()))
"""


def test_what_is_kept_is_said_to_be(tmp_path: Path):
    ran = inline(tmp_path, "13MiB", STEPS + "    for _ in range(4): step(512)")
    verdict = ran.fitting["verdict"]
    assert verdict["kept"]
    assert verdict["budget_bytes"] == 13 << 20 >= verdict["peak_bytes"]
    assert "kept: " in ran.stderr
    assert "over the budget" not in ran.stderr


def test_what_the_script_holds_besides_is_in_the_prediction_to_the_byte(tmp_path: Path):
    code = """
    besides = [torch.zeros(1 << 12) for _ in range(5)]
    for _ in range(4): step(512)
    """
    ran = inline(tmp_path, "13MiB", STEPS + code)
    (loop,) = ran.loops
    plan, measured = loop["plan"], loop["planned"]["peak_bytes"]
    assert plan["fits"]
    assert measured <= plan["predicted_peak_bytes"] <= 1.001 * measured
    (tmp_path / "whole").mkdir()
    plain = inline(tmp_path / "whole", "100MiB", STEPS + code)
    (loop,) = plain.loops
    took = loop["planned"]["peak_bytes"]
    assert took <= plan["unplanned_peak_bytes"] <= 1.001 * took


def test_a_peak_between_steps_is_over_the_budget(tmp_path: Path):
    code = """
    for number in range(4):
        step(512)
        if number == 2:
            kept = [torch.zeros(1 << 20) for _ in range(4)]
            del kept
    """
    ran = inline(tmp_path, "13MiB", STEPS + code)
    verdict = ran.fitting["verdict"]
    assert not verdict["kept"]
    assert verdict["why"].startswith("between training steps")
    said = [line for line in ran.stderr.splitlines() if "over the budget of 13.0 MiB by" in line]
    assert len(said) == 1
    assert "OVER BUDGET by" in ran.stderr


def test_a_peak_in_the_step_of_another_optimizer_is_said_to_be_there(tmp_path: Path):
    """The first one's ends the pass; the other makes state of twice its 8 MiB."""
    code = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    table, head = nn.Embedding(1 << 15, 64, sparse=True), nn.Linear(64, 1)
    model = nn.Sequential(table, head)
    of_head = torch.optim.SGD(head.parameters(), lr=0.1)
    of_table = torch.optim.SparseAdam(table.parameters())
    for step in range(3):
        loss = model(torch.randint(1 << 15, (512,))).square().mean()
        loss.backward()
        for optimizer in (of_head, of_table):
            optimizer.step()
            optimizer.zero_grad()
        print(repr(loss.item()))
    """
    verdict = inline(tmp_path, "20MiB", code).fitting["verdict"]
    assert not verdict["kept"]
    assert verdict["why"] == "in a step of `SparseAdam`, which no plan knows"


def test_a_peak_before_the_first_step_is_said_to_be_there(tmp_path: Path):
    code = """
    kept = [torch.zeros(1 << 20) for _ in range(4)]
    del kept
    for _ in range(3): step(512)
    """
    verdict = inline(tmp_path, "13MiB", STEPS + code).fitting["verdict"]
    assert not verdict["kept"]
    assert verdict["why"].startswith("before the first training step")


def test_what_no_plan_fits_is_said_with_the_smallest_budget(tmp_path: Path):
    ran = inline(tmp_path, "1MiB", STEPS + "    for _ in range(3): step(512)")
    verdict = ran.fitting["verdict"]
    assert (verdict["kept"], verdict["budget_bytes"]) == (False, 1 << 20)
    (loop,) = ran.loops
    assert f"`--budget {loop['plan']['minimum_budget_bytes']}`" in ran.stderr


def test_a_percentage_is_judged_once_it_is_bytes():
    lines: list[str] = []
    kept = BudgetKept("50%", lines.append)
    kept.ended(Over("observed", 100, "it was recorded", "more"))
    assert (kept.verdict(), lines) == (None, [])
    kept.resolve(60)
    (line,) = lines
    assert line == "over the budget of 60 B by 40 B: it was recorded"
    verdict = kept.verdict()
    assert verdict is not None
    assert (verdict["kept"], verdict["peak_bytes"]) == (False, 100)


def test_of_several_shares_the_script_has_the_largest():
    lines: list[str] = []
    kept = BudgetKept("50%", lines.append)
    kept.ended(Over("observed", 100, "it was recorded", "more"))
    for share in (0, 60, 120, 30):
        kept.resolve(share)
    verdict = kept.verdict()
    assert verdict is not None
    assert (verdict["kept"], verdict["budget_bytes"]) == (True, 120)


LEFT = """
    import torch
    from torch import nn
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 2048))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(5):
        out = model(torch.randn(1024, 64))
        loss = out.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(repr(loss.item()))
"""


def test_a_percentage_is_judged_where_a_step_leaves_much_and_no_plan_fits(tmp_path: Path):
    ran = inline(tmp_path, "10%", LEFT, fitting=())
    verdict = ran.fitting["verdict"]
    assert verdict is not None
    assert (verdict["kept"], verdict["budget_bytes"] > 0) == (False, True)
    assert "OVER BUDGET" in ran.stderr


SIZES = {
    "two": [64] * 3 + [512] * 3,
    "up": [32 * i for i in range(1, 13)],
    "random": [300, 64, 480, 200, 512, 100, 350, 410],
}


@pytest.mark.parametrize("order", SIZES)
def test_batches_of_other_lengths_keep_the_budget(tmp_path: Path, order: str):
    """The largest step takes 36 MiB unplanned, and the first ones fit as they are."""
    ran = inline(tmp_path, "13MiB", STEPS + f"    for rows in {SIZES[order]}: step(rows)")
    (loop,) = ran.loops
    assert ran.fitting["verdict"]["kept"], ran.stderr
    assert loop["unplanned"]["steps"] == 0
    assert loop["observed"]["steps"] <= 3
    if order != "two":
        assert any("foreseen" in note for note in loop["notes"])


def test_what_the_script_holds_itself_is_not_read_again_in_a_recorded_step(tmp_path: Path):
    code = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Linear(64, 4096)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(3):
        scores = model(torch.randn(256, 64)).log_softmax(1)
        loss = nn.functional.nll_loss(scores, torch.arange(256))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(repr(loss.item()))
    """
    (loop,) = inline(tmp_path, "15MiB", code).loops
    assert loop["observed"]["peak_bytes"] < 15 << 20, "with a copy of `scores` 17 MiB"


def test_evaluations_have_parameters_when_they_use_them(tmp_path: Path):
    """A pass without gradients takes more than a planned step: 17 MiB with all parameters."""
    code = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(5)])
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(6):
        loss = model(torch.randn(512, 512)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 2:
            with torch.no_grad():
                print(model(torch.randn(2048, 512)).sum().item())
        if step == 3:
            torch.save(model.state_dict(), "model.pt")
        print(repr(loss.item()))
    """
    ran = inline(tmp_path, "15MiB", code, offload="chosen")
    (loop,) = ran.loops
    assert ran.fitting["verdict"]["kept"], ran.stderr
    assert "`--no-offload` forbids it" in ran.stderr
    assert "evaluations with parameters offloaded until they are used: 3" in loop["notes"]


def test_calls_in_numbers_have_parameters_in_memory_where_they_fit(tmp_path: Path):
    """As where an agent acts: each of 40 calls read all parameters that the plan has in files."""
    code = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(*[it for _ in range(8) for it in (nn.Linear(256, 256), nn.Tanh())])
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(6):
        x = torch.randn(64, 256)
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            y = torch.randn(1, 256)
            for _ in range(40):
                y = model(y)
        print(repr(loss.item()), y.sum().item())
    """
    ran = inline(tmp_path, "4MiB", code, offload=str(tmp_path))
    (loop,) = ran.loops
    assert ran.fitting["verdict"]["kept"], ran.stderr
    assert "offload_parameters" in [it["kind"] for it in loop["plan"]["actions"]]
    evaluations = "evaluations with parameters offloaded until they are used: "
    [count] = [it.removeprefix(evaluations) for it in loop["notes"] if it.startswith(evaluations)]
    assert int(count) <= 20, "of 240"


def test_a_folder_is_chosen_where_nothing_else_fits(tmp_path: Path):
    """The optimizer's state is most of what there is, and it can only go elsewhere."""
    code = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)])
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(4):
        loss = model(torch.randn(8, 512)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(repr(loss.item()))
    """
    (tmp_path / "chosen").mkdir()
    (tmp_path / "none").mkdir()
    chosen = inline(tmp_path / "chosen", "22MiB", code, offload="chosen")
    none = inline(tmp_path / "none", "22MiB", code)
    (loop,), (without,) = chosen.loops, none.loops
    assert loop["plan"]["fits"]
    assert chosen.fitting["verdict"]["kept"], "the step that is recorded, too"
    assert not without["plan"]["fits"]
    kinds = {action["kind"] for action in loop["plan"]["actions"]}
    assert kinds & {"offload_optimizer", "offload_parameters"}
    assert loop["planned"]["peak_bytes"] <= 22 << 20
    assert "`--no-offload` forbids it" in chosen.stderr
    assert "what lacks room is offloaded" not in none.stderr
    assert "without --no-offload a step would take" in none.stderr


@pytest.mark.parametrize("size", [900, (46 << 20) + 27136, (3 << 30) + 5, (1 << 40) + 1])
def test_a_budget_that_is_named_as_a_remedy_is_large_enough(size: int):
    """46.03 MiB are 46.0 MiB as people read them, which would be too little."""
    _, remedy = why_over("observed", size, None, "")
    named = _native.parse_budget(remedy.removeprefix("a budget of "), 0)
    assert size <= named <= size * 1.011


def test_the_smallest_budget_to_ask_for_has_room_for_the_steps_that_are_recorded():
    plan: Any = SimpleNamespace(minimum_budget_bytes=100)
    for recorded, least in [(150, 150), (80, 100)]:
        loop: Any = SimpleNamespace(counts={"observed": Count(1, recorded)})
        assert _least_budget_bytes(loop, plan, None) == least


@pytest.mark.parametrize(
    "case",
    [
        (90, True, True, True),
        (90, True, False, False),
        (90, False, True, False),
        (110, True, True, False),
        (110, False, False, True),
        (None, False, True, False),
    ],
)
def test_a_budget_is_asked_for_only_where_it_would_help(case: tuple[int | None, bool, bool, bool]):
    least, is_kept, is_alone, is_told = case
    plan = {"budget_bytes": 100, "minimum_budget_bytes": least}
    assert _is_worth_asking_for(plan, is_kept=is_kept, is_alone=is_alone) == is_told


def test_a_plan_that_only_what_is_kept_free_keeps_from_fitting_is_told_as_such():
    plan: Any = SimpleNamespace(budget_bytes=100 << 20, margin_bytes=2 << 20)
    plan.minimum_peak_bytes = 99 << 20
    assert _with_what_is_kept_free(plan) == "100.0 MiB with 2.0 MiB to spare"
    plan.minimum_peak_bytes = 101 << 20
    assert _with_what_is_kept_free(plan) == "100.0 MiB"


def _strict(folder: Path, budget: str, code: str, *options: str) -> Ran:
    script = folder.with_suffix(".py")
    script.write_text(code)
    command = ["-m", "memfit", "run", "--budget", budget, "--strict", *options, str(script)]
    (ran,) = in_forks([(command, folder)])
    return ran


def test_the_smallest_budget_to_ask_for_has_room_for_what_runs_between_steps(tmp_path: Path):
    """A frozen teacher, whose forward takes more than any step of the student."""
    code = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(64, 4096), nn.GELU(), nn.Linear(4096, 64))
    student = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64))
    optimizer = torch.optim.SGD(student.parameters(), 0.01)
    for _ in range(5):
        x = torch.randn(512, 64)
        with torch.no_grad():
            wanted = teacher(x)
        loss = (student(x) - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(repr(loss.item()))
    """
    first = inline(tmp_path, "3MiB", code)
    assert not first.fitting["verdict"]["kept"]
    (loop,) = first.loops
    least = loop["plan"]["minimum_budget_bytes"]
    (tmp_path / "again").mkdir()
    again = inline(tmp_path / "again", str(least), code)
    assert again.fitting["verdict"]["kept"], again.stderr


def test_modules_inside_a_model_that_trains_are_not_listed(tmp_path: Path):
    code = """
    import torch
    from torch import nn
    from torch.nn.utils.parametrizations import spectral_norm

    torch.manual_seed(0)
    layer = lambda: (spectral_norm(nn.Linear(128, 128)), nn.GELU())
    model = nn.Sequential(*[it for _ in range(4) for it in layer()])
    critic = nn.Sequential(*layer())
    optimizers = [torch.optim.Adam(it.parameters()) for it in (model, critic)]
    for _ in range(5):
        loss = critic(model(torch.randn(1024, 128))).square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        print(repr(loss.item()))
    """
    ran = inline(tmp_path, "6MiB", code)
    assert all("ParametrizationList" not in loop["models"] for loop in ran.loops)
    assert "ParametrizationList" not in ran.stderr


def test_of_a_rise_outside_the_tensors_nothing_is_said_within_a_budget(tmp_path: Path):
    """What memfit makes itself, to plan and to offload, cannot be told from the script's own."""
    code = """
    numbers = []
    for _ in range(24):
        numbers.append(list(range(10**8, 10**8 + 60_000)))
        step(64)
    """
    ran = inline(tmp_path, "100MiB", STEPS + code)
    assert "all through the run" not in ran.stderr


def test_strict_stops_before_a_step_that_no_plan_fits(tmp_path: Path):
    steps = "    for rows in (64, 64, 2048, 2048): step(rows)"
    ran = _strict(tmp_path / "run", "13MiB", textwrap.dedent(STEPS + steps), "--no-offload")
    assert ran.code == 74
    assert len(ran.stdout.splitlines()) >= 2, "the small ones ran"


def test_strict_says_what_was_refused_before_any_plan(tmp_path: Path):
    steps = "    for _ in range(3): step(2048)"
    ran = _strict(tmp_path / "run", "4MiB", textwrap.dedent(STEPS + steps), "--no-offload")
    assert ran.code == 74
    assert "memfit: stopped before the budget of 4.0 MiB would be exceeded: " in ran.stderr
    assert " were asked for with " in ran.stderr
    assert "memfit plan FILE.py" not in ran.stderr, "it is a script that runs within a budget"
    assert " of 4.0 MiB (`--strict` stopped the script)" in ran.stderr


def test_strict_names_ways_out(tmp_path: Path):
    code = """
    import torch
    from torch import nn
    model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        model(torch.randn(4, 1024)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        print("stepped")
    """
    ran = _strict(tmp_path / "run", "60%", textwrap.dedent(code), "--no-offload")
    assert ran.code == 74
    assert "stopped before the budget would be exceeded: no plan fits" in ran.stderr
    assert "`--budget " in ran.stderr
    assert "without --no-offload" in ran.stderr
    assert ran.stdout == "stepped\n"


def test_what_was_not_allowed_is_offered_with_what_it_reaches(tmp_path: Path):
    code = """
    import torch
    from torch import nn
    model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        model(torch.randn(4, 1024)).square().mean().backward()
        print([p.grad.norm().item() for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    """
    script = tmp_path / "run.py"
    script.write_text(textwrap.dedent(code))
    command = ["-m", "memfit", "run", "--budget", "20MiB", "--no-offload", str(script)]
    (ran,) = in_forks([(command, tmp_path / "run")])
    assert ran.code == 0
    offered = re.search(r"without --no-offload a step would take (\S+) MiB, at", ran.stderr)
    least = re.search(
        r"the smallest peak that keeps the script's own loop is (\S+) MiB", ran.stderr
    )
    assert offered is not None
    assert least is not None
    assert float(offered[1]) < float(least[1])
    assert "`--allow equivalent` may run the model on pieces of its batch" in ran.stderr


def test_strict_lets_a_script_be_that_keeps_its_budget(tmp_path: Path):
    code = STEPS + "    for _ in range(3): step(64)\n    raise SystemExit(3)"
    assert _strict(tmp_path / "run", "64MiB", textwrap.dedent(code)).code == 3


def test_a_script_that_memfit_gave_up_is_not_said_to_keep_its_budget(tmp_path: Path):
    ran = inline(
        tmp_path,
        "4MiB",
        """
    import torch
    from memfit.run.script.loop import Loop

    def fail(*_args, **_options):
        raise RuntimeError("broken")

    Loop.begin = fail
    model = torch.nn.Linear(512, 512)
    model(torch.randn(2048, 512)).square().mean().backward()
    """,
    )
    assert "memfit failed" in ran.stderr
    verdict = ran.fitting["verdict"]
    assert not verdict["kept"]
    assert verdict["peak_bytes"] > 8 << 20


def test_a_group_of_one_process_is_planned(tmp_path: Path):
    """``DistributedDataParallel`` in a script that is started without others."""
    code = """
    import torch
    import torch.distributed as dist
    from torch import nn

    torch.manual_seed(0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    layers = [nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(6)]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(6):
        optimizer.zero_grad()
        loss = model(torch.randn(2048, 128)).square().mean()
        loss.backward()
        optimizer.step()
        print(repr(loss.item()))
    torch.save(model.state_dict(), "end.pt")
    dist.destroy_process_group()
    """
    ran = inline(tmp_path, "60%", code, offload="chosen")
    (loop,) = ran.loops
    assert loop["refusal"] is None
    assert loop["planned"]["steps"] >= 4
    assert_within_budget(loop)


def test_what_a_step_is_said_to_take_grows_with_what_the_script_holds(tmp_path: Path):
    """As in a GAN, whose generator's optimizer makes its state after the discriminator's plan."""
    code = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    held = []
    for step in range(6):
        optimizer.zero_grad()
        model(torch.randn(1024, 256)).square().mean().backward()
        optimizer.step()
        if step == 3:
            held.append(torch.randn(4, 256, 1024))
    print(sum(it.sum().item() for it in held))
    """
    ran = inline(tmp_path, "64MiB", code)
    (loop,) = ran.loops
    measured = loop["planned"]["peak_bytes"]
    assert measured <= loop["plan"]["predicted_peak_bytes"] <= 1.03 * measured
    assert loop["plan"]["unplanned_peak_bytes"] == loop["plan"]["predicted_peak_bytes"]
