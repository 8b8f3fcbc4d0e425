"""What is chosen to be computed again, against the best of all subsets: random chains of layers at random limits.

    python -m experiments.validation.recomputation --count 100

A chain is a train step of up to ten values that the backward pass reads, of random widths, made by products and by what
is elementwise, so that bytes and seconds differ widely. The limit is anywhere between what is live with nothing
computed again and the least that any subset needs. Prints in how many chains the choice takes at most 5 % more seconds
than the best subset that fits: of what is computed again, and of the whole step.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import argparse
import functools
import itertools
import random
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from unity_jax.machine.machine import Machine
from unity_jax.pcg.graph import Tensor
from unity_jax.pcg.mesh import WHOLE
from unity_jax.program import Program, trace
from unity_jax.residuals.choice import Repeating, Residuals, Timed, added_seconds, choices, timed_by
from unity_jax.residuals.flat import Flat
from unity_jax.rewrite.estimate import by_kernels
from unity_jax.search.rule_cache import RuleCache
from unity_jax.xla.traffic import Traffic

DEVICE = Machine.preset("h100:1").device
WIDTHS = tuple(n * 2**k for k in range(7, 12) for n in (2, 3))
ROWS = (1024, 4096, 16384)
MOST, WORTH, WITHIN = 10, 0.95, 1.05


def chain(rng: random.Random) -> Program:
    """A train step of a random chain."""
    rows, widths, kinds = rng.choice(ROWS), [rng.choice(WIDTHS)], list[str]()
    for _ in range(rng.randint(3, 7)):
        kinds.append(rng.choice(("product", "tanh", "gelu", "normalized", "gated")))
        widths.append(rng.choice(WIDTHS) if kinds[-1] == "product" else widths[-1])
    pairs = zip(kinds, itertools.pairwise(widths), strict=True)
    shapes = [pair if kind == "product" else pair[:1] for kind, pair in pairs]

    def layer(kind: str, w: Any, x: Any) -> Any:
        if kind == "product":
            return x @ w
        if kind == "normalized":
            return w * (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return {"tanh": jnp.tanh, "gelu": jax.nn.gelu, "gated": lambda y: y * jax.nn.sigmoid(y)}[kind](x * w)

    def loss(params: list[Any], x: Any) -> Any:
        for kind, w in zip(kinds, params, strict=True):
            x = layer(kind, w, x)
        return (x**2).mean()

    def step(params: list[Any], x: Any) -> Any:
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, x))

    params = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return trace(step, (params, jax.ShapeDtypeStruct((rows, widths[0]), jnp.float32)), {}, donate_argnums=0)


class Found(NamedTuple):
    """**Fields:** seconds of what is computed again: of the `best` subset and as `chosen`; of the `step` without."""

    best: float
    chosen: float
    step: float
    values: int
    limit: float


def compared(program: Program, rng: random.Random) -> Found | None:
    """Both at a random limit; None where there is nothing to choose."""
    graph, rules = program.graph, RuleCache()
    seconds = by_kernels(DEVICE, lambda op: rules.shard(op, WHOLE, ()))
    traffic = Traffic.of(graph, DEVICE.compiler)
    residuals = Residuals.of(Flat(graph), traffic)
    if not 2 <= len(residuals.spans) <= MOST:
        return None
    repeating = Repeating(residuals)
    peak = float(residuals.profile.max())
    peaks = {freed: float(repeating.profile(freed).max()) for freed in subsets(residuals.spans)}
    least = min(peaks.values())
    if least > WORTH * peak:
        return None
    limit = least + rng.random() * (peak - least)
    takes = spent(repeating, timed_by(seconds, 1))
    best = min(takes(freed) for freed, n in peaks.items() if n <= limit)
    every = choices(graph, traffic, seconds, 1)
    chosen = next((takes(frozenset(choice.freed)) for choice in every if peak - choice.bytes <= limit), float("inf"))
    return Found(best, chosen, seconds(graph).on(1), len(residuals.spans), limit / peak)


def subsets(of: Iterable[Tensor]) -> Iterable[frozenset[Tensor]]:
    every = list(of)
    return (frozenset(some) for n in range(len(every) + 1) for some in itertools.combinations(every, n))


def spent(repeating: Repeating, timed: Timed) -> Callable[[frozenset[Tensor]], float]:
    """Seconds to compute again what is needed while some values are not kept."""

    @functools.cache
    def takes(freed: frozenset[Tensor]) -> float:
        ops = {op for t in freed for op in repeating.leading_to(t, freed)}
        return added_seconds(repeating.graph, ops, freed, timed)

    return takes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    options = parser.parse_args()
    found = list[Found]()
    for seed in itertools.count():
        rng = random.Random(seed)
        row = compared(chain(rng), rng)
        if row is not None:
            found.append(row)
            if row.chosen > WITHIN * row.best:
                print(f"chain {seed}, {row.values} values: {row.chosen * 1e6:,.1f} us, best {row.best * 1e6:,.1f} us")
        if len(found) == options.count:
            break
    again = sum(row.chosen <= WITHIN * row.best for row in found)
    whole = sum(row.step + row.chosen <= WITHIN * (row.step + row.best) for row in found)
    print(f"within 5 % of the best subset: {again} of {len(found)} chains; of the whole step: {whole}")
    sys.exit(again < 0.95 * len(found))


if __name__ == "__main__":
    main()
