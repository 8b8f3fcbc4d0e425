"""Several processes, really: what a cluster does, on one machine."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}

OWN_PARTS = """
import sys, jax, jax.numpy as jnp, numpy as np
import unity_jax as unity
from jax.sharding import PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 1)
process = int(sys.argv[1])
jax.distributed.initialize(sys.argv[2], 2, process)
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))


def step(w, batch):
    return w + batch["x"].sum(0) + batch["t"].sum(1) * batch["lr"], batch["x"]


def agree(found, expected):
    for shard in found.addressable_shards:
        np.testing.assert_array_equal(shard.data, expected[shard.index])


rows, times = np.arange(16.0, dtype=np.float32).reshape(4, 4), np.arange(8.0, dtype=np.float32).reshape(4, 2)
mine = {"x": rows[2 * process :][:2], "t": times[:, process:][:, :1], "lr": np.float32(0.5)}
whole, state = {"x": rows, "t": times, "lr": np.float32(0.5)}, np.ones(4, np.float32)
expected = state + rows.sum(0) + times.sum(1) * 0.5
shapes = jax.eval_shape(lambda: state), jax.eval_shape(lambda: whole)
for spec in (P("x"), P(None, "x"), P()):  # the rows as they are held, across them, and all of them everywhere
    planned = unity.auto_shard(step, mesh=mesh, in_shardings=(None, {"x": spec, "t": P(), "lr": P()}))
    plan = planned.plan(*shapes)
    batch = planned.shard(mine)
    assert batch["x"].shape == (4, 4) and batch["x"].sharding.spec == spec
    new, x = planned(state, batch)
    agree(new, expected)
    agree(x, rows)
    plain = jax.jit(step, in_shardings=plan.in_shardings, out_shardings=plan.out_shardings)
    agree(plain(jax.device_put(state, plan.in_shardings[0]), batch)[0], expected)
    short = planned.shard({**mine, "x": mine["x"][:1]})
    assert short["x"].shape == (2, 4)
committed = jax.device_put(state, jax.local_devices()[0])
agree(planned(committed, whole)[0], expected)
try:
    planned(state, {**whole, "x": rows + process})
except ValueError as error:
    print(error)
if process:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[::-1]), ("x",))
try:
    unity.auto_shard(step, mesh=mesh, in_shardings=(P("x"), P()) if process else None)(state, whole)
except unity.PlanError as error:
    print(error)
"""


SOME_OF_ALL = """
import sys, jax, numpy as np
import unity_jax as unity
from jax.sharding import PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 1)
process = int(sys.argv[1])
jax.distributed.initialize(sys.argv[2], 3, process)
x, devices = np.arange(8, dtype=np.float32), jax.devices()
if process < 2:  # the third has nothing to do with it
    mesh = jax.sharding.Mesh(np.array(devices[:2]), ("x",))
    double = lambda x: x * 2
    found = unity.auto_shard(double, mesh=mesh, in_shardings=P("x"))(x)
    np.testing.assert_array_equal(found.addressable_data(0), 2 * x[4 * process :][:4])
    for pin, given in ((P("x") if process else P(), x), (P("x"), x + process)):
        try:
            unity.auto_shard(double, mesh=mesh, in_shardings=pin)(given)
        except ValueError as error:
            print(error)
"""


def run_workers(script, tmp_path, count):
    """What each of some processes of one cluster prints."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    (tmp_path / "worker.py").write_text(script)
    environment = {**ENVIRONMENT, "UNITY_JAX_CACHE": str(tmp_path)}
    workers = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "worker.py"), str(i), address],
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for i in range(count)
    ]
    found = [worker.communicate() for worker in workers]
    assert not any(worker.returncode for worker in workers), "".join(errors for _, errors in found)
    return [out for out, _ in found]


@pytest.mark.slow
def test_agreement_on_a_mesh_over_some_of_the_processes(tmp_path):
    *busy, idle = run_workers(SOME_OF_ALL, tmp_path, 3)
    for out in busy:
        assert "the processes have different plans of <lambda>" in out
        assert "[0] is not the same in all processes" in out
    assert idle == ""


@pytest.mark.slow
def test_two_processes_train_as_one_does():
    command = [sys.executable, "-m", "experiments.examples.two_processes", "--steps", "3"]
    found = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, text=True, capture_output=True)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "collectives: none" not in found.stdout  # or the processes would have nothing to say to each other


@pytest.mark.slow
def test_parts_of_batches_and_what_differs_between_processes(tmp_path):
    for out in run_workers(OWN_PARTS, tmp_path, 2):
        assert "[1]['x'] is not the same in all processes" in out and ".shard(batch)" in out
        assert "the processes have different plans of step" in out
    assert not list(tmp_path.rglob("*.part"))
