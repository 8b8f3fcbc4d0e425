"""Whether compiled programs agree that choosing rewrites and layouts together beats one after the other.

    python -m experiments.tables.together    # compiles what is missing, then reads
    python -m experiments.tables.together --models xdl --on h100:4x8

The joint plan and the sequential one (`baselines.sequential`: rewritten for one device, then parallelized) of models of
`unity_table.py`, compiled by `experiments/validation/compiled.py` (its corpus `together`). The step times that we
predict and those of the judge of compiled programs (`experiments/validation/judge/`) must say the same of which is
faster. Where both plans are the same there is nothing to agree on: such pairs are shown, and not counted. The exit code
tells. Rows are kept in `experiments/results/together.csv`.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from experiments.rows import Row, Rows
from experiments.validation.compiled import TOGETHER, TWO
from experiments.validation.confirmed import SAME, compared, differs, ratio, same_direction
from experiments.validation.ranking import ranking
from unity_jax.text import seconds

RESULTS = Path(__file__).parents[1] / "results" / "together.csv"
SETTINGS = ("model", "topology")
MODELS = ("xdl", "candle_uno", "dlrm")
TOPOLOGIES = ("h100:8", "h100:4x8", "v5e:4x8")


def compile_missing(model: str, on: str) -> None:
    """Both plans, each in its folder."""
    if {case.label for case in TOGETHER.cases([model], [on])} < set(TWO):
        what = ["--corpus", TOGETHER.name, "--plans", ",".join(TWO), "--models", model, "--on", on]
        subprocess.run([sys.executable, "-m", "experiments.validation.compiled", *what], check=True)


def table(rows: Sequence[Row]) -> Table:
    made = Table("model", "machine", title="Seconds of a step: joint / sequential, and how many times as fast joint is")
    for column in ("predicted", "ratio", "judged", "ratio", "same direction"):
        made.add_column(column)
    for row in rows:
        told = []
        for how in ("predicted", "judged"):
            told.append(" / ".join(seconds(float(row[f"{who} {how}"])) for who in ("chosen", "other")))
            told.append(f"{ratio(row, how):.3f}")
        same = "the same plan" if not differs(row) else "as fast" if equal(row) else "yes" if agrees(row) else "no"
        made.add_row(row["model"], row["topology"], *told, same)
    return made


def equal(row: Row) -> bool:
    """Whether two plans are equally fast, as predicted and as judged."""
    return all(abs(ratio(row, how) - 1) <= SAME for how in ("predicted", "judged"))


def agrees(row: Row) -> bool:
    """Whether prediction and judge say the same of which is faster."""
    return not equal(row) and same_direction(row)


def verdict(rows: Sequence[Row]) -> str:
    differ = list(filter(differs, rows))
    pairs = [row for row in differ if not equal(row)]
    return (
        f"{sum(map(agrees, pairs))} of {len(pairs)} pairs of different plans agree on which is faster; "
        f"{len(differ) - len(pairs)} differ by at most {SAME:.0%}; {len(rows) - len(differ)} pairs are equal plans"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--on", default=",".join(TOPOLOGIES))
    parser.add_argument("--out", default=RESULTS, type=Path, metavar="CSV")
    options = parser.parse_args()
    rows, shown, failed = Rows(options.out, SETTINGS), [], []
    for topology in options.on.split(","):
        for model in options.models.split(","):
            compile_missing(model, topology)
            found = ranking(model, topology, TOGETHER)
            of = {c.label: c for c in found.candidates}
            failed += [f"{model} on {topology}, {label}: {error}" for label, error in found.failed.items()]
            if of.keys() == set(TWO):
                settings = {"model": model, "topology": topology}
                shown.append(rows.put(settings, compared(of["joint"], of["sequential"])))
    console = Console(width=150, highlight=False)
    console.print(table(shown))
    console.print(verdict(shown))
    for line in failed:
        console.print(line, markup=False)
    return int(bool(failed) or not all(map(same_direction, filter(differs, shown))))


if __name__ == "__main__":
    sys.exit(main())
