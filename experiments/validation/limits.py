"""Whether compiled programs keep a memory limit that the plan of the program as it is would not.

    python -m experiments.validation.limits --on h100:8
    python -m experiments.validation.limits --models gpt_pytree,mlp --on v5e:2x4 --parts .6

Each program is planned without a limit and compiled; then under limits of 0.8, 0.6 and 0.4 of what it needed. Where the
program of a plan needs more than its limit it is planned again, as for a step that is run (`unity_jax.correction`), at
most three times. A limit is kept by the first plan, after corrections, or the plan says that none keeps it. `seconds`
are predicted.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from experiments.baselines import joint
from experiments.made_by import COMPILED as CODE
from experiments.rows import Row, Rows
from experiments.validation.compiled import COMPILED, arguments, asked, made, planned
from experiments.validation.kept import compiled
from unity_jax.aot.bundles import written
from unity_jax.aot.topologies import topology
from unity_jax.correction import corrected, reserving
from unity_jax.machine.machine import Machine
from unity_jax.search.candidate import Candidate
from unity_jax.text import seconds, size

RESULTS = Path(__file__).parents[1] / "results" / "limits.csv"
SETTINGS = ("model", "topology", "part")
PARTS = (0.8, 0.6, 0.4)
GOAL = 0.9
"""Of the limits that some plan keeps, those that the first one should keep."""


def under_limits(model: str, on: str, parts: Sequence[float], stop: int) -> Iterator[tuple[float, dict[str, Any]]]:
    """What becomes of a program under limits that are parts of what it needs without one.

    **Arguments:** `stop`: seconds that the compiler may take (0: any).
    """
    program, machine, devices = COMPILED.program(model, on), Machine.preset(on), topology(on)
    options = COMPILED.flags(model, devices[0].platform)

    def needs(found: Candidate) -> float:
        facts = compiled(planned(made(machine, found), devices), devices, on, options, stop)
        return facts.get("bytes", float("inf"))

    free = joint(program, machine)
    most = needs(free)
    for part in parts:
        limit = part * most
        tried: list[float] = []

        def compiled_bytes(found: Candidate, tried: list[float] = tried) -> float:
            tried.append(needs(found))
            return tried[-1]

        def search(margin: int, spare: int = 0, limit: float = limit) -> Candidate:
            return joint(program, machine, max(limit - margin, 1.0), spare)

        first = reserving(limit, search)
        found, margin = corrected(
            model,
            first,
            limit,
            needs=compiled_bytes,
            predicted=lambda c: c.memory.peak_bytes,
            again=search,
        )
        yield (
            part,
            {
                "free bytes": most,
                "free seconds": free.seconds,
                "limit": round(limit),
                "predicted": first.memory.peak_bytes,
                "compiled": tried[0],
                "corrections": len(tried) - 1,
                "bytes": tried[-1],
                "seconds": found.seconds,
                "says it fits": found.memory.peak_bytes + margin <= limit,
                "saves": "; ".join(dict.fromkeys(how.name for how in found.program.savings)),
            },
        )


def outcome(row: Row) -> str:
    """What became of a limit."""
    if float(row["bytes"]) <= float(row["limit"]):
        return "at first" if row["corrections"] == "0" else "corrected"
    return "exceeded" if row["says it fits"] == "True" else "no plan"


def verdict(rows: Sequence[Row]) -> str:
    found = [outcome(row) for row in rows]
    kept = [o for o in found if o in ("at first", "corrected", "exceeded")]
    first = found.count("at first")
    share = f" ({first / len(kept):.0%}; the goal is {GOAL:.0%})" if kept else ""
    return (
        f"{len(rows)} limits of {len({r['model'] for r in rows})} programs: {first} kept by the first plan{share}, "
        f"{found.count('corrected')} after corrections, {found.count('exceeded')} exceeded, "
        f"{found.count('no plan')} of which the plan says that none keeps it"
    )


def table(rows: Sequence[Row]) -> Table:
    shown = Table("program", "topology", "part", "limit", "predicted", "compiled", "in the end", "", "step", "saves")
    for row in rows:
        first, last = float(row["compiled"]), float(row["bytes"])
        shown.add_row(
            *(row[name] for name in SETTINGS),
            size(float(row["limit"])),
            size(float(row["predicted"])),
            size(first),
            size(last) if last != first else "",
            outcome(row),
            f"{seconds(float(row['seconds']))}, {float(row['seconds']) / float(row['free seconds']):.2f} x",
            row["saves"],
        )
    return shown


def worker(options: argparse.Namespace) -> int:
    names, topologies = asked(options)
    parts = [float(p) for p in options.parts.split(",")]
    rows, console, shown = Rows(options.out, SETTINGS, CODE), Console(width=170, highlight=False), []
    for model in names:
        for on in topologies:
            for part, found in under_limits(model, on, parts, options.limit):
                shown.append(rows.put({"model": model, "topology": on, "part": part}, found))
    console.print(table(shown))
    console.print(verdict(shown))
    return int(any(outcome(row) == "exceeded" for row in shown))


def main() -> int:
    parser = arguments(__doc__ or "", RESULTS)
    parser.add_argument("--parts", default=",".join(map(str, PARTS)), help="of what a program needs without a limit")
    parser.add_argument("--limit", type=int, default=0, help="seconds that the compiler may take for a plan")
    with written():
        return worker(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
