"""The gradient of a table that is split by rows, compiled for TPUs that are not there."""

import jax
import jax.numpy as jnp
import pytest

import unity_jax as unity
from unity_jax.aot.compiled import CompiledMemory
from unity_jax.aot.topologies import compiled_for, topology
from unity_jax.lower.compile import lower
from unity_jax.ops.numbers import is_scatter
from unity_jax.ops.own_rows import own_rows
from unity_jax.plan.devices import mesh_over

ROWS, WIDTH, IDS = 4_000_000, 128, 2**17


def step(table, accumulated, ids):
    """Bags of four rows, and an update by Adagrad."""

    def loss(table):
        return jnp.mean(jnp.tanh(table[ids].sum(1)) ** 2)

    value, g = jax.value_and_grad(loss)(table)
    accumulated += g**2
    return table - 0.1 * g / jnp.sqrt(accumulated + 1e-6), accumulated, value


@pytest.mark.extra("tpu-aot")
@pytest.mark.parametrize(("bags", "loops"), [("xla", 1), ("choose", 2)])
def test_each_device_adds_its_own_rows(bags, loops):
    table, ids = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32), jax.ShapeDtypeStruct((IDS // 4, 4), jnp.int32)
    sharded = unity.auto_shard(step, machine="v5e:2x4", options=unity.Options(cache=None, bags=bags))
    plan = sharded.plan(table, table, ids)
    (scatter,) = (op for op in plan.pcg.walk() if is_scatter(op))
    assert 0 < own_rows(scatter.shard) < IDS / 4
    compiled = compiled_for(lower(plan.stored, plan.pcg, mesh_over(plan, topology("v5e:2x4"))), "tpu")
    text = compiled.as_text()
    assert text.count(" while(") == loops and "indices_are_sorted=true" in text
    assert (f"f32[{IDS // 4},4,{WIDTH}]" in text) == (bags == "xla"), "rows of all bags together"
    assert " conditional(" not in text, "the platform is known"
    assert 0.75 < plan.predicted.peak_bytes / CompiledMemory.of(compiled).peak < 1.3
