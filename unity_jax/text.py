"""Figures as text: tables, seconds, bytes and source lines, as everything that prints writes them; bytes are read too.

>>> seconds(0.00123), size(1.5 * 2**30), short_source("/home/me/models/bert.py:110:18 (Attention.__call__)")
('1.23 ms', '1.5 GiB', 'models/bert.py:110 (Attention.__call__)')
>>> size_of("1.5 GiB") / 2**30
1.5
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from typing import Any

import rich.box
from rich.console import Console
from rich.table import Table

WIDTH = 100
"""Columns of a page of text."""


def columns(*columns: str, right: Sequence[int] = (), title: str | None = None) -> Table:
    rows = Table(box=rich.box.SIMPLE_HEAD, title=title, title_justify="left", title_style="", pad_edge=False)
    for i, name in enumerate(columns):
        rows.add_column(name, justify="right" if i in right else "left", overflow="fold", no_wrap=i in right)
    return rows


def render(content: Table) -> str:
    """A rich table as plain text, at most 100 columns wide."""
    out = io.StringIO()
    console = Console(file=out, width=WIDTH, color_system=None, markup=False, highlight=False, emoji=False)
    console.print(content)
    return "".join(line.rstrip() + "\n" for line in out.getvalue().splitlines() if line.strip())


def seconds(x: float) -> str:
    """`1.23 ms`"""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if x >= scale:
            return f"{x / scale:.3g} {unit}"
    return "0 s" if x == 0 else f"{x:.2g} s"


def size(n: float) -> str:
    """`1.5 GiB`"""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n >= scale:
            return f"{n / scale:.4g} {unit}"
    return f"{n:.0f} B"


def size_of(given: Any) -> float:
    """Bytes: a number, or as people write them (`16e9`, `14.5GiB`, `80 GB`). Raises `ValueError` unless positive."""
    try:
        if isinstance(given, str) and (match := re.fullmatch(r"([0-9.e+]+) *([KMGT]i?)?B?", given.strip())):
            found = float(match[1]) * _UNITS[match[2]]
        else:
            found = 0.0 if isinstance(given, (str, bool)) else float(given)
    except (OverflowError, TypeError, ValueError):
        found = 0.0
    if not 0 < found < math.inf:
        raise ValueError(f"{given!r} is not a positive number of bytes, as 16e9 or 14.5GiB")
    return found


_UNITS = {None: 1} | {f"{k}i": 2 ** (10 * n) for n, k in enumerate("KMGT", 1)} | {
    k: 10 ** (3 * n) for n, k in enumerate("KMGT", 1)
}


def short_source(source: str) -> str:
    """`/home/me/project/models/bert.py:110:18 (Attention.__call__)` -> `models/bert.py:110 (Attention.__call__)`."""
    match = re.fullmatch(r"(.*?)(:\d+)(?::\d+)?( \(.*\))?", source)
    if match is None:
        return source
    path, line, function = match.groups("")
    return "/".join(re.split(r"[/\\]", path)[-2:]) + line + function
