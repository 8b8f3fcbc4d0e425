"""What a compiler needs of a lowered program that others do not: one row per platform."""

from __future__ import annotations

import dataclasses
from collections.abc import Set
from dataclasses import dataclass

from unity_jax.pcg.graph import Graph, Op


@dataclass(frozen=True)
class Target:
    """**Fields:** `ordered`: collectives wait for each other by data (`lower.order`); `separate`: primitives whose
    results no kernel takes in together with what they were computed from (`separated`)."""

    ordered: bool = False
    separate: frozenset[str] = frozenset()


TARGETS = {
    "cpu": Target(ordered=True),
    # XLA:TPU makes one kernel of `exp(x - max(x))` over a row, a softmax: the maximum becomes a window as long as two
    # rows, `x` and the exponentials are kept in float32. Apart, the maximum is an output of the kernel that makes `x`,
    # which is kept in its own precision, and its readers compute the exponentials themselves. Attention over 4,096
    # positions in bfloat16 on v5e: 8.9 ms and 0.79 GiB of temporaries, 12.1 ms and 1.07 GiB as one kernel; over 512
    # positions 1.36 ms, not 1.43 (the compiler's estimates; `experiments/against_jit.py`).
    "tpu": Target(separate=frozenset({"reduce_max"})),
}
"""Other platforms need nothing."""


def target(platform: str) -> Target:
    return TARGETS.get(platform, Target())


def separated(graph: Graph, names: Set[str]) -> Graph:
    """The same program, with an `optimization_barrier` behind every result of primitives of these names."""
    if not any(op.name in names for op in graph.walk()):
        return graph
    ops: list[Op] = []
    for op in graph.ops:
        op = dataclasses.replace(op, bodies=tuple(separated(body, names) for body in op.bodies))
        if op.name not in names:
            ops.append(op)
            continue
        raw = tuple(dataclasses.replace(t) for t in op.outputs)
        ops.append(dataclasses.replace(op, outputs=raw))
        ops.append(Op("optimization_barrier", raw, op.outputs, eqn=op.eqn, callers=op.callers, backward=op.backward))
    return Graph(graph.inputs, graph.outputs, ops)
