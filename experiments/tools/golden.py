"""What the planner decides and predicts, to the last bit: a change that only moves code leaves all of it as it is.

    python -m experiments.tools.golden --size tiny                # compares with what is stored; minutes
    python -m experiments.tools.golden --size full,compiled       # the zoo, and the four plans that are compiled; hours
    python -m experiments.tools.golden --size tiny --write        # stores: after a change that is meant to change it
    python -m experiments.tools.golden --size tiny --carry REV    # rows of tables that REV made stand, if all is equal

`experiments/tools/golden.csv` has a row for each plan: its floats in hexadecimal, and a hash of all that is printed of
it: figures, collectives, the layout of every argument and result, and the Parallel Computation Graph. What is printed
itself is in `build/golden/`, as it was stored on this machine (`.txt`) and as it is now (`.now`), to be compared line
by line. The exit code tells whether something differs.

A table goes stale by every change of the code that its rows follow from, also by one that only moves code, or changes
what is lowered and not what is planned. If all plans of a model are equal, to the last bit, `--carry` says so of the
tables that are planned: their rows about that model that a revision of the repository made are then rows of the code as
it is. That is for such changes alone: one of costs may leave tiny plans equal and change large ones, whose shapes meet
otherwise.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import argparse
import dataclasses
import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

from rich.console import Console

import models
from experiments import made_by
from experiments.baselines import joint, program_of
from experiments.made_by import PLANNED
from experiments.rows import MADE_BY, Row, Rows
from experiments.tables import expert_plans, mesh_sweep, unity_table, zoo_table
from experiments.tables.zoo_table import LONG_TEXTS, MACHINES, PER_DEVICE
from experiments.validation.compiled import BUILD, COMPILED, FOUR, SETS, TOPOLOGIES, made, plans
from unity_jax.machine.machine import Machine
from unity_jax.plan import Plan

STORED = Path(__file__).with_name("golden.csv")
SETTINGS = ("size", "model", "machine", "plan")
SIZES = ("tiny", "full", "compiled")


def found(size: str, model: str, on: str) -> Iterator[tuple[str, Plan]]:
    """The plans of a program: the planner's choice for the zoo, and of what is compiled the experts' as well."""
    machine = Machine.preset(on)
    if size == "compiled":
        yield from plans(COMPILED.program(model, on), machine, FOUR, 0)
        return
    batch = {"batch_size": PER_DEVICE.get(model, LONG_TEXTS) * machine.num_devices} if size == "full" else {}
    yield "chosen", made(machine, joint(program_of(model, size, **batch), machine))


def figures(plan: Plan) -> dict[str, str]:
    """Every number that is predicted of a plan."""
    numbers = {f.name: getattr(plan.predicted, f.name) for f in dataclasses.fields(plan.predicted)}
    shown = {name: n.hex() if isinstance(n, float) else str(n) for name, n in numbers.items() if name != "collectives"}
    return {"label": plan.label, "mesh": str(plan.mesh.shape_tuple), **shown}


def printed(plan: Plan) -> str:
    """All that is decided and predicted, wherever the repository lies."""
    leaves = (f"{leaf.path} {leaf} {leaf.bytes}" for leaf in (*plan.inputs, *plan.outputs))
    parts = (figures(plan).items(), plan.rewrites, plan.predicted.collectives, leaves, [plan.pcg])
    return "\n".join(str(line) for part in parts for line in part).replace(f"{made_by.ROOT}/", "") + "\n"


TABLES = (zoo_table, unity_table, expert_plans, mesh_sweep)
"""Those whose rows are about one model each, and are planned and not compiled."""


def carried(rows: Rows, equal: Collection[str], revision: Path) -> list[Row]:
    """Carry rows over that a revision made, of models all of whose plans are equal.

    **Arguments:** `revision`: a checkout of it.
    """
    found = []
    for row in rows.found:
        then = made_by.made_by(rows.code, row["model"], revision)
        if row["model"] in equal and row[MADE_BY] == then != rows.version(row):
            settings = {s: row[s] for s in rows.settings}
            found.append(rows.put(settings, {k: v for k, v in row.items() if k not in settings and k != MADE_BY}))
    return found


def carry(revision: str, equal: Collection[str], console: Console) -> None:
    """The same for all tables."""
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", revision], cwd=made_by.ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        for script in TABLES:
            some = carried(Rows(script.RESULTS, script.SETTINGS, script.CODE), equal, Path(folder))
            console.print(f"{script.RESULTS.name}: {len(some)} rows carried over")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default=",".join(SIZES), help=f"of {', '.join(SIZES)}")
    parser.add_argument("--models", help="all by default")
    parser.add_argument("--on", help=f"machines; {', '.join(MACHINES)}, and {', '.join(TOPOLOGIES)} of `compiled`")
    parser.add_argument("--write", action="store_true", help="store what is found")
    parser.add_argument("--carry", metavar="REV", help="carry rows over that REV made, of models that are equal")
    options = parser.parse_args()
    if options.carry and options.write:
        parser.error("--carry is for plans that are equal to those stored, --write stores others")
    rows, console = Rows(STORED, SETTINGS, PLANNED), Console(highlight=False, soft_wrap=True)
    seen: dict[str, list[bool]] = {}
    for size in options.size.split(","):
        known = [name for names in SETS.values() for name in names] if size == "compiled" else models.names()
        machines = options.on.split(",") if options.on else TOPOLOGIES if size == "compiled" else MACHINES
        for on, model in ((on, m) for on in machines for m in known if m in (options.models or m).split(",")):
            for label, plan in found(size, model, on):
                settings = dict(zip(SETTINGS, (size, model, on, label), strict=True))
                text, name = printed(plan), "-".join(settings.values()).replace(":", "_")
                now = figures(plan) | {"text": hashlib.sha256(text.encode()).hexdigest()[:24]}
                before = rows.get(settings) or {}
                changed = [
                    f"{what}: {before.get(what)} -> {value}" for what, value in now.items() if before.get(what) != value
                ]
                seen.setdefault(model, []).append(not changed)
                path = BUILD / "golden" / f"{name}.{'txt' if options.write else 'now'}"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
                if options.write:
                    rows.put(settings, now)
                console.print(f"{' '.join(settings.values())}: {'; '.join(changed) or 'equal'}")
    differ = sum(not same for every in seen.values() for same in every)
    console.print(f"{differ} plans differ" + ", and are stored" * options.write)
    if options.carry:
        carry(options.carry, [model for model, every in seen.items() if all(every)], console)
    return int(differ and not options.write)


if __name__ == "__main__":
    sys.exit(main())
