"""The commands of tables that say what kernels take by the schedules that libtpu writes of them, row by row."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from experiments.rows import Row, Rows
from unity_jax.aot.bundles import written


def arguments(doc: str | None, topologies: Sequence[str], out: Path) -> argparse.ArgumentParser:
    """What all of them are asked: for which topologies, whether again, and which file."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", default=",".join(topologies))
    parser.add_argument("--stale", action="store_true", help="make rows again that another version of the code made")
    parser.add_argument("--out", default=out, type=Path, metavar="CSV")
    return parser


def tabulate(
    rows: Rows,
    wanted: Sequence[Mapping[str, Any]],
    stale: bool,
    measure: Callable[..., Mapping[str, Any]],
    table: Callable[[Sequence[Row]], Table],
    verdict: Callable[[Sequence[Row]], str],
) -> None:
    """Make the rows that are missing, and those that are stale if wanted; and print them and what they say.

    **Arguments:** `measure`: of the settings of a row, in their order, all else that it holds.
    """
    with written():
        title = " ".join(f"{{{name}}}" for name in rows.settings)
        rows.make_all(rows.missing(wanted, stale), lambda settings: measure(*settings.values()), title)
    shown, console = rows.made(wanted), Console(width=150)
    console.print(table(shown))
    console.print(verdict(shown))
