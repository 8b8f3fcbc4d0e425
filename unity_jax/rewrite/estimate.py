"""What a part of a program takes, before it is planned: estimates by which rewrites are ranked."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from unity_jax.cost.compute import op_work, total
from unity_jax.machine.device import Device
from unity_jax.ops.rule import Shard
from unity_jax.pcg.graph import Graph, Op, part
from unity_jax.xla.fusion import kernels
from unity_jax.xla.op_classes import PRODUCTS

_FREE = frozenset("reshape squeeze expand_dims broadcast_in_dim transpose slice split unstack pad copy iota".split())
"""Ops that take no time of their own: they relabel, or are part of what reads them."""


class Seconds(NamedTuple):
    """What a graph takes: `work`, which devices share, and the `starts` of its kernels, which each of them pays."""

    work: float
    starts: float = 0.0

    def less(self, other: Seconds, times: float) -> Seconds:
        return Seconds(self.work - times * other.work, self.starts - times * other.starts)

    def on(self, devices: int) -> float:
        """Of so many devices together."""
        return self.work + devices * self.starts


def by_kernels(device: Device, shard: Callable[[Op], Shard]) -> Callable[[Graph], Seconds]:
    """What a graph takes by itself, as kernels. Loops and branches are left out.

    **Arguments:** `shard`: an op that is not split.
    """

    def seconds(graph: Graph) -> Seconds:
        every = [k for k in kernels(graph, device.compiler) if not k.root.bodies]
        works = [total(op_work(shard(op), device, k.use(op, 0)) for op in k.ops) for k in every]
        started = sum(k.root.times * bool(k.reads) for w, k in zip(works, every, strict=True) if any(w))
        work = sum(k.root.times * w._replace(launches=0).seconds(device) for w, k in zip(works, every, strict=True))
        return Seconds(work, started * device.kernel_overhead)

    return seconds


def saved(before: Graph, after: Graph, seconds: Callable[[Graph], Seconds]) -> Seconds:
    """What a rewritten graph saves: what the ops take that differ, and those around them, less what they take after.

    **Arguments:** `seconds`: what a graph takes by itself.
    """
    old, new = set(before.ops), set(after.ops)
    differ = [op for op in before.ops if op not in new], [op for op in after.ops if op not in old]
    around = _around(before, differ[0]) | _around(after, differ[1])
    around = {op for op in around if op in old and op in new}
    parts = []
    for graph, changed in zip((before, after), differ, strict=True):
        region = around.union(changed)
        ops = [op for op in graph.ops if op in region]
        read = {t for op in graph.ops if op not in region for t in op.inputs}.union(graph.outputs)
        parts.append(part(ops, [t for op in ops for t in op.outputs if t in read]))
    return seconds(parts[0]).less(seconds(parts[1]), 1)


def _around(graph: Graph, ops: Sequence[Op]) -> set[Op]:
    """Some ops, what makes their operands and reads their results, and what that makes and reads."""
    found = set(ops)
    for _ in range(_HOPS):
        makers = {m for op in found for t in op.inputs if (m := graph.producer.get(t)) is not None}
        readers = {r for op in found for t in (*op.inputs, *op.outputs) for r in graph.readers.get(t, ())}
        found |= makers | readers
    return found


_HOPS = 2
"""How far from what differs kernels may become others."""


def one_by_one(device: Device, flops: Callable[[Op], float]) -> Callable[[Graph], Seconds]:
    """Seconds of the ops of a graph, each by itself: its arithmetic or its memory traffic, whichever takes longer, and
    the start of a kernel for products, which are not fused with each other. What a chain of ops would save that are one
    kernel now counts here, before its last one is a matmul."""

    @functools.cache
    def seconds(op: Op) -> float:
        if op.name in _FREE:
            return 0.0
        moved = sum(t.nbytes for t in op.outputs)
        if op.name not in ("gather", "dynamic_slice", "scatter-add"):
            moved += sum(t.nbytes for t in op.inputs if t.literal is None)
        elif op.name == "scatter-add":
            moved += op.inputs[2].nbytes
        rate = device.flops_per_second(op.inputs[0].dtype if op.name in PRODUCTS else "vector")
        start = device.kernel_overhead if op.name in PRODUCTS else 0.0
        return start + max(flops(op) / rate, moved / device.memory_bandwidth)

    return lambda graph: Seconds(sum(op.times * seconds(op) for op in graph.ops))
