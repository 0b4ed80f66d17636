"""Loss after 200 steps with fewer bits, beside what the order of the data changes.

A GPT of 3 layers of 128 learns the bytes of this project's guides. Five runs in `float32` differ
in nothing but the order of their batches; the others have the order of the first, and hold
activations, optimizer state or parameters in fewer bits, by the plan of least peak that does so.
Held-out loss is that of `float32` weights on the last tenth of the text.

    .venv/bin/python benchmarks/loss_after.py        # about ten minutes

Results go to benchmarks/results/DATE-loss-after.json and .md. Exits with 1 where a loss is further
from that of the first run than two orders of the data are from each other.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch
from torch import Tensor

import memfit
from record import ROOT, Machine, write_results

STEPS = 200
ORDERS = 5
ROWS, LENGTH = 16, 128
OTHERS = ("remat", "unneeded_saves", "fuse_optimizer", "one_by_one", "micro_batch", "chunk")
WAYS = ("shrink", "optimizer_bits", "autocast", "half_parameters")
HEADER = (
    "| run | order of the data | held-out loss | from the first | of the spread |\n"
    "|---|---|---|---|---|"
)


def text() -> Tensor:
    """The bytes of the guides."""
    pages = sorted((ROOT / "docs").rglob("*.md"))
    return torch.tensor(list(b"\n".join(page.read_bytes() for page in pages)))


def rows(of: Tensor, starts: Tensor) -> dict[str, Tensor]:
    """A batch that begins in some places."""
    ids = torch.stack([of[start : start + LENGTH] for start in starts.tolist()])
    return {"input_ids": ids, "labels": ids}


def batches(of: Tensor, order: int) -> list[dict[str, Tensor]]:
    """The same windows for every order."""
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(0, len(of) - LENGTH, (STEPS * ROWS,), generator=generator)
    generator.manual_seed(1000 + order)
    mixed = starts[torch.randperm(len(starts), generator=generator)]
    return [rows(of, part) for part in mixed.split(ROWS)]


def model() -> torch.nn.Module:
    """A small GPT without dropout."""
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=256,
        n_layer=3,
        n_embd=128,
        n_head=4,
        n_positions=LENGTH,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)


def held_out(trained: torch.nn.Module, of: Tensor) -> float:
    """The mean loss over the last tenth of the text."""
    starts = torch.arange(0, len(of) - LENGTH, LENGTH)
    with torch.no_grad():
        losses = [trained(**rows(of, part)).loss * len(part) for part in starts.split(ROWS)]
    return float(sum(losses) / len(starts))


def trained(way: str | None, order: int) -> tuple[float, list[str]]:
    """The held-out loss of one run, and the kinds of action by which it ran."""
    whole = text()
    cut = len(whole) * 9 // 10
    data = batches(whole[:cut], order)
    workload = memfit.Workload(
        model(),
        data[0],
        lambda model, batch: model(**batch).loss,
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    )
    options: dict[str, Any] = {"forbid": OTHERS, "allow": way or "exact"}
    budget: str | int = "1TiB"
    if way is not None:
        budget = memfit.plan(workload, "1%", **options).minimum_budget_bytes
    fitted = memfit.fit(workload, budget, **options)
    with contextlib.closing(fitted):
        kinds = sorted({action.kind for action in fitted.plan.actions})
        for batch in data:
            fitted.step(batch)
    return held_out(workload.model, whole[cut:]), kinds


def main() -> int:
    """Train, compare, write."""
    torch.set_num_threads(1)
    found: list[dict[str, Any]] = []
    runs = [(None, order) for order in range(ORDERS)] + [(way, 0) for way in WAYS]
    for way, order in runs:
        loss, kinds = trained(way, order)
        found.append({"way": way or "float32", "order": order, "loss": loss, "kinds": kinds})
        print(found[-1], flush=True)
    plain = [row["loss"] for row in found[:ORDERS]]
    spread = max(plain) - min(plain)
    for row in found:
        row["off"] = abs(row["loss"] - plain[0])
    lines = [
        f"| {row['way']} | {row['order']} | {row['loss']:.4f} | {row['off']:.4f} "
        f"| {row['off'] / spread:.2f} |"
        for row in found
    ]
    lines += ["", f"Spread over {ORDERS} orders of the data: {spread:.4f}."]
    machine = Machine.here()
    table = "\n".join([HEADER, *lines])
    print(table, machine.sentence(), sep="\n\n")
    write_results("loss-after", machine, found, table)
    missed = [row["way"] for row in found[ORDERS:] if row["off"] > spread]
    unused = [row["way"] for row in found[ORDERS:] if row["way"] not in row["kinds"]]
    print(f"missed: {missed}; not used: {unused}" if missed or unused else "all hold")
    return int(bool(missed or unused))


if __name__ == "__main__":
    sys.exit(main())
