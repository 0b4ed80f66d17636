"""What the program asks of Python.

Responsible for the answers to the program's questions (:class:`Host`), for keeping what user code
prints off standard output, and for saying which exception means what. Not responsible for finding
the target (:mod:`memfit.program.target`), nor for capturing, measuring or verifying.

Imports torch only when a question needs it: commands on saved files start at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from memfit import torch_versions
from memfit.errors import CaptureError, DoesNotFit, LeaseError, MemfitError, WorkloadError
from memfit.torch_required import require_torch

if TYPE_CHECKING:
    from memfit.program.build import Built

Settings = Sequence[tuple[str, str]]
"""Names and texts, as ``--set name=value`` gave them."""

_PROFILER_LOG = "KINETO_LOG_LEVEL"
"""Torch's profiler, which measures the peaks, talks on standard error below a high level."""


class Host:
    """Answers the program. Its methods are called from Rust, by name.

    Attributes:
        script_ended: How the script of ``memfit run`` came to its end; ``None`` where none ran.
    """

    def __init__(self) -> None:
        """Make a host that has built nothing yet."""
        self.script_ended: str | None = None
        self._built: tuple[str, Settings, str | None, Built] | None = None
        self._captured: tuple[str, Settings, bytes] | None = None
        self._insists = False

    def insist_on_weights(self) -> None:
        """Have every build from now on make the weights, however much memory there is."""
        self._insists = True

    def build(self, target: str, settings: Settings, device: str | None) -> None:
        """Import what a target needs and build its workload for the capture that follows.

        Args:
            target: ``FILE.py:FUNCTION`` or ``package.module:FUNCTION``.
            settings: Arguments of the function.
            device: As in :meth:`capture`.
        """
        with _torch():
            import_module("memfit.capture")  # so that the capture's time holds no imports
            self._built = (target, settings, device, self._lightest(target, settings, device))

    def _lightest(self, target: str, settings: Settings, device: str | None) -> Built:
        """The workload, built without weights where that is allowed and works."""
        from memfit.program.build import for_real, lightest

        build = for_real if self._insists else lightest
        return build(target, settings, device)

    def _take(self, target: str, settings: Settings, device: str | None) -> Built:
        """The workload built before, given up; one built afresh when there is none."""
        built, self._built = self._built, None
        if built is not None and built[:3] == (target, settings, device):
            return built[3]
        return self._lightest(target, settings, device)

    def capture(self, target: str, settings: Settings, device: str | None) -> bytes:
        """Record one step of a target.

        Args:
            target: ``FILE.py:FUNCTION`` or ``package.module:FUNCTION``.
            settings: Arguments of the function.
            device: Kind of device to capture for; ``None`` for the workload's own.

        Returns:
            The encoded trace.
        """
        with _torch():
            from memfit.program.build import with_weights
            from memfit.weights.weightless import WeightsNeededError

            built = self._take(target, settings, device)
            try:
                data = _captured(built, target)
            except WeightsNeededError as error:
                built = with_weights(target, settings, built, error.reason)
                data = _captured(built, target)
            self._captured = (target, settings, data)
            return data

    def alternatives(
        self,
        target: str,
        settings: Settings,
        device: str | None,
        trace: bytes,
        ways: list[dict[str, Any]],
    ) -> bytes:
        """Record the step of a trace in other ways.

        Args:
            target: As in :meth:`capture`.
            settings: As in :meth:`capture`.
            device: As in :meth:`capture`.
            trace: The encoded trace.
            ways: The ways, as the engine asks for them.

        Returns:
            The encoded trace with what came of it.
        """
        with _torch():
            from memfit._native import Trace
            from memfit.plan.alternatives import with_alternatives

            built = self._lightest(target, settings, device)
            alternatives = with_alternatives(
                built.workload, Trace.decode(trace), ways, device=built.device
            )
            return alternatives.encode()

    def op_seconds(self, target: str, settings: Settings, trace: bytes) -> dict[str, Any]:
        """Time the ops of one real step.

        Args:
            target: As in :meth:`capture`.
            settings: As in :meth:`capture`.
            trace: The encoded trace whose ops are timed.

        Returns:
            A cost source of the engine.
        """
        with _torch():
            from memfit._native import Trace
            from memfit.plan.cost_source import with_rates
            from memfit.program.target import workload_factory
            from memfit.run.profile import profiled

            decoded = Trace.decode(trace)
            op_times = profiled(workload_factory(target, settings)(), decoded)
            device_kind = json.loads(decoded.json())["meta"]["device_kind"]
            return with_rates(op_times, device_kind)

    def device_profile(self, device_kind: str, file: Path | None) -> dict[str, Any]:
        """Find or measure the profile of a device for the roofline.

        Args:
            device_kind: ``cpu`` or ``cuda``, as the trace has it.
            file: A profile that the user named.

        Returns:
            A device profile.
        """
        with _torch():
            from memfit.plan.cost_source import device_profile

            return device_profile(device_kind, file)

    def offer(self, device_kind: str, place: str, profile: dict[str, Any] | None) -> dict[str, Any]:
        """Find or measure how fast bytes move to and from a place for what is offloaded.

        Args:
            device_kind: ``cpu`` or ``cuda``, as the trace has it.
            place: A folder, or ``host`` for the host's memory.
            profile: The device profile that plans use; ``None`` where they use none.

        Returns:
            An offer of the engine.
        """
        with _torch():
            from memfit.plan.cost_source import offer

            return offer(device_kind, place, profile or {})

    def overhead_bytes(self, device: str) -> int:
        """Measure what a process with torch takes on a device apart from tensors.

        Args:
            device: ``host`` or ``cuda:0``.
        """
        from memfit.guard.overhead import expected

        require_torch(_warn)
        return expected(device)

    def examine(self, offload: str | None) -> dict[str, Any]:
        """Say what is installed here and which features work with it.

        Args:
            offload: Folder, or ``host``, whose speed for what is offloaded is measured.

        Returns:
            The facts, also where there is no torch, or one that memfit does not support.
        """
        from memfit import doctor

        os.environ.setdefault(_PROFILER_LOG, "99")
        with contextlib.redirect_stdout(sys.stderr):
            return doctor.examine(offload)

    def profile_path(self, device_kind: str) -> Path:
        """Where the calibrated profile of this machine's device is kept.

        Args:
            device_kind: ``cpu`` or ``cuda``.
        """
        from memfit.plan.profiles import default_path

        return default_path(device_kind)

    def calibrate(
        self, device_kind: Literal["cpu", "cuda"], seconds: float, folder: Path | None
    ) -> str:
        """Measure a device of this machine at length.

        Args:
            device_kind: ``cpu`` or ``cuda``.
            seconds: About how long.
            folder: Whose disk to measure.

        Returns:
            The profile file's text.
        """
        # Read when torch is imported; see `memfit.measure.curves`.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        with _torch():
            from memfit.plan.profiles import make

            found = make(device_kind, seconds=seconds, folder=folder)
            return json.dumps(found, indent=1, allow_nan=False) + "\n"

    def prune(self, target: str, settings: Settings, request: dict[str, Any]) -> dict[str, Any]:
        """Prune a target's model, and write it where the request says so.

        Args:
            target: As in :meth:`capture`.
            settings: As in :meth:`capture`.
            request: What is asked for.

        Returns:
            The report.
        """
        with _torch():
            from memfit.api.prune import prune
            from memfit.program.target import workload_factory

            path = request.pop("save")
            made = prune(workload_factory(target, settings)(), **request)
            if path is not None:
                made.save(path)
            return made.report.as_dict()

    def verify(self, target: str, settings: Settings, plan: dict[str, Any]) -> dict[str, Any]:
        """Run real steps with and without a plan and compare them.

        Args:
            target: As in :meth:`capture`.
            settings: As in :meth:`capture`.
            plan: The plan.

        Returns:
            The comparison.
        """
        with _torch():
            from memfit.program.target import workload_factory
            from memfit.verify.eager import verify

            return verify(
                workload_factory(target, settings),
                plan,
                loss_reduction=self._loss_reduction(target, settings),
            )

    def verify_compiled(
        self,
        target: str,
        settings: Settings,
        trace: bytes,
        budget_bytes: int,
        request: dict[str, Any],
    ) -> dict[str, Any]:
        """Run real steps eager, compiled by torch alone and compiled by a plan, and compare them.

        Args:
            target: As in :meth:`capture`.
            settings: As in :meth:`capture`.
            trace: The encoded trace.
            budget_bytes: Most bytes of the step.
            request: What the user asks for besides.

        Returns:
            The comparison, or why the step runs eager.
        """
        with _torch():
            from memfit._native import Trace
            from memfit.program.target import workload_factory
            from memfit.run.compiled import toolchain

            recorded = json.loads(Trace.decode(trace).json())
            missing = toolchain.missing(recorded["meta"]["device_kind"])
            if missing is not None:
                return {"not_compiled": missing}
            from memfit.verify.compiled import verify_compiled

            return verify_compiled(
                workload_factory(target, settings),
                recorded,
                budget_bytes,
                request,
            )

    def _loss_reduction(self, target: str, settings: Settings) -> str:
        """How the loss reduces over the batch, from the capture; empty when it is not known."""
        if self._captured is None or self._captured[:2] != (target, settings):
            return ""
        from memfit._native import Trace

        return str(json.loads(Trace.decode(self._captured[2]).json())["meta"]["loss_reduction"])

    def run_script(
        self,
        command: list[str],
        is_module: bool,  # noqa: FBT001 - called from Rust by position
        snapshot: Path | None,
        fitting: Mapping[str, Any] | None,
        lease: Mapping[str, Any] | None,
        announce: bool,  # noqa: FBT001
    ) -> dict[str, Any]:
        """Run an unmodified script and say what it took.

        What it prints stays where it prints it, unlike what a target's code prints.

        Args:
            command: The script or module, and its arguments.
            is_module: Whether it is a module, as with ``python -m``.
            snapshot: Where to write a snapshot of CUDA memory.
            fitting: What its training steps shall stay within, and how; ``None`` to leave them
                alone.
            lease: How to lease the budget: whether the user asked for that, how long to wait,
                priority, device, whether to go on where the broker is away; ``None`` to lease
                nothing.
            announce: Whether to say on standard error what is planned, when it is.

        Returns:
            The summary.
        """
        from memfit.run.script import summary
        from memfit.run.script.lease import Wish
        from memfit.run.script.request import FitRequest

        # A script that needs no torch runs without it; one that does says so itself.
        if fitting is not None or torch_versions.installed():
            require_torch(_warn)
        found = summary.run(
            command,
            is_module=is_module,
            snapshot=None if snapshot is None else str(snapshot),
            request=None if fitting is None else FitRequest.read(fitting),
            wish=None if lease is None else Wish(**lease),
            announce=announce,
        )
        self.script_ended = found["ended"]
        return found

    def explain(self, error: BaseException) -> dict[str, str | None]:
        """Say what an exception of the methods above means.

        Args:
            error: The exception.

        Returns:
            The program's ``HostError``. The traceback is the user's own, where their code failed.
        """
        return dict(zip(("kind", "message", "traceback", "hint"), _meaning(error), strict=True))


