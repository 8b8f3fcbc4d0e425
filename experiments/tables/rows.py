"""Embeddings whose tables are split by rows, on TPUs that are not there: looked up, and their gradients.

    python -m experiments.tables.rows                      # minutes; needs the extra tpu-aot
    python -m experiments.tables.rows --on v5e:2x4

Each device has a part of the rows, and the ids of all. *All*: it looks every id up and masks what is not its own, or
adds every row and drops what is not. *Own*: it sorts its own out and goes through those alone
(`ops.indexing.own_rows`). Cycles for each id, of the op as its plan lowers it, compiled by the real XLA:TPU: of
gathers, scatters and sorts the length of the schedules that libtpu writes of them, of other operations the compiler's
own estimate (`unity_jax.aot.bundles`). Ids are taken to be spread evenly over the table, so that one turn is enough:
where all of them are one device's, there are as many turns as devices. *Predicted* is what the planner says of the two.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

from experiments.made_by import PLANNED
from experiments.rows import Row, Rows
from unity_jax.aot.bundles import empty, schedules, with_schedules, written
from unity_jax.aot.cycles import CLOCKS, estimated_cycles
from unity_jax.aot.hlo import parse
from unity_jax.aot.topologies import topology
from unity_jax.cost.compute import op_work
from unity_jax.machine.machine import Machine
from unity_jax.ops import indexing
from unity_jax.ops.rule import Shard
from unity_jax.ops.rules import rule_of
from unity_jax.ops.strategies import strategies
from unity_jax.pcg.graph import Graph
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.program import trace
from unity_jax.xla.traffic import Traffic

RESULTS = Path(__file__).parents[1] / "results" / "rows.csv"
SETTINGS = ("topology", "pass", "rows", "ids", "dtype")
CODE = (
    *PLANNED,
    *(f"unity_jax/aot/{name}.py" for name in ("bundles", "cycles", "hlo")),
    *(f"experiments/tables/rows.py:{name}" for name in ("measure", "PASSES", "WIDTH", "sharded")),
)
TOPOLOGIES = ("v5e:2x4", "v6e:2x4")
SHAPES = (
    (5_000_000, 1_638_400, "float32"),
    (5_000_000, 196_608, "float32"),
    (65_536, 65_536, "float32"),
    (5_000_000, 1_638_400, "bfloat16"),
)
"""Rows of the table, ids of a step, type."""
WIDTH = 128
PASSES = {
    "gather": lambda table, ids, rows: table.at[ids].get(mode="promise_in_bounds"),
    "scatter-add": lambda table, ids, rows: jnp.zeros_like(table).at[ids].add(rows, mode="promise_in_bounds"),
}


def sharded(which: str, rows: int, ids: int, dtype: str, mesh: MeshAxes) -> tuple[Shard, Graph]:
    """An op under the strategy that splits its table by rows, and the program that it is of."""
    shapes = [jax.ShapeDtypeStruct(s, d) for s, d in (((rows, WIDTH), dtype), ((ids,), "int32"), ((ids, WIDTH), dtype))]
    graph = trace(PASSES[which], tuple(shapes), {}).graph
    (op,) = (op for op in graph.ops if op.name == which)
    rule = rule_of(op)
    (row,) = rule.operands[0][0]
    (strategy,) = (s for s in strategies(rule, mesh) if s == (row,))
    return Shard(op, rule, mesh, strategy, onto_zeros=True), graph


def measure(on: str, which: str, rows: int, ids: int, dtype: str) -> dict[str, Any]:
    """One row: cycles for each id, by the compiler and by the planner."""
    machine, clock, found = Machine.preset(on), CLOCKS[on.partition(":")[0]], dict[str, Any]()
    mesh = MeshAxes(("x",), (machine.num_devices,))
    devices = Mesh(np.array(topology(on)), mesh.names)
    for name, least in (("all", machine.num_devices + 1), ("own", 1)):
        with mock.patch.object(indexing, "_LEAST", dict.fromkeys(indexing._LEAST, least)):
            shard, graph = sharded(which, rows, ids, dtype, mesh)
            specs = [PartitionSpec(*lay.dims) for lay in shard.operand_layouts]
            (out,) = (PartitionSpec(*lay.dims) for lay in shard.result_layouts)
            each = jax.shard_map(
                lambda *xs, shard=shard: shard.run(xs)[0],
                mesh=devices,
                in_specs=tuple(specs),
                out_specs=out,
                check_vma=False,
            )
            given = [
                jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=NamedSharding(devices, spec))
                for t, spec in zip(shard.op.inputs, specs, strict=True)
            ]
            empty()
            module = parse(jax.jit(each).lower(*given).compile().as_text() or "")
            cycles = estimated_cycles(with_schedules(module, schedules(module)))
            use = Traffic.of(graph, machine.device.compiler).uses[shard.op]
            predicted = op_work(shard, machine.device, use).seconds(machine.device)
        assert not cycles.missing, f"{cycles.missing} instructions have neither an estimate nor a schedule"
        found |= {f"{name} cycles": cycles.total / ids, f"{name} predicted cycles": predicted * clock / ids}
    return found


def table(rows: Sequence[Row]) -> Table:
    shown = Table("topology", "pass", "rows", "ids", "type", "all", "own", "all / own", "predicted")
    for row in rows:
        every, own = float(row["all cycles"]), float(row["own cycles"])
        predicted = float(row["all predicted cycles"]), float(row["own predicted cycles"])
        shown.add_row(
            *(row["topology"], row["pass"], f"{int(row['rows']):,}", f"{int(row['ids']):,}", row["dtype"]),
            *(f"{every:.1f}", f"{own:.1f}", f"{every / own:.2f}"),
            f"{predicted[0]:.1f}, {predicted[1]:.1f}",
        )
    return shown


def verdict(rows: Sequence[Row]) -> str:
    """How much faster it is to go through a device's own rows."""
    if not rows:
        return ""
    said = []
    for name in PASSES:
        of = [float(r["all cycles"]) / float(r["own cycles"]) for r in rows if r["pass"] == name]
        said.append(f"{name} {min(of):.1f} to {max(of):.1f} times as fast")
    return f"tables split over 8 TPUs, each going through its own rows alone, by schedules: {', '.join(said)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", default=",".join(TOPOLOGIES))
    parser.add_argument("--stale", action="store_true", help="make rows again that another version of the code made")
    parser.add_argument("--out", default=RESULTS, type=Path, metavar="CSV")
    options = parser.parse_args()
    wanted = [
        dict(zip(SETTINGS, (on, which, *shape), strict=True))
        for on in options.on.split(",")
        for which in PASSES
        for shape in SHAPES
    ]
    rows, console = Rows(options.out, SETTINGS, CODE), Console(width=150)
    with written():
        rows.make_all(
            rows.missing(wanted, options.stale),
            lambda settings: measure(*settings.values()),
            "{topology} {pass} {rows} {ids} {dtype}",
        )
    shown = rows.made(wanted)
    console.print(table(shown))
    console.print(verdict(shown))


if __name__ == "__main__":
    main()
