"""`memfit explain` of texts: OOM messages in files, in logs and from a pipe."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

import memfit

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "crates" / "memfit-engine" / "tests" / "data" / "snapshots"
MIB = 1 << 20
FIRST = (
    "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 7.79 GiB total "
    "capacity; 6.12 GiB already allocated; 9.69 MiB free; 6.20 GiB reserved in total by "
    "PyTorch) If reserved memory is >> allocated memory try setting max_split_size_mb"
)
SECOND = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 576.00 MiB. GPU 1 has a total "
    "capacity of 31.36 GiB of which 370.69 MiB is free. Process 16335 has 25.34 GiB memory in use. "
    "Including non-PyTorch memory, this process has 5.55 GiB memory in use. Of the allocated "
    "memory 4.89 GiB is allocated by PyTorch, and 77.08 MiB is reserved by PyTorch but unallocated."
)


def explain(*arguments: object, piped: bytes | None = None) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "memfit", "explain", *map(str, arguments)]
    ran = subprocess.run(words, input=piped, capture_output=True, check=False)
    return subprocess.CompletedProcess(
        words, ran.returncode, ran.stdout.decode(), ran.stderr.decode()
    )


def test_a_file_and_a_pipe_say_the_same(tmp_path: Path):
    path = tmp_path / "oom.pickle"  # Its content decides, not its name.
    path.write_text(FIRST)
    file, pipe = explain(path), explain("-", piped=FIRST.encode())
    assert (file.returncode, pipe.returncode) == (1, 1)
    assert file.stdout.replace(str(path), "standard input") == pipe.stdout
    assert "Verdict  fragmentation is possible\n" in pipe.stdout
    assert "the message does not tell which" in pipe.stdout
    assert "memfit explain oom.pickle --device-memory 7976MiB" in pipe.stdout


def test_the_document_holds_ranges_and_every_different_message():
    log = f"step 1\n\x1b[31m{FIRST}\x1b[0m\n" + f"[rank1]: {SECOND}\n" * 3
    ran = explain("-", "--format", "json", piped=log.encode())
    document = json.loads(ran.stdout)
    assert (document["schema_version"], document["kind"]) == (1, "oom_messages")
    assert (document["message_count"], document["further_count"]) == (4, 0)
    first, second = document["messages"]
    assert (first["count"], first["device"], second["count"], second["device"]) == (1, 0, 3, 1)
    assert first["requested"]["low_bytes"] < 20 * MIB < first["requested"]["high_bytes"]
    assert [it["cause"] for it in first["causes"]] == ["fragmentation_possible"]
    causes = {it["cause"]: it for it in second["causes"]}
    assert list(causes) == ["too_much_alive", "other_processes"]
    assert causes["other_processes"]["is_enough"] is True
    assert second["other_processes"][0]["pid"] == 16335
    assert second["summary"] in explain("-", piped=log.encode()).stdout


def test_a_real_refusal_of_the_host_is_explained():
    torch = pytest.importorskip("torch")
    with pytest.raises(RuntimeError) as refused:
        torch.empty(1 << 58, dtype=torch.uint8)
    ran = explain("-", piped=str(refused.value).encode())
    assert ran.returncode == 1
    assert "this is the machine's memory, not a GPU's" in ran.stdout


def test_a_snapshot_from_a_pipe_stays_a_snapshot():
    path = FIXTURES / "oom_live_set.pickle"
    data = path.read_bytes()
    said = explain(path).stdout.splitlines()[1:]
    for piped in [data, gzip.compress(data)]:
        ran = explain("-", piped=piped)
        assert (ran.returncode, ran.stdout.splitlines()[1:]) == (1, said)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"epoch 1 loss 0.3\n", "it holds no OOM message of PyTorch, and is no memory snapshot"),
        (b"\x1b[31mred\x1b[0m and out of memory\n", "it holds no OOM message of PyTorch"),
        (b"", "the file is empty"),
        (b'{"loss": 0.3}', "this is JSON text"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n",
            "this is a Git LFS pointer",
        ),
        (b"\x80\x04\x95", "the file is cut off"),
        (b"\x00\x01\x02" * 300, "cannot read"),
    ],
)
def test_what_holds_no_message_is_refused(text: bytes, said: str, tmp_path: Path):
    path = tmp_path / "log"
    path.write_bytes(text)
    for ran in [explain(path), explain("-", piped=text)]:
        assert (ran.returncode, ran.stdout) == (2, "")
        assert said in ran.stderr


def test_options_for_snapshots_are_refused_for_a_text(tmp_path: Path):
    page = tmp_path / "page.html"
    for options in [["--html", page], ["--device-memory", "8GiB"], [FIXTURES / "oom_cap.pickle"]]:
        ran = explain("-", *options, piped=FIRST.encode())
        assert (ran.returncode, ran.stdout) == (2, "")
        assert "is a text with OOM messages, not a snapshot" in ran.stderr
    assert not page.exists()


def test_the_guide_shows_what_the_program_says(tmp_path: Path):
    path = tmp_path / "oom.txt"
    path.write_text(SECOND)
    said = explain(path).stdout.replace(str(path), "oom.txt")
    assert f"```text\n{said}```\n" in (ROOT / "docs/guides/explain.md").read_text()


def test_python_says_of_an_error_a_text_and_a_file_what_the_program_says(tmp_path: Path):
    path = tmp_path / "train.log"
    path.write_text(f"step 1\n{FIRST}\n{SECOND}\n")
    of_file = memfit.explain(path)
    assert isinstance(of_file, memfit.OomMessages)
    assert str(of_file) == explain(path).stdout
    assert of_file.as_dict() == json.loads(explain(path, "--format", "json").stdout)
    first, second = of_file.messages
    assert [it.cause for it in first.causes] == ["fragmentation_possible"]
    assert (second.device, second.other_processes[0].pid) == (1, 16335)

    piped = explain("-", "--format", "json", piped=SECOND.encode()).stdout
    told = {**json.loads(piped), "source": "(OOM message)"}
    for given in [RuntimeError(SECOND), SECOND, f"rank 0:\n{SECOND}"]:
        assert memfit.explain(given).as_dict() == told


def test_python_refuses_what_holds_no_message_and_what_has_no_meaning_for_one(tmp_path: Path):
    with pytest.raises(memfit.UsageError, match="`ValueError` holds no OOM message"):
        memfit.explain(ValueError("another error"))
    with pytest.raises(memfit.UsageError, match="`device_memory` has no meaning"):
        memfit.explain(SECOND, device_memory="80GiB")
    path = tmp_path / "train.log"
    path.write_text("step 1\n")
    with pytest.raises(memfit.SnapshotError, match="train"):
        memfit.explain(path)
    with pytest.raises(memfit.UsageError, match="cannot read"):
        memfit.explain("CUDA out of memory")
