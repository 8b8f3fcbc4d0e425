"""The joint plan and random ones of every model of the zoo against the unsharded run: float64 steps, dropout on.

    python -m experiments.validation.numerics --plans 20                     # hours: every plan is a program to compile
    python -m experiments.validation.numerics --plans 20 --models mlp,dlrm   # minutes

Prints, for every model, the largest error of any leaf relative to the leaf's largest magnitude, and where it is. The
contract is 1e-9. The joint plan is that of `auto_shard`, rewrites and layouts chosen together. Random plans are of the
program changed at random to need less memory: how many of them compute values again, a loss by chunks, or microbatches,
or have state or activations on the host. Layers that are unrolled repeat, so deep models are run with one; of those
that are scanned some may be apart.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"

from unity_jax.aot.flags import EIGHT_DEVICES, RUN_ONCE, appended

os.environ["XLA_FLAGS"] = appended("XLA_FLAGS", EIGHT_DEVICES | RUN_ONCE)

import argparse
import dataclasses
import random
import sys
import time
from collections import Counter

import jax
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

import models
from tests.numerics.harness import TOLERANCE
from tests.numerics.savings import saved
from tests.numerics.steps import STEPS, Reference, slow

MESHES = ((8,), (2, 4), (4, 2), (2, 2, 2))
SCANNED = ("falcon", "gpt", "llama", "moe", "t5", "transformer", "vit")
LAYERS: dict[str, dict[str, int]] = {"bert": {"layers": 1}, **{name: {"layers": 5} for name in SCANNED}}
"""Of those that are scanned as many as it takes for the first ones to do otherwise than the rest."""
FOUND = ("largest error", "at", "failed", "time")


def check(name: str, plans: int, progress: Progress) -> tuple[str, ...]:
    """One row of the table: the chosen plan, then random ones."""
    reference = Reference.of(models.get(name, "tiny", dtype="float64", **LAYERS.get(name, {})))
    task = progress.add_task(name, total=plans + 1)
    worst, where, failed, start, drawn = 0.0, "", 0, time.monotonic(), Counter[str]()
    for i in range(-1, plans):
        now = reference
        if i < 0:
            plan = reference.chosen(slow(factor=5e2), (8,))  # where rewrites pay
            rewrites = len(plan.rewrites)
        else:
            now = dataclasses.replace(reference, case=saved(reference.case, random.Random(i)))
            plan = now.case.sample(MESHES[i % len(MESHES)], seed=i, machine="h100")
            drawn.update({how.name for how in now.case.program.savings})
        errors = now.errors(now.run(plan))
        path = max(errors, key=lambda p: errors[p])
        if i < 0:
            chosen = errors[path]
        elif errors[path] > worst:
            worst, where = errors[path], f"{path} (seed {i})"
        failed += not errors[path] <= TOLERANCE
        progress.advance(task)
        jax.clear_caches()
    ops = sum(1 for _ in reference.case.program.graph.walk())
    counts, took = (f"{ops}", f"{rewrites}"), f"{time.monotonic() - start:.0f} s"
    less = ", ".join(f"{kind} {n}" for kind, n in drawn.most_common())
    return name, *counts, f"{chosen:.1e}", f"{plans}", less, f"{worst:.1e}", where, f"{failed}", took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=20)
    parser.add_argument("--models", default=",".join(models.names()))
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    table = Table(title=f"Sharded against unsharded, {STEPS} float64 steps on 8 CPU devices")
    for column in ("model", "ops", "rewrites", "joint plan", "random plans", "of these", *FOUND):
        table.add_column(column)
    text, bar = Progress.get_default_columns()[:2]
    with Progress(text, bar, MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()) as progress:
        for name in options.models.split(","):
            row = check(name, options.plans, progress)
            table.add_row(*row)
            progress.console.print("  ".join(row), markup=False, highlight=False)
    Console(width=150).print(table)
    sys.exit(any(row != "0" for row in table.columns[-2].cells))


if __name__ == "__main__":
    main()