_MORE_ROOM = "`--wait` waits for room; `memfit ps` says who holds it"

NO_ROOM = frozenset(
    {"no_room", "timed_out", "contended", "held_back", "too_many", "not_recorded", "broker_away"}
)
"""Reasons for which a lease is refused that may be gone another time."""

_KINDS: tuple[tuple[type[MemfitError], str], ...] = (
    (WorkloadError, "workload"),
    (CaptureError, "capture"),
    (DoesNotFit, "does_not_fit"),
    (MemfitError, "usage"),
)
"""What memfit's errors are to the program, special ones first."""


def _meaning(error: BaseException) -> tuple[str, str, str | None, str | None]:
    """Kind, message, traceback and hint."""
    hint = "; ".join(getattr(error, "__notes__", ())) or None
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", "interrupted", None, None
    if isinstance(error, SystemExit):
        return "workload", f"the target ended the program (exit {error.code})", None, hint
    if isinstance(error, LeaseError) and error.reason in NO_ROOM:
        return "no_room", f"the script was not run: {error}", None, hint or _MORE_ROOM
    for family, kind in _KINDS:
        if isinstance(error, family):
            cause = error.__cause__ if family is WorkloadError else None
            return kind, str(error), _own_traceback(cause) if cause else None, hint
    text = "".join(traceback.format_exception(error))
    return "internal", f"{type(error).__name__}: {error}", text, hint


