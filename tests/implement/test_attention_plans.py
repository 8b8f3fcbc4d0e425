"""Plans with kernels of attention: where they are chosen, what is priced, and how a plan says so."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import unity_jax as unity
from tests.implement.attentions import by_einsum, drawn, found, gradients, mesh
from unity_jax.machine.machine import Machine
from unity_jax.program import trace
from unity_jax.search import implementing
from unity_jax.search.implementing import implemented
from unity_jax.search.options import SearchOptions


def test_a_plan_says_so_and_is_kept(tmp_path):
    given = drawn(2, jnp.float32)
    step = unity.auto_shard(
        gradients(by_einsum), mesh=mesh(2), options=unity.Options(attention="kernel", rewrite=False, cache=None)
    )
    plan = step.plan(*given)
    (done,) = plan.implementations
    assert "attention by a kernel at" in str(plan) and "attention by a kernel" in plan.explain("attention")
    assert "attentions.py" in done.where
    plan.save(tmp_path / "plan.json")
    again = unity.auto_shard(gradients(by_einsum), mesh=mesh(2), plan=unity.Plan.load(tmp_path / "plan.json"))
    assert again.plan(*given).implementations == plan.implementations
    for a, b in zip(jax.tree.leaves(again(*given)), jax.tree.leaves(step(*given)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("on", ["h100:8", "v5e:2x4"])
def test_kernels_are_chosen_where_they_are_faster(on):
    def case(batch, length):
        t = jax.ShapeDtypeStruct((batch, length, 16, 64), jnp.bfloat16)
        key = jax.eval_shape(lambda: jax.random.key(0))
        return trace(gradients(by_einsum), ([t, t, t], t, jax.ShapeDtypeStruct((batch, length), bool), key), {})

    machine = Machine.preset(on)
    long = case(16, 4096)
    assert implemented(long, machine, SearchOptions()).implementations[0].saved > 0
    if on.startswith("v5e"):  # where scores of few positions stay on the chip
        short = case(16, 32)
        assert implemented(short, machine, SearchOptions()) is short
    assert implemented(long, machine, SearchOptions(attention="xla")) is long


def test_of_equal_layers_one_is_priced(monkeypatch):
    """Time grows with distinct layers, not with all."""
    priced, both = [], implementing._both

    def noting(graph, group):
        priced.append(group)
        return both(graph, group)

    monkeypatch.setattr(implementing, "_both", noting)

    def layers(weights, x):
        for w in weights:
            q, k, v = jnp.moveaxis((x @ w).reshape(*x.shape[:2], 8, 3, 64), 3, 0)
            x = x + jax.nn.dot_product_attention(q, k, v).reshape(x.shape)
        return jnp.sum(x.astype(jnp.float32) ** 2)

    x = jax.ShapeDtypeStruct((32, 1024, 512), jnp.bfloat16)
    weights = [jax.ShapeDtypeStruct((512, 1536), jnp.bfloat16)] * 6
    program = trace(jax.grad(layers), (weights, x), {})
    done = implemented(program, Machine.preset("h100:8"), SearchOptions())
    assert len(done.implementations[0].places) == 6
    assert len(priced) == 1


@pytest.mark.parametrize(
    ("on", "heads", "shared", "features", "dtype"),
    [
        ("h100:8", 16, 1, 256, jnp.bfloat16),
        ("a100:8", 16, 1, 128, jnp.float32),
        ("v5e:2x4", 128, 128, 64, jnp.bfloat16),
    ],
)
def test_what_no_kernel_has_memory_for_is_left(on, heads, shared, features, dtype):
    """Features of many bytes on a GPU, many heads that share keys on a TPU."""
    q, kv = ((32, 2048, n, features) for n in (heads, heads // shared))
    given = [jax.ShapeDtypeStruct(shape, dtype) for shape in (q, kv, kv)]

    def step(q, k, v):
        return jax.grad(lambda *x: jnp.sum(jax.nn.dot_product_attention(*x) ** 2), (0, 1, 2))(q, k, v)

    program = trace(step, tuple(given), {})
    assert len(found(program)) == 1
    assert implemented(program, Machine.preset(on), SearchOptions()) is program


@pytest.mark.parametrize("on", ["cpu:4", "v100-summit:1x6"])
def test_there_are_no_kernels_for_some(on):
    program = trace(gradients(by_einsum), drawn(0, jnp.float32), {})
    assert implemented(program, Machine.preset(on), SearchOptions()) is program


def test_other_settings_are_refused():
    with pytest.raises(ValueError, match=r'attention= takes "choose", "xla" or "kernel", not \'flash\''):
        unity.Options(attention="flash")


def test_a_batch_of_fewer_sequences_than_devices_gets_kernels():
    """Which one mesh axis does not divide: 8 sequences of 16 heads over 64 devices."""

    def loss(q, k, v):
        return jnp.sum(jax.nn.dot_product_attention(q, k, v, is_causal=True) ** 2)

    shapes = (jax.ShapeDtypeStruct((8, 2048, 16, 128), jnp.bfloat16),) * 3
    made = implemented(trace(jax.grad(loss, (0, 1, 2)), shapes, {}), Machine.preset("v5e:8x8"), SearchOptions())
    assert [of.name for of in made.implementations] == ["attention"]
