"""A recurrent layer on TPUs that are not there, forward and backward: as written, divided, and as kernels.

    python -m experiments.tables.recurrent                      # minutes; needs the extra tpu-aot
    python -m experiments.tables.recurrent --on v5e:2x4

Milliseconds of one device, of the layer and the gradients of its weights and inputs, compiled by the real XLA:TPU: of
kernels the length of the schedules that libtpu writes of them, of other operations the compiler's own estimate
(`unity_jax.aot.bundles`). What a kernel waits for memory is not in it. *Written*: a `scan` over time, as users have it.
*Divided*: products of inputs run once before the loop, gradients of weights once after it (`implement.loops`).
*Kernels*: what is left of both loops is one kernel each (`implement.persistent`). *Predicted* is what the planner says
of these. The gain is that weights are not read in each step, and that gradients of weights are one product; what was
published of recurrent layers on GPUs stands beside ours in `experiments/tables/ecornn.py`.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"

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
from unity_jax.implement import batchable, batched, persistable, persisted
from unity_jax.kernels.tiles import VMEM
from unity_jax.lower.interpreter import run
from unity_jax.machine.device import Device
from unity_jax.machine.machine import Machine
from unity_jax.pcg.graph import Graph
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.program import trace
from unity_jax.search.identity import identity
from unity_jax.search.joint import one_device

RESULTS = Path(__file__).parents[1] / "results" / "recurrent.csv"
SETTINGS = ("topology", "cell", "steps", "rows", "width")
CODE = (
    *PLANNED,
    "unity_jax/kernels",
    "unity_jax/lower",
    *(f"unity_jax/aot/{name}.py" for name in ("bundles", "cycles", "hlo")),
    *(f"experiments/tables/recurrent.py:{name}" for name in ("measure", "layer", "lstm", "gru", "FORMS")),
)
TOPOLOGIES = ("v5e:2x4", "v6e:2x4")
SHAPES = ((35, 4, 650), (35, 32, 512), (35, 4, 1500), (35, 32, 1536), (50, 128, 1024))
"""Steps, rows of a device, features: of word language models, and of translation."""
ONE = MeshAxes(("x",), (1,))


def lstm(weights: Any, carry: Any, x: Any) -> Any:
    """The cell of Hochreiter and Schmidhuber, 1997."""
    h, c = carry
    i, f, g, o = jnp.split((x @ weights[0] + h.astype(x.dtype) @ weights[1]).astype(jnp.float32), 4, -1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (h, c), h.astype(x.dtype)


def gru(weights: Any, carry: Any, x: Any) -> Any:
    """The cell of Cho et al., 2014, as cuDNN has it."""
    (h,) = carry
    xs, hs = (jnp.split(y.astype(jnp.float32), 3, -1) for y in (x @ weights[0], h.astype(x.dtype) @ weights[1]))
    r, z = jax.nn.sigmoid(xs[0] + hs[0]), jax.nn.sigmoid(xs[1] + hs[1])
    h = (1 - z) * jnp.tanh(xs[2] + r * hs[2]) + z * h
    return (h,), h.astype(x.dtype)


CELLS = {"LSTM": (lstm, 4, 2), "GRU": (gru, 3, 1)}
"""The cell, how many gates it has, and how many states."""


def layer(cell: str, steps: int, rows: int, width: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A layer in bfloat16 with states in float32, with its gradients, and the shapes of its arguments."""
    step, gates, states = CELLS[cell]

    def both(weights: Any, xs: Any, cotangent: Any) -> Any:
        def outputs(weights: Any, xs: Any) -> Any:
            start = (jnp.zeros((rows, width)),) * states
            return jax.lax.scan(lambda carry, x: step(weights, carry, x), start, xs)[1]

        ys, pull = jax.vjp(outputs, weights, xs)
        return ys, pull(cotangent)

    weight, xs = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((width, gates * width), (steps, rows, width)))
    return both, ((weight, weight), xs, xs)


FORMS: dict[str, Callable[[Graph, Device], Graph]] = {
    "written": lambda graph, device: graph,
    "divided": lambda graph, device: batched(graph, batchable(graph)),
    "kernels": lambda graph, device: _kernels(batched(graph, batchable(graph)), device),
}


def _kernels(graph: Graph, device: Device) -> Graph:
    return persisted(graph, persistable(graph, device.chip_bytes - VMEM))


def measure(on: str, cell: str, steps: int, rows: int, width: int) -> dict[str, Any]:
    """One row: milliseconds of each form, by the compiler and by the planner."""
    machine, clock = one_device(Machine.preset(on)), CLOCKS[on.partition(":")[0]]
    fn, shapes = layer(cell, steps, rows, width)
    program, found = trace(fn, shapes, {}), dict[str, Any]()
    mesh, everywhere = Mesh(np.array(topology(on)), ("x",)), PartitionSpec()
    for name, change in FORMS.items():
        plan = identity(program.rewritten(change(program.graph, machine.device), ()), machine, ONE)
        each = jax.shard_map(
            lambda *x, graph=plan.graph: run(graph, ONE, x),
            mesh=mesh,
            in_specs=everywhere,
            out_specs=everywhere,
            check_vma=False,
        )
        empty()
        given = [
            jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=NamedSharding(mesh, everywhere)) for t in plan.graph.inputs
        ]
        module = parse(jax.jit(each).lower(*given).compile().as_text() or "")
        cycles = estimated_cycles(with_schedules(module, schedules(module)))
        assert not cycles.missing, f"{cycles.missing} instructions have neither an estimate nor a schedule"
        found |= {f"{name} ms": 1e3 * cycles.total / clock, f"{name} predicted ms": 1e3 * plan.seconds}
    return found


def table(rows: Sequence[Row]) -> Table:
    shown = Table("topology", "cell", "steps", "rows", "width", *FORMS, "written / kernels", "predicted")
    for row in rows:
        times = [float(row[f"{name} ms"]) for name in FORMS]
        shown.add_row(
            *(row[of] for of in SETTINGS),
            *(f"{ms:.2f} ms" for ms in times),
            f"{times[0] / times[-1]:.2f}",
            f"{float(row['kernels predicted ms']):.2f} ms",
        )
    return shown


def verdict(rows: Sequence[Row]) -> str:
    """How much faster kernels are."""
    of = {name: [float(r[f"{name} ms"]) / float(r["kernels ms"]) for r in rows] for name in ("written", "divided")}
    if not rows:
        return ""
    said = (f"{min(ratios):.1f} to {max(ratios):.1f} times as fast as {name}" for name, ratios in of.items())
    return f"recurrent layers forward and backward as kernels, by schedules: {', '.join(said)}"


def main() -> None:
    options = arguments(__doc__, TOPOLOGIES, RESULTS).parse_args()
    wanted = [
        dict(zip(SETTINGS, (on, cell, *shape), strict=True))
        for on in options.on.split(",")
        for cell in CELLS
        for shape in SHAPES
    ]
    tabulate(Rows(options.out, SETTINGS, CODE), wanted, options.stale, measure, table, verdict)


if __name__ == "__main__":
    main()
