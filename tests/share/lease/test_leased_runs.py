"""``memfit run --budget`` beside a broker: leased before it runs, given back at a plan."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from brokers import START_SECONDS, Broker, until
from forks import FORKS

import memfit
from memfit import _native

MIB = 1 << 20
ROOMY = "host=4GiB"

QUICK = "print('ran')"

TRAINS = """
    import json, os, torch
    from torch import nn
    from memfit import _native

    def granted():
        client = _native.LeaseClient(os.environ["MEMFIT_BROKER"], "look")
        return client.status()["devices"][0]["granted_bytes"]

    seen = [granted()]
    torch.manual_seed(0)
    block = lambda: nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Dropout(0.1))
    model = nn.Sequential(*[block() for _ in range(8)])
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for step in range(3):
        loss = model(torch.randn(1024, 256)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seen.append(granted())
    print(json.dumps({"granted": seen, "losses": losses}))
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where what torch takes besides tensors is kept: measured once for these tests."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def started(tmp_path: Path, cache: Path, idle_broker: Broker) -> Iterator[Start]:
    """Starts `memfit run` on a script; what still runs is ended with the test."""
    start = Start(tmp_path, cache, idle_broker)
    yield start
    for process in start.processes:
        process.kill()
        process.communicate()


class Start:
    """Scripts under `memfit run`."""

    def __init__(self, folder: Path, cache: Path, broker: Broker) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[str]] = []
        self.environment = {
            **os.environ,
            "MEMFIT_BROKER": str(broker.socket),
            "XDG_CACHE_HOME": str(cache),
            "OMP_NUM_THREADS": "1",
        }

    def __call__(self, code: str, *options: str) -> subprocess.Popen[str]:
        script = self.folder / "train.py"
        script.write_text(textwrap.dedent(code))
        process = subprocess.Popen(
            [sys.executable, "-m", "memfit", "run", *options, str(script)],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        return process

    def end(self, code: str, *options: str) -> tuple[int, str, str]:
        """Run to the end: exit code, standard output, standard error."""
        process = self(code, *options)
        stdout, stderr = process.communicate(timeout=4 * START_SECONDS)
        return process.returncode, stdout, stderr


def test_the_budget_and_what_torch_takes_besides_are_held_from_the_start_and_the_rest_given_back(
    idle_broker: Broker, started: Start
) -> None:
    idle_broker.start(memory=ROOMY)
    report = started.folder / "report.json"
    options = ("--budget", "200MiB", "--report", str(report))
    code, stdout, stderr = started.end(TRAINS, *options)
    assert code == 0, stderr
    document = json.loads(report.read_text())
    lease, plan = document["lease"], document["fitting"]["loops"][0]["plan"]
    found = json.loads(stdout)
    # Before torch was imported, and over the observed step: all of it.
    assert found["granted"][0] == lease["leased_bytes"] == 200 * MIB + lease["besides_bytes"]
    assert found["granted"][1] == lease["leased_bytes"]
    # Then what the plan takes, and what torch takes besides as measured in this very process.
    assert found["granted"][2] == found["granted"][3] == lease["kept_bytes"]
    besides = lease["kept_bytes"] - plan["predicted_peak_bytes"]
    assert lease["besides_bytes"] / 2 < besides < lease["besides_bytes"] * 2
    assert lease["changes"] == 1
    assert "for torch itself" in stderr, stderr
    assert idle_broker.granted() == 0
    assert found["losses"] == json.loads(plain(started))["losses"]


def plain(started: Start, *words: str) -> str:
    """What the script prints by itself."""
    done = FORKS.run(started.folder / "train.py", *words)
    assert done.code == 0, done.stderr
    return done.stdout


def test_a_run_waits_for_its_turn_and_says_so(idle_broker: Broker, started: Start) -> None:
    idle_broker.start(memory=ROOMY)
    holder = _native.LeaseClient(idle_broker.socket, "holder")
    lease, _, _ = holder.acquire({"host": 4000 * MIB}, None, 0, 0, None, None)
    waiter = started(QUICK, "--budget", "100MiB", "--wait")
    until(lambda: bool(idle_broker.status()["waiting"]))
    assert idle_broker.status()["waiting"][0]["label"] == "train.py"
    assert waiter.poll() is None
    assert waiter.stderr is not None
    line = waiter.stderr.readline()
    assert re.match(r"memfit: waiting for \d+\.\d MiB of `host` \(", line)
    holder.release(lease)
    stdout, stderr = waiter.communicate(timeout=START_SECONDS)
    assert (waiter.returncode, stdout) == (0, "ran\n")
    assert "leased" in stderr, stderr
    assert idle_broker.granted() == 0


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        ((), 75, "was not run: on `host`: asks for"),
        (("--wait=0.2",), 75, "no room within the time allowed"),
        (("--budget", "5GiB", "--wait"), 2, "no more than 4.00 GiB can ever be granted"),
        (("--device", "cuda:7"), 2, "grants no device `cuda:7`"),
        (("--no-lease",), 0, ""),
    ],
)
def test_without_room_the_script_is_not_run_and_the_exit_code_says_why(
    idle_broker: Broker, started: Start, options: tuple[str, ...], code: int, words: str
) -> None:
    idle_broker.start(memory=ROOMY)
    holder = _native.LeaseClient(idle_broker.socket, "holder")
    holder.acquire({"host": 4000 * MIB}, None, 0, 0, None, None)
    budget = () if "--budget" in options else ("--budget", "100MiB")
    found, stdout, stderr = started.end(QUICK, *budget, *options)
    assert found == code, stderr
    assert stdout == ("ran\n" if code == 0 else "")
    assert words in stderr, stderr


