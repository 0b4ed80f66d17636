"""The commands on real, small models."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from memfit.run.compiled import toolchain
from program import PROGRAM, environment, run

MLP = "workloads.py:mlp"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of the MLP."""
    path = tmp_path_factory.mktemp("saved") / "step.memfit"
    outcome = run("predict", MLP, "--save", str(path))
    assert outcome.code == 0, outcome.stderr
    return path


def test_predict_says_where_the_peak_is():
    outcome = run("predict", MLP)
    assert outcome.code == 0, outcome.stderr
    for part in ("Predicted peak", "by category", "activation", "workloads.py"):
        assert part in outcome.stdout
    assert "printed on import" not in outcome.stdout
    assert "printed on import" in outcome.stderr


def test_predict_json_has_the_breakdown():
    document = run("predict", MLP, "--format", "json", "--budget", "1GiB").json
    peak = document["predicted_peak_bytes"]
    assert document["verdict"] == "fits"
    assert document["unplanned"] == {"predicted_peak_bytes": peak}
    for owner in ("category", "module", "source"):
        assert sum(share["bytes"] for share in document["breakdown"][owner]) == peak
    assert document["capture_seconds"] > 0
    assert document["largest_batch"] > document["batch"]


def test_a_saved_trace_gives_the_same_answer(saved: Path):
    live = run("predict", MLP, "--format", "json").json
    again = run("predict", str(saved), "--format", "json").json
    assert again["capture_seconds"] is None
    for document in (live, again):
        del document["capture_seconds"]
    assert again == live


def test_settings_change_the_step():
    small = run("predict", MLP, "--format", "json").json
    large = run("predict", MLP, "--set", "batch=1024", "--format", "json").json
    assert (small["batch"], large["batch"]) == (512, 1024)
    assert large["predicted_peak_bytes"] > small["predicted_peak_bytes"]


def test_predicting_another_batch_equals_capturing_it(saved: Path):
    scaled = run("predict", str(saved), "--batch", "1024", "--format", "json").json
    captured = run("predict", MLP, "--set", "batch=1024", "--format", "json").json
    assert scaled["predicted_peak_bytes"] == captured["predicted_peak_bytes"]


def test_plan_from_a_saved_trace(saved: Path, tmp_path: Path):
    plan_file = tmp_path / "plan.memfit"
    outcome = run("plan", str(saved), "--budget", "95%", "--save", str(plan_file))
    assert outcome.code == 0, outcome.stderr
    assert "FITS: " in outcome.stdout
    shown = run("show", str(plan_file))
    assert (shown.code, shown.stdout) == (0, outcome.stdout)


def test_show_on_a_trace(saved: Path):
    outcome = run("show", str(saved))
    assert outcome.code == 0
    for part in ("training step, AdamW", "forward", "backward", "optimizer", "no memory was taken"):
        assert part in outcome.stdout
    document = run("show", str(saved), "--format", "json").json
    assert document["kind"] == "trace"
    assert document["batch_law_known"] is True