def _captured(built: Built, target: str) -> bytes:
    from memfit.capture import capture
    from memfit.program.build import no_gpu_explained

    with no_gpu_explained():
        return capture(
            built.workload,
            target=target,
            device=built.device,
            notes=built.notes,
            compare_graph=True,
        )


@contextlib.contextmanager
def _torch() -> Iterator[None]:
    """Have a torch that memfit supports, and what user code prints on standard error.

    Standard output is for the report.

    Raises:
        UsageError: There is no such torch.
    """
    require_torch(_warn)
    os.environ.setdefault(_PROFILER_LOG, "99")
    with contextlib.redirect_stdout(sys.stderr):
        yield


def _warn(remark: str) -> None:
    sys.stderr.write(f"warning: {remark}\n")


def _own_traceback(error: BaseException) -> str:
    """The traceback of the user's exception: frames of the user's code, none of memfit or torch.

    Those of torch's layers where none is the user's, as where a batch does not suit a model that is
    made of them alone; all where there is none of either.
    """
    shown = traceback.TracebackException.from_exception(error)
    for wanted in (lambda file: not _is_inside(file), _is_of_a_layer):
        if any(wanted(frame.filename) for frame in shown.stack):
            break
    else:
        return "".join(shown.format())
    pending, seen = [shown], {id(shown)}
    while pending:
        one = pending.pop()
        one.stack[:] = [frame for frame in one.stack if wanted(frame.filename)]
        for other in (one.__cause__, one.__context__, *(one.exceptions or ())):
            if other is not None and id(other) not in seen:
                seen.add(id(other))
                pending.append(other)
    return "".join(shown.format())


def _is_of_a_layer(file: str) -> bool:
    """Whether a file has layers of torch, and not what calls them."""
    of_torch = Path(file).parent.parts[-3:] == ("torch", "nn", "modules")
    return of_torch and Path(file).stem not in {"module", "container"}


def _is_inside(file: str) -> bool:
    """Whether a file is memfit's, torch's, or of the machinery that loads files."""
    torch = sys.modules.get("torch")
    packages = [Path(__file__).parents[1]]
    if torch is not None and torch.__file__ is not None:
        packages.append(Path(torch.__file__).parent)
    within = any(package in Path(file).parents for package in packages)
    return within or file.startswith("<frozen ")
