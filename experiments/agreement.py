"""Predicted against compiled, of every plan in `build/compiled` (`experiments/compiled.py`): memory; on TPU, compute.

    python experiments/agreement.py                                 # both sets of programs
    python experiments/agreement.py --programs validation --on v5e:2x4
    python experiments/agreement.py --models bert,mlp --on v5e:2x4

The cost model was made on the tuning programs; what may be expected of it is what it says of the validation programs.
A program that the compiler did not compile is missing.
Memory is the compiler's argument + output + temp - alias; compute is the sum of the cycles that XLA:TPU estimates, at
the clock of the chip. For gathers, scatters and sorts, of which it estimates none, it is the length of their schedules
(`unity_jax/report/bundles.py`). Plans that were compiled without these: `uncounted` is the part of the predicted time
that such kernels take, which the ratio leaves out on both sides, and the number of instructions without cycles.
A ratio above 1 is predicted too high.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from compiled import COMPILED, FOUR, SETS, Case, arguments, asked, set_of
from rich.console import Console
from rich.table import Table
from rows import Row, Rows

from unity_jax.cost.program import kernel_seconds
from unity_jax.cost.traffic import Traffic
from unity_jax.errors import PlanError
from unity_jax.machine.machine import Machine
from unity_jax.ops.indexing import compares
from unity_jax.pcg.graph import nested
from unity_jax.plan import Plan
from unity_jax.report.cycles import CLOCKS, estimated_cycles
from unity_jax.report.text import seconds, size

RESULTS = Path(__file__).parent / "results" / "agreement.csv"
SETTINGS = ("model", "topology", "plan")
COMPUTE = ("predicted seconds", "compiled seconds", "uncounted seconds", "instructions without estimate")
UNESTIMATED = frozenset("gather scatter scatter-add scatter-sub scatter-mul scatter-max scatter-min sort".split())


def compared(case: Case) -> dict[str, float | str]:
    """Bytes, and where the compiler estimates cycles the seconds, as predicted and as compiled."""
    machine = Machine.preset(case.topology)
    plan = case.plan(COMPILED.program(case.model, case.topology), machine)
    m, predicted = case.facts["memory"], plan.predicted
    memory = m["argument"] + m["output"] + m["temp"] - m["alias"]
    columns: dict[str, float | str] = {"predicted bytes": predicted.peak_bytes, "compiled bytes": memory}
    clock = CLOCKS.get(case.topology.split(":")[0].removesuffix("-cores"))
    if clock is None:
        return columns | dict.fromkeys(COMPUTE, "")
    cycles = estimated_cycles(case.module)
    left_out = 0.0 if case.facts.get("schedules") else uncounted_seconds(plan, machine)
    counted = predicted.compute_seconds - left_out
    return columns | dict(zip(COMPUTE, (counted, cycles.total / clock, left_out, cycles.missing), strict=True))


def uncounted_seconds(plan: Plan, machine: Machine) -> float:
    """Predicted time of the kernels for which the compiler estimates nothing."""
    traffic = Traffic.of(plan.pcg, machine.device.compiler)
    return sum(
        repeat * kernel_seconds(kernel, machine.device)
        for _, graph, repeat in nested(plan.pcg)
        for kernel in traffic.kernels[graph]
        if kernel.root.name in UNESTIMATED and not compares(kernel.root)
    )


def ratio(row: Row, unit: str) -> float | None:
    """Predicted over compiled, of `bytes` or `seconds`; None where the compiler says nothing."""
    return float(row[f"predicted {unit}"]) / float(row[f"compiled {unit}"]) if row[f"compiled {unit}"] else None


def errors(ratios: Sequence[float]) -> str:
    """How far ratios are from 1."""
    far = np.abs(np.array(ratios) - 1)
    return (
        f"median error {np.median(far):.0%}, within 15 % for {(far <= 0.15 + 1e-9).mean():.0%} of {len(ratios)} plans, "
        f"ratios {min(ratios):.2f} to {max(ratios):.2f}"
    )


def verdict(rows: Sequence[Row]) -> str:
    """Of each set: how far predictions are from what the compilers made."""
    said = []
    for name, members in reversed(SETS.items()):
        some = [row for row in rows if row["model"] in members]
        for unit, what in (("bytes", "memory"), ("seconds", "compute on TPU")):
            ratios = [r for row in some if (r := ratio(row, unit)) is not None]
            said += [f"{name} programs, {what}: {errors(ratios)}"] if ratios else []
    return "; ".join(said)


def missing(rows: Sequence[Row], names: Sequence[str], on: Sequence[str]) -> list[str]:
    """The plans of these programs that there is no row about."""
    found = {tuple(row[s] for s in SETTINGS) for row in rows}
    wanted = [(name, topology, plan) for name in names for topology in on for plan in FOUR]
    return [f"{name} on {topology}, {plan}" for name, topology, plan in wanted if (name, topology, plan) not in found]


def table(rows: Sequence[Row]) -> Table:
    compared = ("memory", "compiled", "ratio", "compute", "cycles", "ratio", "uncounted")
    made = Table("set", "model", "topology", "plan", *compared)
    for row in rows:
        shown = [size(int(row[f"{how} bytes"])) for how in ("predicted", "compiled")]
        cells = [set_of(row["model"]), row["model"], row["topology"], row["plan"], *shown, f"{ratio(row, 'bytes'):.2f}"]
        if (of_compute := ratio(row, "seconds")) is not None:
            counted, cycles, left_out = (float(row[name]) for name in COMPUTE[:3])
            cells += [seconds(counted), seconds(cycles), f"{of_compute:.2f}"]
            cells.append(f"{left_out / (counted + left_out):.0%} {row['instructions without estimate']}")
        made.add_row(*cells)
    return made


def main() -> None:
    names, topologies = asked(options := arguments(__doc__, RESULTS).parse_args())
    console, rows, wanted = Console(width=160), Rows(options.out, SETTINGS), []
    for case in COMPILED.cases(names, topologies):
        settings = {"model": case.model, "topology": case.topology, "plan": case.label}
        name = f"{case.model} on {case.topology}, {case.label}"
        if case.label not in FOUR:
            continue
        if "memory" not in case.facts:
            console.print(f"{name}: {case.facts['error']}", markup=False)
            continue
        try:
            with console.status(name):
                rows.put(settings, compared(case))
        except PlanError as error:  # the model or its tracing changed
            console.print(f"{name}: {error}", markup=False)
            continue
        wanted.append(settings)
    made = rows.made(wanted)
    console.print(table(made))
    console.print(verdict(made))
    console.print(f"missing: {'; '.join(missing(made, names, topologies)) or 'none'}")


if __name__ == "__main__":
    main()
