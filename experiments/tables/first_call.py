"""How long the first call of a step takes on one device, beside that of `jax.jit`: the models of the zoo, tiny.

    python -m experiments.tables.first_call
    python -m experiments.tables.first_call --models mlp,gpt --rounds 3

One device means the identity plan. Every call is the first of a process of its own, which has made the arguments; the
cache of plans is empty. Seconds are from the call until its results are there, the least of the rounds; *of it XLA* is
what the compiler takes, which gets the same program from both.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any, NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
from rich.console import Console
from rich.table import Table

import models
import unity_jax as unity
from unity_jax.text import seconds

MOST = 1.0
"""The seconds that ours may take more."""

FUNCTIONS: dict[str, Any] = {"jax.jit": jax.jit, "ours": unity.auto_shard}

COMPILING = "/jax/core/compile/backend_compile_duration"


class Took(NamedTuple):
    """Seconds of a call, and those of them that XLA took."""

    call: float
    compiler: float


def first(name: str, function: str) -> Took:
    """What the first call in this process takes."""
    model, compiling = models.get(name, "tiny"), []
    state, batch = jax.block_until_ready((model.make_state(0), model.make_batch(0)))
    decorated = FUNCTIONS[function](model.train_step, donate_argnums=0)
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, took, **_: compiling.append(took) if event == COMPILING else None
    )
    start = time.perf_counter()
    jax.block_until_ready(decorated(state, batch))
    return Took(time.perf_counter() - start, sum(compiling))


def measured(name: str, function: str) -> Took:
    """`first`, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "experiments.tables.first_call", "--one", name, function]
        env = {**os.environ, "UNITY_JAX_CACHE": folder}
        run = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return Took(*json.loads(run.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(models.names()))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(first(*given.one)))
        return
    table = Table("model", "jax.jit", "of it XLA", "ours", "of it XLA", "more", "of it not XLA", "")
    for name in given.models.split(","):
        rounds = [[measured(name, function) for function in FUNCTIONS] for _ in range(given.rounds)]
        theirs, ours = map(min, zip(*rounds, strict=True))
        more, compiler = ours.call - theirs.call, ours.compiler - theirs.compiler
        cells = [seconds(x) for x in (*theirs, *ours)]
        table.add_row(name, *cells, f"{more:+.2f} s", f"{more - compiler:+.2f} s", "!" if more > MOST else "")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
