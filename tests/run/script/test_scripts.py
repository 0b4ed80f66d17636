"""``memfit run --budget`` on unmodified training scripts: same results, less memory."""

from __future__ import annotations

import importlib.util
import json
import textwrap
from pathlib import Path

import pytest
from ran import assert_within_budget, in_forks, in_processes, inline, run

SCRIPTS = Path(__file__).parent / "scripts"
MIB = 1 << 20


DEEP = """
    import sys
    import torch
    from torch import nn

    torch.manual_seed(0)
    width = 64
    block = lambda: nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1))
    model = nn.Sequential(*[block() for _ in range(8)])
    optimizer = torch.optim.AdamW(model.parameters())
"""


def test_a_deep_model_is_planned_from_its_second_step(tmp_path: Path):
    ran = inline(
        tmp_path,
        "60%",
        DEEP
        + """
    for step in range(6):
        loss = model(torch.randn(2048, width)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(repr(loss.item()))
    torch.save(model.state_dict(), "model.pt")
    """,
    )
    (loop,) = ran.loops
    assert_within_budget(loop)
    assert (loop["models"], loop["optimizers"]) == (["Sequential"], ["AdamW"])
    assert loop["parameters"] == 8 * (64 * 64 + 64)
    assert (loop["observed"]["steps"], loop["planned"]["steps"]) == (1, 5)
    assert loop["unplanned"]["steps"] == 0
    assert loop["observed"]["peak_bytes"] <= loop["plan"]["budget_bytes"]
    # Rounding up what the script holds besides is all that the prediction is above the truth.
    over = loop["plan"]["predicted_peak_bytes"] - loop["planned"]["peak_bytes"]
    assert over <= 2 * MIB
    assert "memfit: `Sequential` (33,280 parameters, AdamW): a step takes" in ran.stderr
    assert "tensors recomputed in backward" in ran.stderr


def test_a_view_made_without_gradients_may_outlive_updates(tmp_path: Path):
    """Torch refuses to say what graph such a view has; looking for one ended the script."""
    script = """
    torch.manual_seed(0)
    with torch.no_grad():
        first = model[0][0].weight[:2]
    for step in range(8):
        loss = model(torch.randn(2048, width)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(repr(loss.item()))
    torch.save(first.detach().clone(), "first.pt")
    """
    ran = inline(tmp_path, "60%", DEEP + script)
    assert ran.code == 0


