"""Ctrl-C at any moment of a step: all is as before the step, or as after it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.offloads_parameters

CODE = """
import itertools, signal, sys
import torch
from test_offload_parameters import NOTHING, WEIGHT, build, plan
import memfit.apply.offload.tiers as tiers
from memfit.run.fitted import Fitted
torch.set_num_threads(1)
disk = tiers.DiskTier
tiers.DiskTier = lambda window, folder="": disk(window, folder, allow_memory=True)
fuse, state, moments = sys.argv[1] == "True", sys.argv[2] == "True", int(sys.argv[3])

def now(workload, fitted):
    state = fitted.optimizer.state_dict()["state"]
    entries = [entry for _, entry in sorted(state.items())]
    moments = [v.clone() for entry in entries for _, v in sorted(entry.items())]
    parameters = [p.detach().clone() for p in workload.model.parameters()]
    return [torch.get_rng_state(), *parameters, *moments]

def same(first, second):
    return len(first) == len(second) and all(map(torch.equal, first, second))

twin = build()
ordinary = Fitted(twin, NOTHING)
workload = build()
directions = plan(workload, fuse=fuse, state=state, room=3 * WEIGHT, ahead=WEIGHT)
fitted = Fitted(workload, directions)
torch.manual_seed(0)
ordinary.step()
after = now(twin, ordinary)
torch.manual_seed(0)
fitted.step()
assert same(after, now(workload, fitted))

class At:
    '''Ctrl-C at one moment of a step.'''
    def __init__(self, moment):
        self.left = moment
        self.seen = 0
    def tick(self):
        self.seen += 1
        if self.seen == self.left:
            signal.raise_signal(signal.SIGINT)
    def opcodes(self, frame, event, _):
        # Not in all of memfit: where contexts are entered and left, Python itself loses some.
        if "memfit/apply/offload" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            self.tick()
        return self.opcodes
    def opcode_of(self, step):
        sys.settrace(self.opcodes)
        try:
            step()
        finally:
            sys.settrace(None)
    def transfer_of(self, step):
        real = tiers._Written
        kept = {name: getattr(real, name) for name in ("prefetch", "wait", "fetch", "settle")}
        def around(call):
            def done(*given):
                self.tick()
                result = call(*given)
                self.tick()
                return result
            return done
        for name, call in kept.items():
            setattr(real, name, around(call))
        try:
            step()
        finally:
            for name, call in kept.items():
                setattr(real, name, call)

for how in ("transfer_of", "opcode_of"):
    counted = At(-1)
    before = now(workload, fitted)
    getattr(counted, how)(fitted.step)
    torch.set_rng_state(before[0])
    ordinary.step()
    after = now(twin, ordinary)
    assert same(after, now(workload, fitted))
    came = 0
    for moment in range(1, counted.seen, max(counted.seen // moments, 1)):
        before = now(workload, fitted)
        try:
            getattr(At(moment), how)(fitted.step)
        except KeyboardInterrupt:
            came += 1
        found = now(workload, fitted)
        torch.set_rng_state(before[0])
        if not same(found, before):
            ordinary.step()
            assert same(found, now(twin, ordinary)), (how, moment, counted.seen)
    assert came, how
    print(how, counted.seen, came, flush=True)
fitted.close()
"""


@pytest.mark.parametrize(("fuse", "state"), [(True, True), (False, False)])
def test_an_interrupt_leaves_a_step_done_or_not_begun(fuse, state):
    here = Path(__file__).parent
    paths = [str(here), str(here.parent / "support"), *sys.path]
    code = f"import sys; sys.path[:0] = {paths!r}\n{CODE}"
    command = [sys.executable, "-X", "faulthandler", "-c", code, str(fuse), str(state), "25"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
