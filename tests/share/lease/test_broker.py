"""The broker as other processes meet it: hostile input, death, restarts."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import socket
import stat
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from brokers import APART, Broker, Line, until

from memfit import _native
from memfit.errors import LeaseError

RESERVE = {"reserve": {"request": 1, "claims": {"host": 600}, "wait_ms": 0}}
HOLD = """
import memfit, sys
lease = memfit.lease({bytes}, label="held")
print(lease.bytes, flush=True)
sys.stdin.readline()
"""

Script = Callable[[str], "subprocess.Popen[str]"]


def reserve(line: Line, request: int, size: int, wait_ms: int | None = 0) -> dict[str, Any]:
    """Ask, and take up what is granted; the answer."""
    claims = {"host": size}
    answer = line.ask({"reserve": {"request": request, "claims": claims, "wait_ms": wait_ms}})
    if "granted" in answer:
        lease = answer["granted"]["lease"]
        line.ask({"commit": {"request": request, "lease": lease, "revision": 1}})
    return answer


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (b"nonsense\n", "cannot be read"),
        (b"\xff\xfe\n", "cannot be read"),
        (b"[" * 10_000 + b"\n", "cannot be read"),
        (b"x" * 20_000, "longer than 16384 bytes"),
        ({"destroy": {}}, "destroy"),
        ({"reserve": {"request": -1, "claims": {"host": 1}, "wait_ms": 0}}, "-1"),
        ({"hello": {"version": 1, "name": "again"}}, "only once"),
    ],
)
def test_what_cannot_be_read_ends_that_connection_alone_and_says_why(
    broker: Broker, message: object, words: str
) -> None:
    other = Line(broker.socket)
    other.hello()
    hostile = Line(broker.socket)
    hostile.hello()
    answer = hostile.ask(message)
    assert words in answer["error"]["message"]
    assert hostile.receive() == {}
    assert "granted" in other.ask(RESERVE)
    hostile.close()
    other.close()


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"reserve": {"request": 1, "claims": {"host": -1}, "wait_ms": 0}}, "-1"),
        ({"reserve": {"request": 1, "claims": {"host": 2**64}, "wait_ms": 0}}, "cannot be read"),
        ({"reserve": {"request": 1, "claims": {"host": 1.5}, "wait_ms": 0}}, "1.5"),
        ({"reserve": {"request": 1, "claims": {"host": 1}, "wait_ms": -5}}, "-5"),
        ({"reserve": {"request": 1, "claims": {}, "wait_ms": 0, "label": "x" * 201}}, "label"),
        ({"reserve": {"request": 1, "claims": {"host": 1}, "wait_ms": 0, "more": 1}}, "more"),
        ({"destroy": {"request": 1}}, "destroy"),
    ],
)
def test_a_bad_request_is_refused_alone(broker: Broker, message: object, words: str) -> None:
    line = Line(broker.socket)
    line.hello()
    reserve(line, 5, 600)
    refused = line.ask(message)["refused"]
    assert (refused["request"], refused["refusal"]["reason"]) == (1, "bad_request")
    assert words in refused["refusal"]["message"]
    assert "granted" in reserve(line, 2, 400)
    assert broker.granted() == 1000
    line.close()


def test_who_is_cut_off_keeps_what_it_holds_and_comes_back_to_it(broker: Broker) -> None:
    line = Line(broker.socket)
    client = line.hello()["welcome"]["client"]
    lease = reserve(line, 1, 600)["granted"]["lease"]
    assert "error" in line.ask(b"nonsense\n")
    assert line.receive() == {}
    assert [held["state"] for held in broker.status()["leases"]] == ["away"]
    line.close()
    back = Line(broker.socket)
    held = {"lease": lease, "revision": 2, "claims": {"host": 600}, "is_committed": True}
    assert back.hello(resume={"client": client, "leases": [held]})["welcome"]["leases"] == [held]
    back.close()
    until(lambda: broker.granted() == 0)


def test_who_dies_after_it_was_cut_off_holds_nothing(broker: Broker, script: Script) -> None:
    holder = script(
        f"""
