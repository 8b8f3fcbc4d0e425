"""Predicted against compiled, of every plan in `build/compiled` (`compiled.py`): memory; on TPU, compute.

    python -m experiments.validation.agreement    # both sets of programs
    python -m experiments.validation.agreement --programs validation --on v5e:2x4
    python -m experiments.validation.agreement --models bert,mlp --on v5e:2x4

The cost model was made on the tuning programs; what may be expected of it is what it says of the validation programs.
A program that the compiler did not compile is missing.
Memory is the compiler's argument + output + temp - alias; compute is the sum of the cycles that XLA:TPU estimates, at
the clock of the chip. For gathers, scatters and sorts, of which it estimates none, it is the length of their schedules
(`unity_jax/aot/bundles.py`); the last column counts the instructions that have neither.
A ratio above 1 is predicted too high.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.rows import Row, Rows
from experiments.validation.compiled import COMPILED, FOUR, SETS, TOPOLOGIES, Case, arguments, asked, set_of
from unity_jax.aot.cycles import CLOCKS
from unity_jax.errors import PlanError
from unity_jax.machine.machine import Machine
from unity_jax.text import seconds, size

RESULTS = Path(__file__).parents[1] / "results" / "agreement.csv"
SETTINGS = ("model", "topology", "plan")
COMPUTE = ("predicted seconds", "compiled seconds", "instructions without estimate")


def compared(case: Case) -> dict[str, float | str]:
    """Bytes, and where the compiler estimates cycles the seconds, as predicted and as compiled."""
    machine = Machine.preset(case.topology)
    program = COMPILED.program(case.model, case.topology)
    plan = case.plan(program, machine)
    facts, predicted = case.facts, plan.predicted
    columns: dict[str, float | str] = {"predicted bytes": predicted.peak_bytes, "compiled bytes": facts["bytes"]}
    if "cycles" not in facts:
        return columns | dict.fromkeys(COMPUTE, "")
    cycles = facts["cycles"] / CLOCKS[case.topology.split(":")[0].removesuffix("-cores")]
    return columns | dict(zip(COMPUTE, (predicted.compute_seconds, cycles, facts["missing"]), strict=True))


def ratio(row: Row, unit: str) -> float | None:
    """Predicted over compiled, of `bytes` or `seconds`; None where the compiler says nothing."""
    return float(row[f"predicted {unit}"]) / float(row[f"compiled {unit}"]) if row[f"compiled {unit}"] else None


def errors(ratios: Sequence[float]) -> str:
    """How far ratios are from 1."""
    far = np.abs(np.array(ratios) - 1)
    low = int((np.array(ratios) < 0.75).sum())
    return (
        f"median error {np.median(far):.0%}, within 15 % for {(far <= 0.15 + 1e-9).mean():.0%} of {len(ratios)} plans, "
        f"more than 25 % too low for {low}, ratios {min(ratios):.2f} to {max(ratios):.2f}"
    )


def verdict(rows: Sequence[Row]) -> str:
    """Of each set and compiler: how far predictions are from what the compiler made, and how many plans it did not
    compile."""
    said = []
    for name, members in reversed(SETS.items()):
        for on in TOPOLOGIES:
            some = [row for row in rows if row["model"] in members and row["topology"] == on]
            for unit, what in (("bytes", "memory"), ("seconds", "compute")):
                ratios = [r for row in some if (r := ratio(row, unit)) is not None]
                said += [f"{name} programs on {on}, {what}: {errors(ratios)}"] if ratios else []
            if some and (lack := len(missing(some, members, [on]))):
                said.append(f"{lack} of these {len(FOUR) * len(members)} plans are not compiled")
    return "; ".join(said)


def missing(rows: Sequence[Row], names: Sequence[str], on: Sequence[str]) -> list[str]:
    """The plans of these programs that there is no row about."""
    found = {tuple(row[s] for s in SETTINGS) for row in rows}
    wanted = [(name, topology, plan) for name in names for topology in on for plan in FOUR]
    return [f"{name} on {topology}, {plan}" for name, topology, plan in wanted if (name, topology, plan) not in found]


def table(rows: Sequence[Row]) -> Table:
    compared = ("memory", "compiled", "ratio", "compute", "cycles", "ratio", "without estimate")
    made = Table("set", "model", "topology", "plan", *compared)
    for row in rows:
        shown = [size(int(row[f"{how} bytes"])) for how in ("predicted", "compiled")]
        cells = [set_of(row["model"]), row["model"], row["topology"], row["plan"], *shown, f"{ratio(row, 'bytes'):.2f}"]
        if (of_compute := ratio(row, "seconds")) is not None:
            computed = (seconds(float(row[name])) for name in COMPUTE[:2])
            cells += [*computed, f"{of_compute:.2f}", row["instructions without estimate"]]
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
        if "error" in case.facts:
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
