"""XLA:GPU makes one Triton kernel of a reduction of rows and what follows from it; that writes over nothing
(https://github.com/openxla/xla/blob/main/xla/service/gpu/transforms/softmax_rewriter_triton.cc).

    max = reduce(x);  exp reads x, max, in place of x   ->   exp has a buffer of its own
"""

from __future__ import annotations

from unity_jax.pcg.graph import Tensor
from unity_jax.xla.module import Module
from unity_jax.xla.op_classes import REDUCTIONS


def softmax_rewriter(module: Module) -> None:
    reduced: dict[Tensor, frozenset[Tensor]] = {}  # what reductions read
    for i in module.instructions:
        if (kernel := i.kernel) is None:
            continue
        if not any(op.name == "transpose" for op in kernel.ops):
            rows = (reduced[t].difference([t]) for t in kernel.reads if t in reduced)
            if any(r.intersection(kernel.reads) for r in rows):
                i.writes_over = False
        if kernel.root.name in REDUCTIONS:
            whole = frozenset((*kernel.reads, *(b.tensor for b in i.makes)))
            reduced.update(dict.fromkeys(kernel.root.outputs, whole))
