"""What an all-gather sends: casts and copies run on the other side of it where that is less."""

import jax
import jax.numpy as jnp
import pytest

from unity_jax.cost.tasks import COLLECTIVES, tasks
from unity_jax.machine.machine import Machine
from unity_jax.network.reshard import Resharder
from unity_jax.pcg.layout import Layout
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.program import trace
from unity_jax.search.assemble import Decisions, assemble
from unity_jax.search.rule_cache import RuleCache
from unity_jax.xla.convert_mover import sent
from unity_jax.xla.traffic import Traffic

MESH, MACHINE = MeshAxes(("x",), (2,)), Machine.preset("h100:2")
F32, BF16 = jnp.float32, jnp.bfloat16


def gathered(fn, dtype, name, factor):
    """A function of f[64, 64] whose op of this name is split along one of its factors, and nothing else."""
    program = trace(fn, (jax.ShapeDtypeStruct((64, 64), dtype),), {})
    decisions = Decisions({op: (factor if op.name == name else -1,) for op in program.graph.ops})
    decisions.layouts = {t: Layout.replicated(2) for t in program.graph.inputs}
    decisions.outputs = tuple(Layout.replicated(t.rank) for t in program.graph.outputs)
    return assemble(program.graph, decisions, Resharder(MACHINE, MESH), RuleCache())


def wide(x):
    return jax.lax.sort(x.astype(F32))


def narrow(x):
    return jax.lax.sort((-x).astype(BF16))


def narrow_and_result(x):
    return jax.lax.sort((y := -x).astype(BF16)), y


def some_narrow(x):
    return jax.lax.sort((y := -x).astype(BF16)), jax.lax.sort(y)


def plain(x):
    return jax.lax.sort(-x)


def copies(x):
    return jax.lax.sort(jax.lax.broadcast_in_dim(x[0], (64, 64), (1,)))


def copies_of_one_row(x):
    return jax.lax.sort(jax.lax.broadcast_in_dim(x[:1], (64, 64), (0, 1)))


@pytest.mark.parametrize(
    ("fn", "dtype", "cut", "parts"),
    [
        (wide, BF16, ("convert_element_type", 0), [0.5]),
        (narrow, F32, ("neg", 0), [0.5]),
        (narrow_and_result, F32, ("neg", 0), []),
        (some_narrow, F32, ("neg", 0), []),
        (plain, F32, ("neg", 0), []),
        (copies, F32, ("broadcast_in_dim", 1), [0.0]),
        (copies, F32, ("broadcast_in_dim", 0), []),  # columns of the row that are not everywhere
        (copies_of_one_row, F32, ("broadcast_in_dim", 1), [0.0]),
    ],
)
def test_casts_and_copies_move_to_the_cheaper_side(fn, dtype, cut, parts):
    planned = gathered(fn, dtype, *cut)
    assert any(op.move is not None and op.move.kind == "combine" for op in planned.ops)
    assert list(sent(planned).values()) == parts
    made = [t for t in tasks(planned, Traffic.of(planned, "gpu"), MESH, MACHINE) if t.stream == COLLECTIVES]
    assert len(made) == (parts != [0.0]) * sum(
        op.move is not None and op.move.kind == "combine" for op in planned.ops
    )
    for task in made:
        assert task.seconds == pytest.approx(task.collective.seconds * (parts or [1.0])[0])


def test_a_cast_that_widens_after_a_gather_sends_what_it_is():
    planned = gathered(lambda x: jax.lax.sort((-x).astype(F32)), BF16, "neg", 0)
    assert sent(planned) == {}
