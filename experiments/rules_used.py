"""Which rules of the library rewrite which models, and which never do.

    python experiments/rules_used.py
    python experiments/rules_used.py --models dlrm,bert --on h100:8 --never

Every model of the zoo at its published widths with few layers (`compiled.SIZES`) is planned for several machines.
Counted are the rules in the plans, those that the search chose and those that followed from them. Rows are kept in a
CSV file, and those that are there are not made again.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from baselines import joint, program_of
from compiled import SIZES
from rich.console import Console
from rich.table import Table
from rows import Row, Rows

import models
from unity_jax.machine.machine import Machine
from unity_jax.rewrite.library import searched

RESULTS = Path(__file__).parent / "results" / "rules_used.csv"
SETTINGS = ("model", "machine")


def measure(model: str, on: str) -> dict[str, Any]:
    """One row: `rules` as `name*spots`, joined by `; `."""
    program = program_of(model, **SIZES.get(model, {}))
    plan = joint(program, Machine.preset(on))
    spots: Counter[str] = Counter()
    for rewrite in plan.program.rewrites:
        for _, step in rewrite.steps:
            spots[step.rule] += len(step.spots)
    return {
        "ops": sum(1 for _ in program.graph.walk()),
        "step seconds": plan.seconds,
        "saved seconds": sum(r.saved for r in plan.program.rewrites),
        "rules": "; ".join(f"{name}*{n}" for name, n in spots.most_common()),
    }


def used(rows: Sequence[Row]) -> dict[str, dict[str, int]]:
    """By rule, in how many places of each model, of all machines together."""
    found: dict[str, dict[str, int]] = {}
    for row in rows:
        for each in filter(None, row["rules"].split("; ")):
            name, _, spots = each.rpartition("*")
            models_of = found.setdefault(name, {})
            models_of[row["model"]] = models_of.get(row["model"], 0) + int(spots)
    return found


def table(rows: Sequence[Row]) -> Table:
    by_name = {rule.name: rule for rule in searched()}
    made = Table("rule", "source", "target", "places, by model", title="rules that the plans use")
    for name, where in sorted(used(rows).items(), key=lambda item: -sum(item[1].values())):
        sides = [", ".join(map(str, side)) for side in (by_name[name].source, by_name[name].target)]
        made.add_row(name, *sides, ", ".join(f"{model} {n}" for model, n in where.items()))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(models.names()))
    parser.add_argument("--on", default="v100-summit:1x6,h100:8,v5e:2x4")
    parser.add_argument("--never", action="store_true", help="list the rules that no plan uses")
    parser.add_argument("--out", default=RESULTS, type=Path, metavar="CSV")
    options = parser.parse_args()
    rows = Rows(options.out, SETTINGS)
    wanted = [{"model": model, "machine": on} for on in options.on.split(",") for model in options.models.split(",")]
    rows.make_all(wanted, lambda w: measure(*w.values()), "{model} on {machine}")
    shown = rows.made(wanted)
    console = Console(width=150)
    console.print(table(shown))
    never = [rule.name for rule in searched() if rule.name not in used(shown)]
    console.print(f"{len(never)} of {len(searched())} rules, counted each way round, are in no plan")
    if options.never:
        console.print("\n".join(never), markup=False, highlight=False)


if __name__ == "__main__":
    main()
