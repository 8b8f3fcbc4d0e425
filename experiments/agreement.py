"""Predicted against compiled, of every plan in `build/compiled` (`experiments/compiled.py`): memory; on TPU, compute.

    python experiments/agreement.py
    python experiments/agreement.py --models bert,mlp --on v5e:2x4

Memory is the compiler's argument + output + temp - alias; compute is the sum of the cycles that XLA:TPU estimates, at
the clock of the chip. It estimates none for gathers, scatters and sorts: `uncounted` is the part of the predicted time
that such kernels take, which the ratio leaves out on both sides, and the number of instructions without an estimate.
A ratio above 1 is predicted too high.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import argparse
from collections.abc import Sequence

import numpy as np
from compiled import COMPILED, SIZES, TOPOLOGIES, Case
from rich.console import Console
from rich.table import Table

from unity_jax.cost.kernels import Traffic
from unity_jax.cost.program import kernel_seconds
from unity_jax.errors import PlanError
from unity_jax.machine.machine import Machine
from unity_jax.ops.indexing import compares
from unity_jax.pcg.graph import nested
from unity_jax.plan import Plan
from unity_jax.report.cycles import CLOCKS, estimated_cycles
from unity_jax.report.hlo import parse
from unity_jax.report.text import seconds, size

UNESTIMATED = frozenset("gather scatter scatter-add scatter-sub scatter-mul scatter-max scatter-min sort".split())


def measured(case: Case) -> tuple[list[str], float, float | None]:
    """One row of the table, and the ratios of memory and of compute."""
    machine = Machine.preset(case.topology)
    plan = case.plan(COMPILED.program(case.model, case.topology), machine)
    m, predicted = case.facts["memory"], plan.predicted
    memory = m["argument"] + m["output"] + m["temp"] - m["alias"]
    row = [size(predicted.peak_bytes), size(memory), f"{predicted.peak_bytes / memory:.2f}"]
    clock = CLOCKS.get(case.topology.split(":")[0].removesuffix("-cores"))
    if clock is None:
        return [*row, "", "", "", ""], predicted.peak_bytes / memory, None
    cycles = estimated_cycles(parse(case.hlo))
    compute = cycles.total / clock
    left_out = uncounted_seconds(plan, machine)
    counted = predicted.compute_seconds - left_out
    row += [seconds(counted), seconds(compute), f"{counted / compute:.2f}"]
    uncounted = f"{left_out / predicted.compute_seconds:.0%} {cycles.missing}"
    return [*row, uncounted], predicted.peak_bytes / memory, counted / compute


def uncounted_seconds(plan: Plan, machine: Machine) -> float:
    """Predicted time of the kernels for which the compiler estimates nothing."""
    traffic = Traffic.of(plan.pcg, machine.device.compiler)
    return sum(
        repeat * kernel_seconds(kernel, machine.device)
        for _, graph, repeat in nested(plan.pcg)
        for kernel in traffic.kernels[graph]
        if kernel.root.name in UNESTIMATED and not compares(kernel.root)
    )


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
    for case in COMPILED.cases(options.models.split(","), options.on.split(",")):
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
