"""Many requests while workers and the broker are killed and its disk is full by turns.

The judge is a file with a place for each worker: under its lock a worker writes what it was granted
and sums what all hold. Under the same lock the test kills a worker and clears its place.
``MEMFIT_LEASE_REQUESTS`` makes it longer; ``lease_load`` in ``benchmarks/sharing`` is faster.
"""

from __future__ import annotations

import fcntl
import os
import random
import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from brokers import Broker, until

REQUESTS = int(os.environ.get("MEMFIT_LEASE_REQUESTS", "1000"))
WORKERS = 4
PLACE = struct.Struct("=QQQ")
"""What a worker holds, how often it has asked, how often all together held too much."""

WORKER = """
import fcntl, os, random, struct, time
from memfit import _native
from memfit.errors import LeaseError
PLACE = struct.Struct("=QQQ")
judge = os.open({judge!r}, os.O_RDWR)
asked = over = 0
def write(held):
    os.pwrite(judge, PLACE.pack(held, asked, over), {place} * PLACE.size)
client = None
while True:
    try:
        client = client or _native.LeaseClient({socket!r}, "worker")
        asked += 1
        size = random.randint(1, 400)
        wait = random.choice((0.0, 0.1, 0.2))
        lease, _, _ = client.acquire({{"host": size}}, None, 0, wait, None, "load")
    except LeaseError as error:
        client = client if error.largest_bytes is not None else None
        continue
    fcntl.flock(judge, fcntl.LOCK_EX)
    write(size)
    held = sum(place[0] for place in PLACE.iter_unpack(os.pread(judge, 10**6, 0)))
    over += held > 1000
    fcntl.flock(judge, fcntl.LOCK_UN)
    time.sleep(random.choice((0.0,) * 30 + (1.0,)))
    write(0)
    client.release(lease)
"""


def test_nothing_is_granted_twice_whatever_is_killed_or_full(
    broker: Broker, script: Callable[[str], subprocess.Popen[str]], tmp_path: Path
) -> None:
    judge = tmp_path / "judge"
    judge.write_bytes(bytes(WORKERS * PLACE.size))
    asked = over = 0

    def start(place: int) -> subprocess.Popen[str]:
        source = WORKER.format(judge=str(judge), socket=str(broker.socket), place=place)
        return script(source)

    def places() -> list[tuple[int, ...]]:
        return list(PLACE.iter_unpack(judge.read_bytes()))

    def kill(place: int) -> None:
        """Nobody counts what a dead worker held."""
        nonlocal asked, over
        with judge.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            workers[place].kill()
            workers[place].wait()
            _, of_this, over_of_this = places()[place]
            asked, over = asked + of_this, over + over_of_this
            file.seek(place * PLACE.size)
            file.write(bytes(PLACE.size))

    workers = [start(place) for place in range(WORKERS)]
    chance = random.Random(5)
    rounds = 0
    while asked + sum(place[1] for place in places()) < REQUESTS or rounds < 24:
        time.sleep(0.15)
        rounds += 1
        if rounds % 2 == 1:
            broker.fill_the_disk()
        elif rounds % 4 == 2:
            broker.empty_the_disk()
        else:
            broker.kill()
            broker.start()
        if rounds % 4 == 1:
            place = chance.randrange(WORKERS)
            kill(place)
            workers[place] = start(place)
    broker.empty_the_disk()
    for place in range(WORKERS):
        kill(place)
    assert over == 0
    until(lambda: broker.granted() == 0)
