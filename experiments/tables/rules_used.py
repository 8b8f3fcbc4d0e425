"""Which rules of the library rewrite which models, and which never do.

    python -m experiments.tables.rules_used
    python -m experiments.tables.rules_used --never

Reads what `zoo_table.py` has planned: every model of the zoo at its published size, for two machines. Counted are the
rules in the plans, those that the search chose and those that followed from them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from experiments.rows import Row, Rows
from experiments.tables.zoo_table import RESULTS, SETTINGS
from unity_jax.rewrite.library import applicable, searched


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
    by_name = {rule.name: rule for rule in (*searched(), *applicable())}  # rows may be of rules searched before
    made = Table("rule", "source", "target", "places, by model", title="rules that the plans use")
    for name, where in sorted(used(rows).items(), key=lambda item: -sum(item[1].values())):
        sides = [", ".join(map(str, side)) for side in (by_name[name].source, by_name[name].target)]
        made.add_row(name, *sides, ", ".join(f"{model} {n}" for model, n in where.items()))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=RESULTS, type=Path, metavar="CSV")
    parser.add_argument("--never", action="store_true", help="list the rules that no plan uses")
    options = parser.parse_args()
    rows = Rows(options.rows, SETTINGS).found
    console = Console(width=150)
    console.print(table(rows))
    never = [rule.name for rule in searched() if rule.name not in used(rows)]
    console.print(f"{len(never)} of {len(searched())} rules, counted each way round, are in no plan")
    if options.never:
        console.print("\n".join(never), markup=False, highlight=False)


if __name__ == "__main__":
    main()
