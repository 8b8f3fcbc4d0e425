"""What of the kernels of a loop writes into its stacks, on programs small enough to say by hand."""

import jax
import jax.numpy as jnp
import pytest

from unity_jax.program import trace
from unity_jax.xla.traffic import Traffic


def f32(*dims):
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def body(step, compiler):
    """The kernels of a loop: their ops, how many arrays they read and write; `*`: they update a stack."""
    graph = trace(lambda c, xs: jax.lax.scan(step, c, xs), (f32(8, 8), f32(5, 8, 8)), {}).graph
    (scan,) = [op for op in graph.ops if op.name == "scan"]
    found = Traffic.of(graph, compiler).kernels[scan.bodies[0]]
    return [f"{' '.join(op.name for op in k.ops)} {len(k.reads)}->{len(k.writes)}{'*' * k.updates}" for k in found]


def activations(c, x):
    """Two values that are stacked only, of one that is carried."""
    y = jnp.tanh(c + x)
    return y, (1 - y * y, jnp.exp(c * 2))


@pytest.mark.parametrize(
    ("compiler", "expected"),
    [
        ("gpu", ["add tanh 2->1", "mul sub 1->1*", "mul exp 1->1*"]),
        ("tpu", ["add tanh mul sub 2->2", "mul exp 1->1"]),
    ],
)
def test_what_is_only_stacked_is_computed_as_it_is_written(compiler, expected):
    assert body(activations, compiler) == expected


def test_what_is_read_elsewhere_is_computed_again():
    """Nothing but the reduction needs the sum in memory, which it computes: so does the update."""
    assert body(lambda c, x: (c - jnp.sum(c + x, 1, keepdims=True), c + x), "gpu") == [
        "add reduce_sum 2->1",
        "broadcast_in_dim sub 2->1",
        "add 2->1*",
    ]


def test_what_a_matmul_makes_is_no_update():
    assert body(lambda c, x: (c, c @ x), "gpu") == ["dot_general 2->1"]
