"""What each pass of the imitated compilers is worth: predictions with and without it, against what was compiled.

    python -m experiments.tables.passes    # the validation programs, on both machines
    python -m experiments.tables.passes --models gru_scan,vit --on h100:8
    python -m experiments.tables.passes --programs tuning
    python -m experiments.tables.passes --also loop_stacks+softmax_rewriter     # several switched off together as well

The expert plans (dp, fsdp, tp) of each program are planned again and nothing is compiled: what the compilers said is in
`experiments/results/agreement.csv`, and counts where its row has the bytes that are predicted now, of the same plan
that is. Rows are made once and kept in `experiments/results/passes.csv`. A pass pays if memory, or compute, is
predicted nearer with it than without.

Without a pass of `unity_jax/xla/pipelines.py` the module is not changed as XLA changes it there; passes before fusion
are switched off in the compiler's row of `unity_jax/xla/targets.py`. The list scheduler stays, for there must be an
order.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.made_by import PLANNED
from experiments.rows import Row, Rows
from experiments.validation import agreement
from experiments.validation.compiled import COMPILED, arguments, asked, plans
from unity_jax.cost.memory import memory
from unity_jax.cost.tasks import tasks
from unity_jax.cost.timeline import simulate
from unity_jax.machine.machine import Machine
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.plan import Plan
from unity_jax.xla.list_scheduler import list_scheduler
from unity_jax.xla.pipelines import PIPELINES
from unity_jax.xla.targets import TARGETS
from unity_jax.xla.traffic import Traffic

RESULTS = Path(__file__).parents[1] / "results" / "passes.csv"
SETTINGS = ("model", "topology", "plan", "without")
CODE = (*PLANNED, *(f"experiments/tables/passes.py:{name}" for name in ("predicted", "without", "BEFORE_FUSION")))
NONE = "nothing"
EXPERTS = ("dp", "fsdp", "tp")

BEFORE_FUSION = {
    "cse": lambda target: dataclasses.replace(target, fusing=dataclasses.replace(target.fusing, cse=False)),
    "bf16_propagation": lambda target: dataclasses.replace(target, narrows=False),
}
"""Passes that work on graphs, and a compiler's row without them."""


def passes(compiler: str) -> list[str]:
    """The passes of a compiler that can be switched off."""
    before = [name for name, off in BEFORE_FUSION.items() if off(TARGETS[compiler]) != TARGETS[compiler]]
    return [*before, *(p.__name__ for p in PIPELINES[compiler] if p is not list_scheduler)]


@contextmanager
def without(compiler: str, names: str) -> Iterator[None]:
    """A compiler that lacks passes, whose names are joined by `+`."""
    pipeline, target, off = PIPELINES[compiler], TARGETS[compiler], names.split("+")
    PIPELINES[compiler] = tuple(p for p in pipeline if p.__name__ not in off)
    for name in BEFORE_FUSION.keys() & off:
        TARGETS[compiler] = BEFORE_FUSION[name](TARGETS[compiler])
    try:
        yield
    finally:
        PIPELINES[compiler], TARGETS[compiler] = pipeline, target


def predicted(plan: Plan, machine: Machine, names: str) -> dict[str, float]:
    """Bytes and seconds of compute of a plan, by a compiler that lacks passes. Behind fusion none changes compute."""
    assert plan.stored is not None
    mesh, seconds = MeshAxes.of(plan.mesh), plan.predicted.compute_seconds
    with without(machine.device.compiler, names):
        traffic = Traffic.of(plan.pcg, machine.device.compiler)
        found = memory(plan.pcg, traffic, mesh, machine, plan.stored.donated)
        if BEFORE_FUSION.keys() & names.split("+"):
            seconds = simulate(tasks(plan.pcg, traffic, mesh, machine), machine).compute_seconds
    return {"predicted bytes": found.peak_bytes, "predicted seconds": seconds}


