"""Rules for primitives: importing this package fills `rule.RULES`."""

from unity_jax.ops import (
    constraint,
    contraction,
    convolution,
    effects,
    indexing,
    linalg,
    manual,
    random,
    reduction,
    shape,
    sorting,
    window,
)

__all__ = [
    "constraint",
    "contraction",
    "convolution",
    "effects",
    "indexing",
    "linalg",
    "manual",
    "random",
    "reduction",
    "shape",
    "sorting",
    "window",
]
