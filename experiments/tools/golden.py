"""What the planner decides and predicts, to the last bit: a change that only moves code leaves all of it as it is.

    python experiments/tools/golden.py --size tiny              # compares with what is stored; minutes
    python experiments/tools/golden.py --size full,compiled     # the zoo, and the four plans that are compiled; hours
    python experiments/tools/golden.py --size tiny --write      # stores: after a change that is meant to change it

`experiments/tools/golden.csv` has a row for each plan: its floats in hexadecimal, and a hash of all that is printed of
it: figures, collectives, the layout of every argument and result, and the Parallel Computation Graph. What is printed
itself is in `build/golden/`, as it was stored on this machine (`.txt`) and as it is now (`.now`), to be compared line
by line. The exit code tells whether something differs.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import argparse
import dataclasses
import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # scripts import each other by name

from baselines import joint, program_of
from compiled import BUILD, COMPILED, FOUR, SETS, TOPOLOGIES, made, plans
from made_by import PLANNED
from rich.console import Console
from rows import Rows
from zoo_table import LONG_TEXTS, MACHINES, PER_DEVICE

import models
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
    """All that is decided and predicted."""
    leaves = (f"{leaf.path} {leaf} {leaf.bytes}" for leaf in (*plan.inputs, *plan.outputs))
    parts = (figures(plan).items(), plan.rewrites, plan.predicted.collectives, leaves, [plan.pcg])
    return "\n".join(str(line) for part in parts for line in part) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default=",".join(SIZES), help=f"of {', '.join(SIZES)}")
    parser.add_argument("--models", help="all by default")
    parser.add_argument("--on", help=f"machines; {', '.join(MACHINES)}, and {', '.join(TOPOLOGIES)} of `compiled`")
    parser.add_argument("--write", action="store_true", help="store what is found")
    options = parser.parse_args()
    rows, console, differ = Rows(STORED, SETTINGS, PLANNED), Console(highlight=False, soft_wrap=True), 0
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
                differ += bool(changed)
                path = BUILD / "golden" / f"{name}.{'txt' if options.write else 'now'}"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
                if options.write:
                    rows.put(settings, now)
                console.print(f"{' '.join(settings.values())}: {'; '.join(changed) or 'equal'}")
    console.print(f"{differ} plans differ" + ", and are stored" * options.write)
    return int(differ and not options.write)


if __name__ == "__main__":
    sys.exit(main())
