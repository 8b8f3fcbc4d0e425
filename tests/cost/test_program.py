"""Costs of planned graphs, against sums done by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from unity_jax.cost.memory import memory
from unity_jax.cost.program import kernel_seconds, program_flops
from unity_jax.machine.machine import Machine
from unity_jax.network.collectives import collectives
from unity_jax.network.communication import collective_seconds
from unity_jax.network.reshard import Resharder
from unity_jax.ops.rules import rule_of
from unity_jax.pcg.graph import Graph
from unity_jax.pcg.layout import Layout
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.program import Program, trace
from unity_jax.search.assemble import Decisions, assemble
from unity_jax.search.rule_cache import RuleCache
from unity_jax.xla.fusion import kernels
from unity_jax.xla.traffic import Traffic

MESH, MACHINE = MeshAxes(("x",), (8,)), Machine.preset("h100:8")


def f32(*dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def contracted(program: Program) -> Graph:
    """The one matmul of a program, contracted over shards, with whole results."""
    dot = next(op for op in program.graph.walk() if op.name == "dot_general")
    rule = rule_of(dot)
    k = next(i for i, f in enumerate(rule.factors) if f.kind == "sum")
    decisions = Decisions({dot: (k,)}, {}, (Layout.replicated(2),))
    for body in [program.graph, *(b for op in program.graph.ops for b in op.bodies)]:
        decisions.layouts.update({t: Layout.replicated(t.rank) for t in body.inputs})
        decisions.strategies.update({op: (-1,) for op in body.ops if not op.bodies and op is not dot})
    for t, factors in zip(dot.inputs, rule.operands, strict=True):
        decisions.layouts[t] = Layout(tuple(("x",) if f == (k,) else () for f in factors))
    return assemble(program.graph, decisions, Resharder(MACHINE, MESH), RuleCache())


def test_a_contraction_over_shards_pays_one_all_reduce() -> None:
    program = trace(lambda a, b: a @ b, (f32(32, 64), f32(64, 16)), {})
    graph = contracted(program)
    (c,) = collectives(graph, MESH, MACHINE)
    assert (c.kind, c.axes, c.bytes, c.count, c.trips) == ("all_reduce", ("x",), 32 * 16 * 4, 1, 1)
    assert c.seconds == collective_seconds(MACHINE, MESH, "all_reduce", 32 * 16 * 4, ("x",))
    assert program_flops(graph) == 2 * 32 * 64 * 16 / 8


def test_loops_multiply() -> None:
    def f(a, x):
        return jax.lax.scan(lambda c, _: (c @ a, None), x, None, length=5)[0]

    program = trace(f, (f32(64, 64), f32(64, 64)), {})
    graph = contracted(program)
    (scatter,) = [c for c in collectives(graph, MESH, MACHINE) if c.kind == "reduce_scatter"]  # into the split carry
    assert (scatter.count, scatter.trips, scatter.bytes) == (1, 5, 64 * 64 * 4)
    assert program_flops(graph) == 5 * 2 * 64**3 / 8


def test_peak_memory_is_the_largest_sum_alive() -> None:
    """x, its sort, and the sort of the sort, which takes the place of x if x is donated."""

    def f(x):
        return jnp.sort(jnp.sort(x, stable=False), stable=False)

    n = 1000 * 4
    for donated, peak in (((), 3 * n), ((0,), 2 * n)):
        program = trace(f, (f32(1000),), {}, donate_argnums=donated)
        whole = Layout.replicated(1)
        decisions = Decisions(dict.fromkeys(program.graph.ops, (-1,)), {program.graph.inputs[0]: whole}, (whole,))
        graph = assemble(program.graph, decisions, Resharder(MACHINE, MESH), RuleCache())
        assert memory(graph, Traffic.of(graph, "gpu"), MESH, MACHINE, program.donated).peak_bytes == peak


@pytest.mark.parametrize(("fn", "features", "compiled"), [(jnp.tanh, 1024, 54e-6), (jax.lax.erfc, 256, 52e-6)])
def test_a_matmul_waits_for_what_it_computes_as_it_reads(fn, features, compiled) -> None:
    """XLA:TPU writes these times beside the matmuls (libtpu 0.0.42): an error function is a long polynomial."""
    machine, mesh, rules = Machine.preset("v5e:1x1"), MeshAxes(("x",), (1,)), RuleCache()
    args = [jax.ShapeDtypeStruct(dims, jnp.bfloat16) for dims in ((4096, 1024), (1024, features))]
    (kernel,) = kernels(trace(lambda x, w: fn(x) @ w, args, {}).graph, "tpu")
    for op in kernel.ops:
        op.shard = rules.shard(op, mesh, (-1,))
    assert kernel_seconds(kernel, machine.device) == pytest.approx(compiled, rel=0.25)
