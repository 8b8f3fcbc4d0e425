"""Kernels of attention compute whole blocks (`kernels.grid`): of what they read and write, XLA:GPU keeps padded arrays.

    attention reads b1:25821184, makes b2:25821184   ->   attention reads b1:33554432, makes b2:33554432

What makes an operand pads it while it writes, and what reads a result cuts it while it reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from unity_jax.kernels.spec import AXES, WORD
from unity_jax.kernels.tiles import POSITIONS, padded, whole
from unity_jax.ops.attention import OPS, arrays
from unity_jax.pcg.graph import Op, Tensor
from unity_jax.xla.module import Module


def whole_blocks(module: Module) -> None:
    kernels = (i.kernel for i in module.instructions if i.kernel is not None)
    times = dict(found for k in kernels if k.root.name in OPS for found in _padded(k.root))
    there = ((module.of.get(module.base.get(t, t)), by) for t, by in times.items())
    for b, by in {b: by for b, by in there if b is not None and not b.result}.items():
        b.size *= by


def _padded(op: Op) -> Iterator[tuple[Tensor, float]]:
    """The operands and results of an attention, and how many times as large they are in whole blocks."""
    of = arrays(op)
    queries, keys, features = of["q"].shape[2], of["k"].shape[2], of["q"].shape[3]
    words = whole(keys, POSITIONS) // WORD / math.ceil(keys / WORD)
    times = {"q": whole(queries, POSITIONS) / queries, "k": whole(keys, POSITIONS) / keys, "w": words}
    times["f"] = padded(features, "gpu") / features
    for name, t in of.items():
        yield t, math.prod(times.get(axis, 1.0) for axis in AXES.get(name, ""))
