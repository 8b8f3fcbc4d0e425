"""The largest batch under a limit of memory: of the plan that keeps everything, and of the planner's.

    python -m experiments.validation.batches                        # BERT-Large on eight H100, 16 GiB of each
    python -m experiments.validation.batches --model gpt --size gpt2 --on h100:8 --limit 8GiB

Tempo (https://arxiv.org/abs/2210.10246) trains BERT-Large with twice the batch in the same memory. Here batches are
doubled until no plan fits; of each program the largest that fits, and what XLA allocates for it, which must fit too.
`seconds` are predicted.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from experiments.baselines import joint, program_of
from experiments.made_by import COMPILED as CODE
from experiments.rows import Row, Rows
from experiments.validation.compiled import made, planned
from experiments.validation.kept import compiled
from unity_jax.aot.bundles import written
from unity_jax.aot.topologies import topology
from unity_jax.machine.machine import Machine
from unity_jax.search.candidate import Candidate
from unity_jax.text import parse_bytes, seconds, size

RESULTS = Path(__file__).parents[1] / "results" / "batches.csv"
SETTINGS = ("model", "size", "topology", "limit", "by")


def largest(options: argparse.Namespace, by: Callable[[int], Candidate], limit: float) -> dict[str, Any]:
    """The largest batch of a plan that fits, before and after compilation."""
    devices, found = topology(options.on), dict[str, Any]()
    for batch in (options.batch * 2**n for n in itertools.count()):
        plan = by(batch)
        if not plan.fits(limit):
            return found
        facts = compiled(planned(made(Machine.preset(options.on), plan), devices), devices, options.on, {}, 0)
        if facts.get("bytes", float("inf")) > limit:
            return found
        saves = "; ".join(map(str, plan.program.savings))
        found = {"batch": batch, "seconds": plan.seconds, "predicted": plan.memory.peak_bytes, "saves": saves}
        found["compiled"] = facts["bytes"]
    return found


def measure(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """One row by keeping everything, one by the planner."""
    machine, limit = Machine.preset(options.on), parse_bytes(options.limit)

    def plan(batch: int, most: float) -> Candidate:
        return joint(program_of(options.model, options.size, batch_size=batch), machine, most)

    free = {"kept": lambda batch: plan(batch, float("inf")), "chosen": lambda batch: plan(batch, limit)}
    return {name: largest(options, by, limit) for name, by in free.items()}


def table(rows: Sequence[Row]) -> Table:
    shown = Table(title="The largest batch under a limit: what is needed kept, or as chosen")
    of, bytes_of = ("batch", "step", "examples a second"), ("predicted", "compiled")
    for column in ("model", "topology", "limit", "by", *of, *bytes_of, "saves memory by"):
        shown.add_column(column, overflow="fold")
    for row in rows:
        took, batch = float(row["seconds"]), int(row["batch"])
        shown.add_row(
            f"{row['model']} {row['size']}",
            *(row[name] for name in SETTINGS[2:]),
            row["batch"],
            seconds(took),
            f"{batch / took:.0f}",
            size(float(row["predicted"])),
            size(float(row["compiled"])),
            row["saves"],
        )
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bert")
    parser.add_argument("--size", default="full")
    parser.add_argument("--on", default="h100:8")
    parser.add_argument("--limit", default="16GiB")
    parser.add_argument("--batch", type=int, default=32, help="the first one")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="CSV")
    options = parser.parse_args()
    rows = Rows(options.out, SETTINGS, CODE)
    settings = {"model": options.model, "size": options.size, "topology": options.on, "limit": options.limit}
    with written():
        for by, found in measure(options).items():
            if found:
                rows.put({**settings, "by": by}, found)
    Console(width=170, highlight=False).print(table(rows.found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
