"""Sums over devices that are added are reduced once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.numerics.harness import Case
from unity_jax.machine.machine import Machine
from unity_jax.network.reshard import Resharder
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.search import assemble
from unity_jax.search.build import Builder
from unity_jax.search.experts import expert_seeds
from unity_jax.search.sums import reduced_once
from unity_jax.xla.traffic import Traffic

MESH = MeshAxes(("x",), (8,))


def tied(params, batch):
    """An SGD step of a table that is read twice, and multiplied with in half precision."""

    def loss(table):
        a, b = table[batch["a"]], table[batch["b"]]
        both = jnp.tanh(a * b).astype(jnp.bfloat16), table.astype(jnp.bfloat16)
        return (jnp.einsum("bd,vd->bv", *both, preferred_element_type=jnp.float32) ** 2).mean()

    return params - 0.1 * jax.grad(loss)(params)


def case():
    rng = np.random.default_rng(0)
    rows = {name: jnp.asarray(rng.integers(0, 48, size=64)) for name in "ab"}
    return Case.of(tied, [jnp.asarray(rng.normal(size=(48, 16)), jnp.float32), rows], [0])


def expert(case, name):
    machine = Machine.preset("h100:8")
    resharder, graph = Resharder(machine, MESH), case.program.graph
    traffic = Traffic.of(graph, machine.device.compiler)
    built = Builder(graph, case.program.ties, resharder, machine, case.rules, traffic).build(keep=True)
    seed = expert_seeds(case.program, built, MESH, case.rules)[name]
    return case.planned(MESH, built.decisions(seed, True), "h100")


def reductions(graph):
    return [op.move.kind for op in graph.ops if op.move is not None and "reduce" in op.move.kind and op.inputs[0].rank]


@pytest.mark.parametrize("name, kind", [("dp(x)", "reduce"), ("fsdp(x)", "reduce_scatter")])
def test_gradients_of_a_table_that_is_read_twice_are_reduced_once(monkeypatch, name, kind):
    made = case()
    plan = expert(made, name)
    assert reductions(plan.graph) == [kind, kind]  # that of the product, which is rounded first; and of both reads
    assert made.differences(made.run(plan), tolerance=1e-5) == []
    monkeypatch.setattr(assemble, "reduced_once", lambda graph, rules, mesh: graph)
    apart = expert(made, name)
    assert reductions(apart.graph) == [kind] * 3
    again = reduced_once(apart.graph, made.rules, MESH)
    assert [str(op.move or op.name) for op in again.ops] == [str(op.move or op.name) for op in plan.graph.ops]
    assert reduced_once(again, made.rules, MESH) is again


def test_what_is_read_by_others_is_reduced_by_itself():
    rng = np.random.default_rng(0)

    def read(x, w):
        a, b = x @ w, jnp.sin(x) @ w
        return a + b, a, x + a + b

    with jax.enable_x64(True):
        args = [jnp.asarray(rng.normal(size=(16, 16))) for _ in range(2)]
        found = Case.of(read, args)
        for seed in range(12):
            assert found.differences(found.run(found.sample((2, 4), seed))) == []


def test_sums_as_long_as_a_program_are_no_recursion():
    def step(x, w):
        total = x @ w
        for _ in range(3_000):
            total = total + x
        return total

    found = Case.traced(step, [jnp.ones((8, 8)), jnp.ones((8, 8))])
    assert len(found.sample((8,), 0).graph.ops) > 3_000
