"""One train step in two processes of four CPU devices each, beside the same step in one process of eight.

    python -m experiments.examples.two_processes    # launches both processes, and compares with one
    python -m experiments.examples.two_processes --model gpt --steps 5

The processes must make the same plan, and their losses must be those of one process. Each passes its half of the batch,
and writes and restores its part of a checkpoint half way. On hosts of a cluster, run on each, with its own number:

    python -m experiments.examples.two_processes --coordinator HOST:PORT --processes 2 --process 0

A minute on two cores. The exit code tells whether plans and losses agree.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import models
import unity_jax as unity

console = Console(width=100, highlight=False, markup=False)
DEVICES = 8
TOLERANCE = 1e-5
"""Largest relative difference of losses: collectives between processes add in another order."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mlp", choices=models.names())
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--batch-size", type=int, default=256, help="of all processes together")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--process", type=int, help="be this process, which prints one line for each step")
    parser.add_argument("--coordinator", help="HOST:PORT of process 0 (default: this machine)")
    parser.add_argument("--checkpoint", type=Path, help="folder that all processes see (default: a temporary one)")
    options = parser.parse_args()
    if options.process is not None:
        jax.config.update("jax_num_cpu_devices", DEVICES // options.processes)
        jax.distributed.initialize(options.coordinator, options.processes, options.process)
        print(json.dumps(train(options)), flush=True)
        return 0
    return compare(options)


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Train as one of the processes, or as the only one: the plan's digest and the losses."""
    model = models.get(options.model, options.size, batch_size=options.batch_size)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))  # without mesh= the planner chooses the axes
    anew = unity.Options(cache=None)  # each process makes the plan itself
    step = unity.auto_shard(model.train_step, donate_argnums=0, mesh=mesh, options=anew)
    plan = step.plan(model.abstract_state(), model.abstract_batch())
    digest = hashlib.sha256(str(plan).encode()).hexdigest()[:12]
    state = step.init(model.make_state, jax.random.key(0))
    losses = []
    for i in range(options.steps):
        state, metrics = step(state, step.shard(part(model.make_batch(i))))
        losses.append(float(metrics["loss"]))
        if options.checkpoint is not None and i == options.steps // 2:
            state = saved_and_restored(state, plan, options.checkpoint)
    axes = {str(a): int(n) for a, n in plan.mesh.shape.items()}
    kinds = sorted({f"{c.kind.replace('_', '-')}({','.join(c.axes)})" for c in plan.predicted.collectives})
    return {"plan": digest, "mesh": axes, "collectives": kinds, "losses": losses, "devices": jax.device_count()}


def part(batch: Any) -> Any:
    """The rows of a batch that this process would have loaded."""

    def rows(x: np.ndarray) -> np.ndarray:
        n = len(x) // jax.process_count()
        return x[jax.process_index() * n :][:n]

    return jax.tree.map(rows, batch)


def saved_and_restored(state: Any, plan: unity.Plan, folder: Path) -> Any:
    """The state by way of a checkpoint: each process writes and reads what its devices hold."""
    import orbax.checkpoint as ocp

    def unwrap(leaf: Any) -> Any:  # typed keys as the numbers that they are
        return jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf

    def unwrapped_shape(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        shape = jax.eval_shape(unwrap, leaf)
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=leaf.sharding)

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder.resolve() / "state", jax.tree.map(unwrap, state))
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(
            folder.resolve() / "state", jax.tree.map(unwrapped_shape, plan.abstract_state())
        )
    return jax.tree.map(
        lambda new, old: jax.random.wrap_key_data(new) if unwrap(old) is not old else new, restored, state
    )


def compare(options: argparse.Namespace) -> int:
    """Launch the processes, train in this one too, and compare."""
    jax.config.update("jax_num_cpu_devices", DEVICES)
    with tempfile.TemporaryDirectory() as folder:
        words = ["--coordinator", options.coordinator or f"localhost:{free_port()}", "--checkpoint", folder]
        children = [launch(i, words) for i in range(options.processes)]
        with console.status(f"{options.processes} processes, and one ..."):
            alone = train(options)
            outputs = [child.communicate() for child in children]
    for i, (child, (_, errors)) in enumerate(zip(children, outputs, strict=True)):
        if child.returncode:
            console.print(f"process {i} failed:\n{errors}")
            return 1
    together = [json.loads(out.splitlines()[-1]) for out, _ in outputs]
    found = [alone, *together]
    axes = ", ".join(f"{a}={n}" for a, n in alone["mesh"].items())
    console.print(
        f"{options.model} ({options.size}), mesh {axes}; collectives: {', '.join(alone['collectives']) or 'none'}"
    )
    rows = Table("step", "one process", *(f"process {i}" for i in range(len(together))), box=None, pad_edge=False)
    rows.add_row("plan", *(f["plan"] for f in found))
    for i, losses in enumerate(zip(*(f["losses"] for f in found), strict=True)):
        rows.add_row(str(i), *(f"{loss:.7f}" for loss in losses))
    console.print(rows)
    worst = max(float(np.max(np.abs(np.divide(f["losses"], alone["losses"]) - 1))) for f in together)
    same = len({f["plan"] for f in found}) == 1
    console.print(f"{'The same' if same else 'NOT the same'} plan. Largest relative difference of losses {worst:.1e}.")
    return int(not same or worst > TOLERANCE or any(f["devices"] != DEVICES for f in found))


def launch(process: int, words: list[str]) -> subprocess.Popen[str]:
    """This command again, as one of the processes."""
    environment = {**os.environ, "XLA_FLAGS": ""}
    again = [sys.executable, "-m", "experiments.examples.two_processes", *sys.argv[1:], *words]
    command = [*again, "--process", str(process)]
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
