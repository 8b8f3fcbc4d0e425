"""The ops of the language of rules, a file for each family: importing this package fills `table.OPS`."""

from unity_jax.rewrite.ops import contraction, devices, elementwise, parts, reduction, rows, shape, stacks

__all__ = ["contraction", "devices", "elementwise", "parts", "reduction", "rows", "shape", "stacks"]
