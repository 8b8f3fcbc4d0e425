"""What a call of a planned step takes beyond one of `jax.jit`: steps of many small leaves, eight virtual CPU devices.

    python experiments/dispatch.py
    python experiments/dispatch.py --leaves 100,400 --rounds 200

Both functions have the same layouts, donate their state and get what their last call returned; nothing is to be moved.
They run in turns, and the ratio is the median of those of neighbours in time: from the call until it returns, with what
it started not yet done.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import unity_jax as unity
from unity_jax.text import seconds

WARM_UP = 3
"""Rounds that do not count."""


def step(state: list[jax.Array], batch: dict[str, jax.Array]) -> tuple[list[jax.Array], dict[str, jax.Array]]:
    return [x + batch["x"] for x in state], {"sum": 2 * batch["x"]}


def measured(leaves: int, rounds: int) -> tuple[float, float, float]:
    """Seconds of a call of ours and of `jax.jit`, and the ratio."""

    def arguments() -> tuple[Any, Any]:
        return [jnp.ones(8) for _ in range(leaves)], {"x": jnp.ones(())}

    planned = unity.auto_shard(step, donate_argnums=0, options=unity.Options(cache=None, rewrite=False))
    plan = planned.plan(*arguments())
    jitted = jax.jit(step, donate_argnums=0, in_shardings=plan.in_shardings, out_shardings=plan.out_shardings)
    functions: tuple[Callable[..., Any], ...] = planned, jitted
    state, batch = zip(*(jax.device_put(arguments(), plan.in_shardings) for _ in functions), strict=True)
    states, took = list(state), [[], []]
    for _ in range(rounds + WARM_UP):
        for i, function in enumerate(functions):
            start = time.perf_counter()
            states[i], _ = function(states[i], batch[i])
            took[i].append(time.perf_counter() - start)
            jax.block_until_ready(states[i])
    ours, theirs = (t[WARM_UP:] for t in took)
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    return statistics.median(ours), statistics.median(theirs), ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leaves", default="100,400,1200")
    parser.add_argument("--rounds", type=int, default=100)
    options = parser.parse_args()
    shown = Table("leaves", "a call of ours", "of jax.jit", "ratio")
    for leaves in map(int, options.leaves.split(",")):
        ours, theirs, ratio = measured(leaves, options.rounds)
        shown.add_row(str(leaves), seconds(ours), seconds(theirs), f"{ratio:.2f}")
    Console(width=100).print(shown)


if __name__ == "__main__":
    main()
