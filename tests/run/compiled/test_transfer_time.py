"""What transfers cost a compiled step, beside the graphs as written run tick by tick."""

import functools
import math
import random
from collections import deque

import pytest
import torch
from graphs import Transformer, run, tokens

from memfit.run.compiled import transfer_nodes, transfer_ops, transfer_time
from memfit.run.compiled.inductor.rates import Place, Rates
from memfit.run.compiled.schedule import Decision, schedule

QUICK = Rates((("float32", 1.0),), 1e30)
"""So fast a memory that copies take no time."""


@pytest.fixture(autouse=True)
def _small_tensors_leave(monkeypatch):
    monkeypatch.setattr(transfer_nodes, "LEAST_BYTES", 64)
    monkeypatch.setattr(transfer_time, "REQUEST_SECONDS", 0.0)


@functools.cache
def moved(seed):
    """A transformer's graphs with some tensors elsewhere and some computed again; only read."""

    def decide(joint):
        draw = random.Random(seed)
        dropped = frozenset(s for s in joint.droppable() if draw.random() < 0.3)
        order = transfer_nodes.candidates(joint, schedule(joint, Decision(dropped)))
        leaving = [s for s in order if draw.random() < 0.7]
        return Decision(dropped, away=frozenset(leaving))

    torch.manual_seed(0)
    with transfer_ops.moving(transfer_ops.Transit(_Nowhere())):
        found = run(Transformer(2, 0.0), tokens(), decide)
    return found.joints[0], found.schedules[0], found.modules[0]


class _Nowhere:
    """Keeps in memory what is sent: only the graphs matter here."""

    def send(self, source):
        return _Kept(source.detach().clone())


class _Kept:
    def __init__(self, data):
        self.data = data

    def settle(self):
        pass

    def prefetch(self, target):
        target.copy_(self.data.contiguous().view(-1).view(torch.uint8))

    def wait(self):
        pass


def ticks_of(target):
    """How long an op takes, by what it is."""
    name = str(target)
    return {"mm": 7, "addmm": 5, "bmm": 3}.get(name.split(".")[1] if "." in name else "", 1)


class Ticks:
    """Runs a graph as written, tick by tick, beside a channel that moves one thing at a time."""

    def __init__(self):
        self.waited = 0
        self._queue: deque[list] = deque()  # what is asked for: its name and the ticks it takes
        self._arrived: set[str] = set()
        self._asked: set[str] = set()

    def run(self, module, ticks_to_move):
        """Run forward or backward, where transfers take so long; the ticks that it waits."""
        fetches = {node.args[0]: node for node in module.graph.nodes if _is_fetch(node)}
        for node in module.graph.nodes:
            name = str(node.target)
            if node.op != "call_function" or name.startswith("<built-in"):
                continue
            if name.startswith("memfit.send_away"):
                self._ask(node, ticks_to_move(node.args[0]))
            elif name.startswith("memfit.settle"):
                self._wait(node.args[0])
            elif name.startswith("memfit.fetch"):
                for ticket in (node.args[0], *node.args[1]):
                    self._ask(ticket, ticks_to_move(fetches[ticket]))
                self._wait(node.args[0])
            else:
                for _ in range(ticks_of(node.target)):
                    self._tick()
        assert not self._queue, "nothing is under way between forward and backward, or after them"
        return self.waited

    def _ask(self, ticket, ticks):
        if ticket.name not in self._asked:
            self._asked.add(ticket.name)
            self._queue.append([ticket.name, ticks])

    def _wait(self, ticket):
        while ticket.name not in self._arrived:
            self.waited += 1
            self._tick()

    def _tick(self):
        if self._queue:
            self._queue[0][1] -= 1
            if self._queue[0][1] == 0:
                self._arrived.add(self._queue.popleft()[0])


def tick_by_tick(modules, rate, write, read):
    """Ticks that computing waits while the graphs run: a slow twin."""
    forward, backward = modules
    return Ticks().run(forward, lambda node: write * _bytes(node) // rate) + Ticks().run(
        backward, lambda node: read * _bytes(node) // rate
    )


def _bytes(node):
    return node.meta["val"].untyped_storage().nbytes()


def _is_fetch(node):
    return node.op == "call_function" and str(node.target).startswith("memfit.fetch")


@pytest.mark.parametrize(("write", "read"), [(1, 1), (2, 3), (40, 1)])
@pytest.mark.parametrize("seed", range(4))
def test_waits_are_those_of_the_graphs_tick_by_tick(seed, write, read):
    joint, made, modules = moved(seed)
    sizes = [joint.storages[joint.tensors[at.tensor].storage].bytes for at in made.settled]
    assert len(sizes) > 3
    rate = math.gcd(*sizes)
    seconds = [float(ticks_of(op.node.target)) for op in joint.ops]
    place = Place(rate / write, rate / read, QUICK)
    found = transfer_time.lost_seconds(joint, made, seconds, place)
    assert found == pytest.approx(tick_by_tick(modules, rate, write, read))
    assert found > 0


def test_where_computing_takes_no_time_nothing_is_hidden():
    joint, made, _ = moved(0)
    place = Place(100.0, 50.0, QUICK)
    none = [0.0] * len(joint.ops)
    found = transfer_time.lost_seconds(joint, made, none, place)
    assert found == pytest.approx(made.away_bytes * (1 / 100 + 1 / 50))


def test_copies_and_requests_are_never_hidden(monkeypatch):
    joint, made, _ = moved(0)
    hour = [3600.0] * len(joint.ops)
    place = Place(1e15, 1e15, Rates((("float32", 1.0),), 1e6))
    copies = 7 * made.away_bytes / 1e6
    assert transfer_time.lost_seconds(joint, made, hour, place) == pytest.approx(copies, rel=1e-6)
    monkeypatch.setattr(transfer_time, "REQUEST_SECONDS", 1.0)
    requests = 2 * len(made.settled)
    assert transfer_time.lost_seconds(joint, made, hour, place) == pytest.approx(copies + requests)
