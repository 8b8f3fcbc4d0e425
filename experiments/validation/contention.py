"""Can five coefficients, fitted on pairs of streams alone, predict how four streams overlap?

    python -m experiments.validation.contention

Data: the overlaps of a matmul, a collective and copies from and to the host that Mist measured on A100, V100 and L4
(https://github.com/Dazz993/Mist, Apache-2.0), in `data/mist_overlaps.csv.gz`: the time of each stream alone and of all
together, in milliseconds, for every pair and every four. Each group of GPUs has a fit of its own. An error is that of
one four-way overlap relative to its measured time; a group has the median and the mean of its errors, the last row the
medians over groups. Beside it: the longest stream (perfect overlap) and the sum of the streams (none).
"""

from __future__ import annotations

import csv
import gzip
import statistics
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from unity_jax.machine.contention import Contention, fit

DATA = Path(__file__).parents[1] / "data" / "mist_overlaps.csv.gz"

Group = tuple[str, int, int]
"""GPU, nodes, GPUs per node."""


@dataclass(frozen=True)
class Errors:
    """Relative errors of one group's four-way overlaps under the fit and under the two extremes."""

    contention: Contention
    fitted: np.ndarray
    longest: np.ndarray
    summed: np.ndarray


def read() -> dict[Group, tuple[np.ndarray, np.ndarray]]:
    """By group, milliseconds of each stream alone, (overlaps, 4), and of all together."""
    rows: dict[Group, list[list[float]]] = {}
    with gzip.open(DATA, "rt") as lines:
        for row in csv.DictReader(lines):
            gpu, nodes, gpus, *times = row.values()
            rows.setdefault((gpu, int(nodes), int(gpus)), []).append([float(x) for x in times])
    return {group: (np.array(found)[:, :4], np.array(found)[:, 4]) for group, found in rows.items()}


def evaluate(alone: np.ndarray, together: np.ndarray) -> Errors:
    """Fit on the pairs of a group, predict its fours."""
    streams = (alone > 0).sum(axis=1)
    pairs, fours = streams == 2, streams == 4
    found = fit(alone[pairs], together[pairs])
    measured = together[fours]
    predicted = np.array([found.seconds(*row) for row in alone[fours]])
    guesses = predicted, alone[fours].max(axis=1), alone[fours].sum(axis=1)
    return Errors(found, *(np.abs(guess / measured - 1) for guess in guesses))


def main() -> None:
    table = Table("GPU", "nodes x GPUs", "a, b, p, q, s", "fours", title="Error of four-way overlaps, fitted on pairs")
    for name in ("median", "mean", "longest: median", "mean", "sum: median", "mean"):
        table.add_column(name, justify="right")
    figures = []
    for (gpu, nodes, gpus), data in read().items():
        errors = evaluate(*data)
        row = [f(e) for e in (errors.fitted, errors.longest, errors.summed) for f in (np.median, np.mean)]
        figures.append(row)
        constants = " ".join(f"{x:.3f}" for x in astuple(errors.contention))
        table.add_row(gpu, f"{nodes} x {gpus}", constants, str(len(errors.fitted)), *(f"{x:.1%}" for x in row))
    table.add_section()
    middle = [f"{statistics.median(column):.1%}" for column in zip(*figures, strict=True)]
    table.add_row("median", "of groups", "", "", *middle)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
