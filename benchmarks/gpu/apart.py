"""Measures in processes of their own: a crash or a hang of one costs that one alone.

Responsible for starting the process, for handing on what it found the moment it found it, and for
ending it when its time is over. Not responsible for what is measured.

An error of a CUDA kernel stays with its process for good, and what one measure leaves in the
allocator changes the next; so each begins afresh. Processes are forked from one that has imported
torch and the models' libraries and has not touched the device, which saves seconds each.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import Any

import torch

Row = dict[str, Any]

_PRELOADED = ["torch", "transformers", "timm", "torchvision", "memfit", "memfit.api.fit"]
MOST_SECONDS = 240.0
"""A measure that takes longer hangs, whatever time its piece has."""
_LAST_LINES = 12
_START_SECONDS = 120.0
_context: list[BaseContext] = []


def rows(measure: Callable[..., Iterator[Row]], *arguments: Any, seconds: float) -> Iterator[Row]:
    """Run a generator of figures in a process of its own.

    Args:
        measure: A function of a module; yields figures.
        *arguments: For it.
        seconds: What its piece has left; it is ended then, or after :data:`MOST_SECONDS`.

    Yields:
        The figures, as they come. Where it did not end well, last of all ``failed``: one line, and
        ``traceback`` where it was an exception; where its piece had no more time, ``out_of_time``.
    """
    context = _contexts()
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(sending, measure, arguments))  # type: ignore[attr-defined]
    deadline = time.monotonic() + min(seconds, MOST_SECONDS)
    process.start()
    sending.close()
    has_ended = False
    try:
        while receiving.poll(max(deadline - time.monotonic(), 0.0)):
            try:
                figures = receiving.recv()
            except EOFError:
                break
            if figures is None:
                has_ended = True
                break
            if "failed" in figures:
                has_ended = True
            yield figures
        else:
            process.kill()
            process.join()
            has_ended = True
            if seconds < MOST_SECONDS:
                yield {"out_of_time": f"no time: ended after {seconds:.0f} s, before it was done"}
            else:
                yield {"failed": f"ended after {MOST_SECONDS:.0f} s, before it was done"}
    finally:
        if process.is_alive() and not has_ended:
            process.join(timeout=5)
        if process.is_alive() and not has_ended:
            process.kill()
        process.join()
        receiving.close()
    if not has_ended:
        yield {"failed": f"the process ended with exit code {process.exitcode}"}


def _work(sending: Connection, measure: Callable[..., Iterator[Row]], arguments: Any) -> None:
    """What the process does."""
    try:
        for figures in measure(*arguments):
            sending.send(figures)
        sending.send(None)
    except BaseException as error:  # noqa: BLE001 - whatever it was, the other side is to know
        lines = traceback.format_exc().strip().splitlines()[-_LAST_LINES:]
        said = (str(error).strip().splitlines() or [""])[0]
        sending.send({"failed": f"{type(error).__name__}: {said}", "traceback": lines})


def _contexts() -> BaseContext:
    """How processes are made: forked, or started anew where an import touched the device."""
    if not _context:
        forking = multiprocessing.get_context("forkserver")
        forking.set_forkserver_preload(_PRELOADED)
        _context.append(forking)
        found = list(rows(_touched, seconds=_START_SECONDS))
        if found != [{"touched": False}]:
            _context[:] = [multiprocessing.get_context("spawn")]
    return _context[0]


def _touched() -> Iterator[Row]:
    """Whether the process was forked from one that CUDA ran in, where none can begin any more."""
    yield {"touched": bool(torch.cuda._is_in_bad_fork())}
