"""Our compiled programs beside plain `jax.jit` of the same step with the same shardings: memory and judged seconds.

    python -m experiments.validation.compiled --programs validation --plain    # compiles both
    python -m experiments.validation.against_jit
    python -m experiments.validation.against_jit --models attention_layer --on v5e:2x4

For the planner's choice and for data parallelism and FSDP: our program of the plan against the user's own step, whose
arguments and results have the plan's layouts and which XLA partitions. The arithmetic, the compiler and the judge
(`experiments/validation/judge/`) are the same, so a ratio above 1 is what our lowering costs. The planner's choice
stands beside plain data parallelism too, which it must not lose to.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from experiments.rows import Row, Rows
from experiments.validation.compiled import (
    COMPILED,
    FACTS,
    JIT,
    PLAIN,
    SETS,
    TOPOLOGIES,
    Case,
    arguments,
    asked,
    set_of,
)
from unity_jax.text import seconds, size

RESULTS = Path(__file__).parents[1] / "results" / "against_jit.csv"
SETTINGS = ("model", "topology", "plan")
UNITS = ("bytes", "seconds")
MOST = {"bytes": 1.05, "seconds": 1.03}
"""What our program may need, of what plain `jax.jit` needs."""


def compared(model: str, topology: str, plan: str) -> dict[str, float] | None:
    """Our program, plain `jax.jit` with the same shardings and plain data parallelism; None if one is missing."""
    found = {}
    for who, corpus, label in (("our", COMPILED, plan), ("plain", JIT, plan), ("plain dp", JIT, "dp")):
        case = Case(model, topology, label, corpus.folder(model, topology) / label)
        facts = case.facts if (case.folder / FACTS).exists() else {"error": "not compiled"}
        if "error" in facts:
            return None
        found |= {f"{who} bytes": facts["bytes"], f"{who} seconds": facts["judged"]}
    return found


def ratio(row: Row, unit: str, to: str = "plain") -> float:
    return float(row[f"our {unit}"]) / float(row[f"{to} {unit}"])


def holds(row: Row) -> bool:
    return all(ratio(row, unit) <= MOST[unit] for unit in UNITS)


def behind(rows: Sequence[Row]) -> list[Row]:
    """The planner's choices that are slower than plain data parallelism."""
    return [row for row in rows if row["plan"] == "chosen" and ratio(row, "seconds", "plain dp") > MOST["seconds"]]


def verdict(rows: Sequence[Row]) -> str:
    said = []
    for name, members in reversed(SETS.items()):
        if some := [row for row in rows if row["model"] in members]:
            chosen, wanted = sum(row["plan"] == "chosen" for row in some), len(members) * len(TOPOLOGIES) * len(PLAIN)
            lack = f" ({wanted - len(some)} of {wanted} are not compiled)" if len(some) < wanted else ""
            said.append(
                f"{name} programs: {sum(map(holds, some))} of {len(some)} need at most {MOST['bytes']:.2f} of the "
                f"memory and {MOST['seconds']:.2f} of the time of jax.jit with the same shardings{lack}; "
                f"{len(behind(some))} of {chosen} chosen plans are slower than plain data parallelism by more than "
                f"{MOST['seconds'] - 1:.0%}"
            )
    return "; ".join(said)


def table(rows: Sequence[Row]) -> Table:
    compared = ("memory", "of jit", "ratio", "step", "of jit", "ratio", "/ jit dp")
    made = Table("set", "program", "topology", "plan", *compared)
    for row in rows:
        cells = [set_of(row["model"]), *(row[name] for name in SETTINGS)]
        for unit, shown in zip(UNITS, (lambda x: size(int(float(x))), lambda x: seconds(float(x))), strict=True):
            high = "!" * (ratio(row, unit) > MOST[unit])
            cells += [shown(row[f"our {unit}"]), shown(row[f"plain {unit}"]), f"{ratio(row, unit):.3f}{high}"]
        made.add_row(*cells, f"{ratio(row, 'seconds', 'plain dp'):.3f}")
    return made


def main() -> int:
    names, topologies = asked(options := arguments(__doc__, RESULTS).parse_args())
    rows, console = Rows(options.out, SETTINGS), Console(width=160, highlight=False)
    wanted = [(model, on, plan) for model in names for on in topologies for plan in PLAIN]
    shown, missing = [], []
    for which in track(wanted, "judging", console=Console(stderr=True), transient=True):
        found = compared(*which)
        if found is None:
            missing.append(", ".join(which))
        else:
            shown.append(rows.put(dict(zip(SETTINGS, which, strict=True)), found))
    console.print(table(shown))
    console.print(verdict(shown))
    console.print(f"missing: {'; '.join(missing) or 'none'}", markup=False)
    return int(not all(map(holds, shown)) or bool(behind(shown)))


if __name__ == "__main__":
    sys.exit(main())