import socket, sys
line = socket.socket(socket.AF_UNIX)
line.connect({str(broker.socket)!r})
file = line.makefile("rw")
def ask(text):
    print(text, file=file, flush=True)
    return file.readline()
ask('{{"hello":{{"version":1,"name":"x"}}}}')
ask('{{"reserve":{{"request":1,"claims":{{"host":600}},"wait_ms":0}}}}')
ask("nonsense")
print("cut", flush=True)
sys.stdin.readline()
"""
    )
    assert holder.stdout is not None
    holder.stdout.readline()
    assert broker.granted() == 600
    holder.kill()
    until(lambda: broker.granted() == 0)


def test_all_leases_that_one_may_hold_are_kept_over_a_restart(broker: Broker) -> None:
    client = _native.LeaseClient(broker.socket, "holder")
    for _ in range(256):
        last, _, _ = client.acquire({"host": 1}, None, 0, 0, None, "x" * 200)
    broker.kill()
    broker.start()
    until(lambda: {held["state"] for held in broker.status()["leases"]} == {"committed"})
    assert broker.granted() == 256
    assert client.held(last) is not None


@pytest.mark.parametrize(
    ("first", "words"),
    [
        ({"hello": {"version": 2, "name": "x"}}, "version 2"),
        (RESERVE, "must be `hello`"),
        ({"hello": {"version": 1, "name": "x" * 300}}, "name"),
    ],
)
def test_who_does_not_begin_properly_is_not_let_in(
    broker: Broker, first: object, words: str
) -> None:
    line = Line(broker.socket)
    assert words in line.ask(first)["error"]["message"]
    assert line.receive() == {}
    line.close()


@pytest.mark.parametrize("size", [1001, 2**63, 2**64 - 1])
def test_more_than_there_is_is_refused_at_once_with_the_largest_possible(
    broker: Broker, size: int
) -> None:
    line = Line(broker.socket)
    line.hello()
    ask = {"reserve": {"request": 7, "claims": {"host": size}, "wait_ms": None}}
    refusal = line.ask(ask)["refused"]["refusal"]
    assert refusal["reason"] == "above_capacity"
    assert (refusal["asked_bytes"], refusal["largest_bytes"]) == (size, 1000)
    unknown = {"reserve": {"request": 8, "claims": {"cuda:3": 1}, "wait_ms": None}}
    assert "`host`" in line.ask(unknown)["refused"]["refusal"]["message"]
    line.close()


def pour(line: Line) -> None:
    """Ask without end, or at least far more than anyone should keep."""
    question = json.dumps({"status": {"request": 1}}).encode() + b"\n"
    for _ in range(2000):
        line.socket.sendall(question * 1000)


def test_a_client_that_does_not_read_stops_nobody_else(broker: Broker) -> None:
    deaf = Line(broker.socket)
    deaf.hello()
    deaf.socket.settimeout(0.5)
    with pytest.raises(TimeoutError):  # the broker has stopped reading from it
        pour(deaf)
    other = Line(broker.socket)
    other.hello()
    assert "granted" in other.ask(RESERVE)
    assert broker.granted() == 600
    other.close()
    deaf.close()


def test_a_client_that_does_not_read_keeps_its_lease_where_no_more_files_can_be_opened(
    broker: Broker,
) -> None:
    deaf = Line(broker.socket)
    deaf.hello()
    reserve(deaf, 1, 600)
    assert broker.process is not None
    number = broker.process.pid
    _, most = resource.prlimit(number, resource.RLIMIT_NOFILE)
    resource.prlimit(number, resource.RLIMIT_NOFILE, (3, most))
    deaf.socket.settimeout(0.5)
    with pytest.raises(TimeoutError):
        pour(deaf)
    time.sleep(0.5)
    resource.prlimit(number, resource.RLIMIT_NOFILE, (most, most))
    assert broker.granted() == 600
    deaf.socket.settimeout(60)
    assert "status" in deaf.receive()
    deaf.close()
    until(lambda: broker.granted() == 0)


def test_nothing_is_kept_of_refused_requests(broker: Broker) -> None:
    assert broker.process is not None
    status = Path(f"/proc/{broker.process.pid}/status")

    def resident_kib() -> int:
        found = re.search(r"VmRSS:\s+(\d+)", status.read_text())
        assert found is not None
        return int(found[1])

    line = Line(broker.socket)
    line.hello()
    before = resident_kib()
    for number in range(0, 40_000, 100):
        asks = [
            {"request": each, "claims": {"nope": 1}, "wait_ms": 0, "label": "x" * 200}
            for each in range(number, number + 100)
        ]
        line.send(b"".join(json.dumps({"reserve": ask}).encode() + b"\n" for ask in asks))
        for _ in asks:
            assert "refused" in line.receive()
    assert resident_kib() - before < 4 << 10
    line.close()


def test_the_socket_is_private(broker: Broker) -> None:
    assert stat.S_IMODE(broker.socket.stat().st_mode) == 0o600
    assert stat.S_IMODE(broker.socket.with_suffix(".state").stat().st_mode) == 0o600


def refused_start(broker: Broker) -> str:
    command = [sys.executable, "-m", "memfit", "broker", "--memory", "host=1000"]
    done = subprocess.run(
        [*command, "--socket", str(broker.socket)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    return done.stderr


def test_a_second_broker_for_a_socket_is_refused(broker: Broker) -> None:
    assert "serves" in refused_start(broker)
    assert broker.listens()


def test_a_socket_that_a_dead_broker_left_is_replaced(idle_broker: Broker) -> None:
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(idle_broker.socket))
    assert not idle_broker.listens()
    assert idle_broker.start().granted() == 0


def test_a_file_that_is_no_socket_is_left_as_it_is(idle_broker: Broker) -> None:
    idle_broker.socket.write_text("mine")
    assert "no socket" in refused_start(idle_broker)
    assert idle_broker.socket.read_text() == "mine"


def test_a_folder_that_others_may_write_to_is_not_used(idle_broker: Broker) -> None:
    idle_broker.folder.chmod(0o777)
    assert "chmod 700" in refused_start(idle_broker)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a socket of another user")
def test_a_socket_of_another_user_is_not_used(idle_broker: Broker) -> None:
    with socket.socket(socket.AF_UNIX) as foreign:
        foreign.bind(str(idle_broker.socket))
        os.chown(idle_broker.socket, 12345, 12345)
        assert "12345" in refused_start(idle_broker)
        with pytest.raises(LeaseError, match="user 12345"):
            _native.LeaseClient(idle_broker.socket, "test")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_not_let_in(broker: Broker) -> None:
    for path in (broker.folder, broker.socket):
        path.chmod(0o777)
    source = f"""
