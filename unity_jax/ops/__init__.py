"""Rules for primitives: importing this package fills `rule.RULES`."""

from unity_jax.ops import contraction, convolution, indexing, random, reduction, shape, sorting, window

__all__ = ["contraction", "convolution", "indexing", "random", "reduction", "shape", "sorting", "window"]
