"""Bags of rows on TPUs that are not there, by the schedules of their kernels: as written, and as one op.

    python -m experiments.tables.bags                      # minutes; needs the extra tpu-aot
    python -m experiments.tables.bags --on v5e:2x4

The sums of so many rows of a table for each example, and the gradient of the table by such sums, on one of eight
devices that have a part of the rows each and the ids of all, or all rows and a part of the examples. *Written*:
`table[ids]` and its sum, or the transposes of both, as a plan lowers them. *Bags*: one op (`ops.bags`).
Cycles for each id, by the compiler's estimate and by the length of the schedules that libtpu writes
(`unity_jax.aot.bundles`), of ids that are spread evenly over the table; and what of it is in memory in between.
*Predicted* is what the planner says of the op.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

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
from unity_jax.implement import baggable, bagged
from unity_jax.machine.machine import Machine
from unity_jax.ops.own_rows import at_once, own_rows
from unity_jax.ops.rule import Shard
from unity_jax.ops.rules import rule_of
from unity_jax.ops.strategies import strategies
from unity_jax.pcg.graph import Graph, Op
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.program import trace
from unity_jax.xla.traffic import Traffic

RESULTS = Path(__file__).parents[1] / "results" / "bags.csv"
SETTINGS = ("topology", "of", "rows", "examples", "bag", "split")
WIDTH = 128
SHAPES = ((5_000_000, 16_384, 100), (5_000_000, 16_384, 27), (8_192, 16_384, 27))
"""Rows of the table, examples, and rows of each: the largest bags of DLRM, and a table that is on the chip."""
SPLITS = ("rows", "examples")
TOPOLOGIES = ("v5e:2x4", "v6e:2x4")


def sums(rows: int, examples: int, bag: int) -> Graph:
    table, ids = jax.ShapeDtypeStruct((rows, WIDTH), "float32"), jax.ShapeDtypeStruct((examples, bag), "int32")
    return trace(lambda table, ids: table.at[ids].get(mode="promise_in_bounds").sum(1), (table, ids), {}).graph


def gradient(rows: int, examples: int, bag: int) -> Graph:
    def added(ids: Any, by: Any) -> Any:
        updates = jax.lax.broadcast_in_dim(by, (examples, bag, WIDTH), (0, 2))
        return jnp.zeros((rows, WIDTH)).at[ids].add(updates, mode="promise_in_bounds")

    ids, by = jax.ShapeDtypeStruct((examples, bag), "int32"), jax.ShapeDtypeStruct((examples, WIDTH), "float32")
    return trace(added, (ids, by), {}).graph


OF: dict[str, Callable[[int, int, int], Graph]] = {"sums": sums, "gradient": gradient}
CODE = (
    *PLANNED,
    *(f"unity_jax/aot/{name}.py" for name in ("bundles", "cycles", "hlo")),
    *(
        f"experiments/tables/bags.py:{name}"
        for name in ("WIDTH", "sums", "gradient", "OF", "sharded", "cycles", "measure")
    ),
)


def sharded(op: Op, mesh: MeshAxes, split: str) -> Shard:
    """An op of one device, under the strategy that splits its table, or its examples."""
    rule = rule_of(op)
    (factor,) = rule.operands[0][0] if split == "rows" else rule.operands[1][0]
    (strategy,) = (s for s in strategies(rule, mesh) if s == (factor,))
    return Shard(op, rule, mesh, strategy, onto_zeros=True)


def cycles(run: Callable[..., Any], given: Sequence[Any], devices: Mesh, turns: int) -> tuple[float, float]:
    """Cycles of a device's part, and bytes of what is in memory in between.

    **Arguments:** `given`: the shapes of what a device has; `turns`: of a loop that says not how many it has.
    """
    each = jax.shard_map(run, mesh=devices, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    whole = NamedSharding(devices, PartitionSpec())
    empty()
    made = jax.jit(each).lower(*(jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=whole) for t in given)).compile()
    module = parse(made.as_text() or "")
    module = with_schedules(module, schedules(module))
    total = estimated_cycles(module)
    assert not total.missing, f"{total.missing} instructions have neither an estimate nor a schedule"
    loops = [op for op in module.computations[module.entry].values() if op.opcode == "while"] if total.endless else []
    turn = sum(estimated_cycles(dataclasses.replace(module, entry=name)).total for op in loops for name in op.called)
    memory: Any = made.memory_analysis()
    return total.total + (turns - 1) * turn, memory.temp_size_in_bytes


def measure(on: str, of: str, rows: int, examples: int, bag: int, split: str) -> dict[str, Any]:
    """One row: cycles for each id, and MiB."""
    machine, clock = Machine.preset(on), CLOCKS[on.partition(":")[0]]
    mesh = MeshAxes(("x",), (machine.num_devices,))
    devices, graph = Mesh(np.array(topology(on)), mesh.names), OF[of](rows, examples, bag)
    ((op, (rows_by, bags)),) = baggable(graph).items()
    one = sharded(bags, mesh, split)
    given = [jax.ShapeDtypeStruct(shape, t.dtype) for shape, t in zip(one.shapes, one.op.inputs, strict=False)]
    every = sharded(rows_by if of == "sums" else op, mesh, split)

    def written(table: Any, ids: Any, *by: Any) -> Any:
        if not by:
            return every.run((table, ids))[0].sum(1)
        return every.run((table, ids, jax.lax.broadcast_in_dim(by[0], (*ids.shape[:2], WIDTH), (0, 2))))[0]

    def zeroed(run: Callable[..., Any]) -> Callable[..., Any]:  # of a gradient, what it is added to
        return run if of == "sums" else lambda *xs: run(jnp.zeros(given[0].shape), *xs)

    n, found = math.prod(given[1].shape), dict[str, Any]()
    own = own_rows(one)
    for name, run, turns in (
        ("written", written, 1),
        ("bags", lambda *xs: one.run(xs)[0], -(-own // at_once(one, own)) if own else 1),
    ):
        taken, nbytes = cycles(zeroed(run), given if of == "sums" else given[1:], devices, turns)
        found |= {f"{name} cycles": taken / n, f"{name} MiB": nbytes / 2**20}
    made = bagged(graph, bags.outputs)
    (planned,) = (op for op in made.ops if op.name == bags.name)
    use = Traffic.of(made, machine.device.compiler).uses[planned]
    seconds = op_work(sharded(planned, mesh, split), machine.device, use).seconds(machine.device)
    return found | {"predicted cycles": seconds * clock / n}


def table(rows: Sequence[Row]) -> Table:
    shown = Table(
        "topology", "of", "rows", "examples x bag", "split by", "written", "MiB", "bags", "MiB", "written / bags"
    )
    shown.add_column("predicted")
    for row in rows:
        every, bags = (float(row[f"{name} cycles"]) for name in ("written", "bags"))
        shown.add_row(
            *(
                row["topology"],
                row["of"],
                f"{int(row['rows']):,}",
                f"{int(row['examples']):,} x {row['bag']}",
                row["split"],
            ),
            *(f"{every:.1f}", f"{float(row['written MiB']):.0f}", f"{bags:.1f}", f"{float(row['bags MiB']):.0f}"),
            *(f"{every / bags:.2f}", f"{float(row['predicted cycles']):.1f}"),
        )
    return shown


def verdict(rows: Sequence[Row]) -> str:
    """How much faster bags are, and what they leave out of memory."""
    if not rows:
        return ""
    gain = {
        split: [float(r["written cycles"]) / float(r["bags cycles"]) for r in rows if r["split"] == split]
        for split in SPLITS
    }
    parts = " and ".join(f"{min(of):.2f} to {max(of):.2f} times as fast by {split}" for split, of in gain.items() if of)
    most = max(float(r["bags MiB"]) for r in rows)
    return f"bags of rows over 8 TPUs, by schedules: {parts}; in between in memory: at most {most:.0f} MiB"


def main() -> None:
    options = arguments(__doc__, TOPOLOGIES, RESULTS).parse_args()
    wanted = [
        dict(zip(SETTINGS, (on, of, *shape, split), strict=True))
        for on in options.on.split(",")
        for of in OF
        for shape in SHAPES
        for split in SPLITS
    ]
    rows = Rows(options.out, SETTINGS, CODE)
    tabulate(rows, wanted, options.stale, measure, table, verdict)


if __name__ == "__main__":
    main()
