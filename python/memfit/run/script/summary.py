"""``memfit run``: a script under the count, and its summary.

Responsible for counting from the moment the script imports torch, for the phase and step at which
things happen, and for the summary. Not responsible for running the script
(:mod:`memfit.run.script.launcher`) nor for words (the program prints the summary).

Everything that imports torch is imported after the script has done so.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from memfit.run.script import launcher
from memfit.run.script.announce import Announcer
from memfit.run.script.imports import Imported
from memfit.run.script.lease import Room, Wish
from memfit.run.script.request import FitRequest

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

    from memfit.run.script.script import AdoptedScript
    from memfit.run.script.waits import Waits
    from memfit.track import cpu, cuda
    from memfit.track.iterations import Iterations
    from memfit.track.looks import Account
    from memfit.track.process import ProcessMemory

SCHEMA_VERSION = 1
"""Version of the summary's shape."""

FORWARD, BACKWARD, OPTIMIZER = range(3)
PHASES = ("forward", "backward", "optimizer")

_HISTORY_LIMIT = 1_000_000
"""Events of CUDA history that are kept, the latest."""

_WORTH_ADVICE = 8
"""What takes one part in so many of the peak is worth a word."""

_LARGE_ARRAYS = 16 << 20

_OUT_OF_MEMORY = re.compile(r"DefaultCPUAllocator: can't allocate memory")
_REQUESTED = re.compile(r"tried to allocate (\d+) bytes")


def run(
    command: Sequence[str],
    *,
    is_module: bool,
    snapshot: str | None,
    request: FitRequest | None = None,
    wish: Wish | None = None,
    announce: bool = False,
) -> dict[str, Any]:
    """Run a script and say what it took.

    Args:
        command: The script or module, and its arguments.
        is_module: Whether it is a module, as with ``python -m``.
        snapshot: Where to write a snapshot of CUDA memory; ``None`` for nowhere.
        request: How its training steps shall be fitted; ``None`` to leave them alone.
        wish: How to lease the budget; ``None`` to lease nothing.
        announce: Whether to say on standard error what is planned, when it is.

    Returns:
        The summary, in the program's words; its ``quiet`` says that it is not to be printed.

    Raises:
        UsageError: There is no such script.
        LeaseError: The broker does not grant the budget; the script was not run.
    """
    launcher.require(command[0], is_module=is_module)
    say = Announcer(shown=announce)
    room = Room(say)
    if wish is not None and request is not None:
        room.open(request.budget, wish, label=Path(command[0]).name)
    watch = Watch(snapshot, request, room, say)
    process = os.getpid()
    imported = Imported()
    _TorchFinder(watch.begin, imported).install()
    ending = launcher.run(command, is_module=is_module)
    launcher.flush()
    summary = watch.summary(command[0], ending)
    room.close()
    imported.give_back()
    summary["quiet"] = launcher.is_child(process)
    return summary


class _TorchFinder:
    """Calls a function once torch is imported.

    It may have been imported before the script runs, by a site hook or a debugger, or past this
    finder, by another one: then any later import tells.
    """

    def __init__(self, on_import: Callable[[], None], imported: Imported) -> None:
        self._on_import = on_import
        self._imported = imported

    def install(self) -> None:
        """Wait for torch, or call at once where it is there."""
        if _is_loaded("torch"):
            self._on_import()
        else:
            sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find torch as ever and add the call to its loading."""
        if name != "torch" and not _is_loaded("torch"):
            return None
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self)
        if name != "torch":
            self._on_import()
            return None
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_tell(module: ModuleType) -> None:
                with self._imported.left_alone():
                    load(module)
                self._on_import()
                _leave_alone(self._imported)

            spec.loader.exec_module = load_and_tell  # type: ignore[method-assign]
        return spec


def _leave_alone(imported: Imported) -> None:
    """Leave alone what is imported after torch, of which models and tensors stay known."""
    from memfit.track.live_objects import LIVE_OBJECTS

    if LIVE_OBJECTS.is_following:
        imported.go_on(LIVE_OBJECTS.note)


def _is_loaded(name: str) -> bool:
    """Whether a module has been imported, to its end."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return spec is not None and not getattr(spec, "_initializing", False)


