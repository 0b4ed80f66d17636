"""What is predicted of a step on the GPU that is here, against the step."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memfit
from memfit.capture import record

pytestmark = pytest.mark.gpu

WIDTH, HEADS = 512, 8


class Attention(nn.Module):
    """Attention behind a mask that the batch decides on; its query may have more heads."""

    def __init__(self, *, grouped: bool):
        super().__init__()
        self.grouped = grouped
        self.query = nn.Linear(WIDTH, WIDTH)
        self.keys = nn.Linear(WIDTH, WIDTH // 2 if grouped else WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, length, _ = x.shape
        shared = None if mask.all() else mask[:, None, None, :]
        query = self.query(x).view(batch, length, HEADS, -1).transpose(1, 2)
        heads = HEADS // 2 if self.grouped else HEADS
        keys = self.keys(x).view(batch, length, heads, -1).transpose(1, 2)
        found = F.scaled_dot_product_attention(
            query, keys, keys, attn_mask=shared, enable_gqa=self.grouped
        )
        return found.transpose(1, 2).reshape(batch, length, WIDTH)


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = [(3, 64), (64, 128), (128, 128)]
        layers = [
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())
            for a, b in sizes
        ]
        self.layers = nn.Sequential(*layers, nn.ConvTranspose2d(128, 16, 2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


def workload(kind: str, autocast: torch.dtype | None = None) -> memfit.Workload:
    torch.manual_seed(0)
    x = torch.randn(16, 512, WIDTH, device="cuda")
    mask = torch.ones(16, 512, dtype=torch.bool, device="cuda")
    if kind == "masked":
        mask[:, -1] = False
    if kind in ("lstm", "conv"):
        model: nn.Module = Recurrent().cuda() if kind == "lstm" else Convolutions().cuda()
        x = x if kind == "lstm" else torch.randn(32, 3, 96, 96, device="cuda")
        return memfit.Workload(
            model=model,
            batch={"x": x},
            loss=lambda model, batch: model(batch["x"]).float().square().mean(),
            optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3),
            autocast=autocast,
        )
    return memfit.Workload(
        model=Attention(grouped=kind == "grouped").cuda(),
        batch={"x": x, "mask": mask},
        loss=lambda model, batch: model(batch["x"], batch["mask"]).float().square().mean(),
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3),
        autocast=autocast,
    )


MEASURED = """
import faulthandler, sys
import torch
faulthandler.dump_traceback_later(50, exit=True)
sys.path.insert(0, sys.argv[1])
from test_on_gpu import workload
import memfit
from memfit.run.fitted import Fitted
kind, dtype = sys.argv[2:]
work = workload(kind, getattr(torch, dtype) if dtype != "float32" else None)
predicted = memfit.predict(work)
fitted = Fitted(work, {"actions": []})
fitted.step()
torch.cuda.synchronize()
torch.cuda.reset_peak_memory_stats()
fitted.step()
print(*predicted.interval_bytes, torch.cuda.max_memory_allocated())
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["plain", "masked", "grouped", "conv", "lstm"])
def test_the_peak_is_that_of_the_step(kind: str, dtype: str):
    # In a process of its own: what cuBLAS keeps of earlier steps depends on what they were.
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(Path(__file__).parent), kind, dtype],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    least, most, measured = map(int, done.stdout.split())
    assert least * 0.99 <= measured <= most, (least, most, measured)


def test_the_kernel_is_the_one_that_torch_takes():
    work = workload("plain", torch.bfloat16)
    recorded = {op["name"] for op in _ops(record(work))}
    profiled = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with profiled as seen, torch.autocast("cuda", torch.bfloat16):
        work.loss(work.model, work.batch)
    ran = {event.name for event in seen.events() if "_scaled_dot_product_" in event.name}
    fused = {name for name in ran if name.endswith("_attention")}
    assert fused
    assert all(any(name.split("::")[1] in op for op in recorded) for name in fused), (ran, recorded)


def _ops(trace):
    return [{"name": trace["strings"][op["name"]]} for op in trace["ops"]]


def test_a_script_on_a_gpu_keeps_its_budget_and_its_numbers(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "from torch import nn\n"
        "torch.manual_seed(0)\n"
        "layers = [nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(8)]\n"
        "model = nn.Sequential(*layers).cuda()\n"
        "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)\n"
        "for _ in range(6):\n"
        "    x = torch.randn(16384, 1024, device='cuda')\n"
        "    loss = model(x).square().mean()\n"
        "    optimizer.zero_grad()\n"
        "    loss.backward()\n"
        "    optimizer.step()\n"
        "    print(repr(loss.item()))\n"
        "print(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())\n"
    )
    plain = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    budget = int(plain[-1].split()[0]) * 60 // 100
    command = ["-m", "memfit", "run", "--no-offload", "--budget", str(budget), str(script)]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:6] == plain[:6]
    assert "kept: " in done.stderr, done.stderr
    assert "unplanned      0" in done.stderr, done.stderr


def test_a_real_step_leaves_the_random_state_of_the_gpu():
    work = workload("lstm")
    before = torch.cuda.get_rng_state()
    assert record(work)["meta"]["captured"] == "real"
    assert torch.equal(torch.cuda.get_rng_state(), before)
