"""What it takes to tune kernels, beside Hidet, AutoTVM and Ansor: how many mappings are tried, and for how long.

    python -m experiments.tables.tuning                    # minutes; needs the extra tpu-aot
    python -m experiments.tables.tuning --on v6e:2x4

A row is what `unity kernels tune` does for one device and one form of attention (`unity_jax.aot.tune`): it compiles
the three kernels, of both passes, with each mapping, once for all shapes, as Hidet's space does not depend on shapes
either (Ding et al., ASPLOS 2023, section 5). *CPU* are seconds of two cores that other jobs were using as well, all
that tuning takes. *Gain*: how many times as fast the three are as with blocks of 512, each with its best mapping for
this device, and with those of the table that ships, which are best over all devices.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import csv
import itertools
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from experiments.published import figures
from experiments.rows import Row, Rows
from experiments.scheduled import arguments, tabulate
from unity_jax.aot import tune
from unity_jax.kernels.grid import Blocks
from unity_jax.text import seconds

RESULTS = Path(__file__).parents[1] / "results" / "tuning.csv"
SETTINGS = ("topology", "form")
CODE = (
    "unity_jax/kernels",
    *(f"unity_jax/aot/{name}.py" for name in ("bundles", "cycles", "hlo", "tune")),
    *(f"experiments/tables/tuning.py:{name}" for name in ("measure", "DEFAULT")),
)
TOPOLOGIES = ("v5e:2x4",)
DEFAULT = Blocks(512, 512)


def measure(on: str, form: str) -> dict[str, Any]:
    """One row."""
    space = [Blocks(*sides) for sides in itertools.product(tune.SIDES, tune.SIDES)]
    before = time.process_time()
    found = {blocks: tune.milliseconds(form, on, blocks) for blocks in space}
    taken = time.process_time() - before
    with tune.TUNED.open(newline="") as file:
        of = [row for row in csv.DictReader(file) if row["form"] == form]
    ships = {row["kernel"]: Blocks(int(row["queries"]), int(row["keys"])) for row in of}
    least = {kernel: min(ms[kernel] for ms in found.values()) for kernel in tune.KERNELS}
    return {
        "mappings": len(space),
        "CPU seconds": taken,
        "by 512 ms": sum(found[DEFAULT].values()),
        "best ms": sum(least.values()),
        "table ms": sum(found[ships[kernel]][kernel] for kernel in tune.KERNELS),
    }


def gain(row: Row, by: str = "table") -> float:
    """How many times as fast as with blocks of 512."""
    return float(row["by 512 ms"]) / float(row[f"{by} ms"])


OTHERS = ("AutoTVM", "Ansor", "Hidet")


def table(rows: Sequence[Row]) -> Table:
    shown = Table("", "of", title="Tuning: mappings that are tried, and the time it takes")
    for name in ("mappings", "CPU", "gain", "gain, the table's"):
        shown.add_column(name, justify="right")
    said = {row["over"]: row["value"] for row in figures("Hidet") if row["what"] == "time to tune"}
    for name in OTHERS:
        (tried,) = (row["value"] for row in figures(name) if row["what"] == "mappings")
        times = f"{said[name]} x Hidet's" if name in said else "1"
        shown.add_row(name, "one task of one shape" if name in said else "matmul of any shape", tried, times, "", "")
    for row in rows:
        gains = (f"{gain(row, by):.2f}" for by in ("best", "table"))
        what = f"attention, {row['form']}, on {row['topology']}"
        shown.add_row("ours", what, row["mappings"], seconds(float(row["CPU seconds"])), *gains)
    return shown


DIFFERENCES = (
    "Mappings: a task of AutoTVM and Ansor is one operation of one shape, and each model brings its own; Hidet's space "
    "and ours are of what the hardware takes, so that what is found once ships in a table, and nobody's step waits.",
    "Fewer than Hidet's: a mapping here is the two sides of a block, since Mosaic and Triton decide how the lanes of a "
    "chip share it, where Hidet's also says what warps and threads do.",
    "Time: a mapping is compiled and never run, as its schedule says how long it takes; theirs are run on the GPU.",
)
"""A sentence on each difference."""


def told(rows: Sequence[Row]) -> list[Table | str]:
    return [table(rows), *DIFFERENCES]


def verdict(rows: Sequence[Row]) -> str:
    """Mappings and time, beside what was published."""
    if not rows:
        return ""
    theirs = ", ".join(
        f"{name} {row['value']}" for name in OTHERS for row in figures(name) if row["what"] == "mappings"
    )
    times = [float(row["CPU seconds"]) for row in rows]
    gained = math.exp(statistics.fmean(math.log(gain(row)) for row in rows))
    return (
        f"attention: {rows[0]['mappings']} mappings for all shapes ({theirs}), compiled in {seconds(min(times))} to "
        f"{seconds(max(times))} of CPU for a form and device; {gained:.2f} times as fast as with blocks of 512"
    )


def main() -> None:
    options = arguments(__doc__, TOPOLOGIES, RESULTS).parse_args()
    wanted = [dict(zip(SETTINGS, (on, form), strict=True)) for on in options.on.split(",") for form in tune.FORMS]
    rows = Rows(options.out, SETTINGS, CODE)
    tabulate(rows, wanted, options.stale, measure, table, verdict)
    Console(width=150, highlight=False).print("\n".join(DIFFERENCES))


if __name__ == "__main__":
    main()
