"""Summaries of ratios: the geometric mean and the median, by family of models; plans that do not fit are left out."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from rich.table import Table

import models
from experiments.rows import Row

NO_FIT = "no fit"
"""What stands in a table in place of a ratio of plans of which one needs more memory than there is."""


def over(row: Row, ours: str, other: str, digits: int) -> str:
    """How many times as fast as the other plan ours is, in a table; nothing where there is no other plan."""
    if not row.get(f"{other} seconds"):
        return ""
    fit = row[f"{other} fits"] == row[f"{ours} fits"] == "True"
    return f"{float(row[f'{other} seconds']) / float(row[f'{ours} seconds']):.{digits}f}" if fit else NO_FIT


def never(found: Sequence[str], rows: Sequence[Row], name: str) -> str:
    """What has been found, or that it never is, of so many rows that have this baseline."""
    of = sum(bool(r.get(f"{name} seconds")) for r in rows)
    return ", ".join(found) or (f"never ({of} rows)" if of else "no rows yet")


def ratios(rows: Sequence[Row], ours: str, other: str) -> list[tuple[Row, float]]:
    """The rows in which both plans are known and fit, and how many times as fast as the other ours is."""
    both = [r for r in rows if r.get(f"{ours} fits") == r.get(f"{other} fits") == "True"]
    return [(r, float(r[f"{other} seconds"]) / float(r[f"{ours} seconds"])) for r in both]


def middle(found: Sequence[float], what: str = "plans") -> str:
    """`1.31 (median 1.07, of 22 plans)`: the geometric mean first."""
    if not found:
        return f"nothing to compare (0 {what})"
    return f"{statistics.geometric_mean(found):.2f} (median {statistics.median(found):.2f}, of {len(found)} {what})"


def by_family(rows: Sequence[Row], ours: str, against: Mapping[str, str], title: str) -> Table:
    """A line for each family of models and one for all: geometric mean, median and number, against each baseline.

    **Arguments:** `against`: baselines, as columns call them, with what readers call them.
    """
    made = Table("family", *(f"than {text}" for text in against.values()), title=title)
    made.caption = "geometric mean (median, number of models that fit)"
    for family in (*models.FAMILIES, "all"):
        own = [r for r in rows if family in ("all", models.family(r["model"]))]
        if own:
            made.add_row(family, *(_cell([q for _, q in ratios(own, ours, name)]) for name in against))
    return made


def _cell(found: Sequence[float]) -> str:
    if not found:
        return ""
    return f"{statistics.geometric_mean(found):.2f} ({statistics.median(found):.2f}, {len(found)})"
