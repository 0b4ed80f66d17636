"""Everything that only a GPU can prove, in one command.

    python3 -m benchmarks.gpu --wheel newest            # or: make gpu
    python3 -m benchmarks.gpu peaks park --minutes 8 --out results
    python3 -m benchmarks.gpu --device cpu --small      # a rehearsal
    python3 -m benchmarks.gpu --merge other-run --out results

Responsible for arguments, for installing the wheel, for starting each piece in a process of its own
and ending it when its time is over, and for the exit code: 0 where every bar was met, or where
there is no GPU; 1 where one was missed, or a piece did not come to its end; 2 for wrong use.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu import page, results, wheel
from benchmarks.gpu.piece import PIECES

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "build" / "gpu-site"
GRACE_SECONDS = 30.0
"""After its minutes a piece has so long to end by itself."""

_HAS_GPU = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 3)"
_NO_GPU = 3
_DRIVER = (Path("/proc/driver/nvidia"), Path("/dev/nvidia0"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what was asked; the exit code."""
    given = _parse(arguments)
    try:
        if given.merge is not None:
            results.merge(given.out, given.merge)
        if given.merge is not None or given.page:
            return _closing(given.out, [])
        return _run(given)
    except (wheel.NoWheelError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python3 -m benchmarks.gpu", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("pieces", nargs="*", metavar="PIECE", help=f"of {', '.join(PIECES)}")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for results"
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="for each piece, at most")
    parser.add_argument("--all-minutes", type=float, help="for all pieces together, at most")
    parser.add_argument("--small", action="store_true", help="models of rehearsal size")
    parser.add_argument("--models", nargs="+", default=[], metavar="MODEL", help="only these")
    parser.add_argument(
        "--wheel", metavar="FILE", help="install it first, apart; `newest` for the one in dist/"
    )
    parser.add_argument("--page", action="store_true", help="only write the page anew")
    parser.add_argument("--merge", type=Path, metavar="DIR", help="take in results of another run")
    given = parser.parse_args(arguments)
    unknown = [piece for piece in given.pieces if piece not in PIECES]
    if unknown:
        parser.error(f"there is no piece `{unknown[0]}`: one of {', '.join(PIECES)}")
    if given.minutes <= 0:
        parser.error("a piece needs some minutes")
    return given


def _run(given: argparse.Namespace) -> int:
    """Run the pieces, one after another."""
    environment = {
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        # Models are built from configurations; a library that looks for files would wait in vain.
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",
        # Asking whether there is a GPU then starts nothing that a fork could not go on with.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        # What deterministic algorithms of cuBLAS need, and its default on recent GPUs.
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }
    if given.device == "cuda" and not _has_gpu():
        print("no CUDA device is here: nothing was measured", file=sys.stderr)
        return 0
    if given.wheel is not None:
        wheel.install(wheel.find(given.wheel, ROOT / "dist"), SITE)
        paths = [str(SITE), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    given.out.mkdir(parents=True, exist_ok=True)
    ended_badly = []
    end = time.monotonic() + 60 * (given.all_minutes or float("inf"))
    for piece in given.pieces or PIECES:
        seconds = min(60 * given.minutes, end - time.monotonic() - GRACE_SECONDS)
        if seconds < GRACE_SECONDS:
            ended_badly.append(f"{piece}: no time was left")
            continue
        with tempfile.TemporaryDirectory(prefix="memfit-gpu-", dir=_disk()) as scratch:
            environment["XDG_CACHE_HOME"] = scratch  # no profile of an earlier run counts
            why = _piece(piece, given, Path(scratch), seconds, environment)
        if why:
            ended_badly.append(f"{piece}: {why}")
        page.write(given.out)
    return _closing(given.out, ended_badly, list(given.pieces or PIECES))


def _has_gpu() -> bool:
    """Whether torch sees a GPU.

    Raises:
        ValueError: There is a GPU, and no torch to see it with.
    """
    done = subprocess.run(
        [sys.executable, "-c", _HAS_GPU], capture_output=True, text=True, check=False
    )
    if done.returncode not in (0, _NO_GPU) and any(path.exists() for path in _DRIVER):
        said = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        message = f"`{sys.executable}` cannot ask torch for the GPU that is here: {said}"
        raise ValueError(message)
    return done.returncode == 0


def _disk() -> Path | None:
    """A folder for scratch files: the system's own, unless that is kept in memory."""
    names = (line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines())
    in_memory = {place for place, kind in names if kind in {"tmpfs", "ramfs"}}
    temporary = tempfile.gettempdir()
    if not any(temporary == place or temporary.startswith(f"{place}/") for place in in_memory):
        return None
    folder = ROOT / "build"
    folder.mkdir(exist_ok=True)
    return folder


def _piece(
    piece: str,
    given: argparse.Namespace,
    scratch: Path,
    seconds: float,
    environment: dict[str, str],
) -> str:
    """Run a piece; why it did not come to its end, or nothing."""
    print(f"{piece}: at most {seconds / 60:.1f} minutes", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "benchmarks.gpu.piece", piece, "--device", given.device]
    command += ["--out", str(given.out.resolve()), "--scratch", str(scratch)]
    command += ["--seconds", str(seconds), *(["--small"] if given.small else [])]
    command += ["--models", *given.models] if given.models else []
    began = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        code = process.wait(seconds + GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        return "it did not end when its time was over"
    finally:
        with contextlib.suppress(ProcessLookupError):  # also what a piece left behind
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    print(f"{piece}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return f"it ended with exit code {code}" if code else ""


def _closing(out: Path, ended_badly: list[str], pieces: list[str] | None = None) -> int:
    """Write the page, say what was missed, and choose the exit code."""
    print(page.write(out))
    documents = [d for d in results.read(out) if pieces is None or d["piece"] in pieces]
    wrong = [*ended_badly, *results.missed(documents), *results.failed(documents)]
    for line in wrong:
        print(f"missed: {line}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
