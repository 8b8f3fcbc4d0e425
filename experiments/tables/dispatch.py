"""What a call of a planned step takes beyond one of `jax.jit`: steps of many small leaves, eight virtual CPU devices.

    python -m experiments.tables.dispatch
    python -m experiments.tables.dispatch --leaves 100,400 --rounds 200 --state arrays,objects

The state is a list of arrays; arrays of which every three are held as one from call to call (`packed`; `jax.jit` has
all of them); a struct like the `TrainState` of flax.linen; or an object of flax.nnx, beside `nnx.jit`. Both functions
have the same layouts, donate their state and get what their last call returned; nothing is to be moved. They run in
turns, and the ratio is the median of those of neighbours in time: from the call until it returns, with what it started
not yet done.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"

from unity_jax.aot.flags import EIGHT_DEVICES, appended

os.environ["XLA_FLAGS"] = appended("XLA_FLAGS", EIGHT_DEVICES)

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx
from rich.console import Console
from rich.table import Table

import unity_jax as unity
from unity_jax.search import packing
from unity_jax.search.limits import LIMITS
from unity_jax.text import seconds

WARM_UP = 3
"""Rounds that do not count."""

# What can be packed is, though such a step gains nothing by it.
packing.LIMITS = dataclasses.replace(LIMITS, packing_saves=-1.0)

Batch = dict[str, jax.Array]


@flax.struct.dataclass
class TrainState:
    """As that of flax.linen: a struct of the arrays."""

    params: list[jax.Array]


class Module(nnx.Module):
    """An object that holds the arrays."""

    def __init__(self, arrays: list[jax.Array]) -> None:
        self.params = nnx.List([nnx.Param(x) for x in arrays])


def arrays(state: list[jax.Array], batch: Batch) -> tuple[Any, Batch]:
    return [x + batch["x"] for x in state], {"sum": 2 * batch["x"]}


def packed(state: list[jax.Array], batch: Batch) -> tuple[Any, Batch]:
    threes = [jnp.concatenate(state[i : i + 3], 1) + batch["x"] for i in range(0, len(state), 3)]
    return [x for three in threes for x in jnp.split(three, 3, 1)], {"sum": 2 * batch["x"]}


def struct(state: TrainState, batch: Batch) -> tuple[Any, Batch]:
    return state.replace(params=[x + batch["x"] for x in state.params]), {"sum": 2 * batch["x"]}


def objects(state: Module, batch: Batch) -> Batch:
    for param in state.params:
        param[...] += batch["x"]
    return {"sum": 2 * batch["x"]}


class State(NamedTuple):
    """A step, its state of so many arrays, and whether it changes that in place."""

    step: Callable[..., Any]
    make: Callable[[list[jax.Array]], Any] = list
    in_place: bool = False


STATES = {
    "arrays": State(arrays),
    "packed": State(packed),
    "struct": State(struct, TrainState),
    "objects": State(objects, Module, in_place=True),
}


def measured(of: State, leaves: int, rounds: int) -> tuple[float, float, float]:
    """Seconds of a call of ours and of `jax.jit`, and the ratio."""

    def arguments() -> tuple[Any, Any]:
        return of.make([jnp.ones((8, 2)) for _ in range(leaves)]), {"x": jnp.ones(())}

    planned = unity.auto_shard(of.step, donate_argnums=0, options=unity.Options(cache=None, rewrite=False))
    plan = planned.plan(*arguments())
    assert bool(plan.packed) == (of.step is packed)
    if of.in_place:
        jitted = nnx.jit(of.step, donate_argnums=0)
    else:
        jitted = jax.jit(of.step, donate_argnums=0, in_shardings=plan.in_shardings, out_shardings=plan.out_shardings)
    functions: tuple[Callable[..., Any], ...] = planned, jitted
    state, batch = zip(*(jax.device_put(arguments(), plan.in_shardings) for _ in functions), strict=True)
    states, took = list(state), [[], []]
    gc.collect()
    gc.disable()  # as `timeit` does: what both have allocated would be looked through in whichever comes next
    for _ in range(rounds + WARM_UP):
        for i, function in enumerate(functions):
            start = time.perf_counter()
            found = function(states[i], batch[i])
            if not of.in_place:
                states[i], _ = found
            took[i].append(time.perf_counter() - start)
            jax.block_until_ready(jax.tree.leaves(states[i]))
    gc.enable()
    ours, theirs = (t[WARM_UP:] for t in took)
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    return statistics.median(ours), statistics.median(theirs), ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leaves", default="100,400,1200")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--state", default=",".join(STATES))
    options = parser.parse_args()
    shown = Table("state", "leaves", "a call of ours", "of jax.jit", "ratio")
    for name in options.state.split(","):
        for leaves in map(int, options.leaves.split(",")):
            leaves -= leaves % 3 if name == "packed" else 0
            ours, theirs, ratio = measured(STATES[name], leaves, options.rounds)
            shown.add_row(name, str(leaves), seconds(ours), seconds(theirs), f"{ratio:.2f}")
    Console(width=100).print(shown)


if __name__ == "__main__":
    main()
