"""Planned against lowered and compiled collectives, of every plan in `build/compiled` (`compiled.py`).

    python -m experiments.validation.collectives
    python -m experiments.validation.collectives --models bert,mlp --on h100:8 --plans chosen,dp

The lowered StableHLO must have exactly the planned collectives. Of a compiled program each must be a planned one, as it
is or after rewrites that are found in the program's text (`unity_jax/aot/rewrites.py`). The exit code tells whether
anything is left unexplained.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"

from unity_jax.aot.flags import EIGHT_DEVICES, appended

os.environ["XLA_FLAGS"] = appended("XLA_FLAGS", EIGHT_DEVICES)

import argparse
import json
import sys
from collections.abc import Iterable
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from experiments.validation.compiled import COMPILED, FACTS, FOUR, SETS, TOPOLOGIES, Case, named, stablehlo_facts
from experiments.validation.kept import module_of
from unity_jax.aot.account import Account, account
from unity_jax.aot.collectives import Collective
from unity_jax.aot.sites import sites
from unity_jax.lower.compile import lower
from unity_jax.machine.machine import Machine
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.plan import Plan
from unity_jax.plan.devices import mesh_over
from unity_jax.program import Program


def lowered_facts(case: Case, program: Program) -> dict[str, Any]:
    """What was noted of the StableHLO when the case was compiled; noted now if nothing was then."""
    facts = case.facts
    if "stablehlo" not in facts:
        plan = case.plan(program, Machine.preset(case.topology))
        facts["stablehlo"] = stablehlo_facts(plan, lower(program, plan.pcg, mesh_over(plan, jax.devices())))
        (case.folder / FACTS).write_text(json.dumps(facts))
    return facts["stablehlo"]


def totals(collectives: Iterable[tuple[str, tuple[str, ...], int, int]]) -> dict[str, str]:
    """Runs and bytes of each kind over each axes, from kind, axes, bytes and runs."""
    found: dict[str, tuple[int, int]] = {}
    for kind, axes, nbytes, runs in collectives:
        name = f"{kind} over {'+'.join(axes)}"
        count, size = found.get(name, (0, 0))
        found[name] = count + runs, size + nbytes * runs
    return {name: f"{count}, {size:,} B" for name, (count, size) in found.items()}


def add(table: Table, case: Case) -> Account:
    """A case's rows: one for each kind and axes, then what explains their differences."""
    saved = Plan.load(case.folder / "plan.json")
    axes, facts, module = (
        MeshAxes.of(saved.mesh),
        lowered_facts(case, COMPILED.program(case.model, case.topology)),
        module_of(case.facts["program"]),
    )
    planned = [(Collective(c.kind, c.axes, c.bytes, c.count), c.trips) for c in saved.predicted.collectives]
    twins = [Collective(kind, tuple(over), nbytes, count) for kind, over, nbytes, count in facts["duplicates"]]
    found = account(planned, module, axes, twins)
    sides = (
        totals((c.kind, c.axes, c.bytes, c.count * trips) for c, trips in planned),
        totals((s.kind, s.axes, s.bytes, s.trips) for s in sites(module, axes)),
    )
    lowered = "; ".join(facts["difference"]) or "equal"
    labels = [case.model, case.topology, case.label, lowered]
    for name in sorted(sides[0].keys() | sides[1].keys()):
        table.add_row(*labels, name, *(side.get(name, "none") for side in sides))
        labels = [""] * 4
    explained = "; ".join(f"{name} ({n})" for name, n in sorted(found.rewrites.items())) or "as planned"
    table.add_row(*labels, f"[bold]{explained}", end_section=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", default=",".join(SETS), help="which sets")
    parser.add_argument("--models", help="of these sets; all by default")
    parser.add_argument("--on", default=",".join(TOPOLOGIES))
    parser.add_argument("--plans", default=",".join(FOUR))
    options = parser.parse_args()
    console = Console(width=170)
    table = Table(title="Collectives in a step: how often they run, and their bytes on a device")
    for column in ("model", "topology", "plan", "StableHLO", "collective", "planned", "compiled"):
        table.add_column(column)
    broken, notes = 0, []
    names = options.models.split(",") if options.models else named(options.programs)
    for case in COMPILED.cases(names, options.on.split(",")):
        if case.label not in options.plans.split(","):
            continue
        name = f"{case.model} on {case.topology}, {case.label}"
        if "error" in case.facts:
            notes.append(f"{name}: not compiled: {case.facts['error']}")
            continue
        found = add(table, case)
        broken += bool(found.unexplained or case.facts["stablehlo"]["difference"])
        notes += [f"{name}: {line}" for line in found.unexplained]
    console.print(table)
    for note in notes:
        console.print(note, markup=False, highlight=False)
    console.print(f"{broken} plans with unexplained differences")
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
