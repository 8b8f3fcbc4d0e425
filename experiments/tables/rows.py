"""Gradients of embeddings whose tables are split by rows, on TPUs that are not there.

    python -m experiments.tables.rows                      # minutes; needs the extra tpu-aot
    python -m experiments.tables.rows --on v5e:2x4

Each device has a part of the rows, and the ids of all. *All*: it adds every row and drops what is not its own. *Own*:
it sorts its own out and adds those alone (`ops.own_rows.own_rows`). Cycles for each id, of the op as a plan lowers it,
compiled by the real XLA:TPU: of scatters and sorts the length of the schedules that libtpu writes of them, of other
operations the compiler's own estimate (`unity_jax.aot.bundles`). *Own* is of ids that are spread evenly over the table,
for which one turn is enough, and *skewed* of ids that are all one device's, which takes as many as there are devices.
*Predicted* is what the planner says of the first two. Not done is what does not pay: rows of a table that fits on the
chip, and of less than 32 bits.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.table import Table

from experiments.made_by import PLANNED
from experiments.rows import Row, Rows
from experiments.scheduled import arguments, tabulate
from unity_jax.aot.bundles import empty, schedules, with_schedules
from unity_jax.aot.cycles import CLOCKS, estimated_cycles
from unity_jax.aot.hlo import parse
from unity_jax.aot.topologies import topology
from unity_jax.cost.compute import op_work
from unity_jax.machine.machine import Machine
from unity_jax.ops import own_rows
from unity_jax.ops.rule import Shard
from unity_jax.ops.rules import rule_of
from unity_jax.ops.strategies import strategies
from unity_jax.pcg.graph import Graph
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.program import trace
from unity_jax.xla.traffic import Traffic

RESULTS = Path(__file__).parents[1] / "results" / "rows.csv"
SETTINGS = ("topology", "rows", "ids", "dtype")
CODE = (
    *PLANNED,
    *(f"unity_jax/aot/{name}.py" for name in ("bundles", "cycles", "hlo")),
    *(f"experiments/tables/rows.py:{name}" for name in ("measure", "WIDTH", "sharded")),
)
TOPOLOGIES = ("v5e:2x4", "v6e:2x4")
SHAPES = ((5_000_000, 1_638_400, "float32"), (5_000_000, 196_608, "float32"), (262_144, 65_536, "float32"))
"""Rows of the table, ids of a step, type."""
WIDTH = 128


def sharded(rows: int, ids: int, dtype: str, mesh: MeshAxes) -> tuple[Shard, Graph]:
    """An op under the strategy that splits its table by rows, and the program that it is of."""

    def gradient(ids: Any, updates: Any) -> Any:
        return jnp.zeros((rows, WIDTH), dtype).at[ids].add(updates, mode="promise_in_bounds")

    shapes = jax.ShapeDtypeStruct((ids,), "int32"), jax.ShapeDtypeStruct((ids, WIDTH), dtype)
    graph = trace(gradient, shapes, {}).graph
    (op,) = (op for op in graph.ops if op.name == "scatter-add")
    rule = rule_of(op)
    (row,) = rule.operands[0][0]
    (strategy,) = (s for s in strategies(rule, mesh) if s == (row,))
    return Shard(op, rule, mesh, strategy, onto_zeros=True), graph


def measure(on: str, rows: int, ids: int, dtype: str) -> dict[str, Any]:
    """One row: cycles for each id, by the compiler and by the planner."""
    machine, clock, found = Machine.preset(on), CLOCKS[on.partition(":")[0]], dict[str, Any]()
    mesh = MeshAxes(("x",), (machine.num_devices,))
    devices = Mesh(np.array(topology(on)), mesh.names)
    for name, least in (("all", machine.num_devices + 1), ("own", 1)):
        with mock.patch.object(own_rows, "_LEAST", least):
            shard, graph = sharded(rows, ids, dtype, mesh)
            size = own_rows.own_rows(shard)
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
            module = with_schedules(module, schedules(module))
            cycles = estimated_cycles(module)
            use = Traffic.of(graph, machine.device.compiler).uses[shard.op]
            predicted = op_work(shard, machine.device, use).seconds(machine.device)
        assert not cycles.missing, f"{cycles.missing} instructions have neither an estimate nor a schedule"
        found |= {f"{name} cycles": cycles.total / ids, f"{name} predicted cycles": predicted * clock / ids}
        if size:
            (loop,) = (op for op in module.computations[module.entry].values() if op.opcode == "while")
            turn = sum(estimated_cycles(dataclasses.replace(module, entry=name)).total for name in loop.called)
            found["skewed cycles"] = (cycles.total + (-(-ids // size) - 1) * turn) / ids
    return found


def table(rows: Sequence[Row]) -> Table:
    shown = Table("topology", "rows", "ids", "type", "all", "own", "skewed", "all / own", "all / skewed", "predicted")
    for row in rows:
        every, own, skewed = (float(row[f"{name} cycles"]) for name in ("all", "own", "skewed"))
        predicted = float(row["all predicted cycles"]), float(row["own predicted cycles"])
        shown.add_row(
            *(row["topology"], f"{int(row['rows']):,}", f"{int(row['ids']):,}", row["dtype"]),
            *(f"{every:.1f}", f"{own:.1f}", f"{skewed:.1f}", f"{every / own:.2f}", f"{every / skewed:.2f}"),
            f"{predicted[0]:.1f}, {predicted[1]:.1f}",
        )
    return shown


def verdict(rows: Sequence[Row]) -> str:
    """How much faster it is to add a device's own rows."""
    if not rows:
        return ""
    own, skewed = ([float(r["all cycles"]) / float(r[f"{name} cycles"]) for r in rows] for name in ("own", "skewed"))
    each = f"{min(own):.1f} to {max(own):.1f} times as fast as through all, {min(skewed):.2f} or more if all are one's"
    return f"gradients of tables over 8 TPUs by own rows, by schedules: {each}"


def main() -> None:
    options = arguments(__doc__, TOPOLOGIES, RESULTS).parse_args()
    wanted = [dict(zip(SETTINGS, (on, *shape), strict=True)) for on in options.on.split(",") for shape in SHAPES]
    tabulate(Rows(options.out, SETTINGS, CODE), wanted, options.stale, measure, table, verdict)


if __name__ == "__main__":
    main()
