"""Bags of rows are one op where that is faster, and no array has the rows of all bags."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.search.planning import mesh, planner
from unity_jax.implement.record import Bags, from_json, to_json
from unity_jax.machine.machine import Machine
from unity_jax.ops.bags import GATHER, SCATTER
from unity_jax.program import Program, trace
from unity_jax.search.implementing import implemented
from unity_jax.search.options import SearchOptions

TABLE, IDS = (1_000_000, 128), (4096, 50)


def step(table, ids, labels):
    loss = lambda table: jnp.mean((table[ids].sum(1).mean(1) - labels) ** 2)  # noqa: E731
    return jax.tree.map(lambda t, g: t - 0.1 * g, table, jax.grad(loss)(table))


def program(table=TABLE, ids=IDS) -> Program:
    args = ((table, "float32"), (ids, "int32"), (ids[:1], "float32"))
    return trace(step, tuple(jax.ShapeDtypeStruct(*arg) for arg in args), {}, donate_argnums=0)


def names(of: Program) -> set[str]:
    return {op.name for op in of.graph.walk()}


def test_they_are_chosen_on_tpus_alone():
    of = program()
    made = implemented(of, Machine.preset("v5e:2x4"), SearchOptions())
    assert {GATHER, SCATTER} <= names(made) and names(made).isdisjoint(["gather", "scatter-add"])
    (done,) = made.implementations
    assert isinstance(done, Bags) and done.saved > 0 and "rows of bags" in str(done) and "2 times" in str(done)
    assert implemented(of, Machine.preset("v5e:2x4"), SearchOptions(bags="xla")) is of
    assert implemented(of, Machine.preset("h100:8"), SearchOptions()) is of
    assert implemented(program(ids=(32, 8)), Machine.preset("v5e:2x4"), SearchOptions()).implementations == ()


def test_they_are_done_again_from_a_file():
    of = program()
    made = implemented(of, Machine.preset("v5e:2x4"), SearchOptions())
    graph = of.graph
    for done in made.implementations:
        graph = from_json(to_json(done)).applied(graph)
    assert str(graph) == str(made.graph)
    with pytest.raises(LookupError, match="no bag of rows"):
        made.implementations[0].applied(graph)


def test_a_plan_has_no_rows_in_memory():
    of = program()
    on = Machine.preset("v5e:2x4")
    ways = (implemented(of, on, SearchOptions(bags=how)) for how in ("xla", "rows"))
    plain, bags = (planner(way, "v5e:2x4").plan([mesh(8)]) for way in ways)
    rows = np.prod(IDS) * TABLE[1] * 4
    assert plain.memory.peak_bytes - bags.memory.peak_bytes > rows / on.num_devices / 2
    assert bags.seconds < plain.seconds
