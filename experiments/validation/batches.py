"""Twice the batch in the same memory: the largest batch of a plan that keeps everything, and twice as many examples.

    python -m experiments.validation.batches                        # BERT-Large on eight H100, 16 GiB of each
    python -m experiments.validation.batches --model gpt --size gpt2 --on h100:8 --limit 8GiB --batch 32

Tempo (https://arxiv.org/abs/2210.10246) trains BERT-Large with twice the batch in the same memory, and gives up at most
5 % of the throughput of the batch that fits without it. Here batches grow by a half or a third of themselves until
what keeps everything does not fit; then twice the largest that does is planned within the limit. Both programs are
compiled, and what XLA allocates for them is what must fit (`unity_jax.correction`, as in `limits.py`). `seconds` are
predicted.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import argparse
import functools
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
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
from unity_jax.aot.flags import OFFLINE
from unity_jax.aot.topologies import topology
from unity_jax.correction import corrected
from unity_jax.machine.machine import Machine
from unity_jax.search.candidate import Candidate
from unity_jax.text import seconds, size, size_of

RESULTS = Path(__file__).parents[1] / "results" / "batches.csv"
SETTINGS = ("model", "size", "topology", "limit", "by")
TIMES, COST = 2, 0.05
"""The least that Tempo's batch is larger by, and the part of its throughput that this costs at most."""


def measure(options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """What becomes of the largest batch that fits with everything kept, and of twice as many examples."""
    machine, devices, limit = Machine.preset(options.on), topology(options.on), size_of(options.limit)
    program = functools.partial(program_of, options.model, options.size)

    def needs(plan: Candidate) -> float:
        facts = compiled(planned(made(machine, plan), devices), devices, options.on, OFFLINE[devices[0].platform])
        return facts.get("bytes", math.inf)

    def facts(batch: int, plan: Candidate, peak: float) -> dict[str, Any]:
        saves = "; ".join(map(str, plan.program.savings))
        found = {"batch": batch, "seconds": plan.seconds, "predicted": plan.memory.peak_bytes, "compiled": peak}
        return found | {"saves": saves}

    kept = list[tuple[int, Candidate]]()
    for batch in (options.batch * 2**n * part // 2 for n in itertools.count() for part in (2, 3)):
        plan = joint(program(batch_size=batch), machine, math.inf)
        if not plan.fits(limit):
            break
        kept.append((batch, plan))
    peaks = ((batch, plan, needs(plan)) for batch, plan in reversed(kept))
    largest = next(((batch, plan, peak) for batch, plan, peak in peaks if peak <= limit), None)
    if largest is None:
        return
    yield "kept", facts(*largest)
    batch = TIMES * largest[0]
    whole = program(batch_size=batch)
    plan, _ = corrected(
        options.model,
        joint(whole, machine, limit),
        limit,
        needs=needs,
        predicted=lambda plan: plan.memory.peak_bytes,
        again=lambda margin: joint(whole, machine, max(limit - margin, 1.0)),
    )
    yield "chosen", facts(batch, plan, needs(plan))  # what has been compiled is known


def verdict(rows: Sequence[Row]) -> str:
    """Of each limit: what its memory takes, at which cost."""
    said, before = [], dict[tuple[str, ...], Row]()
    for row in rows:
        key = tuple(row[s] for s in SETTINGS[:-1])
        kept = before.setdefault(key, row)
        if row is not kept:
            rates = [int(r["batch"]) / float(r["seconds"]) for r in (kept, row)]
            times, more = int(row["batch"]) / int(kept["batch"]), rates[1] / rates[0] - 1
            met = times >= TIMES and more >= -COST and float(row["compiled"]) <= size_of(row["limit"])
            said.append(f"{key[0]} within {row['limit']}: {times:g} x the batch, throughput {more:+.1%}, ")
            said[-1] += "as Tempo" if met else "not as Tempo"
    return "; ".join(said)


def table(rows: Sequence[Row]) -> Table:
    shown = Table(title="The largest batch within a limit with everything kept, and twice as many examples")
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
    parser.add_argument("--batch", type=int, default=64, help="the first one")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="CSV")
    options = parser.parse_args()
    rows = Rows(options.out, SETTINGS, CODE)
    settings = {"model": options.model, "size": options.size, "topology": options.on, "limit": options.limit}
    with written():
        for by, found in measure(options):
            rows.put({**settings, "by": by}, found)
    console = Console(width=170, highlight=False)
    console.print(table(rows.found))
    console.print(verdict(rows.found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
