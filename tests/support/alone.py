"""Code in a process of its own, whose memory nothing else touches.

The processes are forks of one that has imported torch, which would be most of their time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from textwrap import dedent
from typing import Any

BEGIN = """
import gc, json, os, sys, threading
import torch, memfit
from memfit import _native
torch.set_num_threads(1)
MIB = 1 << 20

def status(name):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name + ":"))

def answer(**values):
    print(json.dumps(values), flush=True)

with memfit.guard("1GiB"):
    torch.ones(MIB).add_(1)
gc.collect()
"""

_forks: list[subprocess.Popen[str]] = []


def alone(code: str) -> dict[str, Any]:
    """Run code that ends with `answer(...)`, and return the answer."""
    if not _forks:
        program = [sys.executable, __file__]
        pipe = subprocess.PIPE
        _forks.append(subprocess.Popen(program, stdin=pipe, stdout=pipe, text=True))
    process = _forks[0]
    assert process.stdin is not None
    assert process.stdout is not None
    print(json.dumps(BEGIN + dedent(code)), file=process.stdin, flush=True)
    exit_code, output = json.loads(process.stdout.readline())
    assert exit_code == 0, output
    answer: dict[str, Any] = json.loads(output.splitlines()[-1])
    return answer


def end() -> None:
    """End the process that forks."""
    while _forks:
        _forks.pop().communicate()


def _serve() -> None:
    import torch

    import memfit

    torch.set_num_threads(1)
    assert memfit.guard is not None
    for line in sys.stdin:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.dup2(writing, 1)
            os.dup2(writing, 2)
            os.close(reading)
            os.close(writing)
            _run(json.loads(line))
        os.close(writing)
        with os.fdopen(reading) as output:
            text = output.read()
        _, status = os.waitpid(child, 0)
        print(json.dumps([os.waitstatus_to_exitcode(status), text]), flush=True)


def _run(code: str) -> None:
    exit_code = 1
    try:
        exec(code, {"__name__": "__main__"})  # noqa: S102 - the tests' own code
        exit_code = 0
    except BaseException:  # noqa: BLE001 - reported to the test
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    _serve()
