import importlib.util
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from unity_jax.aot.collectives import bytes_difference, stablehlo_collectives
from unity_jax.aot.compiled import CompiledMemory
from unity_jax.aot.sites import compiled_collectives
from unity_jax.aot.topologies import topology
from unity_jax.machine.machine import Machine
from unity_jax.pcg.mesh import MeshAxes


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is not None, reason="libtpu is installed")
def test_the_missing_extra_is_named():
    with pytest.raises(ImportError, match=r"unity_jax\[tpu-aot\]"):
        topology("v5e:2x4")


@pytest.mark.extra("tpu-aot")
def test_compiles_for_a_tpu_slice():
    before = dict(os.environ)
    mesh = Mesh(np.array(topology("v5e:2x4")).reshape(2, 4), ("data", "model"))
    assert dict(os.environ) == before

    def block(x, w):
        y = jnp.tanh(x @ lax.all_gather(w, "data", tiled=True))
        return lax.psum_scatter(y, "model", tiled=True), lax.ppermute(y, "data", [(0, 1), (1, 0)])

    spmd = jax.shard_map(block, mesh=mesh, in_specs=(P("data"), P("data")), out_specs=P(), check_vma=False)
    shape = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
    lowered = jax.jit(spmd).lower(shape, shape)
    axes = MeshAxes(("data", "model"), (2, 4))
    planned = stablehlo_collectives(lowered.as_text(), axes)
    assert [(c.kind, c.axes) for c in planned] == [
        ("all_gather", ("data",)),
        ("permute", ("data",)),
        ("reduce_scatter", ("model",)),
    ]
    assert bytes_difference(planned, compiled_collectives(lowered.compile().as_text(), axes)) == []


@pytest.mark.extra("tpu-aot")
def test_a_tpu_needs_less_than_it_reports():
    """What it reports, with gaps counted twice, is more than there is: it compiles."""
    device = SingleDeviceSharding(topology("v5e:2x2")[0])

    def loss(weights, x):
        layer = jax.checkpoint(lambda x, w: (x + jnp.tanh(x @ w) @ w.T, None))
        return (lax.scan(layer, x, weights)[0].astype(jnp.float32) ** 2).sum()

    shapes = ((32, 2048, 2048), (110_592, 2048))
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=device) for shape in shapes]
    memory = CompiledMemory.of(jax.jit(jax.grad(loss)).lower(*args).compile())
    limit = Machine.preset("v5e:2x2").device.memory_bytes
    assert memory.peak <= limit < memory.argument + memory.output + memory.temp - memory.alias


@pytest.mark.extra("tpu-aot")
def test_an_unknown_slice():
    with pytest.raises(ValueError, match="no TPU topology is called 'v9:4x4'"):
        topology("v9:4x4")


def test_a_machine_that_no_compiler_knows():
    with pytest.raises(ValueError, match="nothing compiles for 'cpu:8' ahead of time: name a TPU slice or one of h100"):
        topology("cpu:8")
