"""XLA:GPU writes each result that a loop stacks by a kernel of its own, which computes it from what is in memory.

    kernel: reads a, b; writes f(a), g(a, b), h(b)          kernel: reads a; writes f(a)
    f(a) is carried, the others are stacked           ->    kernel: reads a, b; writes g(a, b)
                                                            kernel: reads b; writes h(b)

A loop stacks by `dynamic-update-slice` of an array that is there before. What computes the slice is fused into each of
these, again for each, but no kernel of several results updates anything in place
(https://github.com/openxla/xla/blob/main/xla/service/gpu/gpu_fusible.cc, `IsProducerMultiOutputFusible`). What is in
memory anyway, because it is carried or read elsewhere or comes from a matmul or a reduction, is copied to its stack.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

from unity_jax.pcg.graph import Graph, Op, Tensor
from unity_jax.xla.aliases import base_tensors
from unity_jax.xla.fusion_operands import Reading
from unity_jax.xla.kernel import Kernel
from unity_jax.xla.op_classes import PRODUCTS, REDUCTIONS
from unity_jax.xla.producer_fusion import Absorbed


def absorbed_updates(graph: Graph, absorbed: Absorbed, reading: Reading, carried: int) -> list[Kernel]:
    """The updates of stacks with what is absorbed: they compute it as every reader does.

    **Arguments:** `carried`: see `xla.fusion.kernels`.
    """
    base, found = base_tensors(graph), []
    for t in dict.fromkeys(base.get(t, t) for t in graph.outputs[carried:]):
        made_by = graph.producer.get(t)
        if made_by in absorbed.ops:
            ops, held = list(reading.taken(made_by, t)), list(reading.held(t))
            found.append(Kernel(ops, list(reading.result(t)), [t], held, updates=True))
    return found


def in_place_updates(made: Sequence[Kernel], graph: Graph, reading: Reading, carried: int) -> list[Kernel]:
    """The kernels of the body of a scan, with those apart that do nothing but write into what it stacks."""
    base, outputs = base_tensors(graph), (graph.outputs[:carried], graph.outputs[carried:])
    last, stacked = ({s for t in some for s in reading.result(t)} for some in outputs)
    there = last.union(*((*k.reads, *k.waits) for k in made))
    return [part for k in made for part in ([k] if k.updates else _parted(k, stacked - there, base))]


def _parted(k: Kernel, stacked: Set[Tensor], base: Mapping[Tensor, Tensor]) -> Iterator[Kernel]:
    """A kernel without what is only stacked, and an update for each of that."""
    maker = {t: op for op in k.ops for t in op.outputs}
    apart = [t for t in k.writes if t in stacked and _is_fused(maker[t])]
    whole = [t for t in k.writes if t not in apart]
    if not whole and len(apart) == 1:
        k.updates = True
    if not apart or k.updates:
        yield k
        return
    if whole:
        yield _part(k, whole, base, maker, ())
    for t in apart:
        yield dataclasses.replace(_part(k, [t], base, maker, whole), updates=True)


def _is_fused(op: Op) -> bool:
    """Whether what an op makes is computed in the update that stacks it."""
    return op.name not in PRODUCTS and op.name not in REDUCTIONS and op.move is None and not op.bodies


def _part(
    k: Kernel, wanted: list[Tensor], base: Mapping[Tensor, Tensor], maker: Mapping[Tensor, Op], there: Iterable[Tensor]
) -> Kernel:
    """The kernel that writes some of the results of another one, when others of them are there."""
    needed: set[Op] = set()
    reads: set[Tensor] = set()
    stack = [maker[t] for t in wanted]
    while stack:
        if (op := stack.pop()) in needed:
            continue
        needed.add(op)
        for t in op.inputs:
            source = base.get(t, t)
            if source in maker and source not in there:
                stack.append(maker[source])
            else:
                reads.add(source)
    ops, taken = [op for op in k.ops if op in needed], [t for t in (*k.reads, *k.writes) if t in reads]
    part = dataclasses.replace(k, ops=ops, reads=taken, writes=wanted, counts={}, _uses={})
    part.count(base)
    return part
