"""What XLA:GPU is seen to estimate for products and collectives of eight H100, near enough to order steps by."""

import jax
import jax.numpy as jnp
import pytest

from unity_jax.cost.estimates import Estimates
from unity_jax.machine.machine import Machine
from unity_jax.network.collectives import Collective
from unity_jax.ops.rule import Shard
from unity_jax.ops.rules import rule_of
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.program import trace
from unity_jax.xla.fusion import kernels

H100 = Machine.preset("h100:8")


def product(rows, depth, columns, made):
    """Microseconds of a product of bfloat16."""
    x, w = jax.ShapeDtypeStruct((rows, depth), jnp.bfloat16), jax.ShapeDtypeStruct((depth, columns), jnp.bfloat16)
    graph = trace(lambda x, w: jnp.matmul(x, w, preferred_element_type=made), (x, w), {}).graph
    (op,) = graph.ops
    op.shard = Shard(op, rule_of(op), MeshAxes(("x",), (1,)), (-1,))
    (kernel,) = kernels(graph, "gpu")
    return Estimates(H100).kernel(kernel)


@pytest.mark.parametrize(
    ("sizes", "logged"),
    [
        ((8192, 8192, 2048), 362.0),
        ((65536, 256, 64), 25.4),
        ((32768, 1024, 512), 91.0),
        ((4096, 1024, 1024), 17.3),
        ((2048, 32, 1000), 1.0),
    ],
)
def test_products_of_bfloat16(sizes, logged):
    assert product(*sizes, jnp.bfloat16) == pytest.approx(logged, rel=0.25)


@pytest.mark.parametrize(
    ("sizes", "logged"), [((8192, 2048, 50257), 138332.0), ((1024, 65536, 64), 958.0), ((4864, 1024, 3816), 3307.4)]
)
def test_products_into_float32_and_in_parts_are_taken_for_long(sizes, logged):
    made = jnp.bfloat16 if sizes[1] == 65536 else jnp.float32
    assert product(*sizes, made) == pytest.approx(logged, rel=0.25)


@pytest.mark.parametrize(
    ("kind", "nbytes", "logged"),
    [
        ("all_reduce", 33554432, 225.9),
        ("all_gather", 33554432, 129.4),
        ("reduce_scatter", 67108864, 218.6),
        ("all_to_all", 16000000, 100.7),
    ],
)
def test_collectives(kind, nbytes, logged):
    def seconds(*sizes):
        return Estimates(H100).collectives([Collective(kind, ("x",), n, 1, 1, 1e-6, "") for n in sizes])

    assert seconds(nbytes) == pytest.approx(logged, rel=0.1)
    assert seconds(nbytes // 2, nbytes // 2) == seconds(nbytes) < 2 * seconds(nbytes // 2)
