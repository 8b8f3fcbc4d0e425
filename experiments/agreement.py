"""Predicted against compiled, of every plan in `build/compiled` (`experiments/compiled.py`): memory; on TPU, compute.

    python experiments/agreement.py
    python experiments/agreement.py --models bert,mlp --on v5e:2x4

Memory is the compiler's argument + output + temp - alias; compute is the sum of the cycles that XLA:TPU estimates, at
the clock of the chip. A ratio above 1 is predicted too high.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import argparse
import functools
from collections.abc import Sequence

import numpy as np
from compiled import SIZES, TOPOLOGIES, Case, cases, program_of
from rich.console import Console
from rich.table import Table

from unity_jax.errors import PlanError
from unity_jax.machine.machine import Machine
from unity_jax.report.cycles import CLOCKS, estimated_cycles
from unity_jax.report.hlo import parse
from unity_jax.report.text import seconds, size

traced = functools.cache(program_of)


def measured(case: Case) -> tuple[list[str], float, float | None]:
    """One row of the table, and the ratios of memory and of compute."""
    plan = case.plan(traced(case.model), Machine.preset(case.topology))
    m, predicted = case.facts["memory"], plan.predicted
    memory = m["argument"] + m["output"] + m["temp"] - m["alias"]
    row = [size(predicted.peak_bytes), size(memory), f"{predicted.peak_bytes / memory:.2f}"]
    clock = CLOCKS.get(case.topology.split(":")[0].removesuffix("-cores"))
    if clock is None:
        return [*row, "", "", "", ""], predicted.peak_bytes / memory, None
    cycles = estimated_cycles(parse(case.hlo))
    compute = cycles.total / clock
    row += [seconds(predicted.compute_seconds), seconds(compute), f"{predicted.compute_seconds / compute:.2f}"]
    return [*row, f"{cycles.missing}"], predicted.peak_bytes / memory, predicted.compute_seconds / compute


def errors(ratios: Sequence[float]) -> str:
    """How far ratios are from 1."""
    far = np.abs(np.array(ratios) - 1)
    return f"median error {np.median(far):.0%}, worst {far.max():.0%}, within 10 %: {(far <= 0.1).mean():.0%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(SIZES))
    parser.add_argument("--on", default=",".join(TOPOLOGIES))
    options = parser.parse_args()
    console = Console(width=150)
    table = Table("model", "topology", "plan", "memory", "compiled", "ratio", "compute", "cycles", "ratio", "uncounted")
    memory, compute, failed = [], [], []
    for case in cases(options.models.split(","), options.on.split(",")):
        if "memory" not in case.facts:
            failed.append(f"{case.model} on {case.topology}, {case.label}: {case.facts['error']}")
            continue
        try:
            with console.status(f"{case.model} on {case.topology}, {case.label}"):
                row, of_memory, of_compute = measured(case)
        except PlanError as error:  # the model or its tracing changed
            failed.append(f"{case.model} on {case.topology}, {case.label}: {error}")
            continue
        table.add_row(case.model, case.topology, case.label, *row)
        memory.append(of_memory)
        compute += [of_compute] if of_compute is not None else []
    console.print(table)
    for line in failed:
        console.print(line, markup=False)
    if memory:
        console.print(f"memory: {errors(memory)}, lowest ratio {min(memory):.2f}")
    if compute:
        console.print(f"compute: {errors(compute)}")


if __name__ == "__main__":
    main()
