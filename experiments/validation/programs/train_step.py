"""What a validation program is: a pure train step with the shapes of its arguments, and a maker of real ones."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

Make = Callable[[Any], tuple[Any, Any]]


@dataclass(frozen=True, eq=False)
class TrainStep:
    """A whole train step, as its user hands it to `jax.jit`.

    **Fields:** `step(state, batch) -> (state, metrics)`, where `metrics["loss"]` is a scalar and each leaf of the state
    keeps its shape and dtype; `arguments`: `(state, batch)` as pytrees of ShapeDtypeStructs; `make(seed)`: the same as
    arrays, which at full size are gigabytes; `donate_argnums`: the state; `source`: a sentence on where it comes from.
    """

    step: Callable[[Any, Any], tuple[Any, dict[str, Any]]]
    arguments: tuple[Any, Any]
    make: Make
    source: str
    donate_argnums: int = 0


def of(step: Callable[[Any, Any], tuple[Any, dict[str, Any]]], make: Make, source: str) -> TrainStep:
    """A train step whose arguments are what `make` would return, which is traced and not run."""
    return TrainStep(step, jax.eval_shape(functools.partial(make, 0)), make, source)
