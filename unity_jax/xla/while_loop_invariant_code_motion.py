"""XLA:TPU casts before a loop what all iterations cast of it
(https://github.com/openxla/xla/blob/main/xla/service/while_loop_invariant_code_motion.cc).

    scan reads b0 of 800 bytes (each iteration casts)   ->   copy of b0 to b1 of 400 bytes;  scan reads b1
"""

from __future__ import annotations

import math

from unity_jax.pcg.graph import Op, Tensor
from unity_jax.pcg.loops import Scan
from unity_jax.xla.aliases import base_tensors, is_alias
from unity_jax.xla.copies import read_copy
from unity_jax.xla.module import Module


def while_loop_invariant_code_motion(module: Module) -> None:
    before, module.instructions = module.instructions, []
    for loop in before:
        if loop.opcode == "scan" and loop.kernel is not None:
            for t, size in _cast(module, loop.kernel.root).items():
                read_copy(module, loop, t, size)
        module.add(loop)


def _cast(module: Module, root: Op) -> dict[Tensor, float]:
    """What the iterations of a loop cast all that they read of, and its bytes then."""
    found: dict[Tensor, float] = {}
    (body,), roles = root.bodies, Scan.of(root.params)
    base, carried = base_tensors(body), set(body.inputs[roles.carried])
    sizes: dict[Tensor, float] = {}  # what is read of each is at most of so many bytes an element
    for op in body.ops:
        size = op.outputs[0].itemsize if op.name == "convert_element_type" else math.inf
        for x in op.inputs if not is_alias(op) else ():
            inner = base.get(x, x)
            sizes[inner] = max(size, sizes.get(inner, 0.0))
    for t, inner in zip(root.inputs, body.inputs, strict=True):
        size = sizes.get(inner, math.inf)
        if inner not in carried and size < t.itemsize:
            found[module.base.get(t, t)] = module.storage(t) * size / t.itemsize
    return found
