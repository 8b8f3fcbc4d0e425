"""What attention by kernels is worth to whole steps, compiled and judged: GPT and LLaMA of 2,048 and 8,192 tokens.

    python -m experiments.tables.long_sequences               # an hour; needs the extras tpu-aot and gpu-aot
    python -m experiments.tables.long_sequences --on h100:8 --models gpt

Four layers at published widths, one example on each device of 8,192 tokens and four of 2,048. Each step is planned with
kernels where they are faster, and with attention as it is written (`Options(attention="xla")`); *expert* is the best
plan of experts, with kernels too (`experiments/baselines.py`). All three are compiled by the real XLA:TPU or XLA:GPU,
and judged (`experiments/validation/judge`). Rows are kept in `experiments/results/long_sequences.csv`.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from experiments.baselines import BEST, baselines, joint, program_of
from experiments.made_by import COMPILED
from experiments.rows import Row, Rows
from experiments.validation.compiled import made, planned
from experiments.validation.kept import compiled
from unity_jax.aot.bundles import written
from unity_jax.aot.flags import OFFLINE
from unity_jax.aot.topologies import topology
from unity_jax.machine.machine import Machine
from unity_jax.program import Program
from unity_jax.rewrite.library import searched
from unity_jax.search import joint as search
from unity_jax.search.candidate import NO_PINS, Candidate
from unity_jax.search.options import SearchOptions
from unity_jax.search.placement import mesh_candidates
from unity_jax.text import seconds

RESULTS = Path(__file__).parents[1] / "results" / "long_sequences.csv"
SETTINGS = ("topology", "model", "length")
CODE = (*COMPILED, *(f"experiments/tables/long_sequences.py:{name}" for name in ("measure", "as_written", "PLANS")))
MODELS = ("gpt", "llama")
LENGTHS = {2048: 4, 8192: 1}
"""Examples of a device, by tokens."""
WANTED = {2048: 1.3, 8192: 2.0}
"""How many times as fast as with attention as it is written a step is to be."""
LAYERS = 4
SAME = 0.995
"""From which part of the speed of another plan on one is as fast."""


def as_written(program: Program, machine: Machine) -> Candidate:
    """The planner's answer with attention as it is written."""
    meshes, options = mesh_candidates(machine.num_devices, machine), SearchOptions(attention="xla")
    return search.plan(program, machine, None, NO_PINS, meshes, searched(), options)


PLANS: dict[str, Callable[[Program, Machine], Candidate]] = {
    "kernels": joint,
    "as written": as_written,
    "expert": lambda program, machine: baselines(program, machine)[BEST],
}


def measure(on: str, model: str, length: int) -> dict[str, Any]:
    """One row."""
    machine, devices = Machine.preset(on), topology(on)
    batch = LENGTHS[length] * machine.num_devices
    program = program_of(model, layers=LAYERS, length=length, batch_size=batch)
    row: dict[str, Any] = {}
    for name, plan in PLANS.items():
        found = plan(program, machine)
        with written():
            lowered = planned(made(machine, found), devices)
            facts = compiled(lowered, devices, on, OFFLINE[devices[0].platform])
        row |= {f"{name} plan": found.label, f"{name} predicted": found.seconds}
        row |= {f"{name} {what}": facts.get(what, "") for what in ("judged", "bytes", "error")}
    return row


def times(row: Row, other: str) -> float | None:
    """How many times as fast as another plan the one with kernels is judged to be."""
    of, to = row["kernels judged"], row[f"{other} judged"]
    return float(to) / float(of) if of and to else None


def table(rows: Sequence[Row]) -> Table:
    shown = Table("topology", "model", "tokens", title="A step, and how many times as fast kernels make it, judged")
    for column in ("kernels", "predicted", "than as written", "wanted", "than the expert"):
        shown.add_column(column, justify="right")
    for row in rows:
        found = [row["kernels judged"], row["kernels predicted"]]
        than = ["-" if (n := times(row, other)) is None else f"{n:.2f}" for other in ("as written", "expert")]
        told = [seconds(float(n)) if n else "-" for n in found]
        shown.add_row(*(row[s] for s in SETTINGS), *told, than[0], f"{WANTED[int(row['length'])]}", than[1])
    return shown


def verdict(rows: Sequence[Row]) -> str:
    than = [(row, times(row, "as written"), times(row, "expert")) for row in rows]
    reached = sum(n is not None and n >= WANTED[int(row["length"])] for row, n, _ in than)
    slower = sum(n is not None and n < SAME for _, _, n in than)
    return f"{reached} of {len(rows)} steps are as much faster as is wanted; an expert's is judged faster in {slower}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--on", default="h100:8,v5e:2x4")
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--stale", action="store_true", help="make again what another version of the code made")
    parser.add_argument("--out", default=RESULTS, type=Path, metavar="CSV")
    options = parser.parse_args()
    rows = Rows(options.out, SETTINGS, CODE)
    wanted = [
        {"topology": on, "model": model, "length": int(length)}
        for on in options.on.split(",")
        for model in options.models.split(",")
        for length in options.lengths.split(",")
    ]
    rows.make_all(
        rows.missing(wanted, options.stale), lambda w: measure(*w.values()), "{model} of {length} on {topology}"
    )
    console, found = Console(width=150, highlight=False), rows.made(wanted)
    console.print(table(found))
    console.print(verdict(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
