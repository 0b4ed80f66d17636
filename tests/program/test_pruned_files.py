"""``memfit prune`` on a real, small model."""

from pathlib import Path

from workloads import mlp

import memfit
from program import run

MLP = "workloads.py:mlp"


def test_a_pruned_model_is_written_and_comes_back(tmp_path: Path):
    file = tmp_path / "pruned.pt"
    outcome = run("prune", MLP, "--budget", "70%", "--save", str(file), "--format", "json")
    assert outcome.code == 0, outcome.stderr
    document = outcome.json
    before, after = document["before"], document["after"]
    assert after["predicted_peak_bytes"] <= document["budget_bytes"]
    assert document["budget_bytes"] == int(0.7 * before["predicted_peak_bytes"])
    model = memfit.load_pruned(mlp, file)
    assert sum(parameter.numel() for parameter in model.parameters()) == after["parameters"]


def test_a_refusal_is_a_sentence_and_writes_nothing(tmp_path: Path):
    file = tmp_path / "pruned.pt"
    for words, code, said in [
        (("--budget", "1KiB"), 1, "pruned as far as it goes the model takes"),
        (("--parameters", "none"), 2, "cannot prune to `none` parameters"),
        (("--parameters", "50%", "--save", str(tmp_path / "no" / "file")), 2, "cannot write"),
    ]:
        outcome = (
            run("prune", MLP, *words, "--save", str(file))
            if code == 1
            else run("prune", MLP, *words)
        )
        assert (outcome.code, outcome.stdout) == (code, ""), outcome.stderr
        assert said in outcome.stderr
        assert "Traceback" not in outcome.stderr
    assert not list(tmp_path.iterdir())
