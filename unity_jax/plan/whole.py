"""Ops that every device computes in full, with the reason: what a plan must not leave unsaid.

    sort f32[1000000] at step.py:9:4 (loss): its rule keeps every dimension whole

There are four reasons. A primitive without a rule is always said. Of the others only what is large is: small ops are
rightly computed everywhere, since a collective takes longer.
"""

from __future__ import annotations

import functools
import math

from unity_jax.machine.device import Device
from unity_jax.ops.rule import Shard
from unity_jax.ops.strategies import strategies
from unity_jax.pcg.graph import Graph, Op, nested
from unity_jax.pcg.layout import short_dtype
from unity_jax.pcg.mesh import MeshAxes
from unity_jax.search.assemble import is_free
from unity_jax.trace import has_effects
from unity_jax.xla.op_classes import PRODUCTS

LEAST = 2**16
"""Operations in a step from which on an op is large: an accelerator does as many in less time than a collective needs
to start."""
SHARE = 0.01
"""Of the seconds of a device in a step, each op at the peak rate of what does it, from which on an op is large."""
CHOSEN = 0.1
"""The same of all ops together that could be split and are not, as the updates of weights that each device has."""

NO_RULE = "there is no rule for it"
WHOLE = "its rule keeps every dimension whole"
INDIVISIBLE = "no mesh axis splits a dimension that its rule could split"
SLOWER = "the search found no faster way to split it"


def replicated(graph: Graph, device: Device) -> tuple[str, ...]:
    """Lines on the ops of a planned graph that every device computes in full, the longest first.

    Of those that could be split, and which the search did not split, one line stands for all: the table of layouts
    shows what they work on.
    """
    ops = {op: repeat for _, inner, repeat in nested(graph) for op in inner.ops if op.shard}
    reason_of = functools.cache(_reason)
    full = {op: reason_of(op.shard) for op in ops if _in_full(op)}
    if not full:
        return ()
    operations, seconds = functools.cache(_operations), functools.cache(lambda shard: _seconds(shard, device))
    work = {op: repeat * operations(op.shard) for op, repeat in ops.items()}
    took = {op: repeat * seconds(op.shard) for op, repeat in ops.items()}
    everything = sum(took.values())
    lines = {
        f"{_describe(op)}: {reason}": took[op]
        for op, reason in sorted(full.items(), key=lambda item: took[item[0]])
        if reason == NO_RULE or (reason != SLOWER and work[op] >= LEAST and took[op] >= SHARE * everything)
    }
    said = sorted(lines, key=lambda line: -lines[line])
    chosen = {op: took[op] for op, reason in full.items() if reason == SLOWER}
    if sum(work[op] for op in chosen) >= LEAST and sum(chosen.values()) >= CHOSEN * everything:
        said.append(_together(chosen, everything))
    return tuple(said)


def _operations(shard: Shard) -> float:
    """Of one device: its arithmetic, or the elements that it moves."""
    layouts = zip((*shard.op.inputs, *shard.op.outputs), (*shard.operand_layouts, *shard.result_layouts), strict=True)
    return max(shard.flops, *(math.prod(layout.local_shape(t.shape, shard.mesh)) for t, layout in layouts), 0)


def _seconds(shard: Shard, device: Device) -> float:
    """Of one device at its peak rates: matmuls and convolutions in the matrix unit, all else in the vector unit, where
    a decomposition is a chain of small steps and far slower than that; or what memory takes."""
    op, layouts = shard.op, [*shard.operand_layouts, *shard.result_layouts]
    rate = device.flops_per_second(op.inputs[0].dtype if op.name in PRODUCTS else "vector")
    moved = sum(
        math.prod(layout.local_shape(t.shape, shard.mesh)) * t.itemsize
        for t, layout in zip((*op.inputs, *op.outputs), layouts, strict=True)
    )
    return max(shard.flops / rate, moved / device.memory_bandwidth)


def _in_full(op: Op) -> bool:
    """Whether each device of several makes the same results from the same operands."""
    shard = op.shard
    if shard.mesh.num_devices == 1 or shard.rule.fixed is not None or not shard.rule.factors or is_free(shard.op):
        return False
    return all(s < 0 for s in shard.strategy) and (shard.rule.fallback or not has_effects(op))


def _reason(shard: Shard) -> str:
    rule, mesh = shard.rule, shard.mesh
    if rule.fallback:
        return NO_RULE
    for name, size in zip(mesh.names, mesh.sizes, strict=True):
        if any(0 <= s < len(rule.factors) for (s,) in strategies(rule, MeshAxes((name,), (size,)))):
            return SLOWER
    return WHOLE if all(f.kind == "replicate" for f in rule.factors) else INDIVISIBLE


def _describe(op: Op) -> str:
    shapes = ", ".join(f"{short_dtype(t.dtype)}{list(t.shape)}" for t in op.outputs)
    return f"{op.name} {shapes}" + (f" at {op.source}" if op.source else "")


def _together(chosen: dict[Op, float], of: float) -> str:
    largest = max(chosen, key=lambda op: chosen[op])
    others = f" and {len(chosen) - 1} others" if len(chosen) > 1 else ""
    return f"{_describe(largest)}{others}, {sum(chosen.values()) / of:.0%} of the arithmetic: {SLOWER}"