import os, socket
os.setuid(12345)
line = socket.socket(socket.AF_UNIX)
line.connect({str(broker.socket)!r})
print(line.makefile().readline())
"""
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=True
    )
    assert "own user" in done.stdout


def test_the_lease_of_a_killed_process_is_back_within_a_second(
    broker: Broker, script: Script
) -> None:
    holder = script(HOLD.format(bytes=700))
    assert holder.stdout is not None
    assert holder.stdout.readline() == "700\n"
    holder.kill()
    assert until(lambda: broker.granted() == 0) < 1.0


def test_a_child_that_keeps_the_socket_open_keeps_no_lease(broker: Broker, script: Script) -> None:
    holder = script(
        HOLD.format(bytes=700).replace(
            "sys.stdin", "import os, time\nif os.fork() == 0:\n    time.sleep(20)\nsys.stdin"
        )
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "700\n"
    holder.kill()
    assert until(lambda: broker.granted() == 0) < 1.0


def test_a_restart_loses_no_lease_of_a_living_process_and_grants_nothing_twice(
    broker: Broker,
) -> None:
    client = _native.LeaseClient(broker.socket, "holder")
    lease, _, _ = client.acquire({"host": 700}, None, 0, 0, None, "kept")
    for _ in range(3):
        broker.kill()
        broker.start()
        other = Line(broker.socket)
        other.hello()
        refusal = other.ask(RESERVE)["refused"]["refusal"]
        assert refusal["reason"] in {"no_room", "held_back"}
        until(lambda: [held["state"] for held in broker.status()["leases"]] == ["committed"])
        assert broker.status()["leases"][0]["label"] == "kept"
        other.close()
    number, revision, claims = client.resize(lease, {"host": 300}, 0)
    assert (number, claims) == (lease, {"host": 300})
    assert revision > 2
    assert broker.granted() == 300
    client.release(lease)
    assert broker.granted() == 0


@pytest.fixture
def unseen(idle_broker: Broker) -> Broker:
    """A broker in a pid namespace of its own: it cannot see who its clients are."""
    probe = [*APART, "true"]
    if shutil.which("unshare") is None or subprocess.run(probe, check=False).returncode != 0:
        pytest.skip("needs leave to make pid namespaces")
    return idle_broker.start("--grace", "2", is_apart=True)


def test_clients_that_cannot_be_seen_keep_what_they_hold_over_a_restart(unseen: Broker) -> None:
    client = _native.LeaseClient(unseen.socket, "holder")
    lease, _, _ = client.acquire({"host": 700}, None, 0, 0, None, None)
    unseen.kill()
    unseen.start("--grace", "2", is_apart=True)
    other = Line(unseen.socket)
    other.hello()
    assert other.ask(RESERVE)["refused"]["refusal"]["reason"] in {"no_room", "held_back"}
    until(lambda: [held["state"] for held in unseen.status()["leases"]] == ["committed"])
    client.release(lease)
    until(lambda: unseen.granted() == 0)  # it goes with the next line of a client that is back
    other.close()


def test_clients_that_cannot_be_seen_and_are_not_back_in_time_hold_nothing(unseen: Broker) -> None:
    line = Line(unseen.socket)
    client = line.hello()["welcome"]["client"]
    lease = reserve(line, 1, 600)["granted"]["lease"]
    assert "error" in line.ask(b"nonsense\n")
    assert unseen.granted() == 600, "it may come back"
    back, again = Line(unseen.socket), Line(unseen.socket)
    held = {"lease": lease, "revision": 2, "claims": {"host": 600}, "is_committed": True}
    resume = {"client": client, "leases": [held]}
    assert back.hello(resume=resume)["welcome"]["leases"] == [held]
    assert "error" in back.ask(b"nonsense\n")
    until(lambda: unseen.granted() == 0)
    assert again.hello(resume=resume)["welcome"]["leases"] == [], "who comes too late is told"
    for each in (line, back, again):
        each.close()


def test_who_waits_over_a_restart_is_served_after_it(broker: Broker, script: Script) -> None:
    holder = _native.LeaseClient(broker.socket, "holder")
    lease, _, _ = holder.acquire({"host": 700}, None, 0, 0, None, None)
    waiter = script("import memfit\nprint(memfit.lease(600, wait=60).bytes, flush=True)")
    until(lambda: len(broker.status()["waiting"]) == 1)
    broker.kill()
    broker.start()
    until(lambda: len(broker.status()["waiting"]) == 1)
    holder.release(lease)
    assert waiter.stdout is not None
    assert waiter.stdout.readline() == "600\n"


def test_what_died_while_no_broker_ran_holds_nothing_after_the_restart(
    broker: Broker, script: Script
) -> None:
    holder = script(HOLD.format(bytes=700))
    assert holder.stdout is not None
    holder.stdout.readline()
    broker.kill()
    holder.kill()
    holder.wait()
    assert broker.start().granted() == 0


def test_a_lease_given_back_while_no_broker_ran_is_not_held_after_the_restart(
    broker: Broker,
) -> None:
    client = _native.LeaseClient(broker.socket, "holder")
    gone, _, _ = client.acquire({"host": 300}, None, 0, 0, None, None)
    kept, _, _ = client.acquire({"host": 200}, None, 0, 0, None, None)
    broker.kill()
    client.release(gone)
    broker.start()
    until(lambda: broker.granted() == 200)
    assert client.held(kept) is not None


def test_without_a_readable_state_living_holders_are_believed_and_nothing_is_granted_meanwhile(
    broker: Broker,
) -> None:
    client = _native.LeaseClient(broker.socket, "holder")
    lease, _, _ = client.acquire({"host": 700}, None, 0, 0, None, None)
    broker.kill()
    broker.socket.with_suffix(".state").write_text("garbage\n")
    broker.start("--grace", "5")
    line = Line(broker.socket)
    line.hello()
    reason = line.ask(RESERVE)["refused"]["refusal"]["reason"]
    assert reason in {"held_back", "no_room"}
    until(lambda: broker.granted() == 700)
    assert client.held(lease) is not None
    assert "state_damaged" in broker.log.read_text()
    line.close()


def test_another_process_cannot_take_over_a_client(broker: Broker, script: Script) -> None:
    holder = script(HOLD.format(bytes=700))
    assert holder.stdout is not None
    holder.stdout.readline()
    taken = broker.status()["leases"][0]
    held = {"lease": taken["lease"], "revision": taken["revision"], "claims": {"host": 700}}
    line = Line(broker.socket)
    last = line.hello()["welcome"]["client"]
    line.close()
    for number in range(last - 5, last + 5):
        line = Line(broker.socket)
        answer = line.hello(resume={"client": number, "leases": [held]})
        assert answer["welcome"]["leases"] == []
        assert broker.granted() == 700
        line.close()


@pytest.mark.parametrize("state", ["kept", "damaged", "damaged twice"])
@pytest.mark.parametrize("number", [1, 2**53, 2**63, 2**64 - 2, 2**64 - 1])
def test_no_number_that_a_client_presents_takes_a_lease_of_another_or_wraps_the_count(
    broker: Broker, state: str, number: int
) -> None:
    holder = _native.LeaseClient(broker.socket, "holder")
    lease, _, _ = holder.acquire({"host": 600}, None, 0, 0, None, None)
    broker.kill()
    for _ in range({"kept": 0, "damaged": 1, "damaged twice": 2}[state]):
        if broker.process is not None and broker.process.poll() is None:
            broker.kill()
        else:
            broker.socket.with_suffix(".state").write_text("garbage\n")
        broker.start("--grace", "2")
    if state == "kept":
        broker.start("--grace", "2")
    evil = Line(broker.socket)
    held = {"lease": number, "revision": 2**64 - 1, "claims": {"host": 1}, "is_committed": True}
    welcome = evil.hello(resume={"client": 5, "leases": [held]})["welcome"]
    assert welcome["leases"] == ([held] if number == 1 and state != "kept" else [])
    until(lambda: not broker.status()["is_held_back"])
    until(lambda: any(held["lease"] == lease for held in broker.status()["leases"]))
    other = Line(broker.socket)
    other.hello()
    for request in range(4):
        other.ask({"reserve": {"request": request, "claims": {"host": 100}, "wait_ms": 0}})
    status = broker.status()
    held_bytes = [held["claims"]["host"] for held in status["leases"]]
    assert sum(held_bytes) == status["devices"][0]["granted_bytes"] <= 1000
    assert holder.held(lease) == (lease, 2, {"host": 600})
    other.close()
    evil.close()


def test_what_cannot_be_written_is_not_granted_and_ends_are_free_when_it_can(
    broker: Broker, script: Script
) -> None:
    holder = script(HOLD.format(bytes=400))
    assert holder.stdout is not None
    holder.stdout.readline()
    line = Line(broker.socket)
    client = line.hello()["welcome"]["client"]
    given_back = reserve(line, 1, 100)["granted"]["lease"]
    elastic = reserve(line, 2, 200)["granted"]["lease"]
    reserved = line.ask({"reserve": {"request": 3, "claims": {"host": 50}, "wait_ms": 0}})
    broker.fill_the_disk()
    assert reserve(line, 4, 100)["refused"]["refusal"]["reason"] == "not_recorded"
    lease = reserved["granted"]["lease"]
    commit = line.ask({"commit": {"request": 5, "lease": lease, "revision": 1}})
    assert commit["refused"]["refusal"]["reason"] == "not_recorded"
    resize = {"request": 6, "lease": elastic, "revision": 2, "claims": {"host": 300}, "wait_ms": 0}
    grown = line.ask({"resize": resize})
    assert grown["refused"]["refusal"]["reason"] == "not_recorded"
    shrunk = line.ask({"resize": {**resize, "request": 7, "claims": {"host": 150}}})
    assert shrunk["changed"]["claims"] == {"host": 150}
    assert "ended" in line.ask({"release": {"request": 8, "lease": given_back}})
    assert "broker.state" in broker.status()["state_error"]
    waiter = script("import memfit\nprint(memfit.lease(400, wait=60).bytes, flush=True)")
    until(lambda: len(broker.status()["waiting"]) == 1)
    broker.kill()
    broker.start("--grace", "60")
    # The file is as it was: what ended or shrank since counts until its holder says so.
    assert broker.granted() == 750
    line.close()
    line = Line(broker.socket)
    held = {"lease": elastic, "revision": 3, "claims": {"host": 150}, "is_committed": True}
    welcome = line.hello(resume={"client": client, "leases": [held]})["welcome"]
    assert welcome["leases"] == [{**held, "revision": 2, "claims": {"host": 200}}]
    assert waiter.stdout is not None
    assert waiter.stdout.readline() == "400\n"
    line.close()


def test_who_waits_while_nothing_can_be_written_is_served_when_it_can(
    broker: Broker, script: Script
) -> None:
    broker.fill_the_disk()
    waiter = script(HOLD.format(bytes="600, wait=60"))
    until(lambda: len(broker.status()["waiting"]) == 1)
    assert broker.granted() == 0
    broker.empty_the_disk()
    assert waiter.stdout is not None
    assert waiter.stdout.readline() == "600\n"
    assert broker.status()["state_error"] is None
    broker.kill()
    assert broker.start().granted() == 600


def test_a_broker_that_is_told_to_stop_leaves_nothing_behind(broker: Broker) -> None:
    assert broker.end() == 0
    assert not broker.socket.exists()
    assert not broker.socket.with_suffix(".state").exists()


def test_a_smaller_broker_than_what_is_held_says_so(broker: Broker) -> None:
    client = _native.LeaseClient(broker.socket, "holder")
    client.acquire({"host": 700}, None, 0, 0, None, None)
    broker.kill()
    command = [sys.executable, "-m", "memfit", "broker", "--memory", "host=500"]
    done = subprocess.run(
        [*command, "--socket", str(broker.socket)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "700 B are held and the capacity is 500 B" in done.stderr


def test_metrics_are_what_prometheus_reads(idle_broker: Broker) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    idle_broker.start("--metrics", f"127.0.0.1:{port}")
    line = Line(idle_broker.socket)
    line.hello()
    line.ask(RESERVE)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    assert 'memfit_granted_bytes{device="host"} 600\n' in text
    assert "memfit_grants_total 1\n" in text
    for sample in text.splitlines():
        assert re.fullmatch(r"# (HELP|TYPE) .*|memfit_\w+(\{device=\"[\w:]+\"\})? [\d.]+", sample)
    line.close()


def ps(broker: Broker, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "memfit", "ps", "--socket", str(broker.socket), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_ps_says_who_holds_what_and_who_waits(broker: Broker, script: Script) -> None:
    holder = script(HOLD.format(bytes=700))
    assert holder.stdout is not None
    holder.stdout.readline()
    waiter = script("import memfit\nmemfit.lease(400, wait=60, label='patient')")
    until(lambda: len(broker.status()["waiting"]) == 1)
    shown = ps(broker)
    assert shown.returncode == 0
    assert f"{holder.pid}" in shown.stdout
    assert "(held)" in shown.stdout
    assert f"{waiter.pid}" in shown.stdout
    document = json.loads(ps(broker, "--format", "json").stdout)
    assert document["broker"]["leases"][0]["claims"] == {"host": 700}
    assert document["broker"]["waiting"][0]["label"] == "patient"


def test_ps_without_a_broker_says_so_and_exits_with_1(idle_broker: Broker) -> None:
    shown = ps(idle_broker)
    assert shown.returncode == 1
    assert "no broker listens" in shown.stdout
    assert "memfit broker" in shown.stderr
    assert json.loads(ps(idle_broker, "--format", "json").stdout)["broker"] is None
