"""Parts of the page: tables whose columns line up, and how figures are written in their cells."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]


def table(head: tuple[str, ...], rows: list[list[str]]) -> list[str]:
    """A Markdown table, aligned, as one block of lines; nothing where there are no rows."""
    if not rows:
        return ["Nothing was measured."]
    lines = [list(head), *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    # The first column reads from the left, figures from the right.
    rule = [
        "-" * max(width, 3) if column == 0 else "-" * max(width - 1, 2) + ":"
        for column, width in enumerate(widths)
    ]
    return ["\n".join(_line(line, widths) for line in [list(head), rule, *rows])]


def _line(cells: list[str], widths: list[int]) -> str:
    first, *others = zip(cells, widths, strict=True)
    padded = [first[0].ljust(max(first[1], 3))]
    padded += [cell.rjust(max(width, 3)) for cell, width in others]
    return f"| {' | '.join(padded)} |"


def gib(count: int | None) -> str:
    """Bytes for a cell; empty where they are not known."""
    if count is None:
        return ""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def percent(share: float | None) -> str:
    """A share with its sign."""
    return "" if share is None else f"{share:+.2%}"


def seconds(amount: float | None) -> str:
    """A time in the unit that it reads best in."""
    if amount is None:
        return ""
    return f"{amount:.2f} s" if amount >= 1 else f"{amount * 1e3:.2f} ms"


def rate(per_second: float | None) -> str:
    """Bytes a second."""
    return "" if per_second is None else f"{per_second / 2**30:.1f} GiB/s"


def failed(row: Row) -> str:
    """That a row is not whole, and what to look for in the file."""
    said = row.get("failed")
    return "" if said is None else f"failed: {str(said)[:60]}".replace("|", "/")


def bits(row: Row) -> str:
    """What became of the comparison of bits."""
    if "is_bitwise" not in row:
        return ""
    if row["is_bitwise"]:
        return "same" + ("*" if row["with_deterministic_algorithms"] else "")
    if not row["eager_repeats_itself"]:
        return f"{row['error']:.0e}; eager itself {row['eager_error']:.0e}"
    return f"{row['error']:.0e}"


def times(row: Row, first: str, second: str) -> list[str]:
    """Three cells: seconds of both ways, and the ratio with its spread."""
    found = row.get("times")
    if not found:
        return ["", "", ""]
    one, other = found[first], found[second]
    ratio = f"{other['ratio']:.3f} ± {other['spread'] / 2:.3f}"
    return [seconds(one["seconds"]), seconds(other["seconds"]), ratio]