TRANSFORMER = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(4):
        loss = model(torch.randn(8, 128, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(repr(loss.item()))
"""


def test_a_disk_takes_what_cannot_be_computed_again(tmp_path: Path):
    """A budget that nothing but offloading meets, met; the folder is named from where it began."""
    (tmp_path / "disk").mkdir()
    code = "import os; os.chdir('tmp')\n" + textwrap.dedent(TRANSFORMER)
    shared = "/dev/shm"  # noqa: S108 - refused, nothing is written there
    places = {"without": None, "with": "../../disk", "host": "host", "memory": shared}
    found = []
    for name, place in places.items():
        (tmp_path / name).mkdir()
        found += inline(tmp_path / name, "28%", code, offload=place).loops
    without, offloaded, refused, in_memory = found
    assert not without["plan"]["fits"]
    assert_within_budget(offloaded)
    # Which of them is fastest is a matter of the disk.
    kinds = {action["kind"] for action in offloaded["plan"]["actions"]}
    assert kinds & {"offload", "offload_optimizer", "offload_parameters"}
    assert list((tmp_path / "disk").iterdir()) == []
    note = "nothing is offloaded: the step runs in the host's memory"
    assert refused["notes"][0].startswith(note)
    assert "nothing is offloaded: " in in_memory["notes"][0]
    assert "tmpfs" in in_memory["notes"][0]
    for loop in (refused, in_memory):
        assert loop["planned"]["steps"] == without["planned"]["steps"]


def test_a_folder_that_is_not_there_is_said_before_the_script_runs(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text("print('ran')")
    command = ["-m", "memfit", "run", "--budget", "1GiB", "--offload", "nowhere", str(script)]
    (ran,) = in_forks([(command, tmp_path / "fit")])
    assert (ran.code, ran.stdout) == (2, "")
    assert "cannot offload to `nowhere`: there is no such folder" in ran.stderr


def test_mnist_has_the_same_losses_files_and_exit_code(tmp_path: Path):
    words = ("--epochs", "2", "--batch-size", "90", "--save-model")
    ran = run(tmp_path, "90%", SCRIPTS / "mnist.py", *words, ways=in_processes)
    (loop,) = ran.loops
    assert (loop["models"], loop["optimizers"]) == (["Net"], ["Adadelta"])
    # Where none fits, the plan of a larger batch is no help: a smaller one is recorded too.
    assert ran.fitting["verdict"]["why"].startswith("no plan fits")
    assert (loop["observed"]["steps"], loop["planned"]["steps"]) == (2, 6)
    assert loop["divergence"] is None
    assert "mnist_cnn.pt" in ran.files


def test_a_language_model_that_updates_its_parameters_itself(tmp_path: Path):
    ran = run(tmp_path, "80%", SCRIPTS / "word_language_model.py")
    (loop,) = ran.loops
    assert_within_budget(loop)
    assert (loop["models"], loop["optimizers"]) == (["RNNModel"], [])
    # What it leaves in variables goes in the next step, which is observed, too.
    assert (loop["observed"]["steps"], loop["planned"]["steps"]) == (2, 12)
    assert "lm.pt" in ran.files


def test_a_model_that_makes_its_mask_once_is_planned_from_a_step_without(tmp_path: Path):
    words = ("--model", "Transformer", "--epochs", "3")
    ran = run(tmp_path, "73%", SCRIPTS / "word_language_model.py", *words)
    (loop,) = ran.loops
    # Its logits are in a variable, so that a second step is observed: the mask is there by then.
    assert (loop["observed"]["steps"], loop["planned"]["steps"]) == (2, 19)
    assert loop["divergence"] is None
    assert loop["planned"]["peak_bytes"] <= loop["plan"]["budget_bytes"]


def test_imagenet_zeroes_gradients_after_forward(tmp_path: Path):
    """Its first step shows no gradient in forward, so the second is observed too."""
    ran = run(tmp_path, "95%", SCRIPTS / "imagenet.py", "--epochs", "2")
    (loop,) = ran.loops
    assert_within_budget(loop)
    assert (loop["models"], loop["optimizers"]) == (["ResNet"], ["SGD"])
    assert (loop["observed"]["steps"], loop["planned"]["steps"]) == (2, 6)
    assert "checkpoint.pth.tar" in ran.files


@pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="the Trainer needs accelerate"
)
def test_two_trainers_of_hugging_face_the_second_accumulates_gradients(tmp_path: Path):
    ran = run(tmp_path, "70%", SCRIPTS / "trainer.py")
    (loop,) = ran.loops  # the first model is gone by then, and the second one is like it
    assert_within_budget(loop)
    assert (loop["models"], loop["optimizers"]) == (["GPT2LMHeadModel"], ["AdamW"])
    assert loop["observed"]["steps"] + loop["planned"]["steps"] == 16
    assert loop["observed"]["steps"] <= 2
    assert {"trained-1.pt", "trained-2.pt"} <= ran.files.keys()


def test_two_models_trained_in_turn(tmp_path: Path):
    ran = run(tmp_path, "90%", SCRIPTS / "gan.py")
    assert all(loop["refusal"] is None for loop in ran.loops)
    assert sum(loop["planned"]["steps"] for loop in ran.loops) >= 8


def test_one_model_after_the_other_each_gets_a_plan_and_goes(tmp_path: Path):
    ran = inline(
        tmp_path,
        "60%",
        DEEP
        + """
    import gc, weakref
    def fit(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(*[block() for _ in range(8)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            loss = model(torch.randn(1024, width)).square().mean()
            loss.backward()
            optimizer.step()
            print(seed, repr(loss.item()))
        return weakref.ref(model)
    folds = [fit(seed) for seed in range(3)]
    gc.collect()
    print(folds[0]() is None)
    """,
    )
    assert "True" in ran.stdout
    assert [loop["planned"]["steps"] for loop in ran.loops] == [11]


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_gradients_accumulated_over_passes(tmp_path: Path, reduction: str):
    ran = inline(
        tmp_path,
        "70%",
        DEEP
        + f"""
    for step in range(4):
        for piece in range(3):
            loss = model(torch.randn(1024, width)).square().{reduction}() / 3
            loss.backward()
            print(repr(loss.item()))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    """,
    )
    (loop,) = ran.loops
    assert_within_budget(loop)
    assert (loop["observed"]["steps"], loop["planned"]["steps"]) == (1, 3)


def test_autocast_and_a_gradient_scaler(tmp_path: Path):
    ran = inline(
        tmp_path,
        "70%",
        DEEP
        + """
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=2)
    for step in range(40):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(2048, width)).float().square().sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        print(repr(loss.item()), scaler.get_scale())
    """,
    )
    (loop,) = ran.loops
    assert loop["planned"]["steps"] > 0
    assert loop["refusal"] is None


def test_an_encoder_and_a_decoder_are_one_loop(tmp_path: Path):
    ran = inline(
        tmp_path,
        "70%",
        DEEP
        + """
    class Encoder(nn.Sequential): pass
    class Decoder(nn.Sequential): pass
    encoder = Encoder(*[block() for _ in range(4)])
    decoder = Decoder(*[block() for _ in range(4)])
    optimizers = [torch.optim.Adam(m.parameters()) for m in (encoder, decoder)]
    loss_of = nn.MSELoss()
    for step in range(5):
        batch = torch.randn(2048, width)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = loss_of(decoder(encoder(batch)), batch)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        print(repr(loss.item()))
    """,
    )
    (loop,) = ran.loops
    assert loop["models"] == ["Encoder", "Decoder"]
    assert (loop["observed"]["steps"], loop["planned"]["steps"]) == (2, 3)
    assert loop["planned"]["peak_bytes"] <= loop["plan"]["budget_bytes"]


def test_one_model_called_twice_before_backward(tmp_path: Path):
    ran = inline(
        tmp_path,
        "70%",
        DEEP
        + """
    for step in range(5):
        one, other = model(torch.randn(1024, width)), model(torch.randn(1024, width))
        loss = (one - other).square().mean() + (one * other).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(repr(loss.item()))
    """,
    )
    (loop,) = ran.loops
    assert (loop["planned"]["steps"], loop["divergence"]) == (3, None)
    assert loop["planned"]["peak_bytes"] <= loop["plan"]["budget_bytes"]


def test_a_step_that_fits_is_left_as_it_is(tmp_path: Path):
    ran = inline(
        tmp_path,
        "4GiB",
        DEEP
        + """
    for step in range(3):
        optimizer.zero_grad()
        loss = model(torch.randn(64, width)).square().mean()
        loss.backward()
        optimizer.step()
        print(repr(loss.item()))
    """,
    )
    (loop,) = ran.loops
    assert loop["plan"]["fits"]
    assert loop["plan"]["actions"] == []
    assert "as it is" in ran.stderr


def test_a_budget_out_of_reach_is_said_with_one_to_ask_for(tmp_path: Path):
    script = (
        DEEP
        + """
    for step in range(4):
        loss = model(torch.randn(2048, width)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(repr(loss.item()))
    sys.exit(3)
    """
    )
    ran = inline(tmp_path, "1MiB", script)
    (loop,) = ran.loops
    plan = loop["plan"]
    assert (plan["fits"], ran.code) == (False, 3)
    assert plan["minimum_peak_bytes"] == plan["predicted_peak_bytes"]
    assert plan["predicted_peak_bytes"] < plan["unplanned_peak_bytes"]
    assert loop["planned"]["peak_bytes"] <= plan["predicted_peak_bytes"]
    assert "no plan fits 1.0 MiB" in ran.stderr
    least = plan["minimum_budget_bytes"]
    assert ran.stderr.count(f": `--budget {least}`") == 2, "when it was planned, and at the end"
    (tmp_path / "again").mkdir()
    (again,) = inline(tmp_path / "again", str(least), script).loops
    assert again["plan"]["fits"]
    assert again["planned"]["peak_bytes"] <= least


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (
            """
            model = torch.compile(model, backend="eager")
            for step in range(3):
                loss = model(torch.randn(64, width)).square().mean()
                loss.backward()
                optimizer.step()
                print(repr(loss.item()))
            """,
            "torch.compile",
        ),
        (
            """
            model = torch.jit.trace(model.eval(), torch.randn(4, width))
            for step in range(3):
                loss = model(torch.randn(64, width)).square().mean()
                loss.backward()
                optimizer.step()
                print(repr(loss.item()))
            """,
            "TorchScript",
        ),
        (
            """
            for step in range(3):
                with torch.autograd.graph.save_on_cpu():
                    loss = model(torch.randn(64, width)).square().mean()
                loss.backward()
                optimizer.step()
                print(repr(loss.item()))
            """,
            "saved-tensor hooks",
        ),
    ],
)
def test_what_is_not_understood_runs_as_it_is_and_is_named(tmp_path: Path, code: str, reason: str):
    ran = inline(tmp_path, "70%", textwrap.dedent(DEEP) + textwrap.dedent(code))
    assert reason in ran.stderr
    assert all(loop["planned"]["steps"] == 0 for loop in ran.loops)


def test_data_parallel_without_gpus_is_the_model_itself(tmp_path: Path):
    script = (
        DEEP
        + """
    model = nn.DataParallel(model)
    for step in range(4):
        loss = model(torch.randn(1024, width)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(repr(loss.item()))
    """
    )
    (loop,) = inline(tmp_path, "70%", script).loops
    assert loop["refusal"] is None
    assert loop["plan"]["fits"]
    assert loop["planned"]["steps"] >= 2
    assert loop["planned"]["peak_bytes"] <= loop["plan"]["budget_bytes"]


@pytest.mark.parametrize(
    "code",
    [
        "import torch; print(torch.ones(3).sum())",
        "print('no torch')",
        """
        import torch
        from torch import nn
        model = nn.Linear(3, 3)
        for step in range(4):
            loss = model(torch.ones(3)).sum()
        print(loss.requires_grad)
        """,
        """
        import torch
        from torch import nn
        model = nn.Linear(3, 3)
        with torch.no_grad():
            print(model(torch.ones(3)).shape)
        raise ValueError("no training at all")
        """,
        """
        import torch
        from torch import nn
        model = nn.Linear(3, 3)
        for step in range(3):
            try:
                model(torch.ones(4))
            except RuntimeError as error:
                print(error)
            model(torch.ones(3)).sum().backward()
        """,
    ],
)
def test_scripts_that_do_not_train(tmp_path: Path, code: str):
    inline(tmp_path, "70%", code)


def test_an_exception_in_a_step_is_the_scripts_own(tmp_path: Path):
    ran = inline(
        tmp_path,
        "70%",
        DEEP
        + """
    for step in range(4):
        loss = model(torch.randn(1024 if step < 3 else 1023, width if step < 3 else 3)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    """,
    )
    assert "mat1 and mat2 shapes cannot be multiplied (1023x3 and 64x64)" in ran.stderr
    assert "memfit/run" not in ran.stderr, "no frame of memfit in the traceback"


def test_a_tensor_changed_in_place_is_refused_as_ever(tmp_path: Path):
    ran = inline(
        tmp_path,
        "70%",
        DEEP
        + """
    for step in range(2):
        hidden = model(torch.randn(1024, width))
        loss = hidden.exp()
        out = loss.sum()
        loss.add_(1)
        try:
            out2 = loss.sum() + out
            out2.backward()
            print("passed")
        except RuntimeError as error:
            print(str(error).split(":")[0])
    """,
    )
    assert "modified by an inplace operation" in ran.stdout


def test_evaluation_with_gradients_on_does_not_confuse(tmp_path: Path):
    ran = inline(
        tmp_path,
        "70%",
        DEEP
        + """
    for step in range(6):
        model.train()
        optimizer.zero_grad()
        loss = model(torch.randn(1024, width)).square().mean()
        loss.backward()
        optimizer.step()
        print(repr(loss.item()))
        model.eval()
        total = 0.0
        for batch in range(3):
            total += model(torch.randn(512, width)).mean().item()
        print(repr(total))
    """,
    )
    (loop,) = ran.loops
    assert loop["planned"]["steps"] >= 2


def test_contexts_that_the_script_enters_in_forward_and_leaves_later(tmp_path: Path):
    ran = inline(
        tmp_path,
        "70%",
        DEEP
        + """
    from torch.utils.flop_counter import FlopCounterMode
    for step in range(4):
        hidden = model(torch.randn(1024, width))
        counter = FlopCounterMode(display=False)
        with counter, torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t):
            loss = model[0](hidden).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(repr(loss.item()), counter.get_total_flops())
    """,
    )
    (loop,) = ran.loops
    assert loop["planned"]["steps"] + loop["observed"]["steps"] == 4


def test_a_full_disk_leaves_results_as_they_are(tmp_path: Path):
    ran = inline(
        tmp_path,
        "70%",
        """
    import os
    write, left = os.pwrite, [100_000]
    def full(file, data, offset):
        left[0] -= len(data)
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        return write(file, data, offset)
    os.pwrite = full
    """
        + DEEP
        + """
    for step in range(3):
        loss = model(torch.randn(1024, width)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(repr(loss.item()))
    """,
    )
    (loop,) = ran.loops
    assert "No space left on device" in loop["notes"][0]
    assert loop["planned"]["steps"] == 2


def test_data_that_grows_between_steps_is_planned_for(tmp_path: Path):
    ran = inline(
        tmp_path,
        "12MiB",
        DEEP
        + """
    kept = []
    for step in range(6):
        loss = model(torch.randn(2048, width)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(repr(loss.item()))
        if step == 2:
            kept.append(torch.zeros(2 << 20, dtype=torch.uint8))
    """,
    )
    (loop,) = ran.loops
    assert loop["replans"] == 1
    assert loop["planned"]["peak_bytes"] <= 12 * MIB


def test_workers_of_a_loader_say_nothing_and_neither_does_quiet(tmp_path: Path):
    ran = inline(
        tmp_path,
        "70%",
        DEEP
        + """
    data = torch.utils.data.TensorDataset(torch.randn(512, width))
    if __name__ == "__main__":
        for epoch in range(2):
            for (batch,) in torch.utils.data.DataLoader(data, batch_size=128, num_workers=2):
                loss = model(batch).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                print(repr(loss.item()))
    """,
    )
    assert ran.loops[0]["planned"]["steps"] == 7
    assert ran.stderr.count("Budget") == 1
    fitting = ["-m", "memfit", "run", "--budget", "70%"]
    script = str(tmp_path / "train.py")
    quiet, told = in_forks(
        [
            ([*fitting, "--quiet", script], tmp_path / "quiet"),
            ([*fitting, "--format", "json", script], tmp_path / "json"),
        ]
    )
    assert quiet.stderr == ""
    assert json.loads(told.stderr)["fitting"]["loops"][0]["planned"]["steps"] == 7


def test_a_budget_that_cannot_be_read_is_refused_before_the_script_runs(tmp_path: Path):
    (tmp_path / "script.py").write_text("print('ran')")
    words = ["-m", "memfit", "run", "--budget", "much", str(tmp_path / "script.py")]
    (ran,) = in_processes([(words, tmp_path / "much")])
    assert (ran.code, ran.stdout) == (2, "")
    assert "much" in ran.stderr