class Watch:
    """What is seen of one script."""

    def __init__(
        self,
        snapshot: str | None,
        request: FitRequest | None,
        room: Room,
        say: Callable[[str], None],
    ) -> None:
        """Wait for torch.

        Args:
            snapshot: As in :func:`run`.
            request: As in :func:`run`.
            room: What was leased for the script.
            say: Shows a line to the user.
        """
        self._start = time.perf_counter()
        self._snapshot = snapshot
        self._request = request
        self._room = room
        self._say = say
        self._adopted: AdoptedScript | None = None
        self._notes: list[str] = []
        self._began: float | None = None
        self._cpu: cpu.Window | None = None
        self._cuda: cuda.Window | None = None
        self._records_history = False
        self._steps = 0
        self._phase = FORWARD
        self._before_backward: list[int] = []
        self._all_at_once = ""
        self._retaining = 0
        self._retained_bytes = 0
        self._looks_for_retained = 3
        self._iterations: Iterations | None = None
        self._process: ProcessMemory | None = None
        self._waits: Waits | None = None

    def begin(self) -> None:
        """Start to count; torch has just been imported. A failure is noted, never raised."""
        try:
            self._begin()
        except Exception as error:  # noqa: BLE001 - the script must run as it would without memfit
            self._notes.append(f"cannot count: {type(error).__name__}: {error}")

    def _begin(self) -> None:
        import torch
        from torch.nn.modules import module

        from memfit.run.script.waits import Waits
        from memfit.track import cpu, cuda
        from memfit.track.backwards import BACKWARDS
        from memfit.track.iterations import Iterations
        from memfit.track.live_objects import LIVE_OBJECTS
        from memfit.track.looks import LOOKS
        from memfit.track.process import ProcessMemory
        from memfit.track.steps import STEPS

        self._began = time.perf_counter() - self._start
        self._iterations = Iterations()
        self._process = ProcessMemory()
        self._waits = Waits(self._process.ask)
        self._waits.install()
        LIVE_OBJECTS.follow()
        problem = cpu.start()
        if problem is None:
            self._cpu = cpu.Window()
            STEPS.add(self._cpu)
            LOOKS.add(self._cpu)
            LOOKS.listeners += [self._iterations.looked, self._process.ask]
        else:
            self._notes.append(problem)
        self._cuda = cuda.Window()
        STEPS.watch()
        STEPS.listeners.append(self._on_step)
        module.register_module_parameter_registration_hook(_on_parameter)
        module.register_module_buffer_registration_hook(_on_buffer)
        BACKWARDS.watch(self)
        if self._request is not None:
            from memfit.run.script.script import AdoptedScript

            self._adopted = AdoptedScript(self._request, self._room, self._say)
            self._adopted.begin()
        if self._snapshot is not None:
            # Called when the script first uses CUDA; memfit does not start it.
            torch.cuda._lazy_call(self._record_history)  # type: ignore[no-untyped-call]

    def backward_begins(self) -> None:
        """Autograd's engine is about to run; it may run in itself."""
        self._before_backward.append(self._phase)
        self._enter(BACKWARD)

    def backward_ended(self) -> None:
        """It has run."""
        self._enter(self._before_backward.pop())
        if self._iterations is not None and not self._before_backward:
            self._iterations.backward_ended()
        if self._process is not None:
            self._process.ask()

    def _enter(self, phase: int) -> None:
        from memfit import _native

        self._phase = phase
        _native.mark_allocations(self._steps * len(PHASES) + phase)

    def _on_step(self, when: str, optimizer: Optimizer) -> None:
        from memfit.track import cuda

        if when == "before":
            if any(group.get("foreach") for group in optimizer.param_groups):
                self._all_at_once = type(optimizer).__name__
            self._enter(OPTIMIZER)
        if when != "after":
            return  # a closure has run, and the updates come
        self._steps += 1
        self._enter(FORWARD)
        if self._iterations is not None:
            self._iterations.stepped(cuda.allocated_bytes())
        self._look_for_retained()
        if self._process is not None:
            self._process.ask()

    def _look_for_retained(self) -> None:
        """Learn how much of graphs outlives a step because a backward was told to keep them."""
        from memfit.track.backwards import BACKWARDS
        from memfit.track.looks import LOOKS

        retaining, self._retaining = BACKWARDS.retaining - self._retaining, BACKWARDS.retaining
        if retaining and self._looks_for_retained:
            self._looks_for_retained -= 1
            self._retained_bytes = max(self._retained_bytes, LOOKS.graph_bytes())

    def _record_history(self) -> None:
        import torch

        try:
            torch.cuda.memory._record_memory_history(max_entries=_HISTORY_LIMIT)
            self._records_history = True
        except Exception as error:  # noqa: BLE001 - the script must run as it would without memfit
            self._notes.append(f"cannot record CUDA memory: {error}")

    def _write_snapshot(self) -> str | None:
        if self._snapshot is None:
            return None
        if not self._records_history:
            self._notes.append("no snapshot was written: the script did not use CUDA")
            return None
        import torch

        try:
            torch.cuda.memory._dump_snapshot(self._snapshot)  # type: ignore[no-untyped-call]
        except Exception as error:  # noqa: BLE001 - the summary is still worth printing
            self._notes.append(f"cannot write `{self._snapshot}`: {error}")
            return None
        return self._snapshot

    @staticmethod
    def _leave_objects() -> None:
        from memfit.track.live_objects import LIVE_OBJECTS

        LIVE_OBJECTS.leave()

    def summary(self, name: str, ending: launcher.Ending) -> dict[str, Any]:
        """What was seen, in the program's words."""
        elapsed = time.perf_counter() - self._start
        oom = None
        devices: list[dict[str, Any]] = []
        fitting = self._adopted.end(ending.error) if self._adopted is not None else None
        process = self._process.end() if self._process is not None else None
        if self._waits is not None:
            self._waits.remove()
        if self._began is not None:
            self._look_for_the_last_time(ending.error)
            self._advise()
            self._advise_outside()
            oom = self._out_of_memory(ending.error, elapsed)
            devices = self._devices(self._began)
            self._leave_objects()
        else:
            self._notes.append("the script did not import torch: nothing was counted")
        return {
            "schema_version": SCHEMA_VERSION,
            "script": name,
            "ended": "out_of_memory" if oom is not None else ending.ended,
            "exit_code": ending.exit_code,
            "elapsed_seconds": elapsed,
            "torch_imported": self._began is not None,
            "devices": devices,
            "steps": self._step_summary(),
            "process": process,
            "oom": oom,
            "fitting": fitting,
            "lease": self._room.described(),
            "snapshot": self._write_snapshot(),
            "notes": self._notes,
        }

    def _look_for_the_last_time(self, error: BaseException | None) -> None:
        """Name what lives still, also in the functions that an exception has ended."""
        from memfit.track.looks import LOOKS
        from memfit.track.owners import OWNERS

        if self._iterations is not None and self._iterations.looked in LOOKS.listeners:
            LOOKS.listeners.remove(self._iterations.looked)  # no loop runs any more
        OWNERS.search("the end of a script")
        trace = error.__traceback__ if error is not None else None
        LOOKS.look(list(traceback.walk_tb(trace)))
        if LOOKS.problem:
            self._notes.append(f"what is live was looked at no more: {LOOKS.problem}")

    def _advise(self) -> None:
        """Say what would lower the peak, where one look at it tells."""
        from memfit import _native
        from memfit.track.backwards import BACKWARDS
        from memfit.track.look import OF_UPDATE
        from memfit.track.looks import LOOKS
        from memfit.track.owners import ACTIVATION

        counted = self._cpu.read() if self._cpu is not None else None
        if counted is None or self._cpu is None:
            return
        account = LOOKS.account(self._cpu, counted)
        graph_bytes = account.by_category.get(ACTIVATION, 0)
        if not BACKWARDS.runs and _WORTH_ADVICE * graph_bytes >= account.bytes > 0:
            size = _native.bytes_text(graph_bytes)
            self._notes.append(
                f"no backward ran, and autograd graphs held {size} at the peak: "
                "`with torch.no_grad():` round the forward keeps none"
            )
        self._advise_on_unused(account)
        grows = self._iterations is not None and self._iterations.found() is not None
        if not grows and _WORTH_ADVICE * self._retained_bytes >= account.bytes > 0:
            size = _native.bytes_text(self._retained_bytes)
            self._notes.append(
                f"`backward(retain_graph=True)` left graphs of {size} after an optimizer's step: "
                "the last backward through a graph needs no `retain_graph`, and frees it"
            )
        of_update = sum(it.bytes for it in account.holdings if it.owner.name == OF_UPDATE)
        if self._all_at_once and _WORTH_ADVICE * of_update >= account.bytes > 0:
            size = _native.bytes_text(of_update)
            self._notes.append(
                f"`{self._all_at_once}` updates all parameters at once (`foreach=True`), and its "
                f"step took {size} at the peak: with `foreach=False` they take turns"
            )

    def _advise_on_unused(self, account: Account) -> None:
        """Name a graph at the peak that went without a backward, where backwards do run."""
        from memfit import _native
        from memfit.track.backwards import BACKWARDS
        from memfit.track.look import NAMES
        from memfit.track.looks import LOOKS

        LOOKS.unused.settle()
        told = " ".join(one.owner.name for one in account.holdings)
        if not BACKWARDS.runs or BACKWARDS.keeping or "no_grad" in told:
            return  # it is said of all, or beside the graph; one that was kept may have run through
        # Its line is another one when it is looked at again.
        at_peak = {one.owner.key: one.owner.name for one in account.holdings if one.owner.is_graph}
        for unused in LOOKS.unused.found:
            name = at_peak.get(NAMES.owner(unused.owner).key)
            is_there = name is not None and unused.first <= account.event <= unused.last
            if is_there and _WORTH_ADVICE * unused.bytes >= account.bytes:
                size = _native.bytes_text(unused.bytes)
                self._notes.append(
                    f"{name} held {size} that no backward went through: compute what needs none "
                    "under `torch.no_grad()`"
                )
                return

    def _advise_outside(self) -> None:
        """Say what grows and lies beside the tensors."""
        from memfit import _native
        from memfit.track.looks import LOOKS

        # What memfit makes itself, to plan and to offload, is no rise of the script's.
        process = self._process if self._request is None else None
        risen = process.rise_bytes() if process is not None else 0
        if risen:
            size = _native.bytes_text(risen)
            self._notes.append(
                f"outside the tensors, memory rose by {size} all through the run: look for "
                "Python's objects, arrays of numpy or a library that keep more and more"
            )
        name, array_bytes = max(LOOKS.arrays.items(), key=lambda it: it[1], default=("", 0))
        if array_bytes >= _LARGE_ARRAYS:
            size = _native.bytes_text(array_bytes)
            self._notes.append(f"outside the tensors, {name} held arrays of numpy of {size}")

    def _devices(self, began: float) -> list[dict[str, Any]]:
        from memfit.track import record
        from memfit.track.looks import LOOKS

        found: list[dict[str, Any]] = []
        counted = self._cpu.read() if self._cpu is not None else None
        if counted is not None and self._cpu is not None:
            account = LOOKS.account(self._cpu, counted)
            steps, phase = divmod(counted.peak_mark, len(PHASES))
            seconds = began + counted.peak_at_ns / 1e9
            peak = {"seconds": seconds, "phase": PHASES[phase], "steps_done": steps}
            found.append(
                {
                    "device": "cpu",
                    "peak_bytes": counted.peak_bytes,
                    "after_bytes": counted.current_bytes,
                    "peak_by_category": account.by_category,
                    "peak_told_bytes": account.bytes,
                    "peak_owners": [asdict(one) for one in record.owned(account)],
                    "reserved_peak_bytes": None,
                    "peak": peak,
                }
            )
        for index, seen in (self._cuda.read() if self._cuda is not None else {}).items():
            found.append(
                {
                    "device": f"cuda:{index}",
                    "peak_bytes": seen.peak["allocated"],
                    "after_bytes": seen.current["allocated"],
                    "peak_by_category": None,
                    "reserved_peak_bytes": seen.peak["reserved"],
                    "peak": None,
                }
            )
        return found

    def _step_summary(self) -> dict[str, Any]:
        found = self._iterations.found() if self._iterations is not None else None
        growth = found.growth if found is not None else None
        return {
            "count": self._steps,
            "growing": growth.iterations if growth else 0,
            "growth_bytes_per_step": growth.bytes_per_iteration if growth else 0,
            "growth_bytes": growth.bytes if growth else 0,
            "growth_rhythm": found.rhythm if found else None,
            "growth_cause": found.cause.message if found else None,
            "growth_advice": found.cause.advice if found else None,
        }

    def _out_of_memory(self, error: BaseException | None, elapsed: float) -> dict[str, Any] | None:
        """What was refused, where an exception says that memory ran out."""
        import torch

        at = {"seconds": elapsed, "phase": PHASES[self._phase], "steps_done": self._steps}
        if isinstance(error, torch.OutOfMemoryError) and self._cuda is not None:
            readings = self._cuda.read()
            device = max(readings, key=lambda i: readings[i].current["allocated"], default=0)
            live = readings[device].current["allocated"] if readings else 0
            return {
                "device": f"cuda:{device}",
                "requested_bytes": None,
                "live_bytes": live,
                "live_by_category": None,
                "at": at,
            }
        if not isinstance(error, RuntimeError) or not _OUT_OF_MEMORY.search(str(error)):
            return None
        requested = _REQUESTED.search(str(error))
        counted = self._cpu.read() if self._cpu is not None else None
        return {
            "device": "cpu",
            "requested_bytes": int(requested.group(1)) if requested else None,
            "live_bytes": counted.current_bytes if counted else 0,
            "live_by_category": counted.current_by_category if counted else None,
            "at": at,
        }


def _on_parameter(_: Module, __: str, parameter: Tensor | None) -> None:
    """Name a parameter's block as soon as a module takes it: the model may be gone at the end."""
    from memfit.track import owners

    if parameter is not None:
        owners.label([(owners.PARAMETER, parameter)])


def _on_buffer(_: Module, __: str, buffer: Tensor | None) -> None:
    from memfit.track import owners

    if buffer is not None:
        owners.label([(owners.MODULE_BUFFER, buffer)])
