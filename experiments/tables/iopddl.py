"""The layout solver on published problems: the instances of the ASPLOS 2025 contest, beside the best known costs.

    python -m experiments.tables.iopddl --instances DIR                  # all in a folder: minutes each
    python -m experiments.tables.iopddl --instances DIR --only B,G
    python -m experiments.tables.iopddl                                  # B, which is here

The folder has `asplos-2025-iopddl-B.json.gz` and so on, from https://github.com/google/iopddl (Apache-2.0), where the
best known costs are from, too (experiments/data/iopddl_best_known.csv): of any team, within at most five minutes. Ratio
is the cost over the best known one, less than 1 if it is cheaper. Seconds are of CPU, of one thread, with reading.
Costs and what fits are computed from the instance as it is read, not by the solver. Rows are kept in a CSV file, and
those that are there are not made again.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.rows import Row, Rows
from unity_jax.solver import load, solve

HERE = Path(__file__).parents[1]
RESULTS = HERE / "results" / "iopddl.csv"
BEST_KNOWN = HERE / "data" / "iopddl_best_known.csv"
FILE = "asplos-2025-iopddl-{instance}.json.gz"
SETTINGS = ("instance", "effort")
CLOSE = 1.02
"""The ratio to the best known cost that is near it."""
CODE = ("unity_jax/solver", "unity_jax/search/problem.py", "experiments/tables/iopddl.py:measure")


def best_known() -> dict[str, int]:
    """The cost of each instance."""
    with BEST_KNOWN.open(newline="") as file:
        return {row["instance"]: int(row["cost"]) for row in csv.DictReader(file)}


def measure(path: Path, effort: float) -> dict[str, Any]:
    """One row."""
    start = time.process_time()
    problem = load(path)
    found = solve(problem, effort=effort)
    took = time.process_time() - start
    return {
        "nodes": len(problem.unary),
        "edges": len(problem.edges),
        "limit": int(problem.limit or 0),
        "peak": int(found.peak),
        "feasible": found.feasible and found.peak <= (problem.limit or np.inf),
        "cost": int(found.cost) if np.isfinite(found.cost) else "inf",
        "CPU seconds": took,
    }


def table(rows: Sequence[Row]) -> Table:
    known = best_known()
    made = Table("instance", "nodes", "edges", "fits", "cost", "best known", "ratio", "CPU", title="published problems")
    for row in rows:
        numbers = [f"{int(row[name]):,}" for name in ("nodes", "edges")]
        fits, best = row["feasible"] == "True", known[row["instance"]]
        cost = f"{int(row['cost']):,}" if fits else "none"
        ratio = f"{int(row['cost']) / best:.4f}" if fits else ""
        fit = f"{int(row['peak']) / int(row['limit']):.1%}" if fits else "no"
        made.add_row(row["instance"], *numbers, fit, cost, f"{best:,}", ratio, f"{float(row['CPU seconds']):.0f} s")
    return made


def verdict(rows: Sequence[Row]) -> str:
    """How many fit, and how near they are to the best known costs."""
    known = best_known()
    ratios = [int(row["cost"]) / known[row["instance"]] for row in rows if row["feasible"] == "True"]
    if not ratios:
        return f"none of {len(rows)} fit"
    mean, close = statistics.geometric_mean(ratios), sum(ratio <= CLOSE for ratio in ratios)
    return f"{len(ratios)} of {len(rows)} fit, {close} within {CLOSE - 1:.0%}; geometric mean of ratios {mean:.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", default=HERE / "data", type=Path, metavar="DIR")
    parser.add_argument("--only", help="letters of instances, separated by commas; all that are there by default")
    parser.add_argument("--effort", default=1.0, type=float, help="how much work to do")
    parser.add_argument("--out", default=RESULTS, type=Path, metavar="CSV")
    parser.add_argument("--stale", action="store_true", help="make again what another version of the code made")
    options = parser.parse_args()
    paths = {name: options.instances / FILE.format(instance=name) for name in best_known()}
    names = options.only.split(",") if options.only else [name for name, path in paths.items() if path.exists()]
    for name in names:
        if name not in paths or not paths[name].exists():
            parser.error(f"{options.instances} has no {FILE.format(instance=name)}")
    rows = Rows(options.out, SETTINGS, CODE)
    wanted = [{"instance": name, "effort": options.effort} for name in names]
    missing = rows.missing(wanted, options.stale)
    rows.make_all(missing, lambda w: measure(paths[w["instance"]], w["effort"]), "{instance}")
    shown, console = rows.made(wanted), Console(width=150)
    console.print(table(shown))
    console.print(verdict(shown))


if __name__ == "__main__":
    main()
