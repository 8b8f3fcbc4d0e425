"""The first hour of a user, item by item: without the devices, and in other processes."""

import os
import subprocess
import sys

import jax
import pytest

import unity_jax as unity
from tests.api.steps import close, mlp_batch, mlp_state, mlp_step


def test_offline_plan_needs_no_accelerator():
    shapes = jax.eval_shape(mlp_state), jax.eval_shape(mlp_batch)
    plan = unity.plan(mlp_step, *shapes, machine="v5e:4x4", donate_argnums=0)
    assert plan.mesh.size == 16 and plan.machine == "v5e:4x4" and plan.fits
    assert plan.in_shardings[0]["w1"].shard_shape((8, 16))
    with pytest.raises(
        unity.PlanError, match=r"16 devices .* there are 8: it can be read, saved and compared, not run here"
    ):
        unity.auto_shard(mlp_step, machine="v5e:4x4")(mlp_state(), mlp_batch())


@pytest.mark.extra("tpu-aot")
def test_ahead_of_time_topology():
    from jax.experimental import topologies

    devices = topologies.get_topology_desc("v5e:2x4", "tpu").devices
    compiled = unity.auto_shard(mlp_step, mesh=devices).lower(mlp_state(), mlp_batch()).compile()
    assert compiled.memory_analysis().argument_size_in_bytes > 0


def test_sequence_of_devices_compiles_ahead_of_time():
    step = unity.auto_shard(mlp_step, mesh=jax.devices()[:4])
    compiled = step.lower(jax.eval_shape(mlp_state), jax.eval_shape(mlp_batch)).compile()
    args = jax.device_put((mlp_state(), mlp_batch()), step.plan(mlp_state(), mlp_batch()).in_shardings)
    close(compiled(*args), jax.jit(mlp_step)(mlp_state(), mlp_batch()))


def test_plan_over_the_limit_is_returned_and_does_not_run():
    step = unity.auto_shard(mlp_step, memory_limit=500)
    plan = step.plan(mlp_state(), mlp_batch())
    assert not plan.fits and "DOES NOT FIT" in str(plan)
    with pytest.raises(
        unity.MemoryLimitError, match=r"(?s)mlp_step needs .*the limit is 500 B.*\n.*(w1|w2|x).*jax.checkpoint"
    ):
        step(mlp_state(), mlp_batch())


def run_python(code, **environment):
    env = {**os.environ, "JAX_PLATFORMS": "cpu", **environment}
    return subprocess.Popen(
        [sys.executable, "-c", code], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def test_import_touches_nothing_global():
    code = """
import jax
before = dict(jax.config.values)
import unity_jax
from jax.extend.backend import backends
import sys
assert dict(jax.config.values) == before
import jax._src.xla_bridge as bridge
assert not bridge.backends_are_initialized()
jax.config.update("jax_num_cpu_devices", 2)  # still possible
assert len(jax.devices()) == 2
print("fine")
"""
    code = code.replace("from jax.extend.backend import backends\nimport sys\n", "")
    process = run_python(code, XLA_FLAGS="")
    out, _ = process.communicate(timeout=60)
    assert out == "fine\n", out


def test_two_processes(tmp_path):
    code = """
import sys, socket
import jax, numpy as np
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(f"localhost:{sys.argv[1]}", num_processes=2, process_id=int(sys.argv[2]))
import unity_jax as unity
from jax.sharding import PartitionSpec as P, Mesh
mesh = Mesh(np.array(jax.devices()), ("x",))
step = unity.auto_shard(lambda w, x: (w + x.sum(0), x.mean()), mesh=mesh, in_shardings=(P(), P("x")), out_shardings=P())
w, x = np.ones(4, np.float32), np.arange(16, dtype=np.float32).reshape(4, 4)
plan = step.plan(w, x)
batch = step.shard(x[2 * int(sys.argv[2]):][:2])
assert batch.shape == (4, 4) and batch.sharding.spec == P("x"), batch.sharding
w, mean = step(w, batch)
w, mean = step(w, batch)
print(float(mean), np.asarray(w).tolist(), plan.program_hash)
"""
    import socket

    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = str(s.getsockname()[1])
    code = "import sys\n" + code.replace("sys.argv[1]", repr(port))
    processes = [run_python(code.replace("sys.argv[2]", repr(i)), XLA_FLAGS="", UNITY_JAX_CACHE="") for i in (0, 1)]
    outs = [p.communicate(timeout=120)[0].strip().split("\n")[-1] for p in processes]
    assert outs[0] == outs[1] and outs[0].startswith("7.5 [49.0, 57.0, 65.0, 73.0]"), outs
