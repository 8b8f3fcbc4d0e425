"""Random programs made of the rule table's primitives.

    program = draw(random.Random(0))         # or any object with the methods of `random.Random`
    program.fn(*program.args)

`ENTRIES` is the table: primitive -> how to draw one application of it to values that exist already, or to new inputs.
Dimensions are drawn from sizes that divide 2, 4 and 8 and sizes that do not. Values stay near 1 in magnitude, and what
is discontinuous (comparisons, sorts, roundings) sees numbers without ties, so that rounding noise changes no result.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tests.numerics.programs import (  # noqa: F401 (fill the table)
    contraction,
    elementwise,
    indexing,
    keys,
    linalg,
    reduction,
    shape,
    users,
    with_kernels,
)
from tests.numerics.programs.control import NESTED, weighted
from tests.numerics.programs.drawer import ENTRIES, FLOAT, Drawer, Program, Skip, grow, kind_of


def finish(d: Drawer, most: int = 8) -> Program:
    """The program with what nothing reads, and some of the rest, as results."""
    read = {i for step in d.steps for i in step.operands}
    made = [v for v, (what, _) in zip(d.values, d.order, strict=True) if what == "step"]
    unread = [v for v in made if v.index not in read]
    rest = [v for v in made if v.index in read]
    outputs = unread[-most:]
    if rest and d.flip(0.5):
        outputs.append(d.choice(rest))
    if d.inputs and d.flip(0.2):  # an input that is a result
        outputs.append(d.values[next(i for i, (what, _) in enumerate(d.order) if what == "input")])
    donate = tuple(i for i in range(len(d.inputs)) if d.flip(0.3))
    return Program(d.function(outputs, 0), tuple(d.inputs), tuple(s.name for s in d.steps), donate)


def draw(rng: random.Random, most: int = 8) -> Program:
    """A random program of up to `most` applications, control flow among them."""
    d = Drawer(rng)
    names = [*weighted(list(ENTRIES)), *NESTED * 5]
    grow(d, d.rng.randint(1, most), names)
    return finish(d)


def trained(program: Program, rng: random.Random) -> Program:
    """A train step: some inputs of a program, less their gradients. Raises `Skip` where there are none."""
    floats = [i for i, x in enumerate(program.args) if kind_of(x.dtype) == FLOAT]
    state = sorted(rng.sample(floats, rng.randint(1, len(floats)))) if floats else []

    def loss(params: list[Any], args: tuple[Any, ...]) -> Any:
        args = list(args)
        for i, x in zip(state, params, strict=True):
            args[i] = x
        return sum(jnp.sin(y).mean() for y in program.fn(*args) if kind_of(y.dtype) == FLOAT)

    def step(*args: Any) -> tuple[Any, ...]:
        params = [args[i] for i in state]
        value, gradients = jax.value_and_grad(loss)(params, args)
        return (*(p - 0.1 * g for p, g in zip(params, gradients, strict=True)), value)

    try:
        jax.eval_shape(step, *program.args)
    except (TypeError, ValueError, NotImplementedError) as e:
        raise Skip(f"{e}") from e
    return Program(step, program.args, (*program.steps, "trained"), tuple(state))


def one_of_each(names: Sequence[str], seed: int, times: int = 2) -> Program:
    """A program with `times` applications of each of these entries, on inputs of their own."""
    d = Drawer(random.Random(seed), fresh=1.0, turns={})
    for name in names:
        done = 0
        for _ in range(20):
            if done < times:
                try:
                    ENTRIES[name](d)
                    done += 1
                except Skip:
                    continue
    return finish(d, most=1000)