def measure(rows: Rows, model: str, on: str, also: Sequence[str], console: Console) -> None:
    """All rows about a program on a machine that are not there yet.

    **Arguments:** `also`: passes that are switched off together, joined by `+`.
    """
    machine = Machine.preset(on)
    names, compiled = [NONE, *passes(machine.device.compiler), *also], Rows(agreement.RESULTS, agreement.SETTINGS)
    settings = {"model": model, "topology": on}
    if not rows.missing([settings | {"plan": p, "without": name} for p in EXPERTS for name in names]):
        return
    for label, plan in plans(COMPILED.program(model, on), machine, EXPERTS, 0):
        row = compiled.get(settings | {"plan": label})
        if row is None or int(row["predicted bytes"]) != plan.predicted.peak_bytes:
            console.print(f"{model} on {on}, {label}: {'not compiled' if row is None else 'another plan was compiled'}")
            continue
        said = {name: row[name] for name in ("compiled bytes", "compiled seconds")}
        for name in names:
            rows.put(settings | {"plan": label, "without": name}, predicted(plan, machine, name) | said)
        console.print(f"{model} on {on}, {label}: {len(names) - 1} passes")


def error(rows: Sequence[Row], unit: str) -> tuple[float, float]:
    """The median and the mean of how far predictions are from what was compiled, as a part of it."""
    far = [abs(float(r[f"predicted {unit}"]) / float(r[f"compiled {unit}"]) - 1) for r in rows if r[f"compiled {unit}"]]
    return (float(np.median(far)), float(np.mean(far))) if far else (float("nan"), float("nan"))


def table(rows: Sequence[Row], on: str) -> Table:
    """A line for each pass: the plans that it changes, and the errors with it and without, of all plans."""
    by = _by_pass(rows, on)
    made = Table("without", "plans", "changed", "memory: median, mean", "compute: median, mean", title=on)
    for name, some in by.items():
        changed = sum(_differ(row, by[NONE][at]) for at, row in some.items() if at in by.get(NONE, {}))
        errors = (error([*some.values()], unit) for unit in ("bytes", "seconds"))
        cells = (f"{median:.1%}, {mean:.1%}" for median, mean in errors)
        made.add_row(name, str(len(some)), str(changed), *cells)
    return made


def _by_pass(rows: Sequence[Row], on: str) -> dict[str, dict[tuple[str, str], Row]]:
    """The rows of a machine by the pass that is off, and by model and plan."""
    by: dict[str, dict[tuple[str, str], Row]] = {}
    for row in (row for row in rows if row["topology"] == on):
        by.setdefault(row["without"], {})[row["model"], row["plan"]] = row
    return by


def verdict(rows: Sequence[Row]) -> str:
    """What memory is predicted like with all passes, and without each."""
    said = []
    for on in dict.fromkeys(row["topology"] for row in rows):
        by = _by_pass(rows, on)
        off = {name: error([*some.values()], "bytes")[1] for name, some in by.items() if "+" not in name}
        before = off.pop(NONE)
        worst = sorted((name for name in off if abs(off[name] - before) >= 5e-4), key=lambda name: -off[name])
        each = ", ".join(f"{name} {off[name]:.1%}" for name in worst)
        count = len(by[NONE])
        said.append(
            f"{on}: memory of {count} plans is {before:.1%} off (mean); without one of {len(off)} passes: {each}"
        )
    return ". ".join(said)


def _differ(row: Mapping[str, str], other: Mapping[str, str]) -> bool:
    return any(row[name] != other[name] for name in ("predicted bytes", "predicted seconds"))


def main() -> None:
    parser = arguments(__doc__, RESULTS)
    parser.set_defaults(programs="validation")
    parser.add_argument("--also", default=[], nargs="*", metavar="PASS+PASS", help="switched off together")
    names, topologies = asked(options := parser.parse_args())
    console, rows = Console(width=140), Rows(options.out, SETTINGS, CODE)
    for on in topologies:
        for model in names:
            measure(rows, model, on, options.also, console)
    wanted = [row for row in rows.found if row["model"] in names]
    for on in topologies:
        console.print(table(wanted, on))


if __name__ == "__main__":
    main()
