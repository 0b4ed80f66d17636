"""The documentation: links lead somewhere, programs run, references match the program.

``MEMFIT_WRITE_DOCS=1 pytest tests/docs`` writes the command-line reference anew.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from forks import FORKS

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")], key=lambda page: page.as_posix()
)
BLOCK = re.compile(r"^```(\S*)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
COMMANDS = (
    "",
    "predict",
    "plan",
    "verify",
    "prune",
    "explain",
    "replay",
    "place",
    "calibrate",
    "run",
    "broker",
    "ps",
    "top",
    "devices",
    "doctor",
    "show",
    "completions",
    "man",
)
NO_WARNING = """
import runpy, sys, warnings
warnings.simplefilter("error", UserWarning)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a script like `python -W error::UserWarning`."""
CLI = ROOT / "docs" / "reference" / "cli.md"


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page: Path):
    text = BLOCK.sub("", page.read_text())
    for link in LINK.findall(text):
        if link.startswith(("https://", "#")):
            continue
        assert (page.parent / link.partition("#")[0]).exists(), link


def programs(page: Path) -> list[tuple[str, str]]:
    """The Python blocks of a page, each with what follows ``python`` on its first line."""
    return [
        (note.strip(), code)
        for language, note, code in BLOCK.findall(page.read_text())
        if language == "python"
    ]


@pytest.mark.parametrize("page", [page for page in PAGES if programs(page)], ids=page_id)
def test_programs_run(page: Path, tmp_path: Path):
    """The blocks of a page run one after the other; those marked ``no-run`` only compile."""
    blocks = programs(page)
    for note, code in blocks:
        assert note in {"", "no-run"}, note
        compile(code, page_id(page), "exec")
    runnable = "\n".join(code for note, code in blocks if not note)
    # Its own process and folder: what one page defines or writes is nothing to the next.
    script = tmp_path / "page.py"
    script.write_text(runnable)
    done = FORKS.run("-c", NO_WARNING, script, folder=tmp_path, timeout=600)
    assert done.code == 0, done.stderr


def cli_reference() -> str:
    """The page that the program's own help makes."""
    program = Path(sys.executable).with_name("memfit")
    text = "# Command line\n\nWritten from `memfit --help` by `make docs`.\n"
    for command in COMMANDS:
        words = [word for word in (command, "--help") if word]
        done = subprocess.run(
            [program, *words], capture_output=True, text=True, check=True, env={"COLUMNS": "100"}
        )
        name = f"memfit {command}".strip()
        # Trailing spaces of wrapped help would make the page fail any whitespace check.
        lines = [line.rstrip() for line in done.stdout.rstrip().splitlines()]
        text += f"\n## `{name}`\n\n```text\n" + "\n".join(lines) + "\n```\n"
    return text


def test_the_command_line_reference_is_the_help():
    reference = cli_reference()
    if os.environ.get("MEMFIT_WRITE_DOCS"):
        CLI.write_text(reference)
    assert CLI.read_text() == reference, "run `make docs`"


def test_the_json_reference_names_every_field():
    page = (ROOT / "docs" / "reference" / "json.md").read_text()
    named = set(re.findall(r"`(\w+)`", page))
    report = ROOT / "crates" / "memfit" / "src" / "report"
    source = "".join(
        (report / name).read_text()
        for name in (
            "approximation.rs",
            "document.rs",
            "compiled.rs",
            "tracked.rs",
            "calibration.rs",
            "doctor.rs",
            "output_error.rs",
            "pruning.rs",
        )
    )
    structs = re.findall(
        r"^#\[derive\([^)]*\bSerialize\b[^)]*\)\]\n(?:#\[.*\]\n)*"
        r"pub\(crate\) struct \w+ \{\n(.*?)^\}",
        source,
        re.MULTILINE | re.DOTALL,
    )
    assert structs
    body = "".join(structs)
    fields = set(re.findall(r"^    pub\(crate\) (\w+):", body, re.MULTILINE))
    # The first four are flattened into their documents, the others never written.
    unwritten = {"quiet", "trials", "torch_next_step"}
    assert fields - named - {"prediction", "front", "step", "examined"} - unwritten == set()


def test_exit_codes_are_those_of_the_program():
    page = (ROOT / "docs" / "reference" / "exit-codes.md").read_text()
    documented = set(re.findall(r"^\| (\d+) \|", page, re.MULTILINE))
    source = (ROOT / "crates" / "memfit" / "src" / "exit.rs").read_text()
    assert documented == set(re.findall(r"Self::\w+ => (\d+),", source))
