"""What reusing equal parts is worth: planning time with and without it, against depth and devices (Unity, table 2).

    python -m experiments.tables.ablation
    python -m experiments.tables.ablation --depths 1 2 4 --machines h100:8 h100:4x8 --limit 1200

BERT-Large with so many unrolled layers, each case in a process of its own:

    all reuse      as it ships: equal ops share their costs, equal layers are contracted once
    contract each  the solver does every operation on tables anew, for every layer
    and cost each  besides, rules, strategies and costs are made anew for every op

Seconds are of the processor, tracing left out. The plans are the same: only how they are found differs. Rows are kept
in a CSV file, and those that are there are not made again.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from experiments.baselines import program_of
from experiments.made_by import PLANNED
from experiments.rows import Row, Rows
from unity_jax.machine.machine import Machine
from unity_jax.ops.rule import Shard
from unity_jax.ops.rules import rule_of
from unity_jax.ops.strategies import strategies
from unity_jax.planning import alone
from unity_jax.search.build import Builder
from unity_jax.search.placement import mesh_candidates
from unity_jax.search.planner import Planner
from unity_jax.search.rule_cache import RuleCache
from unity_jax.search.tables import Store

RESULTS = Path(__file__).parents[1] / "results" / "ablation.csv"
SETTINGS = ("machine", "layers", "reuse")
CODE = (*PLANNED, *(f"experiments/tables/ablation.py:{name}" for name in ("measure", "SWITCHES")))


def nothing() -> None:
    """As it ships."""


def contract_each() -> None:
    """No operation on tables is remembered."""
    Store.once = lambda self, key, make: make()


def made_anew(self: Builder, key: Hashable, make: Callable[[], Any] | None) -> Any:
    """For `Builder.intern`: only what a cluster asks of its ops, which it does not make, is looked up."""
    if make is not None:
        self._interned[key] = make()
    return self._interned[key]


def cost_each() -> None:
    """And nothing that equal ops share."""
    contract_each()
    Builder.intern = made_anew
    RuleCache.__call__ = lambda self, op: rule_of(op)
    RuleCache.strategies = lambda self, op, mesh: strategies(self(op), mesh)
    RuleCache.shard = lambda self, op, mesh, strategy: Shard(op, self(op), mesh, strategy)


SWITCHES: dict[str, Callable[[], None]] = {
    "all reuse": nothing,
    "contract each": contract_each,
    "and cost each": cost_each,
}


def measure(machine: str, layers: int, reuse: str) -> dict[str, Any]:
    """Plans one case in this process, whose planner is changed for good."""
    on = Machine.preset(machine)
    program = program_of("bert", layers=layers, batch_size=8 * on.num_devices)
    SWITCHES[reuse]()
    with alone():
        start = time.process_time()
        plan = Planner(program, on).plan(mesh_candidates(on.num_devices, on))
        spent = time.process_time() - start
    ops = sum(1 for _ in program.graph.walk())
    return {"ops": ops, "planning seconds": spent, "step seconds": plan.seconds, "mesh": str(plan.mesh)}


def in_process(case: dict[str, Any], limit: float) -> dict[str, Any]:
    """`measure` in a process of its own; no seconds where it takes too many."""
    command = [sys.executable, "-m", "experiments.tables.ablation", "--case", json.dumps(case)]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=limit, check=True)
    except subprocess.TimeoutExpired:
        return {"ops": "", "planning seconds": "", "step seconds": "", "mesh": f"over {limit:.0f} s"}
    return json.loads(done.stdout.splitlines()[-1])


def table(rows: Sequence[Row]) -> Table:
    made = Table("machine", "layers", "ops", *(f"{name}" for name in SWITCHES), "step", title="seconds of planning")
    for machine, layers in dict.fromkeys((r["machine"], r["layers"]) for r in rows):
        case = {r["reuse"]: r for r in rows if (r["machine"], r["layers"]) == (machine, layers)}
        first = next(iter(case.values()))
        base = case.get("all reuse", {}).get("planning seconds")
        times = [_time(case[name], base) if name in case else "" for name in SWITCHES]
        steps = {r["step seconds"] for r in case.values() if r["step seconds"]}
        made.add_row(machine, layers, first["ops"], *times, " and ".join(sorted(steps)))
    return made


def _time(row: Row, base: str | None) -> str:
    if not row["planning seconds"]:
        return row["mesh"]
    times = f" ({float(row['planning seconds']) / float(base):.1f}x)" if base else ""
    return f"{float(row['planning seconds']):.1f}{times}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--machines", nargs="*", default=["h100:8", "h100:2x8", "h100:4x8"])
    parser.add_argument("--limit", type=float, default=1800, help="seconds after which a case is given up")
    parser.add_argument("--stale", action="store_true", help="make again what another version of the code made")
    parser.add_argument("--out", default=RESULTS, type=Path, metavar="CSV")
    parser.add_argument("--case", help=argparse.SUPPRESS)  # how this script calls itself
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(**json.loads(options.case))))
        return
    rows = Rows(options.out, SETTINGS, CODE)
    wanted = [
        {"machine": machine, "layers": layers, "reuse": reuse}
        for layers in options.depths
        for machine in options.machines
        for reuse in SWITCHES
    ]
    todo = rows.missing(wanted, options.stale)
    rows.make_all(todo, lambda w: in_process(w, options.limit), "{layers} layers on {machine}, {reuse}")
    shown = rows.made(wanted)
    Console(width=120).print(table(shown))


if __name__ == "__main__":
    main()
