"""Every model of the zoo at its published size: the planner's plan beside the best of what experts would have run.

    python -m experiments.tables.zoo_table                                  # hours; rows are made once, and kept
    python -m experiments.tables.zoo_table --models mlp,dlrm --on h100:8    # minutes

Baselines are those of `experiments/baselines.py`: data parallelism, FSDP, Megatron and their combinations, on every
mesh that the planner considers, priced by the same simulation; the best of these on the program as the planner rewrites
it (what an expert writes by hand); and the planner without rewrites. Ratios count how many times as fast as a baseline
the plan is; means and medians are over models where both fit, by family of models. Planning is timed in seconds of CPU.
Data parallelism is asserted to divide the matmuls and convolutions of a step by the devices. Operations that no rule
can split are computed in full by every device: none of them may make a tensor above 1 MB, and the exit code tells
whether one does.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

from rich.console import Console
from rich.table import Table

import models
from experiments.baselines import BEST, REWRITTEN, SEARCH, checked, columns, joint, others, padded_program, program_of
from experiments.made_by import PLANNED
from experiments.rows import Row, Rows
from experiments.summaries import NO_FIT, by_family, never, over, ratios
from unity_jax.machine.machine import Machine
from unity_jax.pcg.graph import Graph
from unity_jax.search.candidate import Candidate
from unity_jax.text import seconds

RESULTS = Path(__file__).parents[1] / "results" / "zoo.csv"
MACHINES = ("h100:8", "v5e:8x8")
SETTINGS = ("model", "size", "machine", "batch per device")
CODE = (*PLANNED, *(f"experiments/tables/zoo_table.py:{name}" for name in ("measure", "replicated")))
PER_DEVICE = {"mlp": 256, "dlrm": 1024, "xdl": 1024, "candle_uno": 256} | dict.fromkeys(
    ("inception", "resnet", "resnext", "vit", "lstm_lm"), 64
)
"""Examples per device: as `experiments/tables/unity_table.py` has them, and 64 images or short texts."""
LONG_TEXTS = 4
"""Examples per device of the other models, whose examples are hundreds or thousands of tokens."""
AGAINST = {
    "data parallel": "data parallelism",
    BEST: "the best expert",
    REWRITTEN: "the best expert on the rewritten program",
    SEARCH: "the search without rewrites",
}
"""What the plan is compared with."""
LARGE = 1e6
"""Bytes from which on a tensor that every device computes in full is worth a word."""


def measure(model: str, size: str, on: str, batch: int) -> dict[str, Any]:
    """One row."""
    machine = Machine.preset(on)
    program = program_of(model, size, batch_size=batch * machine.num_devices)
    start = time.process_time()
    found = joint(program, machine)
    took = time.process_time() - start
    row: dict[str, Any] = {
        "devices": machine.num_devices,
        "parameters": models.get(model, size).num_parameters,
        "operations": sum(1 for _ in program.graph.walk()),
        "planning CPU seconds": took,
    }
    limit = machine.device.memory_bytes
    row |= columns("plan", found, limit)
    row |= {"mesh": str(found.mesh), "rules": "; ".join(f"{name}*{n}" for name, n in fired(found).most_common())}
    row["replicated"] = "; ".join(replicated(found.graph))
    stored = padded_program(model, size, machine.num_devices, batch_size=batch * machine.num_devices)
    compared = others(program, machine, found, stored=stored)
    for name, plan in compared.items():
        row |= columns(name, plan, limit)
    row["data parallel divides"] = checked(compared["data parallel"])
    return row


def fired(plan: Candidate) -> Counter[str]:
    """In how many places each rule rewrites a plan's program: those that the search chose, and those that followed."""
    spots: Counter[str] = Counter()
    for rewrite in plan.program.rewrites:
        for _, step in rewrite.steps:
            spots[step.rule] += len(step.spots)
    return spots


def replicated(graph: Graph) -> list[str]:
    """Large tensors of operations without a rule, with the line that makes them."""
    return [
        f"{op.name} {t} at {op.source}"
        for op in graph.walk()
        if op.shard is not None and op.shard.rule.fallback
        for t in op.outputs
        if t.nbytes > LARGE
    ]


def table(rows: Sequence[Row], on: str) -> Table:
    shown = Table(title=f"{on}; ! does not fit, {NO_FIT}: one of the two does not")
    heads = ("model", "parameters", "operations", "planned in (CPU)", "mesh", "step")
    for name in (*heads, *(f"/ {name}" for name in AGAINST), "best expert"):
        left = name in ("model", "mesh", "best expert")
        shown.add_column(name, overflow="fold", justify="left" if left else "right")
    for row in rows:
        shown.add_row(
            f"{row['model']} {row['size']}",
            f"{int(row['parameters']):,}",
            row["operations"],
            f"{float(row['planning CPU seconds']):.0f} s",
            row["mesh"],
            seconds(float(row["plan seconds"])) + "!" * (row["plan fits"] == "False"),
            *(over(row, "plan", name, 3) for name in AGAINST),
            row[f"{BEST} plan"],
        )
    return shown


def families(rows: Sequence[Row]) -> list[Table]:
    """Summaries of each machine by family."""
    return [
        by_family([r for r in rows if r["machine"] == on], "plan", AGAINST, f"{on}: how many times as fast the plan is")
        for on in dict.fromkeys(r["machine"] for r in rows)
    ]


def said(rows: Sequence[Row]) -> list[str | Table]:
    """What can be compared, by family, and what must not be."""
    told: list[str | Table] = [*families(rows)]
    lost = [f"{r['model']} on {r['machine']}" for r in rows if r[f"{BEST} fits"] == "True" != r["plan fits"]]
    told.append(f"an expert fits and the plan does not: {', '.join(lost) or 'never'}")
    for name, text in AGAINST.items():
        found = ratios(rows, "plan", name)
        slow = [f"{r['model']} on {r['machine']} ({ratio:.3f})" for r, ratio in found if ratio < 1 - 1e-6]
        told.append(f"the plan is slower than {text}: {never(slow, [r for r, _ in found], name)}")
    large = [f"{r['model']}: {r['replicated']}" for r in rows if r["replicated"]]
    told.append(f"tensors above 1 MB that every device computes in full: {'; '.join(large) or 'none'}")
    return told


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(models.names()))
    parser.add_argument("--size", default="full")
    parser.add_argument("--on", default=",".join(MACHINES))
    parser.add_argument("--rows", type=int, help="make at most so many")
    parser.add_argument("--stale", action="store_true", help="make again what another version of the code made")
    parser.add_argument("--out", default=RESULTS, type=Path, metavar="CSV")
    options = parser.parse_args()
    rows = Rows(options.out, SETTINGS, CODE)
    wanted = [
        dict(zip(SETTINGS, (model, options.size, on, PER_DEVICE.get(model, LONG_TEXTS)), strict=True))
        for on in options.on.split(",")
        for model in options.models.split(",")
    ]
    todo = rows.missing(wanted, options.stale)[: options.rows]
    rows.make_all(todo, lambda w: measure(*w.values()), "{model} on {machine}")
    console = Console(width=150, highlight=False)
    found = rows.made(wanted)
    for on in options.on.split(","):
        if some := [row for row in found if row["machine"] == on]:
            console.print(table(some, on))
    for line in said(found):
        console.print(line)
    return int(any(row["replicated"] for row in found))


if __name__ == "__main__":
    sys.exit(main())