def test_an_interrupted_wait_is_over_at_once_and_nothing_waits_any_longer(
    idle_broker: Broker, started: Start
) -> None:
    idle_broker.start(memory=ROOMY)
    holder = _native.LeaseClient(idle_broker.socket, "holder")
    holder.acquire({"host": 4000 * MIB}, None, 0, 0, None, None)
    waiter = started(QUICK, "--budget", "100MiB", "--wait")
    until(lambda: bool(idle_broker.status()["waiting"]))
    waiter.send_signal(signal.SIGINT)
    stdout, _ = waiter.communicate(timeout=START_SECONDS)
    assert (waiter.returncode, stdout) == (130, "")
    until(lambda: not idle_broker.status()["waiting"])


@pytest.mark.parametrize(("options", "says"), [((), ""), (("--wait",), "runs alone")])
def test_without_a_broker_the_script_runs_alone_and_says_so_where_it_was_to_wait(
    idle_broker: Broker, started: Start, options: tuple[str, ...], says: str
) -> None:
    del idle_broker
    code, stdout, stderr = started.end(QUICK, "--budget", "100MiB", *options)
    assert (code, stdout) == (0, "ran\n")
    assert says in stderr, stderr
    assert bool(says) == ("no broker" in stderr)


def test_while_the_broker_is_away_the_script_runs_only_where_the_user_says_so(
    idle_broker: Broker, started: Start
) -> None:
    idle_broker.start(memory=ROOMY)
    idle_broker.kill()
    code, stdout, stderr = started.end(QUICK, "--budget", "100MiB")
    assert (code, stdout) == (75, "")
    assert "is away" in stderr, stderr
    assert "--alone" in stderr, stderr
    code, stdout, stderr = started.end(QUICK, "--budget", "100MiB", "--alone")
    assert (code, stdout) == (0, "ran\n")
    assert "runs alone" in stderr, stderr


def test_a_percentage_is_not_leased_and_the_run_says_so(
    idle_broker: Broker, started: Start
) -> None:
    idle_broker.start(memory=ROOMY)
    code, stdout, stderr = started.end(QUICK, "--budget", "60%")
    assert (code, stdout) == (0, "ran\n")
    assert "nothing is leased: `60%`" in stderr, stderr
    code, stdout, stderr = started.end(QUICK, "--budget", "60%", "--wait")
    assert (code, stdout) == (2, "")
    assert "write bytes" in stderr, stderr


GOES_ON = """
    import json, sys, time, torch
    from pathlib import Path
    from torch import nn

    torch.manual_seed(0)
    block = lambda: nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Dropout(0.1))
    model = nn.Sequential(*[block() for _ in range(8)])
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    steps = int((sys.argv[1:] or ["0"])[0])
    while len(losses) < steps or not (steps or Path("stop").exists()):
        loss = model(torch.randn(1024, 256)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        time.sleep(0.0 if steps else 0.02)
    print(json.dumps(losses))
"""


def test_a_planned_script_gives_way_between_two_steps_and_grows_again(
    idle_broker: Broker, started: Start
) -> None:
    idle_broker.start(memory=ROOMY)
    run = started(GOES_ON, "--budget", "200MiB")
    until(lambda: idle_broker.granted() > 200 * MIB)
    whole = idle_broker.granted()
    until(lambda: 0 < idle_broker.granted() < whole)
    kept = idle_broker.granted()
    other = _native.LeaseClient(idle_broker.socket, "other")
    wanted = 4096 * MIB - kept + 8 * MIB
    lease, _, _ = other.acquire({"host": wanted}, None, 0, 60, None, None)
    assert idle_broker.granted() == 4096 * MIB
    time.sleep(0.5)  # some steps in less
    assert run.poll() is None
    other.release(lease)
    until(lambda: idle_broker.granted() == kept)
    (started.folder / "stop").touch()
    stdout, stderr = run.communicate(timeout=START_SECONDS)
    assert run.returncode == 0, stderr
    assert "gave 8.0 MiB of `host` to a process that needs them" in stderr, stderr
    losses = json.loads(stdout)
    assert losses == json.loads(plain(started, str(len(losses))))


def test_a_script_that_no_plan_is_known_for_says_no_at_once(
    idle_broker: Broker, started: Start
) -> None:
    idle_broker.start(memory=ROOMY)
    started("import time; time.sleep(600)", "--budget", "200MiB")
    until(lambda: idle_broker.granted() > 200 * MIB)
    other = _native.LeaseClient(idle_broker.socket, "other")
    wanted = 4196 * MIB - idle_broker.granted()
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(lambda: other.acquire({"host": wanted}, None, 0, 3, None, None))
        # The broker asks, and is answered long before its ten seconds are over.
        until(lambda: "shrink_asked" in idle_broker.log.read_text())
        until(lambda: idle_broker.status()["leases"][0].get("asked") is None, 2.0)
        with pytest.raises(memfit.LeaseError):
            waits.result(timeout=30)