def test_show_needs_no_torch(saved: Path):
    script = (
        "import sys; sys.argv = ['memfit', 'show', sys.argv[1], '--quiet'];"
        "from memfit.__main__ import main; code = main();"
        "sys.exit(code or ('torch' in sys.modules))"
    )
    python = PROGRAM.with_name("python")
    done = subprocess.run(
        [python, "-c", script, str(saved)], env=environment(), capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("target", ["workloads.py:transformer", MLP])
def test_verify_keeps_its_contract(target: str):
    outcome = run(
        "verify", target, "--budget", "80%", "--forbid", "micro_batch", "--format", "json"
    )
    assert outcome.code == 0, outcome.stderr + outcome.stdout
    document = outcome.json
    assert set(document) == {
        "schema_version",
        "target",
        "budget_bytes",
        "verdict",
        "holds",
        "unplanned",
        "planned",
        "minimum_peak_bytes",
        "gradients",
        "loss",
        "plan",
        "capture_seconds",
        "plan_seconds",
    }
    assert document["verdict"] == "fits"
    assert document["holds"] is True
    assert document["gradients"] == {"agreement": "bitwise", "max_relative_error": 0.0}
    assert document["loss"] == {"agreement": "bitwise", "max_relative_error": 0.0}
    for way in ("unplanned", "planned"):
        facts = document[way]
        assert set(facts) == {"predicted_peak_bytes", "measured_peak_bytes", "step_cpu_seconds"}
        error = abs(facts["predicted_peak_bytes"] / facts["measured_peak_bytes"] - 1)
        assert error < 0.02
        assert facts["step_cpu_seconds"] > 0
    assert document["planned"]["measured_peak_bytes"] <= document["budget_bytes"]
    assert set(document["plan"]) == {"actions", "predicted_step_ratio", "lower_bound_ratio"}
    assert document["plan"]["actions"]
    for action in document["plan"]["actions"]:
        assert set(action) == {"kind", "promise", "count", "bytes"}


def test_verify_ends_in_a_table():
    outcome = run(
        "verify", "workloads.py:transformer", "--budget", "80%", "--forbid", "micro_batch"
    )
    assert outcome.code == 0, outcome.stderr + outcome.stdout
    assert "Peak, measured" in outcome.stdout
    assert outcome.stdout.splitlines()[-1].startswith("FITS: ")
    assert outcome.stdout.rstrip().endswith("loss and gradients bitwise equal")


def test_verify_without_any_action_changes_nothing():
    document = run("verify", MLP, "--budget", "200%", "--format", "json").json
    assert document["plan"]["actions"] == []
    assert document["gradients"]["agreement"] == "bitwise"
    assert (
        document["unplanned"]["measured_peak_bytes"] == document["planned"]["measured_peak_bytes"]
    )


@pytest.mark.skipif(toolchain.missing("cpu") is not None, reason=f"{toolchain.missing('cpu')}")
def test_verify_holds_a_compiled_step_against_eager_and_torch_alone():
    outcome = run("verify", MLP, "--budget", "65%", "--compile", "--format", "json", timeout=300)
    assert outcome.code == 0, outcome.stderr + outcome.stdout
    document = outcome.json
    assert document["plan"] is None
    assert document["planned"]["measured_peak_bytes"] <= document["budget_bytes"]
    assert document["planned"]["predicted_peak_bytes"] <= document["budget_bytes"]
    compiled = document["compiled"]
    assert set(compiled) == {
        "reference",
        "tolerance",
        "torch_compile",
        "corrections",
        "actions",
        "graphs",
    }
    alone = compiled["torch_compile"]
    assert set(alone) == {"measured_peak_bytes", "step_cpu_seconds", "max_relative_error"}
    assert document["budget_bytes"] < alone["measured_peak_bytes"]
    assert compiled["reference"] == "eager"
    assert compiled["tolerance"] >= 1e-5
    for what in ("loss", "gradients"):
        assert document[what]["max_relative_error"] <= compiled["tolerance"]
    assert compiled["actions"][0]["kind"] == "remat"
    assert sum(graph["recomputed_ops"] for graph in compiled["graphs"]) > 0


def test_verify_says_why_a_step_is_not_compiled():
    outcome = run(
        "verify", "workloads.py:inference", "--budget", "200%", "--compile", "--format", "json"
    )
    assert outcome.code == 0, outcome.stderr + outcome.stdout
    assert "note: the step runs eager: inference saves nothing" in outcome.stderr
    assert "inference" in outcome.json["not_compiled"]
    assert outcome.json["plan"]["actions"] == []


def test_an_impossible_budget_runs_nothing():
    outcome = run("verify", MLP, "--budget", "10KiB", "--format", "json")
    assert outcome.code == 1
    document = outcome.json
    assert document["verdict"] == "does_not_fit"
    assert document["planned"]["measured_peak_bytes"] is None
    assert document["minimum_peak_bytes"] > 10 << 10


def test_a_refusal_names_a_budget_that_is_enough():
    refused = run("plan", MLP, "--budget", "10KiB")
    assert refused.code == 1
    named = re.search(r"The smallest budget to ask for is .*: `--budget (\d+)`", refused.stdout)
    assert named is not None, refused.stdout
    granted = run("plan", MLP, "--budget", named[1], "--format", "json")
    assert granted.code == 0, granted.stdout
    refused = run("plan", MLP, "--budget", "10KiB", "--format", "json")
    assert refused.json["minimum_budget_bytes"] == int(named[1])


def test_costs_from_a_profiled_step():
    outcome = run("plan", MLP, "--budget", "90%", "--profile", "--format", "json")
    assert outcome.code in {0, 1}, outcome.stderr
    assert outcome.json["cost_source"].startswith("profile")


def test_inference_is_legal():
    outcome = run("predict", "workloads.py:inference", "--format", "json")
    assert outcome.code == 0, outcome.stderr
    assert [phase for phase, _ in outcome.json["phases"]] == ["forward"]


def test_completions_and_manual(tmp_path: Path):
    script = run("completions", "bash")
    assert script.code == 0
    bash = shutil.which("bash")
    assert bash is not None
    file = tmp_path / "memfit.bash"
    file.write_text(script.stdout)
    subprocess.run([bash, "-n", file], check=True)
    page = run("man")
    assert page.code == 0
    assert ".TH memfit 1" in page.stdout


def test_a_verdict_within_the_uncertainty_of_a_prediction_says_so():
    # On CUDA without a GPU, scratch inside ops is not known: up to 5 % more.
    target = "memfit.doctor.step:build"
    near = run("predict", target, "--device", "cuda", "--budget", "2050KiB")
    far = run("predict", target, "--device", "cuda", "--budget", "3MiB")
    assert near.stdout.splitlines()[-1].startswith("FITS: 2.0 MiB predicted, ")
    assert "; the peak may be " in near.stdout.splitlines()[-1]
    assert "may be" not in far.stdout.splitlines()[-1]


def test_a_gpu_is_asked_about_by_name(tmp_path: Path):
    step = tmp_path / "step.memfit"
    fits = run("predict", MLP, "--gpu", "rtx4090", "--format", "json", "--save", str(step)).json
    gpu = fits["gpu"]
    assert (gpu["gpu"], gpu["fits"], fits["verdict"]) == ("RTX 4090", True, "fits")
    assert fits["device_kind"] == "cuda"
    assert gpu["room_bytes"] == fits["budget_bytes"] < gpu["capacity_bytes"] < gpu["memory_bytes"]
    large = run("predict", str(step), "--batch", str(fits["largest_batch"] * 2), "--gpu", "4090")
    assert large.code == 1
    verdict = next(line for line in large.stdout.splitlines() if line.startswith("DOES NOT FIT"))
    assert "on RTX 4090:" in verdict
    assert "memfit plan --device cuda --budget 23484MiB" in verdict


def test_what_a_gpu_cannot_be_asked_about(saved: Path):
    for arguments, words in (
        ((str(saved), "--gpu", "h100"), "runs on `cpu`"),
        ((MLP, "--gpu", "h100", "--device", "cpu"), "`--device cpu` is none"),
        ((MLP, "--gpu", "mi300x"), "mi300x"),
        ((MLP, "--gpu", "h100", "--budget", "1GiB"), "--budget"),
        ((MLP, "--largest", "batch"), "`--budget 3GiB` or `--gpu rtx4090`"),
    ):
        refused = run("predict", *arguments)
        assert (refused.code, refused.stdout) == (2, "")
        assert words in refused.stderr
