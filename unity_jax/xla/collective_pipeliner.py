"""Which collectives of a loop XLA:GPU runs an iteration later, beside the arithmetic of the next one.

    iteration 0            g0 = dot
    iterations 1 to n - 1  stack[i - 1] = reduce_scatter(g), g = dot
    after the loop         stack[n - 1] = reduce_scatter(g)

It does so with reductions whose results only go into what the loop stacks, as gradients of scanned layers do. The first
iteration is then no part of the loop any more, and what is to be reduced lives from one iteration to the next
(https://github.com/openxla/xla/blob/main/xla/service/collective_pipeliner.h).
"""

from __future__ import annotations

from collections.abc import Sequence

from unity_jax.pcg.graph import Op, Tensor, trips
from unity_jax.pcg.loops import Scan
from unity_jax.xla.aliases import base_tensors
from unity_jax.xla.fusion import Kernel

_REDUCTIONS = frozenset(["reduce", "reduce_scatter"])
_FORMATTING = frozenset("convert_element_type reduce_precision reshape squeeze transpose broadcast_in_dim".split())


def pipelined(scan: Op, kernels: Sequence[Kernel]) -> list[Kernel]:
    """The reductions that run an iteration later, and what brings their results into form for the stack.

    **Arguments:** `kernels`: of the body of the scan.
    """
    if trips(scan) < 2:
        return []
    (body,), roles = scan.bodies, Scan.of(scan.params)
    base = base_tensors(body)
    loose = {base.get(t, t) for t in body.outputs[roles.stacked]} - {base.get(t, t) for t in body.outputs[roles.last]}
    ends: list[Kernel] = []  # what only the stack reads, last first
    for kernel in reversed(kernels):
        if all(t in loose for t in kernel.writes) and (_reduces(kernel) or _forms(kernel)):
            ends.append(kernel)
            loose.update(t for t in kernel.reads if t not in body.inputs and _only_read_by(t, ends, kernels))
        else:
            loose.difference_update(kernel.reads)
    found: list[Kernel] = []
    made: set[Tensor] = set()
    for kernel in reversed(ends):
        if _reduces(kernel) or made.intersection(kernel.reads):
            found.append(kernel)
            made.update(kernel.writes)
    return found


def _reduces(kernel: Kernel) -> bool:
    move = kernel.root.params.get("move")
    return len(kernel.ops) == 1 and move is not None and move.kind in _REDUCTIONS


def _forms(kernel: Kernel) -> bool:
    return all(op.name in _FORMATTING for op in kernel.ops)


def _only_read_by(t: Tensor, ends: Sequence[Kernel], kernels: Sequence[Kernel]) -> bool:
    return all(k in ends for k in kernels if t in k.reads)
