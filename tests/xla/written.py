"""Small planned programs, and the text of their modules before and after each pass.

python -m tests.xla.written      # writes tests/xla/snapshots/ again: read what changed before it is committed
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from unity_jax.cost.estimates import Estimates
from unity_jax.machine.machine import Machine
from unity_jax.network.reshard import Resharder
from unity_jax.pcg.graph import Tensor
from unity_jax.pcg.layout import Layout
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.program import trace
from unity_jax.residuals.pair import stacked
from unity_jax.search.assemble import Decisions, assemble
from unity_jax.search.build import Builder
from unity_jax.search.experts import expert_seeds
from unity_jax.search.rule_cache import RuleCache
from unity_jax.xla.emission import emit
from unity_jax.xla.layout_assignment import Storage
from unity_jax.xla.module import Module
from unity_jax.xla.pipelines import PIPELINES, Pass
from unity_jax.xla.traffic import Traffic

SNAPSHOTS = Path(__file__).parent / "snapshots"


def f32(*dims):
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def dense(w, x):
    """A step of gradient descent on one layer."""
    return w - jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)


def scanned(w, x):
    """Gradients of scanned layers."""
    layer = lambda x, w: (jnp.tanh(x @ w), None)  # noqa: E731
    return w - jax.grad(lambda w: jnp.sum(jax.lax.scan(layer, x, w)[0]))(w)


def cast_in_loop(w, x):
    layer = lambda x, w: (jnp.tanh(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(x.dtype), None)  # noqa: E731
    return jax.lax.scan(layer, x, w)[0]


def picked(x, rows):
    """Some rows of a value, and what else is computed of it."""
    y = jax.lax.sort(x)
    return y.at[rows].get(mode="clip").sum(), jax.lax.sort(y).sum()


def embedding(table, ids, x):
    """A step on a table of rows of which some are read."""
    return table - jax.grad(lambda table: jnp.sum(jnp.tanh(table[ids] * x)))(table)


def carried(w, x):
    """Of what the first loop carries nothing is read behind it; what the second one does the third goes on with; the
    last one is given what another op reads, too."""
    y, z = jax.lax.sort(x), jax.lax.sort(-x)
    _, rows = jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), jnp.sum(c)), y, w)
    half, _ = jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), jax.lax.sort(x + 1), w)
    last, _ = jax.lax.scan(lambda c, w: (jnp.sin(c @ w), None), half, w)
    same, _ = jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), z, w)
    return rows, jax.lax.sort(last), jax.lax.sort(same) - z


def pooled(w, x):
    """A step on an array of images, of whose pixels in squares of four the largest count."""

    def loss(w):
        y = jnp.tanh(w * x)
        return jnp.sum(jnp.sin(jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, (1, 2, 2), (1, 2, 2), "VALID")))

    return w - jax.grad(loss)(w)


def convolved(w, x):
    """A step on a kernel of 3 x 3, of images that are made in the step."""
    images, numbers = jax.lax.sort(x), ("NHWC", "HWIO", "NHWC")

    def loss(w):
        return jnp.sum(jnp.sin(jax.lax.conv_general_dilated(images, w, (1, 1), "SAME", dimension_numbers=numbers)))

    return w - jax.grad(loss)(w)


def two_sums(x, y):
    return jax.lax.sort(jnp.sum(x, 0)), jax.lax.sort(jnp.sum(y, 0))


def sum_beside(x, y):
    """What comes before a sum, and what can be computed beside it."""
    return jax.lax.sort(jnp.sum(x, 0)), jax.lax.sort(y)


def updated(state, x):
    """State that the update reads, on the host."""
    return 0.9 * state + jax.lax.sort(x)


def add_to_sorted(x, y):
    return jax.lax.sort(x) + y


WHOLE, ROWS, FIRST = Layout.replicated(2), Layout((("x",), ())), Layout((("x",), (), ()))
IDS = jax.ShapeDtypeStruct((8,), jnp.int32)
LAYERS = (f32(4, 64, 64), f32(16, 64))


class By(NamedTuple):
    """A plan by hand: the layouts of arguments and of results, the strategies of ops that are split, and whether the
    first argument and the result in its place are on the host."""

    inputs: Sequence[Layout]
    outputs: Sequence[Layout]
    strategies: Mapping[str, int] = {}
    hosted: bool = False


TWO_SUMS = (two_sums, (f32(2, 64, 64),) * 2, By([FIRST] * 2, [WHOLE] * 2, {"reduce_sum": 0}))
GATHERED = (jax.lax.sort, (f32(64, 64),), By([WHOLE], [WHOLE], {"sort": 0}))


PROGRAMS = {
    "space_to_batch_converter": ("v5e:1x1", convolved, (f32(3, 3, 16, 16), f32(2, 32, 32, 16)), "dp"),
    "select_and_scatter_expander": ("h100:1", pooled, (f32(4, 64, 64),) * 2, "dp"),
    "tuple_elements": ("h100:1", dense, (f32(64, 64), f32(16, 64)), "dp"),
    "host_offloader": ("v5e:1x1", scanned, (f32(4, 128, 128), f32(16, 128)), "dp+spilled"),
    "loop_stacks": ("h100:1", scanned, LAYERS, "dp"),
    "loop_carries": ("h100:1", carried, LAYERS, "dp"),
    "horizontal_loop_fusion": ("h100:1", scanned, (f32(4, 64, 64), f32(64, 64)), "dp"),
    "multi_output_fusion": ("h100:2", picked, (f32(64, 64), IDS), By([WHOLE, Layout((("x",),))], [Layout(())] * 2)),
    "latency_estimates": ("h100:2", dense, (f32(64, 64), f32(16, 64)), "fsdp"),
    "async_collective_creator": ("h100:2", dense, (f32(64, 64), f32(16, 64)), "fsdp"),
    "host_memory_transfer_asyncifier": (
        "v5e:1x1",
        updated,
        (f32(64, 64),) * 2,
        By([WHOLE] * 2, [WHOLE], hosted=True),
    ),
    "collective_combiner": ("v5e:1x2", *TWO_SUMS),
    "list_scheduler": ("h100:2", *TWO_SUMS),
    "latency_hiding_scheduler": (
        "h100:2",
        sum_beside,
        (f32(2, 64, 64), f32(64, 64)),
        By([FIRST, WHOLE], [WHOLE] * 2, {"reduce_sum": 0}),
    ),
    "while_loop_invariant_code_motion": ("v5e:1x1", cast_in_loop, LAYERS, "dp"),
    "table_relayout": ("v5e:1x1", embedding, (f32(256, 16), IDS, f32(8, 16)), "dp"),
    "all_gather_relayout": ("v5e:1x2", jax.lax.sort, (f32(8, 2048),), By([ROWS], [WHOLE])),
    "memory_latencies": ("v5e:1x2", *GATHERED),
    "start_at_zero_depth": ("v5e:1x2", add_to_sorted, (f32(64, 64),) * 2, By([WHOLE, ROWS], [WHOLE])),
    "memory_space_assignment": ("v5e:1x2", *GATHERED),
}
"""Of each pass a machine, a program, its arguments and a plan: an expert's, with what layers stack on the host if so,
or by hand."""


def module(on: str, fn, arguments, plan: str | By) -> Module:
    """The module of a plan of a step that is given its first argument, as no pass has seen it."""
    machine, program = Machine.preset(on), trace(fn, arguments, {}, donate_argnums=0)
    mesh, rules = MeshAxes(("x",), (machine.num_devices,)), RuleCache()
    resharder, spilled = Resharder(machine, mesh), frozenset[Tensor]()
    if isinstance(plan, By):
        decisions = Decisions({op: (plan.strategies.get(op.name, -1),) for op in program.graph.ops})
        decisions.layouts = dict(zip(program.graph.inputs, plan.inputs, strict=True))
        decisions.outputs = tuple(plan.outputs)
    else:
        traffic = Traffic.of(program.graph, machine.device.compiler)
        built = Builder(program.graph, program.ties, resharder, machine, rules, traffic).build(keep=False)
        expert, _, also = plan.partition("+")
        seed = expert_seeds(program, built, mesh, rules)[f"{expert}(x)"]
        decisions = built.decisions(seed, keep=False)
        spilled = frozenset(stacked(program.graph) if also == "spilled" else ())
    hosted = {program.graph.inputs[0]: [0]} if isinstance(plan, By) and plan.hosted else None
    graph = assemble(program.graph, decisions, resharder, rules, hosted, spilled)
    found = Traffic.of(graph, machine.device.compiler)
    return emit(graph, found, Storage(graph, found, mesh, machine.device), machine, Estimates(machine))


def before(name: str) -> tuple[Module, Pass]:
    """A module behind the passes that come before one, and that pass."""
    found = module(*PROGRAMS[name])
    for run in PIPELINES[found.storage.device.compiler]:
        if run.__name__ == name:
            return found, run
        run(found)
    raise ValueError(f"{name} is no pass for {PROGRAMS[name][0]}")


def before_and_after(name: str) -> str:
    """The text of a module before a pass and after it, behind those that come first."""
    found, run = before(name)
    text = str(found)
    run(found)
    return f"{text}\n\n-> {name}\n\n{found}\n"


if __name__ == "__main__":
    SNAPSHOTS.mkdir(exist_ok=True)
    for name in PROGRAMS:
        (SNAPSHOTS / f"{name}.txt").write_text(before_and_after(name))
