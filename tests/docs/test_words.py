"""The words of what a person reads first: the README, the front page, the help of every command."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/index.md", "docs/getting-started.md", "docs/reference/cli.md")

AVOIDED = re.compile(
    r"\b(besides|elsewhere|nobody|whoever|whatever|that is there|computed again)\b", re.IGNORECASE
)
"""Words that a practitioner would not write: say offloaded, resident, recomputed, apart from."""


@pytest.mark.parametrize("page", PAGES)
def test_what_is_read_first_is_in_the_words_of_the_field(page):
    lines = (ROOT / page).read_text().splitlines()
    found = [f"{page}:{n}: {line}" for n, line in enumerate(lines, 1) if AVOIDED.search(line)]
    assert found == []


@pytest.mark.parametrize("where", ["crates/memfit/src/report", "crates/memfit/src/args.rs"])
def test_reports_and_help_are_in_the_words_of_the_field(where):
    path = ROOT / where
    files = [path] if path.is_file() else sorted(path.rglob("*.rs"))
    said = re.compile(r'"(?:[^"\\]|\\.)*"')
    found = [
        f"{file.relative_to(ROOT)}:{n}: {line.strip()}"
        for file in files
        for n, line in enumerate(file.read_text().splitlines(), 1)
        if not line.lstrip().startswith("//")
        and any(AVOIDED.search(text) for text in said.findall(line))
    ]
    assert found == []
