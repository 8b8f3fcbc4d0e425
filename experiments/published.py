"""What papers state of kernels: `experiments/data/kernels_published.csv`.

{row["over"]: row["value"] for row in figures("EcoRNN")}     # {"MXNet's default": "3", "cuDNN": "1.5"}
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Mapping
from pathlib import Path

DATA = Path(__file__).parent / "data" / "kernels_published.csv"


@functools.cache
def figures(paper: str) -> tuple[Mapping[str, str], ...]:
    """The rows of a paper: `what` is stated, its `value` (times as fast, a number or milliseconds) `over` what, and the
    `source`."""
    with DATA.open(newline="") as file:
        return tuple(row for row in csv.DictReader(file) if row["paper"] == paper)
