"""The planner runs collectives as rings where the simulated step is faster, and nowhere else."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import unity_jax as unity
from unity_jax import _compat
from unity_jax.network.reshard import Resharder
from unity_jax.pcg.graph import nested
from unity_jax.plan.record import from_record
from unity_jax.planning import rebuild
from unity_jax.search.candidate import finish
from unity_jax.search.decompose import matches
from unity_jax.search.rule_cache import RuleCache

LARGE = {"v5e:2x4": (16384, 4096, 16384), "h100:8": (16384, 8192, 16384)}


def layer(x, w1, w2):
    return x + jax.nn.gelu(x @ w1) @ w2


def model(x, weights):
    return jax.lax.scan(lambda x, w: (layer(x, *w), None), x, weights)[0]


@functools.cache
def plan(machine, tokens, width, hidden):
    """Megatron's tensor parallel MLP, on sequences that are split between the products: a layer, then three in a
    loop."""
    axis = _compat.abstract_mesh(("x",), (8,))

    def array(spec, *shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(axis, spec))

    def fn(x, first, rest):
        return model(layer(x, *first), rest)

    first = array(P(None, "x"), width, hidden), array(P("x"), hidden, width)
    rest = array(P(None, None, "x"), 3, width, hidden), array(P(None, "x"), 3, hidden, width)
    tokens = array(P("x"), tokens, width)
    return unity.plan(fn, tokens, first, rest, machine=machine, mesh=axis, out_shardings=tokens.sharding)


def with_rings(found, rings):
    """The same decisions with other rings."""
    rules = RuleCache()
    decisions = from_record(found.program.graph, found.record, found.axes, rules)
    decisions = dataclasses.replace(decisions, rings=rings)
    return finish(found.program, decisions, Resharder(found.priced_on, found.axes), rules, "")


def shifts(graph):
    return [op for op in graph.walk() if op.name == "shift"]


@pytest.mark.parametrize("machine", LARGE)
def test_exposed_collectives_become_rings_where_that_is_faster(machine):
    found = plan(machine, *LARGE[machine])
    assert any(op.name == "shift" for op in found.pcg.ops), "in the open"
    assert any(op.name == "shift" for _, g, n in nested(found.pcg) for op in g.ops if n == 3), "in the loop"
    assert len(shifts(found.pcg)) == 7 * len(found.record.rings)
    without = with_rings(found, frozenset())
    assert found.predicted.step_seconds < 0.98 * without.seconds
    assert found.predicted.exposed_communication_seconds < 0.8 * without.timeline.exposed_communication_seconds


@pytest.mark.parametrize("machine", LARGE)
def test_small_products_do_not_wait_for_eight_latencies(machine):
    found = plan(machine, 256, 256, 512)
    without = with_rings(found, frozenset())
    places = {p for _, g, _ in nested(without.graph) for m in matches(g, without.mesh) for p in m.places}
    assert found.record.rings == () and places
    assert with_rings(found, frozenset(places)).seconds > found.predicted.step_seconds


def test_a_plan_with_rings_is_read_back_and_told(tmp_path):
    found = plan("v5e:2x4", *LARGE["v5e:2x4"])
    found.save(tmp_path / "plan.json")
    loaded = unity.Plan.load(tmp_path / "plan.json")
    again = rebuild(found.program, loaded, loaded.mesh, found.priced_on, found.pins)
    assert again.record == found.record and again.predicted == found.predicted
    assert str(again.pcg) == str(found.pcg)
    assert "permute (all-gather)" in str(found) and "permute (reduce-scatter)" in str(found)
    assert "before: permute over x of a decomposed all_gather, 16 MiB" in found.explain("dot_general")
    assert "after: permute over x of a decomposed reduce_scatter, 16 MiB" in found.explain("dot_general")


def test_no_permute_waits_for_the_product_beside_it():
    """Beside every pass there is a product of its ring that neither waits for it nor is waited for, and never two:
    XLA:GPU would put all of them beside the last passes."""
    graph = plan("v5e:2x4", *LARGE["v5e:2x4"]).pcg
    before = {}  # all that an op waits for
    for op in graph.ops:
        made = {graph.producer[t] for t in op.inputs if t in graph.producer}
        before[op] = made.union(*(before[p] for p in made))
    products = [op for op in graph.ops if op.name == "dot_general"]
    rings = {"all_gather": products[:8], "reduce_scatter": products[8:]}
    kinds = {"all_gather": 0, "reduce_scatter": 0}
    for op in shifts(graph):
        if op in before:  # not in the loop
            kinds[op.move.of] += 1
            beside = [p for p in rings[op.move.of] if p not in before[op] and op not in before[p]]
            assert 1 <= len(beside) <= 2  # two where passes go in two directions
    assert kinds == {"all_gather": 7, "reduce_scatter": 7} and len(products) == 16


def test_buffers_of_a_ring_count():
    """Gathered rows are as many bytes as their shards together; a ring holds those that travel, and no more."""
    found = plan("h100:8", *LARGE["h100:8"])
    without = with_rings(found, frozenset())
    gather = next(op for op in without.graph.walk() if op.name == "combine")
    whole = gather.outputs[0].nbytes
    assert without.memory.peak_bytes - whole < found.predicted.peak_bytes


@pytest.mark.parametrize("machine", LARGE)
def test_never_worse_near_where_rings_begin_to_pay(machine):
    for tokens, width, hidden in ((2048, 2048, 8192), (8192, 2048, 4096)):
        found = plan(machine, tokens, width, hidden)
        assert found.predicted.step_seconds <= with_rings(found, frozenset()).seconds
