"""Weights in 8 bits: what loading takes, and what a step with them takes.

`load`: a Llama is loaded from a mapped file of safetensors by `memfit.load_quantized`, and in full
with `quantize_` afterwards, each in a process of its own. Two judges: the count of torch's
allocations, and private resident memory as the system has it (`RssAnon`), sampled each millisecond.
Clean pages of the mapped file are a column of their own. Outputs must be the same bit for bit.

`steps`: peaks of inference and of training adapters, predicted and measured.

    .venv/bin/python benchmarks/quantised.py

Results go to benchmarks/results/DATE-quantised.json and .md. Exits with 1 where outputs differ, a
prediction is off by more than 0.5 %, or loading takes more than 1.05 x (result + largest layer).
"""

from __future__ import annotations

import gc
import hashlib
import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import memfit
from memfit.measure import measure_peak, static_tensors
from memfit.run.fitted import Fitted
from memfit.track import cpu
from record import Machine, gib, write_results

LARGEST = 8000 * 512 * 4
MOST_OFF = 0.005
SLACK = 1.05


def llama(layers: int = 8, width: int = 512, vocabulary: int = 8000) -> Any:
    """Llama with random weights."""
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=width * 43 // 16,
        num_hidden_layers=layers,
        num_attention_heads=max(width // 64, 1),
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config).eval()


def quantize(model: Any, config: str = "Int8WeightOnlyConfig") -> Any:
    """A model as torchao quantises it."""
    from torchao import quantization

    settings = getattr(quantization, config)(set_inductor_config=False)
    quantization.quantize_(model, settings)
    return model


def in_full(path: str) -> Any:
    """The whole model, then `quantize_`."""
    from safetensors import safe_open

    model = llama()
    with safe_open(path, framework="pt") as file:
        model.load_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 - no mapping
    return quantize(model)


def by_memfit(path: str) -> Any:
    """The same by memfit."""
    return memfit.load_quantized(llama, path).model


def status(name: str) -> int:
    """Bytes of a line of the process's status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def loaded(way: str, path: str, tiny: str) -> dict[str, Any]:
    """What loading took in this process; a tiny model first, for all that is imported."""
    load = {"in full": in_full, "memfit": by_memfit}[way]
    quantize(llama(1, 64, 8))
    memfit.load_quantized(lambda: llama(1, 64, 8), tiny)
    cpu.start()
    gc.collect()
    before = {name: status(name) for name in ("RssAnon", "RssFile")}
    highest = dict(before)
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(0.001):
            for name, most in highest.items():
                highest[name] = max(most, status(name))

    watcher = threading.Thread(target=watch)
    watcher.start()
    window = cpu.Window()
    first = window.read()
    model = load(path)
    seen = window.close()
    is_over.set()
    watcher.join()
    assert first is not None
    assert seen is not None
    with torch.no_grad():
        logits = model(torch.arange(128).view(2, 64)).logits
    return {
        "way": way,
        "allocated_bytes": seen.peak_bytes - first.current_bytes,
        "result_bytes": seen.current_bytes - first.current_bytes,
        "private_bytes": highest["RssAnon"] - before["RssAnon"],
        "file_bytes": highest["RssFile"] - before["RssFile"],
        "outputs": hashlib.sha256(logits.numpy().tobytes()).hexdigest(),
    }


class Adapted(nn.Module):
    """A frozen layer, and an adapter of low rank beside it."""

    def __init__(self, frozen: nn.Linear) -> None:
        """Put the adapter beside a layer."""
        super().__init__()
        self.frozen = frozen
        self.down = nn.Linear(frozen.in_features, 8, bias=False)
        self.up = nn.Linear(8, frozen.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of both."""
        out: torch.Tensor = self.frozen(x) + self.up(self.down(x))
        return out


def steps() -> list[dict[str, Any]]:
    """Peaks of steps with quantised weights, predicted and measured."""
    ids = torch.randint(0, 2000, (2, 128))
    found = {}
    for config in ("Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"):
        model = quantize(llama(4, 256, 2000), config).requires_grad_(requires_grad=False)
        found[f"inference, `{config}`"] = memfit.Workload(model, {"input_ids": ids})
    model = quantize(llama(4, 256, 2000).requires_grad_(requires_grad=False))
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
    found["training adapters"] = memfit.Workload(
        model.train(),
        {"input_ids": ids, "labels": ids},
        lambda model, batch: model(**batch).loss,
        lambda parameters: torch.optim.AdamW([p for p in parameters if p.requires_grad]),
    )
    rows = []
    for name, workload in found.items():
        with Fitted(workload, {"actions": []}) as fitted:
            fitted.step()
            fitted.step()
            measured = measure_peak(fitted.step, static_tensors(workload, fitted.optimizer))
        predicted = memfit.predict(workload).predicted_peak_bytes
        rows.append({"step": name, "predicted": predicted, "measured": measured.peak_bytes})
    return rows


def main(words: list[str]) -> int:
    """Run both pieces, print and write the results."""
    if words:
        print(json.dumps(loaded(*words)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        from safetensors.torch import save_file

        paths = [f"{folder}/{name}.safetensors" for name in ("model", "tiny")]
        for path, sizes in zip(paths, ((8, 512, 8000), (1, 64, 8)), strict=True):
            save_file(llama(*sizes).state_dict(), path)
        loads = []
        for way in ("in full", "memfit", "memfit", "memfit"):
            program = [sys.executable, __file__, way, *paths]
            output = subprocess.run(program, capture_output=True, text=True, check=True).stdout
            loads.append(json.loads(output.splitlines()[-1]))
    rows = steps()
    table = "\n".join([*load_table(loads), "", *step_table(rows)])
    print(table)
    write_results("quantised", Machine.here(), {"loads": loads, "steps": rows}, table)
    bound = SLACK * (loads[0]["result_bytes"] + LARGEST)
    bad = [
        load for load in loads[1:] if max(load["allocated_bytes"], load["private_bytes"]) > bound
    ]
    bad += [row for row in rows if abs(row["predicted"] / row["measured"] - 1) > MOST_OFF]
    is_same = len({load["outputs"] for load in loads}) == 1
    print("all hold" if is_same and not bad else bad or "outputs differ")
    return 0 if is_same and not bad else 1


def load_table(loads: list[dict[str, Any]]) -> list[str]:
    """The lines about loading."""
    names = ("result", "allocated", "private", "file")
    cells = [[load["way"], *(gib(load[f"{name}_bytes"]) for name in names)] for load in loads]
    return [
        "| loaded | result | most allocated | most private resident | clean pages of the file |",
        "|---|---|---|---|---|",
        *(f"| {' | '.join(row)} |" for row in cells),
    ]


def step_table(rows: list[dict[str, Any]]) -> list[str]:
    """The lines about steps."""
    return [
        "| step | peak: predicted | measured |",
        "|---|---|---|",
        *(f"| {row['step']} | {gib(row['predicted'])} | {gib(row['measured'])} |" for row in rows),
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
