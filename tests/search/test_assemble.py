"""Planned graphs: what decisions become, op by op."""

import jax
import jax.numpy as jnp
import pytest

from unity_jax.machine.machine import Machine
from unity_jax.network.reshard import Resharder
from unity_jax.pcg.layout import Layout
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.program import trace
from unity_jax.search.assemble import Decisions, assemble, is_free
from unity_jax.search.rule_cache import RuleCache

AXES = MeshAxes(("x",), (8,))
WHOLE, ROWS, COLUMNS = Layout(((), ())), Layout((("x",), ())), Layout(((), ("x",)))


def s(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def planned(fn, *args, strategies=(), inputs=None, outputs=None, held=(), keep=True):
    """The planned graph of `fn`: `strategies` by op name, all else replicated; `held`: layouts by name of the op."""
    program = trace(fn, args, {})
    graph, rules = program.graph, RuleCache()
    decisions = Decisions(keep=keep)
    named = dict(strategies)
    for op in graph.walk():
        if not op.bodies and op.name != "optimization_barrier" and not is_free(op):
            decisions.strategies[op] = named.get(op.name, (-1,))
        if op.name in dict(held):
            decisions.layouts[op.outputs[0]] = dict(held)[op.name]
    for i, t in enumerate(graph.inputs):
        decisions.layouts[t] = (inputs or {}).get(i, Layout.replicated(t.rank))
    decisions.outputs = tuple((outputs or {}).get(i, Layout.replicated(t.rank)) for i, t in enumerate(graph.outputs))
    return assemble(graph, decisions, Resharder(Machine.preset("h100:8"), AXES), rules)


def names(graph):
    return [op.name for op in graph.ops]


def test_readers_of_one_layout_share_a_gather():
    graph = planned(lambda x: (jnp.sin(x), jnp.cos(x), jnp.tanh(x)), s(16, 8), inputs={0: ROWS})
    assert names(graph) == ["combine", "sin", "cos", "tanh"]


def test_a_slice_is_taken_from_what_was_gathered_already():
    graph = planned(lambda x: (jnp.sin(x), jnp.cos(x)), s(16, 8), inputs={0: ROWS}, strategies={"cos": (1,)},
                    outputs={1: COLUMNS})  # fmt: skip
    assert names(graph) == ["combine", "sin", "partition", "cos"]


def test_a_reader_in_the_stored_layout_moves_nothing():
    graph = planned(lambda x: jnp.sin(x), s(16, 8), inputs={0: ROWS}, strategies={"sin": (0,)}, outputs={0: ROWS})
    assert names(graph) == ["sin"]


def test_constants_are_made_where_they_are_needed():
    def fn(x):
        return x + jnp.full((16, 8), 2.0) + jax.lax.broadcasted_iota(jnp.float32, (16, 8), 0)

    graph = planned(fn, s(16, 8), inputs={0: ROWS}, strategies={"add": (0,)}, outputs={0: ROWS})
    assert sorted(names(graph)) == ["add", "add", "broadcast_in_dim", "iota"]
    made = [op.outputs[0].layout for op in graph.ops if op.name in ("iota", "broadcast_in_dim")]
    assert made == [ROWS, ROWS]


def test_a_partial_result_is_reduced_once():
    def fn(x, w):
        y = x @ w
        return jnp.sin(y), jnp.cos(y)

    split = {"dot_general": (1,)}  # the contracted factor
    graph = planned(fn, s(16, 8), s(8, 4), inputs={0: COLUMNS, 1: ROWS}, strategies=split)
    assert names(graph) == ["dot_general", "reduce", "sin", "cos"]


@pytest.mark.parametrize(("held", "move"), [(ROWS, "reduce_scatter"), (WHOLE, "reduce")])
def test_a_result_is_held_in_the_decided_layout(held, move):
    """Readers of a partial result share its reduction, whatever each would have chosen alone."""

    def fn(x, w):
        y = x @ w
        return jnp.sin(y), jnp.cos(y)

    graph = planned(fn, s(16, 8), s(8, 4), inputs={0: COLUMNS, 1: ROWS}, strategies={"dot_general": (1,)},
                    held={"dot_general": held})  # fmt: skip
    assert names(graph)[:2] == ["dot_general", move]
    assert names(graph).count("reduce") + names(graph).count("reduce_scatter") == 1


def test_a_partial_operand_passes_through_a_linear_op():
    def fn(x, w):
        return (x @ w) * 2.0

    graph = planned(fn, s(16, 8), s(8, 4), inputs={0: COLUMNS, 1: ROWS}, strategies={"dot_general": (1,), "mul": (2,)})
    assert names(graph) == ["dot_general", "mul", "reduce"]


def test_a_tensor_finished_by_one_pass_is_not_reduced_again_by_the_other():
    """Two reductions of one tensor may differ in their last bit; a maximum would not find itself in its operand."""

    def fn(x, w):
        def loss(x):
            y = x @ w
            return (y / y.max(1, keepdims=True)).sum()

        return jax.grad(loss)(x)

    graph = planned(fn, s(16, 8), s(8, 4), inputs={0: COLUMNS, 1: ROWS}, strategies={"dot_general": (1,)}, keep=False)
    first = next(op for op in graph.ops if op.name == "dot_general")
    assert first.outputs[0].layout.partial
    assert sum(first.outputs[0] in op.inputs for op in graph.ops) == 1


def gradient_step(x, ws):
    def loss(ws):
        h = x
        for w in ws:
            h = jnp.tanh(h @ w)
        return h.sum()

    return jax.grad(loss)(ws)


def fsdp(keep):
    """Three layers, every weight stored in shards and gathered to be used."""
    shapes = [s(8, 8)] * 3
    inputs = dict.fromkeys((1, 2, 3), ROWS)
    return planned(gradient_step, s(16, 8), shapes, inputs=inputs, outputs=dict.fromkeys(range(3), ROWS), keep=keep)


def gathers(graph):
    return [op for op in graph.ops if op.name == "combine"]


def test_kept_gathers_are_shared_by_both_passes():
    graph = fsdp(keep=True)
    assert len(gathers(graph)) == 3
    assert "optimization_barrier" not in names(graph)


def test_repeated_gathers_stand_behind_barriers():
    graph = fsdp(keep=False)
    maker = {t: op for op in graph.ops for t in op.outputs}
    assert [op.backward for op in gathers(graph)] == [
        False,
        False,
        False,
        True,
        True,
    ]  # the first layer's is not needed
    held = [maker.get(op.inputs[0]) for op in gathers(graph)]
    repeated = [op for op in held if op is not None and op.name == "optimization_barrier"]
    assert sum(op.backward for op in repeated) == 2
    for gather, barrier in zip(gathers(graph), held, strict=True):
        if barrier is None:
            continue
        # The consumer reads both results of the barrier: the gathered weight and the other operand.
        readers = [op for op in graph.ops if gather.outputs[0] in op.inputs]
        assert len(readers) == 1 and barrier.outputs[1] in readers[0].inputs


def scaled_step(x, ws):
    def loss(ws):
        h = x
        for w in ws:
            h = jnp.tanh(h * w)
        return h.sum()

    return jax.grad(loss)(ws)


@pytest.mark.parametrize(("rows", "waits"), [(1, False), (16, True)])
def test_an_elementwise_op_waits_for_no_scale(rows, waits):
    """A scale is gathered in both passes; a mask as large as what it multiplies waits for that."""
    inputs, outputs = dict.fromkeys((1, 2, 3), COLUMNS), dict.fromkeys(range(3), COLUMNS)
    graph = planned(scaled_step, s(16, 8), [s(rows, 8)] * 3, inputs=inputs, outputs=outputs, keep=False)
    assert len(gathers(graph)) > 3
    assert ("optimization_barrier" in names(graph)) is waits
